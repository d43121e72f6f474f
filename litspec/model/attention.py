"""Attention of a block of rows over cached keys and values. Notation: see `litspec.model.kv_cache`.

A row's result must not depend, to the last bit, on where the row stands in the block, on what the other rows hold, or
on how many masked slots are read behind it. That decides most of what looks unusual here.
"""

from __future__ import annotations

import math

import litgpt.model
import torch
import torch.nn.functional as F
from litgpt.config import Config
from torch import Tensor, nn

from litspec.model.kv_cache import Step

# Up to this many rows the query heads of a group are folded into rows; longer (prefill) chunks loop over them instead,
# since the mask would have to be repeated for each.
MAX_FOLDED_ROWS = 64
# Keys whose values are added up in one product where attention is done by hand.
KEY_BLOCK = 64


class RMSNorm(litgpt.model.RMSNorm):
    """LitGPT's parameters, PyTorch's operator."""

    def forward(self, x: Tensor) -> Tensor:
        weight = 1 + self.weight if self.add_unit_offset else self.weight
        return F.rms_norm(x, weight.shape, weight, self.eps)


def build_norm(config: Config, size: int) -> nn.Module:
    """The normalisation that the config names, over `size` elements."""
    if config.norm_class_name == "RMSNorm":
        return RMSNorm(size, eps=config.norm_eps, add_unit_offset="Gemma" in config.name)
    return config.norm_class(size, eps=config.norm_eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of `x` `(B, W, heads, n)` by `cos`, `sin` `(B, W, 1, n)`, the first half of `sin` negated."""
    return torch.addcmul(x * cos, x.roll(x.size(-1) // 2, -1), sin)


def deinterleave(x: Tensor) -> Tensor:
    """`(x0, x1, x2, x3, ...)` to `(x0, x2, ..., x1, x3, ...)` in the last dimension."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def attend(
    q: Tensor, k: Tensor, v: Tensor, step: Step, window: int | None, scale: float, softcap: float | None = None
) -> Tensor:
    """Attention of `q` `(B, W, H, D)` over `k`, `v` `(B, G, L, D)`, returned as `(B, W, H * D)`.

    Keys and values are never expanded to H heads, and the operator is never asked to (`enable_gqa` under a mask may
    fall back to a slow kernel): the R query heads of a group become rows of one head.
    """
    B, W, H, D = q.shape
    G = k.size(1)
    R = H // G
    q = q.view(B, W, G, R, D).permute(0, 2, 3, 1, 4)  # (B, G, R, W, D)
    if softcap is not None:
        y = softcapped_attention(q, k, v, step.masks[window], scale, softcap)
    elif W <= MAX_FOLDED_ROWS:
        mask = step.folded_mask(window, R)
        y = F.scaled_dot_product_attention(q.reshape(B, G, R * W, D), k, v, attn_mask=mask, scale=scale)
        y = y.view(B, G, R, W, D)
    else:
        mask = step.masks[window]
        heads = [F.scaled_dot_product_attention(q[:, :, r], k, v, attn_mask=mask, scale=scale) for r in range(R)]
        y = torch.stack(heads, dim=2)
    return y.permute(0, 3, 1, 2, 4).reshape(B, W, H * D)


