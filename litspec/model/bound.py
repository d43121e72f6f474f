"""Modules as plain functions. In a small forward most of the time is the overhead of calling modules."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from litspec.model.norm import RMSNorm


def bound(module: nn.Module) -> Callable[..., Tensor]:
    """A function that does what calling the module does, with its present weights and hooks."""
    if module._forward_hooks or module._forward_pre_hooks:
        return module.__call__
    if type(module) is nn.Linear:
        # Rows are two-dimensional everywhere, so this equals `F.linear` with less overhead.
        transposed = module.weight.detach().t()
        if module.bias is None:
            return partial(torch.mm, mat2=transposed)
        return partial(torch.addmm, module.bias, mat2=transposed)
    if type(module) is RMSNorm:
        return module.bound()
    return module.forward


def bound_if_any(module: nn.Module | None) -> Callable[..., Tensor] | None:
    """As `bound`; None without a module, or for an `nn.Identity`."""
    return None if module is None or type(module) is nn.Identity else bound(module)
