"""Own work counts at once and exactly; what a replica says about itself only adds what we cannot know."""

from __future__ import annotations

import pytest

from gateway.core.load import FOREIGN_HALF_LIFE_SECONDS, LATE_SECONDS, Load
from gateway.core.model import LoadSnapshot

RATE = 1_000.0


def test_pending_work_is_booked_at_once_and_ends_with_the_first_token() -> None:
    load = Load()
    first = load.book(prompt_tokens=500, uncached_tokens=400, now=0.0)
    load.book(prompt_tokens=300, uncached_tokens=300, now=0.0)
    assert load.pending_tokens(0.0, RATE) == 700
    load.prefilled(first, 0.4)
    load.prefilled(first, 0.4)
    assert load.pending_tokens(0.4, RATE) == 300
    assert (load.in_flight, load.in_flight_tokens) == (2, 800)


def test_the_prefill_at_the_head_makes_progress_but_is_not_over_before_its_first_token() -> None:
    load = Load()
    load.book(400, 400, 0.0)
    load.book(300, 300, 0.1)
    assert load.pending_tokens(0.25, RATE) == pytest.approx(450)
    assert load.pending_tokens(0.8, RATE) == 300
    assert load.pending_tokens(-1.0, RATE) == 700


def test_a_first_token_that_is_late_is_expected_to_stay_late_as_long_again() -> None:
    load = Load()
    load.book(400, 400, 0.0)
    load.book(300, 300, 0.1)
    assert load.pending_tokens(0.4 + LATE_SECONDS, RATE) == pytest.approx(300)
    assert load.pending_tokens(0.4 + LATE_SECONDS + 2.0, RATE) == pytest.approx(300 + 2.0 * RATE)


def test_where_no_first_token_will_be_seen_prefills_end_by_time() -> None:
    load = Load()
    quiet = load.book(400, 400, 0.0, streams=False)
    load.book(200, 200, 0.0, streams=False)
    load.book(300, 300, 0.1)
    assert load.pending_tokens(0.1, RATE) == pytest.approx(800)
    assert load.pending_tokens(0.5, RATE) == pytest.approx(400)
    assert load.pending_tokens(0.7, RATE) == pytest.approx(200)
    load.release(quiet, 0.7, ran=True)
    assert load.pending_tokens(0.7, RATE) == pytest.approx(200)
    assert load.in_flight == 2


def test_time_until_little_is_queued_is_known_unless_a_first_token_must_come_before() -> None:
    load = Load()
    assert load.seconds_until(100, 0.0, RATE) == 0.0
    load.book(400, 400, 0.0)
    assert load.seconds_until(100, 0.0, RATE) == pytest.approx(0.3)
    assert load.seconds_until(100, 0.35, RATE) == 0.0
    load.book(300, 300, 0.0)
    assert load.seconds_until(100, 0.0, RATE) is None
    assert load.seconds_until(300, 0.0, RATE) == pytest.approx(0.4)


def test_the_next_prefill_begins_when_the_one_before_ends() -> None:
    load = Load()
    first = load.book(400, 400, 0.0)
    load.book(300, 300, 0.0)
    load.prefilled(first, 1.0)
    assert load.pending_tokens(1.1, RATE) == pytest.approx(200)


def test_a_flight_that_ends_without_a_first_token_gives_everything_back() -> None:
    load = Load()
    booking = load.book(400, 400, 0.0)
    load.release(booking, 0.1, ran=False)
    assert (load.in_flight, load.in_flight_tokens, load.pending_tokens(0.1, RATE)) == (0, 0.0, 0.0)


class TestSnapshot:
    def test_counts_as_foreign_what_is_there_beyond_our_own(self) -> None:
        load = Load()
        load.book(10, 10, 0.0)
        load.report(LoadSnapshot(1.0, running=4, waiting=2, kv_usage=0.4))
        assert load.scraped(1.0) == (5.0, 0.4)

    def test_is_never_negative(self) -> None:
        load = Load()
        for _ in range(3):
            load.book(10, 10, 0.0)
        load.report(LoadSnapshot(1.0, running=1, waiting=0))
        assert load.scraped(1.0) == (0.0, None)

    def test_our_own_that_ended_after_it_was_taken_are_not_foreign(self) -> None:
        load = Load()
        booking = load.book(10, 10, 0.0)
        load.release(booking, 1.01, ran=True)
        load.report(LoadSnapshot(1.0, running=1, waiting=0))
        assert load.scraped(1.02)[0] == 0.0

    def test_fades(self) -> None:
        load = Load()
        load.report(LoadSnapshot(1.0, running=8))
        assert load.scraped(1.0 + FOREIGN_HALF_LIFE_SECONDS)[0] == pytest.approx(4.0)

    def test_is_not_believed_after_some_missed_scrapes(self) -> None:
        load = Load()
        for i in range(20):
            load.report(LoadSnapshot(0.5 * i, running=8, kv_usage=0.9))
        assert load.scraped(9.5 + 2.9) != (None, None)
        assert load.scraped(9.5 + 3.1) == (None, None)

    def test_of_a_slow_scraper_is_believed_for_longer(self) -> None:
        load = Load()
        for i in range(20):
            load.report(LoadSnapshot(10.0 * i, running=8, kv_usage=0.9))
        assert load.scraped(190.0 + 30.0)[1] == 0.9
        assert load.scraped(190.0 + 45.0) == (None, None)

    def test_missing_is_not_zero(self) -> None:
        load = Load()
        assert load.scraped(0.0) == (None, None)
        load.report(LoadSnapshot(1.0, running=None, waiting=3, kv_usage=0.5))
        assert load.scraped(1.0) == (None, 0.5)

    def test_an_older_one_changes_nothing(self) -> None:
        load = Load()
        load.report(LoadSnapshot(2.0, running=3))
        load.report(LoadSnapshot(1.0, running=9))
        assert load.scraped(2.0)[0] == 3.0


def test_a_refusal_counts_as_load_for_a_while_and_longer_if_it_goes_on() -> None:
    load = Load()
    load.refused(0.0)
    load.refused(0.1)  # one burst counts once
    assert load.pending_tokens(0.5, RATE) == pytest.approx(500)
    assert load.scraped(0.5)[0] == 16.0
    assert load.pending_tokens(1.0, RATE) == 0
    load.refused(1.0)
    assert load.pending_tokens(1.0, RATE) == pytest.approx(2_000)
    load.accepted()
    load.refused(3.0)
    assert load.pending_tokens(3.0, RATE) == pytest.approx(1_000)
