"""Many texts at a time: litspec, transformers and LitGPT on the embedded pair; a target of SmolLM2-135M's shape.

    pip install ".[bench]" && python scripts/bench_batches.py

Each row generates the same texts in one process, in turns with the others, prompts included; shown are medians. The
ratios compare neighbouring times. transformers pads on the left; LitGPT's batched function takes prompts of one length
only, so it gets prompts cut to one, and litspec gets the same in the row that is compared with it.
"""

from __future__ import annotations

import platform
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
from bench_peers import litgpt_model, transformers_model
from jsonargparse import CLI
from litgpt.config import Config
from litgpt.generate.base import batched_generate_fn
from litgpt.model import GPT
from litgpt.tokenizer import Tokenizer
from litgpt.utils import save_config
from rich.console import Console
from rich.table import Table

from litspec import SpecLLM
from litspec.benchmark import SimulatedDrafter, several
from litspec.commands.verify import PROMPTS
from litspec.config import GenerateConfig
from litspec.demo import DEMO_TARGET
from litspec.drafters import Drafter, DraftSession, Proposal

GREEDY = {"temperature": 0.0}


class Timed:
    """Adds up the time of a model's forwards, to tell it from the rest of a round."""

    def __init__(self, *models: Any) -> None:
        self.seconds, self._depth = 0.0, 0
        for model in models:
            for name in ("verify", "prefill"):
                setattr(model, name, self._wrapped(getattr(model, name)))

    def _wrapped(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began, self._depth = time.perf_counter(), self._depth + 1
            try:
                return call(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.perf_counter() - began

        return timed


def tokens_per_second(ways: dict[str, Callable[[], int]], repeats: int) -> dict[str, list[float]]:
    """Speeds of ways to generate, which return how many tokens they made; in turns, of which the first warms up."""
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name, generate in ways.items():
            began = time.perf_counter()
            made = generate()
            if turn:
                speeds[name].append(made / (time.perf_counter() - began))
    return speeds


def litspec(llm: SpecLLM, prompts: list[str], batch_size: int, new: int, **settings: Any) -> Callable[[], int]:
    """A job's way of generating."""
    return lambda: sum(
        text.stats.new_tokens
        for text in llm.generate(prompts, batch_size=batch_size, max_new_tokens=new, seed=1, **settings)
    )


def transformers(prompts: list[str], batch_size: int, new: int) -> Callable[[], int]:
    """Plain greedy generation of padded batches."""
    tokenizer = Tokenizer(DEMO_TARGET)
    with tempfile.TemporaryDirectory() as scratch:
        model = transformers_model(DEMO_TARGET, Path(scratch))
    eos, ids = tokenizer.eos_id, [tokenizer.encode(prompt).tolist() for prompt in prompts]

    def generate() -> int:
        made = 0
        for begin in range(0, len(ids), batch_size):
            batch = ids[begin : begin + batch_size]
            longest = max(map(len, batch))
            idx = torch.tensor([[0] * (longest - len(each)) + each for each in batch])
            mask = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in batch])
            out = model.generate(idx, attention_mask=mask, max_new_tokens=new, do_sample=False)[:, longest:]
            made += sum(text.index(eos) if eos in text else len(text) for text in out.tolist())
        return made

    return generate


def litgpt_batches(ids: list[list[int]], batch_size: int, new: int) -> Callable[[], int]:
    """LitGPT's batched function; the prompts have one length."""
    eos, size = Tokenizer(DEMO_TARGET).eos_id, len(ids[0])
    model = litgpt_model(DEMO_TARGET, size + new)

    @torch.inference_mode()
    def generate() -> int:
        made = 0
        for begin in range(0, len(ids), batch_size):
            prompts = torch.tensor(ids[begin : begin + batch_size])
            model.clear_kv_cache()
            model.set_kv_cache(batch_size=len(prompts))
            sampling = {"temperature": 0.0, "top_k": 1}
            steps = batched_generate_fn(
                model,
                prompts,
                size + new,
                sample_args=sampling,
                stop_tokens=([eos],),
                include_prompt=False,
                include_eos=False,
            )
            for step in steps:
                made += sum(token is not None for token in step)
        return made

    return generate


def host_per_slot(llm: SpecLLM, prompts: list[str], new: int) -> float:
    """Milliseconds that a further text adds to a round beside the models' forwards."""
    forwards = Timed(llm.placed.model, llm.placed.draft_model)
    each = {}
    for slots in (1, 16):
        seconds = []
        for _ in range(4):
            rounds, forwards.seconds, began = 0, 0.0, time.perf_counter()
            texts = [
                (i, prompts[i], GenerateConfig(max_new_tokens=new, seed=1, speculative_k=4, **GREEDY), i)
                for i in range(slots)
            ]
            for _, text in llm.complete(iter(texts), slots=slots):
                rounds = max(rounds, text.stats.rounds)
            seconds.append((time.perf_counter() - began - forwards.seconds) / rounds)
        each[slots] = min(seconds)
    return (each[16] - each[1]) / 15 * 1e3


class Free(Drafter):
    """Proposes as many tokens as it is asked for, at no cost."""

    def start(self, target: Any, max_length: int, sampler: Any) -> DraftSession:
        class Session(DraftSession):
            def propose(self, token: int, input_pos: int, k: int) -> Proposal:
                return Proposal(torch.zeros(k, dtype=torch.int64))

        return Session()


