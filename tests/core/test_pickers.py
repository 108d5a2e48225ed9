"""Cheapest first; ties favour nobody and spread evenly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from gateway.core.model import Cost, ReplicaId, ReplicaView
from gateway.core.pickers import agreed, ranked


def views(in_flight: Sequence[int]) -> list[ReplicaView]:
    names = [ReplicaId(f"http://r{i}") for i in range(len(in_flight))]
    return [
        ReplicaView(name, 0.0, 0.0, 0.0, count, 0.0, 0.0, None, 4e5, 1e4, 0.0, 0.0, 0)
        for name, count in zip(names, in_flight, strict=True)
    ]


def first(totals: Sequence[float], in_flight: Sequence[int], draw: int = 0) -> ReplicaId:
    return ranked(views(in_flight), [Cost(total, ()) for total in totals], draw)[0][0].replica


def test_orders_by_cost() -> None:
    ranking = ranked(views([0, 0, 0]), [Cost(total, ()) for total in (2.0, 3.0, 1.0)], 0)
    assert [view.replica for view, _ in ranking] == ["http://r2", "http://r0", "http://r1"]
    assert [cost.total for _, cost in ranking] == [1.0, 2.0, 3.0]


def test_a_tie_goes_to_the_fewest_in_flight() -> None:
    assert first([1.0, 1.0, 1.0, 0.0 + 1.0], [3, 2, 5, 4]) == "http://r1"


@pytest.mark.parametrize("count", [2, 3, 7])
def test_each_run_of_n_draws_puts_each_of_n_first_once(count: int) -> None:
    for turn in range(50):
        firsts = Counter(first([0.0] * count, [0] * count, draw) for draw in range(turn * count, (turn + 1) * count))
        assert set(firsts.values()) == {1}
        assert len(firsts) == count


def test_the_order_of_the_draws_has_no_rhythm() -> None:
    """Every second request, say the long one of each pair, must not always get the same replica of two."""
    assert set(Counter(first([0.0] * 2, [0] * 2, 2 * turn) for turn in range(100)).values()) <= set(range(30, 71))


def test_keeps_all_candidates_and_the_order_of_the_rest() -> None:
    totals = [5.0, 1.0, 1.0, 3.0, 4.0]
    for draw in range(4):
        ranking = ranked(views([0, 1, 0, 0, 0]), [Cost(total, ()) for total in totals], draw)
        assert [view.replica[-1] for view, _ in ranking] == ["2", "1", "3", "4", "0"]


def with_cached(cached: Sequence[float], totals: Sequence[float]) -> tuple[tuple[ReplicaView, Cost], ...]:
    rows = [view._replace(cached_tokens=tokens) for view, tokens in zip(views([0] * len(cached)), cached, strict=True)]
    return ranked(rows, [Cost(total, ()) for total in totals], 0)


def agreed_first(totals: Sequence[float], key: int, slack: float, cached: Sequence[float] | None = None) -> str:
    ranking = agreed(with_cached(cached or [0.0] * len(totals), totals), key, slack)
    assert sorted(view.replica for view, _ in ranking) == sorted(view.replica for view in views([0] * len(totals)))
    rest = [cost.total for _, cost in ranking[1:]]
    assert rest == sorted(rest)
    return ranking[0][0].replica


def test_gateways_with_other_costs_agree_where_they_hardly_differ() -> None:
    for key in range(100):
        assert agreed_first([1.0, 1.05, 1.02], key, 0.1) == agreed_first([1.04, 1.0, 1.09], key, 0.1)


def test_keys_are_spread_evenly_and_a_lost_replica_moves_its_own_only() -> None:
    before = {key: agreed_first([1.0] * 4, key, 0.0) for key in range(2_000)}
    assert all(400 < count < 600 for count in Counter(before.values()).values())
    after = {key: agreed_first([1.0, 1.0, 1.0, 9.0], key, 0.0) for key in before}
    assert all(after[key] == place for key, place in before.items() if place != "http://r3")


def test_nobody_much_dearer_and_nobody_colder_is_agreed_on() -> None:
    for key in range(50):
        assert agreed_first([1.0, 1.2, 3.0], key, 0.1) == "http://r0"
        assert agreed_first([1.0, 1.05, 1.05], key, 0.1, cached=[500.0, 0.0, 499.0]) == "http://r0"
