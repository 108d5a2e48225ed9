"""Three failures in a row eject, a back-off that grows keeps it out, and what proves nothing changes nothing."""

from __future__ import annotations

from itertools import product

import pytest

from gateway.core.health import LONGEST_BACK_OFF_SECONDS, TRANSITIONS, Health, Signal
from gateway.core.model import HealthState, ReplicaId

UNKNOWN, UP, EJECTED, ASLEEP = HealthState.UNKNOWN, HealthState.UP, HealthState.EJECTED, HealthState.ASLEEP


def up(now: float = 0.0) -> Health:
    health = Health(ReplicaId("http://a"))
    health.probe(True, "", now)
    return health


def ejected(now: float = 0.0) -> Health:
    health = up(now)
    for _ in range(3):
        health.flight_failed(now, now)
    assert health.state is EJECTED
    return health


def test_every_pair_of_state_and_signal_is_as_the_table_says() -> None:
    expected = {
        (UNKNOWN, Signal.HEARD): UP,
        (UNKNOWN, Signal.ALIVE): UP,
        (UNKNOWN, Signal.FAILING): EJECTED,
        (UNKNOWN, Signal.SLEPT): ASLEEP,
        (UP, Signal.FAILING): EJECTED,
        (UP, Signal.SLEPT): ASLEEP,
        (EJECTED, Signal.ALIVE): UP,
        (EJECTED, Signal.SLEPT): ASLEEP,
        (ASLEEP, Signal.FAILING): EJECTED,
        (ASLEEP, Signal.WOKE): UP,
    }
    for state, signal in product(HealthState, Signal):
        assert TRANSITIONS.get((state, signal), state) is expected.get((state, signal), state)


def test_three_failed_probes_in_a_row_eject_and_two_do_not() -> None:
    health = up()
    for ok in (False, False, True, False, False, True, False, False):
        assert not health.probe(ok, "timeout", 1.0)
    assert health.state is UP
    assert health.probe(False, "timeout", 1.0)
    assert health.state is EJECTED
    assert health.last_failure == "timeout"


@pytest.mark.parametrize("every", [2, 3, 10])
def test_errors_that_are_never_three_in_a_row_eject_if_there_are_many(every: int) -> None:
    """Ten requests a second, every so many-th an error: half of them end it within two seconds."""
    health = up()
    for tick in range(600):
        now = tick / 10
        if tick % every == 0:
            health.flight_failed(now, now)
        else:
            health.flight_completed(now, now)
        if health.state is EJECTED:
            break
    assert (health.state is EJECTED) == (every == 2)
    assert every != 2 or tick <= 20


def test_slow_probes_of_a_busy_replica_that_completes_requests_do_not_eject_it() -> None:
    """O-07 (b): live successes count."""
    health = up()
    for second in range(60):
        health.probe(second % 3 == 0, "timeout", float(second))
        health.flight_completed(second - 1.0, second + 0.5)
        assert health.state is UP


def test_three_failed_flights_in_a_row_eject_and_a_completed_one_starts_the_count_again() -> None:
    health = up()
    for _ in range(5):
        health.flight_failed(0.0, 1.0)
        health.flight_failed(0.0, 1.0)
        for _ in range(10):
            health.flight_completed(0.0, 1.0)
    assert health.state is UP
    for _ in range(3):
        health.flight_failed(0.0, 1.0)
    assert health.state is EJECTED


def test_a_good_probe_brings_it_back_only_after_the_back_off() -> None:
    health = ejected(now=10.0)
    assert not health.probe(True, "", 10.9)
    assert health.state is EJECTED
    assert health.probe(True, "", 11.2)
    assert health.state is UP


def test_back_offs_grow_up_to_the_longest_and_start_again_after_a_calm_minute() -> None:
    health, now, waits = up(), 0.0, []
    for _ in range(8):
        for _ in range(3):
            health.flight_failed(now, now)
        waits.append(health.retry_at - now)
        now = health.retry_at
        health.probe(True, "", now)
        now += 1.0
    for wait, base in zip(waits, [1, 8, 60, 60, 60, 60, 60, 60], strict=True):
        assert base <= wait <= 1.1 * base
    assert max(waits) <= 1.1 * LONGEST_BACK_OFF_SECONDS
    now += 61.0
    for _ in range(3):
        health.flight_failed(now, now)
    assert health.retry_at - now <= 1.1


def test_failures_during_the_back_off_do_not_lengthen_it_but_a_failed_request_after_it_does() -> None:
    health = ejected(now=0.0)
    retry_at = health.retry_at
    for _ in range(4):
        health.flight_failed(0.6, 0.6)
    assert health.retry_at == retry_at
    health.flight_failed(2.2, 2.2)
    assert health.retry_at >= 10.2


def test_a_trial_that_finds_nobody_there_does_not_lengthen_the_wait() -> None:
    """O-09: it was refused, so it cost nobody anything; a dead server would else be out for a minute more."""
    health = ejected(now=0.0)
    for second in range(2, 60, 2):
        health.flight_started()
        health.flight_failed(float(second), float(second), reached=False)
        assert not health.may_be_tried(float(second) + 0.5)
        assert health.may_be_tried(float(second) + 1.0)
    assert health.probe(True, "", 60.0)
    assert health.state is UP


