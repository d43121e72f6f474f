"""The files of a job: what an earlier run left, and how they grow."""

from __future__ import annotations

import glob
import json
import os
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from litspec import __version__
from litspec.errors import InputError
from litspec.jobs.deciding import refuse_other
from litspec.jobs.disk import LineFile, as_line, dump, load_line, locked, log, whole_lines, write_atomically
from litspec.jobs.prompts import Prompts, Request

FORMAT = 2
SYNC_SECONDS = 1.0


class Answer(NamedTuple):
    """A text as it is written down.

    Attributes:
        number: Its place in the out file, from 0.
        line: Its line there ...
        stats: ... and its line in the stats file.
    """

    number: int
    line: str
    stats: str


@dataclass(frozen=True)
class Done:
    """What an earlier run has left.

    Attributes:
        lines: Texts in the out file ...
        size: ... and the bytes they take; what lies behind is torn.
        errors: How many of them are errors.
        stats_lines: Lines of the stats file that belong to these texts ...
        stats_size: ... and the bytes they take.
        begun: Whether there was such a run.
    """

    lines: int = 0
    size: int = 0
    errors: int = 0
    stats_lines: int = 0
    stats_size: int = 0
    begun: bool = False


class JobFiles:
    """The files of a job, by name.

    Args:
        out_file: The file for the texts; where it is a link, what it leads to.

    Raises:
        InputError: When its folder does not exist.
    """

    def __init__(self, out_file: str | Path) -> None:
        self.out = Path(os.path.realpath(out_file))
        if not self.out.parent.is_dir():
            raise InputError(f"The folder of out_file, {str(self.out.parent)!r}, does not exist; make it first.")
        self.stats = self._beside("stats.jsonl")
        self.job = self._beside("job.json")
        self.lock = self._beside("lock")

    def _beside(self, suffix: str) -> Path:
        return self.out.with_name(f"{self.out.name}.{suffix}")

    def locked(self) -> AbstractContextManager[None]:
        """Keeps other processes away from the files, see `disk.locked`."""
        return locked(self.lock, self.out)

    def look(self, prompts: Prompts, wanted: Mapping[str, Any]) -> Done:
        """Finds out what an earlier run left, and changes nothing.

        Args:
            prompts: The prompts.
            wanted: What is known of what decides the texts.

        Raises:
            InputError: When there are files that this job would not have left.
        """
        if not os.path.lexists(self.job):
            for path in (self.out, self.stats):
                if os.path.lexists(path):
                    raise InputError(
                        f"{str(path)!r} exists, but no {self.job.name!r} beside it tells that a job wrote it; give "
                        "another out_file, or move it away."
                    )
            return Done()
        if not os.path.lexists(self.out):
            # The run ended before it began, or its texts were thrown away: the rest is worth nothing then.
            return Done()
        if not self.out.is_file():
            raise InputError(f"out_file {str(self.out)!r} is not a file.")
        refuse_other(self.out, self._description()["decides"], wanted)
        lines = size = errors = stats_lines = stats_size = 0
        for line in whole_lines(self.out):
            found = load_line(line)
            if lines >= len(prompts) or not _is_about(found, prompts[lines]) or ("text" in found) == ("error" in found):
                raise InputError(
                    f"Line {lines + 1} of {str(self.out)!r} is not what this job writes there; remove it and all lines "
                    "behind it to resume from there, or give another out_file."
                )
            lines, size, errors = lines + 1, size + len(line), errors + ("error" in found)
        for line in whole_lines(self.stats):
            if stats_lines == lines or not _is_about(load_line(line), prompts[stats_lines]):
                break
            stats_lines, stats_size = stats_lines + 1, stats_size + len(line)
        return Done(lines, size, errors, stats_lines, stats_size, begun=True)

    def begin(self, prompts: Prompts, done: Done, wanted: Mapping[str, Any], device: torch.device) -> Results:
        """Describes a new job or checks that it is the old one, and opens the files behind their last whole lines.

        Args:
            prompts: The prompts.
            done: What `look` found.
            wanted: Everything that decides the texts.
            device: The target's, whose name is noted.
        """
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        made_with = {"litspec": __version__, "torch": torch.__version__, "device": name}
        if done.begun:
            description = self._description()
            refuse_other(self.out, description["decides"], wanted)
            then = description["made_with"]
            changed = [
                f"{name} {then.get(name)} (now {now})" for name, now in made_with.items() if then.get(name) != now
            ]
            if changed:
                log(f"The job was begun with {', '.join(changed)}: further texts may differ in rare near-ties.")
            log(f"Resuming {str(self.out)!r} behind {done.lines} of {len(prompts)} texts.")
        else:
            description = {"format": FORMAT, "decides": wanted, "made_with": made_with}
            write_atomically(self.job, (json.dumps(description, indent=2) + "\n").encode())
        return Results(self, prompts, done)

    def _description(self) -> dict[str, Any]:
        with suppress(OSError, ValueError, KeyError, TypeError):
            found = json.loads(self.job.read_bytes())
            if found["format"] == FORMAT and found["decides"].keys() and found["made_with"].keys():
                return found
        raise InputError(
            f"{str(self.job)!r} does not describe a job that this version can resume; give another out_file."
        )

    def new_part(self, rank: int, job: int) -> PartFile:
        """A file for the texts of one rank. Every run makes its own: a rank of a killed run may still write."""
        run = 0
        while True:
            try:
                return PartFile(self._beside(f"rank{rank}-{run}.part"), job)
            except FileExistsError:
                run += 1

    def parts(self) -> list[Path]:
        """The files of single ranks, of this run and earlier ones."""
        return sorted(self.out.parent.glob(f"{glob.escape(self.out.name)}.rank*.part"))

    def remove_parts(self) -> None:
        for path in self.parts():
            path.unlink(missing_ok=True)


