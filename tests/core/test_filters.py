"""Who may get a request: by model, by drain and sleep, by health."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gateway.core.filters import accepting, available, serving
from gateway.core.health import Health
from gateway.core.model import HealthState, ModelCard, ReplicaId, UnknownModel


class One:
    """A candidate with just what filters read."""

    def __init__(self, name: str, *models: str, listed: bool = True, draining: bool = False) -> None:
        self.name = name
        self.health = Health(ReplicaId(name))
        self.draining = draining
        self.models = tuple(ModelCard(model) for model in models) if listed else None

    def serves(self, model: str) -> bool:
        return any(card.id == model for card in self.models or ())

    def __repr__(self) -> str:
        return self.name


def up(one: One) -> One:
    one.health.probe(True, "", 0.0)
    return one


def failing_probes(one: One) -> One:
    for _ in range(3):
        one.health.probe(False, "timeout", 0.0)
    return one


def failing_flights(one: One) -> One:
    failing_probes(one)
    for _ in range(3):
        one.health.flight_failed(0.0, 0.0)
    return one


def unreachable(one: One) -> One:
    for _ in range(3):
        one.health.flight_failed(0.0, 0.0, reached=False)
    return one


def asleep(one: One) -> One:
    one.health.sleep(True, 0.0)
    return one


def named(*made: Callable[[One], One]) -> list[One]:
    return [make(One(f"r{i}")) for i, make in enumerate(made)]


def new(one: One) -> One:
    return one


class TestServing:
    def test_only_those_that_list_the_model(self) -> None:
        a, b = One("a", "m", "lora"), One("b", "m")
        assert serving([a, b], "m") == [a, b]
        assert serving([a, b], "lora") == [a]
        assert serving([a, b], None) == [a, b]

    def test_a_model_that_nobody_lists_is_unknown(self) -> None:
        with pytest.raises(UnknownModel, match="`x` does not exist"):
            serving([One("a", "m"), One("b")], "x")

    def test_those_without_a_list_stand_in_only_while_nobody_lists_it(self) -> None:
        a, silent = One("a", "m"), up(One("b", listed=False))
        assert serving([a, silent], "m") == [a]
        assert serving([a, silent], "other") == [silent]
        assert serving([silent], "anything") == [silent]

    def test_one_that_never_answered_anything_does_not_make_up_models(self) -> None:
        with pytest.raises(UnknownModel):
            serving([One("a", "m"), One("b", listed=False)], "other")


def test_neither_drained_nor_sleeping_ones_accept() -> None:
    drained, sleeping, fine = One("a", draining=True), asleep(One("b")), One("c")
    assert accepting([drained, sleeping, fine]) == [fine]


class TestAvailable:
    def test_those_that_are_up(self) -> None:
        ones = named(up, up, failing_probes, new)
        assert available(ones, 0.0) == ones[:2]

    def test_those_never_heard_of_only_when_nobody_is_up(self) -> None:
        ones = named(new, new, failing_probes)
        assert available(ones[:2], 0.0) == ones[:2]
        assert available(named(new, failing_flights), 0.0)[0].health.state is HealthState.UNKNOWN

    def test_panic_adds_those_that_only_fail_probes_when_less_than_half_are_up(self) -> None:
        ones = named(up, failing_probes, failing_probes)
        assert set(available(ones, 0.0)) == set(ones)
        ones = named(up, up, failing_probes, failing_probes)
        assert available(ones, 0.0) == ones[:2]

    def test_panic_does_not_add_those_that_fail_requests(self) -> None:
        ones = named(up, failing_flights, failing_probes)
        assert available(ones, 0.0) == [ones[0], ones[2]]

    def test_when_nothing_better_is_left_anything_is_tried(self) -> None:
        ones = named(failing_flights, failing_flights)
        assert available(ones, 0.0) == ones

    def test_where_nobody_can_be_connected_to_nobody_is_left_until_a_back_off_is_over(self) -> None:
        """O-07, nothing reachable: the client is told at once, not after a time-out for each replica."""
        ones = named(unreachable, unreachable)
        assert available(ones, 0.5) == []
        assert available(ones, 5.0) == ones

    def test_nobody_is_nobody(self) -> None:
        assert available([], 0.0) == []
