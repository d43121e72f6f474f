"""How many tokens to propose: a fixed k, or the k that pays.

One round costs a proposal and a verification, and brings 1 + a1 + a1 a2 + ... + a1 ... ak tokens, where ai is the
probability that the i-th proposal is accepted once those before it were (for a constant a, Leviathan et al. 2023,
arXiv 2211.17192: (1 - a^(k + 1)) / (1 - a)). The k that pays is the one with most tokens per second, 0 where none beats
plain decoding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

# Of these every k is a sum. Each is a step to compile, so there are few.
PIECES = (4, 2, 1)


class SpeculativeK(Protocol):
    """Chooses k for one text, before each round.

    Attributes:
        pieces: Numbers of proposals to build compiled steps for, of which every k that it may choose is a sum, or
            falls a little short of one; the largest k among them. Empty where none is ever proposed.
    """

    pieces: tuple[int, ...]

    def choose(self) -> int:
        """The k of the next round; 0 for a plain step."""
        ...

    def observe(self, *, proposed: int, accepted: int) -> None:
        """Tells how a round went.

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
    """What a round costs by its k, in any one unit.

    Attributes:
        draft: Of a proposal of k tokens, for k = 0, 1, ..., most.
        verify: Of the verification of k proposals, for the same k.
    """

    draft: tuple[float, ...]
    verify: tuple[float, ...]

    def towards(self, other: RoundCosts, share: float) -> RoundCosts:
        """Costs between these and others: these for share 0, the others for 1."""

        def between(a: Sequence[float], b: Sequence[float]) -> tuple[float, ...]:
            return tuple(x + share * (y - x) for x, y in zip(a, b, strict=True))

        return RoundCosts(between(self.draft, other.draft), between(self.verify, other.verify))

    @functools.cached_property
    def total(self) -> list[float]:
        return [draft + verify for draft, verify in zip(self.draft, self.verify)]


def expected_tokens(acceptance: Sequence[float]) -> list[float]:
    """Tokens that a round brings for k = 0, 1, ..., len(acceptance), its own token included.

    Args:
        acceptance: For each position in the block, how likely its proposal is accepted if all before it were.
    """
    tokens, reached = [1.0], 1.0
    for a in acceptance:
        reached *= a
        tokens.append(tokens[-1] + reached)
    return tokens


class Acceptance:
    """A running estimate of the acceptance by position; what is long past fades.

    Some stretches of a text are easy and others hard, so a proposal is likelier accepted the more before it were. If
    the acceptance of a stretch has a beta distribution with mean a and `CONCENTRATION` c, then after i accepted
    proposals the next is accepted with probability (c a + i) / (c + i). Position i is expected to have this, with one a
    for all, and then has counts of its own.

    Args:
        positions: Most proposals of a round.
    """

    # Of the first position before anything is known: as if so many proposals had been seen. With a weight of 1 the luck
    # of the first rounds cost a text of 64 tokens up to 9 %.
    PRIOR, PRIOR_WEIGHT = 0.75, 6.0
    # A little less than the embedded pair has: accepted were 0.84 at the first and 0.91 at the seventh position.
    CONCENTRATION = 5.0
    # Weight that a count keeps from one round with proposals to the next; a round's influence lasts some 50 of them.
    KEEP = 0.98
    # So many counts at one position weigh as much as what is known of all positions together.
    SHARED_WEIGHT = 8.0

    def __init__(self, positions: int) -> None:
        self._accepted = [0.0] * positions
        self._tried = [0.0] * positions
        self._prior_weight = self.PRIOR_WEIGHT
        self.plain_rounds = 0  # since the last proposal
        self.refusals = 0  # of proposals after plain rounds, one after the other

    def observe(self, proposed: int, accepted: int) -> None:
        """Takes the counts of a round."""
        if not proposed:
            self.plain_rounds += 1
            return
        # What was refused before plain decoding paid best does not count: the first wait is the shortest.
        self.refusals = 0 if accepted else self.refusals + (self.plain_rounds > 0)
        self.plain_rounds = 0
        self._prior_weight *= self.KEEP
        for i in range(len(self._tried)):
            # What lies after the first refusal was not tried.
            self._tried[i] = self._tried[i] * self.KEEP + (i < min(proposed, accepted + 1))
            self._accepted[i] = self._accepted[i] * self.KEEP + (i < accepted)

    def estimate(self) -> list[float]:
        """How likely the proposal at each position is accepted if all before it were."""
        c, counts = self.CONCENTRATION, list(zip(self._accepted, self._tried))
        # What the counts at each position say of the first one.
        first = sum(accepted - (tried - accepted) * i / c for i, (accepted, tried) in enumerate(counts))
        first = (self._prior_weight * self.PRIOR + first) / (self._prior_weight + sum(self._tried))
        expected = [(c * max(first, 0.0) + i) / (c + i) for i in range(len(counts))]
        return [
            (self.SHARED_WEIGHT * shared + accepted) / (self.SHARED_WEIGHT + tried)
            for shared, (accepted, tried) in zip(expected, counts)
        ]


class AdaptiveK:
    """The k with most tokens per second, from what rounds cost and from counts of accepted proposals.

    No clock is read here, so where `costs` come from a deterministic model and `acceptance` is the text's own, a seed
    gives one text.

    Args:
        costs: Of a round, by k.
        acceptance: The estimate to use and to go on with; of this text, or of all texts of a loaded pair.
        batch: Of a text that runs with others: tells how many share a round and `acceptance` now, and what such a round
            costs.
    """

    # While plain decoding pays best, one token is proposed again after so many plain rounds; each refusal doubles the
    # wait, up to a limit.
    WAIT, MOST_DOUBLINGS = 16, 5

    def __init__(
        self, costs: RoundCosts, acceptance: Acceptance, batch: Callable[[], tuple[int, RoundCosts]] | None = None
    ) -> None:
        self._acceptance = acceptance
        self._batch = batch or (lambda: (1, costs))
        most = len(costs.total) - 1
        self.pieces = tuple(piece for piece in PIECES if piece <= most)

    def speeds(self) -> list[float]:
        """Tokens per unit of cost, for k = 0, 1, ..., most; as estimated."""
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
        # Proposing pays at no acceptance where a round that accepts everything is too slow.
        could_pay = any((1 + k) * costs[0] > costs[k] for k in range(1, len(costs)))
        wait = (self.WAIT << min(self._acceptance.refusals, self.MOST_DOUBLINGS)) * running
        return int(could_pay and self._acceptance.plain_rounds >= wait)

    def observe(self, *, proposed: int, accepted: int) -> None:
        self._acceptance.observe(proposed, accepted)
