"""Speculative decoding for LitGPT checkpoints that changes the speed, never the text."""

import os
from typing import TYPE_CHECKING, Any

from litspec import lifeline

__version__ = "0.1.0"
__all__ = ["Completion", "SpecLLM", "__version__"]

lifeline.hold()
# Threads of an operator wait for each other. By default they spin for milliseconds, and other processes want the cores:
# on two cores with two of these the embedded pair ran at 16 tokens per second, and at 66 if threads sleep after 5,000
# turns (idle: 0.91 to 1.01 of before). Sleeping at once (OMP_WAIT_POLICY=PASSIVE) halves the speed on idle cores. GNU
# OpenMP, which torch brings on Linux, reads the variable when torch is imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")

if TYPE_CHECKING:
    from litspec.llm import Completion, SpecLLM


def __getattr__(name: str) -> Any:
    # Imported on first use: the command must answer --help without waiting for torch and litgpt.
    if name in ("Completion", "SpecLLM"):
        from litspec import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'litspec' has no attribute {name!r}")
