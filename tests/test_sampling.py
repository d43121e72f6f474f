"""Samplers: their laws on table models, compared with closed forms, and their other guarantees."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import litgpt.generate.speculative_decoding as litgpt_speculative
import pytest
import torch
from host_reads import HostReads
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import ALPHA, chi_square, follows, repeat, total_variation
from scipy import stats
from torch import Tensor

from litspec import noise as noise_module
from litspec import sampling as sampling_module
from litspec.errors import InputError
from litspec.noise import position_keys, uniform_noise
from litspec.sampling import (
    Coupled,
    Distribution,
    Greedy,
    Rejection,
    Sampler,
    Sampling,
    concatenate,
    make_sampler,
    processed,
    right_prefix,
)

VOCAB = 8


def gumbel_noise(seed: int, positions: Tensor, ids: Tensor) -> Tensor:
    return noise_module.gumbel_noise(position_keys(seed, positions), ids)


SETTINGS = {
    "temperature": Sampling(temperature=0.7),
    "top_k": Sampling(top_k=3),
    "top_p": Sampling(top_p=0.8),
    "all three": Sampling(temperature=1.3, top_k=6, top_p=0.9),
}
each_setting = pytest.mark.parametrize("sampling", SETTINGS.values(), ids=SETTINGS.keys())


def table(*shape: int, seed: int) -> Tensor:
    return 1.5 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def dense(distribution: Distribution, vocab: int = VOCAB) -> Tensor:
    """All probabilities, (R, V)."""
    probs, ids = distribution
    if ids is None:
        return torch.nn.functional.pad(probs, (0, vocab - probs.size(1)))
    return torch.zeros(probs.size(0), vocab).scatter(1, ids, probs)


def litgpt_probs(logits: Tensor, temperature: float, top_k: int | None, top_p: float) -> Tensor:
    """What LitGPT's own `sample` draws from, (R, V)."""
    kwargs = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    return torch.stack([litgpt_speculative.sample(row.view(1, 1, -1), **kwargs)[1] for row in logits])


# Settings and processed distributions


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.integers(0, 10_000),
    st.integers(2, 40),
    st.floats(0.1, 3),
    st.one_of(st.none(), st.integers(1, 50)),
    st.one_of(st.just(1.0), st.floats(0.05, 1)),
)
def test_the_processed_distribution_is_the_one_litgpt_samples_from(
    seed: int, vocab: int, temperature: float, top_k: int | None, top_p: float
) -> None:
    logits = table(3, vocab, seed=seed)
    ours = dense(processed(logits, Sampling(temperature, top_k, top_p)), vocab)
    theirs = litgpt_probs(logits, temperature, top_k, top_p)
    torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-5)
    assert torch.equal(ours > 0, theirs > 0)


def test_top_k_comes_before_temperature_and_top_p_comes_last() -> None:
    logits = torch.tensor([[8.0, 4.0, 2.0, 1.0]]).log()
    # The best three: 8 4 2, at temperature 1/2 squared: 64 16 4 of 84. Of these the first two hold more than 0.94.
    probs, ids = processed(logits, Sampling(temperature=0.5, top_k=3, top_p=0.94))
    assert ids.tolist() == [[0, 1, 2]]
    torch.testing.assert_close(probs, torch.tensor([[0.8, 0.2, 0.0]]))


def test_sixteen_bit_logits_are_processed_in_float32() -> None:
    logits = table(2, VOCAB, seed=1).bfloat16()
    for sampling in SETTINGS.values():
        probs = processed(logits, sampling).probs
        assert probs.dtype == torch.float32
        assert torch.equal(probs, processed(logits.float(), sampling).probs)


def test_a_token_of_logit_minus_infinity_has_probability_zero() -> None:
    logits = torch.tensor([[0.0, -math.inf, 1.0, -math.inf]])
    for sampling in (Sampling(0.7), Sampling(top_k=3), Sampling(top_p=0.9), Sampling(0.7, 3, 0.99)):
        probs = dense(processed(logits, sampling), 4)
        assert probs.isfinite().all()
        assert probs[0, [1, 3]].tolist() == [0, 0]
        torch.testing.assert_close(probs, litgpt_probs(logits, sampling.temperature, sampling.top_k, sampling.top_p))


@pytest.mark.parametrize("temperature", [1e-3, 1e-20, 1e-36])
def test_a_temperature_near_zero_leaves_the_most_likely_token(temperature: float) -> None:
    logits = torch.tensor([[900.0, -3e4, 1000.0, 0.0]])
    for top_k in (None, 2):
        probs = dense(processed(logits, Sampling(temperature, top_k)), 4)
        assert probs.tolist() == [[0, 0, 1, 0]]
    assert Sampling(1e-45).greedy


def test_the_most_likely_token_survives_the_smallest_top_p() -> None:
    for sampling in (Sampling(top_p=1e-9), Sampling(top_k=3, top_p=1e-9)):
        assert dense(processed(table(1, VOCAB, seed=3), sampling)).max() == 1


