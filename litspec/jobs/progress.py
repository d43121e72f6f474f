"""Progress of a job on stderr, and its signal handlers."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from litspec.jobs.disk import log
from litspec.jobs.files import Answer, Done

REPORT_SECONDS = 10.0  # between two progress lines without a terminal


class Meter:
    """Progress on stderr: a bar in a terminal, else a line every few seconds.

    Args:
        done: What an earlier run left.
        total: Number of texts of the job.
        shown: Whether this process shows progress.

    Attributes:
        running: Texts that are being generated now.
    """

    def __init__(self, done: Done, total: int, *, shown: bool = True) -> None:
        self._before, self._total, self._shown = done.lines, total, shown
        self._made = self._tokens = self._proposed = self._accepted = 0
        self._errors = done.errors
        self.running = 0
        self._counted: set[int] = set()  # numbers of texts that are counted but not yet written
        self._began = self._reported = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> Meter:
        if self._shown and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            left = TextColumn("left")
            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn(), left)
            self._bar = Progress(*columns, console=Console(stderr=True), refresh_per_second=4, transient=True)
            self._task = self._bar.add_task(self._numbers(), total=self._total, completed=self._before)
            self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._shown:
            complete = self._before + self._made == self._total
            line = f"{self._line()}, in {time.monotonic() - self._began:.1f} s"
            log(line if complete else f"{line}; the same command resumes the job")

    def add(self, answer: Answer) -> None:
        """Counts a finished text, once. It may be added again when it is written, which can be much later."""
        if answer.number in self._counted:
            self._counted.remove(answer.number)
            return
        stats = json.loads(answer.stats)
        self._made += 1
        self._errors += "error" in stats
        self._tokens += stats.get("new_tokens", 0)
        self._proposed += stats.get("proposed", 0)
        self._accepted += stats.get("accepted", 0)
        if self._bar is not None:
            self._bar.update(self._task, completed=self._before + self._made, description=self._numbers())
        elif self._shown and time.monotonic() - self._reported > REPORT_SECONDS:
            self._reported = time.monotonic()
            left = (self._reported - self._began) / self._made * (self._total - self._before - self._made)
            log(f"{self._line()}, about {left:.0f} s left")

    def add_early(self, answer: Answer) -> None:
        """Counts a finished text that cannot be written yet, as texts before it are still missing."""
        self.add(answer)
        self._counted.add(answer.number)

    def _line(self) -> str:
        return f"{self._before + self._made}/{self._total} texts, {self._numbers()}"

    def _numbers(self) -> str:
        seconds = max(time.monotonic() - self._began, 1e-9)
        numbers = [f"{self._made / seconds:.1f} texts/s", f"{self._tokens / seconds:.1f} tokens/s"]
        if self.running > 1:
            numbers.append(f"{self.running} at a time")
        if self._proposed:
            numbers.append(f"acceptance rate {self._accepted / self._proposed:.2f}")
        if self._errors:
            numbers.append(f"{self._errors} errors" if self._errors > 1 else "1 error")
        return ", ".join(numbers)


class Interrupts:
    """Signal handlers of a job. The first SIGTERM lets running texts finish, the second ends the process at once.

    Ctrl-C waits until a line is written.

    Attributes:
        stopping: Whether SIGTERM was received.
    """

    def __init__(self) -> None:
        self.stopping = False
        self._held = self._pending = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._terminate)
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not if it is ignored
                self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _terminate(self, *_: Any) -> None:
        self.stopping = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # Not `print`: the signal may have interrupted a `print`.
        os.write(2, b"litspec: SIGTERM: stopping after the running texts; a second SIGTERM stops at once.\n")

    def _interrupt(self, *_: Any) -> None:
        if not self._held:
            raise KeyboardInterrupt
        self._pending = True

    @contextmanager
    def held(self) -> Iterator[None]:
        """Delays Ctrl-C to the end of the block."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        if self._pending:
            self._pending = False
            raise KeyboardInterrupt
