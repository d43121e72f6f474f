"""How many tokens to propose: a fixed k, or the k that pays."""

from __future__ import annotations

from typing import Protocol


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
