"""A model split across ranks, each of which holds a part of every layer (Shoeybi et al. 2019, arXiv 1909.08053).

Query heads and the rows inside an MLP are distributed over ranks. Each rank multiplies its part by the matching columns
of the layer's last matrix. The partial results are summed, once after the attention and once after the MLP. The output
head is distributed by token ids, and its logits are gathered. Everything else is replicated.

Weights stay plain tensors, and the model's forward is unchanged except for three hooks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from litgpt.config import Config
from torch import Tensor, nn

from litspec.checkpoint import Checkpoint, load_weights
from litspec.engine.runner import Runner
from litspec.errors import InputError
from litspec.model import GPT
from litspec.model.norm import RMSNorm
from litspec.placement.heartbeat import Heartbeat, LostRank


@dataclass(frozen=True)
class Shard:
    """The part of a model that one rank holds.

    Attributes:
        config: Config of the whole model.
        rank: The rank.
        world_size: Number of ranks.
    """

    config: Config
    rank: int
    world_size: int

    def check(self, role: str = "checkpoint_dir") -> None:
        """Raises InputError if the model cannot be split into `world_size` parts. The message names both numbers."""
        config, n = self.config, self.world_size
        sizes = {"n_head": config.n_head}
        if config.mlp_class_name != "LLaMAMoE" or config.first_k_dense_replace:
            sizes["intermediate_size"] = config.intermediate_size
        if config.mlp_class_name == "LLaMAMoE":
            sizes["moe_intermediate_size"] = config.moe_intermediate_size
        for name, size in sizes.items():
            if size % n:
                fitting = [d for d in range(n - 1, 0, -1) if all(s % d == 0 for s in sizes.values())]
                raise InputError(
                    f"The model of {role} has {name} = {size}, which cannot be split into {n} equal parts for "
                    f"placement 'tensor_parallel' on {n} devices; the next smaller number that works is {fitting[0]}."
                )
        if config.norm_qk and config.norm_qk_type == "olmo2" and config.norm_class_name != "RMSNorm":
            raise InputError(
                f"The model of {role} normalises queries over all heads by {config.norm_class_name}; placement "
                "'tensor_parallel' supports this with RMSNorm only; use 'sequential'."
            )

    @property
    def n_head(self) -> int:
        """Query heads per rank."""
        return self.config.n_head // self.world_size

    def groups(self, rank: int | None = None) -> list[int]:
        """The key/value head of each query group that a rank has, this one by default.

        If there are fewer groups than ranks, or the borders of groups are not those of ranks, several ranks hold the
        same group, perhaps in several copies, so that every copy serves the same number of its rank's query heads.
        """
        per_group = self.config.n_head // self.config.n_query_groups
        heads = math.gcd(self.n_head, per_group)
        first = (self.rank if rank is None else rank) * self.n_head
        return [head // per_group for head in range(first, first + self.n_head, heads)]

    def group_shares(self) -> list[float]:
        """For each of this rank's groups: 1 / the number of its copies on all ranks."""
        everywhere = [group for rank in range(self.world_size) for group in self.groups(rank)]
        return [1 / everywhere.count(group) for group in self.groups()]

    def part(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a weight or bias, given by its name in the state dict; a view if possible."""
        config = self.config
        module, kind = name.rsplit(".", 2)[-2:]
        if name.startswith("lm_head."):
            rows = -(-whole.size(0) // self.world_size)
            mine = whole[self.rank * rows : (self.rank + 1) * rows]
            return mine if mine.size(0) == rows else F.pad(mine, (0, 0) * (whole.dim() - 1) + (0, rows - mine.size(0)))
        if ".attn." in name and module == "qkv":
            # The rows are all of q, then all of k, then all of v; each is split by heads.
            q, k, v = whole.split([h * config.head_size for h in (config.n_head, *[config.n_query_groups] * 2)])
            return torch.cat((self._rows(q), self._heads(k), self._heads(v)))
        if ".attn." in name and (module in ("q_b_proj", "kv_b_proj")):
            return self._rows(whole)
        if module in ("norm_q", "norm_k") and config.norm_qk_type == "olmo2":
            return self._rows(whole) if module == "norm_q" else self._heads(whole)
        if module in ("fc", "fc_1", "fc_2"):
            return self._rows(whole)
        if module == "proj" and kind == "weight":
            return whole.chunk(self.world_size, dim=1)[self.rank].contiguous()
        if module == "proj" and self.rank > 0:
            return torch.zeros_like(whole)  # the sum over ranks must include the bias once
        return whole

    def _rows(self, whole: Tensor) -> Tensor:
        return whole.chunk(self.world_size)[self.rank]

    def _heads(self, whole: Tensor) -> Tensor:
        """The rows of this rank's key or value heads."""
        heads = whole.view(self.config.n_query_groups, self.config.head_size, *whole.shape[1:])
        return heads[self.groups()].flatten(0, 1)


class AcrossRanksRMSNorm(nn.Module):
    """RMSNorm over the heads of all ranks (Zhang & Sennrich 2019, arXiv 1910.07467), as in OLMo 2 for q and k.

    Args:
        norm: LitGPT's norm, with this rank's part of the weight.
        size: Number of elements on all ranks together.
        shares: For each of this rank's heads, one over the number of ranks that hold it.
    """

    shares: Tensor

    def __init__(self, norm: RMSNorm, size: int, shares: list[float]) -> None:
        super().__init__()
        self.weight = norm.weight
        self.eps = norm.eps
        self.add_unit_offset = norm.add_unit_offset
        self.size = size
        self.register_buffer("shares", torch.tensor(shares, device=norm.weight.device), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the heads `x` `(B, W, heads * D)` of this rank."""
        wide = x.float()
        heads = wide.unflatten(-1, (self.shares.numel(), -1)).square().sum(-1)
        square = (heads * self.shares).sum(-1, keepdim=True)
        scale = torch.rsqrt(add_up(square) / self.size + self.eps)
        weight = self.weight.float() + 1 if self.add_unit_offset else self.weight.float()
        return (wide * scale * weight).to(x.dtype)


def broadcast(x: Tensor) -> Tensor:
    """Rank 0's `x` on all ranks, in place."""
    try:
        dist.broadcast(x, src=0)
    except RuntimeError as error:
        raise LostRank.because(error) from error
    return x


def add_up(x: Tensor) -> Tensor:
    """The sum of `x` over all ranks, in place; the same bits everywhere."""
    try:
        dist.all_reduce(x)
    except RuntimeError as error:
        raise LostRank.because(error) from error
    return x


def gather_last(x: Tensor, size: int) -> Tensor:
    """The last dimensions of `x` `(..., n)` of all ranks, one after the other, without the padding: `(..., size)`."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    try:
        dist.all_gather(parts, x.contiguous())
    except RuntimeError as error:
        raise LostRank.because(error) from error
    return torch.cat(parts, dim=-1)[..., :size]


def load_shard(checkpoint: Checkpoint, shard: Shard, device: torch.device, dtype: torch.dtype) -> GPT:
    """Loads this rank's part of a model: every rank maps the file and copies only what it keeps."""
    config = checkpoint.config
    with torch.device("meta"):
        model = GPT(config)
    load_weights(model, checkpoint, dtype=dtype, device=device, part=shard.part)
    for block in model.transformer.h:
        attn = block.attn
        attn.n_head = shard.n_head
        attn.n_query_groups = shard.n_head if config.latent_attention else len(shard.groups())
        if config.norm_qk and config.norm_qk_type == "olmo2":
            attn.norm_q = AcrossRanksRMSNorm(attn.norm_q, config.n_head * config.head_size, [1.0] * shard.n_head)
            attn.norm_k = AcrossRanksRMSNorm(
                attn.norm_k, config.n_query_groups * config.head_size, shard.group_shares()
            )
        # Both end in `proj`; the experts of a mixture are added up on each rank first.
        for module in (attn, block.mlp):
            module.register_forward_hook(lambda module, args, partial: add_up(partial))
    model.lm_head.register_forward_hook(lambda module, args, logits: gather_last(logits, config.padded_vocab_size))
    return model.eval().requires_grad_(False)


@dataclass
class TensorParallel:
    """A pair whose target is split across ranks, see `engine.target.Placed`. All ranks generate the same text together.

    Devices may round differently, and clocks differ. So rank 0 decides everything that determines tokens or the
    shape of the next collective: the block to verify, the outcome of its round, and the number of proposals of the
    next.

    Attributes:
        model: This rank's part of the target; returns whole logits.
        draft_model: The draft model, if there is one.
        device: Device of the target's tokens and logits.
        verify_width: W.
        rank: Rank of this process.
        world_size: Number of ranks.
        heartbeat: Detects ranks that have died.
        runner: Runs the steps, uncompiled.
    """

    model: GPT
    draft_model: GPT | None
    device: torch.device
    verify_width: int
    rank: int
    world_size: int
    heartbeat: Heartbeat
    runner: Runner = field(default_factory=Runner)

    @property
    def rows(self) -> tuple[int, ...]:
        """One number: ranks whose drafters differ must still run forwards of one shape."""
        return (self.verify_width,)

    @property
    def most_rows(self) -> int:
        """W, since each text has its own forward."""
        return self.verify_width

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is the process that prints and writes."""
        return self.rank == 0

    def same(self, tokens: Tensor) -> Tensor:
        """Rank 0's tokens, on every rank. Called at the start of a forward."""
        self.heartbeat.needed = True
        return broadcast(tokens)

    def agree(self, packed: Tensor, count: int, decide: Callable[[list[int]], list[int]]) -> list[int]:
        if self.rank == 0:
            outcome = packed.tolist()
            outcome += decide(outcome)
            broadcast(torch.tensor(outcome, device=packed.device))
        else:
            outcome = broadcast(torch.empty(len(packed) + count, dtype=packed.dtype, device=packed.device)).tolist()
        self.heartbeat.needed = False
        return outcome

    def share_int(self, value: int) -> int:
        """Rank 0's value, on every rank."""
        return int(broadcast(torch.tensor([value], device=self.device)).item())

    def wait_for_all(self) -> None:
        """Returns at once: all ranks end a text together."""
