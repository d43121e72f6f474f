"""The choice of k in simulated rounds, compared with the best fixed k, the closed form, and bounds."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from engines import DRAFT, TARGET, place

from litspec.drafters import AdaptiveK, FixedK, SpeculativeK, make_drafter
from litspec.drafters.speculative_k import Acceptance, RoundCosts, expected_tokens
from litspec.engine.costs import modelled

MOST = 7  # the largest k of a block of 8 rows

# How likely the i-th proposal is accepted if those before it were.
PROFILES: dict[str, list[float]] = {
    **{f"{a}": [a] * MOST for a in (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0)},
    "falling": [0.9, 0.8, 0.7, 0.5, 0.3, 0.2, 0.1],
    "rising": [0.5, 0.7, 0.8, 0.9, 0.9, 0.9, 0.9],
}
# Cost of a draft, and of an additional row, relative to a verification of one row.
COSTS = [(0.02, 0.05), (0.05, 0.12), (0.1, 0.0), (0.2, 0.05), (0.4, 0.0)]
STEP_COSTS = [0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8]


def costs(step: float, row: float = 0.0) -> RoundCosts:
    return RoundCosts(tuple(step * k for k in range(MOST + 1)), tuple(1 + row * k for k in range(MOST + 1)))


def adaptive(of: RoundCosts, acceptance: Acceptance | None = None) -> AdaptiveK:
    return AdaptiveK(of, acceptance or Acceptance(MOST))


def tokens_of_round(a: float, k: int) -> float:
    """Leviathan et al. 2023, equation 1."""
    return (1 - a ** (k + 1)) / (1 - a) if a < 1 else k + 1


class Play:
    """A simulated text.

    Attributes:
        tokens, cost: What its rounds brought and took.
        ks: The k of each round.
    """

    def __init__(
        self,
        choice: SpeculativeK,
        profile: Sequence[float] | Callable[[int], float],
        of: RoundCosts,
        *,
        tokens: int = 64,
        seed: int = 0,
    ) -> None:
        rng = random.Random(seed)
        self.tokens, self.cost, self.ks = 0, 0.0, []
        while self.tokens < tokens - 1:  # the first is the prefill's
            k = min(choice.choose(), tokens - 2 - self.tokens)
            accepted = 0
            while accepted < k and rng.random() < (profile(self.tokens) if callable(profile) else profile[accepted]):
                accepted += 1
            self.tokens += accepted + 1
            self.cost += of.draft[k] + of.verify[k]
            self.ks.append(k)
            choice.observe(proposed=k, accepted=accepted)


def speed(make: Callable[[], SpeculativeK], profile: Sequence[float], of: RoundCosts, *, texts: int = 100) -> float:
    """Tokens per cost of many texts of 64 tokens, each with its own `AdaptiveK`."""
    plays = [Play(make(), profile, of, seed=seed) for seed in range(texts)]
    return sum(play.tokens for play in plays) / sum(play.cost for play in plays)


# --- the closed form --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("a", [0.0, 0.3, 0.6, 0.9, 0.99, 1.0])
def test_expected_tokens_are_the_closed_form_for_a_constant_acceptance(a):
    assert expected_tokens([a] * MOST) == pytest.approx([tokens_of_round(a, k) for k in range(MOST + 1)])


@pytest.mark.parametrize("profile", ["falling", "rising"])
def test_expected_tokens_are_those_of_rounds_played_on_paper(profile):
    a, rng = PROFILES[profile], random.Random(0)
    runs = [next((i for i in range(MOST) if rng.random() >= a[i]), MOST) for _ in range(40000)]
    played = [1 + sum(min(run, k) for run in runs) / len(runs) for k in range(MOST + 1)]
    assert expected_tokens(a) == pytest.approx(played, rel=0.02)


@pytest.mark.parametrize("step", [0.1, 0.3])
@pytest.mark.parametrize("a", [0.5, 0.75])
def test_the_k_chosen_is_the_closed_form_optimum(a, step):
    # Told many times that the i-th proposal is accepted a^i of the time, it must name the best k, or its neighbour.
    choice, rng, chosen = adaptive(costs(step)), random.Random(0), []
    for _ in range(3000):
        choice.observe(proposed=MOST, accepted=next((i for i in range(MOST) if rng.random() >= a), MOST))
        chosen.append(choice.choose())
    speeds = [tokens_of_round(a, k) / (1 + step * k) for k in range(MOST + 1)]
    chosen = chosen[100:]
    assert abs(sorted(chosen)[len(chosen) // 2] - speeds.index(max(speeds))) <= 1
    assert sum(speeds[k] for k in chosen) / len(chosen) >= 0.97 * max(speeds)


# --- bounds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", PROFILES)
def test_within_a_text_of_64_tokens_it_comes_within_5_percent_of_the_best_k(profile):
    for step, row in COSTS:
        of = costs(step, row)
        best = max(speed(lambda k=k: FixedK(k), PROFILES[profile], of) for k in range(MOST + 1))
        assert speed(lambda of=of: adaptive(of), PROFILES[profile], of) >= 0.95 * best, (step, row)


@pytest.mark.parametrize("row", [0.0, 0.12])
@pytest.mark.parametrize("step", [*STEP_COSTS, 1.0, 2.0])
def test_a_bad_drafter_costs_at_most_3_percent_over_300_tokens(step, row):
    of = costs(step, row)
    play = Play(adaptive(of), [0.0] * MOST, of, tokens=301)
    assert play.tokens == 300
    assert play.cost / 300 <= 1.03


@pytest.mark.parametrize("step", STEP_COSTS)
def test_a_perfect_drafter_reaches_0_95_of_the_best_fixed_k(step):
    of = costs(step)
    play = Play(adaptive(of), [1.0] * MOST, of, tokens=200)
    assert play.tokens / play.cost >= 0.95 * max((k + 1) / (1 + step * k) for k in range(MOST + 1))


@pytest.mark.parametrize("step", [0.05, 0.1, 0.3, 0.5])
@pytest.mark.parametrize("a", [0.3, 0.6, 0.8, 0.9])
def test_a_long_text_comes_near_the_closed_form_optimum(a, step):
    of = costs(step)
    plays = [Play(adaptive(of), [a] * MOST, of, tokens=2000, seed=seed) for seed in range(3)]
    best = max(tokens_of_round(a, k) / (1 + step * k) for k in range(MOST + 1))
    assert sum(play.tokens for play in plays) / sum(play.cost for play in plays) >= 0.93 * best


def test_a_drafter_that_becomes_good_is_used_again():
    of = costs(0.1)
    # If the single probe is rejected by chance, the next one comes late; this is one case in ten.
    plays = [
        Play(adaptive(of), lambda seen: 0.0 if seen < 200 else 0.9, of, tokens=600, seed=seed) for seed in range(9)
    ]
    assert sorted(sum(k >= 3 for k in play.ks) for play in plays)[2] > 30


def test_a_drafter_that_becomes_bad_is_no_longer_used():
    of = costs(0.1)
    ks = Play(adaptive(of), lambda seen: 0.9 if seen < 200 else 0.0, of, tokens=600).ks
    assert sum(k > 0 for k in ks[-200:]) < 20


def test_probes_become_less_frequent():
    of = costs(0.3)
    ks = Play(adaptive(of), [0.0] * MOST, of, tokens=600).ks
    probes = [i for i, k in enumerate(ks) if k and i > 20]
    gaps = [b - a for a, b in pairwise(probes)]
    assert len(gaps) >= 2 and gaps == sorted(gaps) and gaps[-1] > gaps[0]


def test_a_draft_as_costly_as_a_verification_is_never_tried():
    of = costs(1.0)
    assert set(Play(adaptive(of), [1.0] * MOST, of).ks) == {0}


def test_rounds_with_fewer_proposals_than_k_do_not_bias_the_estimate():
    choice = adaptive(costs(0.1))
    before = choice.speeds()
    for _ in range(50):
        assert 0 <= choice.choose() <= MOST
        choice.observe(proposed=0, accepted=0)
    assert choice.speeds() == before


# --- what it looks at -------------------------------------------------------------------------------------------------


def test_no_clock_is_read(monkeypatch):
    def broken() -> float:
        raise AssertionError("a clock was read")

    of = costs(0.1, 0.05)
    first = Play(adaptive(of), PROFILES["falling"], of, tokens=300).ks
    for name in ("time", "monotonic", "perf_counter", "process_time", "time_ns", "monotonic_ns", "perf_counter_ns"):
        monkeypatch.setattr(time, name, broken)
    assert Play(adaptive(of), PROFILES["falling"], of, tokens=300).ks == first
    assert modelled(place(), make_drafter("draft_model", place()), MOST).total


def carried_over(profile: str, of: RoundCosts) -> list[float]:
    """Tokens per cost of first texts, and of texts that start with the estimate of the previous one."""
    first, later = [], []
    for number in range(60):
        acceptance = Acceptance(MOST)
        for seed in range(4):
            play = Play(adaptive(of, acceptance), PROFILES[profile], of, seed=4 * number + seed)
            (later if seed else first).append(play)
    return [sum(play.tokens for play in plays) / sum(play.cost for play in plays) for plays in (first, later)]


@pytest.mark.parametrize(
    ("profile", "step", "row"), [("0.1", 0.2, 0.05), ("0.3", 0.1, 0.05), ("0.9", 0.4, 0.0), ("falling", 0.02, 0.05)]
)
def test_the_estimate_of_one_text_helps_the_next(profile, step, row):
    # Cases in which the prior leads to a k that is not the best.
    first, later = carried_over(profile, costs(step, row))
    assert later > 1.005 * first


@pytest.mark.parametrize("profile", PROFILES)
def test_the_estimate_of_one_text_costs_the_next_at_most_3_percent(profile):
    for step, row in COSTS:
        first, later = carried_over(profile, costs(step, row))
        assert later > 0.97 * first, (step, row)


def test_a_bad_drafter_is_not_tried_first_in_the_next_text():
    of, acceptance = costs(0.3), Acceptance(MOST)
    Play(adaptive(of, acceptance), [0.0] * MOST, of, tokens=300)
    assert sum(k > 0 for k in Play(adaptive(of, acceptance), [0.0] * MOST, of, tokens=100).ks) <= 1


def test_a_drafter_that_costs_nothing_always_proposes_all_it_can():
    choice = adaptive(RoundCosts((0.0,) * (MOST + 1), (1.0,) * (MOST + 1)))
    for accepted in (0, 3, 0, 0, 0, 0, 0, 0, 0, 0):
        assert choice.choose() == MOST
        choice.observe(proposed=MOST, accepted=accepted)


def test_a_fixed_k_is_fixed():
    choice = FixedK(3)
    for _ in range(3):
        assert choice.choose() == 3
        choice.observe(proposed=3, accepted=0)
    assert (choice.pieces, FixedK(0).pieces) == ((3,), ())


@pytest.mark.parametrize("most", [1, 2, 3, 6, 7, 15])
def test_every_k_that_may_be_chosen_is_a_sum_of_pieces(most):
    flat = RoundCosts((0.0,) * (most + 1), (1.0,) * (most + 1))
    pieces = AdaptiveK(flat, Acceptance(most)).pieces
    sums = {0}
    for _ in range(most):
        sums |= {at + piece for at in sums for piece in pieces}
    assert {*range(most + 1)} <= sums and max(pieces) <= most


# --- costs from models ------------------------------------------------------------------------------------------------


def test_modelled_costs_rise_with_k_and_with_the_layers_that_draft():
    placed = place()
    of = {name: modelled(placed, make_drafter(name, placed), MOST) for name in ("draft_model", "prompt_lookup")}
    exits = [modelled(placed, make_drafter("early_exit", placed, exit_layer=n), MOST) for n in (1, 2)]
    assert of["prompt_lookup"].draft == (0.0,) * (MOST + 1)
    for each in (of["draft_model"], *exits):
        assert each.draft[0] == 0.0 and list(each.draft) == sorted({*each.draft})
        assert each.verify == of["draft_model"].verify
    assert list(each.verify) == sorted(each.verify)
    assert exits[0].draft[1] < exits[1].draft[1]
    # Of the same size as the target and of all its layers, a draft costs what a row of the target does.
    assert DRAFT.config.n_layer == TARGET.config.n_layer
    assert exits[1].draft == of["draft_model"].draft