def smol_target(folder: Path) -> Path:
    """A checkpoint of SmolLM2-135M's shape with random weights and the embedded pair's tokenizer."""
    config = Config.from_name("SmolLM2-135M")
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in GPT(config).state_dict().items()}
    weights = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * 0.02
        for name, shape in shapes.items()
    }
    folder.mkdir()
    save_config(config, folder)
    torch.save(weights, folder / "lit_model.pth")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(DEMO_TARGET / name, folder / name)
    return folder


def show(title: str, speeds: dict[str, list[float]], ratios: list[tuple[str, str]]) -> None:
    """Prints a table and the ratios."""
    out = Console(width=None if Console().is_terminal else 120)
    table = Table("", "tokens/s", title=title)
    for name, found in speeds.items():
        table.add_row(name, f"{median(found):.0f}")
    out.print(table)
    for ours, other in ratios:
        ratio = median(a / b for a, b in zip(speeds[ours], speeds[other], strict=True))
        out.print(f"{ours}: {ratio:.2f} times {other}", highlight=False)


def main(
    texts: int = 64, max_new_tokens: int = 60, repeats: int = 3, threads: int | None = None, smol: bool = True
) -> None:
    """Compares them.

    Args:
        texts: How many.
        max_new_tokens: Tokens of each.
        repeats: Turns.
        threads: Threads of torch; by default as many as it takes.
        smol: Whether the large random target is measured too, which takes some minutes.
    """
    warnings.filterwarnings("ignore")
    if threads is not None:
        torch.set_num_threads(threads)
    print(f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}, {date.today()}")
    new, prompts = max_new_tokens, several(PROMPTS, texts)
    size = 8
    ids = [tokens for tokens in (Tokenizer(DEMO_TARGET).encode(p).tolist() for p in prompts) if len(tokens) >= size]
    even = [Tokenizer(DEMO_TARGET).decode(torch.tensor(tokens[:size])) for tokens in ids]
    for precision in ("32-true", "bf16-true"):
        llm = SpecLLM.load(precision=precision, accelerator="cpu")
        plain = llm.with_drafter("none")
        ways = {
            "litspec, speculative, 1": litspec(llm, prompts, 1, new, **GREEDY),
            "litspec, speculative, 16": litspec(llm, prompts, 16, new, **GREEDY),
            "litspec, plain, 16": litspec(plain, prompts, 16, new, **GREEDY),
            "litspec, speculative at 0.8, 1": litspec(llm, prompts, 1, new, temperature=0.8, top_k=50),
            "litspec, speculative at 0.8, 16": litspec(llm, prompts, 16, new, temperature=0.8, top_k=50),
            "litspec, plain at 0.8, 16": litspec(plain, prompts, 16, new, temperature=0.8, top_k=50),
        }
        ratios = [
            ("litspec, speculative, 16", "litspec, speculative, 1"),
            ("litspec, speculative, 16", "litspec, plain, 16"),
            ("litspec, speculative at 0.8, 16", "litspec, speculative at 0.8, 1"),
            ("litspec, speculative at 0.8, 16", "litspec, plain at 0.8, 16"),
        ]
        if precision == "32-true":
            ways |= {
                "transformers, plain, 16": transformers(prompts, 16, new),
                "litgpt, plain, prompts of 8 tokens, 16": litgpt_batches([tokens[:size] for tokens in ids], 16, new),
                "litspec, speculative, prompts of 8 tokens, 16": litspec(llm, even, 16, new, **GREEDY),
            }
            ratios += [
                ("litspec, speculative, 16", "transformers, plain, 16"),
                ("litspec, speculative, prompts of 8 tokens, 16", "litgpt, plain, prompts of 8 tokens, 16"),
            ]
        show(f"Embedded pair, {precision}, texts at a time", tokens_per_second(ways, repeats), ratios)
        if precision == "32-true":
            print(f"Host work of a round beside the forwards: {host_per_slot(llm, prompts, new):.3f} ms per text")
    if smol:
        with tempfile.TemporaryDirectory() as folder:
            llm = SpecLLM.load(smol_target(Path(folder) / "smol"), precision="bf16-true", accelerator="cpu")
        prompts = prompts[:32]
        written = llm.with_drafter("none").generate(prompts, batch_size=16, max_new_tokens=new, **GREEDY)
        whole = [llm.codec.encode(prompt).tolist() + text.token_ids for prompt, text in zip(prompts, written)]
        llm.drafter = SimulatedDrafter(Free(), whole, 0.7, llm.placed.model.config.vocab_size)
        ways = {
            f"litspec, k = {k}, {n}": litspec(llm, prompts, n, new, speculative_k=k, **GREEDY)
            for k in (4, "auto")
            for n in (1, 16)
        }
        title = "SmolLM2-135M's shape, bf16, 70 % right proposals simulated"
        ratios = [(f"litspec, k = {k}, 16", f"litspec, k = {k}, 1") for k in (4, "auto")]
        show(title, tokens_per_second(ways, 1), ratios)


if __name__ == "__main__":
    CLI(main)
