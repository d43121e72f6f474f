"""Speculative decoding for LitGPT checkpoints that changes the speed, never the text."""

import os
from typing import TYPE_CHECKING, Any

from litspec import lifeline

__version__ = "0.1.0"
__all__ = ["Completion", "SpecLLM", "__version__"]

lifeline.hold()
# Threads of an operator wait for each other. By default they spin. If another process uses one of the cores, each
# operator then takes a time slice of the scheduler: 2 tokens per second on two cores, and 200 if waiting threads sleep.
# OpenMP reads the variable when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

if TYPE_CHECKING:
    from litspec.llm import Completion, SpecLLM


def __getattr__(name: str) -> Any:
    # Imported on first use: the command must answer --help without waiting for torch and litgpt.
    if name in ("Completion", "SpecLLM"):
        from litspec import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'litspec' has no attribute {name!r}")
