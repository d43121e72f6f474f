"""Attention of a block of rows over cached keys and values. Notation: see `litspec.model.kv_cache`.

A row's result must not depend, to the last bit, on where the row stands in the block, on what the other rows hold, or
on how many masked slots are read after it. That decides most of what looks unusual here.
"""

from __future__ import annotations

import math
from typing import Any

import litgpt.model
import torch
import torch.nn.functional as F
from litgpt.config import Config
from torch import Tensor

from litspec.model.bound import bound, bound_if_any
from litspec.model.kv_cache import MaskKind, Step
from litspec.model.norm import RMSNorm, build_norm

# Up to this many rows the query heads of a group are folded into rows. Longer (prefill) chunks loop over the heads,
# since folding would repeat the mask for each.
MAX_FOLDED_ROWS = 64
# Folded rows are padded to a multiple of ROW_GROUP, and to at least FEWEST_ROWS, see `folded_rows`.
ROW_GROUP, FEWEST_ROWS = 4, 12
# Number of keys per product in `softcapped_attention`.
KEY_BLOCK = 64


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of `x` `(N, heads, n)` by `cos`, `sin` `(N, 1, n)`, the first half of `sin` negated."""
    return torch.addcmul(x * cos, x.roll(x.size(-1) // 2, -1), sin)


def deinterleave(x: Tensor) -> Tensor:
    """`(x0, x1, x2, x3, ...)` to `(x0, x2, ..., x1, x3, ...)` in the last dimension."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def mask_kind(window: int | None, heads_per_group: int, width: int, softcap: float | None) -> MaskKind:
    """The kind of mask for `attend`: with one row per folded query if queries are folded."""
    if width > MAX_FOLDED_ROWS:
        return window, 1, 0
    missing = folded_rows(heads_per_group, width) - heads_per_group * width
    return window, 1 if softcap is not None and not missing else heads_per_group, missing


def folded_rows(heads_per_group: int, width: int) -> int:
    """Rows of the folded queries of a group, including the padding that keeps bits equal.

    In a product inside the attention, rows that do not fill a group of `ROW_GROUP` round differently on some CPUs. So
    do fewer than `FEWEST_ROWS` rows if one head has all threads. A single row is not padded: it has other bits than
    longer blocks anyway.
    """
    rows = heads_per_group * width
    return rows if width == 1 else max(FEWEST_ROWS, -(-rows // ROW_GROUP) * ROW_GROUP)


def attend(
    q: Tensor, k: Tensor, v: Tensor, step: Step, window: int | None, scale: float, softcap: float | None = None
) -> Tensor:
    """Attention of `q` `(N, H, D)` over the slots to read of `k`, `v` `(B, G, S, D)`, returned as `(N, H * D)`.

    Keys and values are never expanded to H heads, and the operator is never asked to (`enable_gqa` under a mask may
    fall back to a slow kernel): the R query heads of a group become rows of one head.
    """
    N, H, D = q.shape
    B, W, G = step.batch_size, step.width, k.size(1)
    R = H // G
    mask = step.masks[mask_kind(window, R, W, softcap)]
    k, v = k[:, :, : step.kv_length], v[:, :, : step.kv_length]
    q = q.view(B, W, G, R, D).permute(0, 2, 3, 1, 4)  # (B, G, R, W, D)
    missing = folded_rows(R, W) - R * W if W <= MAX_FOLDED_ROWS else 0
    if missing:
        folded = F.pad(q.reshape(B, G, R * W, D), (0, 0, 0, missing))
        if softcap is not None:
            y = softcapped_attention(folded.unsqueeze(2), k, v, mask, scale, softcap).squeeze(2)
        else:
            y = F.scaled_dot_product_attention(folded, k, v, attn_mask=mask, scale=scale)
        y = y[:, :, : R * W].unflatten(2, (R, W))
    elif softcap is not None:
        y = softcapped_attention(q, k, v, mask, scale, softcap)
    elif W <= MAX_FOLDED_ROWS:
        y = F.scaled_dot_product_attention(q.reshape(B, G, R * W, D), k, v, attn_mask=mask, scale=scale)
        y = y.view(B, G, R, W, D)
    else:
        heads = [F.scaled_dot_product_attention(q[:, :, r], k, v, attn_mask=mask, scale=scale) for r in range(R)]
        y = torch.stack(heads, dim=2)
    return y.permute(0, 3, 1, 2, 4).reshape(N, H * D)


def softcapped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float) -> Tensor:
    """Attention whose scores are squeezed into (-softcap, softcap) before the mask (Gemma 2, arXiv 2408.00118).

    No fused kernel supports this, so the products are computed one by one. The product of probabilities and values is
    summed over fixed blocks of keys, in order. A single product over all L would sum in an order that depends on L.

    Args:
        q: `(B, G, R, W, D)`; k, v: `(B, G, L, D)`; mask: `(B, 1, W, L)`.

    Returns:
        `(B, G, R, W, D)`.
    """
    B, G, R, W, D = q.shape
    L = k.size(2)
    q, k, v = q.reshape(B * G, R * W, D), k.reshape(B * G, L, D), v.reshape(B * G, L, D)
    scores = torch.tanh(torch.bmm(q, k.mT) * (scale / softcap)) * softcap
    # A row that sees no key, as of an idle slot with a sliding window, must not become NaN: what it writes stays.
    scores = (scores.view(B, G, R, W, L) + mask.unsqueeze(2)).clamp_min(torch.finfo(scores.dtype).min)
    probs = F.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype).view(B * G, R * W, L)
    y = torch.bmm(probs[..., :KEY_BLOCK], v[:, :KEY_BLOCK])
    for start in range(KEY_BLOCK, L, KEY_BLOCK):
        y = torch.baddbmm(y, probs[..., start : start + KEY_BLOCK], v[:, start : start + KEY_BLOCK])
    return y.view(B, G, R, W, D)


