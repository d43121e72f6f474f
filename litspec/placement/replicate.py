"""The pair on every rank: many prompts are shared out, each rank makes texts of its own."""

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
        heartbeat: Tells when another rank has died.
    """

    heartbeat: Heartbeat = field(kw_only=True)

    def __post_init__(self) -> None:
        self.heartbeat.needed = True
        atexit.register(self._at_exit)

    def wait_for_all(self) -> None:
        """Says that this rank has done its share; rank 0 returns when all have.

        Raises:
            LostRank: A rank died before it had.
        """
        self.heartbeat.needed = False
        self.heartbeat.wait_for_all()

    def _at_exit(self) -> None:
        # Whoever waits for rank 0, which started the others, waits for all. Not after an exception.
        if self.heartbeat.needed and not hasattr(sys, "last_value"):
            self.wait_for_all()


def share_of(n: int, rank: int, world_size: int) -> range:
    """The indices below `n` that a rank takes: every `world_size`-th, so that long and short prompts spread."""
    return range(rank, n, world_size)
