"""The network of a DFlash block drafter (arXiv 2602.06036), with the parameter names of the published folders.

It sees the target's residual streams at every committed position as keys and values (the context), and runs one block:
the last committed token and B - 1 masks, which see the context and each other, all at once. Version 2 adds short
convolutions along the block, whose kernels follow from their input, and a selector of candidates.

Notation: see `litspec.model.kv_cache`; here B blocks of different texts run at once, of W rows each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from litgpt.model import build_rope_cache
from torch import Tensor, nn

from litspec.model.attention import rotate
from litspec.model.kv_cache import Step
from litspec.model.mlp import activate

# The cosines of some rows, and their sines with the first half negated, each (rows, 1, D).
Rope = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class DFlashConfig:
    """Sizes and conventions of a DFlash drafter.

    Attributes:
        n_embd: Width, the target's.
        vocab_size: The target's padded vocabulary.
        intermediate_size: Width of the MLP.
        n_head: Query heads.
        n_query_groups: Heads of keys and values.
        head_size: Elements of a head.
        taps: Blocks of the target (0-based) whose residual streams it reads; -1 is the state after the final norm.
        block_size: W, the last committed token and the masks after it.
        mask_token_id: The id whose embedding stands for "not known yet".
        windows: For each layer the sliding window, None for all that is there.
        causal: For each layer whether a row sees only itself and what stands before it.
        norm_eps: Of RMSNorm.
        rope_base: Base of the rotary embedding.
        rope_extra: Scaling of the rotary embedding, as LitGPT's `rope_adjustments`.
        attention_bias: Whether the attention's projections have a bias.
        sample_from_anchor: Whether row j proposes the token after it (W proposals), else its own (W - 1).
        embedding_scale: Multiplies the target's raw embedding.
        output_multiplier: Multiplies the logits.
        softcap: Squeezes the logits; 0 for not at all, None for what the target does.
        draft_vocab_size: Ids of a head of its own; None where it has the target's.
        conv_kernel_size: Taps of the convolutions of version 2; 0 for version 1.
        conv_group_size: Channels that share a kernel.
        selector_rank: Rank of the selector of version 2.
        selector_top_k: Number of candidates that the selector chooses from; 0 without a selector.
    """

    n_embd: int
    vocab_size: int
    intermediate_size: int
    n_head: int
    n_query_groups: int
    head_size: int
    taps: tuple[int, ...]
    block_size: int
    mask_token_id: int
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    norm_eps: float = 1e-6
    rope_base: float = 10000.0
    rope_extra: dict[str, Any] | None = field(default=None, hash=False)
    attention_bias: bool = False
    sample_from_anchor: bool = False
    embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    softcap: float | None = None
    draft_vocab_size: int | None = None
    conv_kernel_size: int = 0
    conv_group_size: int = 16
    selector_rank: int = 0
    selector_top_k: int = 0

    @property
    def n_layer(self) -> int:
        """Layers of the drafter."""
        return len(self.windows)

    @property
    def max_k(self) -> int:
        """Tokens that one block proposes."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1


class Attention(nn.Module):
    """Grouped-query attention of a block over the context and itself, with norms of queries and keys."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.n_head, self.n_query_groups, self.head_size = config.n_head, config.n_query_groups, config.head_size
        inner, groups = config.n_head * config.head_size, config.n_query_groups * config.head_size
        self.q_proj = nn.Linear(config.n_embd, inner, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.n_embd, groups, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.n_embd, groups, bias=config.attention_bias)
        self.o_proj = nn.Linear(inner, config.n_embd, bias=config.attention_bias)
        self.q_norm = nn.RMSNorm(config.head_size, eps=config.norm_eps)
        self.k_norm = nn.RMSNorm(config.head_size, eps=config.norm_eps)

    def keys_values(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Keys and values of rows `x` `(N, C)`, each `(N, G, D)`."""
        k = self.k_proj(x).view(-1, self.n_query_groups, self.head_size)
        return rotate(self.k_norm(k), *rope), self.v_proj(x).view_as(k)

    def forward(self, x: Tensor, step: Step, k_cache: Tensor, v_cache: Tensor, mask: Tensor) -> Tensor:
        """Attention of the rows `x` `(B, W, C)`, whose keys and values are written first, `(B, W, C)`.

        Args:
            x: The blocks' rows.
            step: Where they stand.
            k_cache, v_cache: Keys and values, `(B, G, S, D)`.
            mask: What is added to the scores, `(B, 1, R * W, L)`; its L columns are the last keys to read.
        """
        B, W, H, G, D = *x.shape[:2], self.n_head, self.n_query_groups, self.head_size
        R = H // G
        rope = step.rope[0]
        q = rotate(self.q_norm(self.q_proj(x).view(B * W, H, D)), *rope)
        k, v = self.keys_values(x.flatten(0, 1), rope)
        step.write(k_cache, k)
        step.write(v_cache, v)
        seen = slice(step.kv_length - mask.size(-1), step.kv_length)
        # The query heads of a group become rows of one head: keys and values are never expanded.
        q = q.view(B, W, G, R, D).permute(0, 2, 3, 1, 4).reshape(B, G, R * W, D)
        y = F.scaled_dot_product_attention(q, k_cache[:, :, seen], v_cache[:, :, seen], attn_mask=mask)
        return self.o_proj(y.view(B, G, R, W, D).permute(0, 3, 1, 2, 4).reshape(B, W, H * D))


