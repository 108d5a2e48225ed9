"""Shadow policies see what the live policy saw, are counted exactly, and can do no harm."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from random import Random

import pytest

from gateway.core.model import Cost, Decision, Outcome, ReplicaId, ReplicaView, RouteRequest
from gateway.core.policy import LeastWork, Policy, policy_named
from gateway.core.settings import POLICY_NAMES
from gateway.shadow import Shadows, regret_seconds
from tests.core.fleet import BLOCK_TOKENS, Fleet, ask, text


class Tally:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.same: list[Decision] = []
        self.other: list[tuple[Decision, Decision, float]] = []
        self.failures = 0

    def agreed(self, live: Decision) -> None:
        self.same.append(live)

    def differed(self, live: Decision, shadow: Decision, regret_seconds: float) -> None:
        self.other.append((live, shadow, regret_seconds))

    def failed(self) -> None:
        self.failures += 1


class Broken:
    name = "broken"
    reads_cache = False

    def costs(self, request: RouteRequest, views: Sequence[ReplicaView], draw: int) -> list[Cost]:
        raise KeyError("a bug on trial")


def watch(fleet: Fleet, *policies: Policy) -> list[Tally]:
    tallies = [Tally() for _ in policies]
    fleet.router.before_start = Shadows(fleet.router, list(zip(policies, tallies, strict=True))).compare
    return tallies


def warmed() -> tuple[Fleet, bytes, ReplicaId]:
    """Two replicas, one of which holds a long prompt and still decodes it."""
    fleet = Fleet(2)
    key = text(Random(1), 40)
    flight = fleet.send(ask(key))
    flight.first_token(fleet.now)
    return fleet, key, flight.replica


def test_a_cache_blind_shadow_differs_where_the_prefix_is_and_its_regret_is_the_prefill():
    fleet, key, warm = warmed()
    (tally,) = watch(fleet, policy_named("least-requests"))
    flight = fleet.send(ask(key + text(Random(2), 1)))
    assert flight.replica == warm
    ((live, shadow, regret),) = tally.other
    assert (live.replica, live.cached_tokens) == (warm, 40 * BLOCK_TOKENS)
    assert (shadow.policy, shadow.cached_tokens) == ("least-requests", 0)
    assert shadow.replica != warm
    costs = {view.replica: cost.total for view, cost in live.ranking}
    assert regret == costs[shadow.replica] - costs[warm] > 0.5
    assert not tally.same


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_a_policy_that_shadows_itself_always_agrees(name):
    """Ties and draws included: it is asked before the decision is booked."""
    fleet, random = Fleet(4, policy=name), Random(3)
    (tally,) = watch(fleet, policy_named(name))
    keys = [text(random, random.randrange(1, 30)) for _ in range(20)]
    for number in range(200):
        flight = fleet.send(ask(random.choice(keys)), exclude=fleet.replicas[:1] if number % 10 == 0 else ())
        if random.random() < 0.7:
            fleet.complete(flight, seconds=0.1)
    assert (len(tally.same), len(tally.other), tally.failures) == (200, 0, 0)


def test_a_cache_aware_shadow_of_a_blind_policy_gets_what_it_reads():
    """As if it were live: the same costs as the router's own question gives."""
    fleet, random = Fleet(2, policy="least-work", default_cache_tokens=40 * BLOCK_TOKENS), Random(4)
    (tally,) = watch(fleet, policy_named("cache-cost"))
    for _ in range(12):
        request = ask(text(random, 15))
        asked = fleet.decide(request, policy="cache-cost")
        before = len(tally.other)
        fleet.complete(fleet.send(request), seconds=0.5)
        if len(tally.other) > before:
            assert tally.other[-1][1].ranking == asked.ranking
    assert len(tally.same) + len(tally.other) == 12
    assert any(view.eviction_loss for _, shadow, _ in tally.other for view, _ in shadow.ranking)


def test_a_shadow_chooses_among_those_that_the_live_decision_had_left():
    fleet, key, warm = warmed()
    (tally,) = watch(fleet, policy_named("prefix-only"))
    flight = fleet.send(ask(key), exclude=[warm])
    assert flight.replica != warm
    assert [decision.replica for decision in tally.same] == [flight.replica]


def test_asking_changes_nothing():
    """Two fleets, one with every shadow: the same traffic goes the same way."""
    plain, watched = Fleet(3), Fleet(3)
    watch(watched, *map(policy_named, POLICY_NAMES))
    ways = []
    for fleet in (plain, watched):
        random = Random(5)
        keys = [text(random, random.randrange(1, 30)) for _ in range(10)]
        for _ in range(100):
            flight = fleet.send(ask(random.choice(keys)))
            if random.random() < 0.8:
                fleet.complete(flight, seconds=random.random() / 10)
        ways.append((fleet.sent, fleet.router.statistics(fleet.now)))
    assert ways[0] == ways[1]


def test_a_shadow_that_raises_is_counted_said_once_and_harms_nobody(caplog):
    fleet = Fleet(2)
    broken, sound = watch(fleet, Broken(), LeastWork())
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            fleet.complete(fleet.send(ask(b"x" * 600)), seconds=0.1)
    assert broken.failures == 3
    assert not broken.same
    assert len(sound.same) + len(sound.other) == 3
    (said,) = caplog.records
    assert "broken" in said.getMessage()


def test_regret_is_what_the_live_policy_thinks():
    fleet, key, warm = warmed()
    live = fleet.decide(ask(key))
    for view, cost in live.ranking:
        shadow = Decision(live.request, "x", live.reason, ((view, Cost(9.0, ())),))
        assert regret_seconds(live, shadow) == cost.total - live.ranking[0][1].total >= 0
    assert live.replica == warm


def test_a_flight_that_ends_leaves_no_trace_of_its_shadows():
    fleet = Fleet(2)
    watch(fleet, *map(policy_named, POLICY_NAMES))
    flight = fleet.send(ask(b"y" * 5000))
    flight.finish(Outcome.FAILED, fleet.now)
    assert fleet.router.statistics(fleet.now).in_flight == 0
    assert fleet.router.statistics(fleet.now).index_blocks == 0
