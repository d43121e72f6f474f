"""What litspec promises, and how fast it is, on the GPU at hand: one command, nothing downloaded.

    python scripts/gpu_check.py                   on a GPU where there is one, else the CPU path
    python scripts/gpu_check.py --stages 1        the guarantee alone

All weights are random, made on the device, in bf16. Each stage has a time limit (in brackets; 350 s on one GPU):

1. The guarantee, Llama-3.2-1B's shape (100 s). A row's logits are compared bit by bit: elsewhere in the block, with
   junk after it, over longer buckets of keys and values. Then texts with and without every drafter, greedy and
   coupled. Then both with compiled steps, on a few layers. Logits of random weights are full of near-ties, which the
   change of one bit can turn over, so these texts are a sharp test.
2. Speed, Llama-3.1-8B's shape with a 1B-shaped draft (190 s), eager and compiled: plain, and speculative where the
   proposals are right with probability 0.6, 0.8 and 0.9; the share of the memory's bandwidth that a plain step reaches;
   the efficiency, which is the speedup over the one that the times of a round's parts allow.
3. LitGPT's own functions on the same weights with the same k, prefill included (60 s). Acceptance is in these weights:
   the target continues a chain of ids, and so does the draft for four tokens in five.
4. Tensor parallel over all GPUs, where there are two or more (60 s): the text with and without a draft, and the speed
   beside one device's. Writes a checkpoint of about 4 GB to a temporary folder.

Exits with 0 if stage 1 (where it is asked for) ran to its end and every comparison of every stage held, else with 1. A
stage that fails is reported, and the others still run. Without a GPU shapes are tiny: that shows that the script works,
and no speed. On a GPU the script has not been run yet: the limits above are limits, not measurements.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

import litgpt.model
import torch
from litgpt.config import Config
from litgpt.generate.base import generate as litgpt_plain
from litgpt.generate.speculative_decoding import generate as litgpt_speculative
from litgpt.utils import save_config
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from litspec import SpecLLM
from litspec.benchmark import SimulatedDrafter, interleaved, measure_parts
from litspec.commands.verify import PROMPTS
from litspec.demo import DEMO_TARGET
from litspec.drafters import make_drafter
from litspec.model import GPT
from litspec.placement import Single
from litspec.placement.place import layer_bytes, weight_bytes
from litspec.sampling import Sampling
from litspec.text import TextCodec

TARGET, DRAFT = "Llama-3.1-8B", "Llama-3.2-1B"
TINY = dict(n_layer=1, n_embd=128, n_head=4, n_query_groups=2, head_size=32, intermediate_size=256)
TINY |= dict(vocab_size=2048, padded_vocab_size=2048)
DTYPE = torch.bfloat16
WIDTH = 8
# Short of the end of K/V buckets, across it and after it.
POSITIONS = (61, 65, 125, 253, 385, 449, 509, 513, 1021, 1530, 1537, 2020)
STEP = 7919  # from an id to the next in a chain
# Left free on a GPU beside weights: keys and values, graphs, what is copied to measure the bandwidth.
RESERVE_BYTES = 6 * 2**30
TINY_PATIENCE = 4  # by so much limits grow without a GPU: compilers are slow there, and the machine may be
LONG_PROMPTS = [" ".join(PROMPTS), " ".join(PROMPTS[::-1])]
DRAFTERS = ("draft_model", "prompt_lookup", "early_exit")
GREEDY, COUPLED = dict(temperature=0.0), dict(temperature=0.8, top_k=50, sampler="coupled", seed=7)


@dataclass(frozen=True)
class Setup:
    """What all stages are given."""

    device: torch.device
    k: int
    max_new_tokens: int

    @property
    def tiny(self) -> bool:
        return self.device.type != "cuda"

    @property
    def repeats(self) -> int:
        return 1 if self.tiny else 3

    def config(self, name: str, **changes: Any) -> Config:
        return Config.from_name(name, **(TINY if self.tiny else {}) | changes)


@dataclass
class Stage:
    """What one stage found: rows of name, result and note, with numbers by their names, or for a comparison whether it
    held and how many there were; and why it failed or was left out, if it was."""

    title: str
    seconds: float = 0.0
    failed: str | None = None
    left_out: str | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)

    def number(self, name: str, result: str, note: str = "", **numbers: float) -> None:
        self.rows.append(dict(name=name, result=result, note=note, numbers=numbers))

    def check(self, name: str, held: bool, comparisons: int, note: str, **numbers: float) -> None:
        row = dict(name=name, held=held and comparisons > 0, comparisons=comparisons, note=f"{comparisons:,} {note}")
        self.rows.append(row | dict(numbers=numbers))

    @property
    def held(self) -> bool:
        return all(row.get("held", True) for row in self.rows)


# ---- models ----


def random_weights(config: Config, device: torch.device, seed: int, right: float | None = None) -> dict[str, Any]:
    """Weights of a Llama that keep numbers near 1 on their way through the layers. With `right` the head continues each
    token with the id `STEP` further on, by far, but for a share 1 - right of the tokens, which it continues wrongly."""
    generator = torch.Generator(device).manual_seed(seed)
    with torch.device("meta"):
        shapes = {name: weight.shape for name, weight in GPT(config).state_dict().items()}
    weights = {name: torch.ones(shape, dtype=DTYPE, device=device) for name, shape in shapes.items()}
    for name, weight in weights.items():
        if weight.dim() == 2:
            std = 1.0 if "wte" in name else weight.size(1) ** -0.5
            if right is not None and name.endswith("proj.weight"):
                std *= (2 * config.n_layer) ** -0.5  # so that the token itself prevails
            weight.normal_(std=std, generator=generator)
    if right is not None:
        head = weights["lm_head.weight"]
        head.copy_(weights["transformer.wte.weight"].roll(STEP, 0)).mul_(config.n_embd**-0.5)
        wrong = (torch.rand(len(head), generator=generator, device=device) > right).nonzero().squeeze(1)
        head[wrong] = head[wrong.roll(1)]
    return weights


def build(model_class: type, config: Config, weights: dict[str, Any]) -> Any:
    """A model over these very tensors."""
    with torch.device("meta"):
        model = model_class(config)
    model.load_state_dict(weights, assign=True)
    return model.eval().requires_grad_(False)


def make_llm(target: GPT, draft: GPT, device: torch.device) -> SpecLLM:
    """The pair with the embedded tokenizer, whose ids every vocabulary here has; texts have their full length."""
    placed = Single(target, draft, device, WIDTH)
    codec = TextCodec(DEMO_TARGET, target.config)
    codec.stop_tokens = ()
    return SpecLLM(placed, codec, make_drafter("draft_model", placed))


def near_tied_pair(setup: Setup, n_layer: int) -> SpecLLM:
    """A 1B-shaped target, whose draft is the target with some noise on its head. Its texts are made of 128 ids, so
    that prompt lookup has something to find."""
    config = setup.config(DRAFT, n_layer=n_layer)
    weights = random_weights(config, setup.device, seed=0)
    weights["lm_head.weight"][128:] *= 0.1
    noise = random_weights(setup.config(DRAFT, n_layer=1), setup.device, seed=1)["lm_head.weight"]
    noisy = weights | {"lm_head.weight": weights["lm_head.weight"] + 0.15 * noise}
    return make_llm(build(GPT, config, weights), build(GPT, config, noisy), setup.device)


def chain_pair(setup: Setup, stage: Stage) -> tuple[SpecLLM, list[tuple[Config, dict[str, Any]]]]:
    """The 8B-shaped target with its draft; and the configs and weights of both."""
    config, draft = setup.config(TARGET), setup.config(DRAFT)
    if not setup.tiny:
        ends, layers = layer_bytes(config, DTYPE)
        room = torch.cuda.mem_get_info(setup.device)[0] - RESERVE_BYTES - ends - weight_bytes(draft, DTYPE)
        if room < sum(layers):
            stage.title += f"; ONLY {room // layers[0]} OF {config.n_layer} LAYERS, which fit this GPU"
            config = setup.config(TARGET, n_layer=max(1, room // layers[0]))
    parts = [
        (config, random_weights(config, setup.device, seed=0, right=1.0)),
        (draft, random_weights(draft, setup.device, seed=1, right=0.8)),
    ]
    return make_llm(*(build(GPT, *part) for part in parts), setup.device), parts


def compiled(stage: Stage, llm: SpecLLM) -> Iterator[SpecLLM]:
    """Once the pair with compiled steps; then what compiling them took is known."""
    other = llm.compiled()
    yield other
    seconds = other.compile_seconds
    stage.number("building graphs", f"{seconds:.0f} s", f"{len(other.runner)} graphs", seconds=seconds)


# ---- stage 1 ----


@torch.inference_mode()
def scan_bits(
    model: GPT, verify: Callable[..., torch.Tensor], width: int, positions: Sequence[int]
) -> tuple[int, list[str]]:
    """Runs the row at each position last, in the middle and first in a block, with the text and with junk after it,
    over the shortest bucket, the next and the whole cache. `verify` is called like `model.verify`.

    Returns:
        How many rows of logits were compared, and where they differed.
    """
    device, rng, ids = model.lm_head.weight.device, random.Random(width), range(model.config.vocab_size)
    text = rng.choices(ids, k=max(positions) + width)
    cache = model.make_cache(len(text) + 64, width=width)
    model.prefill(torch.tensor([text], device=device), cache)
    compared, differences = 0, []

    def run(rows: list[int], first: int, kv_length: int) -> torch.Tensor:
        rows, first = torch.tensor([rows], device=device), torch.tensor([first], device=device)
        return verify(rows, first, cache, kv_length=kv_length)[0]

    # From right to left, and the text's own rows last: what was written after a row is masked for all that follow, and
    # what lies before it is always the text, as a block of this width reads it.
    for position in sorted(positions, reverse=True):
        tight = cache.bucket(position + width)
        run(text[position - width : position], position - width, tight)
        found = {}
        for slots in sorted({tight, cache.bucket(tight + 1), cache.size}):
            for place in sorted({width - 1, width // 2, 0}, reverse=True):
                first = position - place
                for junk in sorted({width - 1 - place, 0}, reverse=True):
                    rows = text[first : first + width - junk] + rng.choices(ids, k=junk)
                    found[slots, place, junk] = run(rows, first, slots)[place].clone()
        want = found[tight, 0, 0]
        compared += len(found) - 1
        for (slots, place, junk), got in found.items():
            if not torch.equal(got, want):
                off = (got - want).abs().max().item()
                at = f"position {position}, row {place}, {junk} of junk, {slots} slots against {tight}"
                differences.append(f"{at}, off by {off:.2g}")
    return compared, differences


def check_bits(stage: Stage, name: str, model: GPT, verify: Callable[..., Any], width: int, at: Sequence[int]) -> None:
    compared, differences = scan_bits(model, verify, width, at)
    note = f"rows of logits, {len(differences)} differ{': ' + differences[0] if differences else ''}"
    stage.check(f"bits, {name}, {width} rows", not differences, compared, note)


def check_texts(stage: Stage, name: str, llm: SpecLLM, k: int, **settings: Any) -> None:
    """Texts of the target alone and with every drafter."""
    prompts = list(PROMPTS[3:])
    alone = [completion.token_ids for completion in llm.with_drafter("none").generate(prompts, **settings)]
    tokens = [token for ids in alone for token in ids]
    note = f"of {len(tokens)} tokens; few would make a weak test"
    stage.number(f"text, {name}: distinct", str(len(set(tokens))), note, distinct=len(set(tokens)), tokens=len(tokens))
    for drafter in DRAFTERS:
        exit_layer = max(1, llm.placed.model.config.n_layer - 1) if drafter == "early_exit" else None
        texts = llm.with_drafter(drafter, exit_layer=exit_layer).generate(prompts, speculative_k=k, **settings)
        equal = sum(text.token_ids == ids for text, ids in zip(texts, alone))
        proposed, accepted = (sum(getattr(text.stats, what) for text in texts) for what in ("proposed", "accepted"))
        note = f"tokens, {equal} of {len(alone)} texts equal; {accepted} of {proposed} proposals accepted"
        held, counts = equal == len(alone), dict(proposed=proposed, accepted=accepted)
        stage.check(f"text, {name}, {drafter}", held, len(tokens), note, **counts)


def check_guarantee(stage: Stage, setup: Setup) -> None:
    """Stage 1."""
    tokens = dict(max_new_tokens=setup.max_new_tokens)
    llm = near_tied_pair(setup, n_layer=2 if setup.tiny else 16)
    for width in (1, 2, 4, 5, 8, 16):
        check_bits(stage, "eager", llm.placed.model, llm.placed.model.verify, width, POSITIONS)
    check_texts(stage, "eager, greedy", llm, WIDTH - 1, **GREEDY, **tokens)
    check_texts(stage, "eager, coupled", llm, WIDTH - 1, **COUPLED, **tokens)
    del llm
    llm = near_tied_pair(setup, n_layer=1 if setup.tiny else 4)  # what compiling takes grows with the layers
    for other in compiled(stage, llm):
        llm.placed.model.fix_shapes()
        verify = torch.compile(llm.placed.model.verify, fullgraph=True, dynamic=False)
        check_bits(stage, "compiled", llm.placed.model, verify, WIDTH, POSITIONS[:1] if setup.tiny else POSITIONS[2:4])
        check_texts(stage, "compiled, greedy", other, setup.k, **GREEDY, **tokens)


# ---- stages 2 and 3 ----


def rates(ways: dict[str, Callable[[], int]], setup: Setup) -> dict[str, float]:
    """Tokens per second of functions that take turns and return how many they made."""
    tokens = {name: way() for name, way in ways.items()}
    return {name: tokens[name] / taken for name, taken in interleaved(ways, setup.repeats, setup.device).items()}


@torch.inference_mode()
def measure_decoding(stage: Stage, mode: str, llm: SpecLLM, setup: Setup) -> None:
    """Decodes one text in every way. It is known from the turn before, so what a turn takes is rounds only."""
    generate = dict(prompt=LONG_PROMPTS[0], max_new_tokens=setup.max_new_tokens, speculative_k=setup.k, **GREEDY)
    wide = llm.with_drafter("none")
    text, prompt = wide.generate(**generate).token_ids, llm.codec.encode(LONG_PROMPTS[0]).tolist()
    rows = llm.runner.rows(llm.placed.rows)
    decoders = {"plain": llm.with_drafter("none", verify_width=1), f"no drafter, {rows[0]} rows": wide}
    for right in (0.6, 0.8, 0.9):
        simulated = SimulatedDrafter(llm.drafter, [prompt + text], right, llm.placed.model.config.vocab_size)
        decoders[f"k = {setup.k}, {right} right"] = llm.with_drafter(simulated)
    latest: dict[str, Any] = {}

    def decode(name: str) -> int:
        latest[name] = decoders[name].generate(**generate)
        return setup.max_new_tokens - 1

    speeds = rates({name: partial(decode, name) for name in decoders}, setup)
    middle = prompt + text[: len(text) // 2]
    parts = measure_parts(
        llm,
        decoders["plain"],
        {"draft": llm.drafter},
        Sampling(0.0),
        middle,
        sorted({1, *rows}),
        4 * setup.repeats,
        setup.k,
    )
    plain_step, step, draft = parts.verify[1], parts.verify_for(setup.k), parts.draft["draft"]
    for name, speed in speeds.items():
        stats, speedup = latest[name].stats, speed / speeds["plain"]
        gain = (stats.new_tokens - 1) / stats.rounds
        rounds = latest[name].blocks[1:]
        verifying = fmean(parts.verify_for(block.proposed, plain=name == "plain") for block in rounds)
        ideal = gain * plain_step / (verifying + stats.proposed / stats.rounds * draft)
        note = (
            f"{speedup:.2f} x plain, ideal {ideal:.2f}, efficiency {speedup / ideal:.2f}; {gain:.2f} tokens per round"
        )
        numbers = dict(speedup=speedup, ideal=ideal, efficiency=speedup / ideal, tokens_per_round=gain)
        stage.number(f"{mode}, {name}", f"{speed:.1f} tokens/s", note, tokens_per_second=speed, **numbers)
    read, copied = parts.weight_bandwidth, parts.copy_bandwidth
    note = f"{read / 1e9:.0f} of {copied / 1e9:.0f} GB/s; a plain step {plain_step * 1e3:.2f} ms, "
    note += f"the rows of {setup.k} proposals {step * 1e3:.2f}, a draft step {draft * 1e3:.2f}"
    numbers = dict(plain_step=plain_step, step=step, draft_step=draft, read=read, copied=copied, share=read / copied)
    stage.number(f"{mode}, share of bandwidth", f"{read / copied:.0%}", note, **numbers)
    same = [completion.token_ids == text for name, completion in latest.items() if name != "plain"]
    stage.check(f"{mode}, texts", all(same), len(same) * len(text), f"tokens, {sum(same)} of {len(same)} texts equal")


def measure_speed(stage: Stage, setup: Setup) -> None:
    """Stage 2."""
    llm, _ = chain_pair(setup, stage)
    measure_decoding(stage, "eager", llm, setup)
    for other in compiled(stage, llm):
        measure_decoding(stage, "compiled", other, setup)


def compare_litgpt(stage: Stage, setup: Setup) -> None:
    """Stage 3. Two prompts, so that none is known from the turn before: what a turn takes is all of its work."""
    llm, parts = chain_pair(setup, stage)
    prompts = [llm.codec.encode(prompt).to(setup.device, torch.int64) for prompt in LONG_PROMPTS]
    target, draft = (build(litgpt.model.GPT, *part) for part in parts)
    for model in (target, draft):
        model.max_seq_length = max(map(len, prompts)) + setup.max_new_tokens + setup.k
        model.cos, model.sin = (table.to(DTYPE) for table in model.rope_cache(setup.device))
        model.set_kv_cache(batch_size=1, device=setup.device, dtype=DTYPE)
    texts: dict[str, list[list[int]]] = {}
    accepted: dict[str, float] = {}

    def litgpt_way(name: str) -> int:
        texts[name] = []
        for ids in prompts:
            if "plain" in name:
                out = litgpt_plain(target, ids, len(ids) + setup.max_new_tokens, temperature=0.0)
            else:
                size = len(ids) + setup.max_new_tokens
                out, rate = litgpt_speculative(draft, target, ids, size, temperature=0.0, speculative_k=setup.k)
                accepted[name] = float(rate)
            texts[name].append(out[len(ids) :].tolist())
        return sum(map(len, texts[name]))

    def litspec_way(name: str, decoder: SpecLLM) -> int:
        settings = dict(max_new_tokens=setup.max_new_tokens, speculative_k=setup.k, **GREEDY)
        completions = decoder.generate(LONG_PROMPTS, **settings)
        texts[name] = [completion.token_ids for completion in completions]
        accepted[name] = completions[-1].stats.acceptance_rate
        return sum(map(len, texts[name]))

    ways: dict[str, Callable[[], int]] = {}
    for kind, decoder in (("plain", llm.with_drafter("none", verify_width=1)), (f"k = {setup.k}", llm)):
        ways[f"litgpt, {kind}"] = partial(litgpt_way, f"litgpt, {kind}")
        ways[f"litspec, {kind}"] = partial(litspec_way, f"litspec, {kind}", decoder)
    speeds = rates(ways, setup)
    for name, speed in speeds.items():
        ratio = speed / speeds[name.replace("litspec", "litgpt")]
        # LitGPT's speculative function loses the first token and appends another.
        same = sum(
            ids == text or ids[: len(text) - 1] == text[1:] for ids, text in zip(texts[name], texts["litgpt, plain"])
        )
        note = f"{ratio:.2f} x litgpt; {same} of {len(prompts)} texts are those of litgpt, plain"
        note += "" if "plain" in name else f"; accepted {accepted[name]:.2f}"
        stage.number(name, f"{speed:.1f} tokens/s", note, tokens_per_second=speed, over_litgpt=ratio)


# ---- stage 4 ----


def check_tensor_parallel(stage: Stage, setup: Setup) -> None:
    """Stage 4. `place` starts ranks by running a script again: this one, with hidden flags."""
    ranks = 2 if setup.tiny else 1 << (torch.cuda.device_count().bit_length() - 1)
    if ranks < 2:
        stage.left_out = "there is one GPU"
        return
    with tempfile.TemporaryDirectory() as scratch:
        for role, right in (("target", 1.0), ("draft", 0.8)):
            folder, config = Path(scratch, role), setup.config(DRAFT, **({} if role == "target" else {"n_layer": 2}))
            shutil.copytree(DEMO_TARGET, folder, ignore=lambda *_: ["lit_model.pth", "generation_config.json"])
            save_config(config, folder)
            weights = random_weights(config, setup.device, seed=len(role), right=right)
            torch.save({name: weight.cpu() for name, weight in weights.items()}, folder / "lit_model.pth")
        found = {1: decode_on_ranks(scratch, 1, setup)}
        command = [sys.executable, __file__, "--scratch", scratch, "--ranks", str(ranks), "--k", str(setup.k)]
        command += ["--device", setup.device.type, "--max_new_tokens", str(setup.max_new_tokens)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{ranks} ranks ended with {done.returncode}: {done.stderr.strip()[-250:]}")
        found[ranks] = json.loads(Path(scratch, "found.json").read_text())
    for devices, (speeds, alone, drafted) in found.items():
        for name, speed in speeds.items():
            note, numbers = f"{speed / found[1][0][name]:.2f} x one device", dict(tokens_per_second=speed)
            stage.number(f"{devices} devices, {name}", f"{speed:.1f} tokens/s", note, **numbers)
        stage.check(f"{devices} devices, texts", alone == drafted, len(alone), "tokens with and without a draft")


def decode_on_ranks(scratch: str, ranks: int, setup: Setup) -> tuple[dict[str, float], list[int], list[int]]:
    """Speeds by name, and the tokens without and with a draft; rank 0 of several writes them down."""
    pair = dict(checkpoint_dir=Path(scratch, "target"), draft_dir=Path(scratch, "draft"), precision="bf16-true")
    llm = SpecLLM.load(**pair, accelerator=setup.device.type, devices=ranks)
    decoders, texts = {"no drafter": llm.with_drafter("none"), f"k = {setup.k}": llm}, {}

    def decode(name: str) -> int:
        settings = dict(max_new_tokens=setup.max_new_tokens, speculative_k=setup.k, **GREEDY)
        texts[name] = decoders[name].generate(LONG_PROMPTS[0], **settings).token_ids
        return len(texts[name])

    found = (rates({name: partial(decode, name) for name in decoders}, setup), *texts.values())
    if ranks > 1 and llm.placed.is_rank_zero:
        Path(scratch, "found.json").write_text(json.dumps(found))
    return found


# ---- the command ----

STAGES = {
    1: ("the guarantee, 1B", check_guarantee, 100),
    2: ("speed, 8B and 1B", measure_speed, 190),
    3: ("beside litgpt, 8B and 1B", compare_litgpt, 60),
    4: ("tensor parallel, 1B", check_tensor_parallel, 60),
}


def run_stage(number: int, setup: Setup) -> Stage:
    """One stage, whatever comes of it; its memory is given back."""
    title, function, limit = STAGES[number]
    limit *= TINY_PATIENCE if setup.tiny else 1
    stage, began = Stage(f"{number}. {title}"), time.perf_counter()

    def ring(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, ring)
    signal.alarm(limit)
    try:
        function(stage, setup)
    except Exception as error:
        stage.failed = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    finally:
        signal.alarm(0)
    stage.seconds = time.perf_counter() - began
    if stage.failed and stage.seconds >= limit:
        stage.failed = f"its {limit} seconds were over"
    torch.compiler.reset()
    gc.collect()
    if setup.device.type == "cuda":
        torch.cuda.empty_cache()
    return stage


def describe_machine(device: torch.device) -> dict[str, str]:
    found = {"date": str(date.today())} | {name: version(name) for name in ("torch", "litgpt", "litspec")}
    if device.type != "cuda":
        return found | {"device": f"CPU, {torch.get_num_threads()} threads: TINY SHAPES"}
    found["device"] = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found["driver"] = subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0]
    return found


def make_table(stages: Sequence[Stage]) -> Table:
    table = Table("what", "result", "seen")
    for stage in stages:
        table.add_section()
        table.add_row(f"[bold]{stage.title}[/]", f"{stage.seconds:.0f} s")
        for row in stage.rows:
            verdict = "[green]held[/]" if row.get("held") else "[red]NOT HELD[/]"
            table.add_row(row["name"], row.get("result", verdict), row["note"])
        if stage.failed or stage.left_out:
            table.add_row("", "[red]FAILED[/]" if stage.failed else "left out", escape(stage.failed or stage.left_out))
    return table


def main() -> int:
    """Runs the stages, prints the table, writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("gpu_check.json"), help="the JSON file to write")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--stages", default="1,2,3,4", help="which ones")
    parser.add_argument("--k", type=int, choices=range(1, WIDTH), default=4, help="proposals per round")
    parser.add_argument("--max_new_tokens", type=int, default=48, help="tokens of each text")
    parser.add_argument("--scratch", help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available() if args.device == "auto" else args.device == "cuda"
    setup = Setup(torch.device("cuda", 0) if on_gpu else torch.device("cpu"), args.k, args.max_new_tokens)
    if args.ranks:
        decode_on_ranks(args.scratch, args.ranks, setup)
        return 0
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    machine, stages = describe_machine(setup.device), {}
    console.print(", ".join(f"{name} {value}" for name, value in machine.items()))
    for number in map(int, args.stages.split(",")):
        console.print(f"stage {number} ...")
        stages[number] = run_stage(number, setup)
    console.print(make_table(list(stages.values())))
    passed = all(stage.held for stage in stages.values()) and not (1 in stages and stages[1].failed)
    found = dict(machine=machine, k=args.k, max_new_tokens=args.max_new_tokens, passed=passed)
    args.output.write_text(json.dumps(found | {"stages": {n: asdict(stage) for n, stage in stages.items()}}, indent=1))
    console.print(f"{'All comparisons held' if passed else 'NOT ALL HELD'}; the numbers are in {args.output}.")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
