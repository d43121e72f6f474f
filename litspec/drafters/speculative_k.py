"""How many tokens to propose: a fixed k, or the k that pays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from litspec.drafters.base import Drafter
    from litspec.rounds import Placed
    from litspec.sampling import Sampling


class SpeculativeK(Protocol):
    """Chooses k for one text, before each round."""

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

    def choose(self) -> int:
        return self._k

    def observe(self, *, proposed: int, accepted: int, seconds: float, limit: int) -> None:
        pass


def make_speculative_k(
    speculative_k: int | Literal["auto"], placed: Placed, drafter: Drafter | None, sampling: Sampling
) -> SpeculativeK:
    """The choice of k for one text."""
    most = 0 if drafter is None else min(drafter.max_k, placed.verify_width - 1)
    return FixedK(min(4, most) if speculative_k == "auto" else min(speculative_k, most))
