"""The code of each process in tests/test_jobs.py; a separate module, since every process imports it."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from typing import Any

import torch

from litspec.jobs import run_job


def child(
    path: Path, out: Path, load: dict[str, Any], env: dict[str, str], settings: dict[str, Any], file_limit: int | None
) -> None:
    """A job, perhaps as one of the ranks that a launcher starts with these environment variables.

    Args:
        path: The prompts.
        out: The out file.
        load: As in `run_job`.
        env: Environment variables.
        settings: As in `run_job`.
        file_limit: Bytes beyond which the system refuses to write to any file.
    """
    torch.set_num_threads(1)
    os.environ.update(env)
    if file_limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
    os.dup2(os.open(out.parent / "stderr.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    sys.exit(run_job(path, out, load=load, **settings))
