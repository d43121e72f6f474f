"""How many tokens to propose: a fixed k, or the k with the most tokens per second.

One round costs a proposal and a verification. Its expected tokens are 1 + a1 + a1 a2 + ... + a1 ... ak, where ai is the
probability that the i-th proposal is accepted if all before it were (for a constant a, Leviathan et al. 2023, arXiv
2211.17192: (1 - a^(k + 1)) / (1 - a)). The adaptive k maximises tokens per second. It is 0 if plain decoding is faster.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

# Every k is a sum of these. There are few, since each needs a compiled step, which takes seconds to build; a return to
# Python between two steps takes less than 0.1 ms.
PIECES = (3, 1)


def pieces_of(most: int) -> tuple[int, ...]:
    """Lengths of which every k up to `most` is a sum."""
    return tuple(piece for piece in PIECES if piece <= most)


class SpeculativeK(Protocol):
    """Chooses k for one text, before each round.

    Attributes:
        pieces: Proposal lengths to build compiled steps for. Every k that it may choose is a sum of them, or slightly
            less than one. Empty if it never proposes.
    """

    pieces: tuple[int, ...]

    def choose(self) -> int:
        """The k of the next round; 0 for a plain step."""
        ...

    def observe(self, *, proposed: int, accepted: int) -> None:
        """Records the result of a round.

        Args:
            proposed: Tokens proposed.
            accepted: How many of them were accepted.
        """
        ...


class FixedK:
    """Always the same k."""

    def __init__(self, k: int) -> None:
        self._k = k
        self.pieces: tuple[int, ...] = (k,) if k else ()

    def choose(self) -> int:
        return self._k

    def observe(self, *, proposed: int, accepted: int) -> None:
        pass


@dataclass(frozen=True)
class RoundCosts:
    """The cost of a round for each k, in any unit.

    Attributes:
        draft: Cost of a proposal of k tokens, for k = 0, 1, ..., most.
        verify: Cost of verifying k proposals, for the same k.
    """

    draft: tuple[float, ...]
    verify: tuple[float, ...]

    def towards(self, other: RoundCosts, share: float) -> RoundCosts:
        """Interpolates between these costs (share 0) and others (share 1)."""

        def between(a: Sequence[float], b: Sequence[float]) -> tuple[float, ...]:
            return tuple(x + share * (y - x) for x, y in zip(a, b, strict=True))

        return RoundCosts(between(self.draft, other.draft), between(self.verify, other.verify))

    @functools.cached_property
    def total(self) -> list[float]:
        return [draft + verify for draft, verify in zip(self.draft, self.verify)]


def expected_tokens(acceptance: Sequence[float]) -> list[float]:
    """Expected tokens per round for k = 0, 1, ..., len(acceptance), including the target's own token.

    Args:
        acceptance: For each position, the probability that its proposal is accepted if all before it were.
    """
    tokens, reached = [1.0], 1.0
    for a in acceptance:
        reached *= a
        tokens.append(tokens[-1] + reached)
    return tokens


class Acceptance:
    """A running estimate of the acceptance rate by position, with exponentially decaying counts.

    Acceptance varies along a text, so a proposal is more likely to be accepted after several accepted ones. If the
    acceptance rate of a passage has a beta distribution with mean a and concentration c (`CONCENTRATION`), then after i
    accepted proposals the next one is accepted with probability (c a + i) / (c + i). All positions share one a. The
    counts of each position then correct this expected value.

    Args:
        positions: Most proposals per round.
    """

    # Prior for the first position, and its weight in proposals. With a weight of 1, random results of the first rounds
    # cost a text of 64 tokens up to 9 % of its speed.
    PRIOR, PRIOR_WEIGHT = 0.75, 6.0
    # Slightly below the value of the embedded pair, which accepts 0.84 at the first position and 0.91 at the seventh.
    CONCENTRATION = 5.0
    # Decay of the counts per round with proposals; a round's influence lasts about 50 rounds.
    KEEP = 0.98
    # Weight of the shared expectation at each position, in proposals.
    SHARED_WEIGHT = 8.0

    def __init__(self, positions: int) -> None:
        self._accepted = [0.0] * positions
        self._tried = [0.0] * positions
        self._prior_weight = self.PRIOR_WEIGHT
        self.plain_rounds = 0  # since the last proposal
        self.rejections = 0  # consecutive proposals after plain rounds that were rejected entirely

    def observe(self, proposed: int, accepted: int) -> None:
        """Adds the counts of a round."""
        if not proposed:
            self.plain_rounds += 1
            return
        # A rejection counts only after plain rounds, so that the first wait is the shortest.
        self.rejections = 0 if accepted else self.rejections + (self.plain_rounds > 0)
        self.plain_rounds = 0
        self._prior_weight *= self.KEEP
        for i in range(len(self._tried)):
            # Proposals after the first rejected one were not tried.
            self._tried[i] = self._tried[i] * self.KEEP + (i < min(proposed, accepted + 1))
            self._accepted[i] = self._accepted[i] * self.KEEP + (i < accepted)

    def estimate(self) -> list[float]:
        """For each position, the probability that its proposal is accepted if all before it were."""
        c, counts = self.CONCENTRATION, list(zip(self._accepted, self._tried))
        # Estimates a from the counts of all positions, by inverting the formula of the class docstring.
        first = sum(accepted - (tried - accepted) * i / c for i, (accepted, tried) in enumerate(counts))
        first = (self._prior_weight * self.PRIOR + first) / (self._prior_weight + sum(self._tried))
        expected = [(c * max(first, 0.0) + i) / (c + i) for i in range(len(counts))]
        return [
            (self.SHARED_WEIGHT * shared + accepted) / (self.SHARED_WEIGHT + tried)
            for shared, (accepted, tried) in zip(expected, counts)
        ]


class AdaptiveK:
    """The k with the most tokens per second, from the costs of rounds and the counts of accepted proposals.

    No clock is read here. So if `costs` are modelled and `acceptance` belongs to one text, a seed gives one text.

    Args:
        costs: Costs of a round, by k.
        acceptance: The estimate to use and update: of this text, or of all texts of a loaded pair.
        batch: For a text that runs with others: returns how many texts share the round and `acceptance`, and the costs
            of such a round.
    """

    # While plain decoding is fastest, one token is proposed again after this many plain rounds. Each rejection doubles
    # the wait, up to a limit.
    WAIT, MOST_DOUBLINGS = 16, 5

    def __init__(
        self, costs: RoundCosts, acceptance: Acceptance, batch: Callable[[], tuple[int, RoundCosts]] | None = None
    ) -> None:
        self._acceptance = acceptance
        self._batch = batch or (lambda: (1, costs))
        most = len(costs.total) - 1
        self.pieces = pieces_of(most)

    def speeds(self) -> list[float]:
        """Estimated tokens per unit of cost, for k = 0, 1, ..., most."""
        return self._speeds(self._batch()[1].total)

    def _speeds(self, costs: Sequence[float]) -> list[float]:
        tokens = expected_tokens(self._acceptance.estimate())
        return [n / cost for n, cost in zip(tokens, costs)]

    def choose(self) -> int:
        running, of_round = self._batch()
        costs = of_round.total
        speeds = self._speeds(costs)
        if (k := max(range(len(speeds)), key=speeds.__getitem__)) > 0:
            return k
        # If even full acceptance is slower than plain decoding, proposing never pays.
        could_pay = any((1 + k) * costs[0] > costs[k] for k in range(1, len(costs)))
        wait = (self.WAIT << min(self._acceptance.rejections, self.MOST_DOUBLINGS)) * running
        return int(could_pay and self._acceptance.plain_rounds >= wait)

    def observe(self, *, proposed: int, accepted: int) -> None:
        self._acceptance.observe(proposed, accepted)
