"""The choice of k against the closed-form optimum, and its bounds, on a virtual clock."""

from __future__ import annotations

import random
from itertools import pairwise
from types import SimpleNamespace

import pytest

from litspec.drafters import FixedK, make_speculative_k
from litspec.drafters.speculative_k import AdaptiveK, expected_tokens
from litspec.sampling import Sampling

MOST = 7  # the largest k of a block of 8 rows
STEP_COSTS = [0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8]  # seconds of a draft step over those of a verification


def tokens_of_round(a: float, k: int) -> float:
    """Leviathan et al. 2023, equation 1."""
    return (1 - a ** (k + 1)) / (1 - a) if a < 1 else k + 1


def best_fixed_speed(a: float, step_cost: float) -> float:
    """Tokens per second of the best k, 0 among them."""
    return max(tokens_of_round(a, k) / (1 + step_cost * k) for k in range(MOST + 1))


class Play:
    """A text decoded on paper.

    Attributes:
        speed: Tokens per second, the noise of the clock not counted: the choices are judged and not their luck.
        ks: The k of each round.
    """

    def __init__(
        self,
        choice,
        a,
        step_cost: float,
        *,
        tokens: int = 200,
        noise: float = 0.0,
        outliers: float = 0.0,
        seed: int = 0,
    ) -> None:
        acceptance, clock = random.Random(seed), random.Random(seed + 1)
        seen, seconds, plain, self.ks = 0, 0.0, 0, []
        k = choice.choose()
        while seen < tokens:
            k = min(k, tokens - seen - 1)
            accepted = 0
            while accepted < k and acceptance.random() < (a(seen) if callable(a) else a):
                accepted += 1
            round_seconds = 1 + k * step_cost
            seconds += round_seconds
            shown = round_seconds * clock.lognormvariate(0, noise) * (3 if clock.random() < outliers else 1)
            if k and not any(self.ks):
                shown += 5  # the draft model reads the prompt
            plain = 0 if k else plain + 1
            self.ks.append(k)
            seen += accepted + 1
            choice.observe(proposed=k, accepted=accepted, seconds=shown, limit=k)
            k = choice.choose()
        self.speed = seen / seconds


def choices(step_cost: float) -> list[AdaptiveK]:
    """By counts, and by a clock whose beliefs are right and wrong at first."""
    timed = [AdaptiveK(MOST, wrong * step_cost, timed=True) for wrong in (0.5, 1, 2)]
    return [AdaptiveK(MOST, step_cost, timed=False), *timed]


@pytest.mark.parametrize("a", [0.0, 0.3, 0.6, 0.9, 0.99])
def test_expected_tokens_are_the_closed_form_for_a_constant_acceptance(a):
    assert expected_tokens([a] * MOST) == pytest.approx([tokens_of_round(a, k) for k in range(MOST + 1)])


@pytest.mark.parametrize("step_cost", STEP_COSTS)
def test_a_perfect_drafter_reaches_0_95_of_the_best_fixed_k(step_cost):
    for choice in choices(step_cost):
        assert Play(choice, 1.0, step_cost).speed >= 0.95 * best_fixed_speed(1.0, step_cost)


@pytest.mark.parametrize("step_cost", [*STEP_COSTS, 1.0, 2.0])
def test_a_hopeless_drafter_costs_at_most_5_percent(step_cost):
    for choice in choices(step_cost):
        assert Play(choice, 0.0, step_cost).speed >= 1 / 1.05


@pytest.mark.parametrize("step_cost", STEP_COSTS)
def test_a_noisy_clock_changes_the_bounds_little(step_cost):
    # Rounds that take 4 % more or less, and one in fifty that takes three times as long.
    noise = {"noise": 0.04, "outliers": 0.02}
    for a, least in ((0.0, 1 / 1.05), (1.0, 0.95 * best_fixed_speed(1.0, step_cost))):
        speeds = [
            Play(AdaptiveK(MOST, step_cost, timed=True), a, step_cost, seed=seed, **noise).speed for seed in range(20)
        ]
        assert sum(speeds) / len(speeds) >= least
        assert min(speeds) >= 0.95 * least


@pytest.mark.parametrize("step_cost", [0.05, 0.1, 0.3, 0.5])
@pytest.mark.parametrize("a", [0.3, 0.6, 0.8, 0.9])
def test_a_long_text_comes_near_the_closed_form_optimum(a, step_cost):
    for timed in (False, True):
        speeds = [
            Play(AdaptiveK(MOST, step_cost, timed=timed), a, step_cost, tokens=2000, seed=seed).speed
            for seed in range(3)
        ]
        assert sum(speeds) / 3 >= 0.93 * best_fixed_speed(a, step_cost)


