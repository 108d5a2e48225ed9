"""Errors that a client causes take nobody out, or few; those of one replica take it out."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from gateway.core.model import HealthState, Outcome, ReplicaId, RouteRequest
from tests.core.fleet import Fleet, ask, text

Errs = Callable[[ReplicaId], bool]
"""Whether a request that a replica got ends as an error."""


def out(fleet: Fleet) -> int:
    return sum(one.health is HealthState.EJECTED for one in fleet.router.statistics(fleet.now).replicas)


def run(fleet: Fleet, seconds: float, errs: Errs, rate: int = 200) -> list[int]:
    """So many requests a second, each ended at once, probes as a gateway sends them; how many were out at each."""
    found, began = [], fleet.now
    for step in range(int(seconds * rate)):
        fleet.now = began + step / rate
        if step % rate == 0:
            for replica in fleet.replicas:
                fleet.probe(replica)
        flight = fleet.send(RouteRequest())
        flight.answered = True
        flight.finish(Outcome.FAILED if errs(flight.replica) else Outcome.COMPLETED, fleet.now)
        found.append(out(fleet))
    return found


@pytest.mark.parametrize("poison", [0.02, 0.1, 0.2, 0.35, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("count", [2, 3, 8])
def test_requests_that_fail_everywhere_take_nobody_out(count: int, poison: float) -> None:
    """They are any share of the traffic and go to whoever is next. Chance takes one out now and then, not two."""
    random, fleet = Random(count), Fleet(count, "round-robin")
    found = run(fleet, 60.0, lambda _: random.random() < poison)
    assert max(found) <= 1 or (count == 8 and max(found) == 2)
    assert sum(found) / len(found) / count <= 0.05


@pytest.mark.parametrize("count", [2, 3, 4, 6, 8])
def test_who_aims_takes_out_a_third_at_most(count: int) -> None:
    """All requests that fail go to one replica, and to the next once it is out."""
    random, fleet = Random(1), Fleet(count, "round-robin")

    def errs(replica: ReplicaId) -> bool:
        up = [one.replica for one in fleet.router.statistics(fleet.now).replicas if one.health is HealthState.UP]
        return replica == up[0] and random.random() < 0.9

    found = run(fleet, 60.0, errs)
    assert max(found) == max(1, count // 3)


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("background", [0.0, 0.05])
@pytest.mark.parametrize("count", [2, 3, 8])
def test_one_whose_answers_are_errors_goes(count: int, background: float, share: float) -> None:
    """Within a second, and its share falls below a tenth of the traffic, whatever other clients do meanwhile."""
    random, fleet = Random(count), Fleet(count, "round-robin")
    bad = fleet.replicas[0]

    def errs(replica: ReplicaId) -> bool:
        return random.random() < (share if replica == bad else background)

    run(fleet, 1.0, lambda _: random.random() < background)
    assert 1 in run(fleet, 2.0, errs)
    assert fleet.statistics(bad).last_failure == "answered with errors"
    run(fleet, 8.0, errs)
    fleet.sent.clear()
    run(fleet, 20.0, errs)
    assert fleet.sent[bad] / sum(fleet.sent.values()) <= 0.1


def test_strangers_that_fail_count_for_nothing_while_what_is_known_is_answered() -> None:
    """All that is new goes to one replica, which has least to do, and fails; its own chats go on."""
    random, fleet = Random(1), Fleet(3)
    idle = fleet.replicas[0]
    chat = text(random, 4)
    fleet.complete(fleet.send_to(idle, ask(chat)))

    def fails(key: bytes) -> None:
        flight = fleet.send_to(idle, ask(key))
        flight.answered = True
        flight.finish(Outcome.FAILED, fleet.now)

    for _ in range(100):
        fleet.complete(fleet.send_to(idle, ask(chat + text(random, 1))))
        for _ in range(10):
            fails(text(random, 3))
    assert fleet.statistics(idle).health is HealthState.UP
    for _ in range(60):
        fails(text(random, 3))
    assert fleet.statistics(idle).health is HealthState.EJECTED, "nothing shows any more that it can answer"


def test_known_prompts_that_fail_count_at_once() -> None:
    random, fleet = Random(1), Fleet(3)
    sick = fleet.replicas[0]
    chat = text(random, 4)
    fleet.complete(fleet.send_to(sick, ask(chat)))
    for _ in range(12):
        flight = fleet.send_to(sick, ask(chat + text(random, 1)))
        flight.answered = True
        flight.finish(Outcome.FAILED, fleet.now)
    assert fleet.statistics(sick).health is HealthState.EJECTED


def test_it_is_back_when_it_answers_well_again() -> None:
    random, fleet = Random(1), Fleet(3, "round-robin")
    bad = fleet.replicas[0]
    run(fleet, 1.0, lambda replica: replica == bad and random.random() < 0.5)
    assert fleet.statistics(bad).health is HealthState.EJECTED
    assert run(fleet, 10.0, lambda _: False)[-1] == 0


def test_two_of_six_go_both() -> None:
    random, fleet = Random(1), Fleet(6, "round-robin")
    bad = fleet.replicas[:2]
    found = run(fleet, 10.0, lambda replica: replica in bad and random.random() < 0.5)
    assert max(found) == 2


def test_who_has_no_like_stays() -> None:
    """Alone, or alone with its model: there is nobody to compare it with, and nobody to send its requests to."""
    for others in ([], ["other"]):
        fleet = Fleet(1 + len(others), "round-robin")
        fleet.lists(fleet.replicas[0], "m")
        for replica, model in zip(fleet.replicas[1:], others, strict=True):
            fleet.lists(replica, model)
        for _ in range(50):
            flight = fleet.send(RouteRequest(model="m"))
            flight.answered = True
            flight.finish(Outcome.FAILED, fleet.now)
        assert fleet.statistics(fleet.replicas[0]).health is HealthState.UP


def test_an_error_after_the_ejection_of_what_began_before_says_nothing_new() -> None:
    fleet = Fleet(2)
    bad = fleet.replicas[0]
    early = [fleet.send_to(bad, RouteRequest()) for _ in range(30)]
    for flight in early:
        flight.answered = True
    fleet.now += 0.5
    for flight in early[:20]:
        flight.finish(Outcome.FAILED, fleet.now)
    assert fleet.statistics(bad).health is HealthState.EJECTED
    fleet.now += 1.2
    for flight in early[20:]:
        flight.finish(Outcome.FAILED, fleet.now)
    fleet.probe(bad)
    assert fleet.statistics(bad).health is HealthState.UP


def test_connections_that_are_lost_need_no_comparison() -> None:
    fleet = Fleet(3)
    for replica in fleet.replicas[:2]:
        for _ in range(3):
            fleet.send_to(replica, RouteRequest()).finish(Outcome.FAILED, fleet.now)
    assert out(fleet) == 2
