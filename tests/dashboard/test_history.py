"""A quarter of an hour of hit rate and first tokens, from counters that were there before."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.core.model import LoadSnapshot, ReplicaStatistics
from gateway.dashboard.history import POINTS, History, quantile
from gateway.series import TTFT_BOUNDS
from tests.core.fleet import Fleet

QUIET = [0] * (len(TTFT_BOUNDS) + 1)


def replicas(*counters: tuple[int, int] | None) -> list[ReplicaStatistics]:
    """One for each pair of looked up and found tokens; `None`: an engine without such counters."""
    fleet = Fleet(len(counters))
    found = fleet.router.statistics(0.0).replicas
    loads = [
        LoadSnapshot(taken_at=0.0) if pair is None else LoadSnapshot(0.0, prefix_queries=pair[0], prefix_hits=pair[1])
        for pair in counters
    ]
    return [replace(one, load=load) for one, load in zip(found, loads, strict=True)]


def test_a_point_is_what_came_since_the_last_look():
    history = History()
    assert history.look(0.0, replicas((1_000, 900), (50, 0)), QUIET).hit_rate is None, "what was before is not ours"
    assert history.look(5.0, replicas((1_100, 950), (150, 0)), QUIET).hit_rate == 0.25
    assert history.look(10.0, replicas((1_100, 950), (150, 0)), QUIET).hit_rate is None, "no prompt, no rate"
    first, second = (one.replica for one in replicas((0, 0), (0, 0)))
    assert (history.hit_rate(first), history.hit_rate(second)) == (0.5, 0.0)


def test_a_replica_that_began_anew_counts_from_nothing():
    history = History()
    history.look(0.0, replicas((1_000, 900)), QUIET)
    assert history.look(5.0, replicas((200, 50)), QUIET).hit_rate == 0.25


def test_an_engine_without_counters_has_no_rate():
    history = History()
    for at in (0.0, 5.0):
        point = history.look(at, replicas(None, None), QUIET)
    assert point.hit_rate is None
    assert history.hit_rate(replicas(None)[0].replica) is None


def test_old_steps_leave_the_rate_and_gone_replicas_everything():
    history = History()
    history.look(0.0, replicas((0, 0)), QUIET)
    history.look(5.0, replicas((100, 100)), QUIET)
    for step in range(POINTS):
        history.look(10.0 + step, replicas((100, 100)), QUIET)
    replica = replicas((0, 0))[0].replica
    assert history.hit_rate(replica) is None
    assert len(history.points) == POINTS
    history.look(10_000.0, [], QUIET)
    assert history.hit_rate(replica) is None


def test_first_tokens_are_those_of_the_step():
    history = History()
    history.look(0.0, [], [5, *QUIET[1:]])
    point = history.look(5.0, [], [5, 10, *QUIET[2:]])
    assert point.first_tokens == 10
    assert TTFT_BOUNDS[0] < point.ttft_p50 < point.ttft_p90 <= TTFT_BOUNDS[1]


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ([0, 0], 0.5, None),
        ([10, 0], 0.5, TTFT_BOUNDS[0] / 2),
        ([10, 10], 0.5, TTFT_BOUNDS[0]),
        ([0, 10], 0.5, (TTFT_BOUNDS[0] + TTFT_BOUNDS[1]) / 2),
        ([*QUIET[:-1], 3], 0.5, TTFT_BOUNDS[-1]),
    ],
)
def test_a_quantile_lies_between_the_bounds_of_its_bucket(counts, share, expected):
    counts = [*counts, *QUIET[len(counts) :]]
    assert quantile(counts, share) == (expected if expected is None else pytest.approx(expected))
