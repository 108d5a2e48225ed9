"""What gateways tell each other, and what a router makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from gateway.core.health import Health
from gateway.core.load import Booking, Load
from gateway.core.model import (
    BlockHash,
    Decision,
    HealthState,
    Outcome,
    PeerReported,
    PeerSent,
    PeerStored,
    ProbeAnswered,
    ReplicaAdded,
    ReplicaId,
    ReplicaView,
    RouteRequest,
)
from gateway.core.router import Router
from gateway.core.settings import RoutingSettings
from gateway.core.sharing import (
    FIRST_TOKEN_SECONDS,
    IDLE_REPORT_SECONDS,
    MAX_JOURNAL_BLOCKS,
    MAX_JOURNAL_STORED,
    REPORT_SECONDS,
    ROUND_BUNDLES,
    SILENT_SECONDS,
    Journal,
    Outbox,
    PeerLoads,
    credible,
)
from gateway.feeds.peer_entries import facts_of, wire_of

A, B = ReplicaId("http://a:8000"), ReplicaId("http://b:8000")


def router() -> Router:
    made = Router(RoutingSettings(block_bytes=512))
    for replica in (A, B):
        made.observe(ReplicaAdded(replica), 0.0)
        made.observe(ProbeAnswered(replica, True), 0.0)
    return made


def prompt(first: int, blocks: int = 40) -> RouteRequest:
    return RouteRequest(blocks=[BlockHash(first * 100_000 + i) for i in range(blocks)], length=512 * blocks)


def view_of(decision: Decision, replica: ReplicaId) -> ReplicaView:
    return next(view for view, _ in decision.ranking if view.replica == replica)


def report(replica: ReplicaId, *, in_flight: int = 0, pending: float = 0.0, ejected: bool = False) -> PeerReported:
    return PeerReported(replica, "other", in_flight, pending, 100.0 * in_flight, ejected)


def test_goes_where_another_gateway_has_sent_the_prefix() -> None:
    for replica in (A, B):
        one = router()
        one.observe(PeerSent(replica, prompt(1).blocks), 0.0)
        assert one.decide(prompt(1), 0.1).replica == replica


def test_what_another_has_sent_holds_no_cache_by_itself() -> None:
    one = router()
    one.observe(PeerSent(A, prompt(1).blocks), 0.0)
    assert view_of(one.decide(prompt(2), 0.1), A).in_flight_tokens == 0.0


def test_load_of_others_counts_until_it_is_old() -> None:
    one = router()
    one.observe(report(A, in_flight=5, pending=50_000.0), 10.0)
    view = view_of(one.decide(prompt(1), 10.0), A)
    assert (view.in_flight, view.pending_tokens, view.in_flight_tokens) == (5, 50_000.0, 500.0)
    assert one.decide(prompt(1), 10.0).replica == B
    later = view_of(one.decide(prompt(1), 11.0), A)
    assert 0.0 < later.pending_tokens < 50_000.0
    old = view_of(one.decide(prompt(1), 10.01 + REPORT_SECONDS), A)
    assert (old.in_flight, old.pending_tokens, old.in_flight_tokens) == (0, 0.0, 0.0)


def test_a_report_replaces_the_one_before() -> None:
    one = router()
    one.observe(report(A, in_flight=5), 1.0)
    one.observe(report(A, in_flight=2), 2.0)
    assert view_of(one.decide(prompt(1), 2.0), A).in_flight == 2


def test_two_gateways_report_their_own_part_only() -> None:
    one = router()
    one.observe(report(A, in_flight=5, pending=9_000.0), 1.0)
    flight = one.start(one.decide(prompt(1), 1.0), 1.0)
    own = {fact.replica: fact for fact in one.report_to_peers("one", 1.0)}
    assert own[A].in_flight == (flight.replica == A)
    assert own[flight.replica].pending_tokens > 0.0
    flight.finish(Outcome.COMPLETED, 2.0)
    assert all(not fact.in_flight and not fact.pending_tokens for fact in one.report_to_peers("one", 2.0))


def test_requests_wait_for_a_replica_that_others_keep_busy() -> None:
    """Nothing is booked by this gateway: time alone frees the replica."""
    one = router()
    for replica in (A, B):
        one.observe(report(replica, in_flight=3, pending=200_000.0), 1.0)
    ticket = one.admit(prompt(1), 1.0).ticket
    again_at = one.release(1.0).again_at
    assert again_at is not None
    assert again_at > 1.0
    assert one.release(1.1 + REPORT_SECONDS).ready == [ticket]


def test_another_gateways_ejection_leaves_one_failure_to_go() -> None:
    one = router()
    one.observe(report(A, ejected=True), 1.0)
    assert {r.health for r in one.statistics(1.0).replicas} == {HealthState.UP}
    one.observe(ProbeAnswered(A, False, "refused"), 1.1)
    states = {r.replica: r.health for r in one.statistics(1.1).replicas}
    assert states == {A: HealthState.EJECTED, B: HealthState.UP}


def test_a_good_answer_clears_a_doubt_and_it_counts_once() -> None:
    one = router()
    one.observe(report(A, ejected=True), 1.0)
    one.observe(ProbeAnswered(A, True), 1.1)
    one.observe(report(A, ejected=True), 1.2)
    one.observe(ProbeAnswered(A, False, "refused"), 1.3)
    assert {r.health for r in one.statistics(1.3).replicas} == {HealthState.UP}


def test_a_doubt_changes_nothing_of_an_ejected_replica() -> None:
    health = Health(A)
    health.doubted()
    assert health.state is HealthState.UNKNOWN


def test_stored_responses_of_others_are_found_and_not_passed_on() -> None:
    one = router()
    one.journal = Journal()
    one.observe(PeerStored(A, "resp_1", "tenant"), 0.0)
    assert one.owner("resp_1") == A
    assert one.is_foreign("resp_1", "another")
    assert one.journal.is_empty


def test_facts_about_unknown_replicas_are_ignored() -> None:
    one, gone = router(), ReplicaId("http://gone:8000")
    for fact in (PeerSent(gone, prompt(1).blocks), report(gone), PeerStored(gone, "resp_1")):
        one.observe(fact, 0.0)
    assert one.owner("resp_1") is None
    assert one.statistics(0.0).index_blocks == 0


def test_a_journal_has_what_was_sent_and_stored_once() -> None:
    one = router()
    one.journal = Journal()
    replica = one.start(one.decide(prompt(1), 0.0), 0.0).replica
    one.own("resp_1", replica)
    assert one.journal.fetch(1_000) == [PeerStored(replica, "resp_1"), PeerSent(replica, prompt(1).blocks)]
    assert one.journal.fetch(1_000) == []


def test_nobody_fetches_and_the_journal_stays_small() -> None:
    journal = Journal()
    for first in range(60):
        journal.note_sent(PeerSent(A, prompt(first, 8_000).blocks))
    facts = []
    while not journal.is_empty:
        facts += journal.fetch(8_192)
    sent = [fact for fact in facts if isinstance(fact, PeerSent)]
    assert MAX_JOURNAL_BLOCKS - 8_000 <= sum(len(fact.blocks) for fact in sent) <= MAX_JOURNAL_BLOCKS
    assert sent[-1].blocks == prompt(59, 8_000).blocks


def test_what_did_not_arrive_is_told_first_the_next_time() -> None:
    journal = Journal()
    early, late = PeerSent(A, prompt(1).blocks), PeerSent(B, prompt(2).blocks)
    stored = [PeerStored(A, f"resp_{number}") for number in range(2)]
    journal.note_sent(early)
    journal.note_stored(stored[0])
    fetched = journal.fetch(1_000)
    journal.note_sent(late)
    journal.note_stored(stored[1])
    journal.put_back([report(A), *fetched])
    assert journal.fetch(1_000) == [*stored, early, late]
    assert journal.is_empty


def test_what_is_put_back_keeps_the_journal_small() -> None:
    journal = Journal()
    new = [PeerSent(A, prompt(first, 8_000).blocks) for first in range(MAX_JOURNAL_BLOCKS // 8_000 - 1)]
    for fact in new:
        journal.note_sent(fact)
    old = [PeerSent(A, prompt(first, 8_000).blocks) for first in range(100, 103)]
    journal.put_back([*old, *(PeerStored(A, f"resp_{number}") for number in range(MAX_JOURNAL_STORED + 5))])
    facts = journal.fetch(10 * MAX_JOURNAL_BLOCKS)
    assert [fact for fact in facts if isinstance(fact, PeerSent)] == [old[-1], *new]
    assert len([fact for fact in facts if isinstance(fact, PeerStored)]) == MAX_JOURNAL_STORED


def test_an_outbox_tells_what_is_booked_when_it_changes_or_was_not_said_for_a_while() -> None:
    booked = [report(A)]
    outbox = Outbox(Journal(), lambda now: list(booked))
    assert outbox.bundles(0.0) == [[report(A)]]
    assert outbox.bundles(0.5) == []
    assert outbox.bundles(IDLE_REPORT_SECONDS) == [[report(A)]]
    booked[0] = report(A, in_flight=1)
    lost = outbox.bundles(IDLE_REPORT_SECONDS + 0.1)
    assert lost == [[report(A, in_flight=1)]]
    outbox.put_back(lost)
    assert outbox.bundles(IDLE_REPORT_SECONDS + 0.2) == lost


def test_an_outbox_tells_much_in_several_rounds_and_loses_nothing() -> None:
    journal = Journal()
    facts = [PeerSent(A, prompt(first, 8_000).blocks) for first in range(20)]
    for fact in facts:
        journal.note_sent(fact)
    outbox = Outbox(journal, lambda now: [])
    rounds = [outbox.bundles(float(round)) for round in range(4)]
    assert all(len(bundles) <= ROUND_BUNDLES for bundles in rounds)
    assert [fact for bundles in rounds for bundle in bundles for fact in bundle] == facts


def test_old_reports_are_not_credible_and_old_prompts_are() -> None:
    sent = PeerSent(A, prompt(1).blocks)
    assert credible([sent, report(A)], REPORT_SECONDS) == [sent, report(A)]
    assert credible([sent, report(A)], REPORT_SECONDS + 0.1) == [sent]


def busy_with(prompts: range, gateways: int = 1) -> list[Router]:
    """Gateways that cannot hear each other; each has sent other prompts, which still run."""
    made = [router() for _ in range(gateways)]
    for number, one in enumerate(made):
        one.journal = Journal()
        one.cut_off = True
        for first in prompts:
            one.start(one.decide(prompt(1_000 * (number + 1) + first, 10), 0.0), 0.0)
    return made


def test_gateways_that_cannot_hear_each_other_send_a_cold_prompt_to_the_same_replica() -> None:
    one, two = busy_with(range(3), gateways=2)
    places = [tuple(each.decide(prompt(first), 0.1).replica for each in (one, two)) for first in range(200)]
    assert sum(first == second for first, second in places) >= 190
    assert {A, B} == {first for first, _ in places}


def test_a_gateway_alone_spreads_ties_evenly_as_before() -> None:
    one = router()
    places = []
    for first in range(40):
        flight = one.start(one.decide(prompt(first), float(first)), float(first))
        flight.first_token(first + 0.5)
        flight.finish(Outcome.COMPLETED, first + 0.6)
        places.append(flight.replica)
    assert abs(places.count(A) - places.count(B)) <= 4


def test_what_is_warm_is_never_given_up_for_agreement() -> None:
    (one,) = busy_with(range(0))
    for first in range(50):
        replica = (A, B)[first % 2]
        one.observe(PeerSent(replica, prompt(first).blocks), 1.0)
        assert one.decide(prompt(first), 1.1).replica == replica


RATE = 10_000.0


def told(load: Load, name: str, now: float) -> PeerReported:
    tokens, head_tokens, head_seconds, first_token_seconds = load.pending(now, RATE)
    return PeerReported(A, name, load.in_flight, tokens, 0.0, False, head_tokens, head_seconds, first_token_seconds)


def tell(loads: Sequence[Load], now: float) -> None:
    """Each hears what all others have booked."""
    for hearing in loads:
        for number, telling in enumerate(loads):
            if telling is not hearing:
                if hearing.peers is None:
                    hearing.peers = PeerLoads()
                hearing.peers.report(told(telling, f"gateway-{number}", now), now)


@pytest.mark.parametrize("seed", range(20))
def test_gateways_that_hear_at_once_see_the_queue_that_one_would_see(seed: int) -> None:
    random, now = Random(seed), 0.0
    one, several = Load(), [Load() for _ in range(4)]
    flights: list[tuple[Load, Booking, Booking]] = []
    for _ in range(200):
        now += random.choice((0.001, 0.02, 0.2, 1.0))
        tokens = float(random.randrange(6_000))
        if len(flights) < 8 and random.random() < 0.5:
            load = random.choice(several)
            flights.append((load, one.book(9_000.0, tokens, now), load.book(9_000.0, tokens, now)))
        elif flights:
            load, alone, shared = flights[0 if random.random() < 0.8 else random.randrange(len(flights))]
            one.prefilled(alone, now)
            load.prefilled(shared, now)
            if random.random() < 0.7:
                flights.remove((load, alone, shared))
                one.release(alone, now, ran=True)
                load.release(shared, now, ran=True)
        tell(several, now)
        later = now + random.choice((0.0, 0.1, 0.4))
        limit = random.choice((0.0, 500.0, 4_000.0))
        for load in several:
            assert load.queued_tokens(later, RATE) == pytest.approx(one.queued_tokens(later, RATE))
            assert load.seconds_until(limit, later, RATE) == pytest.approx(one.seconds_until(limit, later, RATE))


def test_two_gateways_do_not_count_the_same_progress_twice() -> None:
    here, there = Load(), Load()
    there.book(9_000.0, 4_000.0, 0.0)
    here.book(9_000.0, 4_000.0, 0.01)
    tell([here, there], 0.1)
    assert here.queued_tokens(0.3, RATE) == pytest.approx(5_000.0)
    assert there.queued_tokens(0.3, RATE) == pytest.approx(5_000.0)


def test_who_is_silent_holds_nobody_up() -> None:
    here, there = Load(), Load()
    there.book(9_000.0, 12_000.0, 0.0)
    tell([here, there], 0.0)
    assert here.queued_tokens(SILENT_SECONDS, RATE) == pytest.approx(7_000.0)
    assert here.queued_tokens(1.0, RATE) == pytest.approx(2_000.0)
    assert here.queued_tokens(2.0, RATE) == 0.0
    here.book(9_000.0, 4_000.0, 2.0)
    assert here.queued_tokens(2.1, RATE) == pytest.approx(3_000.0)


def test_what_nobody_tells_the_end_of_is_over_in_time_among_others_too() -> None:
    here, there = Load(), Load()
    here.book(9_000.0, 1_000.0, 0.0, streams=False)
    there.book(9_000.0, 4_000.0, 0.0)
    tell([here, there], 0.0)
    assert here.queued_tokens(0.2, RATE) == pytest.approx(3_000.0)


def test_an_idle_gateway_repeats_itself_soon() -> None:
    """Reports that are alike are not sent."""
    load = Load()
    load.release(load.book(9_000.0, 1_000.0, 0.0), 0.1, ran=True)
    assert told(load, "one", 0.2) != told(load, "one", 0.225)
    assert told(load, "one", 0.11 + FIRST_TOKEN_SECONDS) == told(load, "one", 0.135 + FIRST_TOKEN_SECONDS)


def test_a_report_comes_over_as_it_is() -> None:
    facts = [
        PeerReported(A, "other", 3, 5_000.0, 7_000.0, True, 2_000.0, 0.125, None),
        PeerReported(B, "other", 0, 0.0, 0.0, False, 0.0, 0.0, 0.031),
    ]
    assert facts_of(wire_of(facts), "other") == facts
