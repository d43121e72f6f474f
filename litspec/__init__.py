"""Speculative decoding for LitGPT checkpoints that changes the speed, never the text."""

import os
from typing import TYPE_CHECKING, Any

from litspec import lifeline

__version__ = "0.1.0"
__all__ = ["Completion", "SpecLLM", "__version__"]

lifeline.hold()
# Threads of an operator wait for each other. By default they spin, and where another process has one of the cores, every
# operator then takes as long as a turn of the scheduler: on two cores 2 tokens per second, and 200 with threads that
# sleep. Read when torch is imported, so this comes before; a number that is set already stays.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

if TYPE_CHECKING:
    from litspec.llm import Completion, SpecLLM


def __getattr__(name: str) -> Any:
    # Imported on first use: the command must answer --help without waiting for torch and litgpt.
    if name in ("Completion", "SpecLLM"):
        from litspec import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'litspec' has no attribute {name!r}")
