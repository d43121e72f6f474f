"""`distill.png`: loss and tokens per round by step, and acceptance by position against the start."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from litspec.errors import InputError
from litspec.training.files import write_in_place


def has_matplotlib() -> bool:
    """Whether matplotlib is installed."""
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None


def draw(summary: Mapping[str, Any], path: Path) -> None:
    """Draws a summary.

    Args:
        summary: As `distill` returns it.
        path: The file, a .png.

    Raises:
        InputError: matplotlib is not installed.
    """
    if not has_matplotlib():
        raise InputError("The picture needs matplotlib; install it with `pip install litspec[distill]`.")
    from matplotlib.figure import Figure

    history, start, best = summary["history"], summary["start"], summary["best"]
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    steps = [entry["step"] for entry in history]
    left.plot(steps, [entry["tokens_per_round"] for entry in history], color="tab:blue", marker="o", markersize=3)
    left.axhline(start["tokens_per_round"], color="tab:blue", linestyle=":", linewidth=1)
    left.set_xlabel("step")
    left.set_ylabel("tokens per round, held-out answers", color="tab:blue")
    losses = left.twinx()
    trained = [entry for entry in history if entry["loss"] is not None]
    losses.plot([entry["step"] for entry in trained], [entry["loss"] for entry in trained], color="tab:orange")
    losses.set_ylabel("loss", color="tab:orange")
    positions = range(1, len(best["acceptance_by_position"]) + 1)
    right.plot(positions, start["acceptance_by_position"], marker="o", linestyle=":", label="start")
    right.plot(positions, best["acceptance_by_position"], marker="o", label=f"step {best['step']}")
    right.set_xlabel("position in the block")
    right.set_ylabel("share accepted, with all before")
    right.set_ylim(0, 1)
    right.set_xticks(list(positions))
    right.legend()
    write_in_place(path, lambda temporary: figure.savefig(temporary, format="png", dpi=120))