class MLP(nn.Module):
    """Three projections and a gate."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.n_embd, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.n_embd, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.n_embd, bias=False)

    def forward(self, x: Tensor, exact: bool = False) -> Tensor:
        """Rows `(B, W, C)` to `(B, W, C)`; `exact` as in `Step`."""
        gate = self.gate_proj(x)
        return self.down_proj(activate(F.silu, gate.flatten(0, -2), exact).view_as(gate) * self.up_proj(x))


class BlockConv(nn.Module):
    """Convolutions along a block before and after a sublayer; both kernels follow from what goes in, in part."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.taps, self.groups = config.conv_kernel_size, config.n_embd // config.conv_group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, self.taps, config.n_embd))
        self.kernel_projection = nn.Linear(config.n_embd, 2 * self.taps * self.groups, bias=False)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """`x` `(B, W, C)` through the first convolution, the sublayer, and the second."""
        kernels = self.kernel_projection(x).view(*x.shape[:2], 2, self.taps, self.groups, 1)
        return self._convolve(sublayer(self._convolve(x, kernels, 0)), kernels, 1)

    def _convolve(self, x: Tensor, kernels: Tensor, which: int) -> Tensor:
        """Row i of the result is a sum over rows i, i - 1, ..., i - taps + 1; before the block stand zeros."""
        rows = x.view(*x.shape[:2], self.groups, -1)
        base = self.base_kernel[which].view(self.taps, self.groups, -1)
        y = (base[0] + kernels[:, :, which, 0]) * rows
        for offset in range(1, self.taps):
            before = F.pad(rows, (0, 0, 0, 0, offset, 0))[:, : x.size(1)]
            y = y + (base[offset] + kernels[:, :, which, offset]) * before
        return y.view_as(x)


class Layer(nn.Module):
    """Attention and MLP of a block, each with its norm, residual and, in version 2, convolutions."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(config.n_embd, eps=config.norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.n_embd, eps=config.norm_eps)
        self.attention_conv = BlockConv(config) if config.conv_kernel_size else None
        self.mlp_conv = BlockConv(config) if config.conv_kernel_size else None

    def forward(self, x: Tensor, step: Step, k_cache: Tensor, v_cache: Tensor, mask: Tensor) -> Tensor:
        """The blocks' rows `(B, W, C)` after this layer; arguments as in `Attention.forward`."""

        def attention(y: Tensor) -> Tensor:
            return self.self_attn(y, step, k_cache, v_cache, mask)

        def feed_forward(y: Tensor) -> Tensor:
            return self.mlp(y, step.exact)

        y = self.input_layernorm(x)
        x = x + (attention(y) if self.attention_conv is None else self.attention_conv(y, attention))
        y = self.post_attention_layernorm(x)
        return x + (feed_forward(y) if self.mlp_conv is None else self.mlp_conv(y, feed_forward))