def softcapped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float) -> Tensor:
    """Attention whose scores are squeezed into (-softcap, softcap) before the mask (Gemma 2, arXiv 2408.00118).

    No fused kernel has this, so the products are done by hand. The product of probabilities and values is added up over
    fixed blocks of keys in order: one product over all L would sum in an order that depends on L.

    Args:
        q: `(B, G, R, W, D)`; k, v: `(B, G, L, D)`; mask: `(B, 1, W, L)`.

    Returns:
        `(B, G, R, W, D)`.
    """
    B, G, R, W, D = q.shape
    L = k.size(2)
    q, k, v = q.reshape(B * G, R * W, D), k.reshape(B * G, L, D), v.reshape(B * G, L, D)
    scores = torch.tanh(torch.bmm(q, k.mT) * (scale / softcap)) * softcap
    scores = scores.view(B, G, R, W, L) + mask.unsqueeze(2)
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

    def __init__(self, config: Config, block_idx: int) -> None:
        super().__init__(config, block_idx)
        self.n_head, self.n_query_groups, self.head_size = config.n_head, config.n_query_groups, config.head_size
        self.window = config.sliding_window_size if self.apply_sliding_window_attention else None
        self.rope_idx = config.rope_indices[block_idx] if config.rope_indices is not None else 0
        self.scale = self.mscale**2 / math.sqrt(config.attention_scores_scalar or config.head_size)
        if config.norm_qk:
            self.norm_q = build_norm(config, self.norm_q.weight.numel())
            self.norm_k = build_norm(config, self.norm_k.weight.numel())

    def cache_shape(self, batch_size: int, slots: int) -> tuple[int, int, int, int]:
        """Shape of this layer's K and V buffers, `(B, G, S, D)`."""
        return batch_size, self.n_query_groups, slots, self.head_size

    def forward(self, x: Tensor, step: Step, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """Attention of the rows `x` `(B, W, C)`, whose keys and values are written first, `(B, W, C)`."""
        B, W, _ = x.shape
        H, G = self.n_head, self.n_query_groups
        qk, v = self.qkv(x).split(((H + G) * self.head_size, G * self.head_size), dim=-1)
        if self.norm_q is not None and self.config.norm_qk_type == "olmo2":
            q, k = qk.split((H * self.head_size, G * self.head_size), dim=-1)
            qk = torch.cat((self.norm_q(q), self.norm_k(k)), dim=-1)
        qk = qk.view(B, W, H + G, self.head_size)
        if self.norm_q is not None and self.config.norm_qk_type == "default":
            qk = torch.cat((self.norm_q(qk[:, :, :H]), self.norm_k(qk[:, :, H:])), dim=2)
        qk = self.rope(qk, *step.rope[self.rope_idx])

        step.write(k_cache, qk[:, :, H:].transpose(1, 2))
        step.write(v_cache, v.view(B, W, G, self.head_size).transpose(1, 2))
        k, v = k_cache[:, :, : step.kv_length], v_cache[:, :, : step.kv_length]
        softcap = self.config.attention_logit_softcapping
        return self.proj(attend(qk[:, :, :H], k, v, step, self.window, self.scale, softcap))

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate the first n elements of every head of `x` `(B, W, heads, D)`."""
        n = self.config.rope_n_elem
        rotated = deinterleave(x[..., :n]) if self.config.rope_interleave else x[..., :n]
        rotated = rotate(rotated, cos, sin)
        return rotated if n == self.head_size else torch.cat((rotated, x[..., n:]), dim=-1)


class MultiheadLatentAttention(litgpt.model.MultiheadLatentAttention):
    """LitGPT's multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), cached as full keys and values.

    Heads of keys and values differ in size; the smaller is padded with zeros in the cache, since with unequal sizes the
    operator leaves its fused kernel, and rows lose their bits.
    """

    window = None
    rope_idx = 0

    def __init__(self, config: Config, block_idx: int) -> None:
        super().__init__(config, block_idx)
        self.n_head = self.n_query_groups = config.n_head
        self.scale = self.mscale**2 / math.sqrt(config.attention_scores_scalar or config.qk_head_dim)
        self.q_a_norm = RMSNorm(config.q_lora_rank, eps=config.norm_eps)
        self.kv_a_norm = RMSNorm(config.kv_lora_rank, eps=config.norm_eps)

    def cache_shape(self, batch_size: int, slots: int) -> tuple[int, int, int, int]:
        """Shape of this layer's K and V buffers, `(B, H, S, D)` with D the larger of both head sizes."""
        return batch_size, self.n_head, slots, max(self.config.qk_head_dim, self.config.v_head_dim)

    def forward(self, x: Tensor, step: Step, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """Attention of the rows `x` `(B, W, C)`, whose keys and values are written first, `(B, W, C)`."""
        config, H = self.config, self.n_head
        B, W, _ = x.shape
        cos, sin = step.rope[self.rope_idx]
        q = self.q_b_proj(self.q_a_norm(self.q_a_proj(x))).view(B, W, H, config.qk_head_dim)
        q_pass, q_rope = q.split((config.qk_nope_head_dim, config.qk_rope_head_dim), dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split((config.kv_lora_rank, config.qk_rope_head_dim), dim=-1)
        kv = self.kv_b_proj(self.kv_a_norm(latent)).view(B, W, H, config.qk_nope_head_dim + config.v_head_dim)
        k_pass, v = kv.split((config.qk_nope_head_dim, config.v_head_dim), dim=-1)

        qk_rope = torch.cat((q_rope, k_rope.unsqueeze(2)), dim=2)  # one rotated key serves all heads
        qk_rope = rotate(deinterleave(qk_rope) if config.rope_interleave else qk_rope, cos, sin)
        q = torch.cat((q_pass, qk_rope[:, :, :H]), dim=-1)
        k = torch.cat((k_pass, qk_rope[:, :, H:].expand(-1, -1, H, -1)), dim=-1)

        D = k_cache.size(-1)
        step.write(k_cache[..., : config.qk_head_dim], k.transpose(1, 2))
        step.write(v_cache[..., : config.v_head_dim], v.transpose(1, 2))
        k, v = k_cache[:, :, : step.kv_length], v_cache[:, :, : step.kv_length]
        softcap = config.attention_logit_softcapping
        y = attend(F.pad(q, (0, D - config.qk_head_dim)), k, v, step, self.window, self.scale, softcap)
        y = y.view(B, W, H, D)[..., : config.v_head_dim]
        return self.proj(y.reshape(B, W, H * config.v_head_dim))
