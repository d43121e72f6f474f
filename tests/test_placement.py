"""The placement of the weights changes only speed and memory."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import litgpt.model
import placement_worker
import pytest
import torch
from checkpoints import tiny_config, write_checkpoint
from families import FAMILIES, randomise, tiny
from heads import random_dflash, random_eagle, random_mtp, write_folder
from hypothesis import given
from hypothesis import strategies as st
from litgpt.config import Config
from torch.utils._python_dispatch import TorchDispatchMode

from litspec.checkpoint import open_checkpoint
from litspec.errors import InputError
from litspec.placement import place, process_rank, share_of
from litspec.placement.place import default_precision, layer_bytes, weight_bytes
from litspec.placement.sequential import layer_sums, load_sequential, split_layers, split_pair
from litspec.placement.tensor_parallel import Shard

WORKER = Path(__file__).parent / "placement_worker.py"
SIZES = {
    "block_size": 256,
    "n_layer": 2,
    "n_embd": 48,
    "n_head": 6,
    "head_size": 16,
    "vocab_size": 258,
    # 3 ranks do not divide it.
    "padded_vocab_size": 262,
    "intermediate_size": 96,
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    # On 3 ranks its 2 groups of 3 heads are cut at every head.
    "llama": ("Llama-3.2-1B", {"n_query_groups": 2}),
    "qwen-2.5": ("Qwen2.5-0.5B", {"n_query_groups": 2}),
    "gemma-2": (
        "Gemma-2-2b",
        {
            "n_query_groups": 3,
            "attention_scores_scalar": 24,
            "sliding_window_size": 16,
            "sliding_window_indices": [1, 0],
            "attention_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "multi-query": ("falcon-7b", {"n_query_groups": 1}),
}
GREEDY = {"max_new_tokens": 12, "temperature": 0.0, "speculative_k": 4}
COUPLED = {"max_new_tokens": 12, "sampler": "coupled", "seed": 3, "speculative_k": 4}
AUTO = {"max_new_tokens": 16, "temperature": 0.0, "speculative_k": "auto"}
HEADS = ["dflash", "eagle", "mtp"]
REJECTION = {"max_new_tokens": 40, "temperature": 0.7, "seed": 3, "speculative_k": "auto"}


def write_pair(folder: Path, base: str, changes: dict[str, Any], idle_layers: int = 0) -> dict[str, str]:
    """A target with peaked random weights, and as its draft the same with some noise, which is right now and then.

    Args:
        folder: Where to.
        base: A name that litgpt knows.
        changes: To its config.
        idle_layers: Further layers of the target that add nothing to what runs through them.
    """
    config = Config.from_name(base, **SIZES | changes)
    generator = torch.Generator().manual_seed(0)
    model = litgpt.model.GPT(config)
    randomise(model, generator)
    weights = model.state_dict()
    noisy = {k: w + 0.05 * w.std() * torch.randn(w.shape, generator=generator) for k, w in weights.items()}
    deep = Config.from_name(base, **SIZES | changes | {"n_layer": config.n_layer + idle_layers})
    for name, weight in litgpt.model.GPT(deep).state_dict().items():
        weights.setdefault(name, torch.zeros_like(weight))
    target = write_checkpoint(folder / "target", deep, weights=weights)
    return {"target": str(target), "draft": str(write_checkpoint(folder / "draft", config, weights=noisy))}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The cases that the ranks run, by name."""
    folder = tmp_path_factory.mktemp("pairs")
    pairs = {name: write_pair(folder / name, *shape) for name, shape in SHAPES.items()}
    cases = {name: {**pair, "generate": [GREEDY, COUPLED]} for name, pair in pairs.items()}
    llama, qwen = pairs["llama"], pairs["qwen-2.5"]
    cases["noise"] = {**llama, "generate": [AUTO, COUPLED], "spoil": "noise"}
    cases["idle"] = {**llama, "generate": [GREEDY], "spoil": "idle"}
    cases["cut draft"] = {**qwen, "generate": [GREEDY, COUPLED], "load": {"draft_placement": "tensor_parallel"}}
    cases["early exit"] = {**llama, "generate": [GREEDY], "load": {"drafter": "early_exit", "exit_layer": 1}}
    # A draft with two of eight layers increases speed, but would not with half of the target's cost.
    small = write_pair(folder / "small draft", *SHAPES["llama"], idle_layers=6)
    cases["rejection"] = {**small, "generate": [REJECTION], "bytes_alone": True}
    config = Config.from_name(SHAPES["llama"][0], **SIZES | SHAPES["llama"][1])
    heads = folder / "heads"
    random_dflash(config, heads / "dflash")
    write_folder(heads / "eagle", *random_eagle(config, eagle_aux_hidden_state_layer_ids=[1, 0, 1]))
    write_folder(heads / "mtp", *random_mtp(config, 2))
    for name in HEADS:
        head = {"target": llama["target"], "draft": str(heads / name)}
        cases[name] = {**head, "generate": [GREEDY, COUPLED], "drafts": True}
    cases["prompt lookup"] = {**llama, "generate": [GREEDY], "load": {"drafter": "prompt_lookup"}}
    return cases


