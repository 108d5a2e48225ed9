"""Test 29, security sweep: admin off by default, what nobody gets the gateway to fetch, and marked words in the record.

The key matrix and the timing of wrong keys have modules of their own; `tests/test_privacy.py` has the words in detail.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx

from gateway.keys import new_entry
from tests.chaos.conftest import Figures
from tests.chaos.rig import Rig, eventually, standing
from tests.test_admin import CHANGES, FORBIDDEN
from tests.test_privacy import BODY, CHAT, HEADERS, WORDS, is_ready, marked

KEY = "an-admin-key-for-the-sweep"
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD")
KEYS = ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Bearer {KEY}"}, {"x-api-key": KEY})


async def test_29_admin_is_off_by_default(tmp_path: Path, figures: Figures) -> None:
    """O-23: no path, spelling, method or key changes a gateway without an admin listener."""
    async with standing(tmp_path, replicas=1) as rig, httpx.AsyncClient(trust_env=False) as client:
        name = rig.replicas[0].url.removeprefix("http://")
        paths = ["/warmlane/replicas", f"/warmlane/replicas/{name}", f"/warmlane/replicas/{name}/drain"]
        tried = changed = 0
        for path in paths:
            for spelling in (path, path.replace("/warmlane", "//warmlane"), path.replace("w", "%77", 1), path.upper()):
                for method in METHODS:
                    for key in KEYS:
                        await client.request(
                            method, rig.gateway.url + spelling, headers=key, json={"url": "http://10.0.0.1:8000"}
                        )
                        tried += 1
        view = (await rig.gateway.get("/warmlane/replicas")).json()
        changed = sum(one["draining"] for one in view["replicas"]) + len(view["registrations"])
        reached = len(rig.replicas[0].received())
        figures.record(
            29, "admin off by default", f"{changed} changes by {tried} requests", "0", changed == 0 and reached == 0
        )
        assert (changed, reached, len(view["replicas"])) == (0, 0, 1)


async def test_29_registrations_that_would_fetch_from_inside_are_refused(tmp_path: Path, figures: Figures) -> None:
    """O-23: without key, with a wrong key, with the admin key; what is allowed to be fetched at all is one network."""
    async with trap() as (trap_url, connections), with_admin(tmp_path) as (rig, admin):
        urls = [*(url for url, _ in FORBIDDEN), trap_url.replace("127.0.0.1", "localhost"), trap_url]
        answers = 0
        for key in KEYS:
            for url in urls:
                answer = await admin.post("/warmlane/replicas", headers=key, json={"url": url})
                assert answer.status_code in (400, 401, 403), (url, answer.text)
                answers += 1
            for method, path in CHANGES:
                if key != KEYS[2]:
                    assert (await admin.request(method, path, headers=key)).status_code == 401
        view = (await rig.gateway.get("/warmlane/replicas")).json()
        assert view["registrations"] == []
        figures.record(
            29,
            "registrations refused",
            f"{answers} of {answers}, {len(connections)} connections to the trap",
            "all, 0",
            not connections,
        )
        assert connections == []


async def test_29_marked_words_reach_the_replica_and_nothing_else(tmp_path: Path, figures: Figures) -> None:
    """O-22, through the process as it is shipped: prompts reach the replica and nothing else, keys not even that."""
    keys = tmp_path / "keys.toml"
    keys.write_text(new_entry("alice", WORDS["bearer"], None))
    async with with_admin(tmp_path, auth={"keys_file": str(keys)}) as (rig, admin):
        async with httpx.AsyncClient(
            base_url=rig.gateway.url, headers=HEADERS, trust_env=False, timeout=20.0
        ) as client:
            for _ in range(50):
                for body in (
                    json.dumps(BODY).encode(),
                    json.dumps({**BODY, "stream": True}).encode(),
                    b"{" + b"zq7canary",
                ):
                    await client.post(CHAT, content=body)
            await eventually(lambda: len(rig.gateway.log_records()) >= 150, "each request has its record")
            paths = ("/metrics", "/warmlane/replicas", "/v1/models")
            views = [(await client.get(path)).raise_for_status().text for path in paths]
        views.append((await admin.get("/warmlane/replicas", headers=KEYS[2])).text)
        hits = [*marked(rig.gateway.out), *marked(rig.gateway.err), *(line for view in views for line in marked(view))]
        records = len(rig.gateway.log_records())
        assert records == 150
        captured = rig.replicas[0].raw_bytes()
        assert WORDS["prompt"] in captured, "the words were on their way"
        hits += [word for word in (WORDS["bearer"], WORDS["key"]) if word in captured]
    figures.record(
        29,
        "marked words in logs, metrics, views; keys at the replica",
        f"{len(hits)} hits, {records} records",
        "0",
        not hits,
    )
    assert hits == []


@contextlib.asynccontextmanager
async def with_admin(folder: Path, **tables: dict[str, Any]) -> AsyncIterator[tuple[Rig, httpx.AsyncClient]]:
    """A gateway that takes registrations from a network where nothing of this test lives."""
    file = folder / "admin.key"
    file.write_text(KEY)
    config = {"admin": {"port": 0, "key_file": str(file), "allow": ["192.0.2.0/24"]}, **tables}
    async with standing(folder, replicas=1, gateways=0) as rig:
        gateway = await rig.add_gateway(config, wait=False)
        await eventually(lambda: is_ready(gateway), "the gateway is ready")
        found = re.search(r"admin listener on (\S+)", rig.gateway.err)
        assert found is not None
        async with httpx.AsyncClient(base_url=found[1], trust_env=False, timeout=10.0) as admin:
            yield rig, admin


@contextlib.asynccontextmanager
async def trap() -> AsyncIterator[tuple[str, list[str]]]:
    """Something on loopback that must not be asked."""
    connections: list[str] = []

    async def sprung(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(str(writer.get_extra_info("peername")))
        writer.close()

    server = await asyncio.start_server(sprung, "127.0.0.1", 0, family=socket.AF_INET)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", connections
