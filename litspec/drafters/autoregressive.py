"""What drafters that run a model token by token have in common."""

from __future__ import annotations

from collections.abc import Callable

import torch

from litspec.drafters.base import Proposal
from litspec.model import GPT
from litspec.sampling import Sampler, concatenate


def step_bytes(model: GPT, n_layer: int | None = None) -> int:
    """Bytes of weights that one row reads on its way through the first `n_layer` blocks (None: all) and the head."""
    modules = [*model.transformer.h[:n_layer], model.transformer.ln_f, model.lm_head]
    return sum(p.numel() * p.element_size() for module in modules for p in module.parameters())


def draft_tokens(
    sampler: Sampler,
    logits: torch.Tensor,
    step: Callable[[torch.Tensor, int], torch.Tensor],
    input_pos: int,
    k: int,
) -> Proposal:
    """Draws k tokens, each from the logits that followed the one before; k - 1 steps, and nothing read to the host.

    Args:
        sampler: On the logits' device.
        logits: (1, V), those of the first token.
        step: `step(token, input_pos)` runs one token, (1,), and returns the logits that follow it, (1, V).
        input_pos: Where the first token stands.
        k: At least 1.

    Returns:
        The tokens, (k,), and the distributions they were drawn from, None where nothing was drawn.
    """
    drawn = []
    for position in range(input_pos, input_pos + k):
        if drawn:
            logits = step(drawn[-1][0], position - 1)
        drawn.append(sampler.draw(logits, position))
    rows = [q for _, q in drawn if q is not None]
    return Proposal(torch.cat([token for token, _ in drawn]), concatenate(rows) if rows else None)
