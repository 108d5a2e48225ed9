"""Bodies and headers reach the replica as they were sent: the short form of tests 15 and 17 (O-14, O-18)."""

from __future__ import annotations

from pathlib import Path

from tests.chaos import identity
from tests.proxy.conftest import running_gateway
from tests.proxy.scripted import ScriptedReplica


def test_generated_bodies_arrive_byte_for_byte(tmp_path: Path, mode: str) -> None:
    """O-14: odd spellings of numbers and letters, repeated keys, blanks."""
    with identity.replica_in_a_thread(identity.answer_with_digest) as replica:
        with identity.gateway_before(replica, tmp_path, mode) as url:
            sent, _, changed = identity.send_bodies(url, 150)
    assert sent >= 100
    assert changed == []


def test_generated_headers_arrive(tmp_path: Path, mode: str) -> None:
    with identity.replica_in_a_thread(identity.answer_with_head) as replica:
        with identity.gateway_before(replica, tmp_path, mode) as url:
            sent, changed = identity.send_headers(url, 100)
    assert sent >= 60
    assert changed == []


async def test_the_header_contract(mode: str) -> None:
    """O-18: what ends at a proxy ends here, in both directions; the rest passes in order."""
    async with ScriptedReplica(identity.answer_by_contract).running() as replica:
        async with running_gateway(replica, mode=mode) as gateway:
            assert await identity.broken_rules(gateway.port, replica) == []
