"""The pair on every rank: prompts are distributed, and each rank generates its own texts."""

from __future__ import annotations

import atexit
import sys
from dataclasses import dataclass, field

from litspec.placement.heartbeat import Heartbeat
from litspec.placement.single import Single


@dataclass
class Replica(Single):
    """One of several whole pairs, see `engine.target.Placed`. A rank never waits for another before `wait_for_all`.

    Attributes:
        heartbeat: Detects ranks that have died.
    """

    heartbeat: Heartbeat = field(kw_only=True)

    def __post_init__(self) -> None:
        self.heartbeat.needed = True
        atexit.register(self._at_exit)

    def wait_for_all(self) -> None:
        """Reports that this rank has finished. Rank 0 waits until all ranks have.

        Raises:
            LostRank: A rank died before it had finished.
        """
        self.heartbeat.needed = False
        self.heartbeat.wait_for_all()

    def _at_exit(self) -> None:
        # Rank 0, which started the others, ends last. Not after an exception.
        if self.heartbeat.needed and not hasattr(sys, "last_value"):
            self.wait_for_all()


def share_of(n: int, rank: int, world_size: int) -> range:
    """The indices below `n` of a rank: every `world_size`-th, which spreads long and short prompts evenly."""
    return range(rank, n, world_size)
