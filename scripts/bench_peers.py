"""The embedded pair in litspec, in LitGPT and in transformers, side by side.

    pip install ".[bench]" && python scripts/bench_peers.py

All decode the same prompts with the same weights in float32, greedy and sampled, in one process, in turns; a row shows
the median over the turns. A time is that of the whole call, prefill included, since not every peer tells them apart.
Greedy texts are compared with those of LitGPT's plain decoding. Graphs are built in a turn that does not count.
Whatever comes out is printed, good or bad.
"""

from __future__ import annotations

import itertools
import json
import platform
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from jsonargparse import CLI
from litgpt.config import Config
from litgpt.generate.base import generate as litgpt_plain
from litgpt.generate.speculative_decoding import generate as litgpt_speculative
from litgpt.model import GPT
from litgpt.scripts.convert_lit_checkpoint import convert_lit_checkpoint
from litgpt.tokenizer import Tokenizer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from litspec import SpecLLM
from litspec.commands.verify import PROMPTS
from litspec.demo import DEMO_DRAFT, DEMO_TARGET


@dataclass
class Outcome:
    """What one call brought: the new tokens, and accepted over proposed where the peer tells."""

    tokens: list[int]
    acceptance: float | None = None
    rounds: int | None = None


@dataclass
class Row:
    """One way of decoding, greedy or sampled."""

    name: str
    mode: str
    tokens_per_second: float = 0.0
    acceptance: float | None = None
    tokens_per_round: float | None = None
    targets_text: str = ""
    seconds: list[float] = field(default_factory=list, repr=False)


def litgpt_model(folder: Path, max_seq_length: int) -> GPT:
    """LitGPT's own model with its cache set up, as its commands do."""
    model = GPT(Config.from_file(folder / "model_config.yaml")).eval()
    state = torch.load(folder / "lit_model.pth", mmap=True, weights_only=True)
    model.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    model.max_seq_length = max_seq_length
    model.set_kv_cache(batch_size=1)
    return model


