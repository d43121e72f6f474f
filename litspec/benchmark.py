"""Benchmark of a pair on this machine: the cost of the parts of a round, the ideal speedup, and the measured speedup.

All timings of a comparison are taken in one process, interleaved (A B A B), and reported as medians. A machine's speed
drifts, but the ratio of adjacent timings is stable. *Plain* decoding is one row per step without a drafter.
"""

from __future__ import annotations

import copy
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean, harmonic_mean, median
from types import MappingProxyType
from typing import Any, Literal, cast, get_args

import torch

from litspec.drafters import Cost, Drafter, DrafterName, DraftSession, Proposal
from litspec.drafters.autoregressive import step_bytes
from litspec.engine.costs import Trial
from litspec.engine.target import Slots, TargetSession
from litspec.errors import InputError
from litspec.llm import Completion, SpecLLM
from litspec.model.packed import slows_one_row
from litspec.sampling import Sampler, Sampling, make_sampler

Choice = int | Literal["auto"]


@dataclass
class Parts:
    """Medians, in seconds, of the parts of a round, including sampling and the read to the host.

    Attributes:
        verify: Time of one verification by number of rows; 1 row is a plain step.
        rows: Row counts that a verification with a drafter may use; empty for all measured ones.
        draft: Time per proposed token, by the drafter's name.
        prefill: Time to read a prompt of `prompt_size` tokens.
        prompt_size: Tokens of this prompt.
        weight_bytes: Bytes of weights that one step of the target reads.
        copy_bandwidth: Bytes per second that this machine reads and writes when it copies memory.
    """

    verify: dict[int, float] = field(default_factory=dict)
    rows: tuple[int, ...] = ()
    draft: dict[str, float] = field(default_factory=dict)
    prefill: float = 0.0
    prompt_size: int = 0
    weight_bytes: int = 0
    copy_bandwidth: float = 0.0

    def verify_for(self, proposals: int, plain: bool = False) -> float:
        """Time of a verification with the smallest measured row count that holds a token and the proposals.

        Args:
            proposals: Number of proposals.
            plain: Whether the round is a plain step of one row.
        """
        widths = [1] if plain else [w for w in sorted(self.verify) if w in self.rows or not self.rows]
        return self.verify[next((w for w in widths if w > proposals), widths[-1])]

    @property
    def weight_bandwidth(self) -> float:
        """Bytes of weights per second in a plain step."""
        return self.weight_bytes / self.verify[1]


@dataclass
class Run:
    """Results of one drafter with one k.

    Attributes:
        drafter: The drafter's name; "none" for no drafter. A published head has its own name, such as "eagle3".
        k: Requested proposals per round.
        width: The most rows of a verification.
        tokens_per_second: Speed after the prefill, from the medians of each text over the repeats.
        acceptance_rate: Accepted over proposed.
        tokens_per_round: Block efficiency.
        proposed_per_round: Actual proposals per round. Fewer than k near the end of a text, without a match, or if
            "auto" chose so.
        speedup: Speed over plain decoding, from the medians of each text's ratios of adjacent times.
        ideal: Speedup computed from the parts: tokens per round * plain step / (proposed * draft step + verification).
        efficiency: speedup / ideal.
    """

    drafter: str
    k: Choice
    width: int
    tokens_per_second: float = 0.0
    acceptance_rate: float = 0.0
    tokens_per_round: float = 1.0
    proposed_per_round: float = 0.0
    speedup: float = 1.0
    ideal: float = 1.0
    efficiency: float = 1.0


@dataclass
class Batch:
    """Results for many texts with one batch size, including prompts.

    Attributes:
        size: Texts at the same time.
        plain: Tokens per second without a drafter.
        speculative: Tokens per second with a drafter.
        speedup: speculative / plain, as the median of the ratios of adjacent times.
    """

    size: int
    plain: float = 0.0
    speculative: float = 0.0
    speedup: float = 1.0


@dataclass
class Report:
    """Results of a benchmark.

    Attributes:
        parts: Times of the parts of a round.
        runs: Plain decoding, then all rows without a drafter, then each drafter with each k.
        advice: The recommendation, in one line.
        settings: Settings of the measurement.
        batches: Results by batch size, for the best drafter with its best k and for no drafter.
    """

    parts: Parts
    runs: list[Run]
    advice: str
    settings: dict[str, Any]
    batches: list[Batch] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        found = asdict(self)
        found["parts"]["weight_bandwidth"] = self.parts.weight_bandwidth
        return found


