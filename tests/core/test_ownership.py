"""Ids lead to their owner, and there are never too many of them."""

from __future__ import annotations

from gateway.core.model import ReplicaId
from gateway.core.ownership import Ownership

A, B = ReplicaId("http://a"), ReplicaId("http://b")


def test_remembers_who_keeps_a_response_and_the_last_word_counts() -> None:
    ownership = Ownership()
    ownership.own("resp_1", A)
    ownership.own("resp_1", B)
    assert ownership.owner("resp_1") == B
    assert ownership.owner("resp_2") is None


def test_forgets_the_least_recently_stored() -> None:
    ownership = Ownership(max_ids=3)
    for id in ("1", "2", "3", "1", "4"):
        ownership.own(id, A)
    assert [ownership.owner(id) for id in ("1", "2", "3", "4")] == [A, None, A, A]
    assert len(ownership) == 3


def test_nobody_takes_what_another_tenant_made() -> None:
    ownership = Ownership()
    ownership.own("resp_1", A, "alice-co")
    ownership.own("resp_1", B, "bob-co")
    assert ownership.owner("resp_1") == A
    assert not ownership.is_foreign("resp_1", "alice-co")
    assert ownership.is_foreign("resp_1", "bob-co")
    ownership.own("resp_1", B, "alice-co")
    assert ownership.owner("resp_1") == B