class CandidateSelector(nn.Module):
    """Scores the likeliest ids of a position by the token chosen before it (version 2)."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.top_k = config.selector_top_k
        self.predecessor_codebook = nn.Parameter(torch.zeros(config.vocab_size, config.selector_rank))
        self.successor_codebook = nn.Parameter(torch.zeros(config.vocab_size, config.selector_rank))
        self.hidden_projection = nn.Linear(config.n_embd, config.selector_rank, bias=False)

    def forward(self, row: Tensor, before: Tensor, candidates: Tensor) -> Tensor:
        """What is added to the logits of candidates.

        Args:
            row: The position's projected row in each block, `(B, rank)`.
            before: The token chosen before it, `(B,)`.
            candidates: Ids, `(B, K)`.

        Returns:
            `(B, K)`.
        """
        wanted = F.embedding(before, self.predecessor_codebook) * row
        return (F.embedding(candidates, self.successor_codebook) @ wanted.unsqueeze(-1)).squeeze(-1)


class DFlashNetwork(nn.Module):
    """All that a DFlash folder holds; embedding and head are the target's.

    Args:
        config: Its sizes.
    """

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.taps) * config.n_embd, config.n_embd, bias=False)
        self.hidden_norm = nn.RMSNorm(config.n_embd, eps=config.norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.n_layer))
        self.norm = nn.RMSNorm(config.n_embd, eps=config.norm_eps)
        self.candidate_selector = CandidateSelector(config) if config.selector_top_k else None
        self.lm_head: nn.Linear | None = None
        self.d2t: Tensor | None
        if config.draft_vocab_size is not None:
            self.lm_head = nn.Linear(config.n_embd, config.draft_vocab_size, bias=False)
            # Draft id i stands for the target's id i + d2t[i].
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        else:
            self.register_buffer("d2t", None)

    def rope_tables(self, length: int) -> Rope:
        """Cosines and sines of positions 0, 1, ..., `length` - 1, in the dtype and on the device of the weights."""
        config, like = self.config, self.fc.weight
        cos, sin = build_rope_cache(
            length,
            config.head_size,
            device=like.device,
            base=config.rope_base,  # LitGPT says int and takes any number
            extra_config=config.rope_extra,
        )
        half = config.head_size // 2
        sin = torch.cat((-sin[:, :half], sin[:, half:]), dim=1)
        return cos.to(like.dtype).unsqueeze(1), sin.to(like.dtype).unsqueeze(1)

    def context(self, states: Tensor, rope: Rope) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of committed positions, for each layer.

        Args:
            states: What the taps saw there, `(N, len(taps) * C)`.
            rope: Of these positions.

        Returns:
            For each layer keys and values, each `(N, G, D)`.
        """
        rows = self.hidden_norm(self.fc(states))
        attentions = [layer.get_submodule("self_attn") for layer in self.layers]
        return [one.keys_values(rows, rope) for one in attentions if isinstance(one, Attention)]

    def masks(self, step: Step, begin: int) -> list[Tensor]:
        """For each layer what is added to the scores of the blocks' rows: 0, or -inf where a key is not seen.

        A row sees the context before its block, and of the block all, or in a causal layer itself and what stands
        before it.

        Args:
            step: Where the blocks stand.
            begin: The first key to read.

        Returns:
            For each layer `(B, 1, R * W, L)`, where L keys are read.
        """
        config, like = self.config, self.fc.weight
        rows = step.positions.view(step.batch_size, -1, 1)
        keys = torch.arange(begin, step.kv_length, device=rows.device)
        made: dict[tuple[int | None, bool], Tensor] = {}
        for window, causal in zip(config.windows, config.causal):
            if (window, causal) in made:
                continue
            seen = (keys <= rows) if causal else (keys <= rows[:, -1:]).expand(-1, rows.size(1), -1)
            if window is not None:
                seen = seen & (rows - keys < window) & (keys - rows < window)
            mask = torch.zeros_like(seen, dtype=like.dtype).masked_fill_(~seen, float("-inf"))
            made[window, causal] = mask.repeat(1, config.n_head // config.n_query_groups, 1).unsqueeze(1)
        return [made[kind] for kind in zip(config.windows, config.causal)]

    def forward(
        self, x: Tensor, step: Step, k: Sequence[Tensor], v: Sequence[Tensor], masks: Sequence[Tensor]
    ) -> Tensor:
        """Runs the blocks of some texts, whose keys and values are written after their contexts.

        Args:
            x: Embeddings of the last committed token and the masks, `(B, W, C)`.
            step: Where they stand.
            k, v: For each layer keys and values, `(B, G, S, D)`.
            masks: For each layer what its rows see.

        Returns:
            Rows for the head, `(B, W, C)`, after the final norm.
        """
        for layer, k_cache, v_cache, mask in zip(self.layers, k, v, masks):
            x = layer(x, step, k_cache, v_cache, mask)
        return self.norm(x)
