"""The decode loop: prefill, rounds, commit.

It knows tokens and positions; it knows no model and no text. What a round proposes, verifies and accepts is behind two
callables, so that length and stops are decided in one place, for every model, drafter and sampler, and can be tested
with scripted rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from litspec.stopping import Stop
from litspec.types import FinishReason


class Round(NamedTuple):
    """What a round brought, for a `step` that proposes fewer tokens than it may."""

    tokens: Any  # (n,), the accepted proposals, then the target's own token; a list or a tensor
    proposed: int  # proposals that the target looked at, n - 1 <= proposed <= k


@dataclass(frozen=True)
class Block:
    """Tokens that one round committed for good.

    Attributes:
        tokens: Token ids, in order. Tokens that may yet turn out to belong to a stop are held back and come with a
            later block, so a block may be empty.
        drafted: For each of `tokens`, whether a drafter proposed it (else it is the target's own).
        round: 0 for the prefill, then 1, 2, ...
        proposed: Proposals of this round, counted up to the end of the text.
        accepted: How many of those the target took.
        finish_reason: None while the text goes on; "stop" or "length" in the last block.
    """

    tokens: list[int]
    drafted: list[bool]
    round: int
    proposed: int
    accepted: int
    finish_reason: FinishReason | None


def decode(
    prefill: Callable[[], Any],
    step: Callable[[Any, int, int], Any],
    *,
    prompt_size: int,
    max_returned_tokens: int,
    speculative_k: int | Callable[[], int],
    stop: Stop,
) -> Iterator[Block]:
    """Generates one text, a block of tokens at a time.

    Args:
        prefill: Runs the prompt and returns the target's first token, shape (1,).
        step: One round. `step(token, input_pos, k)` is given the last committed token, shape (1,), its position, and
            how many tokens may be proposed; it returns n tokens, 1 <= n <= k + 1: accepted proposals, then one token of
            the target's own. It returns them as a list or a tensor (read to the host once, here), or as a `Round` where
            it proposed fewer than k.
        prompt_size: Tokens of the prompt.
        max_returned_tokens: Prompt and completion together never grow beyond this.
        speculative_k: Proposals a round, or a function that is asked for them before each round.
        stop: Tells where the text ends; sees every committed token once, in order.

    Yields:
        One block per round, the prefill first. The text ends with the first stop in the order of its tokens, wherever
        in a block it lies; the stop itself and what was verified behind it are not part of the text. A stop beats the
        length limit where one round holds both.
    """
    budget = max_returned_tokens - prompt_size
    held: list[tuple[int, bool]] = []  # committed, but perhaps the beginning of a stop
    seen = released = number = proposed = 0
    result = prefill()
    while True:
        tokens = result[: budget - seen]
        block = tokens.tolist() if hasattr(tokens, "tolist") else list(tokens)
        accepted = len(block) - 1
        seen += len(block)
        held += [(token, i < accepted) for i, token in enumerate(block)]

        verdict = stop.push(block)
        finish: FinishReason | None = None
        safe = verdict.safe
        if verdict.end is not None:
            finish = "stop"
            used = verdict.end - (seen - len(block))
            proposed, accepted = min(proposed, used), min(accepted, used)
        elif seen >= budget:
            finish, safe = "length", seen
        out, held = held[: safe - released], held[safe - released :]
        released = safe
        yield Block([t for t, _ in out], [d for _, d in out], number, proposed, accepted, finish)
        if finish is not None:
            return

        # The round ends with a token of the target's own, so more proposals than this could never be used.
        k = min(speculative_k() if callable(speculative_k) else speculative_k, budget - seen - 1)
        number += 1
        result = step(tokens[-1:], prompt_size + seen - 1, k)
        proposed = k
        if isinstance(result, Round):
            result, proposed = result
