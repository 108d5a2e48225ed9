"""The simulator, against schedules that can be worked out by hand, and against itself."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gateway.core.settings import POLICY_NAMES, RoutingSettings
from loadtests.simulator import Fleet, Restart, Simulator, Trip
from loadtests.traces import Request, Synthetic, synthetic

SYNTHETIC = Synthetic(requests=400, rate=40.0, groups=3, system_tokens=4096, samples=2, burstiness=4.0)


def run(
    requests: Sequence[Request], fleet: Fleet, policy: str = "cache-cost", seed: int = 0, **routing: float
) -> list[Trip]:
    return Simulator(requests, fleet, RoutingSettings(policy=policy, **routing), seed).run()  # type: ignore[arg-type]


def ttfts(trips: Sequence[Trip]) -> list[float | None]:
    return [None if trip.ttft_seconds is None else round(trip.ttft_seconds, 9) for trip in trips]


def figures(trips: Sequence[Trip]) -> list[tuple[object, ...]]:
    return [(trip.place, trip.cached_tokens, trip.first_token_at, trip.ended_at, trip.shed) for trip in trips]


def test_three_requests_on_one_replica_queue_and_hit_as_computed_by_hand():
    """2,000 tokens take 0.1 s at 20,000/s. The second waits for the first, finds two blocks, and has 976 tokens left.
    The third finds all its three blocks, computes the last one again (512 tokens), and meets the floor of 30 ms."""
    requests = [
        Request(0.0, 2000, 1, (1, 2, 3)),
        Request(0.05, 2000, 1, (1, 2, 9)),
        Request(1.0, 1536, 1, (1, 2, 3)),
    ]
    trips = run(requests, Fleet(replicas=1))
    assert [trip.cached_tokens for trip in trips] == [0, 1024, 1024]
    assert ttfts(trips) == [0.1, round(0.05 + 976 / 20_000, 9), 0.03]


def test_an_answer_takes_one_step_for_each_further_token():
    (trip,) = run([Request(2.0, 2000, 61)], Fleet(replicas=1))
    assert trip.first_token_at == pytest.approx(2.1)
    assert trip.ended_at == pytest.approx(3.1)


def test_the_network_is_crossed_twice():
    (trip,) = run([Request(0.0, 2000, 61)], Fleet(replicas=1, network_delay_seconds=0.02))
    assert trip.ttft_seconds == pytest.approx(0.14)
    assert trip.ended_at == pytest.approx(1.14)


def test_waiting_in_the_gateway_counts():
    """One at a time: the second is let in when the first has ended, at 0.1 s."""
    trips = run([Request(0.0, 2000, 1), Request(0.0, 4000, 1)], Fleet(replicas=2), max_in_flight=1)
    assert ttfts(trips) == [0.1, 0.3]


def test_who_waited_too_long_is_shed():
    trips = run([Request(0.1, 200_000, 1)] + [Request(0.2, 2000, 1)] * 3, Fleet(1), max_in_flight=1, max_wait_seconds=1)
    assert [trip.shed for trip in trips] == [False, True, True, True]
    assert ttfts(trips) == [10.0, None, None, None]


def test_a_deadline_that_rounds_down_is_met_all_the_same():
    """0.13 + 1 - 0.13 is below 1: asked at the very moment that it named, the router must shed."""
    trips = run([Request(0.0, 200_000, 1), Request(0.13, 2000, 1)], Fleet(1), max_in_flight=1, max_wait_seconds=1)
    assert 0.13 + 1 - 0.13 < 1
    assert [trip.shed for trip in trips] == [False, True]


def test_a_full_waiting_room_sheds_at_once():
    trips = run([Request(0.0, 20_000, 1)] * 3, Fleet(1), max_in_flight=1, max_waiting=1)
    assert [trip.shed for trip in trips] == [False, False, True]


def test_a_faster_replica_prefills_faster():
    fleet = Fleet(replicas=2, speeds=(1.0, 4.0))
    trips = run([Request(0.0, 20_000, 1), Request(0.0, 20_000, 1)], fleet, "round-robin")
    assert sorted(ttfts(trips), key=str) == [0.25, 1.0]
    assert fleet.total_prefill_rate == 100_000


def test_a_small_cache_evicts_and_a_large_one_does_not():
    requests = [Request(float(i), 2048, 1, tuple(range(100 * (i % 2), 100 * (i % 2) + 4))) for i in range(6)]
    small, large = (run(requests, Fleet(replicas=1, cache_tokens=tokens)) for tokens in (3072, 8192))
    assert [trip.cached_tokens for trip in large] == [0, 0, 1536, 1536, 1536, 1536]
    assert sum(trip.cached_tokens for trip in small) < sum(trip.cached_tokens for trip in large)


def test_a_prompt_longer_than_the_cache_fails_alone():
    trips = run([Request(0.0, 5000, 1), Request(0.0, 500, 1)], Fleet(replicas=2, cache_tokens=4096))
    assert [trip.failed for trip in trips] == [True, False]


def test_requests_of_a_dead_replica_go_elsewhere_unless_they_had_begun_to_answer():
    requests = [Request(0.0, 2000, 600), Request(1.0, 20_000, 1), Request(5.0, 2000, 1), Request(5.0, 2000, 1)]
    fleet = Fleet(replicas=2, restart=Restart(replica=0, at=1.5, down_seconds=60.0))
    trips = run(requests, fleet, "round-robin")
    lost = [trip for trip in trips if trip.failed]
    moved = [trip for trip in trips if trip.retries]
    assert len(lost) + len(moved) >= 1
    assert all(trip.first_token_at is not None for trip in lost)
    assert all(trip.place == 1 and trip.ended_at is not None for trip in moved)
    assert all(trip.failed or trip.ended_at is not None for trip in trips)


def test_a_replica_comes_back_with_an_empty_cache():
    requests = [Request(float(at), 2048, 1, (1, 2, 3, 4)) for at in (0, 1, 10, 11)]
    trips = run(requests, Fleet(replicas=1, restart=Restart(0, at=5.0, down_seconds=2.0)))
    assert [trip.cached_tokens for trip in trips] == [0, 1536, 0, 1536]
    assert [trip.predicted_tokens for trip in trips] == [0.0, 2048.0, 0.0, 2048.0]


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_seed_gives_one_run(policy: str):
    requests = synthetic(SYNTHETIC, 1).requests
    fleet = Fleet(replicas=3, cache_tokens=50_000, network_delay_seconds=0.005)
    first, again = (figures(run(requests, fleet, policy, seed=5)) for _ in range(2))
    assert first == again


def test_another_seed_breaks_ties_otherwise():
    requests = synthetic(SYNTHETIC, 1).requests
    assert len({str(figures(run(requests, Fleet(replicas=3), "random", seed))) for seed in range(3)}) == 3


@pytest.mark.parametrize("scrape_seconds", [None, 0.1, 2.0])
def test_nobody_is_left_behind(scrape_seconds: float | None):
    requests = synthetic(SYNTHETIC, 2).requests
    fleet = Fleet(replicas=3, cache_tokens=50_000, scrape_seconds=scrape_seconds, restart=Restart(1, 2.0, 3.0))
    simulator = Simulator(requests, fleet, seed=1)
    trips = simulator.run()
    assert len(trips) == len(requests)
    assert all((trip.ended_at is not None) != trip.failed for trip in trips)
    statistics = simulator.router.statistics(simulator.seconds)
    assert (statistics.in_flight, statistics.waiting) == (0, 0)
    assert all(replica.in_flight == 0 and replica.pending_tokens == 0 for replica in statistics.replicas)


def test_the_router_learns_the_prefill_rate():
    simulator = Simulator(synthetic(SYNTHETIC, 1).requests, Fleet(replicas=2))
    simulator.run()
    for replica in simulator.router.statistics(simulator.seconds).replicas:
        assert replica.prefill_rate == pytest.approx(20_000, rel=0.25)
        assert replica.cache_tokens == 1_500_000
