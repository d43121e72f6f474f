"""Speculative decoding in its shortest form, for any two functions from tokens to logits. Read this first.

The engine does the same for many texts with K/V caches. The tests check that its texts are these texts (greedy,
coupled) or have the same distribution (rejection).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from litspec.sampling import Sampler, concatenate

# Maps token ids (T,) to the logits after each of them, (T, V).
Model = Callable[[torch.Tensor], torch.Tensor]


def propose(draft: Model, text: list[int], k: int, sampler: Sampler) -> tuple[list[int], list]:
    """Draws k tokens from the draft, one after the other. Also returns the distribution of each token."""
    proposal: list[int] = []
    q = []
    for _ in range(k):
        logits = draft(torch.tensor(text + proposal))[-1:]
        inputs = sampler.inputs(logits.device, len(text + proposal)).after(torch.tensor(proposal, dtype=torch.int64))
        token, distribution = sampler.draw(logits, inputs)
        proposal.append(int(token))
        q.append(distribution)
    return proposal, q


def generate(
    target: Model,
    draft: Model,
    prompt: list[int],
    *,
    max_new_tokens: int,
    k: int,
    sampler: Sampler,
    stop_ids: frozenset[int] = frozenset(),
) -> list[int]:
    """The completion of a prompt, without the stop that ended it."""
    text, end = list(prompt), len(prompt) + max_new_tokens
    while len(text) < end:
        # Propose: one token less than the limit allows, since each round ends with a token of the target's own.
        m = min(k, end - len(text) - 1)
        sampler.start_round(len(text))
        proposal, q = propose(draft, text, m, sampler)
        # Verify: one pass of the target over the text and the whole proposal.
        logits = target(torch.tensor(text + proposal))[len(text) - 1 :]
        # Accept: the longest right prefix, and one token of the target's own.
        rows = concatenate(q) if m and q[0] is not None else None
        tokens, accepted, _ = sampler.verify(logits, len(text), torch.tensor(proposal, dtype=torch.int64), rows)
        # Commit: up to the first stop.
        for token in tokens[: accepted + 1].tolist():
            if token in stop_ids:
                return text[len(prompt) :]
            text.append(token)
            sampler.commit([token])
    return text[len(prompt) :]
