"""Speculative decoding for LitGPT checkpoints that changes the speed, never the text."""

from typing import TYPE_CHECKING, Any

from litspec import lifeline

__version__ = "0.1.0"
__all__ = ["Completion", "SpecLLM", "__version__"]

lifeline.hold()

if TYPE_CHECKING:
    from litspec.llm import Completion, SpecLLM


def __getattr__(name: str) -> Any:
    # Imported on first use: the command must answer --help without waiting for torch and litgpt.
    if name in ("Completion", "SpecLLM"):
        from litspec import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'litspec' has no attribute {name!r}")
