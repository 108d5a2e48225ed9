"""Whatever happens in whatever order: what was booked is given back, and the index never has a hole."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.admission import Admitted, Ticket
from gateway.core.flight import Flight
from gateway.core.model import (
    CacheCleared,
    CacheSized,
    DrainRequested,
    Fact,
    LoadReported,
    LoadSnapshot,
    ModelsListed,
    Outcome,
    ProbeAnswered,
    ReplicaAdded,
    ReplicaId,
    ReplicaRemoved,
    RouteRequest,
    RoutingError,
    Usage,
)
from gateway.core.settings import POLICY_NAMES
from tests.core.fleet import Fleet, ask, text

TEXT = text(Random(0), 12)


class Walk:
    """A fleet, flights under way, and a die."""

    def __init__(self, seed: int, policy: str) -> None:
        self.random = Random(seed)
        self.fleet = Fleet(3, policy, default_cache_tokens=20 * 128)
        self.flights: list[Flight] = []
        self.tickets: list[Ticket] = []
        """Of those who went through the door and have not left."""

    def step(self) -> None:
        self.fleet.now += self.random.expovariate(5.0)
        steps = [self.start, self.knock, self.knock, self.release, self.leave, self.first_token, self.finish]
        self.random.choice([*steps, self.observe])()

    def request(self) -> RouteRequest:
        random = self.random
        cut = random.randrange(len(TEXT))
        key = TEXT[:cut] + text(random, random.choice((0, 0, 1, 8, 200)))
        return ask(key, session=str(cut % 5), tenant=random.choice("ab"), streams=random.random() < 0.7)

    def start(self) -> None:
        try:
            self.flights.append(self.fleet.send(self.request()))
        except RoutingError:
            return

    def knock(self) -> None:
        answer = self.fleet.router.admit(self.request(), self.fleet.now)
        self.tickets.append(answer.ticket)
        if isinstance(answer, Admitted):
            self.let_in(answer.ticket)

    def release(self) -> None:
        answer = self.fleet.router.release(self.fleet.now)
        assert answer.again_at is None or answer.again_at > self.fleet.now
        for ticket in answer.ready:
            self.let_in(ticket)

    def let_in(self, ticket: Ticket) -> None:
        if self.random.random() < 0.2 or ticket not in self.tickets:
            ticket.leave(self.fleet.now)  # the client has gone meanwhile
        elif (flight := ticket.take_flight()) is not None:
            self.flights.append(flight)

    def leave(self) -> None:
        if self.tickets:
            self.tickets.pop(self.random.randrange(len(self.tickets))).leave(self.fleet.now)

    def first_token(self) -> None:
        if self.flights:
            self.random.choice(self.flights).first_token(self.fleet.now)

    def finish(self) -> None:
        if not self.flights:
            return
        flight = self.flights.pop(self.random.randrange(len(self.flights)))
        usage = Usage(self.random.choice((None, 0, 900)), self.random.choice((None, 0, 128)), 5)
        flight.finish(self.random.choice(list(Outcome)), self.fleet.now, self.random.choice((None, usage)))

    def observe(self) -> None:
        random, now = self.random, self.fleet.now
        replica = ReplicaId(f"http://r{random.randrange(4)}:8000")
        snapshot = LoadSnapshot(
            now - random.random(),
            running=random.choice((None, 0, 5)),
            waiting=random.choice((None, 3)),
            kv_usage=random.choice((None, 0.0, 1.0)),
            prefix_queries=random.choice((None, 10, 20)),
            cache_tokens=random.choice((None, 0, 900, 5_000)),
            started_at=random.choice((None, 1.0, 1.0, 1.0, 2.0)),
            asleep=random.choice((None, None, False, False, True)),
        )
        facts: list[Fact] = [
            ReplicaAdded(replica, random.choice((None, 5_000.0))),
            ReplicaRemoved(replica),
            DrainRequested(replica, random.random() < 0.3),
            ModelsListed(replica, ()),
            CacheCleared(replica),
            CacheSized(replica, random.randrange(10_000)),
            ProbeAnswered(replica, random.random() < 0.6, "timeout"),
            ProbeAnswered(replica, random.random() < 0.6, "timeout"),
            LoadReported(replica, snapshot),
            LoadReported(replica, snapshot),
        ]
        self.fleet.router.observe(random.choice(facts), now)

    def check(self) -> None:
        router = self.fleet.router
        statistics = router.statistics(self.fleet.now)
        assert statistics.in_flight == len(self.flights)
        copies: dict[int, int] = {}
        for replica in router._replicas.values():
            mine = [flight for flight in self.flights if flight.to is replica]
            load = replica.load
            assert load.in_flight == len(mine)
            assert load.in_flight_tokens == pytest.approx(sum(flight._booking.prompt_tokens for flight in mine))
            assert load.queued_tokens(self.fleet.now, replica.rate.value) >= 0
            assert len(replica.index) <= replica.index.capacity
            live = [record for record in replica.index.records.values() if record.live]
            assert replica.index.live == sum(record.end - record.begin for record in live)
            assert {id(record) for record in live} <= {id(flight.record) for flight in mine}
            held = [block for record in replica.index.records.values() for block in record.run]
            assert len(held) == len(set(held)) == len(replica.index)
            for block in held:
                copies[block] = copies.get(block, 0) + 1
            found = [block in held for block in ask(TEXT).blocks]
            assert found == sorted(found, reverse=True), "a hole"
            assert replica.index.match(ask(TEXT).blocks) == sum(found)
        assert router._index.extra_copies == {block: count - 1 for block, count in copies.items() if count > 1}

    def end(self) -> None:
        while self.tickets:
            self.leave()
        while self.flights:
            self.finish()
        assert self.fleet.router.statistics(self.fleet.now).waiting == 0
        for replica in self.fleet.router.statistics(self.fleet.now).replicas:
            assert (replica.in_flight, replica.in_flight_tokens) == (0, 0.0)
        for one in self.fleet.router._replicas.values():
            assert one.load.queued_tokens(self.fleet.now, 1.0) == 0.0


@settings(max_examples=60)
@given(st.integers(0, 1 << 32), st.sampled_from(POLICY_NAMES))
def test_a_random_walk_leaves_no_load_behind(seed: int, policy: str) -> None:
    walk = Walk(seed, policy)
    for _ in range(120):
        walk.step()
        walk.check()
    walk.end()
