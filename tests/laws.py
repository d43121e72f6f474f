"""Whether draws follow a law."""

from __future__ import annotations

from collections.abc import Callable

import torch
from scipy import stats
from torch import Tensor

# The draws are seeded, so a check passes always or never. A correct law fails with probability 1e-4. With the
# numbers of draws used here, a law with a total variation distance of 2 % fails clearly.
ALPHA = 1e-4


def chi_square(draws: Tensor, law: Tensor) -> float:
    """The p-value of Pearson's test.

    Args:
        draws: Indices into the cells, or a column for each dimension of `law`.
        law: The probability of each cell; draws of several tokens have a dimension for each.
    """
    if draws.dim() == 2:
        columns = draws.unbind(1)
        draws = columns[0]
        for size, column in zip(law.shape[1:], columns[1:]):
            draws = draws * size + column
    law = law.flatten().double()
    counts = torch.bincount(draws, minlength=law.numel())
    assert counts.numel() == law.numel(), "a token that is none was drawn"
    assert counts[law == 0].sum() == 0, "a token of probability 0 was drawn"
    expected = law / law.sum() * counts.sum()
    # Pearson's statistic needs expected counts that are not too small, so rare cells are merged.
    rare = expected < 5
    counts = torch.cat((counts[~rare], counts[rare].sum(0, keepdim=True)))
    expected = torch.cat((expected[~rare], expected[rare].sum(0, keepdim=True)))
    if expected[-1] < 5:
        counts[:-1][expected[:-1].argmax()] += counts[-1]
        expected[:-1][expected[:-1].argmax()] += expected[-1]
        counts, expected = counts[:-1], expected[:-1]
    return float(stats.chisquare(counts.numpy(), expected.numpy()).pvalue) if expected.numel() > 1 else 1.0


def follows(draws: Tensor, law: Tensor) -> bool:
    """Whether the draws pass, jointly and for each token separately, which detects small biases best."""
    p_values = [chi_square(draws, law)]
    if draws.dim() == 2:
        others = range(law.dim())
        p_values += [chi_square(draws[:, i], law.sum([j for j in others if j != i])) for i in others]
    return min(p_values) > ALPHA


def repeat(one: Callable[[Tensor], Tensor], times: int) -> Tensor:
    """Runs `one` many times in a batch, each with its own random numbers; a host read inside raises an error.

    Args:
        one: Takes a zero, which it must add to every tensor that takes part in something random.
    """
    return torch.vmap(one, randomness="different")(torch.zeros(times))


def total_variation(p: Tensor, q: Tensor) -> float:
    return (p - q).abs().sum().item() / 2