@pytest.fixture(scope="module")
def alone(cases: dict[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The texts of one process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield {name: placement_worker.texts(without_cut(case)) for name, case in cases.items()}
    torch.set_num_threads(threads)


def without_cut(case: dict[str, Any]) -> dict[str, Any]:
    load = {name: value for name, value in case.get("load", {}).items() if name != "draft_placement"}
    return {**case, "load": load}


def run_ranks(
    folder: Path, cases: dict[str, Any], ranks: int, command: list[str], **more_env: str
) -> list[dict[str, Any]]:
    """Runs the worker and returns what each rank wrote."""
    (folder / "cases.json").write_text(json.dumps(cases))
    env = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")}
    env |= {"OMP_NUM_THREADS": "1"} | more_env
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"{rank}-of-{ranks}.json").read_text()) for rank in range(ranks)]


REFERENCES = [
    "llama-3",
    "qwen-2.5",
    "qwen-3",
    "qwen-3-moe",
    "gemma-2",
    "gemma-3",
    "phi-2",
    "olmo-2",
    "pythia",
    "falcon",
    "mixtral",
    "latent",
]


@pytest.fixture(scope="module")
def two(cases: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Two ranks, of which only the first is started: Fabric starts the other."""
    folder = tmp_path_factory.mktemp("two")
    cases = cases | {"replicas": {**cases["llama"], "placing": {"placement": "replicate"}}}
    for name in REFERENCES:
        config, weights, reference = tiny(name)
        torch.save(weights, folder / f"{name}.pth")
        tokens = torch.randint(config.vocab_size, (1, 40), generator=torch.Generator().manual_seed(1))
        wanted = reference(tokens)[:, -9:]
        (folder / f"{name}.pickle").write_bytes(pickle.dumps((config, tokens, wanted)))
        cases[f"logits {name}"] = {"pickle": str(folder / f"{name}.pickle"), "weights": str(folder / f"{name}.pth")}
    big = tiny_config(n_embd=1024, n_head=8, n_query_groups=8, head_size=128, intermediate_size=4096, n_layer=6)
    with torch.device("meta"):
        names = litgpt.model.GPT(big).state_dict()
    zeros = {name: torch.zeros(weight.shape) for name, weight in names.items()}
    cases["memory"] = {"target": str(write_checkpoint(folder / "big", big, weights=zeros))}
    del zeros
    assert (folder / "big" / "lit_model.pth").stat().st_size > 400e6
    try:
        return run_ranks(folder, cases, 2, [sys.executable, str(WORKER), "make", str(folder), "2"])
    finally:
        (folder / "big" / "lit_model.pth").unlink()


@pytest.fixture(scope="module")
def three(cases: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Three ranks that `fabric run --devices 3` starts, which is torchrun and what it sets here."""
    folder = tmp_path_factory.mktemp("three")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=3", f"--master_port={free_port()}"]
    command = [*torchrun, str(WORKER), "make", str(folder), "1"]
    shapes = {name: cases[name] for name in SHAPES}
    return run_ranks(folder, shapes, 3, command, LT_CLI_USED="1", LT_DEVICES="3", LT_NUM_NODES="1")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("", 0))
        return s.getsockname()[1]