@pytest.mark.parametrize("step_cost", [0.1, 0.3])
@pytest.mark.parametrize("a", [0.5, 0.75])
def test_the_k_chosen_is_the_closed_form_optimum(a, step_cost):
    # Told that the i-th proposal is accepted a^i of the time, exactly, it must name the best k.
    choice = AdaptiveK(MOST, step_cost, timed=False)
    rng = random.Random(0)
    chosen = []
    for _ in range(3000):
        accepted = next((i for i in range(MOST) if rng.random() >= a), MOST)
        choice.observe(proposed=MOST, accepted=accepted, seconds=0.0, limit=MOST)
        chosen.append(choice.choose())
    speed = [tokens_of_round(a, k) / (1 + step_cost * k) for k in range(MOST + 1)]
    best = speed.index(max(speed))
    assert abs(sorted(chosen[100:])[len(chosen[100:]) // 2] - best) <= 1
    assert sum(speed[k] for k in chosen[100:]) / len(chosen[100:]) >= 0.97 * max(speed)


def test_a_drafter_that_grows_good_is_found_out():
    for choice in choices(0.1):
        ks = Play(choice, lambda seen: 0.0 if seen < 200 else 0.9, 0.1, tokens=600).ks
        assert sum(k >= 3 for k in ks) > 30


def test_a_drafter_that_grows_hopeless_is_left():
    for choice in choices(0.1):
        ks = Play(choice, lambda seen: 0.9 if seen < 200 else 0.0, 0.1, tokens=600).ks
        assert sum(k > 0 for k in ks[-200:]) < 20


def test_probes_come_ever_more_seldom():
    ks = Play(AdaptiveK(MOST, 0.3, timed=False), 0.0, 0.3, tokens=600).ks
    probes = [i for i, k in enumerate(ks) if k and i > 20]
    gaps = [b - a for a, b in pairwise(probes)]
    assert len(gaps) >= 2 and gaps == sorted(gaps) and gaps[-1] > gaps[0]


def test_a_step_as_costly_as_a_verification_is_never_tried_by_counts_alone():
    assert set(Play(AdaptiveK(MOST, 1.0, timed=False), 1.0, 1.0).ks) == {0}


def test_without_a_clock_seconds_change_nothing():
    plays = [
        Play(AdaptiveK(MOST, 0.1, timed=False), 0.6, 0.1, noise=noise, outliers=noise, seed=3).ks
        for noise in (0.0, 0.5)
    ]
    assert plays[0] == plays[1]


def test_rounds_that_are_cut_short_by_the_drafter_do_no_harm():
    choice = AdaptiveK(MOST, 0.1, timed=True)
    for _ in range(50):
        assert 0 <= choice.choose() <= MOST
        choice.observe(proposed=0, accepted=0, seconds=1.0, limit=choice.choose())


def placed() -> SimpleNamespace:
    from test_drafters import gpt

    return SimpleNamespace(model=gpt(), verify_width=8)


def drafter(step_bytes: int, max_k: int = 7) -> SimpleNamespace:
    return SimpleNamespace(step_bytes=step_bytes, max_k=max_k)


def test_a_fixed_k_stays_below_what_drafter_and_target_can():
    for k, max_k, expected in ((3, 7, 3), (12, 7, 7), (5, 2, 2)):
        choice = make_speculative_k(k, placed(), drafter(100, max_k), Sampling())
        assert isinstance(choice, FixedK) and choice.choose() == expected
    assert make_speculative_k("auto", placed(), None, Sampling()).choose() == 0


def test_a_drafter_that_costs_nothing_always_proposes_all_it_can():
    choice = make_speculative_k("auto", placed(), drafter(0), Sampling())
    for _ in range(20):
        assert choice.choose() == 7
        choice.observe(proposed=7, accepted=0, seconds=1.0, limit=7)


@pytest.mark.parametrize(
    ("sampling", "timed"),
    [
        (Sampling(temperature=0), True),
        (Sampling(top_p=0), True),
        (Sampling(sampler="coupled"), True),
        (Sampling(), False),
    ],
)
def test_a_clock_is_looked_at_only_where_no_token_depends_on_k(sampling, timed):
    a, b = (make_speculative_k("auto", placed(), drafter(1000), sampling) for _ in range(2))
    for i in range(30):
        a.observe(proposed=4, accepted=1, seconds=1.0, limit=4)
        b.observe(proposed=4, accepted=1, seconds=1.0 + i % 5, limit=4)
        a.observe(proposed=0, accepted=0, seconds=1.0, limit=0)
        b.observe(proposed=0, accepted=0, seconds=0.1, limit=0)
    assert (a.speeds() != b.speeds()) == timed
