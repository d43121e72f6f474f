"""One text: its length limit, its stops, and its committed tokens.

It handles tokens and positions, not models or strings. The engine uses one `Text` per slot, the drop-in module one per
call, so the length limit and stops are handled in one place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from litspec.logprobs import TokenLogprobs
from litspec.stopping import Stop
from litspec.types import FinishReason


@dataclass(frozen=True)
class Block:
    """Tokens that one round committed.

    Attributes:
        tokens: Token ids, in order. Tokens that may be the beginning of a stop are held back and come with a later
            block, so a block may be empty.
        drafted: For each of `tokens`, whether a drafter proposed it (else it is the target's own).
        round: 0 for the prefill, then 1, 2, ...
        proposed: Proposals of this round, counted up to the end of the text.
        accepted: How many of those the target accepted.
        finish_reason: "stop" or "length" in the last block, else None.
        logprobs: Log-probabilities of each of `tokens` if requested, else empty.
    """

    tokens: list[int]
    drafted: list[bool]
    round: int
    proposed: int
    accepted: int
    finish_reason: FinishReason | None
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class Text:
    """The state of one text.

    The first stop ends the text, at any position of a block. The stop and the tokens after it are not part of the text.
    If a round reaches both a stop and the length limit, the stop wins.

    Attributes:
        last: The last committed token.
        finished: Whether the text has ended.

    Args:
        prompt_size: Tokens of the prompt.
        max_returned_tokens: Most tokens of prompt and completion together.
        stop: Detects where the text ends; receives every committed token once, in order.
    """

    def __init__(self, prompt_size: int, max_returned_tokens: int, stop: Stop) -> None:
        self._prompt_size = prompt_size
        self._budget = max_returned_tokens - prompt_size
        self._stop = stop
        # Committed, but may be the beginning of a stop.
        self._held: list[tuple[int, bool]] = []
        self._held_logprobs: list[TokenLogprobs] = []
        self._seen = self._released = self._round = 0
        self.last = -1
        self.finished = False

    @property
    def started(self) -> bool:
        """Whether anything has been committed."""
        return self._round > 0

    @property
    def input_pos(self) -> int:
        """Position of the last committed token."""
        return self._prompt_size + self._seen - 1

    @property
    def most_proposals(self) -> int:
        """The most proposals that the next round can use; the round also adds a token of the target's own."""
        return self._budget - self._seen - 1

    def commit(self, tokens: list[int], proposed: int = 0, logprobs: Sequence[TokenLogprobs] = ()) -> Block:
        """Commits the tokens of a round.

        Args:
            tokens: The accepted proposals, then one token of the target's own. Tokens beyond the limit are dropped.
            proposed: Proposals that the target verified, at least `len(tokens) - 1`.
            logprobs: Log-probabilities of each token; empty if not requested.
        """
        tokens = tokens[: self._budget - self._seen]
        accepted = len(tokens) - 1
        before = self._seen
        self._seen += len(tokens)
        self._held += [(token, i < accepted) for i, token in enumerate(tokens)]
        self._held_logprobs += logprobs[: len(tokens)]
        self.last = tokens[-1]

        verdict = self._stop.push(tokens)
        finish: FinishReason | None = None
        safe = verdict.safe
        if verdict.end is not None:
            finish = "stop"
            used = verdict.end - before
            proposed, accepted = min(proposed, used), min(accepted, used)
        elif self._seen >= self._budget:
            finish, safe = "length", self._seen
        count = safe - self._released
        out, self._held = self._held[:count], self._held[count:]
        measured, self._held_logprobs = self._held_logprobs[:count], self._held_logprobs[count:]
        self._released = safe
        self.finished = finish is not None
        block = Block([t for t, _ in out], [d for _, d in out], self._round, proposed, accepted, finish, measured)
        self._round += 1
        return block
