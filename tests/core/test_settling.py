"""A replica that came back is given a growing share of the requests (O-09)."""

from __future__ import annotations

from gateway.core.replica import SETTLING_SECONDS
from tests.core.fleet import ANYTHING, Fleet


def returned(in_flight_at_others: int) -> Fleet:
    """Three replicas, the first of which is back from an ejection just now."""
    fleet = Fleet(3, "least-requests")
    first, *others = fleet.replicas
    for _ in range(3):
        fleet.probe(first, ok=False)
    for replica in others:
        for _ in range(in_flight_at_others):
            fleet.send_to(replica, ANYTHING)
    fleet.now += 5.0
    fleet.probe(first)
    return fleet


def seen(fleet: Fleet) -> int:
    return fleet.view(fleet.replicas[0]).in_flight


def test_it_seems_as_busy_as_the_others_at_first_and_as_idle_as_it_is_in_the_end() -> None:
    fleet = returned(40)
    assert seen(fleet) == 40
    fleet.now += SETTLING_SECONDS / 4
    assert seen(fleet) == 30
    fleet.now += SETTLING_SECONDS / 2
    assert seen(fleet) == 10
    fleet.now += SETTLING_SECONDS / 4
    assert seen(fleet) == 0


def test_what_it_gets_counts_too_so_that_not_all_go_there_in_between() -> None:
    fleet = returned(40)
    fleet.now += SETTLING_SECONDS / 2
    first = fleet.replicas[0]
    for _ in range(30):
        fleet.send_to(first, ANYTHING)
    assert seen(fleet) == 50
    assert fleet.decide(ANYTHING).replica != first
