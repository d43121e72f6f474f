"""Normalisation: LitGPT's parameters, few operators. Notation: see `litspec.model.kv_cache`."""

from __future__ import annotations

import litgpt.model
import torch
import torch.nn.functional as F
from litgpt.config import Config
from torch import Tensor, nn


class RMSNorm(litgpt.model.RMSNorm):
    """RMSNorm (Zhang & Sennrich 2019, arXiv 1910.07467) over the last dimension, computed in float32."""

    def forward(self, x: Tensor) -> Tensor:
        return self.bound()(x)

    def bound(self) -> RMSNormFunction:
        """This norm as a function of its present weights."""
        weight = self.weight.detach()
        return RMSNormFunction(1 + weight if self.add_unit_offset else weight, self.eps)


class RMSNormFunction:
    """RMSNorm with fixed weights.

    PyTorch's operator is one kernel on a GPU; on a CPU it is a chain of nine, which cost more than the work on a few
    rows. There, with n elements, `x / sqrt(|x|^2 / n + eps) * weight` is taken as
    `x / hypot(|x|, sqrt(n * eps)) * (sqrt(n) * weight)`: four.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps
        self.on_cpu = weight.is_cpu
        if self.on_cpu:
            n = weight.numel()
            self.scaled = weight.float() * n**0.5
            self.floor = torch.tensor((n * eps) ** 0.5)

    def __call__(self, x: Tensor) -> Tensor:
        if not self.on_cpu:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        if x.dtype != torch.float32:
            return self(x.float()).to(x.dtype)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x / torch.hypot(length, self.floor) * self.scaled


def build_norm(config: Config, size: int) -> nn.Module:
    """The normalisation that the config names, over `size` elements."""
    if config.norm_class_name == "RMSNorm":
        return RMSNorm(size, eps=config.norm_eps, add_unit_offset="Gemma" in config.name)
    return config.norm_class(size, eps=config.norm_eps)
