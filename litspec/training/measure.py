"""Tokens per round, computed from distributions along texts that the target wrote, without drafting and without noise.

For a given text, each step of speculative sampling has a known probability. Block verification (Sun et al. 2024, arXiv
2403.10444) keeps the first i proposals of x with probability w_i = min(1, w_(i-1) p(x_i) / q(x_i)). They are proposed
with probability q(x_1) ... q(x_i), and the text continues with them with probability p(x_1) ... p(x_i). So, given the
text, its next i tokens were accepted proposals with probability w_i times the product of all q / p, which is the
smallest of the products of the first j ratios, j = 0, ..., i. The expected number of rounds of a text follows exactly
from these ratios. Its mean over texts of the target is that of decoding itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from litspec.sampling import Sampling, processed

# Keeps products over a block finite.
LARGEST_RATIO = 1e12


@dataclass(frozen=True)
class Rounds:
    """Expected counts of a number of texts.

    Attributes:
        tokens: Tokens committed in rounds: all except the first of each text.
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
        """Block efficiency; 0 if there were no rounds."""
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of the proposals at position 1, 2, ..., k of a block that were accepted, together with all before."""
        return [a / p if p else 0.0 for a, p in zip(self.accepted, self.proposed)]


def ratios(p: Tensor, q: Tensor) -> Tensor:
    """q / p of committed tokens, elementwise; at most `LARGEST_RATIO`."""
    return (q / p.clamp_min(1e-30)).clamp(max=LARGEST_RATIO)


def probability(logits: Tensor, tokens: Tensor, sampling: Sampling) -> Tensor:
    """Processed probability of one token per row, `(R, V), (R,) -> (R,)` float32. Greedy: 1 for the argmax, else 0."""
    if sampling.greedy:
        return (logits.argmax(-1) == tokens).float()
    found: Tensor = processed(logits, sampling).of(tokens)
    return found


def expected_rounds(ratios_of_texts: Sequence[Tensor], k: int) -> Rounds:
    """Expected rounds of speculative decoding along given texts.

    Args:
        ratios_of_texts: For each text `(n, k)` or `(n, 1)`: row i is about a round after the text's token i (from 0),
            column j has q / p of token i + j + 1, the place of its proposal j + 1 (see `ratios`). One column is enough
            for drafters whose proposals depend on the text alone: row i is then about token i + 1.
        k: Proposals per round; fewer if fewer than k + 1 tokens are left.

    Returns:
        The counts. Text of n + 1 tokens has n rows: its first token comes with the prefill.
    """
    tokens, rounds = 0, 0.0
    proposed, taken = torch.zeros(k, dtype=torch.float64), torch.zeros(k, dtype=torch.float64)
    for of_text in ratios_of_texts:
        n = of_text.size(0)
        tokens += n
        table = _by_round(of_text.double().cpu(), k)
        # prefix[i, j]: the first j proposals of a round after token i are accepted; it proposes min(k, n - 1 - i).
        kept = table.cumprod(1).clamp(max=1.0).cummin(1).values
        prefix = torch.cat((torch.ones(n, 1, dtype=torch.float64), kept), dim=1)
        limit = (n - 1 - torch.arange(n)).clamp(max=k)
        made = torch.arange(k) < limit.unsqueeze(1)
        # end[i, j]: exactly j accepted, so that the next round begins after token i + j + 1.
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
        proposed += (at.unsqueeze(1) * made).sum(0)
        taken += (at.unsqueeze(1) * prefix[:, 1:] * made).sum(0)
    return Rounds(tokens, rounds, tuple(proposed.tolist()), tuple(taken.tolist()))


def _by_round(of_text: Tensor, k: int) -> Tensor:
    """`(n, k)`: the ratio of proposal j of a round after token i, from either form."""
    if of_text.size(1) == k and k > 1:
        return of_text
    padded = torch.cat((of_text[:, 0], torch.zeros(k, dtype=of_text.dtype)))
    return padded.unfold(0, k, 1)[: of_text.size(0)]
