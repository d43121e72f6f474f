"""Losses between the draft's and the target's distributions, with the head's logits computed in chunks of rows.

Shapes: R rows of states, C channels, V ids. Throughout, p is the target's distribution and q the draft's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from litspec.training.types import LossName

# The weight of the KL divergence in the LK loss is exp(-LK_ETA * acceptance).
LK_ETA = 3.0
# Weight of the cross-entropy on the target's argmax token, which is all that greedy decoding depends on.
ARGMAX_WEIGHT = 0.2
# Number of the draft's logits (rows x V) in one chunk. Small chunks stay in a CPU's cache.
CHUNK_LOGITS = {"cpu": 1 << 19, "cuda": 1 << 26}

# Rows of states (R, C) to logits (R, V).
Head = Callable[[Tensor], Tensor]


def acceptance(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Probability that speculative sampling accepts a draft from q, `(R, V), (R, V) -> (R,)`: the sum of min(p, q)
    (Leviathan et al. 2023, arXiv 2211.17192)."""
    return torch.minimum(log_p, log_q).exp().sum(-1)


def distance(log_p: Tensor, log_q: Tensor, name: LossName) -> Tensor:
    """The loss of each row, `(R, V), (R, V) -> (R,)`.

    "kl" is the divergence KL(p || q). "lk" is `w * KL(p || q) + (1 - w) * (1 - a)` with the acceptance `a` and the
    weight `w = exp(-3 a)`, which has no gradient. Far from the target the divergence dominates, near it the acceptance
    itself (Samarin et al. 2026, "LK losses", arXiv 2602.23881).
    """
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1)
    if name == "kl":
        return divergence
    accepted = acceptance(log_p, log_q)
    weight = torch.exp(-LK_ETA * accepted.detach())
    return weight * divergence + (1 - weight) * (1 - accepted)


def rows_loss(target_logits: Tensor, logits: Tensor, weights: Tensor, temperature: float, name: LossName) -> Tensor:
    """Weighted sum over rows of the distance at a temperature and `ARGMAX_WEIGHT` times the cross-entropy on the
    target's likeliest token.

    Args:
        target_logits: `(R, V)`.
        logits: The draft's, `(R, V)`.
        weights: `(R,)`.
        temperature: Divides both logits. 0 is treated as 1, since greedy decoding has no distribution to compare.
        name: The distance.

    Returns:
        A scalar, float32.
    """
    temperature = temperature or 1.0
    log_p = F.log_softmax(target_logits.float() / temperature, dim=-1)
    log_q = F.log_softmax(logits.float() / temperature, dim=-1)
    best = F.nll_loss(log_q, log_p.argmax(-1), reduction="none")
    return ((distance(log_p, log_q, name) + ARGMAX_WEIGHT * best) * weights).sum()


class _ChunkedHead(torch.autograd.Function):
    """Computes loss and gradient chunk by chunk, so that only one chunk's logits exist at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        softcap: float | None,
        chunk: int,
        loss_of: Callable[[Tensor, slice], Tensor],
    ) -> Tensor:
        device = rows.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else rows.dtype
        wanted, with_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        with torch.autocast(device, enabled=False):
            kernel = weight.to(dtype)
            grad_rows = torch.empty_like(rows) if wanted else None
            grad_weight = torch.zeros_like(weight, dtype=torch.float32) if with_weight else None
            grad_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and with_weight else None
            total = torch.zeros((), device=rows.device)
            for begin in range(0, rows.size(0), chunk):
                part = slice(begin, begin + chunk)
                x = rows[part].to(dtype)
                logits = F.linear(x, kernel, None if bias is None else bias.to(dtype)).requires_grad_()
                with torch.enable_grad():
                    capped = logits if softcap is None else torch.tanh(logits / softcap) * softcap
                    loss = loss_of(capped, part)
                    (grad,) = torch.autograd.grad(loss, logits)
                total += loss.detach()
                if grad_rows is not None:
                    grad_rows[part] = grad @ kernel
                if grad_weight is not None:
                    grad_weight += grad.T @ x
                if grad_bias is not None:
                    grad_bias += grad.sum(0)
        ctx.save_for_backward(grad_rows, grad_weight, grad_bias)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        found = (None if saved is None else saved * grad for saved in ctx.saved_tensors)
        return (*found, None, None, None)


def head_loss(
    rows: Tensor,
    target_rows: Tensor,
    weights: Tensor,
    *,
    head: torch.nn.Linear,
    softcap: float | None,
    target_head: Head,
    vocab_size: int,
    temperature: float,
    name: LossName,
    chunk: int | None = None,
) -> Tensor:
    """`rows_loss` from the inputs of two heads, without holding the logits of all rows.

    Args:
        rows: What the draft's head reads, `(R, C)`.
        target_rows: What the target's head reads, `(R, C')`.
        weights: `(R,)`.
        head: The draft's head. It gets no gradient if its weight requires none.
        softcap: Soft cap of the draft's logits; None without one.
        target_head: Maps the target's rows to its logits.
        vocab_size: Number of ids that both have. Logits of other ids are left out.
        temperature: See `rows_loss`.
        name: See `rows_loss`.
        chunk: Rows per chunk. By default a chunk has about `CHUNK_LOGITS` logits.

    Returns:
        A scalar, float32.
    """
    chunk = chunk or max(1, CHUNK_LOGITS.get(rows.device.type, 1 << 24) // head.out_features)

    def loss_of(logits: Tensor, part: slice) -> Tensor:
        with torch.no_grad():
            target_logits = target_head(target_rows[part])[:, :vocab_size]
        return rows_loss(target_logits, logits[:, :vocab_size], weights[part], temperature, name)

    loss: Tensor = _ChunkedHead.apply(rows, head.weight, head.bias, softcap, chunk, loss_of)
    return loss
