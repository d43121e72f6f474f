"""The files of a job: reading what an earlier run left, and appending to it."""

from __future__ import annotations

import json
import os
import re
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
from litspec.jobs.disk import (
    LineFile,
    as_line,
    begins_with,
    dump,
    load_line,
    locked,
    log,
    read_own,
    whole_lines,
    write_atomically,
    writing,
)
from litspec.jobs.prompts import Prompts, Request

FORMAT = 3
SUMMARY = b'{\n  "texts": '  # how the file of totals begins
SYNC_SECONDS = 1.0
# Names of files that are removed when a job is complete, if their content was written by a job.
PART = re.compile(r"rank\d+-\d+\.part")
TEMPORARY = re.compile(r"(job|summary)\.json\.[0-9a-f]{16}\.tmp")


class Answer(NamedTuple):
    """The lines of a finished text.

    Attributes:
        number: Line number in the out file, from 0.
        line: Line of the out file.
        stats: Line of the stats file.
    """

    number: int
    line: str
    stats: str


@dataclass(frozen=True)
class Done:
    """What an earlier run left.

    Attributes:
        lines: Whole lines of the out file.
        size: Bytes of these lines. The rest of the file is an incomplete line.
        errors: Lines of the out file that are errors.
        stats_lines: Lines of the stats file that belong to these texts.
        stats_size: Bytes of these lines.
        begun: Whether there was an earlier run.
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
        out_file: The file for the texts. A link is resolved.

    Raises:
        InputError: The folder of `out_file` does not exist.
    """

    def __init__(self, out_file: str | Path) -> None:
        try:
            self.out = Path(os.path.realpath(out_file))
        except ValueError as error:
            raise InputError(f"out_file is {str(out_file)!r}, which is not a valid file name: {error}.") from error
        if not str(out_file):
            raise InputError("out_file is ''; give the name of the file for the texts.")
        if not self.out.parent.is_dir():
            raise InputError(f"The folder of out_file, {str(self.out.parent)!r}, does not exist; create it first.")
        self.stats = self._beside("stats.jsonl")
        self.job = self._beside("job.json")
        self.summary = self._beside("summary.json")
        self.lock = self._beside("lock")

    def _beside(self, suffix: str) -> Path:
        return self.out.with_name(f"{self.out.name}.{suffix}")

    def locked(self) -> AbstractContextManager[None]:
        """Locks the files against other processes, see `disk.locked`."""
        return locked(self.lock, self.out)

    def look(self, prompts: Prompts, wanted: Mapping[str, Any]) -> Done:
        """Reads what an earlier run left. Changes nothing.

        Args:
            prompts: The prompts.
            wanted: The settings that decide the texts, as far as they are known.

        Raises:
            InputError: There are files that this job cannot have written.
        """
        if not os.path.lexists(self.job):
            for path in (self.out, self.stats):
                if os.path.lexists(path):
                    raise InputError(
                        f"{str(path)!r} exists without {self.job.name!r}, so it was not written by a job; give another "
                        "out_file, or move it away."
                    )
            return Done()
        description = self._description()
        self._check_stats()
        if not os.path.lexists(self.out):
            # The run ended before its first text, or the user removed the texts: the other files are useless then.
            return Done()
        refuse_other(self.out, description["decides"], wanted)
        lines = size = errors = stats_lines = stats_size = 0
        for line in whole_lines(self.out):
            found = load_line(line)
            if lines >= len(prompts) or not _is_about(found, prompts[lines]) or ("text" in found) == ("error" in found):
                raise InputError(
                    f"Line {lines + 1} of {str(self.out)!r} is not what this job writes there; remove it and all lines "
                    "after it to resume from there, or give another out_file."
                )
            lines, size, errors = lines + 1, size + len(line), errors + ("error" in found)
        if lines == 0 and not begins_with(self.out, dump(prompts[0].head)[:-1].encode()):
            raise InputError(f"{str(self.out)!r} was not written by a job; give another out_file, or move it away.")
        for line in whole_lines(self.stats):
            if stats_lines == lines or not _is_about(load_line(line), prompts[stats_lines]):
                break
            stats_lines, stats_size = stats_lines + 1, stats_size + len(line)
        return Done(lines, size, errors, stats_lines, stats_size, begun=True)

    def begin(self, prompts: Prompts, done: Done, wanted: Mapping[str, Any], device: torch.device) -> Results:
        """Writes the description of a new job, or checks that of an earlier run. Opens the files for appending.

        Args:
            prompts: The prompts.
            done: What `look` found.
            wanted: All settings that decide the texts.
            device: The target's device. Its name goes into the description.
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
                log(f"The job was started with {', '.join(changed)}: further texts may differ in rare near-ties.")
        else:
            description = {"format": FORMAT, "decides": wanted, "made_with": made_with}
            write_atomically(self.job, (json.dumps(description, indent=2) + "\n").encode())
        return Results(self, prompts, done)

    def _description(self) -> dict[str, Any]:
        """The description that `begin` wrote. Any other file of this name is refused: it was not written by a job."""
        content = b""
        with suppress(FileNotFoundError):
            content = read_own(self.job)
        with suppress(ValueError, RecursionError, KeyError, TypeError):
            found = json.loads(content)
            if found["format"] == FORMAT and all(isinstance(found[part], dict) for part in ("decides", "made_with")):
                return found
        raise InputError(
            f"{str(self.job)!r} does not describe a job that this version can resume; give another out_file, or move "
            "it away."
        )

    def _check_stats(self) -> None:
        """Refuses a stats file that was not written by a job, since it would be overwritten."""
        first = next(whole_lines(self.stats), None)
        found = load_line(first or b"{}")
        ours = ("id" in found and not found.keys() - {"id", "sample"}) or "new_tokens" in found or "error" in found
        if not (ours if first is not None else begins_with(self.stats, b'{"id": ')):
            raise InputError(f"{str(self.stats)!r} was not written by a job; give another out_file, or move it away.")

    def new_part(self, rank: int, job: int) -> PartFile:
        """Creates a file for the texts of one rank. Each run has its own, as a rank of a killed run may still write."""
        run = 0
        while True:
            try:
                return PartFile(self._beside(f"rank{rank}-{run}.part"), job)
            except FileExistsError:
                run += 1

    def parts(self) -> list[Path]:
        """The files of individual ranks, of this run and earlier ones."""
        return [path for path in self._named(PART) if begins_with(path, b'{"job": ')]

    def _named(self, name: re.Pattern[str]) -> list[Path]:
        """Regular files beside the out file whose names end in this pattern."""
        begin = f"{self.out.name}."
        with writing(self.out.parent), os.scandir(self.out.parent) as entries:
            found = [
                Path(self.out.parent, entry.name)
                for entry in entries
                if entry.name.startswith(begin)
                and name.fullmatch(entry.name[len(begin) :])
                and entry.is_file(follow_symlinks=False)
            ]
        return sorted(found)

    def summarize(self) -> str:
        """Writes the totals of a complete job to the summary file. Returns a line about them."""
        records = [load_line(line) for line in whole_lines(self.stats)]
        counted = [record for record in records if "new_tokens" in record]
        summed = "new_tokens", "rounds", "proposed", "accepted"
        totals = {name: sum(record.get(name, 0) for record in counted) for name in summed}
        failed = [record for record in records if "error" in record]
        total: dict[str, Any] = {"texts": len(records), "errors": len(failed)} | totals
        if totals["proposed"]:
            total["acceptance_rate"] = totals["accepted"] / totals["proposed"]
        if totals["rounds"]:
            total["mean_acceptance_length"] = (totals["new_tokens"] - len(counted)) / totals["rounds"]
        # Never overwrite a file that was not written by a job.
        if not os.path.lexists(self.summary) or begins_with(self.summary, SUMMARY):
            write_atomically(self.summary, (json.dumps(total, indent=2) + "\n").encode())
        parts = [f"{total['texts']} texts, {total['new_tokens']} tokens"]
        if totals["proposed"]:
            parts.append(f"acceptance rate {total['acceptance_rate']:.2f}")
        if failed:
            names = [str(record["id"]) for record in failed[:10]]
            more = f" and {len(failed) - 10} more" if len(failed) > 10 else ""
            parts.append(f"no text for prompt {', '.join(names)}{more}")
        return f"All done: {'; '.join(parts)}."

    def remove_parts(self) -> None:
        """Removes the temporary files of a job: files of individual ranks, and incomplete files."""
        unfinished = [
            path
            for path in self._named(TEMPORARY)
            if begins_with(path, b'{\n  "format": ') or begins_with(path, SUMMARY)
        ]
        for path in self.parts() + unfinished:
            path.unlink(missing_ok=True)


class Results:
    """The out file and the stats file, open for appending.

    Attributes:
        next: Number of the next text.
        errors: Lines that are errors.
    """

    def __init__(self, files: JobFiles, prompts: Prompts, done: Done) -> None:
        self._stats = LineFile(files.stats, done.stats_size)
        for number in range(done.stats_lines, done.lines):
            self._stats.append(as_line(dump(prompts[number].head)))  # a placeholder: the statistics are lost
        self._out = LineFile(files.out, done.size)
        self.next = done.lines
        self.errors = done.errors
        self._synced = time.monotonic()

    def put(self, answer: Answer) -> None:
        """Appends the next text."""
        stats = json.loads(answer.stats)
        # Statistics first: if the job ends between the two writes, the text is generated again with its statistics.
        self._stats.append(as_line(answer.stats))
        self._out.append(as_line(answer.line))
        self.next += 1
        self.errors += "error" in stats
        if time.monotonic() - self._synced > SYNC_SECONDS:
            self._sync()

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
    """The file to which one of several ranks writes its texts with their numbers. Rank 0 puts all texts in order.

    Args:
        path: A new file.
        job: Hash of all settings that decide the texts. It identifies the job.
    """

    def __init__(self, path: Path, job: int) -> None:
        self._file = LineFile(path, new=True)
        self._closed = False
        self._file.append(as_line(dump({"job": job})))
        self._synced = time.monotonic()

    def put(self, answer: Answer) -> None:
        self._file.append(as_line(dump(answer._asdict())))
        if time.monotonic() - self._synced > SYNC_SECONDS:
            self._file.sync()
            self._synced = time.monotonic()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            try:
                self._file.sync()
            finally:
                self._file.close()


class Parts:
    """The texts in the files of individual ranks, of this run and of interrupted ones.

    Args:
        files: The job's files.
        job: The job's hash. Files of other jobs are ignored.
    """

    def __init__(self, files: JobFiles, job: int) -> None:
        self._files = files
        self._job = job
        self._read: dict[Path, int] = {}  # bytes read so far; -1 for the file of another job
        self._where: dict[int, tuple[Path, int]] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._where

    def count_from(self, first: int) -> int:
        """How many texts from a number on are there."""
        return sum(number >= first for number in self._where)

    def refresh(self) -> None:
        """Reads what the ranks have written since the last call."""
        for path in self._files.parts():
            position = self._read.get(path, 0)
            for line in whole_lines(path, position) if position >= 0 else ():
                found = load_line(line)
                if position == 0 and found.get("job") != self._job:
                    position = -1
                    break
                if position > 0:
                    if _answer(found) is None:
                        break  # on a disk shared by machines the line may not be complete yet
                    self._where.setdefault(found["number"], (path, position))
                position += len(line)
            self._read[path] = position

    def take(self, number: int) -> Answer:
        path, position = self._where.pop(number)
        answer = _answer(load_line(next(whole_lines(path, position), b"")))
        if answer is None or answer.number != number:
            raise InputError(
                f"{str(path)!r} was removed or changed while the job was reading it; run the same command again."
            )
        return answer


def _answer(found: Mapping[str, Any]) -> Answer | None:
    """The text in a line of a rank's file, or None."""
    number, line, stats = (found.get(name) for name in Answer._fields)
    if not (isinstance(number, int) and isinstance(line, str) and isinstance(stats, str)):
        return None
    return Answer(number, line, stats) if load_line(line.encode()) and load_line(stats.encode()) else None


def _is_about(found: Mapping[str, Any], request: Request) -> bool:
    return {name: found.get(name) for name in request.head} == request.head
