"""The whole pair on one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from litspec.checkpoint import Checkpoint, load_weights
from litspec.model import GPT


@dataclass
class Single:
    """A pair in one process, see `rounds.Placed`.

    Attributes:
        model: The target.
        device: Where its tokens and logits are.
        verify_width: W.
        draft_model: The draft's model, where there is a draft.
        rank: This process among those that share the work, 0 for one process.
        world_size: How many they are.
    """

    model: GPT
    device: torch.device
    verify_width: int
    draft_model: GPT | None = None
    rank: int = 0
    world_size: int = 1

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is the process that prints and writes."""
        return self.rank == 0

    def agree(self, packed: torch.Tensor, decide: Callable[[list[int]], int]) -> list[int]:
        outcome = packed.tolist()
        return [*outcome, decide(outcome)]

    def share_int(self, value: int) -> int:
        """Rank 0's value, on every rank."""
        return value


def load_model(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> GPT:
    """Builds a model without memory and assigns the checkpoint's weights to it, cast and moved one by one."""
    with torch.device("meta"):
        model = GPT(checkpoint.config)
    load_weights(model, checkpoint, dtype=dtype, device=device)
    return model.eval().requires_grad_(False)


def place_single(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, verify_width: int) -> Single:
    """Loads a target onto one device."""
    return Single(load_model(checkpoint, device, dtype), device, verify_width)
