"""A model whose replica just left is expected back, for a while and in bounded memory."""

from __future__ import annotations

from gateway.core.departed import EXPECTED_SECONDS, MAX_REPLICAS, Departed
from gateway.core.model import ReplicaId

ONE, TWO = ReplicaId("http://one"), ReplicaId("http://two")


def test_is_expected_for_a_while_and_until_its_replica_is_back() -> None:
    departed = Departed()
    assert not departed.is_expected("m", 0.0)
    departed.note(ONE, frozenset({"m", "lora"}), 0.0)
    departed.note(TWO, frozenset({"m"}), 100.0)
    assert departed.is_expected("lora", EXPECTED_SECONDS - 1)
    assert not departed.is_expected("lora", EXPECTED_SECONDS)
    assert departed.is_expected("m", EXPECTED_SECONDS)
    departed.forget(TWO)
    assert not departed.is_expected("m", EXPECTED_SECONDS)


def test_those_that_left_first_are_forgotten_first() -> None:
    departed = Departed()
    departed.note(ONE, frozenset({"one"}), 0.0)
    departed.note(TWO, frozenset({"two"}), 0.0)
    departed.note(ONE, frozenset({"one"}), 1.0)
    for number in range(MAX_REPLICAS - 1):
        departed.note(ReplicaId(f"http://{number}"), frozenset(), 2.0)
    assert departed.is_expected("one", 2.0)
    assert not departed.is_expected("two", 2.0)