@pytest.mark.parametrize(
    ("kwargs", "name"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": -4}, "top_k"),
        ({"sampler": "beam"}, "sampler"),
    ],
)
def test_a_setting_out_of_range_is_refused_with_its_value(kwargs: dict, name: str) -> None:
    with pytest.raises(InputError, match=f"^{name} must be .*{next(iter(kwargs.values()))}"):
        Sampling(**kwargs)


def test_probabilities_are_found_in_dense_and_sparse_distributions_alike() -> None:
    generator = torch.Generator().manual_seed(0)

    def make(rows: int, vocab: int, candidates: int | None) -> Distribution:
        probs = torch.rand(rows, candidates or vocab, generator=generator)
        if candidates is None:
            return Distribution(probs)
        return Distribution(probs, torch.rand(rows, vocab, generator=generator).argsort(1)[:, :candidates])

    kinds = [(VOCAB, None), (VOCAB, 5), (VOCAB, 3), (VOCAB - 2, None), (VOCAB - 2, 4)]
    for (own_vocab, own), (other_vocab, other) in itertools.product(kinds, kinds[:3]):
        a, b = make(3, own_vocab, own), make(3, other_vocab, other)
        columns = torch.arange(VOCAB).expand(3, -1) if b.ids is None else b.ids
        assert torch.equal(a.at(b), dense(a).gather(1, columns))
        assert torch.equal(dense(a.row(torch.tensor(1))), dense(a)[1:2])
        tokens = torch.tensor([0, 3, 5])
        assert torch.equal(a.of(tokens), dense(a)[torch.arange(3), tokens])
        assert torch.equal(dense(concatenate([a, a]), VOCAB), dense(a).repeat(2, 1))


# The rejection sampler's law


def joint_law(first: Tensor, second: Tensor) -> Tensor:
    """P(x, y) from P(x), (V,), and P(y | x), (V, V)."""
    return first.unsqueeze(1) * second


Drafter = Callable[[Tensor, Tensor, int], tuple[Tensor, Distribution | None]]


def two_tokens(target: Sampler, draft: Drafter, times: int, m: int = 2) -> Tensor:
    """Draws the first two tokens of many texts of a table model, with speculation: (times, 2).

    Args:
        target: The target's sampler. The model is a table, its logits depend on the last token.
        draft: Given the draft's logits, (1, V), one token and what it was drawn from.
        times: Number of texts.
        m: Proposals in the first round.
    """
    p_table, q_table = table(VOCAB + 1, VOCAB, seed=11), table(VOCAB + 1, VOCAB, seed=12)
    begin = torch.tensor(VOCAB)  # represents the prompt

    def one(zero: Tensor) -> Tensor:
        last, proposal, rows = begin.view(1), [], []
        for i in range(m):
            token, q = draft(q_table.index_select(0, last) + zero, zero, i)
            last = token
            proposal.append(token)
            rows.append(q)
        tokens = torch.cat(proposal)
        q = None if rows[0] is None else concatenate(rows)
        p = p_table.index_select(0, torch.cat((begin.view(1), tokens))) + zero
        verified = target.verify(p, 0, tokens, q)
        # If the first proposal was rejected, the second token needs another round.
        plain = target.verify(p_table.index_select(0, verified.tokens[:1]) + zero, 1, tokens[:0]).tokens
        return torch.cat((verified.tokens[:1], torch.where(verified.accepted > 0, verified.tokens[1:2], plain)))

    return repeat(one, times)


def law_of_two_tokens(sampling: Sampling) -> Tensor:
    probs = litgpt_probs(table(VOCAB + 1, VOCAB, seed=11), sampling.temperature, sampling.top_k, sampling.top_p)
    return joint_law(probs[VOCAB], probs[:VOCAB])


def honest(sampler: Sampler) -> Drafter:
    """Draws from the draft's processed distribution and reports it, like a draft model."""
    return lambda logits, zero, i: sampler.draw(logits, i)


def narrow(sampler: Sampler) -> Drafter:
    """A draft whose vocabulary lacks the last two ids."""
    return lambda logits, zero, i: sampler.draw(logits[:, : VOCAB - 2], i)


def most_likely(sampler: Sampler) -> Drafter:
    """Draws nothing."""
    return lambda logits, zero, i: (logits.max(-1).indices, None)


def sparse_of_its_own(sampler: Sampler) -> Drafter:
    """Draws from a few tokens with settings that are not the target's."""
    own = Rejection(Sampling(temperature=2.0, top_k=4))
    return lambda logits, zero, i: own.draw(logits, i)


def dense_of_its_own(sampler: Sampler) -> Drafter:
    own = Rejection(Sampling(temperature=2.0))
    return lambda logits, zero, i: own.draw(logits, i)


