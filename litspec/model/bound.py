"""The parts of a layer as plain functions: what a small forward pays for is mostly the way to its operators."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from litspec.model.norm import RMSNorm


def bound(module: nn.Module | None) -> Callable[..., Tensor] | None:
    """What calling the module comes to, with the weights and hooks that it has now; None where that is nothing."""
    if module is None or type(module) is nn.Identity:
        return None
    if module._forward_hooks or module._forward_pre_hooks:
        return module.__call__
    if type(module) is nn.Linear:
        return partial(F.linear, weight=module.weight, bias=module.bias)
    if type(module) is RMSNorm:
        return module.bound()
    return module.forward
