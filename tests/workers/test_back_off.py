"""Pauses grow, are forgotten after a calm time, and do not go on for ever."""

from __future__ import annotations

from workers.back_off import BackOff, BackOffSettings

SETTINGS = BackOffSettings(first_seconds=1.0, longest_seconds=10.0, calm_seconds=300.0, max_failed_starts=3)


def test_pauses_double_up_to_a_cap() -> None:
    back_off = BackOff(SETTINGS)
    assert [back_off.ended(1.0) for _ in range(6)] == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert not back_off.is_over


def test_a_calm_time_forgets_the_growth() -> None:
    back_off = BackOff(SETTINGS)
    assert [back_off.ended(1.0), back_off.ended(299.0), back_off.ended(300.0), back_off.ended(1.0)] == [
        1.0,
        2.0,
        1.0,
        2.0,
    ]


def test_failed_starts_in_a_row_end_it_and_a_good_one_ends_the_row() -> None:
    back_off = BackOff(SETTINGS)
    back_off.start_failed()
    back_off.start_failed()
    back_off.started()
    assert back_off.start_failed() == 4.0
    assert not back_off.is_over
    back_off.start_failed()
    back_off.start_failed()
    assert back_off.is_over


def test_an_order_forgets_everything() -> None:
    back_off = BackOff(SETTINGS)
    for _ in range(3):
        back_off.start_failed()
    back_off.forget()
    assert not back_off.is_over
    assert back_off.start_failed() == 1.0
