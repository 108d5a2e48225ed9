"""Changes while the gateway runs: who may make them, what they do to the traffic, and what nobody gets it to fetch."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import logging
import os
import re
import signal
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway import app
from gateway.admin_key import AdminKey, read_admin_key
from gateway.assembly import Gateway
from gateway.cli import main
from gateway.config import Admin, Config, ConfigError, Discovery, Feeds, Replica, Server, load
from gateway.control import build_api
from gateway.operate import table
from tests.proxy.certificates import Authority
from tests.proxy.conftest import eventually, until_ready
from tests.proxy.scripted import Exchange, ScriptedReplica, answer_chat

KEY = "an-admin-key-for-tests"
BEARER = {"authorization": f"Bearer {KEY}"}
VARIABLE = "WARMLANE_TEST_ADMIN_KEY"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
CHANGES = [
    ("POST", "/warmlane/replicas"),
    ("DELETE", "/warmlane/replicas/10.0.0.1:8000"),
    ("POST", "/warmlane/replicas/10.0.0.1:8000/drain"),
    ("POST", "/warmlane/replicas/10.0.0.1:8000/undrain"),
]


@dataclass
class Operated:
    """A running gateway, its two addresses and a client for each."""

    url: str
    client: httpx.AsyncClient
    admin_url: str
    admin: httpx.AsyncClient
    """Shows the key."""

    async def chat(self, **fields: Any) -> httpx.Response:
        return await self.client.post("/v1/chat/completions", json={**CHAT, **fields})

    async def replicas(self) -> dict[str, dict[str, Any]]:
        view = (await self.admin.get("/warmlane/replicas")).json()
        return {one["replica"]: one for one in view["replicas"]}

    async def register(self, url: str, **fields: Any) -> httpx.Response:
        return await self.admin.post("/warmlane/replicas", json={"url": url, **fields})


@contextlib.asynccontextmanager
async def operated(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    *replicas: ScriptedReplica,
    host: str = "127.0.0.1",
    authority: Authority | None = None,
    admin_host: str = "127.0.0.1",
    **admin: Any,
) -> AsyncIterator[Operated]:
    monkeypatch.setenv(VARIABLE, KEY)
    caplog.set_level(logging.INFO, logger="gateway")
    verify: ssl.SSLContext | bool = True
    certificate: dict[str, str] = {}
    if authority is not None:
        verify, pair = authority.client_context(), authority.issue("gateway", "IP:127.0.0.1")
        certificate = {"tls_certificate": str(pair.certificate), "tls_key": str(pair.key)}
    config = Config(
        server=Server(host=host, port=0, log="off", drain_delay_seconds=0.0, drain_seconds=1.0, **certificate),
        replicas=[Replica(url=replica.url) for replica in replicas],
        discovery=Discovery(interval_seconds=0.1),
        feeds=Feeds(probe_interval_seconds=0.1, scrape_interval_seconds=0.1, probe_timeout_seconds=1.0),
        admin=Admin(**{"host": admin_host, "port": 0, "key_env": VARIABLE, **admin}),
    )
    listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    caplog.clear()
    task = asyncio.create_task(app.serve(config, on_ready=listening.set_result))
    done, _ = await asyncio.wait((listening, task), timeout=10, return_when=asyncio.FIRST_COMPLETED)
    if task in done:
        task.result()
    url = listening.result()
    found = re.search(r"admin listener on (\S+)", caplog.text)
    admin_url = found[1] if found else url
    try:
        async with (
            httpx.AsyncClient(base_url=url, trust_env=False, timeout=10, verify=verify) as client,
            httpx.AsyncClient(
                base_url=admin_url, trust_env=False, timeout=10, headers=BEARER, verify=verify
            ) as key_holder,
        ):
            await until_ready(client, len(replicas))
            yield Operated(url, client, admin_url, key_holder)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(task, 15)


# -- the key


@pytest.mark.parametrize(
    ("headers", "opens"),
    [
        ([(b"authorization", b"Bearer " + KEY.encode())], True),
        ([(b"x", b"y"), (b"authorization", b"bearer   " + KEY.encode() + b" ")], True),
        ([], False),
        ([(b"authorization", b"")], False),
        ([(b"authorization", b"Bearer ")], False),
        ([(b"authorization", b"Basic " + KEY.encode())], False),
        ([(b"authorization", KEY.encode())], False),
        ([(b"authorization", b"Bearer " + KEY.encode() + b"x")], False),
        ([(b"authorization", b"Bearer " + KEY[:-1].encode())], False),
        ([(b"x-api-key", KEY.encode())], False),
        ([(b"authorization", b"Bearer " + KEY.encode())] * 2, False),
        ([(b"authorization", b"Bearer \xff\xfe")], False),
    ],
)
def test_the_key_opens_as_one_bearer_token_only(headers, opens):
    assert AdminKey(hashlib.sha256(KEY.encode()).digest()).opens(headers) is opens


def test_a_key_comes_from_a_variable_or_a_file_plain_or_as_its_digest(tmp_path, monkeypatch):
    file = tmp_path / "key"
    digest = f"sha256:{hashlib.sha256(KEY.encode()).hexdigest()}"
    for text in (KEY, f"  {KEY}\n", digest, digest.upper().replace("SHA", "sha")):
        monkeypatch.setenv(VARIABLE, text)
        file.write_text(text)
        for admin in (Admin(key_env=VARIABLE), Admin(key_file=str(file))):
            assert read_admin_key(admin, os.environ).opens([(b"authorization", f"Bearer {KEY}".encode())])
    assert read_admin_key(Admin(), os.environ) is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is empty"),
        ("short", "at least 16 characters"),
        ("fifteen-letters", "at least 16 characters"),
        ("sha256:abc", "at least 16 characters"),
        ("with a space in it", "cannot stand in a header"),
        ("ümlaut-ümlaut-ümlaut", "cannot stand in a header"),
    ],
)
def test_a_key_that_cannot_be_one_is_refused_without_repeating_it(tmp_path, text, problem):
    file = tmp_path / "key"
    file.write_text(text)
    with pytest.raises(ConfigError, match=problem) as refused:
        read_admin_key(Admin(key_file=str(file)), os.environ)
    assert not text or text not in str(refused.value)


def test_a_key_that_is_not_there_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=VARIABLE):
        read_admin_key(Admin(key_env=VARIABLE), os.environ)
    with pytest.raises(ConfigError, match="No such file"):
        read_admin_key(Admin(key_file=str(tmp_path / "nowhere")), os.environ)


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ("port = 8001", "admin.port: changes of state need a key"),
        ('port = 8001\nkey_env = "A"\nkey_file = "b"', "admin.key_file: there is a key_env already"),
        ('key_env = "A"\nallow = ["10.0.0.0/8"]', "admin.allow: registrations come in on a listener of their own"),
        ('port = 8001\nkey_env = "A"\nallow = ["10.0.0.1/8"]', "admin.allow[0]: 10.0.0.1/8 has host bits set"),
        ('port = 8001\nkey_env = "A"\nallow = ["gpu-1"]', "admin.allow[0]: "),
        ('token = "x"', "unknown key admin.token"),
    ],
)
def test_a_configuration_that_would_leave_a_door_open_is_refused(tmp_path, table, problem):
    path = tmp_path / "warmlane.toml"
    path.write_text(f"[admin]\n{table}\n")
    with pytest.raises(ConfigError, match=re.escape(problem)):
        load(path)


# -- off by default, and closed without the key


async def test_without_configuration_there_is_nothing_that_changes_state() -> None:
    """O-23: admin is off by default."""
    async with ScriptedReplica().running() as replica:
        config = Config(server=Server(port=0, log="off"), replicas=[Replica(url=replica.url)])
        gateway = Gateway(config, asyncio.get_running_loop())
        transport = httpx.ASGITransport(build_api(gateway))
        async with gateway.run_beside(), httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            await until_ready(client, 1)
            for method, path in CHANGES:
                answer = await client.request(method, path, headers=BEARER, json={"url": "http://10.0.0.1"})
                assert answer.status_code in (404, 405), path
            drained = await client.post(f"/warmlane/replicas/{replica.url}/drain", headers=BEARER)
            assert drained.status_code == 404
            assert not gateway.router.statistics(gateway.clock()).replicas[0].draining
        assert replica.exchanges == []


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong"}, {"x-api-key": KEY}])
async def test_nothing_on_the_admin_listener_answers_without_the_key(caplog, monkeypatch, headers) -> None:
    async with ScriptedReplica().running() as replica, operated(caplog, monkeypatch, replica) as gateway:
        async with httpx.AsyncClient(base_url=gateway.admin_url, headers=headers, trust_env=False) as stranger:
            for method, path in [
                *CHANGES,
                ("GET", "/warmlane/replicas"),
                ("GET", "/openapi.json"),
                ("GET", "/nowhere"),
            ]:
                answer = await stranger.request(method, path)
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key"), path
        assert not (await gateway.replicas())[replica.url]["draining"]


async def test_the_admin_listener_serves_no_inference_and_the_gateway_no_changes(caplog, monkeypatch) -> None:
    async with ScriptedReplica().running() as replica, operated(caplog, monkeypatch, replica) as gateway:
        assert (await gateway.admin.post("/v1/chat/completions", json=CHAT)).status_code == 404
        for method, path in CHANGES:
            answer = await gateway.client.request(method, path, headers=BEARER, json={"url": replica.url})
            assert answer.status_code in (404, 405)
        assert replica.exchanges == []


async def test_a_page_of_another_origin_may_ask_and_needs_the_key_all_the_same(caplog, monkeypatch) -> None:
    """The drain button of the live page; a preflight is told nothing, and changes nothing."""
    page = {"origin": "http://gateway:8000"}
    wish = {**page, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    async with ScriptedReplica().running() as replica, operated(caplog, monkeypatch, replica) as gateway:
        path = f"/warmlane/replicas/{replica.url}/drain"
        async with httpx.AsyncClient(base_url=gateway.admin_url, headers=page, trust_env=False) as stranger:
            for asked in (path, "/nowhere"):
                told = await stranger.options(asked, headers=wish)
                assert (told.status_code, told.content) == (204, b"")
                assert told.headers["access-control-allow-headers"] == "authorization"
                assert "access-control-allow-credentials" not in told.headers
            assert (await stranger.options(path)).status_code == 401
            basic = base64.b64encode(f"x:{KEY}".encode()).decode()
            for headers in ({}, {"authorization": f"Basic {basic}"}):
                assert (await stranger.post(path, headers=headers)).status_code == 401, "browsers send these unasked"
            assert not (await gateway.replicas())[replica.url]["draining"]
            done = await stranger.post(path, headers=BEARER)
            assert (done.status_code, done.headers["access-control-allow-origin"]) == (200, "*")


# -- views


@pytest.mark.parametrize("view", [("GET", "/warmlane/replicas"), ("POST", "/warmlane/route")])
async def test_views_are_open_on_loopback_and_want_the_key_elsewhere(caplog, monkeypatch, view) -> None:
    method, path = view
    async with ScriptedReplica().running() as replica:
        async with operated(caplog, monkeypatch, replica) as gateway:
            assert (await gateway.client.request(method, path, json=CHAT)).status_code == 200
        async with operated(caplog, monkeypatch, replica, host="0.0.0.0", port=None) as gateway:
            for headers in ({}, {"authorization": "Bearer wrong"}):
                answer = await gateway.client.request(method, path, json=CHAT, headers=headers)
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
            assert (await gateway.client.request(method, path, json=CHAT, headers=BEARER)).status_code == 200
        async with operated(caplog, monkeypatch, replica, host="0.0.0.0", port=None, key_env=None) as gateway:
            answer = await gateway.client.request(method, path, json=CHAT, headers=BEARER)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "not_open")
        assert replica.exchanges == []


async def test_the_view_of_the_replicas(caplog, monkeypatch) -> None:
    async with ScriptedReplica().running() as replica, operated(caplog, monkeypatch, replica) as gateway:
        await eventually(lambda: _has_load(gateway, replica.url))
        one = (await gateway.replicas())[replica.url]
        assert (one["source"], one["health"], one["available"], one["draining"]) == ("configured", "up", True, False)
        assert (one["models"], one["in_flight"]) == (["m"], 0)
        assert (one["cache_tokens"], one["cache_tokens_known"]) == (100_000, True)
        assert one["load"]["running"] == one["load"]["waiting"] == one["load"]["kv_usage"] == 0
        assert 0 <= one["load"]["age_seconds"] < 10


async def test_the_view_says_which_engine_runs_where(caplog, monkeypatch) -> None:
    vllm, ollama = ScriptedReplica(), ScriptedReplica(models=("llama3:latest",))
    ollama.models[0]["owned_by"], ollama.metrics = "library", b""
    async with vllm.running(), ollama.running(), operated(caplog, monkeypatch, vllm, ollama) as gateway:
        await eventually(lambda: _has_load(gateway, vllm.url))
        view = await gateway.replicas()
        assert (view[vllm.url]["engine"], view[ollama.url]["engine"]) == ("vllm", "ollama")
        assert f"{ollama.url} runs ollama" in caplog.text
        for name in ("llama3", "llama3:latest"):
            answer = await gateway.chat(model=name)
            assert (answer.status_code, answer.headers["x-warmlane-replica"]) == (200, ollama.url)
            assert ollama.exchanges[-1].body.count(f'"{name}"'.encode()) == 1, "the body goes as it came"


async def _has_load(gateway: Operated, url: str) -> bool:
    return (await gateway.replicas())[url]["load"] is not None


# -- drain


async def test_a_drained_replica_finishes_what_it_has_and_gets_nothing_new(caplog, monkeypatch) -> None:
    release = asyncio.Event()

    async def held(exchange: Exchange) -> None:
        await release.wait()
        await answer_chat(exchange)

    first, second = ScriptedReplica(held), ScriptedReplica()
    async with first.running(), operated(caplog, monkeypatch, first) as gateway:
        running = asyncio.create_task(gateway.chat())
        await eventually(lambda: len(first.exchanges) == 1)
        drained = await gateway.admin.post(f"/warmlane/replicas/{first.url.removeprefix('http://')}/drain")
        assert (drained.status_code, drained.json()["draining"], drained.json()["in_flight"]) == (200, True, 1)
        refused = await gateway.chat()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_replica")
        assert (await gateway.client.get("/ready")).status_code == 503
        release.set()
        assert (await running).status_code == 200
        undrained = await gateway.admin.post(f"/warmlane/replicas/{first.url}/undrain")
        assert undrained.json()["draining"] is False
        assert (await gateway.chat()).status_code == 200
    assert second.exchanges == []


@pytest.mark.parametrize("name", ["10.9.9.9:8000", "http://10.9.9.9:8000", "no%20name", "..", "http:"])
async def test_draining_whom_nobody_knows(caplog, monkeypatch, name) -> None:
    async with ScriptedReplica().running() as replica, operated(caplog, monkeypatch, replica) as gateway:
        answer = await gateway.admin.post(f"/warmlane/replicas/{name}/drain")
        assert answer.status_code in (404, 405)
        assert answer.json()["error"]["message"]


# -- registration, over real sockets


LOCAL = {"allow": ["127.0.0.0/8"]}


async def test_a_registered_replica_serves_until_it_is_taken_back(caplog, monkeypatch) -> None:
    async with ScriptedReplica().running() as fixed, ScriptedReplica(models=("new",)).running() as added:
        async with operated(caplog, monkeypatch, fixed, **LOCAL) as gateway:
            assert (await gateway.chat(model="new")).status_code == 404
            answer = await gateway.register(added.url, prefill_rate=20_000, lease_seconds=60)
            assert answer.status_code == 200
            assert answer.json()["addresses"] == [{"replica": added.url, "in": True, "problem": ""}]
            assert 0 < answer.json()["lease_seconds_left"] <= 60
            await eventually(lambda: _is_up(gateway, added.url))
            assert (await gateway.chat(model="new")).headers["x-warmlane-replica"] == added.url
            assert (await gateway.replicas())[added.url]["source"] == "registered"
            assert (await gateway.admin.delete(f"/warmlane/replicas/{added.url}")).status_code == 204
            assert added.url not in await gateway.replicas()
            assert (await gateway.chat(model="new")).status_code == 404
            assert (await gateway.admin.delete(f"/warmlane/replicas/{added.url}")).status_code == 404


async def test_however_its_url_is_written_it_is_one_replica(caplog, monkeypatch) -> None:
    async with ScriptedReplica().running() as fixed, ScriptedReplica(models=("new",)).running() as added:
        async with operated(caplog, monkeypatch, fixed, **LOCAL) as gateway:
            port = added.url.rsplit(":", 1)[1]
            spellings = [added.url, f"HTTP://127.1:{port}/", f"http://0x7f.0.0.1:0{port}", f"http://2130706433:{port}"]
            for url in spellings:
                assert (await gateway.register(url)).json()["url"] == added.url
            assert set(await gateway.replicas()) == {fixed.url, added.url}
            assert len((await gateway.admin.get("/warmlane/replicas")).json()["registrations"]) == 1
            for verb, url in (("drain", f"127.1:{port}"), ("undrain", f"http://127.0.0.1.:{port}")):
                answer = await gateway.admin.post(f"/warmlane/replicas/{url}/{verb}")
                assert answer.json()["draining"] == (verb == "drain")
            assert (await gateway.admin.delete(f"/warmlane/replicas/{spellings[2]}")).status_code == 204


async def _is_up(gateway: Operated, url: str) -> bool:
    return (await gateway.replicas())[url]["health"] == "up"


async def test_a_registered_replica_does_not_take_over_a_model(caplog, monkeypatch) -> None:
    """O-23."""
    async with ScriptedReplica().running() as fixed, ScriptedReplica().running() as rogue:
        async with operated(caplog, monkeypatch, fixed, **LOCAL) as gateway:
            (address,) = (await gateway.register(rogue.url)).json()["addresses"]
            assert (address["in"], address["problem"]) == (False, "lists models that others serve: 'm'")
            for _ in range(20):
                assert (await gateway.chat()).headers["x-warmlane-replica"] == fixed.url
            view = (await gateway.admin.get("/warmlane/replicas")).json()
            assert view["registrations"][0]["addresses"] == [address], "it stays out where everybody can see why"
        assert rogue.exchanges == []
        async with operated(caplog, monkeypatch, fixed, allow_existing_models=True, **LOCAL) as gateway:
            await gateway.register(rogue.url)
            await eventually(lambda: _is_up(gateway, rogue.url))
            assert {(await gateway.chat()).headers["x-warmlane-replica"] for _ in range(20)} == {fixed.url, rogue.url}


async def test_a_configured_replica_cannot_be_taken_back(caplog, monkeypatch) -> None:
    async with ScriptedReplica().running() as fixed, operated(caplog, monkeypatch, fixed, **LOCAL) as gateway:
        await gateway.register(fixed.url)
        await gateway.admin.delete(f"/warmlane/replicas/{fixed.url}")
        assert (await gateway.admin.delete(f"/warmlane/replicas/{fixed.url}")).status_code == 404
        assert (await gateway.chat()).status_code == 200


FORBIDDEN = [
    ("http://169.254.169.254/", 403),
    ("http://169.254.169.254:80", 403),
    ("http://[::ffff:169.254.169.254]", 403),
    ("http://[fe80::1%25lo]:80", 403),
    ("http://10.0.0.1:8000", 403),
    ("http://0.0.0.0:8000", 403),
    ("http://[::1]:8000", 403),
    ("file:///etc/passwd", 400),
    ("gopher://127.0.0.1:6379/_INFO", 400),
    ("ftp://127.0.0.1", 400),
    ("http://user:pw@127.0.0.1:8000", 400),
    ("http://127.0.0.1@169.254.169.254", 400),
    ("http://127.0.0.1:8000/v1", 400),
    ("http://127.0.0.1:8000?x=y", 400),
    ("http://127.0.0.1:8000#x", 400),
    ("http://127.0.0.1:0", 400),
    ("http://127.0.0.1:99999", 400),
    ("http://127.0.0.1\r\nx: y", 400),
    ("http://", 400),
    ("//127.0.0.1:8000", 400),
    ("127.0.0.1:8000", 400),
    ("http://" + "a" * 300, 400),
    ("http://nowhere.invalid", 400),
    ("", 400),
]


async def test_what_nobody_gets_the_gateway_to_fetch(caplog, monkeypatch) -> None:
    """O-23, the list."""
    async with ScriptedReplica().running() as fixed, operated(caplog, monkeypatch, fixed, **LOCAL) as gateway:
        for url, status in FORBIDDEN:
            answer = await gateway.register(url)
            assert answer.status_code == status, url
            assert answer.json()["error"]["message"]
            assert "pw@" not in answer.text
        view = (await gateway.admin.get("/warmlane/replicas")).json()
        assert view["registrations"] == []
        assert [one["replica"] for one in view["replicas"]] == [fixed.url]


async def test_a_replica_that_redirects_is_not_followed(caplog, monkeypatch) -> None:
    """O-23: neither the registration nor the probes go where a 302 points."""
    asked: list[str] = []

    async def redirect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readuntil(b"\r\n\r\n")).decode().split(" ")[1])
        writer.write(f"HTTP/1.1 302 Found\r\nlocation: {trap.url}/v1/models\r\ncontent-length: 0\r\n\r\n".encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(redirect, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, ScriptedReplica().running() as fixed, ScriptedReplica(models=("x",)).running() as trap:
        async with operated(caplog, monkeypatch, fixed, **LOCAL) as gateway:
            (address,) = (await gateway.register(f"http://127.0.0.1:{port}")).json()["addresses"]
            assert (address["in"], address["problem"]) == (False, "does not list its models: HTTP 302")
            await eventually(lambda: len(asked) >= 3)  # asked again, each interval
            assert set(asked) == {"/v1/models"}
        assert (trap.connections, trap.exchanges) == (0, [])


NONE = [
    b"",
    b"[]",
    b"null",
    b"{}",
    b'{"url": 5}',
    b'{"url": "http://127.0.0.1", "models": ["m"]}',
    b'{"url": "http://127.0.0.1", "lease_seconds": -1}',
    b'{"url": "http://127.0.0.1", "prefill_rate": 0}',
    b"\xff",
    b"[" * 50_000,
    b"[" * 100_000,
]


async def test_a_registration_that_is_none(caplog, monkeypatch) -> None:
    async with ScriptedReplica().running() as fixed, operated(caplog, monkeypatch, fixed, **LOCAL) as gateway:
        for body in NONE:
            answer = await gateway.admin.post("/warmlane/replicas", content=body)
            assert answer.status_code in (400, 413), body[:50]
            assert answer.json()["error"]["code"] in ("invalid_registration", "request_too_large"), body[:50]
            assert answer.status_code != 413 or "(64 KiB)" in answer.json()["error"]["message"]


# -- the command


async def run_here(*arguments: str) -> object:
    """The exit code of a command that runs beside this event loop."""

    def run() -> object:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        return ended.value.code

    return await asyncio.to_thread(run)


async def test_the_command_shows_drains_and_undrains(caplog, monkeypatch, capsys) -> None:
    async with ScriptedReplica().running() as replica, operated(caplog, monkeypatch, replica) as gateway:
        key = ("--key-env", VARIABLE)
        assert await run_here("replicas", "--url", gateway.url) == 0
        head, row = capsys.readouterr().out.splitlines()
        assert head.split()[:3] == ["replica", "source", "engine"]
        assert row.split()[:4] == [replica.url, "configured", "vllm", "up"]

        assert await run_here("drain", replica.url, "--url", gateway.admin_url, *key) == 0
        assert capsys.readouterr().out == f"{replica.url}: draining, 0 requests there\n"
        assert await run_here("replicas", "--url", gateway.admin_url, "--json", *key) == 0
        assert json.loads(capsys.readouterr().out)["replicas"][0]["draining"] is True
        name = replica.url.removeprefix("http://")
        assert await run_here("undrain", name, "--url", gateway.admin_url, *key) == 0
        assert capsys.readouterr().out == f"{replica.url}: up, 0 requests there\n"

        assert await run_here("drain", replica.url, "--url", gateway.admin_url, "--key-env", "NOT_SET") == 1
        unset = capsys.readouterr().err
        assert "HTTP 401" in unset
        assert unset.endswith("$NOT_SET is not set: --key-env names the variable with the admin key.\n")
        monkeypatch.setenv("OTHER", "x" * 40)
        assert await run_here("drain", replica.url, "--url", gateway.admin_url, "--key-env", "OTHER") == 1
        assert "$OTHER holds another key" in capsys.readouterr().err
        assert await run_here("drain", "http://10.0.0.9:1", "--url", gateway.admin_url, *key) == 1
        assert "No such replica" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["drain", "a:1"], ["undrain", "a:1"], ["restart", "a:1"], ["restart", "--all"]])
async def test_a_change_asked_of_the_gateway_itself_says_where_to_ask(caplog, monkeypatch, capsys, arguments) -> None:
    async with operated(caplog, monkeypatch) as gateway:
        assert await run_here(*arguments, "--url", gateway.url, "--key-env", VARIABLE) == 1
        said = capsys.readouterr().err
        assert "this is not an admin listener" in said
        assert said.endswith("give the address of [admin], see docs/admin.md\n")


async def test_the_command_says_why_a_replica_is_out(caplog, monkeypatch, capsys) -> None:
    async with ScriptedReplica().running() as replica:
        async with operated(caplog, monkeypatch, replica) as gateway:
            assert await run_here("replicas", "--url", gateway.url) == 0
            assert len(capsys.readouterr().out.splitlines()) == 2, "nothing to say of one that is up"
            view = json.dumps(
                {
                    "replicas": [
                        {**one, "health": "ejected", "last_failure": "connection refused"}
                        for one in (await gateway.replicas()).values()
                    ],
                    "registrations": [],
                }
            )
            assert table(view.encode()).splitlines()[-1] == f"{replica.url} is ejected: connection refused"


async def test_the_command_shows_who_stays_out(caplog, monkeypatch, capsys) -> None:
    async with ScriptedReplica().running() as fixed, ScriptedReplica().running() as rogue:
        async with operated(caplog, monkeypatch, fixed, **LOCAL) as gateway:
            await gateway.register(rogue.url)
            assert await run_here("replicas", "--url", gateway.url) == 0
            last = capsys.readouterr().out.splitlines()[-1]
            assert last == f"registered but out: {rogue.url}: lists models that others serve: 'm'"


async def test_the_dry_run_command_shows_the_key(caplog, monkeypatch, capsys, tmp_path: Path) -> None:
    body = tmp_path / "body.json"
    body.write_text(json.dumps(CHAT))
    async with ScriptedReplica().running() as replica:
        async with operated(caplog, monkeypatch, replica, host="0.0.0.0", port=None) as gateway:
            assert await run_here("route", "--url", gateway.url, "--key-env", "NOT_SET", str(body)) == 1
            assert "HTTP 401" in capsys.readouterr().err
            assert await run_here("route", "--url", gateway.url, "--key-env", VARIABLE, str(body)) == 0
            assert capsys.readouterr().out.startswith("policy cache-cost: ")


async def test_a_remote_admin_listener_has_the_gateways_certificate(caplog, monkeypatch, capsys, tmp_path) -> None:
    authority = Authority(tmp_path, "ours")
    async with ScriptedReplica().running() as replica:
        async with operated(caplog, monkeypatch, replica, authority=authority) as gateway:
            assert gateway.admin_url.startswith("http://127.0.0.1:"), "nobody else can listen there"
        async with operated(caplog, monkeypatch, replica, authority=authority, host="0.0.0.0") as gateway:
            assert gateway.url.startswith("https://")
        async with operated(caplog, monkeypatch, replica, authority=authority, admin_host="0.0.0.0") as gateway:
            assert gateway.admin_url.startswith("https://")
            command = ("drain", replica.url, "--url", gateway.admin_url, "--key-env", VARIABLE)
            assert await run_here(*command) == 1
            assert "certificate" in capsys.readouterr().err
            monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
            assert await run_here(*command) == 0
            assert (await gateway.replicas())[replica.url]["draining"]
