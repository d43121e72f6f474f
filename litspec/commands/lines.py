"""Progress where there is no terminal: a line now and then on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable


class LogLines:
    """Tells how far a long command has come, and how long it will take, as lines of a log.

    The first line comes as soon as there is something to reckon from, the next ones at least `every` seconds apart and
    at least a tenth of the way.

    Args:
        doing: What the command does, such as "measuring".
        quiet: Say nothing.
        every: Seconds.
        clock: What tells the time, in seconds.
    """

    def __init__(
        self, doing: str, *, quiet: bool = False, every: float = 10.0, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._doing = doing
        self._quiet = quiet
        self._every = every
        self._clock = clock
        self._began = self._told = clock()
        self._done = -1

    def update(self, done: int, total: int) -> None:
        """Says a line where it is time for one: `done` of `total` parts are done."""
        now = self._clock()
        first, last = self._done < 0, done >= total
        due = now - self._told >= self._every and (done - self._done) * 10 >= total
        if self._quiet or done < 1 or not (first or last or due):
            return
        self._told, self._done = now, done
        seconds = now - self._began
        rest = "" if last else f", about {seconds / done * (total - done):.0f} s left"
        print(f"{self._doing}: {done} of {total} in {seconds:.0f} s{rest}", file=sys.stderr, flush=True)
