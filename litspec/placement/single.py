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

# Most rows of a forward over several texts.
MOST_ROWS = 256


@dataclass
class Single:
    """A pair in one process, see `engine.target.Placed`.

    Attributes:
        model: The target.
        draft_model: The draft model, if there is one.
        device: Device of the target's tokens and logits.
        verify_width: W, the most rows of a verification.
        rank: Rank of this process; 0 for a single process.
        world_size: Number of processes.
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
        """Numbers of rows with equal bits. Measured on first use."""
        return find_rows(self.model, self.verify_width)

    @functools.cached_property
    def most_rows(self) -> int:
        """Most rows of several texts that keep these bits in one forward. Measured on first use."""
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
    """Builds a model on the meta device and assigns the checkpoint's weights to it, cast and moved one by one.

    Args:
        checkpoint: The model's checkpoint.
        device: Device of the weights.
        dtype: Dtype of the weights.
        rows: Number of rows of its forwards. On a CPU weights may be packed for it, see `model.packed`. None leaves
            them unchanged.
        compiled: Whether steps will be compiled. Weights then stay plain matrices, which the compiler needs.
    """
    with torch.device("meta"):
        model = GPT(checkpoint.config)
    load_weights(model, checkpoint, dtype=dtype, device=device)
    model.eval().requires_grad_(False)
    if rows is not None:
        pack(model, rows, blocks=not compiled)
    return model


def load_quantized(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, mode: str) -> GPT:
    """Loads a model whose linear layers bitsandbytes quantises one by one on the device.

    Args:
        checkpoint: The target's checkpoint.
        device: A CUDA device.
        dtype: Dtype in which products are computed.
        mode: "bnb." and one of Fabric's modes: nf4, nf4-dq, fp4, fp4-dq, int8.

    Raises:
        InputError: int8 with a dtype other than float16; weights that do not fit the model.
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