def test_a_server_that_was_away_for_an_hour_is_back_with_its_first_good_probe() -> None:
    """Failed probes cost nobody anything, so they do not lengthen the wait."""
    health = ejected(now=0.0)
    for second in range(3_600):
        health.probe(False, "refused", float(second))
    assert health.probe(True, "", 3_600.0)
    assert health.state is UP


def test_replicas_do_not_come_back_in_step() -> None:
    healths = [Health(ReplicaId(f"http://r{i}")) for i in range(10)]
    for health in healths:
        for _ in range(3):
            health.probe(False, "", 0.0)
    assert len({health.retry_at for health in healths}) == 10


def test_an_old_stream_that_ends_well_proves_nothing_about_a_server_that_shuts_down() -> None:
    health = ejected(now=5.0)
    assert not health.flight_completed(started_at=1.0, now=9.0)
    assert health.state is EJECTED
    assert health.flight_completed(started_at=8.0, now=9.0)
    assert health.state is UP


def test_without_probes_one_trial_at_a_time_is_due_after_the_back_off() -> None:
    health = ejected(now=0.0)
    assert not health.may_be_tried(0.5)
    assert health.may_be_tried(1.2)
    health.flight_started()
    assert not health.may_be_tried(1.2)
    health.flight_failed(1.2, 1.3)
    assert not health.may_be_tried(1.3)
    assert health.may_be_tried(10.2)
    health.flight_started()
    health.flight_ended()
    assert health.may_be_tried(10.3)
    health.flight_started()
    health.flight_completed(10.3, 10.4)
    assert health.state is UP


def test_an_engine_that_shuts_down_is_out_at_once_and_good_probes_do_not_bring_it_back() -> None:
    """It answers /health with 200 until it is gone (O-07: health is not the whole truth)."""
    health = up()
    assert health.flight_drained(1.0)
    assert health.state is EJECTED
    for second in range(2, 60):
        assert not health.probe(True, "", float(second))
    assert health.may_be_tried(60.0)
    health.flight_started()
    assert not health.may_be_tried(60.0)
    health.flight_completed(60.0, 61.0)  # it was no shutdown after all
    assert health.state is UP


def test_one_empty_answer_is_no_shutdown_and_two_in_a_row_are() -> None:
    """What one request did must not take a replica out; only what began after it shows that the engine still works."""
    health = up()
    assert not health.flight_empty(1.0)
    health.flight_completed(0.5, 2.0)
    health.flight_ended()
    assert health.flight_empty(3.0)
    assert (health.state, health.draining) == (EJECTED, True)
    health = up()
    for second in range(1, 40):
        assert not health.flight_empty(float(second))
        health.flight_completed(second + 0.1, second + 0.2)
    assert health.state is UP


def test_a_trial_that_brings_nothing_again_proves_that_the_engine_still_shuts_down() -> None:
    health = up()
    health.flight_drained(1.0)
    health.flight_started()
    health.flight_empty(60.0)
    assert health.draining
    assert not health.may_be_tried(60.5)


def test_after_an_engine_that_shut_down_is_gone_a_good_probe_counts_again() -> None:
    health = up()
    health.flight_drained(1.0)
    health.probe(False, "refused", 20.0)
    assert health.probe(True, "", 40.0)
    assert health.state is UP


def test_only_what_cannot_be_connected_to_is_hopeless_and_only_until_a_good_probe() -> None:
    health = up()
    for _ in range(3):
        health.flight_failed(1.0, 1.0, reached=False)
    assert health.is_hopeless(1.5)
    assert not health.is_hopeless(60.0)
    health.probe(True, "", 1.6)  # its back-off is not over, but where nobody else is left it may be asked
    assert health.state is EJECTED
    assert not health.is_hopeless(1.7)
    assert not ejected(now=0.0).is_hopeless(0.5)


def test_nobody_is_sent_on_trial_where_probes_fail() -> None:
    health = ejected(now=0.0)
    health.probe(False, "refused", 1.5)
    assert not health.may_be_tried(100.0)


def test_a_sleeping_replica_stays_asleep_however_well_it_answers_probes() -> None:
    health = up()
    health.sleep(True, 1.0)
    health.probe(True, "", 2.0)
    health.heard(2.0)
    assert health.state is ASLEEP
    health.sleep(False, 3.0)
    assert health.state is UP


@pytest.mark.parametrize("ok", [True, False])
def test_flapping_probes_change_little(ok: bool) -> None:
    """One hertz for a minute: at most six changes of state."""
    health, changes = up(), 0
    for second in range(60):
        ok = not ok
        changes += health.probe(ok, "", float(second))
    assert changes <= 6


def test_flapping_requests_change_the_state_six_times_a_minute_at_most() -> None:
    """Half a second good, half a second bad, for a minute, at 70 requests/s."""
    health, changes = up(), 0
    for tick in range(60 * 70):
        now = tick / 70
        good = now % 1.0 < 0.5
        if tick % 70 == 20:
            changes += health.probe(good, "", now)
        if health.state is UP:
            changes += health.flight_completed(now, now) if good else health.flight_failed(now, now)
    assert changes <= 6


def test_a_replica_that_flaps_slowly_is_up_ever_less() -> None:
    """Dead for three seconds, alive for three: each time it stays out longer."""
    health, changes = up(), 0
    for second in range(120):
        changes += health.probe(second % 6 < 3, "", float(second))
    assert changes <= 14
