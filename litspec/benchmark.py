"""Measuring a pair on this machine: what its parts cost, what they allow, and what the loop makes of it.

All timings of one comparison are taken in one process, interleaved (A B A B), and reported as medians: a machine's
speed drifts, the ratio of neighbours hardly does. *Plain* decoding is one row a step without a drafter.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any, Literal

import torch

from litspec.drafters import Drafter, DraftSession, Proposal
from litspec.drafters.autoregressive import step_bytes
from litspec.errors import InputError
from litspec.llm import Completion, SpecLLM
from litspec.rounds import TargetSession
from litspec.sampling import Sampler, Sampling, make_sampler

Choice = int | Literal["auto"]


@dataclass
class Parts:
    """Medians, in seconds, of what rounds are made of, sampling and the read to the host included.

    Attributes:
        verify: By width: one verification of so many rows. Width 1 is a plain step.
        draft: One proposed token of the drafter, by the drafter's name.
        prefill: The prompt, of `prompt_size` tokens.
        prompt_size: Tokens.
        weight_bytes: Bytes of weights that one step of the target reads.
        copy_bandwidth: Bytes a second that this machine reads and writes when it copies memory.
    """

    verify: dict[int, float] = field(default_factory=dict)
    draft: dict[str, float] = field(default_factory=dict)
    prefill: float = 0.0
    prompt_size: int = 0
    weight_bytes: int = 0
    copy_bandwidth: float = 0.0

    @property
    def bandwidth_share(self) -> float:
        """Bytes of weights a second in a plain step over the bandwidth of a copy."""
        return self.weight_bytes / self.verify[1] / self.copy_bandwidth


@dataclass
class Run:
    """One way of decoding the prompts.

    Attributes:
        drafter: Its name, "none" without one.
        k: Proposals a round.
        width: Rows verified at once.
        tokens_per_second: Median over the repeats; after the prefill.
        acceptance_rate: Accepted over proposed.
        tokens_per_round: Block efficiency.
        speedup: Over plain decoding, the median of the ratios of neighbouring repeats.
        ideal: The speedup that the parts allow: tokens per round * plain step / (k * draft step + verification).
        efficiency: speedup / ideal.
    """

    drafter: str
    k: Choice
    width: int
    tokens_per_second: float = 0.0
    acceptance_rate: float = 0.0
    tokens_per_round: float = 1.0
    speedup: float = 1.0
    ideal: float = 1.0
    efficiency: float = 1.0


@dataclass
class Report:
    """What a benchmark found."""

    parts: Parts
    runs: list[Run]
    advice: str
    settings: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class SimulatedDrafter:
    """Proposes the target's own text, corrupted at a rate, at another drafter's cost: a draft of a given quality.

    Args:
        drafter: Runs as it would, for its cost; what it proposes is thrown away. None costs nothing.
        texts: Token ids of prompt and completion of every text, as the target alone writes them.
        acceptance: Probability that a proposal is right.
        max_k: Most proposals a round.
        vocab_size: Ids to put in the place of right ones.
    """

    taps: tuple[int, ...] = ()

    def __init__(
        self, drafter: Drafter | None, texts: Sequence[Sequence[int]], acceptance: float, max_k: int, vocab_size: int
    ) -> None:
        self.drafter = drafter
        self.texts = [list(text) for text in texts]
        self.acceptance = acceptance
        self.max_k = max_k
        self.vocab_size = vocab_size
        self.step_bytes = drafter.step_bytes if drafter is not None else 0

    def begin(self, target: TargetSession, max_length: int, sampler: Sampler) -> DraftSession:
        session = self.drafter.begin(target, max_length, sampler) if self.drafter is not None else None
        return _SimulatedSession(self, session, target.device)


class _SimulatedSession:
    def __init__(self, drafter: SimulatedDrafter, session: DraftSession | None, device: torch.device) -> None:
        self._drafter = drafter
        self._session = session
        self._device = device
        self._told: list[int] = []
        self._proposals: list[int] | None = None  # what is proposed for each position of this text

    def extend(self, tokens: Sequence[int], input_pos: int, hidden: torch.Tensor | None = None) -> None:
        self._told += tokens
        if self._session is not None:
            self._session.extend(tokens, input_pos, hidden)

    def propose(self, token: int, input_pos: int, k: int) -> Proposal:
        if self._session is not None:
            self._session.propose(token, input_pos, k)
        if self._proposals is None:
            text = next(text for text in self._drafter.texts if text[: len(self._told)] == self._told)
            rng = random.Random(len(text))
            self._proposals = [
                t if rng.random() < self._drafter.acceptance else (t + 1) % self._drafter.vocab_size for t in text
            ]
        proposal = self._proposals[input_pos + 1 : input_pos + 1 + k]
        return Proposal(torch.tensor(proposal, dtype=torch.int64, device=self._device))

    def close(self) -> None:
        if hasattr(self._session, "close"):
            self._session.close()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def interleaved(functions: dict[Any, Callable[[], Any]], repeats: int, device: torch.device) -> dict[Any, float]:
    """Medians, in seconds, of functions that take turns; each is run twice before to warm up."""
    seconds: dict[Any, list[float]] = {name: [] for name in functions}
    for turn in range(repeats + 2):
        for name, function in functions.items():
            _synchronize(device)
            began = time.perf_counter()
            function()
            _synchronize(device)
            if turn >= 2:
                seconds[name].append(time.perf_counter() - began)
    return {name: median(measured) for name, measured in seconds.items()}


def copy_bandwidth(device: torch.device, size: int = 2**28) -> float:
    """Bytes a second, read and written, of a copy within the device's memory."""
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size / interleaved({0: lambda: target.copy_(source)}, 7, device)[0]


