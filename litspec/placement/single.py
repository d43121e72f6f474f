"""The whole target on one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from litspec.checkpoint import Checkpoint, load_weights
from litspec.model import GPT


@dataclass
class Single:
    """A target on one device, see `rounds.Placed`."""

    model: GPT
    device: torch.device
    verify_width: int

    def agree(self, packed: torch.Tensor, decide: Callable[[list[int]], int]) -> list[int]:
        outcome = packed.tolist()
        return [*outcome, decide(outcome)]


def load_model(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> GPT:
    """Builds a model without memory and assigns the checkpoint's weights to it, cast and moved one by one."""
    with torch.device("meta"):
        model = GPT(checkpoint.config)
    load_weights(model, checkpoint, dtype=dtype, device=device)
    return model.eval().requires_grad_(False)


def place_single(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, verify_width: int) -> Single:
    """Loads a target onto one device."""
    return Single(load_model(checkpoint, device, dtype), device, verify_width)