class SimulatedDrafter(Drafter):
    """Simulates a drafter of a given quality at another drafter's cost: proposes the target's text with random errors.

    Args:
        drafter: The drafter whose cost is simulated. It runs, and its tokens are replaced.
        texts: Token ids of prompt and completion of every text, generated by the target alone.
        acceptance: Probability that a proposal is right if all before it were.
        vocab_size: Wrong tokens are ids below it.
        seed: Seed of the wrong positions, which are the same for every drafter and every k.
    """

    def __init__(
        self, drafter: Drafter, texts: Sequence[Sequence[int]], acceptance: float, vocab_size: int, seed: int = 0
    ) -> None:
        self.drafter = drafter
        self.taps = drafter.taps
        self.max_k = drafter.max_k
        self._texts = [list(text) for text in texts]
        self._proposals = [
            torch.tensor([token if rng.random() < acceptance else (token + 1) % vocab_size for token in text])
            for text, rng in ((text, random.Random(f"{seed}:{i}")) for i, text in enumerate(texts))
        ]

    @property
    def name(self) -> str:
        return self.drafter.name

    def cost(self, k: int) -> Cost:
        return self.drafter.cost(k)

    def memory(self, max_length: int) -> int:
        return self.drafter.memory(max_length)

    def reserve(self, target: TargetSession) -> None:
        self.drafter.reserve(target)

    def start(self, target: TargetSession, max_length: int, sampler: Sampler) -> DraftSession:
        return _SimulatedSession(self, self.drafter.start(target, max_length, sampler), target.device)

    def propose_batch(
        self, sessions: Sequence[DraftSession], tokens: Sequence[int], input_pos: Sequence[int], k: Sequence[int]
    ) -> list[Proposal]:
        own = [session for session in sessions if isinstance(session, _SimulatedSession)]
        replaced = self.drafter.propose_batch([session.session for session in own], tokens, input_pos, k)
        return [
            session.instead(place, proposal.tokens.size(0))
            for session, place, proposal in zip(own, input_pos, replaced, strict=True)
        ]

    def proposals_for(self, prompt: Sequence[int]) -> torch.Tensor:
        """The proposals for each position of the text with this prompt, or of the first text if there is none."""
        found = (i for i, text in enumerate(self._texts) if text[: len(prompt)] == list(prompt))
        return self._proposals[next(found, 0)]


class _SimulatedSession(DraftSession):
    def __init__(self, drafter: SimulatedDrafter, session: DraftSession, device: torch.device) -> None:
        self._drafter = drafter
        self.session = session
        self._device = device
        self._proposals: torch.Tensor | None = None

    def commit(self, tokens: Sequence[int], input_pos: int, hidden: torch.Tensor | None = None) -> None:
        if self._proposals is None:
            self._proposals = self._drafter.proposals_for(tokens).to(self._device)
        self.session.commit(tokens, input_pos, hidden)

    def propose(self, token: int, input_pos: int, k: int) -> Proposal:
        return self.instead(input_pos, self.session.propose(token, input_pos, k).tokens.size(0))

    def instead(self, input_pos: int, m: int) -> Proposal:
        """m proposals after the token at `input_pos`, which replace the drafted ones."""
        assert self._proposals is not None, "the prompt is committed before a proposal"
        return Proposal(self._proposals[input_pos + 1 : input_pos + 1 + m])

    def prepare(self, sizes: Sequence[int]) -> None:
        self.session.prepare(sizes)

    def close(self) -> None:
        self.session.close()


