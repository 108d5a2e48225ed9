"""A request is sent when its replica can begin with it; until then it waits in the gateway, and others may pass."""

from __future__ import annotations

from random import Random

import pytest

from gateway.core.admission import Admitted, Shed, Ticket, TicketState, Waiting
from gateway.core.flight import Flight
from gateway.core.holding import OUTPUT_RESERVE_TOKENS, SLOT_SECONDS
from gateway.core.model import NoReplica, Outcome, ReplicaRemoved, RouteRequest
from tests.core.fleet import BLOCK_TOKENS, Fleet, ask, text

RATE = 10_000.0
"""Tokens per second that a router assumes until it knows better, and that these replicas have."""


class Door:
    """A fleet whose rates are known well, and the flights of those that were let in."""

    def __init__(self, count: int, **settings: int) -> None:
        self.random = Random(3)
        self.fleet = Fleet(count, **settings)
        for replica in self.fleet.replicas:
            for _ in range(12):
                flight = self.fleet.send_to(replica, self.prompt(40))
                self.fleet.complete(flight, seconds=40 * BLOCK_TOKENS / RATE + 0.015)
        self.flights: dict[Ticket, Flight] = {}

    def prompt(self, blocks: int) -> RouteRequest:
        return ask(text(self.random, blocks))

    def knock(self, request: RouteRequest) -> Ticket:
        answer = self.fleet.router.admit(request, self.fleet.now)
        if isinstance(answer, Admitted):
            self.begin(answer.ticket)
        else:
            assert isinstance(answer, Waiting)
            self.release()
        return answer.ticket

    def release(self, seconds: float = 0.0) -> float | None:
        """Some time later. Returns when to come again."""
        self.fleet.now += seconds
        answer = self.fleet.router.release(self.fleet.now)
        for ticket in answer.ready:
            self.begin(ticket)
        return answer.again_at

    def begin(self, ticket: Ticket) -> None:
        flight = ticket.take_flight()
        self.flights[ticket] = self.fleet.send(ticket.request) if flight is None else flight

    def first_token(self, ticket: Ticket) -> None:
        self.flights[ticket].first_token(self.fleet.now)
        self.release()

    def end(self, ticket: Ticket) -> None:
        self.flights[ticket].finish(Outcome.COMPLETED, self.fleet.now)
        ticket.leave(self.fleet.now)
        self.release()


def test_a_lone_request_is_let_in_at_once() -> None:
    door = Door(2)
    assert door.knock(door.prompt(400)).state is TicketState.ADMITTED


def test_waits_while_every_replica_is_busy_and_goes_where_the_first_is_free() -> None:
    door = Door(2)
    first, second = door.knock(door.prompt(400)), door.knock(door.prompt(400))
    assert {door.flights[first].replica, door.flights[second].replica} == set(door.fleet.replicas)
    third = door.knock(door.prompt(100))
    assert third.state is TicketState.WAITING
    door.first_token(second)
    assert third.state is TicketState.ADMITTED
    assert door.flights[third].replica == door.flights[second].replica


def test_is_sent_a_little_ahead_of_the_end_of_the_prefill_before_it_when_time_alone_says_so() -> None:
    door = Door(1)
    door.knock(door.prompt(400))
    waiting = door.knock(door.prompt(100))
    again_at = door.release()
    prefill_seconds = 400 * BLOCK_TOKENS / door.fleet.statistics(door.fleet.replicas[0]).prefill_rate
    assert again_at == pytest.approx(door.fleet.now + prefill_seconds - SLOT_SECONDS, rel=0.05)
    door.release(again_at - door.fleet.now - 0.01)
    assert waiting.state is TicketState.WAITING
    door.release(0.011)
    assert waiting.state is TicketState.ADMITTED


def test_behind_two_prefills_it_waits_for_a_first_token_whatever_the_clock_says() -> None:
    door = Door(1)
    first = door.knock(door.prompt(3))
    door.knock(door.prompt(400))  # a small prompt in prefill leaves the replica free for another
    assert len(door.flights) == 2
    waiting = door.knock(door.prompt(100))
    door.release(20.0)
    assert waiting.state is TicketState.WAITING
    door.first_token(first)
    assert waiting.state is TicketState.WAITING
    door.release(400 * BLOCK_TOKENS / RATE)
    assert waiting.state is TicketState.ADMITTED


def test_short_ones_pass_long_ones() -> None:
    door = Door(1)
    busy = door.knock(door.prompt(800))
    long, short = door.knock(door.prompt(600)), door.knock(door.prompt(50))
    door.fleet.now += 1.0
    door.first_token(busy)
    assert (long.state, short.state) == (TicketState.WAITING, TicketState.ADMITTED)


def test_waits_for_the_replica_that_holds_its_prefix_while_another_is_free() -> None:
    door = Door(2)
    chat = text(door.random, 600)
    warm = door.knock(ask(chat))
    assert len(door.flights) == 1
    follower = door.knock(ask(chat + text(door.random, 2)))
    assert follower.state is TicketState.WAITING  # 7.7 s of prefill there would cost more than waiting
    other = door.knock(door.prompt(30))
    assert door.flights[other].replica != door.flights[warm].replica
    door.first_token(warm)
    assert door.flights[follower].replica == door.flights[warm].replica
    assert door.flights[follower].cached_tokens == pytest.approx(600 * BLOCK_TOKENS, rel=0.01)


