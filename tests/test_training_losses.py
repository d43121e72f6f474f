"""Losses and simulated acceptance against closed forms and full enumeration."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from scipy.stats import entropy
from torch import Tensor

from litspec.sampling import Sampling
from litspec.training.losses import acceptance, distance, head_loss, rows_loss
from litspec.training.measure import expected_rounds, probability, ratios


def some_logits(rows: int, vocab: int, seed: int) -> Tensor:
    return 2 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def test_kl_is_the_relative_entropy_of_scipy() -> None:
    p, q = some_logits(4, 9, 0).log_softmax(-1), some_logits(4, 9, 1).log_softmax(-1)
    wanted = entropy(p.exp().numpy(), q.exp().numpy(), axis=1)
    torch.testing.assert_close(distance(p, q, "kl"), torch.tensor(wanted), atol=1e-6, rtol=1e-5)


def test_acceptance_of_two_coins_worked_by_hand() -> None:
    p, q = torch.tensor([[0.9, 0.1]]).log(), torch.tensor([[0.6, 0.4]]).log()
    torch.testing.assert_close(acceptance(p, q), torch.tensor([0.7]))
    kl = 0.9 * math.log(0.9 / 0.6) + 0.1 * math.log(0.1 / 0.4)
    weight = math.exp(-3 * 0.7)
    torch.testing.assert_close(distance(p, q, "lk"), torch.tensor([weight * kl + (1 - weight) * 0.3]))


def test_the_gradient_of_lk_takes_its_weight_for_a_constant() -> None:
    # For a coin with p > q at its first side: KL's derivative by the logit is q - p, that of 1 - a is -q (1 - q).
    p, q = 0.9, 0.6
    logit = torch.tensor(math.log(q / (1 - q)), requires_grad=True)
    log_q = F.logsigmoid(torch.stack((logit, -logit))).unsqueeze(0)
    distance(torch.tensor([[p, 1 - p]]).log(), log_q, "lk").sum().backward()
    weight = math.exp(-3 * 0.7)
    assert logit.grad is not None
    assert float(logit.grad) == pytest.approx(weight * (q - p) - (1 - weight) * q * (1 - q), abs=1e-6)


@pytest.mark.parametrize("name", ["kl", "lk"])
def test_a_draft_that_equals_its_target_has_no_loss_and_no_gradient(name: str) -> None:
    logits = some_logits(3, 7, 0).requires_grad_()
    loss = distance(logits.detach().log_softmax(-1), logits.log_softmax(-1), name).sum()  # type: ignore[arg-type]
    loss.backward()
    assert abs(float(loss.detach())) < 1e-5
    assert logits.grad is not None and logits.grad.abs().max() < 1e-6


@pytest.mark.parametrize("chunk", [1, 3, 64])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_head_in_chunks_has_the_loss_and_gradients_of_the_whole(chunk: int, softcap: float | None) -> None:
    torch.manual_seed(0)
    R, C, V = 10, 6, 13
    rows, target_rows = torch.randn(R, C, requires_grad=True), torch.randn(R, C)
    head, target_head = torch.nn.Linear(C, V), torch.nn.Linear(C, V + 3)
    weights = torch.rand(R)
    settings = dict(vocab_size=12, temperature=0.8, name="lk")
    loss = head_loss(
        rows, target_rows, weights, head=head, softcap=softcap, target_head=target_head, chunk=chunk, **settings
    )
    loss.backward()
    found = [rows.grad, head.weight.grad, head.bias.grad]
    rows.grad = head.weight.grad = head.bias.grad = None
    logits = head(rows) if softcap is None else softcap * torch.tanh(head(rows) / softcap)
    whole = rows_loss(target_head(target_rows)[:, :12].detach(), logits[:, :12], weights, 0.8, "lk")
    whole.backward()
    torch.testing.assert_close(loss, whole)
    for one, other in zip(found, [rows.grad, head.weight.grad, head.bias.grad]):
        torch.testing.assert_close(one, other)


def test_a_frozen_head_gets_no_gradient() -> None:
    head = torch.nn.Linear(4, 5).requires_grad_(False)
    rows = torch.randn(3, 4, requires_grad=True)
    head_loss(
        rows,
        torch.randn(3, 4),
        torch.ones(3),
        head=head,
        softcap=None,
        target_head=head,
        vocab_size=5,
        temperature=1.0,
        name="kl",
    ).backward()
    assert head.weight.grad is None and rows.grad is not None and rows.grad.abs().sum() > 0


# --- tokens per round ---


def table(seed: int, depth: int, vocab: int) -> dict[tuple[int, ...], Tensor]:
    """A distribution over the next token for every text shorter than `depth`."""
    generator = torch.Generator().manual_seed(seed)
    return {
        text: (1.5 * torch.randn(vocab, generator=generator, dtype=torch.float64)).softmax(0)
        for size in range(depth)
        for text in itertools.product(range(vocab), repeat=size)
    }


def enumerated(p: dict[tuple[int, ...], Tensor], q: dict[tuple[int, ...], Tensor], depth: int, k: int) -> list[float]:
    """Rounds, and acceptances by position, of block verification (Algorithm 2 of Sun et al. 2024, arXiv 2403.10444).

    Every proposal and every outcome counts by its chance.
    """
    vocab = len(p[()])
    counts = [0.0] * (k + 1)

    def go(text: tuple[int, ...], weight: float) -> None:
        if len(text) == depth or weight < 1e-15:
            return
        counts[0] += weight
        m = min(k, depth - len(text) - 1)
        for x in itertools.product(range(vocab), repeat=m):
            drawn = weight * math.prod(float(q[text + x[:i]][x[i]]) for i in range(m))
            kept, left = [1.0], []
            for i in range(m):
                left.append((kept[i] * p[text + x[:i]] - q[text + x[:i]]).clamp(min=0))
                kept.append(min(1.0, kept[i] * float(p[text + x[:i]][x[i]] / q[text + x[:i]][x[i]])))
            left.append(p[text + x])
            still = drawn  # no longer part has been kept
            for i in range(m, -1, -1):
                rest = float(left[i].sum())
                share = 1.0 if i == 0 else kept[i] if i == m else rest / (rest + 1 - kept[i]) if rest else 0.0
                for j in range(i):
                    counts[1 + j] += still * share
                for y in range(vocab):
                    go((*text, *x[:i], y), still * share * float(left[i][y] / rest) if rest else 0.0)
                still *= 1 - share

    for x in range(vocab):
        go((x,), float(p[()][x]))
    return counts


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_expected_rounds_are_those_of_enumerating_block_verification(k: int) -> None:
    depth, vocab = 5, 2
    p, q = table(0, depth, vocab), table(1, depth, vocab)
    wanted = enumerated(p, q, depth, k)
    rounds, accepted = 0.0, [0.0] * k
    for text in itertools.product(range(vocab), repeat=depth):
        weight = math.prod(float(p[text[:i]][text[i]]) for i in range(depth))
        of = torch.tensor([[float(m[text[:i]][text[i]]) for m in (p, q)] for i in range(1, depth)])
        found = expected_rounds([ratios(of[:, 0], of[:, 1]).unsqueeze(1)], k)
        assert found.tokens == depth - 1
        rounds += weight * found.rounds
        accepted = [a + weight * b for a, b in zip(accepted, found.accepted)]
    assert rounds == pytest.approx(wanted[0], rel=1e-6)
    assert accepted == pytest.approx(wanted[1:], rel=1e-6)


def test_expected_rounds_of_a_block_drafter_use_the_row_of_the_round() -> None:
    # Behind token 0 both proposals are right, behind token 3 none: rounds commit tokens 1-3, then 4, then 5.
    of_text = torch.tensor([[1.0, 1.0], [0.0, 0.0], [0.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    found = expected_rounds([of_text], 2)
    assert (found.tokens, found.rounds) == (5, 3.0)
    # The round of the last token proposes nothing, the one before it at most one token.
    assert found.proposed == (2.0, 1.0) and found.accepted == (1.0, 1.0)


def test_a_perfect_draft_commits_k_plus_one_tokens_a_round() -> None:
    found = expected_rounds([torch.ones(20, 1)], 4)
    assert found.rounds == 4.0 and found.tokens_per_round == 5.0
    assert found.acceptance_by_position == [1.0] * 4


def test_probabilities_are_those_of_sampling() -> None:
    logits, tokens = some_logits(5, 8, 3), torch.tensor([0, 1, 2, 3, 4])
    wanted = (logits / 0.7).softmax(-1)[torch.arange(5), tokens]
    torch.testing.assert_close(probability(logits, tokens, Sampling(0.7)), wanted)
    greedy = probability(logits, logits.argmax(-1), Sampling(0.0))
    assert greedy.tolist() == [1.0] * 5
    assert probability(logits, tokens, Sampling(0.7, top_k=1)).sum() == (logits.argmax(-1) == tokens).sum()