@pytest.mark.slow
@each_setting
@pytest.mark.parametrize("drafter", [honest, narrow, most_likely, sparse_of_its_own, dense_of_its_own])
def test_rejection_sampling_has_the_law_of_the_target(sampling: Sampling, drafter: Callable) -> None:
    torch.manual_seed(5)
    sampler = Rejection(sampling)
    assert follows(two_tokens(sampler, drafter(sampler), 50_000), law_of_two_tokens(sampling))


@each_setting
@pytest.mark.parametrize("m", [1, 4])
def test_the_law_does_not_depend_on_the_number_of_proposals(sampling: Sampling, m: int) -> None:
    torch.manual_seed(6)
    sampler = Rejection(sampling)
    assert follows(two_tokens(sampler, honest(sampler), 50_000, m), law_of_two_tokens(sampling))


@each_setting
def test_a_single_draw_has_the_law_of_the_model(sampling: Sampling) -> None:
    torch.manual_seed(7)
    logits = table(1, VOCAB, seed=3)
    sampler = Rejection(sampling)
    law = litgpt_probs(logits, sampling.temperature, sampling.top_k, sampling.top_p)[0]
    assert follows(repeat(lambda zero: sampler.draw(logits + zero, 0)[0][0], 50_000), law)
    nothing = torch.empty(0, dtype=torch.int64)
    assert follows(repeat(lambda zero: sampler.verify(logits + zero, 0, nothing).tokens[0], 50_000), law)


@each_setting
def test_the_share_of_accepted_proposals_is_one_minus_the_total_variation_distance(sampling: Sampling) -> None:
    torch.manual_seed(8)
    p, q = table(1, VOCAB, seed=4), table(1, VOCAB, seed=5)
    sampler = Rejection(sampling)

    def one(zero: Tensor) -> Tensor:
        token, drawn_from = sampler.draw(q + zero, 0)
        return sampler.verify((p + zero).expand(2, -1), 0, token, drawn_from).accepted

    kwargs = (sampling.temperature, sampling.top_k, sampling.top_p)
    expected = 1 - total_variation(litgpt_probs(p, *kwargs), litgpt_probs(q, *kwargs))
    accepted = int(repeat(one, 50_000).sum())
    assert stats.binomtest(accepted, 50_000, expected).pvalue > ALPHA


def test_a_draft_equal_to_the_target_is_always_accepted() -> None:
    torch.manual_seed(9)
    logits = table(3, VOCAB, seed=6)
    for sampling in SETTINGS.values():
        sampler = Rejection(sampling)

        def one(zero: Tensor, sampler: Sampler = sampler) -> Tensor:
            drawn = [sampler.draw(logits[i : i + 1] + zero, i) for i in range(2)]
            tokens, q = torch.cat([token for token, _ in drawn]), concatenate([q for _, q in drawn])
            return sampler.verify(logits + zero, 0, tokens, q).accepted

        assert (repeat(one, 5_000) == 2).all()


def test_if_the_residual_is_zero_the_token_is_drawn_from_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    # p and q are equal, but the proposal is rejected, as may happen by rounding.
    monkeypatch.setattr(Rejection, "_noise", lambda *_: torch.rand(2, 3) + torch.tensor([0.0, 2.0, 0.0]))
    torch.manual_seed(10)
    logits = table(1, VOCAB, seed=7)
    sampler = Rejection(Sampling())
    q = processed(logits, Sampling())

    def one(zero: Tensor) -> Tensor:
        return sampler.verify((logits + zero).expand(2, -1), 0, torch.tensor([3]), q).tokens[0]

    assert follows(repeat(one, 50_000), q.probs[0])


# Block verification


def block_rule(p: Tensor, q: Tensor) -> tuple[float, float]:
    """Expected number of accepted tokens, jointly and token by token, by enumerating all proposals.

    Algorithm 2 of Sun et al. 2024 (arXiv 2403.10444) and the rule of Leviathan et al. 2023, written down in loops, for
    rows p (m + 1, V) and q (m, V) that do not depend on the tokens before.
    """
    p, q, m = p.double(), q.double(), len(q)
    together = one_by_one = 0.0
    for x in itertools.product(range(q.size(1)), repeat=m):
        weight = math.prod(q[i, x[i]].item() for i in range(m))
        if weight == 0:
            continue
        ratios = [(p[i, x[i]] / q[i, x[i]]).item() for i in range(m)]
        one_by_one += weight * sum(math.prod(min(1.0, r) for r in ratios[: i + 1]) for i in range(m))
        kept, share = 1.0, []
        for i in range(m):
            kept = min(1.0, kept * ratios[i])
            left = (kept * p[i + 1] - q[i + 1]).clamp_min(0).sum().item() if i < m - 1 else 0.0
            share.append(kept if i == m - 1 else left / (left + 1 - kept) if left + 1 - kept > 0 else 1.0)
        together += weight * sum(1 - math.prod(1 - h for h in share[i:]) for i in range(m))
    return together, one_by_one


