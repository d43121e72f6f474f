"""Checks of drafters and samplers, for authors of drafters and for `litspec verify`.

Most faults of a drafter do not change the text; they only cost speed. So these checks test the proposals themselves.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from litspec.drafters.base import Drafter, DraftSession, Proposal
from litspec.engine.speculate import checked
from litspec.engine.target import PREFILL_CHUNK, TargetSession
from litspec.errors import InputError
from litspec.sampling import Distribution, Rejection, Sampler, Sampling, Verified, make_sampler

if TYPE_CHECKING:
    from litspec.llm import SpecLLM

# Significance level: a correct drafter fails a check once in a million.
P_VALUE = 1e-6
# Distributions after the same tokens may differ by rounding, which depends on the number of rows.
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

    Cells with an expected count below 5 are merged. A count in a cell of probability 0 gives p-value 0.
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
    # The chi-square tail probability.
    p_value = torch.special.gammaincc(degrees / 2, statistic.clamp_min(0) / 2)
    return GTest(float(statistic), float(p_value) if len(observed) > 1 else 1.0)


class _Text:
    """One text with its target and draft sessions. The caller decides how many proposals are accepted."""

    def __init__(
        self,
        llm: SpecLLM,
        drafter: Drafter,
        tokens: Sequence[int],
        max_length: int,
        sampler: Sampler,
        target: TargetSession | None = None,
    ) -> None:
        self._taps = tuple(drafter.taps)
        self._drafter = drafter.name
        self.changed = ""  # how the drafter changed a list that it was given
        self.target = target or TargetSession(llm.placed, max_length)
        self.session: DraftSession = drafter.start(self.target, max_length, sampler)
        self.tokens = list(tokens)
        # As in generation, the last token is not in the target's cache yet.
        prompt = self.tokens[:-1]
        self.target.begin(prompt, self._taps, resume=self.session.resume)
        last = self.target.last_state
        if not self._taps and not self.target.unread:
            self._tell(prompt, 0, None)
        while self.target.unread:
            begin = len(prompt) - self.target.unread
            hidden = self.target.read()
            end = len(prompt) - self.target.unread
            if hidden is not None:
                first = torch.zeros_like(hidden[:1]) if last is None else last
                self._tell(prompt[begin:end], begin, torch.cat((first, hidden[:-1])))
                last = hidden[-1:]
            elif not self.target.unread:
                self._tell(prompt, 0, None)
        self._tell(self.tokens[-1:], len(prompt), last)

    def _tell(self, tokens: list[int], input_pos: int, hidden: torch.Tensor | None) -> None:
        given = list(tokens)
        self.session.commit(given, input_pos, hidden)
        if given != tokens:
            self.changed = f"commit was given {tokens} and changed it to {given}"

    def propose(self, k: int) -> Proposal:
        """A proposal, with its form checked.

        Raises:
            InputError: The form breaks the protocol.
        """
        proposal = self.session.propose(self.tokens[-1], len(self.tokens) - 1, k)
        return checked(proposal, self._drafter, self.target)

    def commit(self, proposal: Proposal, accepted: int, own: int) -> None:
        """Commits `accepted` tokens of a proposal and one token of the target's own."""
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
    """Draws one token many times at each context and tests the counts against the reported distribution.

    Proposals without a distribution are deterministic and are not tested.

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
            # With the same seed, every draw would give the same token.
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
    """The dense probabilities, (m, V), on the host."""
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

    - A proposal has at most k tokens, which are ids of the target, with valid distributions.
    - Rollback: after any number of accepted proposals, it drafts like a new session with the same text.
    - Repeated calls of `propose` give the same proposal; proposals do not change the state.
    - Several open texts do not affect each other.
    - Reuse: it drafts the same in a reused slot as in a new one, also if the previous text had the same prefix.
    - Honesty: tokens come from the reported distribution (`honesty`).

    It must propose something in at least one context, else it fails, since nothing could be checked.

    Args:
        drafter: The drafter to check.
        llm: A loaded target. Its own drafter is not used.
        contexts: Token ids that texts begin with; None for random ones, some with repetitions. Give your own if the
            drafter needs certain words.
        rounds: Rounds per text.
        draws: Draws per context for the test of the reported distribution; 0 skips the test.
        seed: Seed of all random choices.

    Raises:
        AssertionError: The drafter breaks the protocol; the message has a sentence for each violation.
    """
    rng = random.Random(seed)
    ids = min(llm.placed.model.config.vocab_size, llm.placed.model.config.padded_vocab_size)
    if contexts is None:
        made = [[rng.randrange(ids) for _ in range(rng.randrange(2, 24))] for _ in range(3)]
        contexts = [*made, made[0] * 3, made[1] * 2 + made[2]]
    problems: dict[str, str] = {}  # the first violation of each rule
    proposed = 0
    for name, sampling in (("greedy", Sampling(temperature=0)), ("sampled", Sampling())):
        texts = []
        for i, context in enumerate(contexts):

            def sampler(i: int = i, sampling: Sampling = sampling) -> Sampler:
                return make_sampler(sampling, seed=seed + i)

            room = len(context) + (rounds + 1) * llm.verify_width
            texts.append((_Text(llm, drafter, context, room, sampler()), sampler, room))
        # The texts take turns, so that all are open at the same time.
        for _ in range(rounds):
            for text, sampler, room in texts:
                k = rng.randint(1, min(drafter.max_k, llm.verify_width - 1))
                try:
                    _check_round(drafter, llm, text, sampler, room, k, name, problems)
                    proposal = text.propose(k)
                except InputError as error:
                    problems.setdefault("form", f"Form: {error}")
                    break
                proposed += len(proposal.tokens)
                shown = proposal.tokens.clamp(0, ids - 1)[: llm.verify_width - 1]
                text.commit(Proposal(shown), rng.randint(0, len(shown)), rng.randrange(ids))
                if text.changed:
                    problems.setdefault("lists", f"Lists: a drafter must not change its arguments; {text.changed}.")
    if "form" not in problems:
        _check_reuse(drafter, llm, contexts, seed, problems)
    if draws and "form" not in problems:
        for i, test in enumerate(honesty(drafter, llm, contexts, draws=draws, seed=seed)):
            if test.p_value < P_VALUE:
                problems.setdefault(
                    "honesty",
                    f"Honesty: at context {i}, {draws} draws do not fit the reported distribution "
                    f"(G = {test.statistic:.1f}, p = {test.p_value:.1e}); report the q that the token was drawn from.",
                )
    if not problems and not proposed:
        problems["nothing"] = "It proposed nothing, so nothing was checked; give contexts in which it proposes."
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
    """Checks one text before a round: compares its proposal with a repeated one and with that of a new session."""
    vocabulary = llm.placed.model.config.padded_vocab_size
    first, again = text.propose(k), text.propose(k)
    fresh = _Text(llm, drafter, text.tokens, room, sampler()).propose(k)
    for proposal in (first, again, fresh):
        m = len(proposal.tokens)
        if m > k:
            problems.setdefault("k", f"k: at most k = {k} tokens were requested, but it proposed {m}.")
            return
        proposed = proposal.tokens.tolist()
        given = proposed[: proposed.index(-1)] if -1 in proposed else proposed
        if any(not 0 <= token < vocabulary for token in given) or any(token != -1 for token in proposed[len(given) :]):
            problems.setdefault(
                "ids", f"Ids must be in [0, {vocabulary}), with padding of -1 only at the end; it proposed {proposed}."
            )
            return
        if m and proposal.q is not None:
            dense = _dense(proposal.q, vocabulary)
            sums = dense.sum(1)
            if (dense < 0).any() or ((sums - 1).abs() > 1e-3).any():
                rows = [round(float(s), 4) for s in sums]
                problems.setdefault("q", f"q must hold rows of probabilities that sum to 1; its rows sum to {rows}.")
                return
    _compare(llm, first, again, "Repeated", f"two calls of propose: its {name} proposals", problems)
    _compare(
        llm,
        first,
        fresh,
        "Rollback",
        f"compared with a new session with the same text, its {name} proposals",
        problems,
    )


