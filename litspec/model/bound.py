"""The parts of a layer as plain functions: what a small forward pays for is mostly the way to its operators."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from litspec.model.norm import RMSNorm


def bound(module: nn.Module) -> Callable[..., Tensor]:
    """What calling the module comes to, with the weights and hooks that it has now."""
    if module._forward_hooks or module._forward_pre_hooks:
        return module.__call__
    if type(module) is nn.Linear:
        # Rows are two-dimensional everywhere: `F.linear` would come to these, by a longer way.
        transposed = module.weight.detach().t()
        if module.bias is None:
            return partial(torch.mm, mat2=transposed)
        return partial(torch.addmm, module.bias, mat2=transposed)
    if type(module) is RMSNorm:
        return module.bound()
    return module.forward


def bound_if_any(module: nn.Module | None) -> Callable[..., Tensor] | None:
    """The same; None where there is no module, or one that does nothing."""
    return None if module is None or type(module) is nn.Identity else bound(module)