@each_setting
@pytest.mark.parametrize("m", [2, 3])
def test_proposals_are_accepted_together_as_often_as_published_and_more_often_than_one_by_one(
    sampling: Sampling, m: int
) -> None:
    torch.manual_seed(8)
    p, q = table(m + 1, VOCAB, seed=4), table(m, VOCAB, seed=5)
    sampler, count = Rejection(sampling), 50_000

    def one(zero: Tensor) -> Tensor:
        drawn = [sampler.draw(q[i : i + 1] + zero, i) for i in range(m)]
        tokens, rows = torch.cat([token for token, _ in drawn]), concatenate([row for _, row in drawn])
        return sampler.verify(p + zero, 0, tokens, rows).accepted

    kwargs = (sampling.temperature, sampling.top_k, sampling.top_p)
    together, one_by_one = block_rule(litgpt_probs(p, *kwargs), litgpt_probs(q, *kwargs))
    accepted = repeat(one, count).double()
    assert abs(accepted.mean() - together) < 4 * accepted.std() / math.sqrt(count)
    assert together >= one_by_one - 1e-6


def test_a_token_of_target_probability_zero_is_rejected_for_every_reported_q() -> None:
    p, q = table(3, VOCAB, seed=4), table(2, VOCAB, seed=5)
    p[:, 3] = -math.inf
    q[:, 3] = -math.inf
    for sampling in SETTINGS.values():
        sampler, reported = Rejection(sampling), processed(q, sampling)
        for tokens in ([3, 0], [0, 3], [3, 3]):
            for _ in range(200):
                verified = sampler.verify(p, 0, torch.tensor(tokens), reported)
                assert 3 not in verified.tokens[: verified.accepted + 1]
                assert verified.accepted <= tokens.index(3)


# Random numbers from counters


@pytest.mark.slow
@each_setting
@pytest.mark.parametrize("seed", [0, 2**63 + 5])
def test_a_seeded_round_has_the_law_of_the_target_over_positions(sampling: Sampling, seed: int) -> None:
    # Rounds that follow each other in one text, each with two proposals.
    p, q = table(3, VOCAB, seed=4), table(2, VOCAB, seed=5)
    sampler, first, second = Rejection(sampling, seed=seed), [], []
    for n in range(5_000):
        sampler.start_round(3 * n)
        drawn = [sampler.draw(q[i : i + 1], 3 * n + i) for i in range(2)]
        tokens, rows = torch.cat([token for token, _ in drawn]), concatenate([row for _, row in drawn])
        verified = sampler.verify(p, 3 * n, tokens, rows)
        first.append(verified.tokens[0])
        if verified.accepted:
            second.append(verified.tokens[1])
    laws = litgpt_probs(p, sampling.temperature, sampling.top_k, sampling.top_p)
    assert follows(torch.stack(first), laws[0]) and follows(torch.stack(second), laws[1])


@pytest.mark.slow
def test_a_seeded_draw_has_the_law_of_the_model_over_seeds() -> None:
    logits = table(1, VOCAB, seed=3)
    law = litgpt_probs(logits, 1.0, None, 1.0)[0]
    draws = torch.cat([Rejection(Sampling(), seed=seed).draw(logits, 17)[0] for seed in range(5_000)])
    assert follows(draws, law)


def test_uniform_numbers_are_uniform_and_independent_over_positions_purposes_and_seeds() -> None:
    for seed in (0, 1234, -7, 2**40):
        u = uniform_noise(position_keys(seed, torch.arange(50_000)), 3).double()
        assert u.min() >= 0 and u.max() < 1
        others = uniform_noise(position_keys(seed + 1, torch.arange(50_000)), 3).double()
        for purpose in range(3):
            assert stats.kstest(u[:, purpose].numpy(), "uniform").pvalue > ALPHA
        for x, y in [(u[:, 0], u[:, 1]), (u[:, 1], u[:, 2]), (u[1:, 0], u[:-1, 0]), (u[1:, 1], u[:-1, 2]), (u, others)]:
            # Independent: the correlation is normal with deviation 1 / sqrt(n).
            assert abs(((x - 0.5) * (y - 0.5)).mean() * 12) * math.sqrt(x.numel()) < 4.5


@pytest.mark.parametrize("sampler", [Rejection, Coupled])
def test_nothing_but_seed_and_position_decides_a_draw(sampler: type[Sampler]) -> None:
    logits = table(40, VOCAB, seed=3)
    in_order = [sampler(Sampling(), seed=3).draw(row.view(1, -1), 700 + i)[0] for i, row in enumerate(logits)]
    used = sampler(Sampling(), seed=3)
    for i in torch.randperm(200, generator=torch.Generator().manual_seed(0)).tolist():
        used.draw(logits[:1], i)
    backwards = [used.draw(logits[i : i + 1], 700 + i)[0] for i in reversed(range(40))]
    assert torch.equal(torch.cat(in_order), torch.cat(backwards[::-1]))


