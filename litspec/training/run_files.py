"""The files of a training run.

    OUT/                       the folder that `--draft_dir` takes: the best state so far
    OUT/distill.json           the summary, at the end
    OUT/distill.png            plots of the summary
    OUT/training/run.json      the settings
    OUT/training/state.pth     the last saved state: weights, optimizer, step and figures
    OUT/training/lock          exists while a run is active
    OUT/training/*.jsonl       texts, see `texts`, and those of the last measurement

Each file is written atomically, so a run can be resumed after it was killed at any point.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from litspec.errors import InputError
from litspec.jobs.disk import locked, write_atomically

FORMAT = 1


class RunFiles:
    """The files of a run, by name.

    Args:
        out_dir: The folder for the draft.
        inputs: Folders that the run reads, by argument name. `out_dir` must not be one of them.

    Raises:
        InputError: `out_dir` is a file, is an input, or holds files that were not written by a run.
    """

    def __init__(self, out_dir: str | Path, inputs: Mapping[str, str | Path | None]) -> None:
        if not str(out_dir) or "\0" in str(out_dir):
            raise InputError(f"out_dir is {str(out_dir)!r}; give the name of a folder for the draft.")
        self.out = Path(out_dir)
        self.folder = self.out / "training"
        self.run, self.state, self.lock = (self.folder / name for name in ("run.json", "state.pth", "lock"))
        self.summary, self.picture = self.out / "distill.json", self.out / "distill.png"
        if self.out.exists() and not self.out.is_dir():
            raise InputError(f"out_dir {str(out_dir)!r} is a file; give the name of a folder.")
        for name, folder in inputs.items():
            if folder is not None and Path(folder).is_dir() and self.out.is_dir() and self.out.samefile(folder):
                raise InputError(
                    f"out_dir {str(out_dir)!r} is also {name}, which would be overwritten; give another folder."
                )
        if self.out.is_dir() and not self.run.exists():
            others = [path.name for path in self.out.iterdir() if path != self.folder]
            if others:
                raise InputError(
                    f"out_dir {str(out_dir)!r} holds {sorted(others)[0]!r}, which was not written by this command; "
                    "give a new folder."
                )

    def locked(self) -> AbstractContextManager[None]:
        """Locks the folder against other runs, see `jobs.disk.locked`; creates the folders."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"out_dir {str(self.out)!r} cannot be created: {error.strerror or error}.") from error
        return locked(self.lock, self.out)

    def begin(self, asked: Mapping[str, Any]) -> None:
        """Writes the settings, or checks that they are those of the earlier run.

        Raises:
            InputError: A setting differs. The message names it with both values.
        """
        content = json.loads(json.dumps({"format": FORMAT, **asked}))
        if not self.run.exists():
            write_atomically(self.run, (json.dumps(content, indent=2) + "\n").encode())
            return
        before: Any = None
        with suppress(ValueError, OSError):
            before = json.loads(self.run.read_text(encoding="utf-8"))
        if not isinstance(before, dict) or before.get("format") != FORMAT:
            raise InputError(
                f"{str(self.run)!r} does not describe a run that this version can resume; give a new out_dir."
            )
        for name in dict.fromkeys([*before, *content]):
            if before.get(name) != content.get(name):
                raise InputError(
                    f"out_dir {str(self.out)!r} holds a run with {name} = {before.get(name)!r}, not "
                    f"{content.get(name)!r}; give the same settings to resume it, or a new out_dir."
                )

    def check_room(self, needed: int) -> None:
        """Raises InputError if the disk has too little room for the run.

        Args:
            needed: Bytes that the run writes.
        """
        held = sum(path.stat().st_size for path in self.out.rglob("*") if path.is_file())
        free = shutil.disk_usage(self.folder).free
        if needed - held > free:
            raise InputError(
                f"The run needs up to {needed / 1e6:,.0f} MB in {str(self.out)!r}, of which {held / 1e6:,.0f} MB are "
                f"there, but the disk has only {free / 1e6:,.0f} MB left; free some space, or give another out_dir."
            )
