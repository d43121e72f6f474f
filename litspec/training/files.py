"""Files that are there whole or not at all, and the files that a draft's folder takes over from another."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from litspec.jobs.disk import sync_folder, writing

PROMPT_STYLE = "prompt_style.yaml"


def save_atomically(content: Any, path: Path) -> None:
    """`torch.save` so that, whatever happens, the path holds all of it or what it held before.

    Raises:
        InputError: The disk is full or cannot be written.
    """
    write_in_place(path, lambda temporary: torch.save(content, temporary))


def write_in_place(path: Path, write: Callable[[Path], None]) -> None:
    """Has a file written under another name, and gives it its own when it is on the disk.

    Only one process writes a run's files, so one name for all temporary files does: what a killed run left is
    overwritten, and disk use stays bounded.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    with writing(path):
        try:
            write(temporary)
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(path.parent)


def copy_prompt_style(source: Path, folder: Path) -> None:
    """Copies the prompt style, where there is one."""
    if (source / PROMPT_STYLE).is_file():
        shutil.copy(source / PROMPT_STYLE, folder)
