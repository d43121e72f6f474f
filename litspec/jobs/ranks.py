"""What the ranks of a job tell each other."""

from __future__ import annotations

from contextlib import suppress

import torch

from litspec.engine.target import Placed
from litspec.jobs.prompts import Prompts
from litspec.placement import LostRank, Replica, share_of
from litspec.placement.tensor_parallel import broadcast


class Team:
    """The ranks of a job. With placement "replicate" each makes texts of its own; else they make each text together.

    Attributes:
        leading: Whether this rank writes the out file.
        sharing: Whether each rank makes texts of its own.
    """

    END, STOP = -1, -2  # instead of a text's number

    def __init__(self, placed: Placed) -> None:
        self.placed = placed
        self.leading = placed.is_rank_zero
        self.sharing = isinstance(placed, Replica)
        self._stopped = False
        self._job = 0

    def agree(self, job: int) -> int:
        """The first rank's value, on all ranks: a hash of the job, or 0 where it cannot begin."""
        if self.sharing:
            job = int(broadcast(torch.tensor([job], device=self.placed.device)).item())
        else:
            job = self.placed.share_int(job)
        self._job = job
        return job

    def share(self, prompts: Prompts, start: int) -> list[int]:
        """The texts that this rank makes, those before `start` left out. All samples of a prompt share its prefill."""
        if not self.sharing:
            return list(range(start, len(prompts)))
        n = prompts.num_samples
        mine = share_of(prompts.count, self.placed.rank, self.placed.world_size)
        return [number for i in mine for number in range(i * n, (i + 1) * n) if number >= start]

    def next(self, number: int) -> int:
        """The text to make now: this rank's choice or, where all make it together, the first rank's."""
        return number if self.sharing else self.placed.share_int(number)

    def stop(self, *, failed: bool = False) -> None:
        """Asks all ranks to end after their present texts."""
        self._stopped = True
        if self.sharing:
            with suppress(LostRank):  # there is nobody left to ask
                self._count("failed" if failed else "stopped", 1)

    @property
    def stopped(self) -> bool:
        """Whether a rank has asked for that."""
        return self._stopped or (self.sharing and (self._count("stopped") > 0 or self.failed))

    @property
    def failed(self) -> bool:
        """Whether a rank has asked for that because it could not go on."""
        return self.sharing and self._count("failed") > 0

    def wait(self) -> None:
        """Tells that this rank has ended. On the first rank waits until all have.

        Raises:
            LostRank: A rank has died.
        """
        self.placed.wait_for_all()

    def _count(self, what: str, step: int = 0) -> int:
        assert isinstance(self.placed, Replica), "only ranks that share the texts count"
        return self.placed.heartbeat.counter(f"job/{self._job}/{what}", step)