class Results:
    """The out file and the stats file, open behind the lines that they hold.

    Attributes:
        next: The number of the text that comes next.
        errors: Lines that are errors.
    """

    def __init__(self, files: JobFiles, prompts: Prompts, done: Done) -> None:
        self._stats = LineFile(files.stats, done.stats_size)
        for number in range(done.stats_lines, done.lines):
            self._stats.append(as_line(dump(prompts[number].head)))  # the numbers are lost, the place is kept
        self._out = LineFile(files.out, done.size)
        self.next = done.lines
        self.errors = done.errors
        self._synced = time.monotonic()

    def put(self, answer: Answer) -> dict[str, Any]:
        """Writes down the next text; returns its statistics."""
        stats = json.loads(answer.stats)
        # Statistics first: if the job ends between the two, the text is made again and they are with it.
        self._stats.append(as_line(answer.stats))
        self._out.append(as_line(answer.line))
        self.next += 1
        self.errors += "error" in stats
        if time.monotonic() - self._synced > SYNC_SECONDS:
            self._sync()
        return stats

    def _sync(self) -> None:
        self._stats.sync()
        self._out.sync()
        self._synced = time.monotonic()

    def close(self) -> None:
        try:
            self._sync()
        finally:
            self._stats.close()
            self._out.close()


class PartFile:
    """Where one of several ranks writes its texts, each with its number, until the first rank has put them in order.

    Args:
        path: A new file.
        job: A hash of all that decides the texts, which tells whose they are.
    """

    def __init__(self, path: Path, job: int) -> None:
        self._file: LineFile | None = LineFile(path, new=True)
        self._file.append(as_line(dump({"job": job})))
        self._synced = time.monotonic()

    def put(self, answer: Answer) -> None:
        self._file.append(as_line(dump(answer._asdict())))
        if time.monotonic() - self._synced > SYNC_SECONDS:
            self._file.sync()
            self._synced = time.monotonic()

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.sync()
            finally:
                file.close()


class Parts:
    """The texts in the files of single ranks, of this run and of earlier ones that were interrupted.

    Args:
        files: The job's files.
        job: Its hash; what another job left is not looked at.
    """

    def __init__(self, files: JobFiles, job: int) -> None:
        self._files = files
        self._job = job
        self._read: dict[Path, int] = {}  # bytes that have been looked at; -1: another job's
        self._where: dict[int, tuple[Path, int]] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._where

    def refresh(self) -> None:
        """Looks for what has come since the last time."""
        for path in self._files.parts():
            position = self._read.get(path, 0)
            for line in whole_lines(path, position) if position >= 0 else ():
                found = load_line(line)
                if position == 0 and found.get("job") != self._job:
                    position = -1
                    break
                if position > 0:
                    if "number" not in found:
                        break  # not all of it has come yet, on a disk that several machines share
                    self._where.setdefault(found["number"], (path, position))
                position += len(line)
            self._read[path] = position

    def take(self, number: int) -> Answer:
        path, position = self._where.pop(number)
        return Answer(**load_line(next(whole_lines(path, position))))


def _is_about(found: Mapping[str, Any], request: Request) -> bool:
    return {name: found.get(name) for name in request.head} == request.head
