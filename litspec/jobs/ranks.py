"""Communication between the ranks of a job."""

from __future__ import annotations

from contextlib import suppress

import torch

from litspec.engine.target import Placed
from litspec.jobs.prompts import Prompts
from litspec.placement import LostRank, Replica, share_of
from litspec.placement.tensor_parallel import broadcast


class Team:
    """The ranks of a job. With placement "replicate" each rank generates its own texts.

    With other placements all ranks generate each text together.

    Attributes:
        leading: Whether this rank writes the out file.
        sharing: Whether each rank generates its own texts.
    """

    END, STOP = -1, -2  # instead of a text's number

    def __init__(self, placed: Placed) -> None:
        self.placed = placed
        self.leading = placed.is_rank_zero
        self.sharing = isinstance(placed, Replica)
        self._stopped = False
        self._job = 0

    def agree(self, job: int) -> int:
        """Returns rank 0's value on all ranks: the hash of the job, or 0 if the job cannot begin."""
        if self.sharing:
            job = int(broadcast(torch.tensor([job], device=self.placed.device)).item())
        else:
            job = self.placed.share_int(job)
        self._job = job
        return job

    def share(self, prompts: Prompts, start: int) -> list[int]:
        """The numbers of this rank's texts, from `start` on. One rank takes all samples of a prompt."""
        if not self.sharing:
            return list(range(start, len(prompts)))
        n = prompts.num_samples
        mine = share_of(prompts.count, self.placed.rank, self.placed.world_size)
        return [number for i in mine for number in range(i * n, (i + 1) * n) if number >= start]

    def next(self, number: int) -> int:
        """Number of the next text: this rank's, or rank 0's if all ranks generate each text together."""
        return number if self.sharing else self.placed.share_int(number)

    def stop(self, *, failed: bool = False) -> None:
        """Asks all ranks to end after their running texts."""
        self._stopped = True
        if self.sharing:
            with suppress(LostRank):  # rank 0 has ended already
                self._count("failed" if failed else "stopped", 1)

    @property
    def stopped(self) -> bool:
        """Whether a rank has called `stop`."""
        return self._stopped or (self.sharing and (self._count("stopped") > 0 or self.failed))

    @property
    def failed(self) -> bool:
        """Whether a rank has called `stop` after an error."""
        return self.sharing and self._count("failed") > 0

    def wait(self) -> None:
        """Reports that this rank has finished. Rank 0 waits until all ranks have.

        Raises:
            LostRank: A rank has died.
        """
        self.placed.wait_for_all()

    def _count(self, what: str, step: int = 0) -> int:
        assert isinstance(self.placed, Replica), "only ranks that share the texts count"
        return self.placed.heartbeat.counter(f"job/{self._job}/{what}", step)
