"""The whole pair on one device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from lightning.fabric.plugins import BitsandbytesPrecision

from litspec.checkpoint import Checkpoint, load_weights, read_state_dict
from litspec.engine.rows import class_limit, find_rows
from litspec.engine.runner import Runner
from litspec.errors import InputError
from litspec.model import GPT
from litspec.model.packed import pack

# No forward over several texts has more.
MOST_ROWS = 256


@dataclass
class Single:
    """A pair in one process, see `engine.target.Placed`.

    Attributes:
        model: The target.
        draft_model: The draft's model, where there is a draft.
        device: Where the target's tokens and logits are.
        verify_width: W, the most rows of a verification.
        rank: This process among those that share the work, 0 for one process.
        world_size: How many they are.
        runner: Runs the steps.
    """

    model: GPT
    draft_model: GPT | None
    device: torch.device
    verify_width: int
    rank: int = 0
    world_size: int = 1
    runner: Runner = field(default_factory=Runner)

    @functools.cached_property
    def rows(self) -> tuple[int, ...]:
        """Numbers of rows with equal bits; measured when first asked for."""
        return find_rows(self.model, self.verify_width)

    @functools.cached_property
    def most_rows(self) -> int:
        """Rows of several texts that keep these bits in one forward; measured when first asked for."""
        return class_limit(self.model, self.rows, MOST_ROWS)

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is the process that prints and writes."""
        return self.rank == 0

    def same(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens

    def agree(self, packed: torch.Tensor, count: int, decide: Callable[[list[int]], list[int]]) -> list[int]:
        outcome = packed.tolist()
        return outcome + decide(outcome)

    def share_int(self, value: int) -> int:
        """Rank 0's value, on every rank."""
        return value

    def wait_for_all(self) -> None:
        """Waits until every rank has done its share of many prompts."""


def load_model(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    rows: int | None = None,
    compiled: bool = False,
) -> GPT:
    """Builds a model without memory and assigns the checkpoint's weights to it, cast and moved one by one.

    Args:
        checkpoint: The model's.
        device: Where to.
        dtype: Of the weights.
        rows: How many rows its forwards will have, for which a CPU may lay the weights out (see `model.packed`); None
            leaves them as they are.
        compiled: Whether its steps are to be compiled; weights then stay matrices, with which the compiler can work.
    """
    with torch.device("meta"):
        model = GPT(checkpoint.config)
    load_weights(model, checkpoint, dtype=dtype, device=device)
    model.eval().requires_grad_(False)
    if compiled:
        model.fix_shapes()
    if rows is not None:
        pack(model, rows, blocks=not compiled)
    return model


def load_quantized(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, mode: str) -> GPT:
    """Loads a model whose linear layers bitsandbytes quantizes one by one as they arrive on the device.

    Args:
        checkpoint: The target's.
        device: A CUDA device.
        dtype: What products are computed in.
        mode: "bnb." and one of Fabric's modes: nf4, nf4-dq, fp4, fp4-dq, int8.

    Raises:
        InputError: int8 with another dtype than float16; weights that do not fit the model.
    """
    short: Any = mode.removeprefix("bnb.")
    try:
        plugin = BitsandbytesPrecision(short, dtype)
    except ValueError as error:
        raise InputError(f"quantize = {mode!r} with {dtype}: {error}; set precision='16-true'.") from error
    with torch.device(device), plugin.module_init_context():
        model = GPT(checkpoint.config)
    try:
        model.load_state_dict(read_state_dict(checkpoint))
    except RuntimeError as error:
        raise InputError(f"{str(checkpoint.weights)!r} does not fit model_config.yaml: {error}") from error
    return cast(GPT, plugin.convert_module(model)).eval().requires_grad_(False)
