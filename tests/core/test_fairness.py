"""Who gets how much of an overloaded fleet: tenants alike, however much they ask for, with and without late binding."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import inf
from random import Random

import pytest

from gateway.core.admission import Admitted, Release, Shed, Ticket
from gateway.core.flight import Flight
from gateway.core.model import Outcome, ReplicaId, RouteRequest
from tests.core.fleet import BLOCK_TOKENS, Fleet, ask, text

RATE = 10_000.0
"""Tokens a second that a replica prefills, one prompt after the other."""
DECODE_SECONDS = 1.0
REPLICAS = 2
WARM_UP_SECONDS = 20.0


@dataclass
class Demand:
    """What one tenant asks for."""

    rate: float
    blocks: tuple[int, ...] = (40,)
    """Sizes of its prompts, in turn: forty blocks are half a second of prefill."""
    priority: int = 0
    served: int = 0
    offered: int = 0
    prefill_seconds: float = 0.0
    """Engine time that it got."""
    waits: list[float] = field(default_factory=list)


class Overload:
    """Virtual time over a real router: replicas prefill one by one, and shed tickets are gone."""

    def __init__(self, demands: dict[str, Demand], *, hold: bool, waiting: int = 60, wait_seconds: int = 60) -> None:
        limits = {"max_in_flight": 64 if hold else 6, "max_waiting": waiting, "max_wait_seconds": wait_seconds}
        self.fleet = Fleet(REPLICAS, hold=hold, **limits)
        self.demands = demands
        self.random = Random(5)
        self.events: list[tuple[float, int, str, object]] = []
        self.order = count()
        self.busy_until: dict[ReplicaId, float] = {}
        self.flights: dict[Ticket, Flight] = {}
        self.longest_queue = 0
        self.look_at = inf
        """When the router is to be asked again."""

    def run(self, seconds: float) -> None:
        router = self.fleet.router
        for tenant in self.demands:
            self.at(self.random.random(), "arrive", tenant)
        while self.events and self.events[0][0] < seconds:
            self.fleet.now, _, what, whom = heappop(self.events)
            if what == "arrive":
                self.arrive(str(whom))
            elif what == "first token":
                assert isinstance(whom, Ticket)
                self.flights[whom].first_token(self.fleet.now)
                self.at(self.fleet.now + DECODE_SECONDS, "end", whom)
            elif what == "end":
                assert isinstance(whom, Ticket)
                self.end(whom)
            elif self.fleet.now == self.look_at:
                self.look_at = inf
            self.longest_queue = max(self.longest_queue, router.statistics(self.fleet.now).waiting)
            self.go_on(router.release(self.fleet.now))

    def at(self, time: float, what: str, whom: object) -> None:
        heappush(self.events, (time, next(self.order), what, whom))

    def arrive(self, tenant: str) -> None:
        demand, now = self.demands[tenant], self.fleet.now
        self.at(now + self.random.expovariate(demand.rate), "arrive", tenant)
        blocks = demand.blocks[demand.offered % len(demand.blocks)]
        demand.offered += now > WARM_UP_SECONDS
        prompt = ask(text(self.random, blocks), tenant=tenant, priority=demand.priority)
        answer = self.fleet.router.admit(prompt, now)
        if isinstance(answer, Admitted):
            self.send(answer.ticket)
        elif isinstance(answer, Shed):
            answer.leave(now)

    def go_on(self, release: Release) -> None:
        for ticket in release.ready:
            self.send(ticket)
        for ticket in release.shed:
            ticket.leave(self.fleet.now)
        if release.again_at is not None and release.again_at < self.look_at:
            self.look_at = max(release.again_at, self.fleet.now)
            self.at(self.look_at, "look", None)

    def send(self, ticket: Ticket) -> None:
        now = self.fleet.now
        flight = ticket.take_flight() or self.fleet.send(ticket.request)
        self.flights[ticket] = flight
        seconds = tokens(ticket.request) / RATE
        first_token_at = max(now, self.busy_until.get(flight.replica, 0.0)) + seconds
        self.busy_until[flight.replica] = first_token_at
        self.at(first_token_at, "first token", ticket)
        if now > WARM_UP_SECONDS:
            self.demands[ticket.request.tenant].waits.append(now - ticket.arrived_at)

    def end(self, ticket: Ticket) -> None:
        self.flights.pop(ticket).finish(Outcome.COMPLETED, self.fleet.now)
        ticket.leave(self.fleet.now)
        if self.fleet.now > WARM_UP_SECONDS:
            demand = self.demands[ticket.request.tenant]
            demand.served += 1
            demand.prefill_seconds += tokens(ticket.request) / RATE


def tokens(request: RouteRequest) -> float:
    return request.length / 512 * BLOCK_TOKENS


def jain(shares: Iterable[float]) -> float:
    """1 where all have the same, 1/n where one has all."""
    values = list(shares)
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))


@pytest.mark.parametrize("hold", [True, False])
def test_tenants_that_ask_for_too_much_get_alike(hold: bool) -> None:
    demands = {"greedy": Demand(20.0), **{name: Demand(1.5) for name in "abcd"}}  # four a second is all there is
    Overload(demands, hold=hold).run(220.0)
    assert jain(demand.served for demand in demands.values()) >= 0.95
    assert sum(demand.served for demand in demands.values()) >= 0.9 * 200 * REPLICAS * RATE / (40 * BLOCK_TOKENS)


@pytest.mark.parametrize("hold", [True, False])
def test_a_tenant_that_asks_for_less_than_its_share_gets_all_of_it_and_soon(hold: bool) -> None:
    demands = {"modest": Demand(0.3), "greedy": Demand(20.0), "other": Demand(5.0)}
    Overload(demands, hold=hold).run(220.0)
    modest = demands["modest"]
    assert modest.served >= 0.9 * modest.offered
    assert sorted(modest.waits)[int(0.9 * len(modest.waits))] < 2.5
    assert jain(demands[name].served for name in ("greedy", "other")) >= 0.95


def test_higher_priority_is_served_before_all_others_and_the_others_share_the_rest() -> None:
    demands = {"urgent": Demand(1.0, priority=5), "a": Demand(10.0), "b": Demand(3.0)}
    Overload(demands, hold=True).run(220.0)
    assert demands["urgent"].served >= 0.95 * demands["urgent"].offered
    assert jain(demands[name].served for name in "ab") >= 0.95


def test_turns_are_by_requests_in_flight_so_long_prompts_get_fewer_turns() -> None:
    demands = {"short": Demand(20.0, (10,)), "long": Demand(5.0, (80,)), "mixed": Demand(10.0, (10, 80))}
    Overload(demands, hold=False).run(320.0)
    assert all(demand.served for demand in demands.values())
    assert demands["short"].served >= demands["mixed"].served >= demands["long"].served


@pytest.mark.parametrize("hold", [True, False])
def test_the_queue_never_exceeds_its_places_and_nobody_waits_longer_than_allowed(hold: bool) -> None:
    demands = {"a": Demand(50.0), "b": Demand(50.0)}
    overload = Overload(demands, hold=hold, waiting=30, wait_seconds=5)
    overload.run(60.0)
    assert overload.longest_queue == 30
    assert max(wait for demand in demands.values() for wait in demand.waits) <= 5.0