@torch.inference_mode()
def measure_parts(
    llm: SpecLLM, drafters: dict[str, Drafter], sampling: Sampling, text: list[int], widths: Sequence[int], repeats: int
) -> Parts:
    """Times the parts of a round in the middle of a text.

    Args:
        llm: The target.
        drafters: By name.
        sampling: How tokens are chosen.
        text: Token ids of a prompt and its completion.
        widths: Rows to verify, 1 among them.
        repeats: Turns for each part.
    """
    device = llm.placed.device
    room = len(text) + max(widths)
    sampler = make_sampler(sampling, seed=0, device=device)
    middle = len(text) - 1
    functions: dict[Any, Callable[[], Any]] = {}

    for width in widths:
        session = TargetSession(replace(llm.placed, verify_width=width), room)
        session.prefill(text)
        proposal = torch.tensor(text[: width - 1], dtype=torch.int64, device=device)

        def verification(session: TargetSession = session, proposal: torch.Tensor = proposal) -> None:
            logits, _ = session.verify(text[-1], middle, proposal)
            sampler.verify(logits, middle + 1, proposal).tokens.tolist()

        functions["verify", width] = verification

    for name, drafter in drafters.items():
        session = TargetSession(llm.placed, room)
        session.prefill(text)
        draft = drafter.begin(session, room, sampler)
        draft.extend(text, 0)
        k = min(drafter.max_k, llm.verify_width - 1)
        functions["draft", name, k] = lambda draft=draft, k=k: draft.propose(text[-1], middle, k)

    prompt = TargetSession(llm.placed, room)
    idx = torch.tensor([text], device=device)
    functions["prefill"] = lambda: prompt.model.prefill(idx, prompt.cache)

    measured = interleaved(functions, repeats, device)
    return Parts(
        verify={key[1]: seconds for key, seconds in measured.items() if key[0] == "verify"},
        draft={key[1]: seconds / key[2] for key, seconds in measured.items() if key[0] == "draft"},
        prefill=measured["prefill"],
        prompt_size=len(text),
        weight_bytes=step_bytes(llm.placed.model),
        copy_bandwidth=copy_bandwidth(device),
    )


