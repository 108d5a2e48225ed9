"""The page over real sockets: who gets it, what it may load, and that looking changes and delays nothing."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.dashboard.live import MAX_VIEWERS
from gateway.dashboard.site import ASSETS, with_bearer
from tests.proxy.conftest import RunningGateway, eventually, running_gateway
from tests.proxy.scripted import ScriptedReplica

KEY = "an-admin-key-for-tests"
CLIENT_KEY = "wl-a-clients-key"
PATHS = ["/dashboard", *(f"/dashboard/{name}" for name in ASSETS), "/warmlane/live", "/warmlane/decisions"]


def basic(password: str, name: str = "anybody") -> dict[str, str]:
    return {"authorization": "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()}


async def status(gateway: RunningGateway, path: str, headers: dict[str, str] | None = None) -> int:
    """The stream never ends, so only the head is waited for."""
    async with gateway.client.stream("GET", path, headers=headers) as answer:
        return answer.status_code


@contextlib.asynccontextmanager
async def frames(gateway: RunningGateway) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    async def read(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
        async for line in answer.aiter_lines():
            if line:
                yield json.loads(line.removeprefix("data: "))

    async with gateway.client.stream("GET", "/warmlane/live") as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-store"
        yield read(answer)


# -- who gets it


async def test_open_on_loopback(mode: str) -> None:
    async with ScriptedReplica().running() as replica, running_gateway(replica, mode=mode) as gateway:
        for path in PATHS:
            assert await status(gateway, path) == 200, path
        assert await status(gateway, "/dashboard/none.js") == 404
        assert await status(gateway, "/dashboard/../gateway/app.py") == 404


async def test_elsewhere_behind_the_admin_key_as_token_or_password(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setenv("ADMIN", KEY)
    table = {"admin": {"key_env": "ADMIN"}, "server": {"host": "0.0.0.0"}}
    async with ScriptedReplica().running() as replica, running_gateway(replica, mode=mode, **table) as gateway:
        for path in PATHS:
            for headers in ({}, basic("wrong"), {"authorization": "Basic %%%"}, {"authorization": "Bearer wrong"}):
                answer = await gateway.client.get(path, headers=headers)
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key"), path
                assert ("Basic" in answer.headers["www-authenticate"]) == path.startswith("/dashboard")
            for headers in (basic(KEY), basic(KEY, ""), {"authorization": f"Bearer {KEY}"}):
                assert await status(gateway, path, headers) == 200, path


async def test_elsewhere_without_an_admin_key_it_is_closed() -> None:
    async with ScriptedReplica().running() as replica, running_gateway(replica, server={"host": "0.0.0.0"}) as gateway:
        for path in PATHS:
            assert await status(gateway, path, basic(KEY)) == 403, path


async def test_where_clients_need_keys_the_page_needs_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADMIN", KEY)
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[[keys]]\nname = "a"\nsha256 = "{hashlib.sha256(CLIENT_KEY.encode()).hexdigest()}"\n')
    table = {"admin": {"key_env": "ADMIN"}, "auth": {"keys_file": str(keys)}}
    async with ScriptedReplica().running() as replica, running_gateway(replica, key=CLIENT_KEY, **table) as gateway:
        async with httpx.AsyncClient(base_url=gateway.url, trust_env=False) as stranger:
            refused = await stranger.get("/dashboard")
            assert refused.status_code == 401
            assert "Basic " in refused.headers["www-authenticate"]
            for password in (KEY, CLIENT_KEY):
                assert (await stranger.get("/dashboard", headers=basic(password))).status_code == 200
            assert (await stranger.get("/metrics", headers=basic(CLIENT_KEY))).status_code == 401, "for views only"


async def test_switched_off_there_is_nothing() -> None:
    async with (
        ScriptedReplica().running() as replica,
        running_gateway(replica, server={"dashboard": False}) as gateway,
    ):
        for path in PATHS:
            assert await status(gateway, path) == 404, path
        assert (await gateway.chat()).status_code == 200


@pytest.mark.parametrize(
    "value", [b"Basic", b"Basic !!!!", b"Basic YQ", b"Bearer YTpi", b"Basic YTpi YTpi", b"basic YTpi, Bearer x"]
)
def test_what_is_no_password_stays_as_it_is(value: bytes) -> None:
    assert with_bearer(b"authorization", value) == (b"authorization", value)
    assert with_bearer(b"x-api-key", b"Basic YTpi") == (b"x-api-key", b"Basic YTpi")


# -- what the page is


async def test_the_page_loads_its_own_files_and_nothing_else() -> None:
    async with ScriptedReplica().running() as replica, running_gateway(replica) as gateway:
        page = await gateway.client.get("/dashboard")
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert page.headers["x-content-type-options"] == "nosniff"
        assert "{{" not in page.text
        assert not re.search(r"(?i)https?://(?!gpu-1)|<style|\son[a-z]+=|style=", page.text)
        loaded = re.findall(r'(?:src|href)="(?!#|data:)([^"]+)"', page.text)
        for name in ASSETS:
            text = (await gateway.client.get(f"/dashboard/{name}")).text
            loaded += [f"dashboard/{one}" for one in re.findall(r'from "\./([^"]+)"', text)]
            assert not re.search(r"innerHTML|eval\(|document\.write|localStorage|@import|url\(", text), name
        assert set(loaded) == {f"dashboard/{name}" for name in ASSETS}


async def test_the_page_may_ask_the_admin_listener_by_the_name_it_was_asked_for(caplog, monkeypatch) -> None:
    monkeypatch.setenv("ADMIN", KEY)
    async with (
        ScriptedReplica().running() as replica,
        running_gateway(replica, admin={"key_env": "ADMIN", "port": 0}) as gateway,
    ):
        for host in ("gateway.example:8000", "127.0.0.1", "[::1]:8000"):
            page = await gateway.client.get("/dashboard", headers={"host": host})
            name = host.removesuffix(":8000")
            (origin,) = re.findall(r'<meta name="admin" content="([^"]*)">', page.text)
            assert re.fullmatch(re.escape(f"http://{name}:") + r"\d+", origin)
            assert f"connect-src 'self' {origin};" in page.headers["content-security-policy"]
        odd = await gateway.client.get("/dashboard", headers={"host": "a;script-src *"})
        assert odd.status_code >= 400 or "connect-src 'self';" in odd.headers["content-security-policy"]


# -- the stream


async def test_a_request_turns_up_with_its_reason_and_its_end_and_without_its_prompt() -> None:
    async with ScriptedReplica().running() as replica, running_gateway(replica) as gateway:
        async with frames(gateway) as stream:
            assert (await anext(stream))["whole"]
            asked = await gateway.chat("zq7canary " * 200, user="zq7canary")
            told, seen = [], ""
            async for frame in stream:
                seen += json.dumps(frame)
                told += frame["decisions"] + frame["ended"]
                if any(one["end"] for one in told):
                    break
        first = next(one for one in told if "ranking" in one)
        assert first["request_id"] == asked.headers["x-request-id"]
        assert (first["replica"], first["reason"], first["model"]) == (replica.url, "only", "m")
        assert set(first["ranking"][0]["parts"]) >= {"queue", "prefill"}
        listed = (await gateway.client.get("/warmlane/decisions")).json()["decisions"]
        assert [one["end"]["outcome"] for one in listed] == ["completed"]
        assert "zq7canary" not in seen + json.dumps(listed)


async def test_viewers_are_counted_and_those_beyond_the_limit_refused() -> None:
    async with ScriptedReplica().running() as replica, running_gateway(replica) as gateway:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(MAX_VIEWERS):
                _, writer = await gateway.connect()
                writer.write(b"GET /warmlane/live HTTP/1.1\r\nhost: x\r\n\r\n")
                stack.callback(writer.close)

            async def is_full() -> bool:
                return await status(gateway, "/warmlane/live") == 503

            await eventually(is_full)

        async def has_room() -> bool:
            return await status(gateway, "/warmlane/live") == 200

        await eventually(has_room)


async def test_the_gateway_does_not_wait_for_who_looks() -> None:
    """With half an hour to drain it ends within a tick or two: the test's own limit is 15 s."""
    async with ScriptedReplica().running() as replica:
        async with running_gateway(replica, server={"drain_seconds": 1_800.0}) as gateway:
            async with frames(gateway) as stream:
                await anext(stream)
                gateway.stop()
                async for _ in stream:
                    pass
            assert await asyncio.wait_for(asyncio.shield(gateway.task), 15.0) == 0