def transformers_model(folder: Path, scratch: Path) -> Any:
    """The checkpoint as `litgpt convert_from_litgpt` writes it, in transformers."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    config = Config.from_file(folder / "model_config.yaml")
    convert_lit_checkpoint(folder, scratch / folder.name)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.padded_vocab_size,
            hidden_size=config.n_embd,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.n_layer,
            num_attention_heads=config.n_head,
            num_key_value_heads=config.n_query_groups,
            head_dim=config.head_size,
            max_position_embeddings=config.block_size,
            rms_norm_eps=config.norm_eps,
            rope_theta=config.rope_base,
            tie_word_embeddings=False,
        )
    )
    state = torch.load(scratch / folder.name / "model.pth", weights_only=True)
    model.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    model.generation_config = GenerationConfig(eos_token_id=Tokenizer(folder).eos_id, pad_token_id=0)
    return model.eval()


class Peers:
    """Every way of decoding, as functions of a prompt's ids and the sampling settings."""

    def __init__(self, k: int, max_new_tokens: int, longest_prompt: int) -> None:
        self._new = max_new_tokens
        room = longest_prompt + max_new_tokens
        self._eos = Tokenizer(DEMO_TARGET).eos_id
        self._lit_target, self._lit_draft = (litgpt_model(folder, room) for folder in (DEMO_TARGET, DEMO_DRAFT))
        with tempfile.TemporaryDirectory() as scratch:
            self._hf_target, self._hf_draft = (
                transformers_model(folder, Path(scratch)) for folder in (DEMO_TARGET, DEMO_DRAFT)
            )
        # The same k every round, as in the other two.
        for name, value in (
            ("num_assistant_tokens", k),
            ("num_assistant_tokens_schedule", "constant"),
            ("assistant_confidence_threshold", 0.0),
        ):
            setattr(self._hf_draft.generation_config, name, value)
        self._k = k
        self._forwards = 0
        self._hf_target.register_forward_hook(self._count)
        llm = SpecLLM.load(precision="32-true", accelerator="cpu")
        lookup = llm.with_drafter("prompt_lookup")
        compiled = SpecLLM.load(precision="32-true", accelerator="cpu", compile=True)
        for loaded in (llm, compiled):
            loaded.reserve(room)
        self.ways: dict[str, Callable[[str, torch.Tensor, dict[str, Any]], Outcome]] = {
            "litgpt, plain": self._litgpt_plain,
            f"litgpt, speculative, k = {k}": self._litgpt_speculative,
            "transformers, plain": lambda p, ids, s: self._transformers(ids, s),
            f"transformers, assisted, k = {k}": lambda p, ids, s: self._transformers(
                ids, s, assistant_model=self._hf_draft
            ),
            f"transformers, prompt lookup, k = {k}": lambda p, ids, s: self._transformers(
                ids, s, prompt_lookup_num_tokens=k
            ),
            "litspec, plain": self._litspec(llm.with_drafter("none", verify_width=1), 0),
            f"litspec, prompt lookup, k = {k}": self._litspec(lookup, k),
            f"litspec, lookup, then model, k = {k}": self._litspec(llm.with_drafter("lookup_then_model"), k),
            f"litspec, draft model, k = {k}": self._litspec(llm, k),
            "litspec, draft model, k = 7": self._litspec(llm, 7),
            "litspec, draft model, k = auto": self._litspec(llm, "auto"),
            "litspec compiled, plain": self._litspec(compiled.with_drafter("none", verify_width=1), 0),
            f"litspec compiled, draft model, k = {k}, 8 rows": self._litspec(compiled, k),
            "litspec compiled, draft model, k = 7, 8 rows": self._litspec(compiled, 7),
        }

    def _count(self, *_: Any) -> None:
        self._forwards += 1

    def _litgpt_plain(self, prompt: str, ids: torch.Tensor, sampling: dict[str, Any]) -> Outcome:
        out = litgpt_plain(self._lit_target, ids, len(ids) + self._new, eos_id=self._eos, **sampling)
        tokens = out[len(ids) :].tolist()
        return Outcome(tokens[: tokens.index(self._eos)] if self._eos in tokens else tokens)

    def _litgpt_speculative(self, prompt: str, ids: torch.Tensor, sampling: dict[str, Any]) -> Outcome:
        out, acceptance = litgpt_speculative(
            self._lit_draft,
            self._lit_target,
            ids,
            len(ids) + self._new,
            stop_tokens=[self._eos],
            speculative_k=self._k,
            **sampling,
        )
        return Outcome(out[len(ids) :].tolist(), float(acceptance))

    def _transformers(self, ids: torch.Tensor, sampling: dict[str, Any], **how: Any) -> Outcome:
        settings: dict[str, Any] = {"do_sample": False}
        if sampling["temperature"] > 0:
            settings = {"do_sample": True, "top_p": 1.0, **sampling}
        self._forwards = 0
        idx = ids.long().unsqueeze(0)
        out = self._hf_target.generate(
            idx, attention_mask=torch.ones_like(idx), max_new_tokens=self._new, **settings, **how
        )
        tokens = out[0, len(ids) :].tolist()
        tokens = tokens[: tokens.index(self._eos)] if self._eos in tokens else tokens
        if not how:
            return Outcome(tokens)
        # It does not tell what it accepted; the target's forwards do.
        rounds = self._forwards
        return Outcome(tokens, (len(tokens) - rounds) / (rounds * self._k), rounds)

    def _litspec(self, llm: SpecLLM, k: Any) -> Callable[[str, torch.Tensor, dict[str, Any]], Outcome]:
        def decode(prompt: str, ids: torch.Tensor, sampling: dict[str, Any]) -> Outcome:
            out = llm.generate(prompt, max_new_tokens=self._new, speculative_k=k, **sampling)
            if llm.drafter is None:
                return Outcome(out.token_ids)
            return Outcome(out.token_ids, out.stats.acceptance_rate, out.stats.rounds)

        return decode


