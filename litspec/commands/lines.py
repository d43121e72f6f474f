"""Progress lines on stderr: for loading, and for long commands without a terminal."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from litspec.errors import printable


class LogLines:
    """Prints the progress and the remaining time of a long command, as lines of a log.

    The first line is printed after the first step. Later lines are at least `every` seconds and a tenth of the total
    apart.

    Args:
        doing: The activity, such as "measuring".
        quiet: Print nothing.
        every: Minimum seconds between lines.
        clock: Returns the time in seconds.
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
        """Records that `done` of `total` steps are done. Prints a line if one is due."""
        now = self._clock()
        first, last = self._done < 0, done >= total
        due = now - self._told >= self._every and (done - self._done) * 10 >= total
        if self._quiet or done < 1 or not (first or last or due):
            return
        self._told, self._done = now, done
        seconds = now - self._began
        rest = "" if last else f", about {seconds / done * (total - done):.0f} s left"
        print(f"{self._doing}: {done} of {total} in {seconds:.0f} s{rest}", file=sys.stderr, flush=True)


@contextmanager
def loading(folder: object, after: float = 2.0) -> Iterator[None]:
    """Prints to stderr if loading takes longer than `after` seconds, and how long it took.

    Args:
        folder: The checkpoint's folder; None for the embedded pair.
        after: Seconds before the first line.
    """
    told = threading.Event()

    def tell() -> None:
        told.set()
        what = "the embedded pair" if folder is None else f"{folder}{_size(folder)}"
        print(printable(f"Loading {what} ..."), file=sys.stderr, flush=True)

    if any(os.environ.get(name, "0") != "0" for name in ("RANK", "LOCAL_RANK")):
        yield  # only rank 0 prints
        return
    timer = threading.Timer(after, tell)
    timer.daemon = True
    began = time.perf_counter()
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    if told.is_set():
        print(f"Loaded in {time.perf_counter() - began:.0f} s.", file=sys.stderr, flush=True)


def _size(folder: object) -> str:
    try:
        return f" ({(Path(str(folder)) / 'lit_model.pth').stat().st_size / 1e9:.1f} GB)"
    except OSError:  # in ./checkpoints, or not converted yet
        return ""
