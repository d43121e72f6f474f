"""Checks of drafters and samplers, for authors of drafters and for `litspec verify`.

A text does not show most faults of a drafter: verification hides them, they only cost speed. So these checks look at
the proposals themselves.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from litspec.drafters.base import Drafter, DraftSession, Proposal
from litspec.engine.speculate import checked
from litspec.engine.target import TargetSession
from litspec.errors import InputError
from litspec.sampling import Distribution, Rejection, Sampler, Sampling, Verified, make_sampler

if TYPE_CHECKING:
    from litspec.llm import SpecLLM

# Significance level: a correct drafter fails a check once in a million.
P_VALUE = 1e-6
# Distributions after the same tokens may differ by rounding, which depends on the width of the block.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}


@dataclass(frozen=True)
class GTest:
    """Observed counts against reported probabilities: Woolf's G-test of goodness of fit.

    Attributes:
        statistic: 2 * sum of observed * log(observed / expected).
        p_value: Probability of at least this statistic if the counts come from the probabilities.
    """

    statistic: float
    p_value: float


def g_test(counts: torch.Tensor, probs: torch.Tensor) -> GTest:
    """Tests counts (K,) against probabilities (K,).

    Cells that expect fewer than 5 are put together. A count where the probability is 0 is impossible: p-value 0.
    """
    counts, probs = counts.double(), probs.double()
    if counts[probs <= 0].sum() > 0:
        return GTest(float("inf"), 0.0)
    expected = probs / probs.sum() * counts.sum()
    large = expected >= 5
    cells = [(counts[large], expected[large])]
    if expected[~large].sum() > 0:
        cells.append((counts[~large].sum().view(1), expected[~large].sum().view(1)))
    observed, expected = (torch.cat(column) for column in zip(*cells))
    statistic = 2 * torch.special.xlogy(observed, observed / expected).sum()
    degrees = torch.tensor(max(len(observed) - 1, 1), dtype=torch.float64)
    # The chi-square tail, by the incomplete gamma function.
    p_value = torch.special.gammaincc(degrees / 2, statistic.clamp_min(0) / 2)
    return GTest(float(statistic), float(p_value) if len(observed) > 1 else 1.0)


class _Text:
    """One text with its target and draft sessions. A script says how many proposals are accepted."""

    def __init__(
        self, llm: SpecLLM, drafter: Drafter, tokens: Sequence[int], max_length: int, sampler: Sampler
    ) -> None:
        self._taps = tuple(drafter.taps)
        self._drafter = drafter.name
        self.changed = ""  # what the drafter did to a list that it was given
        self.target = TargetSession(llm.placed, max_length)
        self.session: DraftSession = drafter.start(self.target, max_length, sampler)
        self.tokens = list(tokens)
        # As in decoding, the last token is not in the target's cache yet.
        _, hidden = self.target.prefill(self.tokens[:-1], self._taps)
        if hidden is not None:
            hidden = torch.cat((torch.zeros_like(hidden[:1]), hidden))
        self._tell(self.tokens[:-1], 0, None if hidden is None else hidden[:-1])
        self._tell(self.tokens[-1:], len(self.tokens) - 1, None if hidden is None else hidden[-1:])

    def _tell(self, tokens: list[int], input_pos: int, hidden: torch.Tensor | None) -> None:
        given = list(tokens)
        self.session.commit(given, input_pos, hidden)
        if given != tokens:
            self.changed = f"commit was given {tokens} and made it {given}"

    def propose(self, k: int) -> Proposal:
        """A proposal in the form that the protocol asks for.

        Raises:
            InputError: It has another.
        """
        proposal = self.session.propose(self.tokens[-1], len(self.tokens) - 1, k)
        return checked(proposal, self._drafter, self.target)

    def commit(self, proposal: Proposal, accepted: int, own: int) -> None:
        """Lets the target take `accepted` tokens of a proposal and add one of its own."""
        position = len(self.tokens) - 1
        _, hidden = self.target.verify(self.tokens[-1], position, proposal.tokens.to(self.target.device), self._taps)
        committed = [*proposal.tokens[:accepted].tolist(), own]
        self.tokens += committed
        self._tell(committed, position + 1, None if hidden is None else hidden[: len(committed)])


@torch.inference_mode()
def honesty(
    drafter: Drafter,
    llm: SpecLLM,
    contexts: Sequence[Sequence[int]],
    *,
    sampling: Sampling | None = None,
    draws: int = 4096,
    seed: int = 0,
    progress: Callable[[], None] = lambda: None,
) -> list[GTest]:
    """Draws one token many times at each context and tests the counts against the distribution reported.

    A proposal without a distribution counts as certain, whatever it is, and the text is the target's own for every such
    proposal; there is nothing to test.

    Args:
        drafter: The drafter to test.
        llm: The target.
        contexts: Token ids of each context, at least two.
        sampling: Sampling other than greedy; None for temperature 1.
        draws: Draws per context.
        seed: Seed of the draws.
        progress: Called after each context.
    """
    results = []
    for i, context in enumerate(contexts):
        sampler = make_sampler(sampling or Sampling(), seed=seed + i)
        text = _Text(llm, drafter, context, len(context) + llm.verify_width, sampler)
        vocabulary = llm.placed.model.config.padded_vocab_size
        counts = torch.zeros(vocabulary, dtype=torch.int64)
        reported: Distribution | None = None
        drawn = []
        for draw in range(draws):
            # At one position the same seed would draw the same token.
            sampler.set_seed((seed + i) * draws + draw)
            proposal = text.propose(1)
            if proposal.q is None or not len(proposal.tokens):
                break
            drawn.append(proposal.tokens)
            reported = proposal.q
        progress()
        if reported is None:
            continue
        counts.scatter_add_(0, torch.cat(drawn).cpu(), torch.ones(len(drawn), dtype=torch.int64))
        results.append(g_test(counts, _dense(reported, vocabulary)[0]))
    return results


def _dense(q: Distribution, vocabulary: int) -> torch.Tensor:
    """(m, V) on the host."""
    everything = Distribution(torch.zeros(q.probs.size(0), vocabulary, device=q.probs.device))
    return q.at(everything).cpu()


@torch.inference_mode()
def check_drafter(
    drafter: Drafter,
    llm: SpecLLM,
    *,
    contexts: Sequence[Sequence[int]] | None = None,
    rounds: int = 8,
    draws: int = 4096,
    seed: int = 0,
) -> None:
    """Checks that a drafter follows the protocol, and reports each violation.

    - k is respected, and proposals are ids of the target with proper distributions.
    - Rollback: after rounds in which the target took any part of a proposal, it drafts as a fresh session does that was
      told the same text.
    - `propose` may be repeated, and what was proposed leaves no trace.
    - Two texts at once do not disturb each other.
    - Honesty: tokens come from the distribution that is reported (`honesty`).

    Args:
        drafter: The drafter to check.
        llm: A loaded target. Its own drafter is not used.
        contexts: Token ids to begin texts with; None for random ones, some with repetitions.
        rounds: Scripted rounds per text.
        draws: Draws per context for the test of the reported distribution; 0 leaves it out.
        seed: Seed of all random choices.

    Raises:
        AssertionError: With a sentence for each broken promise.
    """
    rng = random.Random(seed)
    ids = min(llm.placed.model.config.vocab_size, llm.placed.model.config.padded_vocab_size)
    if contexts is None:
        made = [[rng.randrange(ids) for _ in range(rng.randrange(2, 24))] for _ in range(3)]
        contexts = [*made, made[0] * 3, made[1] * 2 + made[2]]
    problems: dict[str, str] = {}  # by promise, its first case
    for name, sampling in (("greedy", Sampling(temperature=0)), ("sampled", Sampling())):
        texts = []
        for i, context in enumerate(contexts):

            def sampler(i: int = i, sampling: Sampling = sampling) -> Sampler:
                return make_sampler(sampling, seed=seed + i)

            room = len(context) + (rounds + 1) * llm.verify_width
            texts.append((_Text(llm, drafter, context, room, sampler()), sampler, room))
        # All texts take turns, so that each is open beside the others.
        for _ in range(rounds):
            for text, sampler, room in texts:
                k = rng.randint(1, min(drafter.max_k, llm.verify_width - 1))
                try:
                    _check_round(drafter, llm, text, sampler, room, k, name, problems)
                    proposal = text.propose(k)
                except InputError as error:
                    problems.setdefault("form", f"Form: {error}")
                    break
                shown = proposal.tokens.clamp(0, ids - 1)[: llm.verify_width - 1]
                text.commit(Proposal(shown), rng.randint(0, len(shown)), rng.randrange(ids))
                if text.changed:
                    problems.setdefault("lists", f"Lists: what a drafter is given is not its own; {text.changed}.")
    if draws and "form" not in problems:
        for i, test in enumerate(honesty(drafter, llm, contexts, draws=draws, seed=seed)):
            if test.p_value < P_VALUE:
                problems.setdefault(
                    "honesty",
                    f"Honesty: at context {i}, {draws} draws do not fit the reported distribution "
                    f"(G = {test.statistic:.1f}, p = {test.p_value:.1e}); report q as it was when the token was drawn.",
                )
    if problems:
        raise AssertionError("\n".join(problems.values()))


def _check_round(
    drafter: Drafter,
    llm: SpecLLM,
    text: _Text,
    sampler: Callable[[], Sampler],
    room: int,
    k: int,
    name: str,
    problems: dict[str, str],
) -> None:
    """One text before a scripted round: a proposal of its own, a repeated one, and one of a fresh session."""
    vocabulary = llm.placed.model.config.padded_vocab_size
    first, again = text.propose(k), text.propose(k)
    fresh = _Text(llm, drafter, text.tokens, room, sampler()).propose(k)
    for proposal in (first, again, fresh):
        m = len(proposal.tokens)
        if m > k:
            problems.setdefault("k", f"k: asked for at most k = {k} tokens, it proposed {m}.")
            return
        proposed = proposal.tokens.tolist()
        given = proposed[: proposed.index(-1)] if -1 in proposed else proposed
        if any(not 0 <= token < vocabulary for token in given) or any(token != -1 for token in proposed[len(given) :]):
            problems.setdefault(
                "ids", f"Ids must be in [0, {vocabulary}), and -1 at the end for nothing; it proposed {proposed}."
            )
            return
        if m and proposal.q is not None:
            dense = _dense(proposal.q, vocabulary)
            sums = dense.sum(1)
            if (dense < 0).any() or ((sums - 1).abs() > 1e-3).any():
                rows = [round(float(s), 4) for s in sums]
                problems.setdefault("q", f"q must hold rows of probabilities that sum to 1; its rows sum to {rows}.")
                return
    drawn = first.q if len(first.tokens) > 0 else None
    for other, what in ((again, "Repeated"), (fresh, "Rollback")):
        told = "asked twice" if other is again else "compared with a fresh session told the same text"
        if drawn is not None and other.q is not None and len(other.tokens):
            dtype = next(llm.placed.model.parameters()).dtype
            gap = float((_dense(drawn, vocabulary)[0] - _dense(other.q, vocabulary)[0]).abs().sum() / 2)
            if gap > TOLERANCE.get(dtype, 0.1):
                problems.setdefault(what, f"{what}: {told}, its {name} proposals have distributions {gap:.3f} apart.")
        elif drawn is None and first.tokens.tolist() != other.tokens.tolist():
            problems.setdefault(
                what,
                f"{what}: {told}, its {name} proposals differ: {first.tokens.tolist()} and {other.tokens.tolist()}.",
            )


@torch.inference_mode()
def accept_rule_test(verify: Callable[..., Verified] | None = None, draws: int = 50_000, seed: int = 0) -> GTest:
    """Tests the accept function itself: draws proposals from one table, verifies them against another.

    The first token committed must have the target's distribution, whatever the draft's.

    Args:
        verify: A function like `Rejection.verify`, bound; None for the real one.
        draws: Number of rounds.
        seed: Seed of tables and draws.
    """
    generator = torch.Generator().manual_seed(seed)
    sampler = Rejection(Sampling(), seed=seed)
    verify = verify or sampler.verify
    logits = 1.5 * torch.randn(3, 8, generator=generator)  # the target's rows behind each of two proposals
    draft = 1.5 * torch.randn(2, 8, generator=generator)
    counts = torch.zeros(8, dtype=torch.int64)
    for draw in range(draws):
        # Every round has its own positions, as in a text.
        position = draw * len(logits)
        pairs = [sampler.draw(row.unsqueeze(0), position + i) for i, row in enumerate(draft)]
        tokens = torch.cat([token for token, _ in pairs])
        q = Distribution(torch.cat([row.probs for _, row in pairs]))
        counts[verify(logits, position, tokens, q).tokens[0]] += 1
    return g_test(counts, logits[0].softmax(0))
