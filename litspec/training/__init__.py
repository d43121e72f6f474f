"""Trains drafts for your own target: `distill`, and `litspec distill` on the command line. See README.md here.

config.py       the settings, each written once
texts.py        prompts and the target's answers
target.py       the frozen target's states over texts
learner.py      the interface of what is trained
draft_model.py  a draft model
dflash.py       a block drafter
losses.py       how far a draft is from its target
measure.py      tokens per round, computed from distributions
loop.py         steps, evaluations, states
run_files.py    files of a run
distillation.py the whole run, in order
"""

from typing import TYPE_CHECKING, Any

__all__ = ["distill"]

if TYPE_CHECKING:
    from litspec.training.distillation import distill


def __getattr__(name: str) -> Any:
    # Imported on first use: the command must answer --help without waiting for torch and litgpt.
    if name == "distill":
        from importlib import import_module

        return import_module("litspec.training.distillation").distill
    raise AttributeError(f"module 'litspec.training' has no attribute {name!r}")