def test_samples_of_one_prompt_sent_together_are_prefilled_once() -> None:
    door = Door(4)
    prompt = text(door.random, 128)
    samples = [door.knock(ask(prompt)) for _ in range(16)]
    assert [ticket.state for ticket in samples] == [TicketState.ADMITTED] + [TicketState.WAITING] * 15
    door.first_token(samples[0])
    assert {ticket.state for ticket in samples} == {TicketState.ADMITTED}
    assert len({flight.replica for flight in door.flights.values()}) == 1


class TestKvCache:
    def test_a_prompt_waits_until_it_fits(self) -> None:
        door = Door(1, default_cache_tokens=100_000)
        first = door.knock(door.prompt(500))  # 64,000 tokens
        door.release(7.0)
        door.first_token(first)
        second = door.knock(door.prompt(500))
        assert second.state is TicketState.WAITING
        door.end(first)
        assert second.state is TicketState.ADMITTED

    def test_alone_it_is_sent_whatever_its_size(self) -> None:
        door = Door(1, default_cache_tokens=10_000)
        assert door.knock(door.prompt(500)).state is TicketState.ADMITTED

    def test_later_small_ones_do_not_starve_a_large_one(self) -> None:
        door = Door(1, default_cache_tokens=100_000)
        inside = [door.knock(door.prompt(200)) for _ in range(1)]
        door.release(3.0)
        door.first_token(inside[0])
        large = door.knock(door.prompt(700))  # 89,600 tokens: only alone
        small = [door.knock(door.prompt(20)) for _ in range(40)]
        served_before = 0
        for _ in range(300):
            door.fleet.now += 0.3
            for ticket in [*inside, *small]:
                if ticket in door.flights and not door.flights[ticket].finished:
                    door.flights[ticket].first_token(door.fleet.now)
                    door.end(ticket)
            small.append(door.knock(door.prompt(20)))
            served_before = sum(ticket in door.flights for ticket in small)
            if large.state is TicketState.ADMITTED:
                break
        assert large.state is TicketState.ADMITTED
        assert served_before < 120

    def test_what_prompts_share_is_counted_once(self) -> None:
        """300 blocks each, 250 of them the same: four fit where the sum of two does not."""
        door = Door(1, default_cache_tokens=550 * BLOCK_TOKENS)
        system = text(door.random, 250)
        tickets = []
        for _ in range(4):
            tickets.append(door.knock(ask(system + text(door.random, 50))))
            door.release(4.0)
            door.first_token(tickets[-1])
        assert {ticket.state for ticket in tickets} == {TicketState.ADMITTED}
        other = door.knock(door.prompt(300))
        assert other.state is TicketState.WAITING
        for ticket in tickets:
            door.end(ticket)
        assert other.state is TicketState.ADMITTED

    def test_room_for_the_answer_is_kept(self) -> None:
        door = Door(1, default_cache_tokens=50 * BLOCK_TOKENS + 50 * BLOCK_TOKENS + OUTPUT_RESERVE_TOKENS - 10)
        first = door.knock(door.prompt(50))
        door.release(1.0)
        door.first_token(first)
        assert door.knock(door.prompt(50)).state is TicketState.WAITING


def test_a_client_that_leaves_before_its_request_was_sent_leaves_nothing_booked() -> None:
    door = Door(1)
    busy = door.knock(door.prompt(800))
    prompt = door.prompt(200)
    door.knock(prompt)
    replica = door.fleet.replicas[0]
    door.flights[busy].first_token(door.fleet.now)
    (bound,) = door.fleet.router.release(door.fleet.now).ready
    assert door.fleet.statistics(replica).in_flight == 2
    bound.leave(door.fleet.now)  # it was let in a moment ago, but nobody has taken its flight
    statistics = door.fleet.statistics(replica)
    assert (statistics.in_flight, statistics.pending_tokens) == (1, 0.0)
    assert door.fleet.view(replica, prompt).cached_tokens == 0
    assert bound.take_flight() is None


def test_a_client_that_leaves_while_it_waits_gives_up_its_promise() -> None:
    door = Door(1)
    door.knock(door.prompt(800))
    long, short = door.knock(door.prompt(20)), door.knock(door.prompt(60))
    long.leave(door.fleet.now)
    assert door.fleet.router.statistics(door.fleet.now).waiting == 1
    door.release(10.3)
    assert short.state is TicketState.ADMITTED


def test_when_no_replica_is_left_those_who_wait_are_let_in_to_hear_it() -> None:
    door = Door(1)
    door.knock(door.prompt(800))
    waiting = door.fleet.router.admit(door.prompt(10), door.fleet.now)
    assert isinstance(waiting, Waiting)
    door.fleet.router.observe(ReplicaRemoved(door.fleet.replicas[0]), door.fleet.now)
    assert door.fleet.router.release(door.fleet.now).ready == [waiting.ticket]
    assert waiting.ticket.take_flight() is None
    with pytest.raises(NoReplica):
        door.fleet.decide(waiting.ticket.request)