class CausalSelfAttention(litgpt.model.CausalSelfAttention):
    """LitGPT's multi-head, grouped-query and multi-query attention: its parameters, another forward.

    A placement that splits the heads over ranks lowers `n_head` and `n_query_groups`; nothing here reads them from the
    config afterwards.
    """

    norm_q: Any  # LitGPT's, ours, or that of a placement
    norm_k: Any

    def __init__(self, config: Config, block_idx: int) -> None:
        super().__init__(config, block_idx)
        self.n_head, self.n_query_groups, self.head_size = config.n_head, config.n_query_groups, config.head_size
        self.window = config.sliding_window_size if self.apply_sliding_window_attention else None
        self.rope_idx = config.rope_indices[block_idx] if config.rope_indices is not None else 0
        self.scale = self.mscale**2 / math.sqrt(config.attention_scores_scalar or config.head_size)
        self.softcap = config.attention_logit_softcapping
        self.rope_whole = config.rope_n_elem == config.head_size and not config.rope_interleave
        if config.norm_qk:
            self.norm_q = build_norm(config, self.norm_q.weight.numel())
            self.norm_k = build_norm(config, self.norm_k.weight.numel())
        self.norm_per_head = config.norm_qk_type == "default"
        self.bind()

    def bind(self) -> None:
        """Binds the present weights, see `litspec.model.bound`."""
        self._qkv, self._proj = bound(self.qkv), bound(self.proj)
        self._norm_q, self._norm_k = bound_if_any(self.norm_q), bound_if_any(self.norm_k)

    def cache_shape(self, batch_size: int, slots: int) -> tuple[int, int, int, int]:
        """Shape of this layer's K and V buffers, `(B, G, S, D)`."""
        return batch_size, self.n_query_groups, slots, self.head_size

    def forward(self, x: Tensor, step: Step, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """Attention of the rows `x` `(N, C)`, whose keys and values are written first, `(N, C)`."""
        H, G, D = self.n_head, self.n_query_groups, self.head_size
        qk, v = self._qkv(x).split(((H + G) * D, G * D), dim=-1)
        if self._norm_q is not None and self._norm_k is not None and not self.norm_per_head:
            q, k = qk.split((H * D, G * D), dim=-1)
            qk = torch.cat((self._norm_q(q), self._norm_k(k)), dim=-1)
        qk = qk.view(-1, H + G, D)
        if self._norm_q is not None and self._norm_k is not None and self.norm_per_head:
            qk = torch.cat((self._norm_q(qk[:, :H]), self._norm_k(qk[:, H:])), dim=1)
        cos, sin = step.rope[self.rope_idx]
        qk = rotate(qk, cos, sin) if self.rope_whole else self.rotate_part(qk, cos, sin)

        q, k = qk.split((H, G), dim=1)
        step.write(k_cache, k)
        step.write(v_cache, v.view(-1, G, D))
        return self._proj(attend(q, k_cache, v_cache, step, self.window, self.scale, self.softcap))

    def rotate_part(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate the first n elements of every head of `x` `(N, heads, D)`."""
        n = self.config.rope_n_elem
        rotated = deinterleave(x[..., :n]) if self.config.rope_interleave else x[..., :n]
        return torch.cat((rotate(rotated, cos, sin), x[..., n:]), dim=-1)


class MultiheadLatentAttention(litgpt.model.MultiheadLatentAttention):
    """LitGPT's multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), cached as full keys and values.

    Heads of keys and values differ in size. The smaller is padded with zeros in the cache: with unequal sizes PyTorch
    does not use its fused kernel, and bits then depend on the number of rows.
    """

    window = None
    rope_idx = 0

    def __init__(self, config: Config, block_idx: int) -> None:
        super().__init__(config, block_idx)
        self.n_head = self.n_query_groups = config.n_head
        self.scale = self.mscale**2 / math.sqrt(config.attention_scores_scalar or config.qk_head_dim)
        self.softcap = config.attention_logit_softcapping
        self.q_a_norm = RMSNorm(config.q_lora_rank, eps=config.norm_eps)
        self.kv_a_norm = RMSNorm(config.kv_lora_rank, eps=config.norm_eps)

    def bind(self) -> None:
        """Nothing: the modules are called as they are."""

    def cache_shape(self, batch_size: int, slots: int) -> tuple[int, int, int, int]:
        """Shape of this layer's K and V buffers, `(B, H, S, D)` with D the larger of both head sizes."""
        return batch_size, self.n_head, slots, max(self.config.qk_head_dim, self.config.v_head_dim)

    def forward(self, x: Tensor, step: Step, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """Attention of the rows `x` `(N, C)`, whose keys and values are written first, `(N, C)`."""
        config, H = self.config, self.n_head
        N, D = x.size(0), k_cache.size(-1)
        cos, sin = step.rope[self.rope_idx]
        q = self.q_b_proj(self.q_a_norm(self.q_a_proj(x))).view(N, H, config.qk_head_dim)
        q_pass, q_rope = q.split((config.qk_nope_head_dim, config.qk_rope_head_dim), dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split((config.kv_lora_rank, config.qk_rope_head_dim), dim=-1)
        kv = self.kv_b_proj(self.kv_a_norm(latent)).view(N, H, config.qk_nope_head_dim + config.v_head_dim)
        k_pass, v = kv.split((config.qk_nope_head_dim, config.v_head_dim), dim=-1)

        qk_rope = torch.cat((q_rope, k_rope.unsqueeze(1)), dim=1)  # one rotated key serves all heads
        qk_rope = rotate(deinterleave(qk_rope) if config.rope_interleave else qk_rope, cos, sin)
        q = torch.cat((q_pass, qk_rope[:, :H]), dim=-1)
        k = torch.cat((k_pass, qk_rope[:, H:].expand(-1, H, -1)), dim=-1)

        q, k, v = (F.pad(x, (0, D - x.size(-1))) for x in (q, k, v))
        step.write(k_cache, k)
        step.write(v_cache, v)
        y = attend(q, k_cache, v_cache, step, self.window, self.scale, self.softcap)
        return self.proj(y.view(N, H, D)[..., : config.v_head_dim].reshape(N, H * config.v_head_dim))