def plain_decoder(llm: SpecLLM, load: Callable[[], SpecLLM]) -> SpecLLM:
    """The fastest plain decoding of the same target.

    Args:
        llm: The target, loaded to verify several rows.
        load: Loads the target for plain decoding, see `SpecLLM.load`. Called only if `llm` has float32 weights packed
            for several rows (see `model.packed`), with which one row is slower.
    """
    return load() if slows_one_row(llm.placed.model) else llm.with_drafter("none", verify_width=1)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def interleaved(
    functions: dict[Any, Callable[[], Any]],
    repeats: int,
    device: torch.device,
    before: Mapping[Any, Callable[[], Any]] = MappingProxyType({}),
) -> dict[Any, float]:
    """Median times, in seconds, of functions that run in turns.

    In each turn a function runs up to five times and the last run is timed. So its weights and code are cached, as in a
    text. The first two turns are warm-up.

    Args:
        functions: Functions by name.
        repeats: Number of turns.
        device: Device of the functions.
        before: By the function's name, a function that runs before each of its runs and is not timed. It should be what
            precedes it in a text, which may evict its weights from the caches.
    """
    seconds: dict[Any, list[float]] = {name: [] for name in functions}
    for turn in range(repeats + 2):
        for name, function in functions.items():
            prepare = before.get(name, lambda: None)
            came = time.perf_counter()
            for _ in range(4):
                prepare()
                function()
                _synchronize(device)
                if time.perf_counter() - came > 0.03:
                    break
            prepare()
            _synchronize(device)
            began = time.perf_counter()
            function()
            _synchronize(device)
            if turn >= 2:
                seconds[name].append(time.perf_counter() - began)
    return {name: median(measured) for name, measured in seconds.items()}


def copy_bandwidth(device: torch.device, size: int = 2**28) -> float:
    """Bytes read and written per second when copying within the device's memory."""
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size / interleaved({0: lambda: target.copy_(source)}, 5, device)[0]


@torch.inference_mode()
def measure_parts(
    llm: SpecLLM,
    plain: SpecLLM,
    drafters: dict[str, Drafter],
    sampling: Sampling,
    text: list[int],
    widths: Sequence[int],
    repeats: int,
    k: int | None = None,
) -> Parts:
    """Times the parts of a round in the middle of a text.

    Args:
        llm: The target.
        plain: The same target for plain decoding.
        drafters: Drafters by name.
        sampling: How tokens are chosen.
        text: Token ids of a prompt and its completion, at least two.
        widths: Row counts to verify, including 1.
        repeats: Number of turns.
        k: Proposals per draft; None for the most possible.
    """
    device = llm.placed.device
    # Room for a proposal; the cache has its own room for the rows of a verification.
    room = min(len(text) + llm.verify_width, llm.placed.model.config.block_size)
    sampler = make_sampler(sampling, seed=0)
    functions: dict[Any, Callable[[], Any]] = {}
    before: dict[Any, Callable[[], Any]] = {}

    for width in widths:
        # Plain decoding uses its own target, whose weights are in the layout for one row.
        placed = plain.placed if width == 1 else replace(llm.placed, verify_width=width)
        trial = Trial(Slots(placed, 1, room), None, sampler, text, ())
        functions["verify", width] = partial(trial.verify, width)

    for name, drafter in drafters.items():
        drafted = k or min(drafter.max_k, llm.verify_width - 1)
        trial = Trial(Slots(llm.placed, 1, room), drafter, sampler, text, (drafted,))
        functions["draft", name, drafted] = partial(trial.draft, drafted)
        # As in a round, a draft follows a verification.
        before["draft", name, drafted] = functions["verify", max(widths)]

    prompt = TargetSession(llm.placed, room)
    idx = torch.tensor([text], device=device)
    functions["prefill"] = lambda: prompt.model.prefill(idx, prompt.cache)

    measured = interleaved(functions, repeats, device, before)
    return Parts(
        verify={key[1]: seconds for key, seconds in measured.items() if key[0] == "verify"},
        rows=llm.runner.rows(llm.placed.rows),
        draft={key[1]: seconds / key[2] for key, seconds in measured.items() if key[0] == "draft"},
        prefill=measured["prefill"],
        prompt_size=len(text),
        weight_bytes=step_bytes(plain.placed.model),
        copy_bandwidth=copy_bandwidth(device),
    )