def measure(
    llm: SpecLLM,
    drafters: dict[str, Drafter],
    prompts: Sequence[str],
    *,
    ks: Sequence[Choice],
    sampling: Sampling,
    max_new_tokens: int,
    repeats: int,
    seed: int = 1234,
    simulate_acceptance: float | None = None,
    progress: Callable[[], None] = lambda: None,
) -> Report:
    """Benchmarks a pair.

    Args:
        llm: The target, at the width that speculation uses.
        drafters: By name; each is measured at every k.
        prompts: Decoded by every run in every repeat.
        ks: Proposals a round, numbers below the width or "auto".
        sampling: Its `seed` is not used.
        max_new_tokens: Tokens a text.
        repeats: Turns.
        seed: Of the texts.
        simulate_acceptance: None, or the share of right proposals that is simulated at each drafter's cost.
        progress: Called after each run of each turn.
    """
    width = llm.verify_width
    settings = dict(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        sampler=sampling.sampler,
        max_new_tokens=max_new_tokens,
        seed=seed,
    )
    plain, wide = llm.with_drafter("none", verify_width=1), llm.with_drafter("none")
    texts = [wide.generate(prompt, index=i, **settings) for i, prompt in enumerate(prompts)]
    ids = [llm.codec.encode(prompt).tolist() + text.token_ids for prompt, text in zip(prompts, texts)]
    longest = max(ids, key=len)
    parts = measure_parts(
        llm, drafters, sampling, longest[: max(2, len(longest) - max_new_tokens // 2)], sorted({1, 2, 4, width}), 30
    )
    if simulate_acceptance is not None:
        vocab_size = llm.placed.model.config.vocab_size
        drafters = {
            name: SimulatedDrafter(drafter, ids, simulate_acceptance, drafter.max_k, vocab_size)
            for name, drafter in drafters.items()
        }

    runs: list[tuple[Run, SpecLLM]] = [(Run("none", 0, 1), plain), (Run("none", 0, width), wide)]
    for name, drafter in drafters.items():
        runs += [(Run(name, k, width), llm.with_drafter(drafter)) for k in ks]
    seconds: list[list[float]] = [[] for _ in runs]  # per token after the first, by run and turn
    for turn in range(repeats + 1):
        for i, (run, decoder) in enumerate(runs):
            completions = [
                decoder.generate(prompt, index=j, speculative_k=run.k, **settings) for j, prompt in enumerate(prompts)
            ]
            if turn:  # the first turn warms up
                seconds[i].append(_seconds_per_token(completions))
            progress()
            stats = [completion.stats for completion in completions]
            proposed, rounds = sum(s.proposed for s in stats), sum(s.rounds for s in stats)
            run.acceptance_rate = sum(s.accepted for s in stats) / proposed if proposed else 0.0
            run.tokens_per_round = sum(s.new_tokens - 1 for s in stats) / rounds if rounds else 1.0
            if run.drafter != "none":
                # What was proposed a round on average; fewer than k where little was left or nothing matched.
                k = proposed / rounds if rounds else 0.0
                round_seconds = k * parts.draft[run.drafter] + parts.verify[width]
                run.ideal = run.tokens_per_round * parts.verify[1] / round_seconds
            else:
                run.ideal = parts.verify[1] / parts.verify[run.width]
    for (run, _), measured in zip(runs, seconds):
        run.tokens_per_second = 1 / median(measured)
        run.speedup = median(one / other for one, other in zip(seconds[0], measured))
        run.efficiency = run.speedup / run.ideal
    found = [run for run, _ in runs]
    return Report(parts, found, _advice(found, parts), settings)


def _seconds_per_token(completions: Sequence[Completion]) -> float:
    tokens = sum(completion.stats.new_tokens - 1 for completion in completions)
    return sum(completion.stats.decode_seconds for completion in completions) / max(tokens, 1)


def _advice(runs: Sequence[Run], parts: Parts) -> str:
    """One line: what to use for this pair on this machine."""
    best = max(runs, key=lambda run: run.tokens_per_second)
    if best.drafter != "none":
        return (
            f"Best here: --drafter {best.drafter} --speculative_k {best.k} --verify_width {best.width}, "
            f"{best.speedup:.2f} times plain decoding."
        )
    speculative = [run for run in runs if run.drafter != "none"]
    if not speculative:
        return "Plain decoding; there was no drafter to compare it with."
    closest = max(speculative, key=lambda run: run.tokens_per_second)
    ratio = parts.verify[closest.width] / parts.verify[1]
    return (
        f"Plain decoding is faster, because the best drafter ({closest.drafter}, k = {closest.k}) brings "
        f"{closest.tokens_per_round:.2f} tokens a round, and a round costs {ratio:.2f} plain steps to verify "
        f"before any drafting."
    )


def plot_report(report: Report, path: str) -> None:
    """Draws tokens a second by k, a line for each drafter, and plain decoding beside them.

    Raises:
        InputError: Without matplotlib, or where the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise InputError('plot needs matplotlib; install it with: pip install "litspec[bench]"') from error
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.add_subplot()
    plain, wide = report.runs[:2]
    axes.axhline(plain.tokens_per_second, color="0.35", linewidth=1.5, label="plain decoding (1 row)")
    axes.axhline(
        wide.tokens_per_second, color="0.35", linewidth=1.2, linestyle=":", label=f"no drafter, {wide.width} rows"
    )
    ks = list(dict.fromkeys(run.k for run in report.runs[2:]))
    for name in dict.fromkeys(run.drafter for run in report.runs[2:]):
        runs = [run for run in report.runs[2:] if run.drafter == name]
        (line,) = axes.plot(
            [ks.index(run.k) for run in runs], [run.tokens_per_second for run in runs], marker="o", label=name
        )
        for run in runs:
            axes.annotate(
                f"{run.speedup:.2f}x",
                (ks.index(run.k), run.tokens_per_second),
                textcoords="offset points",
                xytext=(0, 7),
                ha="center",
                fontsize=8,
                color=line.get_color(),
            )
    axes.set_xticks(range(len(ks)), [str(k) for k in ks])
    axes.margins(x=0.08)
    axes.set_ylim(bottom=0, top=1.15 * max(run.tokens_per_second for run in report.runs))
    axes.set_xlabel("proposals a round (k)")
    axes.set_ylabel("tokens / s after the prefill")
    axes.set_title(f"Speed by drafter and k, and speedup over plain decoding (W = {wide.width})", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise InputError(f"plot cannot be written to {path!r}: {error}") from error
