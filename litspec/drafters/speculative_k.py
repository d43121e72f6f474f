"""How many tokens to propose: a fixed k, or the k that pays.

One round costs k draft steps and one verification, and brings 1 + a1 + a1 a2 + ... + a1 ... ak tokens, where ai is the
probability that the i-th proposal is accepted once those before it were (for a constant a, Leviathan et al. 2023,
arXiv 2211.17192: (1 - a^(k + 1)) / (1 - a)). The k that pays is the one with most tokens per second, 0 where none beats
plain decoding.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import accumulate, combinations
from statistics import median_low
from typing import TYPE_CHECKING, Literal, Protocol

from litspec.drafters.autoregressive import step_bytes

if TYPE_CHECKING:
    from litspec.drafters.base import Drafter
    from litspec.rounds import Placed
    from litspec.sampling import Sampling


class SpeculativeK(Protocol):
    """Chooses k for one text, before each round.

    Attributes:
        pieces: Numbers of proposals to build compiled graphs for, of which every k that it may choose is a sum, or
            falls a little short of one; the largest k among them. Empty where none is ever proposed.
    """

    pieces: tuple[int, ...]

    def choose(self) -> int:
        """The k of the next round; 0 for a plain step."""
        ...

    def observe(self, *, proposed: int, accepted: int, seconds: float, limit: int) -> None:
        """Tells how a round went.

        Args:
            proposed: Tokens proposed, at most `limit`.
            accepted: How many of them were accepted.
            seconds: Wall time of the round.
            limit: The k that the round was given.
        """
        ...


class FixedK:
    """Always the same k."""

    def __init__(self, k: int) -> None:
        self._k = k
        self.pieces = (k,) if k else ()

    def choose(self) -> int:
        return self._k

    def observe(self, *, proposed: int, accepted: int, seconds: float, limit: int) -> None:
        pass


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
    """A running estimate of the acceptance by position; what is long past fades."""

    # Before anything is known: hopeful, but one refusal weighs more.
    PRIOR, PRIOR_WEIGHT = 0.8, 1.0
    # Weight that a count keeps from one round to the next; a round's influence lasts some 50 rounds.
    KEEP = 0.98
    # So many counts at one position weigh as much as what is known of all positions together.
    SHARED_WEIGHT = 8.0

    def __init__(self, positions: int) -> None:
        self._accepted = [0.0] * positions
        self._tried = [0.0] * positions
        self._prior_weight = self.PRIOR_WEIGHT

    def observe(self, proposed: int, accepted: int) -> None:
        self._prior_weight *= self.KEEP
        for i in range(len(self._tried)):
            # What lies behind the first refusal was not tried.
            self._tried[i] = self._tried[i] * self.KEEP + (i < min(proposed, accepted + 1))
            self._accepted[i] = self._accepted[i] * self.KEEP + (i < accepted)

    def estimate(self) -> list[float]:
        weight = self._prior_weight + sum(self._tried)
        shared = (self._prior_weight * self.PRIOR + sum(self._accepted)) / weight
        return [
            (self.SHARED_WEIGHT * shared + accepted) / (self.SHARED_WEIGHT + tried)
            for accepted, tried in zip(self._accepted, self._tried)
        ]


def weighted_median(values: Sequence[tuple[float, float]]) -> float:
    """The lower median of pairs (value, weight)."""
    values = sorted(values)
    half = sum(weight for _, weight in values) / 2
    below = accumulate(weight for _, weight in values)
    return next(value for (value, _), weight in zip(values, below) if weight >= half)


class RoundTimes:
    """Seconds of a round by k: a line through the medians of what was measured, and near it those medians themselves.

    Args:
        most: Largest k.
        step_cost: Bytes of weights of a draft step over those of a verification, the slope that is believed at first.
    """

    # Rounds that a median is taken of; a text grows, and with it the time of a round.
    RECENT = 31
    # So many measurements weigh as much as the slope believed at first.
    BELIEF = 1.5
    # So many measurements of one k weigh as much as the line.
    LINE_WEIGHT = 4.0
    # A measurement that is so many times what was expected must be confirmed by the next.
    OUTLIER = 2.5

    def __init__(self, most: int, step_cost: float) -> None:
        self._most = most
        self._step_cost = step_cost
        self._measured: dict[int, deque[float]] = {}
        self._points: dict[int, tuple[int, float]] = {}  # k -> measurements and their median
        self._doubted = False
        self._estimate = [1 + k * step_cost for k in range(most + 1)]

    def observe(self, k: int, seconds: float) -> None:
        if self._points and not self._doubted and seconds > self.OUTLIER * self._estimate[k]:
            self._doubted = True
            return
        self._doubted = False
        measured = self._measured.setdefault(k, deque(maxlen=self.RECENT))
        measured.append(seconds)
        # Of two the lower: what disturbs a measurement makes it longer.
        self._points[k] = len(measured), median_low(measured)
        self._estimate = self._fit()

    def count(self, *, drafted: bool) -> int:
        """Measurements of rounds with a draft, or of those without."""
        return sum(n for k, (n, _) in self._points.items() if (k > 0) == drafted)

    def estimate(self) -> list[float]:
        """Seconds for k = 0, 1, ..., most; relative to a plain round where nothing was measured."""
        return self._estimate

    def _fit(self) -> list[float]:
        points = self._points
        # The slopes between all pairs of points, and the one believed; their median bears with outliers (Theil, 1950).
        total = sum(n for n, _ in points.values())
        mean_k = sum(n * k for k, (n, _) in points.items()) / total
        mean = sum(n * seconds for n, seconds in points.values()) / total
        believed = mean * self._step_cost / (1 + mean_k * self._step_cost)
        slopes = [(believed, self.BELIEF)]
        for (k, (n, seconds)), (other_k, (other_n, other)) in combinations(points.items(), 2):
            slopes.append(((seconds - other) / (k - other_k), min(n, other_n)))
        slope = max(weighted_median(slopes), 0.0)
        base = weighted_median([(seconds - slope * k, n) for k, (n, seconds) in points.items()])
        base = max(base, 0.05 * mean)
        estimates = []
        for k in range(self._most + 1):
            n, seconds = points.get(k, (0, 0.0))
            line = base + slope * k
            estimates.append((n * seconds + self.LINE_WEIGHT * line) / (n + self.LINE_WEIGHT))
        # A draft makes no round shorter; whatever says so is noise.
        return [min(estimates), *estimates[1:]]


class AdaptiveK:
    """The k that pays, estimated anew for each text.

    Where the text does not depend on k (greedy, the coupled sampler) rounds are timed. With the rejection sampler it
    does: there k depends on nothing but counts of accepted proposals and on `step_cost`, never on a clock, and a seed
    still gives one text.

    Args:
        most: Largest k.
        step_cost: Bytes of weights of a draft step over those of a verification: what a step costs until, or unless,
            it is timed.
        timed: Whether the seconds told to `observe` count.
    """

    # Speculation must promise so much more than plain decoding.
    MARGIN = 1.02
    # While plain decoding pays best, a proposal is tried again after so many plain rounds, or after so many times what
    # a draft step costs (in plain rounds); each refusal doubles the wait, up to a limit.
    WAIT, WAIT_PER_COST, MOST_DOUBLINGS = 4, 32, 5
    # A promise below this is checked against a plain round after so many rounds with a draft, the first time and later.
    FIRST_CHECK, CHECK = (3.0, 1), (1.5, 64)

    def __init__(self, most: int, step_cost: float, *, timed: bool) -> None:
        self._most = most
        self.pieces = tuple(sorted({most, *(piece for piece in (1, 2, 4) if piece < most)}, reverse=True))
        self._acceptance = Acceptance(most)
        self._times = RoundTimes(most, step_cost)
        self._timed = timed
        self._plain_rounds = 0  # since the last proposal
        self._drafted_rounds = 0  # since the last plain round
        self._refusals = 0  # of first proposals, one after the other
        self._hopeful = False  # the last proposal was accepted
        self._started = False

    def speeds(self) -> list[float]:
        """Tokens per second, in whatever unit, for k = 0, 1, ..., most; as estimated."""
        tokens = expected_tokens(self._acceptance.estimate())
        return [n / seconds for n, seconds in zip(tokens, self._times.estimate())]

    def choose(self) -> int:
        speeds = self.speeds()
        k = max(range(len(speeds)), key=speeds.__getitem__)
        gain = speeds[k] / speeds[0]
        if gain >= self.MARGIN:
            below, after = self.CHECK if self._times.count(drafted=False) else self.FIRST_CHECK
            return 0 if self._timed and gain < below and self._drafted_rounds >= after else k
        return int(self._worth_a_try())

    def _worth_a_try(self) -> bool:
        """Whether to propose one token though plain decoding pays best, as far as is known."""
        seconds = self._times.estimate()
        could_pay = any((1 + k) * seconds[0] >= self.MARGIN * seconds[k] for k in range(1, self._most + 1))
        if not (could_pay or self._timed):
            return False
        if self._hopeful:
            # A lone proposal among plain rounds cannot be timed, and one measurement says little.
            in_the_dark = self._timed and (self._drafted_rounds == 1 or self._times.count(drafted=True) < 3)
            if in_the_dark or (could_pay and self._drafted_rounds):
                return True
        wait = self.WAIT
        if self._started or not self._timed:
            wait = max(wait, math.ceil(self.WAIT_PER_COST * (seconds[1] / seconds[0] - 1)))
        return self._plain_rounds >= wait << min(self._refusals, self.MOST_DOUBLINGS)

    def observe(self, *, proposed: int, accepted: int, seconds: float, limit: int) -> None:
        # After some plain rounds a model that drafts reads what it missed; that is not what a round costs.
        catches_up = proposed > 0 and (not self._started or self._plain_rounds > 1)
        if self._timed and not catches_up:
            self._times.observe(proposed, seconds)
        if not proposed:
            self._plain_rounds += 1
            self._drafted_rounds = 0
            return
        self._acceptance.observe(proposed, accepted)
        self._started = True
        self._hopeful = accepted > 0
        self._refusals = 0 if accepted else self._refusals + 1
        self._plain_rounds = 0
        self._drafted_rounds += 1


def make_speculative_k(
    speculative_k: int | Literal["auto"], placed: Placed, drafter: Drafter | None, sampling: Sampling
) -> SpeculativeK:
    """The choice of k for one text."""
    most = 0 if drafter is None else min(drafter.max_k, placed.verify_width - 1)
    if speculative_k != "auto":
        return FixedK(min(speculative_k, most))
    if most == 0 or drafter.step_bytes == 0:
        # Rows are verified whether they hold a proposal or not, so a proposal that costs nothing cannot lose.
        return FixedK(most)
    timed = sampling.greedy or sampling.sampler == "coupled"
    return AdaptiveK(most, drafter.step_bytes / step_bytes(placed.model), timed=timed)