# ---- tensor parallel ----


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_two_ranks_make_the_text_of_one_process_and_accept_as_much(
    name: str, two: list[dict[str, Any]], alone: dict[str, Any]
) -> None:
    assert alone[name] == two[0][name] == two[1][name]
    assert sum(text["accepted"] for text in alone[name]) > 0
    assert any(text["accepted"] < text["proposed"] for text in alone[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_three_ranks_make_the_text_of_one_process_and_accept_as_much(
    name: str, three: list[dict[str, Any]], alone: dict[str, Any]
) -> None:
    assert alone[name] == three[0][name] == three[1][name] == three[2][name]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cut draft", "early exit", "prompt lookup", *HEADS])
def test_any_drafter_drafts_for_a_target_on_two_ranks(
    name: str, two: list[dict[str, Any]], alone: dict[str, Any]
) -> None:
    assert alone[name] == two[0][name] == two[1][name]


@pytest.mark.slow
def test_with_the_rejection_sampler_two_ranks_choose_k_as_one_process_does(
    two: list[dict[str, Any]], alone: dict[str, Any]
) -> None:
    """With this sampler the text depends on k, and so on the modelled costs."""
    assert alone["rejection"] == two[0]["rejection"] == two[1]["rejection"]
    assert all(text["proposed"] > 2 * text["rounds"] / 3 for text in alone["rejection"])
    assert any(0 < text["accepted"] < text["proposed"] for text in alone["rejection"])


@pytest.mark.slow
def test_ranks_agree_though_one_has_other_logits_another_draft_and_another_clock(
    two: list[dict[str, Any]], alone: dict[str, Any]
) -> None:
    assert two[0]["noise"] == two[1]["noise"]
    assert [text["token_ids"] for text in two[0]["noise"]] == [text["token_ids"] for text in alone["noise"]]


@pytest.mark.slow
def test_ranks_agree_though_one_drafts_nothing(two: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    assert alone["idle"] == two[0]["idle"] == two[1]["idle"]


@pytest.mark.slow
def test_a_seed_drawn_by_rank_0_reaches_all_ranks(two: list[dict[str, Any]]) -> None:
    assert [rank["seed"] for rank in two] == [7, 7]


@pytest.mark.slow
@pytest.mark.parametrize("name", REFERENCES)
def test_logits_on_two_ranks_are_the_reference_models(name: str, two: list[dict[str, Any]]) -> None:
    for rank in two:
        difference, size = rank[f"logits {name}"]
        assert difference < 2e-5 * size, f"{name}: {difference} on a scale of {size}"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measures memory as Linux tells it")
def test_a_rank_copies_its_shard_and_no_more(two: list[dict[str, Any]]) -> None:
    for rank in two:
        added, shard = rank["memory"]
        # Cut to bf16 from 400 MB of float32: the whole model would be 200 MB.
        assert 95e6 < shard < 110e6
        assert added < 1.1 * shard + 50e6


@pytest.mark.parametrize(("n_head", "n_query_groups", "ranks"), [(6, 6, 2), (6, 2, 2), (6, 3, 2), (6, 2, 3), (8, 1, 4)])
def test_queries_keys_and_values_are_each_cut_by_heads(n_head: int, n_query_groups: int, ranks: int) -> None:
    config = tiny_config(n_embd=n_head * 4, n_head=n_head, n_query_groups=n_query_groups, head_size=4)
    kinds = [("q", h) for h in range(n_head)] + [(kv, g) for kv in "kv" for g in range(n_query_groups)]
    whole = torch.arange(len(kinds)).repeat_interleave(4)[:, None].expand(-1, config.n_embd)
    served = []
    for rank in range(ranks):
        part = Shard(config, rank, ranks).part("transformer.h.0.attn.qkv.weight", whole)
        heads = [kinds[i] for i in part[::4, 0].tolist()]
        q = [h for kind, h in heads if kind == "q"]
        k = [g for kind, g in heads if kind == "k"]
        assert k == [g for kind, g in heads if kind == "v"]
        assert len(q) % len(k) == 0
        # Attention gives each run of queries the next key: it must be the group that the whole model gives them.
        for i, head in enumerate(q):
            assert k[i // (len(q) // len(k))] == head // (n_head // n_query_groups)
        served += q
    assert served == list(range(n_head))


@pytest.mark.parametrize(
    ("fields", "name", "size"),
    [
        ({"n_head": 6, "n_embd": 48, "n_query_groups": 6}, "n_head", 6),
        ({"n_head": 8, "n_embd": 64, "intermediate_size": 98}, "intermediate_size", 98),
    ],
)
def test_a_size_that_cannot_be_cut_is_named_with_the_number_of_ranks(
    fields: dict[str, int], name: str, size: int
) -> None:
    with pytest.raises(InputError, match=rf"{name} = {size}.* 4 equal parts"):
        Shard(tiny_config(**fields), 0, 4).check()


# ---- ranks that end ----


@pytest.mark.slow
@pytest.mark.parametrize("number", ["SIGKILL", "SIGSTOP"])
def test_a_rank_that_dies_or_hangs_ends_the_others_with_a_sentence(
    number: str, cases: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    (tmp_path / "cases.json").write_text(json.dumps({"llama": cases["llama"]}))
    env = os.environ | {"MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    ranks = []
    for rank in range(2):
        # As SLURM would start them.
        slurm = {"SLURM_NTASKS": 2, "SLURM_NTASKS_PER_NODE": 2, "SLURM_PROCID": rank, "SLURM_LOCALID": rank}
        slurm |= {"SLURM_NODEID": 0, "SLURM_NNODES": 1, "SLURM_NODELIST": "127.0.0.1", "SLURM_JOB_NAME": "test"}
        ranks.append(
            subprocess.Popen(
                [sys.executable, str(WORKER), "die", str(tmp_path), number],
                env=env | {name: str(value) for name, value in slurm.items()},
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        if number == "SIGKILL":
            assert ranks[1].wait(timeout=300) == -signal.SIGKILL
        else:
            while os.waitpid(ranks[1].pid, os.WNOHANG | os.WUNTRACED)[0] == 0:
                time.sleep(0.05)
        began = time.monotonic()
        _, stderr = ranks[0].communicate(timeout=60)
        assert time.monotonic() - began < 60
        assert ranks[0].returncode == 2
        assert "ended or" in stderr and "ends too" in stderr
    finally:
        for process in ranks:
            process.kill()
            process.wait()


# ---- replicas ----


@pytest.mark.slow
def test_replicas_share_the_prompts_and_each_text_is_that_of_one_process(
    two: list[dict[str, Any]], alone: dict[str, Any]
) -> None:
    first, second = (rank["replicas"] for rank in two)
    assert list(itertools.chain(*zip(first, second))) == alone["llama"]


@given(st.integers(0, 50), st.integers(1, 7))
def test_every_prompt_is_one_ranks_share(n: int, ranks: int) -> None:
    shares = [share_of(n, rank, ranks) for rank in range(ranks)]
    assert sorted(itertools.chain(*shares)) == list(range(n))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


# ---- sequential ----


@given(st.lists(st.integers(1, 20), min_size=1, max_size=7), st.lists(st.integers(-3, 60), min_size=1, max_size=4))
def test_layers_are_shared_out_so_that_the_fullest_device_is_least_full(layers: list[int], room: list[int]) -> None:
    def fullness(counts: tuple[int, ...]) -> float:
        used = layer_sums(layers, counts)
        return max((size / space if space > 0 else float("inf")) for size, space in zip(used, room) if size)

    ways = [c for c in itertools.product(range(len(layers) + 1), repeat=len(room)) if sum(c) == len(layers)]
    best = min(map(fullness, ways))
    if best > 1:
        with pytest.raises(InputError, match=f"{sum(layers):,} bytes"):
            split_layers(layers, room)
    else:
        counts = split_layers(layers, room)
        assert sum(counts) == len(layers)
        assert fullness(tuple(counts)) == pytest.approx(best)


def test_layers_are_counted_by_bytes() -> None:
    assert split_layers([1, 1, 1, 1, 4], [8, 8]) == [4, 1]


def test_the_draft_goes_where_most_room_is_left() -> None:
    assert split_pair([10] * 8, ends=20, draft=5, capacities=[100, 100]) == ([4, 4], 1)


def test_layers_make_room_for_a_draft_that_would_fit_nowhere_else() -> None:
    # 14 x 10 over two devices of 80 leave 10 on each.
    counts, device = split_pair([10] * 14, ends=0, draft=15, capacities=[80, 80])
    used = layer_sums([10] * 14, counts)
    assert used[device] + 15 <= 80 and used[1 - device] <= 80


def test_a_pair_that_fits_nowhere_is_refused_with_its_size() -> None:
    with pytest.raises(InputError, match="needs 175 bytes"):
        split_pair([10] * 14, ends=20, draft=15, capacities=[80, 80])


class Copies(TorchDispatchMode):
    """Counts copies between devices; what comes back from the meta device, which holds no numbers, is zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("device", args[0].device) != args[0].device:
            self.shapes.append(tuple(args[0].shape))
            if args[0].is_meta:
                return torch.zeros(args[0].shape, dtype=args[0].dtype)
        return func(*args, **kwargs)


def test_a_forward_copies_the_rows_once_at_each_border_between_devices(cases: dict[str, dict[str, Any]]) -> None:
    checkpoint = open_checkpoint(cases["gemma-2"]["target"])
    model = load_sequential(checkpoint, [torch.device("cpu")] * 2, [1, 1], torch.float32)
    # The meta device raises for tensors of other devices, so a tensor that was not moved is detected.
    model.transformer.h[1].to("meta")
    cache = model.make_cache(100)
    with Copies() as copies:
        logits, hidden = model.verify(
            torch.zeros(1, 8, dtype=torch.int64), torch.tensor([3]), cache, kv_length=64, taps=(0, -1)
        )
    assert logits.device.type == hidden.device.type == "cpu"
    assert copies.shapes.count((8, 48)) == 2  # there and back


def test_layers_go_to_their_devices_in_order_and_all_else_to_the_first(
    cases: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    homes = {}

    def record(model: torch.nn.Module, checkpoint: Any, *, dtype: Any, device: Any) -> None:
        homes.update({name: device(name).index for name in model.state_dict()})

    monkeypatch.setattr("litspec.placement.sequential.load_weights", record)
    devices = [torch.device("cuda", i) for i in range(3)]
    load_sequential(open_checkpoint(cases["gemma-2"]["target"]), devices, [1, 0, 1], torch.bfloat16)
    for name, home in homes.items():
        assert home == (2 if name.startswith("transformer.h.1.") else 0), name


def test_layers_in_sequence_make_the_text_of_one_device(
    cases: dict[str, dict[str, Any]], alone: dict[str, Any]
) -> None:
    for name in ("llama", *HEADS):
        assert placement_worker.texts(cases[name], devices=2, placement="sequential") == alone[name]


def test_bytes_are_those_of_the_weights_as_stored() -> None:
    config, weights, _ = tiny("gemma-2")
    stored = sum(w.numel() for w in weights.values())
    assert weight_bytes(config, torch.bfloat16) == 2 * stored
    ends, layers = layer_bytes(config, torch.float32)
    # 4096 positions, and the overhang of a block, in slots of 512.
    keys_and_values = 2 * config.n_query_groups * config.head_size * 4608
    assert ends + sum(layers) == 4 * (stored + config.n_layer * keys_and_values)
    halves = [weight_bytes(config, torch.bfloat16, Shard(config, rank, 2).part) for rank in range(2)]
    # What is replicated, embedding and norms, counts twice.
    assert 2 * stored < sum(halves) < 2 * stored + 2 * (weights["transformer.wte.weight"].numel() + 64 * 20)


# ---- settings ----


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"placement": "everywhere"}, "placement must be one of .*, got 'everywhere'"),
        ({"draft_placement": "cut"}, "draft_placement must be one of .*, got 'cut'"),
        ({"precision": "bf16-mixed"}, "precision must be one of .*, got 'bf16-mixed'"),
        ({"quantize": "bnb.nf5"}, "quantize must be one of .*, got 'bnb.nf5'"),
        ({"placement": "single", "devices": 2}, "uses one device, but devices = 2"),
        ({"accelerator": "abacus"}, "accelerator = 'abacus'"),
        ({"devices": 0}, "devices = 0"),
        ({"draft_device": "abacus:1"}, "draft_device = 'abacus:1' is not a device"),
        ({"placement": "sequential", "num_nodes": 2}, "one process on one machine, but there are 2"),
        (
            {"placement": "tensor_parallel", "devices": 4},
            "n_head = 6, which cannot be split into 4 equal parts.* works is 3",
        ),
    ],
)
def test_a_setting_that_cannot_be_used_is_refused_with_a_sentence(
    settings: dict[str, Any], sentence: str, cases: dict[str, dict[str, Any]]
) -> None:
    pair = [open_checkpoint(cases["llama"][role]) for role in ("target", "draft")]
    with pytest.raises(InputError, match=sentence):
        place(*pair, **{"accelerator": "cpu"} | settings)


@pytest.mark.parametrize("quantize", ["bnb.nf4", "bnb.nf4-dq", "bnb.fp4", "bnb.fp4-dq", "bnb.int8"])
def test_quantizing_without_cuda_is_refused(quantize: Any, cases: dict[str, dict[str, Any]]) -> None:
    with pytest.raises(InputError, match=f"{quantize!r} needs a CUDA device"):
        place(open_checkpoint(cases["llama"]["target"]), None, accelerator="cpu", quantize=quantize)


@pytest.mark.parametrize("placement", ["tensor_parallel", "replicate"])
def test_a_notebook_is_told_what_works_there(
    placement: Any, cases: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    with pytest.raises(InputError, match=r"notebook.*placement='sequential'"):
        place(open_checkpoint(cases["llama"]["target"]), None, accelerator="cpu", devices=2, placement=placement)


def test_one_device_needs_no_other_process(cases: dict[str, dict[str, Any]]) -> None:
    for placement in ("auto", "single", "tensor_parallel", "sequential", "replicate"):
        placed = place(open_checkpoint(cases["llama"]["target"]), None, accelerator="cpu", placement=placement)
        assert (placed.rank, placed.world_size, placed.is_rank_zero) == (0, 1, True)
        assert placed.model.lm_head.weight.dtype == torch.float32
    assert process_rank() == 0


def test_the_draft_may_have_another_precision(cases: dict[str, dict[str, Any]]) -> None:
    pair = [open_checkpoint(cases["llama"][role]) for role in ("target", "draft")]
    placed = place(*pair, accelerator="cpu", draft_precision="bf16-true")
    assert placed.model.lm_head.weight.dtype == torch.float32
    assert placed.draft_model.lm_head.weight.dtype == torch.bfloat16


def test_the_default_precision_is_what_the_device_computes_in(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_precision(torch.device("cpu")) == "32-true"
    for supported, precision in ((True, "bf16-true"), (False, "16-true")):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, answer=supported: answer)
        assert default_precision(torch.device("cuda", 0)) == precision


def test_the_references_are_families_that_litgpt_reads() -> None:
    assert set(REFERENCES) <= set(FAMILIES)


@pytest.mark.slow
def test_a_process_that_ends_is_not_aborted_by_its_own_heartbeat() -> None:
    # A thread inside the store at interpreter exit would abort the process: exit code 134.
    code = (
        "import time, litspec.placement.heartbeat as heartbeat\n"
        "heartbeat.BEAT_SECONDS = 0.0\n"
        "kept = [heartbeat.Heartbeat(0, 2, heartbeat.own_store(0, lambda n: n)) for _ in range(8)]\n"
        "time.sleep(0.3)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
