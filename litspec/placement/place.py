"""`place`: from a pair of checkpoints and a few settings to a `Placed` pair."""

from __future__ import annotations

from typing import Literal

import torch
from lightning.fabric import Fabric

from litspec.checkpoint import Checkpoint
from litspec.errors import InputError
from litspec.placement.single import Single, load_model
from litspec.rounds import Placed

Placement = Literal["auto", "single", "tensor_parallel", "sequential", "replicate"]

DTYPES = {"32-true": torch.float32, "bf16-true": torch.bfloat16, "16-true": torch.float16}


def place(
    target: Checkpoint,
    draft: Checkpoint | None,
    *,
    accelerator: str = "auto",
    devices: int | str = 1,
    num_nodes: int = 1,
    placement: Placement = "auto",
    precision: str | None = None,
    draft_precision: str | None = None,
    draft_device: str | None = None,
    draft_placement: Literal["replicated", "tensor_parallel"] = "replicated",
    quantize: str | None = None,
    verify_width: int = 8,
) -> Placed:
    """Loads a pair and puts its weights where the placement says."""
    if placement not in ("auto", "single") or quantize is not None:
        raise InputError(f"placement must be 'auto' or 'single' for now, got {placement!r}")
    fabric = Fabric(accelerator=accelerator, devices=devices, num_nodes=num_nodes)
    device = fabric.device
    dtype = dtype_of(precision, device, "precision")
    model = load_model(target, device, dtype)
    draft_model = None
    if draft is not None:
        there = torch.device(draft_device) if draft_device is not None else device
        draft_dtype = dtype if draft_precision is None else dtype_of(draft_precision, there, "draft_precision")
        draft_model = load_model(draft, there, draft_dtype)
    return Single(model, device, verify_width, draft_model)


def dtype_of(precision: str | None, device: torch.device, name: str) -> torch.dtype:
    """The type that a precision by Fabric's name stores weights in; None is the device's best."""
    if precision is None:
        precision = default_precision(device)
    if precision not in DTYPES:
        raise InputError(f"{name} must be one of {', '.join(DTYPES)}, got {precision!r}")
    return DTYPES[precision]


def default_precision(device: torch.device) -> str:
    """bf16-true where the device has it, else 16-true; 32-true on a CPU."""
    if device.type == "cpu":
        return "32-true"
    if device.type == "cuda" and not torch.cuda.is_bf16_supported():
        return "16-true"
    return "bf16-true"