def test_a_uniform_number_next_to_1_draws_a_token_that_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise_module, "lowbias32", lambda x: x * 0 + 2**32 - 1)
    for seed in range(20):
        logits = table(1, 5_000, seed=seed)
        logits[0, 4_000:] = -math.inf
        assert Rejection(Sampling(), seed=1).draw(logits, 0)[0].item() == 3_999


# The checks can fail


def test_the_check_detects_a_bias_of_two_percent() -> None:
    torch.manual_seed(13)
    for sampling in SETTINGS.values():
        law = law_of_two_tokens(sampling)
        # Moves 2 % of the probability mass from the most likely first token to the others.
        first = law.sum(1)
        shift = first / (1 - first.max())
        shift[first.argmax()] = -1
        biased = law / first.clamp_min(1e-9).unsqueeze(1) * (first + 0.02 * shift).unsqueeze(1)
        assert total_variation(biased, law) == pytest.approx(0.02)
        draws = torch.multinomial(biased.flatten(), 50_000, replacement=True)
        assert not follows(torch.stack((draws // VOCAB, draws % VOCAB), 1), law)


@each_setting
def test_a_rule_that_accepts_too_easily_fails(sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    easy = torch.tensor([1.0, 0.85, 1.0])
    monkeypatch.setattr(Rejection, "_noise", lambda self, device, position, rows: torch.rand(rows, 3) * easy)
    torch.manual_seed(5)
    sampler = Rejection(sampling)
    assert not follows(two_tokens(sampler, honest(sampler), 50_000), law_of_two_tokens(sampling))


@each_setting
def test_a_residual_that_is_not_one_fails(sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Distribution, "at", lambda self, other: torch.zeros_like(other.probs))
    torch.manual_seed(5)
    sampler = Rejection(sampling)
    assert not follows(two_tokens(sampler, honest(sampler), 50_000), law_of_two_tokens(sampling))


@each_setting
def test_a_drafter_that_misreports_what_it_drew_from_fails(sampling: Sampling) -> None:
    torch.manual_seed(5)
    sampler = Rejection(sampling)

    def liar(logits: Tensor, zero: Tensor, i: int) -> tuple[Tensor, Distribution | None]:
        return logits.max(-1).indices, sampler.draw(logits, i)[1]

    assert not follows(two_tokens(sampler, liar, 50_000), law_of_two_tokens(sampling))


# The coupled sampler


def choices(sampler: Coupled, logits: Tensor, position: int = 0) -> Tensor:
    """The sampler's token for each row, row i standing at `position + i`: (R,)."""
    return sampler.verify(logits, position, torch.zeros(logits.size(0) - 1, dtype=torch.int64)).tokens


@each_setting
@pytest.mark.parametrize("seed", [0, 1234, -1, 2**63 + 5])
def test_a_coupled_draw_has_the_law_of_the_model(sampling: Sampling, seed: int) -> None:
    logits = table(1, VOCAB, seed=3)
    law = litgpt_probs(logits, sampling.temperature, sampling.top_k, sampling.top_p)[0]
    assert follows(choices(Coupled(sampling, seed=seed), logits.expand(50_000, -1)), law)


@pytest.mark.slow
@each_setting
def test_a_coupled_draw_has_the_law_of_the_model_over_seeds(sampling: Sampling) -> None:
    logits = table(1, VOCAB, seed=3)
    law = litgpt_probs(logits, sampling.temperature, sampling.top_k, sampling.top_p)[0]
    # The first tokens of many texts whose seeds follow each other.
    draws = [choices(Coupled(sampling, seed=seed), logits.expand(25, -1), 17) for seed in range(2_000)]
    assert follows(torch.cat(draws), law)


def test_coupled_draws_at_neighbouring_positions_are_independent() -> None:
    logits = table(1, VOCAB, seed=3)
    law = litgpt_probs(logits, 1.0, None, 1.0)[0]
    draws = choices(Coupled(Sampling(), seed=3), logits.expand(100_000, -1))
    assert follows(draws.view(-1, 2), joint_law(law, law.expand(VOCAB, -1)))
    assert follows(draws[1:-1].view(-1, 2), joint_law(law, law.expand(VOCAB, -1)))
    others = choices(Coupled(Sampling(), seed=4), logits.expand(100_000, -1))
    assert follows(torch.stack((draws, others), 1), joint_law(law, law.expand(VOCAB, -1)))


def uniforms(noise: Tensor) -> Tensor:
    """Gumbel noise back to numbers in (0, 1)."""
    return torch.exp(-torch.exp(-noise.double()))


def test_the_noise_is_standard_gumbel_over_positions_over_ids_and_over_seeds() -> None:
    count = 50_000
    many, zero = torch.arange(count), torch.zeros(1, dtype=torch.int64)
    for seed in (0, 1234, -7, 2**40):
        for at in (0, 1, 999):
            over_positions = gumbel_noise(seed, many, torch.tensor([[at]])).flatten()
            over_ids = gumbel_noise(seed, torch.tensor([at]), many.unsqueeze(0)).flatten()
            for noise in (over_positions, over_ids):
                assert noise.dtype == torch.float32
                assert noise.isfinite().all()
                assert stats.kstest(uniforms(noise).numpy(), "uniform").pvalue > ALPHA
    over_seeds = torch.cat([gumbel_noise(seed, zero, zero.view(1, 1)) for seed in range(3_000)])
    assert stats.kstest(uniforms(over_seeds).flatten().numpy(), "uniform").pvalue > ALPHA


def test_the_noise_is_finite_at_both_ends_of_what_a_hash_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    one = torch.zeros(1, dtype=torch.int64)
    ends = []
    for end in (0, 2**32 - 1):
        monkeypatch.setattr(noise_module, "lowbias32", lambda x, end=end: x * 0 + end)
        ends.append(gumbel_noise(1, one, one.view(1, 1)).item())
    assert ends[0] == pytest.approx(math.log(2) + 32 * math.log(2), abs=1e-4)
    assert ends[1] == pytest.approx(-math.log(24 * math.log(2)), abs=1e-4)


def test_the_noise_of_other_positions_ids_and_seeds_is_uncorrelated() -> None:
    positions, ids = torch.arange(300), torch.arange(300).unsqueeze(0)
    seeds = [0, 1, 2, 3, 1 << 31, 1 << 32, (1 << 32) + 1, 1 << 63, -1]
    noise = torch.stack([uniforms(gumbel_noise(seed, positions, ids)) for seed in seeds]) - 0.5
    # Every shift of positions and ids by up to 8 (mirrored ones are the same pairs) between every two seeds.
    worst = 0.0
    for a, b in itertools.combinations_with_replacement(range(len(seeds)), 2):
        for dp, di in itertools.product(range(-8, 9), range(0, 9)):
            if a == b and dp == 0 and di == 0:
                continue
            x = noise[a, max(0, dp) : 300 + min(0, dp), di:]
            y = noise[b, max(0, -dp) : 300 + min(0, -dp), : 300 - di]
            worst = max(worst, abs((x * y).mean().item()) * 12 * math.sqrt(x.numel()))
    # The maximum of 6,876 standard normal numbers is above 5.5 with probability 1 / 4,000.
    assert worst < 5.5


def test_seeds_do_not_share_their_noise_at_other_positions() -> None:
    positions, id_ = torch.arange(1_000), torch.tensor([[5]])
    seen = torch.cat([gumbel_noise(seed, positions, id_) for seed in (0, 1, 2, 3, 4, 7, 1 << 32, 1 << 33)])
    # A few of 8,000 numbers of 24 bits are equal by chance.
    assert seen.unique().numel() > seen.numel() - 20


@pytest.mark.slow
def test_positions_do_not_share_their_noise_shifted_by_some_ids() -> None:
    size = 3_000
    noise = gumbel_noise(1234, torch.arange(size), torch.arange(size).unsqueeze(0)).view(torch.int32).long()
    # Two neighbours as one number: where those of ids 0 and 1 turn up elsewhere, all that follow do.
    neighbours = noise[:, :-1] * 2**32 + noise[:, 1:]
    beginnings, count = neighbours[:, 0].sort().values, neighbours.numel()
    at = torch.searchsorted(beginnings, neighbours).clamp_max(size - 1)
    assert (beginnings[at] == neighbours).sum() == size, f"more than the {size} beginnings themselves among {count}"


@each_setting
@pytest.mark.parametrize("pair", [(21, 22), (23, 24), (25, 26)])
def test_coupled_acceptance_is_that_of_gumbel_coupling_within_its_bounds(
    sampling: Sampling, pair: tuple[int, int]
) -> None:
    p_logits, q_logits = table(1, VOCAB, seed=pair[0]), table(1, VOCAB, seed=pair[1])
    sampler, count = Coupled(sampling, seed=99), 100_000
    own, drafted = (choices(sampler, logits.expand(count, -1)) for logits in (p_logits, q_logits))
    accepted = int((own == drafted).sum())

    kwargs = (sampling.temperature, sampling.top_k, sampling.top_p)
    p, q = litgpt_probs(p_logits, *kwargs)[0].double(), litgpt_probs(q_logits, *kwargs)[0].double()
    d = total_variation(p, q)
    # Both choose i iff its noise beats every j's by max(log p_j / p_i, log q_j / q_i).
    both = [i for i in range(VOCAB) if p[i] > 0 and q[i] > 0]
    expected = sum(1 / torch.maximum(p / p[i], q / q[i]).sum().item() for i in both)
    assert stats.binomtest(accepted, count, expected).pvalue > ALPHA
    slack = 4 * math.sqrt(0.25 / count)
    assert (1 - d) / (1 + d) - slack <= accepted / count <= 1 - d + slack


@each_setting
def test_a_coupled_proposal_is_accepted_iff_it_is_the_targets_own_choice(sampling: Sampling) -> None:
    sampler = Coupled(sampling, seed=7)
    logits = table(7, VOCAB, seed=30)
    own = choices(sampler, logits, 40)
    one_by_one = [sampler.draw(logits[i : i + 1], 40 + i)[0] for i in range(7)]
    assert torch.equal(own, torch.cat(one_by_one))
    for wrong_at in range(7):
        proposal = own[:-1].clone()
        if wrong_at < 6:
            proposal[wrong_at] = (proposal[wrong_at] + 1) % VOCAB
        for q in (None, processed(logits[:-1], sampling)):
            verified = sampler.verify(logits, 40, proposal, q)
            assert verified.accepted == wrong_at
            assert torch.equal(verified.tokens, own)


def test_the_lowest_id_wins_a_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.zeros(4, 64)
    logits[:, 50] = -1
    logits[:, 7] = -1
    assert Greedy(Sampling(0)).draw(logits[:1], 0)[0].tolist() == [0]
    monkeypatch.setattr(sampling_module, "gumbel_noise", lambda keys, ids: torch.zeros(ids.shape))
    for sampling in (Sampling(0.7), Sampling(0.7, top_k=62), Sampling(0.7, top_k=62, top_p=0.999)):
        survivors = processed(logits[:1], sampling)
        kept = dense(survivors, 64)[0].nonzero().flatten()
        assert choices(Coupled(sampling), logits).tolist() == [kept.min().item()] * 4


# All samplers


def samplers(sampling: Sampling = SETTINGS["all three"], **kwargs: object) -> dict[str, Sampler]:
    return {
        "greedy": Greedy(Sampling(0), **kwargs),
        "rejection": Rejection(sampling, **kwargs, seed=1),
        "coupled": Coupled(sampling, **kwargs, seed=1),
    }


each_sampler = pytest.mark.parametrize("name", ["greedy", "rejection", "coupled"])


def test_greedy_accepts_a_proposal_iff_it_is_the_argmax() -> None:
    generator = torch.Generator().manual_seed(0)
    sampler = Greedy(Sampling(0))
    for _ in range(200):
        m = int(torch.randint(0, 6, (), generator=generator))
        logits = torch.randint(0, 4, (m + 1, 3), generator=generator).float()  # with ties
        proposal = torch.randint(0, 3, (m,), generator=generator)
        own = [row.index(max(row)) for row in logits.tolist()]
        expected = next((i for i in range(m) if proposal[i] != own[i]), m)
        verified = sampler.verify(logits, 0, proposal)
        assert verified.accepted == expected
        assert verified.tokens[: expected + 1].tolist() == own[: expected + 1]


def test_right_prefix_counts_up_to_the_first_wrong_one() -> None:
    for bits in itertools.product([False, True], repeat=4):
        assert right_prefix(torch.tensor(bits)) == [*bits, False].index(False)
    assert right_prefix(torch.empty(0, dtype=torch.bool)) == 0


@each_sampler
@pytest.mark.parametrize("top_k", [None, 4])
def test_banned_ids_have_probability_zero_until_their_position(name: str, top_k: int | None) -> None:
    logits = torch.zeros(6, VOCAB)
    logits[:, 2] = 9.0
    logits[:, 5] = 8.0
    before = logits.clone()
    # 64 is an id that this model does not have.
    sampler = samplers(Sampling(0.5, top_k), banned=[2, 5, 64], banned_until=13)[name]
    verified = sampler.verify(logits, 10, torch.tensor([2, 5, 0, 0, 0]))
    assert verified.accepted == 0
    own = choices(sampler, logits, 10) if name != "rejection" else None
    for _ in range(50):
        for i in range(6):
            token = sampler.draw(logits[i : i + 1], 10 + i)[0].item()
            assert (token in (2, 5)) == (10 + i >= 13) or name != "greedy"
            assert token not in (2, 5) or 10 + i >= 13
            assert own is None or token == own[i]
    assert torch.equal(logits, before)


@each_setting
def test_a_ban_leaves_the_law_of_the_other_tokens(sampling: Sampling) -> None:
    torch.manual_seed(14)
    logits = table(1, VOCAB, seed=3)
    banned = logits.clone()
    banned[0, logits.argmax()] = -math.inf
    law = litgpt_probs(banned, sampling.temperature, sampling.top_k, sampling.top_p)[0]
    sampler = Rejection(sampling, banned=[int(logits.argmax())], banned_until=1)
    assert follows(repeat(lambda zero: sampler.draw(logits + zero, 0)[0][0], 50_000), law)


@each_sampler
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("top_k", [None, 4])
def test_logits_that_are_not_finite_are_flagged_and_give_valid_ids(name: str, bad: float, top_k: int | None) -> None:
    for top_p in (1.0, 0.9):
        for row in range(3):
            logits = table(3, VOCAB, seed=40)
            sampler = samplers(Sampling(0.7, top_k, top_p))[name]
            q = processed(logits[:2], Sampling(0.7, top_k, top_p))
            assert sampler.verify(logits, 0, torch.tensor([1, 2]), q).finite
            logits[row, 3] = bad
            verified = sampler.verify(logits, 0, torch.tensor([1, 2]), q)
            assert not verified.finite
            token, _ = sampler.draw(logits[row : row + 1], 0)
            # A drafter goes on with what it drew; the error comes with the round's one read.
            for ids in (verified.tokens, token):
                assert ((ids >= 0) & (ids < VOCAB)).all()
        logits[row] = -math.inf
        assert not sampler.verify(logits, 0, torch.tensor([1, 2]), q).finite


def test_a_proposal_distribution_that_is_not_finite_is_flagged() -> None:
    logits = table(2, VOCAB, seed=40)
    q = Distribution(torch.full((1, VOCAB), math.nan))
    assert not Rejection(Sampling()).verify(logits, 0, torch.tensor([1]), q).finite


@pytest.mark.parametrize("vocab", [8, 1_000, 50_000])
@pytest.mark.parametrize("step", [0.0, 0.5], ids=["all different", "with many ties"])
def test_a_row_does_not_depend_on_adjacent_rows(vocab: int, step: float) -> None:
    rows = 9
    block = table(1, rows + 3, vocab, seed=50)
    if step:
        block = (block / step).round() * step  # as in 16 bits: border cases of top-k and top-p
    logits = block[0, 2 : 2 + rows]
    for sampling in (*SETTINGS.values(), Sampling(top_k=50, top_p=0.95), Sampling(top_k=5)):
        together = processed(logits, sampling)
        coupled = Coupled(sampling, seed=3)
        own = choices(coupled, logits, 100)
        for i in range(rows):
            alone = processed(logits[i : i + 1].clone(), sampling)
            assert torch.equal(alone.probs[0], together.probs[i])
            assert alone.ids is None or torch.equal(alone.ids[0], together.ids[i])
            assert coupled.draw(logits[i : i + 1].clone(), 100 + i)[0] == own[i]
        for size in (2, 5):
            assert torch.equal(choices(coupled, logits[:size], 100), own[:size])
            assert torch.equal(choices(coupled, logits[3 : 3 + size], 103), own[3 : 3 + size])
    greedy = Greedy(Sampling(0))
    own = greedy.verify(logits, 0, torch.zeros(rows - 1, dtype=torch.int64)).tokens
    assert own.tolist() == [greedy.draw(logits[i : i + 1], 0)[0].item() for i in range(rows)]


@each_sampler
def test_drawing_and_verifying_read_nothing_to_the_host(name: str) -> None:
    for sampling in SETTINGS.values():
        sampler = samplers(sampling, banned=[1, 3], banned_until=4)[name]
        with torch.inference_mode(), HostReads() as reads:
            token, q = sampler.draw(table(1, VOCAB, seed=60), 3)
            sampler.verify(table(2, VOCAB, seed=61), 3, token, q)
            sampler.verify(table(1, VOCAB, seed=61), 3, token[:0])
        assert reads.seen == []
    with torch.inference_mode(), HostReads() as reads:
        bool(token == 0)
    assert reads.seen != [], "the counter counts nothing"


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["rejection", "coupled"])
def test_the_same_seed_gives_the_same_tokens_and_another_seed_others(sampler: str) -> None:
    logits, q_logits = table(64, 6, VOCAB, seed=70), table(64, 5, VOCAB, seed=71)

    def run(seed: int) -> list[list[int]]:
        torch.rand(3)  # the global generator is not used
        chosen, out = make_sampler(Sampling(sampler=sampler), seed=seed), []
        for i in range(64):
            drawn = [chosen.draw(q_logits[i, j : j + 1], 6 * i + j) for j in range(5)]
            q = concatenate([q for _, q in drawn]) if drawn[0][1] is not None else None
            verified = chosen.verify(logits[i], 6 * i, torch.cat([token for token, _ in drawn]), q)
            out.append(verified.tokens[: verified.accepted + 1].tolist())
        return out

    assert run(5) == run(5)
    assert run(5) != run(6)
    assert run(2**62) != run(2**62 + 2**33)


def test_the_sampler_is_the_one_that_the_settings_name() -> None:
    assert type(make_sampler(Sampling(0), seed=1)) is Greedy
    assert type(make_sampler(Sampling(top_p=0, sampler="coupled"), seed=1)) is Greedy
    assert type(make_sampler(Sampling(), seed=1)) is Rejection
    assert type(make_sampler(Sampling(sampler="coupled"), seed=1)) is Coupled
    assert chi_square(torch.tensor([0, 1] * 50), torch.tensor([0.5, 0.5])) == 1
