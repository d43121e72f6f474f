"""The parts of a layer as plain functions: what a small forward pays for is mostly the way to its operators."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from litspec.model.norm import RMSNorm

Function = Callable[[Tensor], Tensor]


def bound(module: nn.Module | None) -> Function | None:
    """What calling the module comes to, with the weights that it holds now; None where that is nothing.

    Modules that are more than their class says (quantized ones, ones with hooks) are called as they are.
    """
    if module is None or type(module) is nn.Identity:
        return None
    if not (module._forward_hooks or module._forward_pre_hooks):
        if type(module) is nn.Linear:
            return partial(F.linear, weight=module.weight, bias=module.bias)
        if type(module) is RMSNorm:
            return module.bound()
    return module.__call__
