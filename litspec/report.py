"""What a text cost and where its tokens came from: statistics."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from litspec.decoding import Block


@dataclass
class Stats:
    """Counts and times of one text.

    Attributes:
        new_tokens: Tokens of the completion.
        rounds: Rounds after the prefill.
        proposed: Tokens proposed, up to the end of the text.
        accepted: How many of them the target took.
        acceptance_rate: accepted / proposed, 0.0 where none was proposed.
        tokens_per_round: Block efficiency: tokens that came from rounds (all but the prefill's), per round.
        prefill_seconds: From the beginning to the first token.
        decode_seconds: From the first token to the last.
        tokens_per_second: Tokens after the first, per second of decoding.
        draft_seconds: Of decoding, spent proposing (host time).
        verify_seconds: Of decoding, spent verifying (host time).
        rounds_without_proposal: Share of rounds in which nothing was proposed.
        accepted_by_position: For each position in a block, how many proposals there were accepted ...
        proposed_by_position: ... of how many.
        tokens_per_round_histogram: Rounds that brought 1, 2, 3, ... tokens.
    """

    new_tokens: int = 0
    rounds: int = 0
    proposed: int = 0
    accepted: int = 0
    acceptance_rate: float = 0.0
    tokens_per_round: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    tokens_per_second: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    rounds_without_proposal: float = 0.0
    accepted_by_position: list[int] = field(default_factory=list)
    proposed_by_position: list[int] = field(default_factory=list)
    tokens_per_round_histogram: list[int] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def summary(self) -> str:
        """One line for a terminal."""
        return (
            f"{self.new_tokens} tokens: prefill {self.prefill_seconds:.2f} s, decoding {self.decode_seconds:.2f} s, "
            f"{self.tokens_per_second:.1f} tokens/s, acceptance rate {self.acceptance_rate:.2f} "
            f"({self.accepted}/{self.proposed}), {self.tokens_per_round:.2f} tokens per round"
        )


def make_stats(blocks: list[Block], *, prefill_seconds: float, decode_seconds: float, **seconds: float) -> Stats:
    """Sums up the blocks of one text.

    Args:
        blocks: As `decoding.decode` gave them, the prefill's first.
        prefill_seconds: See `Stats`.
        decode_seconds: See `Stats`.
        seconds: `draft_seconds` and `verify_seconds`.
    """
    rounds = blocks[1:]
    stats = Stats(prefill_seconds=prefill_seconds, decode_seconds=decode_seconds, **seconds)
    stats.new_tokens = sum(len(block.tokens) for block in blocks)
    stats.rounds = len(rounds)
    stats.proposed = sum(block.proposed for block in rounds)
    stats.accepted = sum(block.accepted for block in rounds)
    if stats.proposed:
        stats.acceptance_rate = stats.accepted / stats.proposed
    if rounds:
        stats.tokens_per_round = max(stats.new_tokens - 1, 0) / len(rounds)
        stats.rounds_without_proposal = sum(block.proposed == 0 for block in rounds) / len(rounds)
        widest = max(block.proposed for block in rounds)
        stats.proposed_by_position = [sum(block.proposed > i for block in rounds) for i in range(widest)]
        stats.accepted_by_position = [sum(block.accepted > i for block in rounds) for i in range(widest)]
        brought = [block.accepted + 1 for block in rounds]
        stats.tokens_per_round_histogram = [brought.count(n) for n in range(1, max(brought) + 1)]
    if decode_seconds > 0:
        stats.tokens_per_second = max(stats.new_tokens - 1, 0) / decode_seconds
    return stats
