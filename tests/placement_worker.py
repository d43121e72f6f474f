"""The code of each rank in tests/test_placement.py; a script, since ranks are started by running a script again.

placement_worker.py make FOLDER DEVICES    runs FOLDER/cases.json; each rank writes FOLDER/RANK-of-RANKS.json
placement_worker.py die FOLDER SIGNAL      two ranks; rank 1 sends itself the signal in the middle of a text
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

import litspec.placement.heartbeat as heartbeat
from litspec import SpecLLM
from litspec.checkpoint import Checkpoint, open_checkpoint
from litspec.engine import costs
from litspec.placement import LostRank, place, process_rank, share_of
from litspec.placement.tensor_parallel import Shard, load_shard

PROMPTS = ["The quick brown fox", "It was a truth universally acknowledged"]


def texts(case: dict[str, Any], **placing: Any) -> list[dict[str, Any]]:
    """The texts of a case: tokens and counts, no times."""
    if case.get("bytes_alone"):
        # Models as small as these cost what their layers cost; large ones cost what their bytes do.
        costs.CPU = costs.Machine(layer=0.0, byte=1.0, row=0.02, token=0.0)
    llm = SpecLLM.load(case["target"], case["draft"], accelerator="cpu", **case.get("load", {}) | placing)
    if llm.placed.rank > 0 and "spoil" in case:
        {"noise": add_noise, "idle": stop_drafting}[case["spoil"]](llm)
    drafts = watched(llm) if case.get("drafts") else None
    prompts = list(enumerate(PROMPTS))
    if placing.get("placement") == "replicate":
        prompts = [prompts[i] for i in share_of(len(PROMPTS), llm.placed.rank, llm.placed.world_size)]
    found = []
    for settings in case["generate"]:
        for index, prompt in prompts:
            completion = llm.generate(prompt, index=index, **settings)
            stats = completion.stats.as_dict()
            counts = {name: stats[name] for name in ("rounds", "proposed", "accepted")}
            found.append({"token_ids": completion.token_ids, **counts})
    if drafts is not None:
        found.append({"drafts": drafts})
    return found


def watched(llm: SpecLLM) -> list[list[int]]:
    """The drafter's proposals by round, since texts do not show whether drafts are right."""
    seen: list[list[int]] = []
    kind = type(llm.drafter)

    class Watched(kind):
        def propose_batch(self, *args: Any) -> Any:
            proposals = super().propose_batch(*args)
            seen.extend(proposal.tokens.tolist() for proposal in proposals)
            return proposals

    llm.drafter.__class__ = Watched
    return seen


def add_noise(llm: SpecLLM) -> None:
    """Changes this rank's logits of target and draft, and its clock, by more than any device would."""
    for model in (llm.placed.model, llm.placed.draft_model):
        model.lm_head.register_forward_hook(lambda module, args, logits: logits + torch.randn_like(logits))
    clock = time.perf_counter
    time.perf_counter = lambda: clock() + 1000 * torch.rand(()).item()


def stop_drafting(llm: SpecLLM) -> None:
    llm.drafter = None


def logits(case: dict[str, Any], rank: int, ranks: int) -> list[float]:
    """The largest difference between the logits of a sharded model and the reference's, and the reference's size."""
    config, tokens, reference = pickle.loads(Path(case["pickle"]).read_bytes())
    weights = Path(case["weights"])
    checkpoint = Checkpoint(weights.parent, config, weights)
    model = load_shard(checkpoint, Shard(config, rank, ranks), torch.device("cpu"), torch.float32)
    cache = model.make_cache(64)
    first = model.prefill(tokens[:, :-8], cache)
    rest = model.verify(tokens[:, -8:], torch.tensor([tokens.size(1) - 8]), cache, kv_length=64)
    got = torch.cat((first, rest), dim=1)
    return [(got - reference).abs().max().item(), reference.abs().max().item()]


def anonymous_bytes() -> int:
    """Memory of this process that no file backs."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no RssAnon in /proc/self/status")


def loading_bytes(case: dict[str, Any], **placing: Any) -> list[int]:
    """What loading adds to anonymous memory at its peak, and the bytes of the shard."""
    before = anonymous_bytes()
    peak, done = before, False

    def sample() -> None:
        nonlocal peak
        while not done:
            peak = max(peak, anonymous_bytes())
            time.sleep(0.002)

    sampler = threading.Thread(target=sample)
    sampler.start()
    placed = place(open_checkpoint(case["target"]), None, accelerator="cpu", precision="bf16-true", **placing)
    done = True
    sampler.join()
    return [max(peak, anonymous_bytes()) - before, sum(p.numel() * p.itemsize for p in placed.model.parameters())]


def make(folder: Path, devices: int) -> None:
    cases = json.loads((folder / "cases.json").read_text())
    found: dict[str, Any] = {}
    for name, case in cases.items():
        if "weights" in case:
            found[name] = logits(case, torch.distributed.get_rank(), torch.distributed.get_world_size())
        elif name == "memory":
            found[name] = loading_bytes(case, devices=devices, placement="tensor_parallel")
        else:
            found[name] = texts(case, **{"devices": devices, "placement": "tensor_parallel"} | case.get("placing", {}))
    placed = place(open_checkpoint(cases["llama"]["target"]), None, devices=devices, placement="tensor_parallel")
    found["seed"] = placed.share_int(process_rank() + 7)
    ranks = torch.distributed.get_world_size()
    (folder / f"{process_rank()}-of-{ranks}.json").write_text(json.dumps(found))


def die(folder: Path, number: int) -> None:
    heartbeat.BEAT_SECONDS, heartbeat.LOST_SECONDS = 0.2, 3.0
    case = json.loads((folder / "cases.json").read_text())["llama"]
    llm = SpecLLM.load(case["target"], case["draft"], accelerator="cpu", devices=2, placement="tensor_parallel")
    if llm.placed.rank == 1:
        agree, rounds = llm.placed.agree, []

        def last_words(*args: Any) -> Any:
            rounds.append(1)
            if len(rounds) == 3:
                os.kill(os.getpid(), number)
            return agree(*args)

        llm.placed.agree = last_words
    try:
        # A text without stops, so that it cannot end before the third round.
        llm.generate(PROMPTS[0], max_new_tokens=200, min_new_tokens=200, seed=1)
    except LostRank as error:
        # As the command ends: threads that wait for the lost rank would abort the interpreter on its way out.
        print(f"LostRank: {error}", file=sys.stderr, flush=True)
        assert LostRank.seen
        os._exit(2)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        die(Path(sys.argv[2]), getattr(signal, sys.argv[3]))
