"""Tests 15 and 17: what passes unchanged, in numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos import identity
from tests.chaos.conftest import Figures
from tests.chaos.rig import SHORT
from tests.proxy.conftest import MODES, running_gateway
from tests.proxy.scripted import ScriptedReplica

LONG = {"fast": 10_000, "asgi": 2_000}
"""The ASGI way hands on the same bytes object; what differs is how it is read."""


@pytest.mark.parametrize("way", MODES)
def test_15_request_identity(tmp_path: Path, figures: Figures, way: str) -> None:
    """O-14."""
    examples = 500 if SHORT else LONG[way]
    with identity.replica_in_a_thread(identity.answer_with_digest) as replica:
        with identity.gateway_before(replica, tmp_path, way) as url:
            sent, size, changed = identity.send_bodies(url, examples)
    measured = f"{sent} bodies ({size / sent:.0f} bytes on average), {len(changed)} with another SHA-256"
    figures.record(15, f'http = "{way}"', measured, f"{examples:,} equal", not changed and sent >= examples * 0.9)
    assert changed == []


@pytest.mark.parametrize("way", MODES)
async def test_17_header_contract(figures: Figures, way: str) -> None:
    """O-18."""
    async with ScriptedReplica(identity.answer_by_contract).running() as replica:
        async with running_gateway(replica, mode=way) as gateway:
            broken = await identity.broken_rules(gateway.port, replica)
    fields = len(identity.REQUEST) + len(identity.ANSWER) + 4
    measured = f"{fields} fields both ways, broken: {', '.join(broken) or 'none'}"
    figures.record(17, f'http = "{way}"', measured, "about 40 fields, none broken", not broken)
    assert broken == []


@pytest.mark.parametrize("way", MODES)
def test_17_generated_headers(tmp_path: Path, figures: Figures, way: str) -> None:
    examples = 200 if SHORT else 2_000
    with identity.replica_in_a_thread(identity.answer_with_head) as replica:
        with identity.gateway_before(replica, tmp_path, way) as url:
            sent, changed = identity.send_headers(url, examples)
    measured = f"{sent} generated lists, {len(changed)} changed"
    figures.record(17, f'generated headers, http = "{way}"', measured, "none changed", not changed)
    assert changed == []
