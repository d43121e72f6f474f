"""Detects ranks that have died, so that the others end with a message instead of waiting forever."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from subprocess import Popen
from typing import Any

import torch.distributed as dist

BEAT_SECONDS = 3.0
LOST_SECONDS = 40.0
LEAVING_SECONDS = 5.0  # the store answers at once or not at all


class LostRank(RuntimeError):
    """Another rank has ended or cannot be reached.

    Attributes:
        seen: Whether this error was raised in this process.
    """

    seen = False

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        LostRank.seen = True

    @classmethod
    def because(cls, error: BaseException) -> LostRank:
        why = " ".join(str(error).split()).split(". ")[0]  # the rest of the message is speculation
        return cls(f"Another rank has ended or cannot be reached, so this one ends too ({why}).")


class Heartbeat:
    """Counters of all ranks in a store on rank 0. Each rank increments its own and reads the others every few seconds.

    The timeout of a collective must be long, since a rank that waits for a slow disk or a slow reader is alive. A dead
    rank is detected because its counter stops. While `needed` is true, this process ends when another rank has been
    silent for `LOST_SECONDS`.

    Attributes:
        needed: Whether this rank needs the others to continue, for example within a round.

    Args:
        rank: Rank of this process.
        world_size: Number of ranks.
        store: A store shared by all ranks, see `own_store`.
        children: Ranks that this process has started. Their end is detected at once.
    """

    def __init__(
        self, rank: int, world_size: int, store: dist.Store, children: Mapping[int, Popen[bytes]] | None = None
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.needed = False
        self._store = store
        self._children = children or {}
        now = time.monotonic()
        self._seen = {other: (0, now) for other in range(world_size) if other != rank}
        self._ended: set[int] = set()
        self._leaving = threading.Event()
        # Two threads: a thread that waits for a hanging rank 0 hangs too.
        self._threads = [
            threading.Thread(target=target, daemon=True, name=f"litspec-{target.__name__}")
            for target in (self._beat, self._watch)
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self._leave)

    def _leave(self) -> None:
        """Ends the threads. A thread inside the store at interpreter exit would abort the process."""
        self._leaving.set()
        for thread in self._threads:
            thread.join(LEAVING_SECONDS)

    def lost(self) -> list[int]:
        """The ranks that have been silent for `LOST_SECONDS` without reporting their end."""
        old = time.monotonic() - LOST_SECONDS
        dead = [rank for rank, child in self._children.items() if child.poll() is not None and child.returncode]
        silent = [
            other
            for other, (_, seen) in self._seen.items()
            if (seen < old or other in dead) and other not in self._ended
        ]
        return [0] if 0 in silent else silent  # rank 0 keeps the counters of all

    def counter(self, name: str, step: int = 0) -> int:
        """Adds `step` to a counter that all ranks share, and returns its value. It starts at 0.

        Raises:
            LostRank: Rank 0, which keeps the counter, has ended.
        """
        try:
            return self._store.add(f"counters/{name}", step)
        except RuntimeError as error:
            raise LostRank.because(error) from error

    def wait_for_all(self) -> None:
        """Reports that this rank has finished. Rank 0 waits until all ranks have.

        Raises:
            LostRank: A rank died before it had finished.
        """
        try:
            self._store.add(f"ended/{self.rank}", 1)
        except RuntimeError as error:
            raise LostRank.because(error) from error
        while self.rank == 0 and len(self._ended) < self.world_size - 1:
            if lost := self.lost():
                raise LostRank(self._sentence(lost))
            time.sleep(0.1)
            self._look()

    def _look(self) -> None:
        for other, (count, _) in self._seen.items():
            if (beats := self._store.add(f"beats/{other}", 0)) != count:
                self._seen[other] = beats, time.monotonic()
            if self._store.add(f"ended/{other}", 0):
                self._ended.add(other)

    def _beat(self) -> None:
        while not self._leaving.is_set():
            try:
                self._store.add(f"beats/{self.rank}", 1)
                self._look()
            except RuntimeError:  # rank 0, which keeps the store, has ended or cannot be reached
                pass
            self._leaving.wait(BEAT_SECONDS)

    def _watch(self) -> None:
        while not self._leaving.wait(BEAT_SECONDS):
            if self.needed and (lost := self.lost()):
                print(f"litspec: {self._sentence(lost)}", file=sys.stderr, flush=True)
                os._exit(2)

    def _sentence(self, lost: list[int]) -> str:
        which = f"Rank {lost[0]}" if len(lost) == 1 else f"Ranks {', '.join(map(str, lost))}"
        return f"{which} of {self.world_size} ended or stopped answering, so rank {self.rank} ends too."


def own_store(rank: int, share_int: Callable[[int], int]) -> dist.Store:
    """A store for ranks that are connected already.

    Args:
        rank: Rank of this process.
        share_int: Returns rank 0's number on all ranks.
    """
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    timeout = timedelta(seconds=LOST_SECONDS)
    options: dict[str, Any] = dict(world_size=None, wait_for_workers=False, timeout=timeout)
    store = dist.TCPStore(host, 0, is_master=True, **options) if rank == 0 else None
    port = share_int(0 if store is None else store.port)
    return store or dist.TCPStore(host, port, is_master=False, **options)
