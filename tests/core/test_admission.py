"""The door lets in, makes wait and turns away by rules that anybody can check."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.admission import Admission, Admitted, Shed, ShedReason, Ticket, TicketState, Waiting
from gateway.core.model import RouteRequest


def ask(tenant: str = "", priority: int = 0) -> RouteRequest:
    return RouteRequest(tenant=tenant, priority=priority)


def full_house(places: int = 1, waiting: int = 100, seconds: float = 60.0) -> tuple[Admission, list[Ticket]]:
    """A door whose places are all taken by a tenant that nobody else is."""
    door = Admission(places, waiting, seconds)
    return door, [admitted(door, ask("first")) for _ in range(places)]


def admitted(door: Admission, request: RouteRequest, now: float = 0.0) -> Ticket:
    answer = door.admit(request, 0.1, now)
    assert isinstance(answer, Admitted)
    return answer.ticket


def waiting(door: Admission, request: RouteRequest, prefill: float = 0.1, now: float = 0.0) -> Ticket:
    answer = door.admit(request, prefill, now)
    assert isinstance(answer, Waiting)
    return answer.ticket


def served_in_turn(door: Admission, inside: list[Ticket], now: float = 1.0) -> list[Ticket]:
    """Each leaves, the next comes in, until nobody waits."""
    order: list[Ticket] = []
    while inside:
        inside.pop(0).leave(now)
        ready = door.release(now).ready
        order += ready
        inside += ready
    return order


def test_lets_in_as_many_as_there_are_places_and_the_rest_wait_or_are_shed() -> None:
    door = Admission(2, 3, 60.0)
    answers = [door.admit(ask(), 0.1, 0.0) for _ in range(7)]
    assert [type(answer) for answer in answers] == [Admitted] * 2 + [Waiting] * 3 + [Shed] * 2
    shed = answers[-1]
    assert isinstance(shed, Shed)
    assert 1.0 <= shed.retry_after <= 60.0
    assert shed.ticket.shed_reason is ShedReason.FULL
    assert (door.in_flight, door.waiting) == (2, 3)


def test_nobody_overtakes_those_who_wait_by_arriving_at_a_free_place() -> None:
    door, inside = full_house()
    first = waiting(door, ask())
    inside[0].leave(1.0)
    second = waiting(door, ask(), now=1.0)
    assert door.release(1.0).ready == [first]
    first.leave(2.0)
    assert door.release(2.0).ready == [second]


@pytest.mark.parametrize("answer", [Admitted, Waiting, Shed])
def test_leaving_twice_changes_nothing(answer: type) -> None:
    door, _ = full_house(places=1, waiting=1)
    if answer is Admitted:
        door = Admission(1, 1, 60.0)
    if answer is Shed:
        waiting(door, ask())
    got = door.admit(ask(), 0.1, 0.0)
    assert type(got) is answer
    got.leave(1.0)
    counts = (door.in_flight, door.waiting)
    got.leave(1.0)
    got.ticket.leave(2.0)
    assert (door.in_flight, door.waiting) == counts
    assert got.ticket.state is TicketState.LEFT


def test_higher_priority_goes_first() -> None:
    door, inside = full_house()
    tickets = {priority: waiting(door, ask(priority=priority)) for priority in (0, -5, 7, 3)}
    assert served_in_turn(door, inside) == [tickets[7], tickets[3], tickets[0], tickets[-5]]


def test_a_tenant_with_many_waiting_does_not_delay_one_with_few() -> None:
    door, inside = full_house(places=2)
    for _ in range(50):
        waiting(door, ask("greedy"))
    modest = [waiting(door, ask("modest")) for _ in range(5)]
    order = served_in_turn(door, inside)
    assert max(order.index(ticket) for ticket in modest) <= 10


def test_the_tenant_with_the_fewest_in_flight_goes_next() -> None:
    door = Admission(3, 100, 60.0)
    inside = [admitted(door, ask("a")), admitted(door, ask("a")), admitted(door, ask("b"))]
    a, b, c = (waiting(door, ask(tenant)) for tenant in "abc")
    inside[0].leave(1.0)  # now one of each of a and b, none of c
    assert door.release(1.0).ready == [c]
    inside[2].leave(1.0)  # one of a, none of b, one of c
    assert door.release(1.0).ready == [b]
    inside[1].leave(1.0)
    assert door.release(1.0).ready == [a]


def test_short_requests_go_before_long_ones_until_those_have_waited_enough() -> None:
    door, inside = full_house(seconds=1_000.0)
    long = waiting(door, ask(), prefill=8.0, now=0.0)
    short = waiting(door, ask(), prefill=0.1, now=1.0)
    inside[0].leave(2.0)
    assert door.release(2.0).ready == [short]  # 11 against 1.25
    late = waiting(door, ask(), prefill=0.1, now=100.0)
    short.leave(100.1)
    assert door.release(100.1).ready == [long]  # 13.5 against 2
    long.leave(101.0)
    assert door.release(101.0).ready == [late]


def test_who_waited_too_long_is_shed_and_told_when_to_come_back() -> None:
    door, _ = full_house(seconds=10.0)
    early, late = waiting(door, ask(), now=0.0), waiting(door, ask(), now=4.0)
    release = door.release(5.0)
    assert (release.ready, release.shed, release.again_at) == ([], [], 10.0)
    release = door.release(10.0)
    assert (release.shed, release.again_at) == ([early], 14.0)
    assert early.state is TicketState.SHED
    assert early.retry_after is not None
    assert early.shed_reason is ShedReason.OVERDUE
    early.leave(10.0)
    assert door.waiting == 1
    late.leave(11.0)
    assert door.release(11.0).again_at is None


def test_a_client_that_leaves_while_it_waits_gives_up_its_place() -> None:
    door, inside = full_house()
    first, second = waiting(door, ask()), waiting(door, ask())
    first.leave(0.5)
    assert served_in_turn(door, inside) == [second]


class TestFullRoom:
    def test_higher_priority_takes_the_place_of_the_newest_of_the_lowest(self) -> None:
        door, _ = full_house(waiting=2)
        old, new = waiting(door, ask("x"), now=0.0), waiting(door, ask("x"), now=1.0)
        waiting(door, ask("x", priority=5), now=2.0)
        assert door.release(2.0).shed == [new]
        assert new.shed_reason is ShedReason.DISPLACED
        assert old.state is TicketState.WAITING

    def test_one_tenant_cannot_keep_another_out(self) -> None:
        door, _ = full_house(waiting=10)
        for i in range(10):
            waiting(door, ask("greedy"), now=float(i))
        for i in range(5):
            waiting(door, ask("modest"), now=10.0 + i)
        assert len(door.release(20.0).shed) == 5
        assert isinstance(door.admit(ask("modest"), 0.1, 20.0), Shed)
        assert isinstance(door.admit(ask("greedy"), 0.1, 20.0), Shed)
        assert isinstance(door.admit(ask("third"), 0.1, 20.0), Waiting)

    def test_without_any_room_nobody_waits(self) -> None:
        door, _ = full_house(waiting=0)
        assert isinstance(door.admit(ask(priority=9), 0.1, 0.0), Shed)


def test_the_time_to_come_back_follows_the_pace_of_departures() -> None:
    def retry_after(pace: float) -> float:
        door, inside = full_house(waiting=30)
        for _ in range(30):
            waiting(door, ask())
        now = 0.0
        for _ in range(40):
            now += pace
            inside.pop(0).leave(now)
            inside += door.release(now).ready
            waiting(door, ask(), now=now)
        answer = door.admit(ask(), 0.1, now)
        assert isinstance(answer, Shed)
        return answer.retry_after

    assert retry_after(0.2) == pytest.approx(6.2, rel=0.1)
    assert retry_after(1.0) == pytest.approx(31, rel=0.1)


@settings(max_examples=100)
@given(st.integers(0, 1 << 32), st.integers(1, 4), st.integers(0, 6))
def test_a_random_crowd_leaves_nothing_behind(seed: int, places: int, room: int) -> None:
    random, now = Random(seed), 0.0
    door = Admission(places, room, 5.0)
    known: list[Ticket] = []
    for _ in range(120):
        now += random.expovariate(4.0)
        if random.random() < 0.55:
            request = ask(random.choice("abc"), random.choice((0, 0, 1)))
            known.append(door.admit(request, random.expovariate(5.0), now).ticket)
        elif known:
            known.pop(random.randrange(len(known))).leave(now)
        if random.random() < 0.8:
            release = door.release(now)
            assert all(ticket.state is TicketState.SHED for ticket in release.shed if ticket in known)
            assert release.again_at is None or release.again_at > now
        states = Counter(ticket.state for ticket in known)
        assert door.in_flight == states[TicketState.ADMITTED] <= places
        assert door.waiting == states[TicketState.WAITING] <= room
    for ticket in known:
        ticket.leave(now)
    assert (door.in_flight, door.waiting) == (0, 0)
    assert not door._rooms
    assert not door._in_flight_of
    assert not door._served_at
    assert not door._arrivals


def test_memory_stays_bounded_while_one_ticket_waits_and_thousands_pass() -> None:
    door, inside = full_house(seconds=1e9)
    waiting(door, ask(priority=-1))
    for i in range(5_000):
        passing = waiting(door, ask("t"), now=float(i))
        if i % 2:
            passing.leave(float(i))
        else:
            inside.pop().leave(float(i))
            inside += door.release(float(i)).ready
    assert len(door._arrivals) < 200


def test_who_has_waited_out_his_patience_is_not_overtaken() -> None:
    door, _ = full_house(seconds=1_000.0)
    long = waiting(door, ask(), prefill=8.0, now=0.0)
    shorts = [waiting(door, ask(), prefill=0.1, now=at) for at in (1.0, 9.0, 9.5)]
    assert door.next_in_turn(10.0, 9) == [shorts[0], shorts[1], shorts[2], long]
    assert door.next_in_turn(10.0, 9, patience=10.0) == [shorts[0], shorts[1], shorts[2], long]
    assert door.next_in_turn(10.0, 9, patience=9.5) == [long, shorts[0], shorts[1], shorts[2]]
    assert door.next_in_turn(10.0, 1, patience=5.0) == [long]


def test_knows_how_much_waits() -> None:
    door, inside = full_house()
    assert door.waiting_prefill_seconds == 0.0
    tickets = [waiting(door, ask(), prefill=seconds) for seconds in (0.5, 2.0, 1.0)]
    assert door.waiting_prefill_seconds == pytest.approx(3.5)
    tickets[1].leave(1.0)
    assert door.waiting_prefill_seconds == pytest.approx(1.5)
    served_in_turn(door, inside)
    assert door.waiting_prefill_seconds == 0.0
