"""The code of each process in tests/test_training.py; a separate module, since every process imports it."""

from __future__ import annotations

import os
from typing import Any

import torch

from litspec.training import distill


def child(arguments: dict[str, Any]) -> None:
    """A run of `distill`, to be killed."""
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    distill(**arguments)
