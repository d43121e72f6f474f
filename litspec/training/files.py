"""Atomic writes of files, and files that are copied to a draft's folder."""

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
    """Atomic `torch.save`: the path holds the new content or, after an interruption, the old.

    Raises:
        InputError: The disk is full or cannot be written.
    """
    write_in_place(path, lambda temporary: torch.save(content, temporary))


def write_in_place(path: Path, write: Callable[[Path], None]) -> None:
    """Writes a temporary file, flushes it to disk, and renames it to its final name.

    Only one process writes a run's files, so the temporary name is fixed. A file that a killed run left is overwritten,
    which bounds disk use.
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
    """Copies the prompt style, if there is one."""
    if (source / PROMPT_STYLE).is_file():
        shutil.copy(source / PROMPT_STYLE, folder)