def main(
    k: int = 4,
    max_new_tokens: int = 100,
    repeats: int = 5,
    threads: int | None = None,
    output_format: str = "text",
) -> None:
    """Compares the peers on the embedded pair.

    Args:
        k: Proposals per round, for every peer.
        max_new_tokens: Tokens of each text.
        repeats: Turns.
        threads: Threads of torch; by default as many as it takes.
        output_format: text prints a table, json one object.
    """
    warnings.filterwarnings("ignore")
    if threads is not None:
        torch.set_num_threads(threads)
    tokenizer = Tokenizer(DEMO_TARGET)
    ids = [tokenizer.encode(prompt) for prompt in PROMPTS]
    peers = Peers(k, max_new_tokens, max(map(len, ids)))
    modes = {"greedy": {"temperature": 0.0}, "temperature 0.8, top_k 50": {"temperature": 0.8, "top_k": 50}}
    rows = {(name, mode): Row(name, mode) for mode in modes for name in peers.ways}
    alone = [peers.ways["litgpt, plain"](prompt, i, modes["greedy"]).tokens for prompt, i in zip(PROMPTS, ids)]

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("measuring", total=(repeats + 1) * len(rows))
        for turn in range(repeats + 1):
            for (name, mode), row in rows.items():
                torch.manual_seed(turn)
                began = time.perf_counter()
                outcomes = [peers.ways[name](prompt, i, modes[mode]) for prompt, i in zip(PROMPTS, ids)]
                seconds = time.perf_counter() - began
                tokens = sum(len(outcome.tokens) for outcome in outcomes)
                progress.advance(task)
                if turn == 0:  # warms up
                    continue
                row.seconds.append(seconds / tokens)
                if all(outcome.acceptance is not None for outcome in outcomes):
                    row.acceptance = sum(outcome.acceptance for outcome in outcomes) / len(outcomes)
                if all(outcome.rounds is not None for outcome in outcomes):
                    row.tokens_per_round = tokens / sum(outcome.rounds for outcome in outcomes)
                if mode == "greedy":
                    equal = sum(outcome.tokens == text for outcome, text in zip(outcomes, alone))
                    row.targets_text = f"{equal}/{len(alone)}"
    for row in rows.values():
        row.tokens_per_second = 1 / median(row.seconds)

    versions = {name: version(name) for name in ("litspec", "litgpt", "transformers", "torch")}
    machine = f"{platform.machine()}, {torch.get_num_threads()} threads, float32, {date.today()}"
    if output_format == "json":
        print(json.dumps({"versions": versions, "machine": machine, "rows": [asdict(row) for row in rows.values()]}))
        return
    table = Table("", *modes, "acceptance", "target's text", title="tokens/s of the whole call, medians")
    for name in peers.ways:
        greedy, sampled = (rows[name, mode] for mode in modes)
        table.add_row(
            name,
            f"{greedy.tokens_per_second:.0f}",
            f"{sampled.tokens_per_second:.0f}",
            "" if greedy.acceptance is None else f"{greedy.acceptance:.2f} / {sampled.acceptance:.2f}",
            greedy.targets_text,
        )
    out = Console(width=None if Console().is_terminal else 120)
    out.print(", ".join(f"{name} {v}" for name, v in versions.items()), machine, sep="\n", highlight=False)
    out.print(table)
    for mode, prefix in itertools.product(modes, ("litspec", "litspec compiled")):
        ours = max(
            (row for row in rows.values() if row.mode == mode and row.name.startswith(f"{prefix}, d")), key=_speed
        )
        for name in (f"litgpt, speculative, k = {k}", f"transformers, assisted, k = {k}", f"{prefix}, plain"):
            # Neighbours in time are compared, not medians of the whole run.
            ratio = median(other / own for other, own in zip(rows[name, mode].seconds, ours.seconds))
            out.print(f"{mode}: {ours.name} is {ratio:.2f} times {name}", highlight=False)


def _speed(row: Row) -> float:
    return row.tokens_per_second


if __name__ == "__main__":
    CLI(main)
