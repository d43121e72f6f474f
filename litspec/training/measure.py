"""Tokens a round, computed from distributions along texts that the target wrote: no drafting, and no luck in it.

Given the text, speculative sampling is a chain of known chances. A committed token x was the draft's accepted proposal
with probability min(1, q(x) / p(x)), since a proposal is x and accepted with probability min(p(x), q(x)), and the token
is x with probability p(x) (Leviathan et al. 2023, arXiv 2211.17192). So the expected number of rounds of a text follows
from these ratios, exactly; its mean over texts of the target is that of decoding itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from litspec.sampling import Sampling, processed


@dataclass(frozen=True)
class Rounds:
    """Expected counts of a number of texts.

    Attributes:
        tokens: Committed in rounds, all but each text's first.
        rounds: Expected number of rounds.
        proposed: Expected rounds that propose a token at position 1, 2, ..., k of their block.
        accepted: Expected rounds that accept it.
    """

    tokens: int
    rounds: float
    proposed: tuple[float, ...]
    accepted: tuple[float, ...]

    @property
    def tokens_per_round(self) -> float:
        """Block efficiency; 0 where there were no rounds."""
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of the proposals at position 1, 2, ..., k of a block that were accepted; all before must have been."""
        return [a / p if p else 0.0 for a, p in zip(self.accepted, self.proposed)]


def ratios(p: Tensor, q: Tensor) -> Tensor:
    """Chance that a committed token was accepted: min(1, q / p) of its probabilities, elementwise."""
    return (q / p.clamp_min(1e-30)).clamp(max=1.0)


def probability(logits: Tensor, tokens: Tensor, sampling: Sampling) -> Tensor:
    """Processed probability of one token a row: `(R, V), (R,) -> (R,)` float32; greedy: 1 for the argmax, else 0."""
    if sampling.greedy:
        return (logits.argmax(-1) == tokens).float()
    found: Tensor = processed(logits, sampling).of(tokens)
    return found


def expected_rounds(accepted: Sequence[Tensor], k: int) -> Rounds:
    """Expected rounds of speculative decoding along given texts.

    Args:
        accepted: For each text `(n, k)` or `(n, 1)`: row i is about a round behind the text's token i (from 0), column
            j the chance that its proposal j + 1, which stands for token i + j + 1, is accepted where those before it
            were. One column serves drafters whose proposals depend on the text alone: row i is then about token i + 1.
        k: Proposals a round; fewer where fewer than k + 1 tokens are left.

    Returns:
        The counts. Text of n + 1 tokens has n rows: its first token comes with the prefill.
    """
    tokens, rounds = 0, 0.0
    proposed, taken = torch.zeros(k, dtype=torch.float64), torch.zeros(k, dtype=torch.float64)
    for chances in accepted:
        n = chances.size(0)
        tokens += n
        table = _by_round(chances.double().cpu(), k)
        # prefix[i, j]: the first j proposals of a round behind token i are accepted; it proposes min(k, n - 1 - i).
        prefix = torch.cat((torch.ones(n, 1, dtype=torch.float64), table.cumprod(1)), dim=1)
        limit = (n - 1 - torch.arange(n)).clamp(max=k)
        made = torch.arange(k) < limit.unsqueeze(1)
        # end[i, j]: exactly j accepted, so that the next round begins behind token i + j + 1.
        more = torch.cat((prefix[:, 1:] * made, torch.zeros(n, 1, dtype=torch.float64)), dim=1)
        end = torch.where(torch.arange(k + 1) <= limit.unsqueeze(1), prefix - more, 0.0)
        visits = [0.0] * (n + k + 2)
        visits[0] = 1.0
        rows = end.tolist()
        for i in range(n):
            for j in range(min(k, n - 1 - i) + 1):
                visits[i + j + 1] += visits[i] * rows[i][j]
        at = torch.tensor(visits[:n], dtype=torch.float64)
        rounds += float(at.sum())
        proposed += (at.unsqueeze(1) * prefix[:, :-1] * made).sum(0)
        taken += (at.unsqueeze(1) * prefix[:, 1:] * made).sum(0)
    return Rounds(tokens, rounds, tuple(proposed.tolist()), tuple(taken.tolist()))


def _by_round(chances: Tensor, k: int) -> Tensor:
    """`(n, k)`: the chance of proposal j of a round behind token i, from either form."""
    if chances.size(1) == k and k > 1:
        return chances
    padded = torch.cat((chances[:, 0], torch.zeros(k, dtype=chances.dtype)))
    return padded.unfold(0, k, 1)[: chances.size(0)]