def measure(
    llm: SpecLLM,
    plain: SpecLLM,
    drafters: Sequence[DrafterName],
    prompts: Sequence[str],
    *,
    ks: Sequence[Choice],
    sampling: Sampling,
    max_new_tokens: int,
    repeats: int,
    exit_layer: int | None = None,
    heads: Mapping[str, Drafter] = MappingProxyType({}),
    seed: int = 1234,
    simulate_acceptance: float | None = None,
    batch_sizes: Sequence[int] = (),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Report:
    """Measures plain decoding and each drafter with each k on the same prompts, in turns.

    Args:
        llm: The target, and the draft model if there is one.
        plain: The same target for plain decoding, see `plain_decoder`.
        drafters: Names of the drafters to measure.
        prompts: The prompts.
        ks: Proposals per round.
        sampling: How tokens are chosen.
        max_new_tokens: Tokens per text.
        repeats: Number of turns.
        exit_layer: Layers that draft in "early_exit".
        heads: More drafters to measure, by the folder that each was loaded from.
        seed: Seed of the texts.
        simulate_acceptance: Acceptance to simulate at each drafter's cost; None for real drafts.
        batch_sizes: Batch sizes to measure in addition.
        progress: Called between timings with the number of completed steps and the total.

    Raises:
        InputError: A setting or a prompt cannot be used. Raised before the measurement.
    """
    config, width = llm.placed.model.config, llm.verify_width
    settings: dict[str, Any] = dict(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        sampler=sampling.sampler,
        max_new_tokens=max_new_tokens,
        seed=seed,
    )

    last = [Path(folder).name for folder in heads]
    shown = last if len(set(last)) == len(last) else list(heads)
    by_row = {f"{head.name} ({name})": (folder, head) for name, (folder, head) in zip(shown, heads.items())}

    def make(name: str) -> Drafter:
        if name in by_row:
            return copy.copy(by_row[name][1])
        drafter = llm.with_drafter(asked_for(name), exit_layer=exit_layer).drafter
        assert drafter is not None, "only 'none' gives no drafter"
        return drafter

    smallest = llm.runner.rows(llm.placed.rows)[0]
    made = {drafter.name: drafter for drafter in map(make, drafters)} | {name: make(name) for name in by_row}
    runs = [Run("none", 0, 1), Run("none", 0, smallest), *(Run(name, k, width) for name in made for k in ks)]
    done, total = 0, len(prompts) + 1 + len(runs) * (1 + repeats * len(prompts)) + len(batch_sizes) * (1 + repeats)

    def advance() -> None:
        nonlocal done
        done += 1
        progress(done, total)

    progress(done, total)
    wide = llm.with_drafter("none")  # runs every drafter in turn, so that all use one K/V cache
    texts = []
    for j, prompt in enumerate(prompts):
        texts.append(wide.generate(prompt, index=j, **settings))
        advance()
    if sum(map(_tokens, texts)) == 0:
        raise InputError(
            f"The target ends every text at its first token, so there is nothing to measure with these {len(prompts)} "
            "prompts; give other prompts in prompts_file."
        )
    ids = [llm.codec.encode(prompt).tolist() + text.token_ids for prompt, text in zip(prompts, texts)]
    longest = max(range(len(ids)), key=lambda j: len(ids[j]))
    middle = min(len(ids[longest]) - max_new_tokens // 2, config.block_size - width)

    parts = measure_parts(
        llm,
        plain,
        made,
        sampling,
        (2 * ids[longest])[: max(2, middle)],
        sorted({1, *llm.runner.rows(llm.placed.rows)}),
        repeats=20,
    )
    advance()

    # One drafter per run: with a shared one, the second run would reuse the prompt of the first.
    drafting = [None if run.drafter == "none" else make(run.drafter) for run in runs]
    if simulate_acceptance is not None:
        drafting = [
            drafter and SimulatedDrafter(drafter, ids, simulate_acceptance, config.vocab_size, seed)
            for drafter in drafting
        ]
    measured: list[list[list[Completion]]] = [[] for _ in runs]  # by run and turn
    for turn in range(repeats + 1):
        completions: list[list[Completion]] = [[] for _ in runs]
        # The first turn is warm-up.
        for j in range(len(prompts)) if turn else [longest]:
            for i, (run, drafter) in enumerate(zip(runs, drafting)):
                decoder = plain if i == 0 else wide
                decoder.drafter = drafter
                completions[i].append(decoder.generate(prompts[j], index=j, speculative_k=run.k, **settings))
                advance()
        if turn:
            for i, turns in enumerate(measured):
                turns.append(completions[i])
    summarize(runs, measured, parts)
    settings |= dict(
        target=config.name,
        draft=llm.draft_name if "draft_model" in drafters else None,
        exit_layer=exit_layer,
        device=str(llm.placed.device),
        dtype=str(next(llm.placed.model.parameters()).dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        verify_width=width,
        prompts=len(prompts),
        repeats=repeats,
        simulate_acceptance=simulate_acceptance,
        compiled_steps=len(llm.runner),
        compile_seconds=llm.compile_seconds,
    )
    best = max((run for run in runs if run.drafter != "none"), key=lambda run: run.speedup)
    batches = []
    for size in batch_sizes:
        batches.append(
            measure_batch(
                wide,
                make(best.drafter),
                best.k,
                size,
                several(prompts, 2 * size),
                repeats,
                simulate_acceptance,
                advance,
                **{name: settings[name] for name in (*GENERATED, "seed")},
            )
        )
    folders = {name: str(folder) for name, (folder, _) in by_row.items()}
    advice = advise(runs, parts, exit_layer, simulate_acceptance, folders)
    # Smaller weights may stay in the processor's cache, which is faster than memory.
    share = parts.weight_bandwidth / parts.copy_bandwidth if parts.weight_bytes > 256e6 else 0.0
    if warning := noise([_speed(turn) for turn in measured[0]], share):
        advice = f"{advice} {warning}"
    if batches:
        advice += " " + advise_batches(batches)
    return Report(parts, runs, advice, settings, batches)


def asked_for(name: str) -> DrafterName:
    """The value of --drafter that gives a drafter. A head is loaded by draft_model, from --draft_dir."""
    return cast(DrafterName, name) if name in get_args(DrafterName) else "draft_model"


def _speed(texts: Sequence[Completion]) -> float:
    """Tokens per second of one turn, without the prefill."""
    seconds = sum(text.stats.decode_seconds for text in texts)
    return sum(max(text.stats.new_tokens - 1, 0) for text in texts) / seconds if seconds else 0.0


def noise(plain: Sequence[float], share: float) -> str:
    """A warning if other work disturbed the measurement, else "".

    Args:
        plain: Tokens per second of plain decoding, by turn.
        share: Bandwidth of reading weights in a plain step, over that of a copy. Values well above 1 are impossible for
            weights that do not fit in a cache.
    """
    slowest, fastest = min(plain, default=0.0), max(plain, default=0.0)
    found = []
    if fastest > NOISY * slowest:
        found.append(f"plain decoding ran at {slowest:.1f} to {fastest:.1f} tokens/s in {len(plain)} equal turns")
    if share > NOISY:
        found.append(f"weights seem to be read at {share:.0%} of the bandwidth of a copy")
    if not found:
        return ""
    return (
        f"Other work disturbed the measurement, so these figures are rough: {' and '.join(found)}. Measure again when "
        "nothing else runs; on a small or busy machine `--threads 1` may be faster."
    )


NOISY = 1.25  # largest ratio of times that should be equal
# Settings of a text that a measurement passes to `generate`.
GENERATED = ("temperature", "top_k", "top_p", "sampler", "max_new_tokens")


def several(prompts: Sequence[str], count: int) -> list[str]:
    """Makes `count` different prompts from a few: each repetition of a prompt has one word less."""
    found = []
    for i in range(count):
        words = prompts[i % len(prompts)].split(" ")
        found.append(" ".join(words[: max(1, len(words) - i // len(prompts) % max(1, len(words) - 1))]))
    return found


def measure_batch(
    llm: SpecLLM,
    drafter: Drafter,
    k: Choice,
    size: int,
    prompts: Sequence[str],
    repeats: int,
    simulate_acceptance: float | None = None,
    advance: Callable[[], None] = lambda: None,
    **settings: Any,
) -> Batch:
    """Measures many texts with one batch size, without a drafter and with one, in turns.

    Args:
        llm: The target; its drafter is changed.
        drafter: The drafter.
        k: Proposals per round.
        size: Texts at the same time.
        prompts: The prompts.
        repeats: Number of turns.
        simulate_acceptance: See `measure`.
        advance: Called between timings.
        settings: Arguments of `SpecLLM.generate`.
    """
    batch, ways = Batch(size), {"plain": None, "speculative": drafter}
    if simulate_acceptance is not None:
        llm.drafter = None
        texts = llm.generate(list(prompts), batch_size=size, **settings)
        ids = [llm.codec.encode(prompt).tolist() + text.token_ids for prompt, text in zip(prompts, texts)]
        ways["speculative"] = SimulatedDrafter(drafter, ids, simulate_acceptance, llm.placed.model.config.vocab_size)
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name, llm.drafter in ways.items():
            _synchronize(llm.placed.device)
            began = time.perf_counter()
            texts = llm.generate(list(prompts), batch_size=size, speculative_k=k, **settings)
            _synchronize(llm.placed.device)
            if turn:  # the first is warm-up
                speeds[name].append(sum(text.stats.new_tokens for text in texts) / (time.perf_counter() - began))
        advance()
    batch.plain, batch.speculative = median(speeds["plain"]), median(speeds["speculative"])
    batch.speedup = median(b / a for a, b in zip(speeds["plain"], speeds["speculative"]))
    return batch


def advise_batches(batches: Sequence[Batch]) -> str:
    """The recommended batch size, and whether speculation is faster, in one line."""
    best = max(batches, key=lambda batch: max(batch.plain, batch.speculative))
    slow = [batch.size for batch in batches if batch.speedup <= 1]
    line = f"Most tokens per second with --batch_size {best.size}: {max(best.plain, best.speculative):.0f}"
    if best.speedup <= 1:
        return f"{line}, without a drafter; from {min(slow)} texts at a time on, speculation is not faster."
    if slow:
        return f"{line}; speculation is not faster with {', '.join(map(str, slow))} texts at a time."
    return f"{line}; speculation is faster at every size measured."


def summarize(runs: Sequence[Run], measured: Sequence[Sequence[Sequence[Completion]]], parts: Parts) -> None:
    """Computes the results of the runs.

    For each text, the median over the turns is used, both for its time and for the ratio to the plain text of the same
    turn, so that a short disturbance has no effect. Times of the texts are then added.

    Args:
        runs: The runs to fill; plain decoding is the first.
        measured: For each run and turn, the texts.
        parts: Times of the parts, for the ideal speedup.
    """
    plain = measured[0]
    for run, turns in zip(runs, measured):
        texts = [text for turn in turns for text in turn]
        rounds, proposed = (sum(getattr(text.stats, name) for text in texts) for name in ("rounds", "proposed"))
        if rounds:
            run.tokens_per_round = sum(map(_tokens, texts)) / rounds
            run.proposed_per_round = proposed / rounds
        run.acceptance_rate = sum(text.stats.accepted for text in texts) / proposed if proposed else 0.0
        tokens = [_tokens(text) for text in turns[0]]
        seconds = [median(map(_seconds_per_token, same)) for same in zip(*turns)]
        ratios = [
            median(_seconds_per_token(a) / _seconds_per_token(b) for a, b in zip(*same))
            for same in zip(zip(*plain), zip(*turns))
        ]
        run.tokens_per_second = sum(tokens) / sum(n * each for n, each in zip(tokens, seconds))
        run.speedup = harmonic_mean(ratios, weights=tokens)
        drafting = run.proposed_per_round * parts.draft.get(run.drafter, 0.0)
        blocks = [block for text in texts for block in text.blocks[1:]]
        verifying = [parts.verify_for(block.proposed, plain=run is runs[0]) for block in blocks]
        if verifying:
            run.ideal = run.tokens_per_round * parts.verify[1] / (drafting + fmean(verifying))
        run.efficiency = run.speedup / run.ideal


def _tokens(text: Completion) -> int:
    """Tokens from rounds: without the prefill's, and including a stop token."""
    return text.stats.new_tokens - 1 + (text.finish_reason == "stop")


def _seconds_per_token(text: Completion) -> float:
    return text.stats.decode_seconds / max(_tokens(text), 1)


def advise(
    runs: Sequence[Run],
    parts: Parts,
    exit_layer: int | None = None,
    simulate_acceptance: float | None = None,
    folders: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """The recommended drafter and k for this pair on this machine, in one line.

    Args:
        runs, parts: The results.
        exit_layer, simulate_acceptance: See `measure`.
        folders: Folders of the drafters that came from `heads`, by the name in `runs`.
    """
    best = max((run for run in runs if run.drafter != "none"), key=lambda run: run.speedup)
    simulated = "" if simulate_acceptance is None else f"Simulated, with {simulate_acceptance:.0%} right proposals: "
    if best.speedup > 1:
        exit_at = f" --exit_layer {exit_layer}" if best.drafter == "early_exit" and exit_layer is not None else ""
        folder = folders.get(best.drafter)
        chosen = f"--drafter {asked_for(best.drafter)}" if folder is None else f"--draft_dir {folder}"
        return (
            f"{simulated}Best here: {chosen}{exit_at} --speculative_k {best.k}, "
            f"{best.speedup:.2f} times plain decoding."
        )
    verifying = parts.verify_for(round(best.proposed_per_round)) / parts.verify[1]
    drafting = best.proposed_per_round * parts.draft[best.drafter] / parts.verify[1]
    return (
        f"{simulated}Plain decoding is faster (--drafter none), because the best drafter "
        f"({best.drafter}, k = {best.k}) brings {best.tokens_per_round:.2f} tokens per round, and its round takes "
        f"{best.tokens_per_round / best.speedup:.2f} plain steps (its parts: {verifying:.2f} to verify, {drafting:.2f} "
        "to draft)."
    )


def check_plot(path: str) -> None:
    """Checks before the measurement that `plot_report` can write the file. An existing file is not changed.

    Raises:
        InputError: matplotlib is not installed or does not support the format, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ModuleNotFoundError as error:
        raise InputError('plot needs matplotlib; install it with: pip install "litspec[bench]"') from error
    kinds = FigureCanvasAgg.get_supported_filetypes()
    if _kind(path) not in kinds:
        raise InputError(f"plot must end in one of {', '.join(f'.{kind}' for kind in sorted(kinds))}, got {path!r}")
    was_there = os.path.lexists(path)
    try:
        with open(path, "ab"):
            pass
        if not was_there:
            os.unlink(path)
    except OSError as error:
        raise InputError(f"plot cannot be written to {path!r}: {error}") from error


def _kind(path: str) -> str:
    return Path(path).suffix[1:].lower()


def plot_report(report: Report, path: str) -> None:
    """Plots the speedup of each drafter with each k as a bar, with the ideal speedup.

    Raises:
        InputError: The file cannot be written.
    """
    from matplotlib.figure import Figure

    wide, *runs = report.runs[1:]
    drafters = list(dict.fromkeys(run.drafter for run in runs))
    ks = list(dict.fromkeys(run.k for run in runs))
    # One group of bars per drafter, with a gap of one bar between groups; the run without a drafter comes first.
    places = [0] + [2 + drafters.index(run.drafter) * (len(ks) + 1) + ks.index(run.k) for run in runs]
    colors = ["0.5"] + ["#7a5195" if run.k == "auto" else "#2f6f9f" for run in runs]
    speedups, ideals = ([getattr(run, name) for run in (wide, *runs)] for name in ("speedup", "ideal"))
    top = 1.1 * max(1.0, *speedups, *ideals)

    figure = Figure(figsize=(max(6.5, 1.5 + 0.47 * (places[-1] + 1)), 4.2), layout="constrained")
    axes = figure.add_subplot()
    axes.bar(places, speedups, width=0.84, color=colors, zorder=2)
    for x, speedup, ideal in zip(places, speedups, ideals):
        # At the bottom of the bar if it is high enough, else above it.
        low = speedup < 0.1 * top
        axes.annotate(
            f"{speedup:.2f}",
            (x, max(speedup, ideal) if low else 0),
            textcoords="offset points",
            xytext=(0, 4),
            ha="center",
            color="0.2" if low else "white",
            fontsize=9,
        )
    ends = ([x - 0.42 for x in places], [x + 0.42 for x in places])
    axes.hlines(ideals, *ends, color="0.1", linewidth=1.6, zorder=3, label="ideal, from the times of the parts")
    plain = f"plain decoding, {report.runs[0].tokens_per_second:.0f} tokens/s"
    axes.axhline(1, color="#c0392b", linewidth=1.2, linestyle="--", zorder=1, label=plain)
    axes.set_xticks(places, ["", *(str(run.k) for run in runs)])
    axes.tick_params(axis="x", length=0)
    for i, name in enumerate([f"no drafter,\n{wide.width} rows", *drafters]):
        members = [x for x, run in zip(places, (wide, *runs)) if run.drafter == (name if i else "none")]
        axes.annotate(
            name,
            (sum(members) / len(members), 0),
            xycoords=axes.get_xaxis_transform(),
            textcoords="offset points",
            xytext=(0, -20 if i else -6),
            ha="center",
            va="top",
            fontweight="bold" if i else "normal",
        )
    axes.set_xlabel("proposals per round (k) of each drafter", labelpad=20)
    axes.set_ylabel("speed over plain decoding")
    axes.set_ylim(0, top)
    axes.margins(x=0.02)
    simulated = report.settings["simulate_acceptance"]
    title = report.settings["target"] + ("" if simulated is None else f", {simulated:.0%} right proposals simulated")
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper right", ncols=2, frameon=False, fontsize=9)
    try:
        figure.savefig(path, dpi=150, format=_kind(path))
    except OSError as error:
        raise InputError(f"plot cannot be written to {path!r}: {error}") from error
