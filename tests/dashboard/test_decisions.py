"""The ring of decisions: what it keeps, what it tells, and that it tells nothing of a prompt."""

from __future__ import annotations

import json
from random import Random

from gateway.core.model import Outcome
from gateway.dashboard.decisions import KEPT, Decisions, ended, shown
from gateway.rankings import CANDIDATES
from gateway.request_log import RequestRecord
from tests.core.fleet import Fleet, ask, text


def record_of(number: int = 1) -> RequestRecord:
    return RequestRecord(request_id=f"id-{number}", route="/v1/chat/completions", model="tiny")


def note(decisions: Decisions, fleet: Fleet, key: bytes, record: RequestRecord | None = None) -> RequestRecord:
    decision = fleet.router.decide(ask(key), fleet.now)
    record = record or record_of()
    record.started(decision)
    decisions.note(record, decision)
    return record


def test_the_oldest_make_room():
    decisions, fleet = Decisions(lambda: 5.0), Fleet(2)
    for number in range(KEPT + 10):
        note(decisions, fleet, b"x" * 600, record_of(number))
    kept = list(decisions.newest_first(10 * KEPT))
    assert [entry.number for entry in kept] == list(range(KEPT + 10, 10, -1))
    assert [entry.number for entry in decisions.newest_first(3)] == [KEPT + 10, KEPT + 9, KEPT + 8]
    assert [entry.number for entry in decisions.newest_first(10, after=KEPT + 8)] == [KEPT + 10, KEPT + 9]


def test_of_many_candidates_the_best_are_kept_and_the_one_that_holds_most():
    fleet, key = Fleet(40), text(Random(1), 20)
    flight = fleet.router.start(fleet.router.decide(ask(key), fleet.now), fleet.now)
    for _ in range(200):  # whoever holds it is far too busy
        busy = fleet.router.decide(ask(key), fleet.now)
        only = next(pair for pair in busy.ranking if pair[0].replica == flight.replica)
        fleet.router.start(type(busy)(busy.request, busy.policy, busy.reason, (only,)), fleet.now)
    decisions = Decisions(lambda: 5.0)
    note(decisions, fleet, key)
    (entry,) = decisions.newest_first(1)
    told = shown(entry)
    assert (told["candidates"], len(told["ranking"]), told["reason"]) == (40, CANDIDATES, "spilled")
    assert told["ranking"][-1]["replica"] == flight.replica
    assert told["ranking"][-1]["cached_tokens"] > 0
    costs = [one["total_seconds"] for one in told["ranking"][:-1]]
    assert costs == sorted(costs)


def test_how_it_ended_comes_from_the_record_of_the_request():
    decisions, fleet = Decisions(lambda: 5.0), Fleet(2)
    record = note(decisions, fleet, b"x" * 600)
    (entry,) = decisions.newest_first(1)
    assert not entry.is_over
    assert ended(entry) is None
    record.outcome, record.ttft_seconds, record.duration_seconds = Outcome.COMPLETED.value, 0.25, 1.5
    end = shown(entry)["end"]
    assert (end["outcome"], end["ttft_seconds"], end["duration_seconds"]) == ("completed", 0.25, 1.5)


def test_a_request_that_was_sent_elsewhere_says_so_at_its_first_decision():
    decisions, fleet = Decisions(lambda: 5.0), Fleet(2)
    record = note(decisions, fleet, b"x" * 600)
    note(decisions, fleet, b"x" * 600, record)
    second, first = decisions.newest_first(2)
    assert ended(first) == {"outcome": "moved", "error": ""}
    assert (second.attempt, ended(second)) == (2, None)


def test_nothing_of_the_prompt_is_kept():
    decisions, fleet = Decisions(lambda: 5.0), Fleet(2)
    request = ask(b"zq7canary" * 200, session="zq7canary-session")
    decision = fleet.router.decide(request, fleet.now)
    record = record_of()
    record.started(decision)
    decisions.note(record, decision)
    (entry,) = decisions.newest_first(1)
    told = json.dumps(shown(entry))
    assert "zq7canary" not in told
    assert not [block for block in request.blocks if str(block) in told]
    assert request not in list(entry)
