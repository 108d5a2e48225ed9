"""Rates are learned from what was seen, and no single sight can spoil them."""

from __future__ import annotations

from random import Random

import pytest

from gateway.core.model import Space
from gateway.core.rates import MAX_MODELS, BytesPerToken, PrefillRate, PrefillRates


def observe(rate: PrefillRate, speed: float, random: Random, times: int, noise: float = 0.1) -> None:
    for _ in range(times):
        tokens = random.uniform(1_000, 20_000)
        rate.learn_flight(tokens, 0.0, 0.015 + tokens / speed * random.uniform(1 - noise, 1 + noise))


def test_the_prefill_rate_is_found_from_a_bad_seed() -> None:
    rate = PrefillRates().add(10_000.0)
    observe(rate, 40_000.0, Random(1), 30)
    assert rate.value == pytest.approx(40_000, rel=0.15)


def test_waiting_behind_others_is_not_slowness() -> None:
    rate = PrefillRates().add(10_000.0)
    for _ in range(20):
        rate.learn_flight(2_000, 6_000, 0.8 + 0.015)
    assert rate.value == pytest.approx(10_000, rel=0.05)


def test_small_prompts_and_those_behind_a_long_queue_teach_nothing() -> None:
    rate = PrefillRates().add(10_000.0)
    rate.learn_flight(100, 0, 5.0)
    rate.learn_flight(1_000, 5_000, 60.0)
    rate.learn_flight(1_000, 0, 0.0)
    assert rate.value == 10_000.0


def test_one_absurd_flight_moves_a_settled_rate_little() -> None:
    rate = PrefillRates().add(10_000.0)
    observe(rate, 10_000.0, Random(2), 50)
    rate.learn_flight(10_000, 0, 600.0)
    assert rate.value > 8_000


def test_an_untried_replica_shares_what_its_equals_taught() -> None:
    fleet = PrefillRates()
    tried, untried = fleet.add(10_000.0), fleet.add(10_000.0)
    observe(tried, 30_000.0, Random(3), 20)
    assert untried.value == tried.value == pytest.approx(30_000, rel=0.15)
    assert fleet.add(5_000.0).value == pytest.approx(15_000, rel=0.15)


def test_equal_replicas_become_exactly_equal_and_a_slow_one_does_not() -> None:
    fleet, random = PrefillRates(), Random(4)
    rates = [fleet.add(10_000.0) for _ in range(4)]
    for _ in range(60):
        for rate in rates[:3]:
            observe(rate, 20_000.0, random, 1)
        observe(rates[3], 8_000.0, random, 1)
    assert len({rate.value for rate in rates[:3]}) == 1
    assert rates[0].value == pytest.approx(20_000, rel=0.15)
    assert rates[3].value == pytest.approx(8_000, rel=0.15)
    fleet = PrefillRates()
    rates = [fleet.add(10_000.0) for _ in range(4)]
    for _ in range(60):
        for rate in rates:
            observe(rate, 20_000.0, random, 1)
    assert len({rate.value for rate in rates}) == 1


class TestBytesPerToken:
    def test_is_learned_by_model(self) -> None:
        ratios = BytesPerToken()
        for _ in range(30):
            ratios.learn("dense", Space.TEXT, 20_000, 10_000)
            ratios.learn("sparse", Space.TEXT, 50_000, 10_000)
        assert ratios.of("dense", Space.TEXT) == pytest.approx(2.0, rel=0.02)
        assert ratios.of("sparse", Space.TEXT) == pytest.approx(5.0, rel=0.02)
        assert ratios.of("unseen", Space.TEXT) == 4.0

    @pytest.mark.parametrize("ratio", [1.7, 2.1, 6.8, 9.0])
    def test_the_first_answer_counts_for_more_than_the_guess(self, ratio: float) -> None:
        ratios = BytesPerToken()
        ratios.learn("m", Space.TEXT, int(10_000 * ratio), 10_000)
        assert ratios.of("m", Space.TEXT) == pytest.approx(ratio)

    def test_is_four_for_token_ids_whatever_a_replica_says(self) -> None:
        ratios = BytesPerToken()
        for _ in range(30):
            ratios.learn("m", Space.TOKENS, 40_000, 40_000)
        assert ratios.of("m", Space.TOKENS) == 4.0
        assert ratios.of("m", Space.TEXT) == 4.0

    def test_one_odd_answer_cannot_poison_it_nor_many_leave_the_bounds(self) -> None:
        ratios = BytesPerToken()
        for _ in range(30):
            ratios.learn("m", Space.TEXT, 40_000, 10_000)
        ratios.learn("m", Space.TEXT, 40_000, 10_000_000)
        assert ratios.of("m", Space.TEXT) > 3.6
        for _ in range(500):
            ratios.learn("m", Space.TEXT, 100, 10_000_000)
        assert ratios.of("m", Space.TEXT) == 0.5

    def test_ignores_prompts_that_are_mostly_template_and_nonsense(self) -> None:
        ratios = BytesPerToken()
        for length, tokens in [(4, 63), (0, 1_000), (-1, 1_000), (100, 0), (100, -5)]:
            ratios.learn("m", Space.TEXT, length, tokens)
        assert ratios.of("m", Space.TEXT) == 4.0

    def test_remembers_a_bounded_number_of_models(self) -> None:
        ratios = BytesPerToken()
        for i in range(10 * MAX_MODELS):
            ratios.learn(f"made-up-{i}", Space.TEXT, 30_000, 10_000)
            ratios.learn("real", Space.TEXT, 30_000, 10_000)
        assert len(ratios.statistics()) == MAX_MODELS
        assert ratios.of("real", Space.TEXT) == pytest.approx(3.0, rel=0.05)


def test_a_removed_replica_no_longer_teaches_the_fleet() -> None:
    fleet, random = PrefillRates(), Random(5)
    slow, fast = fleet.add(10_000.0), fleet.add(10_000.0)
    observe(slow, 2_000.0, random, 30)
    fleet.remove(slow)
    observe(fast, 20_000.0, random, 30)
    slow.learn(1.0)  # a last flight that ends after the removal
    assert fleet.add(10_000.0).value == pytest.approx(20_000, rel=0.15)