def test_waiting_too_long_is_answered() -> None:
    door = Door(1, max_wait_seconds=10)
    door.knock(door.prompt(3_000))
    answer = door.fleet.router.admit(door.prompt(10), door.fleet.now)
    assert isinstance(answer, Waiting)
    release = door.fleet.router.release(door.fleet.now + 10.0)
    assert release.shed == [answer.ticket]


def test_a_full_waiting_room_sheds() -> None:
    door = Door(1, max_waiting=1)
    door.knock(door.prompt(800))
    door.knock(door.prompt(10))
    assert isinstance(door.fleet.router.admit(door.prompt(10), door.fleet.now), Shed)


@pytest.mark.parametrize("settings", [{"hold": False}, {"max_waiting": 0}], ids=str)
def test_without_it_everything_is_sent_at_once(settings: dict[str, int]) -> None:
    door = Door(1, **settings)
    assert {door.knock(door.prompt(400)).state for _ in range(20)} == {TicketState.ADMITTED}


def test_what_has_no_prompt_never_waits() -> None:
    door = Door(1)
    door.knock(door.prompt(800))
    assert door.knock(RouteRequest()).state is TicketState.ADMITTED


def test_until_its_rate_is_known_a_replica_gets_more_ahead() -> None:
    guessed = Fleet(1)
    random = Random(5)
    sent = 0
    for _ in range(20):
        answer = guessed.router.admit(ask(text(random, 40)), 0.0)  # 0.5 s of prefill each, if the guess is right
        if isinstance(answer, Admitted):
            flight = answer.ticket.take_flight()
            if flight is None:
                guessed.send(answer.ticket.request)
            sent += 1
    known = Door(1)
    tickets = [known.knock(known.prompt(40)) for _ in range(20)]
    assert sent == 3
    assert sum(ticket.state is TicketState.ADMITTED for ticket in tickets) == 1


def test_tenants_take_turns_though_one_has_many_waiting() -> None:
    door = Door(1)
    busy = door.knock(door.prompt(400))
    for _ in range(30):
        door.knock(ask(text(door.random, 40), tenant="greedy"))
    modest = [door.knock(ask(text(door.random, 40), tenant="modest")) for _ in range(3)]
    door.first_token(busy)
    served = list(door.flights)
    while not all(ticket in door.flights for ticket in modest):
        door.release(0.6)
        door.first_token(served[-1])
        assert len(door.flights) > len(served)
        served = list(door.flights)
    assert sum(ticket.request.tenant == "greedy" for ticket in served) <= 4


@pytest.mark.parametrize("priority", [0, 1])
def test_who_waits_for_the_busy_replicas_of_one_model_hides_nobody_whose_replica_is_idle(priority: int) -> None:
    """One replica of model a hangs and sixty wait for it; the replica of b does nothing."""
    door = Door(2)
    router, (hung, idle) = door.fleet.router, door.fleet.replicas
    door.fleet.lists(hung, "a")
    door.fleet.lists(idle, "b")
    waiting = [door.knock(ask(text(door.random, 200), model="a", priority=priority)) for _ in range(60)]
    assert sum(ticket.state is TicketState.WAITING for ticket in waiting) >= 50
    large = door.knock(ask(text(door.random, 400), model="b"))
    assert large.state is TicketState.ADMITTED
    assert door.flights[large].replica == idle
    assert router.statistics(door.fleet.now).waiting >= 50


def test_who_waits_for_a_busy_owner_hides_nobody_else() -> None:
    door = Door(2)
    hung, idle = door.fleet.replicas
    waiting = [door.knock(ask(text(door.random, 200), pinned=hung)) for _ in range(60)]
    assert sum(ticket.state is TicketState.WAITING for ticket in waiting) >= 50
    other = door.knock(door.prompt(400))
    assert (other.state, door.flights[other].replica) == (TicketState.ADMITTED, idle)


def test_a_prompt_that_fills_the_cache_is_not_passed_for_ever_by_small_ones() -> None:
    """50,000 tokens at 10,000 a second, in a cache of 20,000: four times its own prefill are the 20 s after which
    it would be shed. Small ones come faster than they are served."""
    door = Door(1, max_wait_seconds=20)
    door.fleet.reports(door.fleet.replicas[0], cache_tokens=20_000)
    small = [door.knock(door.prompt(20)) for _ in range(12)]
    large = door.knock(door.prompt(400))
    began = door.fleet.now
    while large.state is TicketState.WAITING and door.fleet.now < began + 19:
        door.release(0.2)
        for ticket in [ticket for ticket in small if ticket in door.flights][:1]:
            small.remove(ticket)
            door.first_token(ticket)
            door.end(ticket)
            small.append(door.knock(door.prompt(20)))
    assert large.state is TicketState.ADMITTED
    assert door.fleet.now - began < 15
