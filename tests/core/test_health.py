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


def test_three_failed_flights_in_a_row_eject_and_a_completed_one_starts_the_count_again() -> None:
    health = up()
    for _ in range(5):
        health.flight_failed(0.0, 1.0)
        health.flight_failed(0.0, 1.0)
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


def test_back_offs_double_up_to_the_longest_and_start_again_after_a_calm_minute() -> None:
    health, now, waits = up(), 0.0, []
    for _ in range(8):
        for _ in range(3):
            health.flight_failed(now, now)
        waits.append(health.retry_at - now)
        now = health.retry_at
        health.probe(True, "", now)
        now += 1.0
    for wait, base in zip(waits, [1, 2, 4, 8, 16, 30, 30, 30], strict=True):
        assert base <= wait <= 1.1 * base
    assert max(waits) <= 1.1 * LONGEST_BACK_OFF_SECONDS
    now += 61.0
    for _ in range(3):
        health.flight_failed(now, now)
    assert health.retry_at - now <= 1.1


def test_failures_during_the_back_off_do_not_lengthen_it_but_those_after_it_do() -> None:
    health = ejected(now=0.0)
    retry_at = health.retry_at
    health.probe(False, "refused", 0.5)
    for _ in range(4):
        health.flight_failed(0.6, 0.6)
    assert health.retry_at == retry_at
    for now in (2.0, 2.1, 2.2):
        health.probe(False, "refused", now)
    assert health.retry_at >= 4.0


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
    assert health.may_be_tried(3.6)
    health.flight_started()
    health.flight_ended()
    assert health.may_be_tried(3.7)
    health.flight_started()
    health.flight_completed(3.7, 3.8)
    assert health.state is UP


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


def test_a_replica_that_flaps_slowly_is_up_ever_less() -> None:
    """Dead for three seconds, alive for three: each time it stays out longer."""
    health, changes = up(), 0
    for second in range(120):
        changes += health.probe(second % 6 < 3, "", float(second))
    assert changes <= 14
