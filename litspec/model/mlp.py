"""The layers between attentions: LitGPT's parameters, forwards that keep a row's bits. Notation: see `kv_cache`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import litgpt.model
import torch
import torch.nn.functional as F
from litgpt.config import Config
from torch import Tensor, nn

from litspec.model.bound import bound

# PyTorch's CPU operators process a tensor in vectors of up to 64 elements, and the remainder in a scalar routine, whose
# exponential may differ in the last bit. Above `SINGLE_THREADED` elements (GELU; 32,768 for others) the tensor is also
# cut into one piece per thread, each with its own remainder.
VECTOR_STEP = 64
SINGLE_THREADED = 16384
# For prompt chunks of up to this many rows, gathering each expert's rows costs more than it saves.
SHORT_CHUNK = 64


def activate(function: Callable[[Tensor], Tensor], x: Tensor, exact: bool = True) -> Tensor:
    """An elementwise function of rows `x` `(N, size)`, such that a row's result does not depend on its place.

    Each call takes as many rows as consist of whole vectors of one thread, perhaps a single row. Rows that need not be
    `exact` (see `Step`) and GPUs need no such care.
    """
    rows, size = x.shape
    together = max(1, SINGLE_THREADED // size) if size % VECTOR_STEP == 0 else 1
    if rows <= together or not exact or not x.is_cpu:
        return function(x)
    return torch.cat([function(part) for part in x.split(together)])


class GptNeoxMLP(litgpt.model.GptNeoxMLP):
    """Two projections and a GELU."""

    def __init__(self, config: Config, intermediate_size: int | None = None) -> None:
        super().__init__(config, intermediate_size)
        self.activation = partial(F.gelu, approximate=config.gelu_approximate)
        self.bind()

    def bind(self) -> None:
        """Binds the present weights, see `litspec.model.bound`."""
        self._fc, self._proj = bound(self.fc), bound(self.proj)

    def forward(self, x: Tensor, exact: bool = True) -> Tensor:
        """Rows `(N, C)` to `(N, C)`; `exact` as in `Step`."""
        return self._proj(activate(self.activation, self._fc(x), exact))


class LLaMAMLP(litgpt.model.LLaMAMLP):
    """Three projections and a gate, by SiLU; Gemma's is the same by GELU."""

    def __init__(self, config: Config, intermediate_size: int | None = None) -> None:
        super().__init__(config, intermediate_size)
        gelu = config.mlp_class_name == "GemmaMLP"
        self.activation = partial(F.gelu, approximate=config.gelu_approximate) if gelu else F.silu
        self.bind()

    def bind(self) -> None:
        """Binds the present weights, see `litspec.model.bound`."""
        self._fc_1, self._fc_2, self._proj = bound(self.fc_1), bound(self.fc_2), bound(self.proj)

    def forward(self, x: Tensor, exact: bool = True) -> Tensor:
        """Rows `(N, C)` to `(N, C)`; `exact` as in `Step`."""
        return self._proj(activate(self.activation, self._fc_1(x), exact) * self._fc_2(x))


class GroupedTopkRouter(litgpt.model.GroupedTopkRouter):
    """The router of DeepSeek-V3 (arXiv 2412.19437): the best experts of the best groups."""

    def forward(self, x: Tensor, exact: bool = True) -> tuple[Tensor, Tensor]:
        """Weights and ids of the experts of each row of `x` `(rows, C)`, both `(rows, n_expert_per_token)`."""
        # In float32 a small product rounds by its number of rows, whatever precision the rows have: each by itself.
        weight = self.weight.float()
        rows = x.float().split(1 if exact else len(x))
        scores = activate(torch.sigmoid, torch.cat([F.linear(row, weight) for row in rows]), exact)
        experts = self.get_topk_indices(scores)
        probs = scores.gather(1, experts)
        if self.config.norm_topk_prob:
            probs = probs / (probs.sum(dim=-1, keepdim=True) + 1e-20)
        return probs, experts


class LLaMAMoE(nn.Module):
    """A mixture of experts (Mixtral, Qwen3-MoE, DeepSeek).

    Attributes:
        fixed_shapes: Whether the shapes of blocks must not depend on values, see `GPT.fix_shapes`.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.fixed_shapes = False
        gate = GroupedTopkRouter(config) if config.n_expert_groups else None
        self.gate = gate or nn.Linear(config.n_embd, config.n_expert, bias=False)
        size = config.moe_intermediate_size
        self.experts = nn.ModuleList(LLaMAMLP(config, intermediate_size=size) for _ in range(config.n_expert))
        if config.n_shared_expert:
            self.shared_experts = LLaMAMLP(config, intermediate_size=size * config.n_shared_expert)

    def bind(self) -> None:
        """Binds the present weights, see `litspec.model.bound`."""
        for expert in (*self.experts, *([self.shared_experts] if self.config.n_shared_expert else [])):
            expert.bind()

    def forward(self, x: Tensor, exact: bool = True) -> Tensor:
        """Rows `x` `(N, C)` through the experts each is routed to, `(N, C)`.

        For `exact` rows (see `Step`) each expert that any row is routed to runs on all rows, with weight zero for the
        other rows. A product over the expert's own rows only would round differently for another choice of rows. In
        chunks of a prompt, which are always cut the same way, each expert runs on its own rows. The list of used
        experts is read on the host. A step of `fixed_shapes` cannot read it and runs all experts.
        """
        if self.config.n_expert_groups:
            probs, experts = self.gate(x, exact)
        else:
            logits, experts = self.gate(x).topk(self.config.n_expert_per_token)
            probs = logits.softmax(dim=-1, dtype=torch.float32)
        probs = (probs * self.config.routed_scaling_factor).to(x.dtype)
        weights = torch.zeros(len(x), len(self.experts), dtype=x.dtype, device=x.device).scatter(1, experts, probs)
        y = torch.zeros_like(x)
        touched = range(len(self.experts)) if exact and self.fixed_shapes else experts.unique().tolist()
        for expert in touched:
            if exact or len(x) <= SHORT_CHUNK:
                y = torch.addcmul(y, self.experts[expert](x, exact), weights[:, expert, None])
            else:
                own = (experts == expert).any(dim=-1).nonzero().squeeze(-1)
                y.index_add_(0, own, self.experts[expert](x[own], exact) * weights[own, expert, None])
        return y + self.shared_experts(x, exact) if self.config.n_shared_expert else y


def build_mlp(config: Config, block_idx: int) -> GptNeoxMLP | LLaMAMLP | LLaMAMoE:
    """The layer that the config names for a block; the first blocks of a mixture may be dense."""
    classes: dict[str, type[GptNeoxMLP | LLaMAMLP | LLaMAMoE]] = {
        "GptNeoxMLP": GptNeoxMLP,
        "LLaMAMLP": LLaMAMLP,
        "GemmaMLP": LLaMAMLP,
        "LLaMAMoE": LLaMAMoE,
    }
    dense = config.first_k_dense_replace is not None and block_idx < config.first_k_dense_replace
    return LLaMAMLP(config) if dense else classes[config.mlp_class_name](config)
