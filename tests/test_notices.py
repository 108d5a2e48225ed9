"""One line when a replica changes, none when it does not."""

from __future__ import annotations

from dataclasses import replace

from gateway.core.model import HealthState, ReplicaId, ReplicaStatistics
from gateway.core.router import Router
from gateway.core.settings import RoutingSettings
from gateway.notices import MAX_LINES, NONE_UP_SECONDS, Notices
from tests.core.fleet import Fleet

UNKNOWN, UP, EJECTED, ASLEEP = HealthState.UNKNOWN, HealthState.UP, HealthState.EJECTED, HealthState.ASLEEP


def one(name: str, health: HealthState, reason: str = "") -> ReplicaStatistics:
    fleet = Fleet(1)
    return replace(
        fleet.router.statistics(0.0).replicas[0],
        replica=ReplicaId(f"http://{name}"),
        health=health,
        last_failure=reason,
    )


def test_each_change_is_one_line() -> None:
    now: list[ReplicaStatistics] = []
    notices = Notices(lambda: now)
    seen = []
    for states in (
        [one("a", UNKNOWN)],
        [one("a", UP), one("b", UP)],
        [one("a", UP), one("b", UP)],
        [one("a", EJECTED, "HTTP 500"), one("b", ASLEEP)],
        [one("a", UP), one("b", UP)],
        [one("b", EJECTED)],
    ):
        now[:] = states
        seen.append(notices.look())
    assert seen == [
        [],
        ["http://a is up", "http://b is up"],
        [],
        ["http://a gets no requests: HTTP 500", "http://b is asleep"],
        ["http://a is back", "http://b is awake"],
        ["http://b gets no requests: no reason known", "http://a is gone"],
    ]


def test_a_whole_fleet_does_not_flood() -> None:
    fleet = [one(f"r{number}", UP) for number in range(100)]
    lines = Notices(lambda: fleet).look()
    assert len(lines) == MAX_LINES + 1
    assert lines[-1] == "and 80 replicas more have changed"


def test_that_none_is_up_is_said_once_and_not_at_the_start() -> None:
    now: list[ReplicaStatistics] = []
    times = [0.0]
    notices = Notices(lambda: now, lambda: times[-1])
    seen = []
    for time, states in (
        (1000.0, []),  # as long as nobody has joined there is nothing to be up
        (1001.0, [one("a", UNKNOWN), one("b", UNKNOWN)]),
        (1000.0 + NONE_UP_SECONDS - 0.5, [one("a", UNKNOWN), one("b", UNKNOWN)]),
        (1000.0 + NONE_UP_SECONDS, [one("a", UNKNOWN), one("b", UNKNOWN)]),
        (1000.0 + 2 * NONE_UP_SECONDS, [one("a", UNKNOWN), one("b", UNKNOWN)]),
        (2000.0, [one("a", UP), one("b", UNKNOWN)]),
        (2000.0 + NONE_UP_SECONDS, [one("a", EJECTED, "HTTP 500"), one("b", UNKNOWN)]),
    ):
        times.append(time)
        now[:] = states
        seen.append(notices.look())
    none_up = "no replica is up, of 2: requests will fail"
    assert seen == [[], [], [], [none_up], [], ["http://a is up"], ["http://a gets no requests: HTTP 500", none_up]]


def test_it_reads_the_routers_own_statistics() -> None:
    assert Notices(lambda: Router(RoutingSettings()).statistics(0.0).replicas).look() == []