def _compare(llm: SpecLLM, first: Proposal, other: Proposal, promise: str, what: str, problems: dict[str, str]) -> None:
    """Checks that two proposals after the same text agree: their first distributions, or their tokens."""
    drawn = first.q if len(first.tokens) > 0 else None
    if drawn is not None and other.q is not None and len(other.tokens):
        vocabulary = llm.placed.model.config.padded_vocab_size
        dtype = next(llm.placed.model.parameters()).dtype
        gap = float((_dense(drawn, vocabulary)[0] - _dense(other.q, vocabulary)[0]).abs().sum() / 2)
        if gap > TOLERANCE.get(dtype, 0.1):
            problems.setdefault(promise, f"{promise}: {what} have distributions {gap:.3f} apart.")
    elif drawn is None and first.tokens.tolist() != other.tokens.tolist():
        problems.setdefault(promise, f"{promise}: {what} differ: {first.tokens.tolist()} and {other.tokens.tolist()}.")


def _check_reuse(
    drafter: Drafter, llm: SpecLLM, contexts: Sequence[Sequence[int]], seed: int, problems: dict[str, str]
) -> None:
    """Checks several texts in one slot, where later ones may reuse the prefix of earlier ones."""
    texts = [list(context) for context in contexts]
    long = (texts[0] * (PREFILL_CHUNK // len(texts[0]) + 2))[: PREFILL_CHUNK + len(texts[0]) + 2]
    width = llm.verify_width
    if len(long) + 2 * width <= llm.placed.model.config.block_size:
        texts += [long, [*long[:-1], *texts[-1][:3]], [*long[: PREFILL_CHUNK // 2], *texts[-1]], long]
    room, k = max(map(len, texts)) + 2 * width, min(drafter.max_k, width - 1)
    target = TargetSession(llm.placed, room)
    for i in range(len(texts)):
        for sampling in (Sampling(temperature=0), Sampling()):

            def propose(where: TargetSession | None, i: int = i, sampling: Sampling = sampling) -> Proposal:
                sampler = make_sampler(sampling, seed=seed + i)
                return _Text(llm, drafter, texts[i], room, sampler, where).propose(k)

            try:
                reused, fresh = propose(target), propose(None)
            except InputError as error:
                problems.setdefault("form", f"Form: {error}")
                return
            what = "compared with a new slot, in a reused slot its proposals"
            _compare(llm, reused, fresh, "Reuse", what, problems)


@torch.inference_mode()
def accept_rule_test(verify: Callable[..., Verified] | None = None, draws: int = 50_000, seed: int = 0) -> GTest:
    """Tests the accept function: draws proposals from one table of logits and verifies them against another.

    The first committed token must have the target's distribution.

    Args:
        verify: A function with the arguments of a sampler's `verify`; None for `Rejection.verify`.
        draws: Number of rounds.
        seed: Seed of tables and draws.
    """
    generator = torch.Generator().manual_seed(seed)
    sampler = Rejection(Sampling(), seed=seed)
    verify = verify or sampler.verify
    logits = 1.5 * torch.randn(3, 8, generator=generator)  # the target's rows after each of two proposals
    draft = 1.5 * torch.randn(2, 8, generator=generator)
    counts = torch.zeros(8, dtype=torch.int64)
    for draw in range(draws):
        # Every round needs new positions, since random numbers depend on them.
        position = draw * len(logits)
        pairs = [sampler.draw(row.unsqueeze(0), position + i) for i, row in enumerate(draft)]
        tokens = torch.cat([token for token, _ in pairs])
        q = Distribution(torch.cat([row.probs for _, row in pairs]))
        counts[verify(logits, position, tokens, q).tokens[0]] += 1
    return g_test(counts, logits[0].softmax(0))
