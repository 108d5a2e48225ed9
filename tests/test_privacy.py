"""What clients say and show stays between them and the replica (O-22): the real command in a process of its own, with
everything switched on that could tell, and marked words wherever a client can put them. They must turn up nowhere else.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis import Redis

from gateway.feeds.peer_entries import MAX_ENTRY_BYTES, PURPOSE
from gateway.feeds.sealing import Opener, Seal
from gateway.keys import new_entry
from tests.chaos.rig import GatewayProcess, eventually
from tests.proxy.collector import Collector
from tests.proxy.scripted import Exchange, ScriptedReplica, answer_chat
from tests.redis_server import RedisServer, redis_server

MARK = "zq7canary"
"""Begins every marked word; in base64 and percent-encoded too it would show."""
PLACES = (
    *("bearer", "key", "cookie", "query", "prompt", "image", "arguments", "session", "user", "echo"),
    *("system", "tool", "url", "metadata", "state", "baggage", "model"),
)
WORDS = {place: f"{MARK}-{place}-5f1b" for place in PLACES}
IMAGE = base64.b64encode(WORDS["image"].encode() * 50).decode()
SECRETS = (MARK, IMAGE[8:40], base64.b64encode(MARK.encode()).decode()[:10])
ADMIN_KEY = f"{MARK}-admin-key"
INNOCENT_KEY = "the-key-of-somebody-else"
HEADERS = {
    "authorization": f"Bearer {WORDS['bearer']}",
    "x-api-key": WORDS["key"],
    "cookie": f"session={WORDS['cookie']}",
    "x-session-id": WORDS["session"],
    "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    "tracestate": f"a={WORDS['state']}",
    "baggage": f"a={WORDS['baggage']}",
    "content-type": "application/json",
}
CHAT = f"/v1/chat/completions?q={WORDS['query']}"
BODY: dict[str, Any] = {
    "model": "m",
    "user": WORDS["user"],
    "metadata": {"for": WORDS["metadata"]},
    "tools": [{"type": "function", "function": {"name": "f", "description": WORDS["tool"], "parameters": {}}}],
    "messages": [
        {"role": "system", "content": WORDS["system"]},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": WORDS["prompt"] * 400},
                {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{IMAGE}"}},
                {"type": "image_url", "image_url": {"url": f"http://images/{WORDS['url']}.png"}},
            ],
        },
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps(WORDS["arguments"])}}
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": WORDS["prompt"]},
    ],
}
PLANTED = """
import logging
logging.INFO = logging.DEBUG  # so that the command logs all there is
from gateway import prompt, views
parse, check = prompt.parse, views.Viewers.check
def broken_parse(body, *rest, **more):
    if b"plant" in body:
        try:
            raise KeyError(body.decode())
        except KeyError as error:
            raise ExceptionGroup(body.decode(), [ValueError(body.decode())]) from error
    return parse(body, *rest, **more)
def broken_check(self, headers):
    if any(name == b"x-plant" for name, _ in headers):
        raise LookupError(repr(list(headers)))
    check(self, headers)
prompt.parse, views.Viewers.check = broken_parse, broken_check
from gateway.cli import main
main()
"""
"""The command with two bugs of the kind that quotes what it was handling."""

DECISIONS = "decisions.jsonl"
"""Beside the configuration."""

Send = Callable[["Client"], Any]


async def replica_script(exchange: Exchange) -> None:
    """Does what the query says, and quotes the request wherever a replica might."""
    wanted = exchange.request_line.partition(b"do=")[2].partition(b" ")[0]
    quoted = exchange.body[-20_000:] + WORDS["echo"].encode()
    error = json.dumps({"error": {"message": quoted.decode("utf-8", "replace"), "type": "x", "code": 1}}).encode()
    match wanted:
        case b"error":
            await exchange.answer(error, status="500 Internal Server Error")
        case b"reject":
            await exchange.answer(error, status="400 Bad Request")
        case b"babble":
            await exchange.send(quoted)
            exchange.reset()
        case b"break":
            await exchange.start_stream()
            await exchange.chunk(
                b'data: {"choices":[{"index":0,"delta":{"content":"' + WORDS["echo"].encode() + b'"}}]}\n\n'
            )
            exchange.reset()
        case b"hold":
            await exchange.wait_closed(30.0)
        case _:
            await answer_chat(exchange)


class Client:
    """One that puts marked words everywhere."""

    def __init__(self, gateway: GatewayProcess, http: httpx.AsyncClient) -> None:
        self.gateway = gateway
        self.http = http

    async def post(self, do: str = "", **fields: Any) -> httpx.Response:
        return await self.send(f"{CHAT}&do={do}", json.dumps({**BODY, **fields}).encode())

    async def send(self, path: str, body: bytes, method: str = "POST", **headers: str) -> httpx.Response:
        return await self.http.request(method, path, content=body, headers={**HEADERS, **headers})

    async def raw(self, data: bytes) -> bytes:
        """Bytes as they are; returns what comes back."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.gateway.port)
        with contextlib.suppress(ConnectionError):
            writer.write(data)
            await writer.drain()
        answer = b""
        with contextlib.suppress(ConnectionError):
            answer = await asyncio.wait_for(reader.read(), 10.0)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        return answer


def head(method: str, path: str, *lines: str) -> bytes:
    """A request's head with every marked header."""
    fields = [f"{name}: {value}" for name, value in HEADERS.items()]
    return "\r\n".join([f"{method} {path} HTTP/1.1", "host: gateway", *fields, *lines, "", ""]).encode()


async def leave_early(client: Client) -> None:
    with contextlib.suppress(httpx.ReadTimeout):
        await client.http.post(f"{CHAT}&do=hold", json=BODY, headers=HEADERS, timeout=0.3)


async def leave_while_sending(client: Client) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", client.gateway.port)
    writer.write(head("POST", CHAT, "content-length: 5000") + b'{"model": "' + WORDS["prompt"].encode())
    await writer.drain()
    await asyncio.sleep(0.1)
    writer.close()


REQUESTS: dict[str, tuple[int | None, Send]] = {
    "answered": (200, lambda client: client.post()),
    "streamed": (200, lambda client: client.post(stream=True)),
    "no JSON": (400, lambda client: client.send(CHAT, WORDS["prompt"].encode() * 3)),
    "cut JSON": (400, lambda client: client.send(CHAT, json.dumps(BODY).encode()[:-40])),
    "too large": (413, lambda client: client.send(CHAT, json.dumps(BODY).encode() + b" " * 2**20)),
    "too large, in pieces": (
        413,
        lambda client: client.raw(
            head("POST", CHAT, "transfer-encoding: chunked") + b"180000\r\n" + WORDS["prompt"].encode() * 100_000
        ),
    ),
    "no path": (404, lambda client: client.send(f"/v1/nothing?q={WORDS['query']}", b"{}")),
    "bad framing": (
        None,  # 400; where uvicorn reads, it says so itself, and the record has a client that left
        lambda client: client.raw(
            head("POST", CHAT, "transfer-encoding: chunked") + f"{WORDS['prompt']}\r\n".encode() * 9
        ),
    ),
    "replica's 500": (500, lambda client: client.post("error")),
    "replica's 400": (400, lambda client: client.post("reject")),
    "no HTTP": (502, lambda client: client.post("babble")),
    "broken stream": (200, lambda client: client.post("break", stream=True)),
    "left": (0, leave_early),
    "left while sending": (0, leave_while_sending),
    "no such model": (404, lambda client: client.post(model=WORDS["model"])),
    "a bug": (0, lambda client: client.post(plant=True)),
    "forged id": (200, lambda client: client.send(CHAT, json.dumps(BODY).encode(), **{"x-request-id": f"a\t{MARK}"})),
}
"""Name -> status in its one record, and how it is made."""
WITHOUT_KEY: dict[str, tuple[int | None, Send]] = {
    "wrong key": (401, lambda client: client.send(CHAT, b"{}", authorization=f"Bearer {MARK}-wrong")),
    "no path and wrong key": (401, lambda client: client.send("/v1/nothing", b"{}", authorization=f"Bearer {MARK}")),
}
"""As well, where keys are needed."""
CONTROL: dict[str, Send] = {
    "dry run": lambda client: client.send(f"/warmlane/route?q={WORDS['query']}", json.dumps(BODY).encode()),
    "dry run of no JSON": lambda client: client.send("/warmlane/route", WORDS["prompt"].encode()),
    "dry run that hits a bug": lambda client: client.send(
        "/warmlane/route", json.dumps(BODY).encode(), **{"x-plant": "1"}
    ),
    "large head": lambda client: client.raw(head("POST", CHAT, f"x-large: {WORDS['key'] * 9000}")),
    "folded id": lambda client: client.raw(
        head("POST", CHAT, f"x-request-id: a\r\n {WORDS['key']}", "content-length: 0")
    ),
    "no HTTP at all": lambda client: client.raw(WORDS["bearer"].encode() + b"\r\n\r\n"),
    "metrics": lambda client: client.send(f"/metrics?q={WORDS['query']}", b"", "GET"),
    "view": lambda client: client.send(f"/warmlane/replicas?q={WORDS['query']}", b"", "GET"),
}
"""What leaves no record: it is for the gateway itself, or has no head that could be read."""


@contextlib.asynccontextmanager
async def gateway_in_front(
    folder: Path, replica: ScriptedReplica, mode: str, keys: bool = False, **tables: dict[str, Any]
) -> AsyncIterator[Client]:
    """`keys`: clients need one. The marked bearer is one then, and the marked `x-api-key` is not. `tables`: of the
    configuration, beside those that are there anyway."""
    config: dict[str, dict[str, Any]] = {
        **tables,
        "server": {"http": mode, "max_body_mib": 1, "log_blocks": True, "decision_log_file": DECISIONS},
        "routing": {"shadow": ["least-work", "session-hash"]},
        "admin": {"port": 0, "key_file": str(folder / "admin.key"), "allow": ["127.0.0.0/8"]},
    }
    (folder / "admin.key").write_text(ADMIN_KEY)
    if keys:
        config["auth"] = {"keys_file": str(folder / "keys.toml"), "isolate_tenants": True}
        listed = (("alice", WORDS["bearer"]), ("innocent", INNOCENT_KEY))
        (folder / "keys.toml").write_text("".join(new_entry(name, key, None) for name, key in listed))
    gateway = GatewayProcess("gateway", folder, config, [replica.url])
    gateway.command[1:3] = ["-X", "dev", "-c", PLANTED]
    await gateway.start()
    try:
        await eventually(lambda: is_ready(gateway), "the gateway is ready")
        async with httpx.AsyncClient(base_url=gateway.url, trust_env=False, timeout=20.0) as http:
            yield Client(gateway, http)
    finally:
        await gateway.close()


async def is_ready(gateway: GatewayProcess) -> bool:
    return (await gateway.get("/ready")).status_code == 200


async def first_frame(client: Client, **headers: str) -> str:
    """Of the live page's stream."""
    async with client.http.stream("GET", "/warmlane/live", headers=headers) as answer:
        async for line in answer.aiter_lines():
            return line
    raise AssertionError("the stream is empty")


def entries_of(redis: RedisServer) -> list[bytes]:
    """What the gateway has told others, as they read it: sealed with no secret."""
    opener = Opener(Seal(b"", PURPOSE, "warmlane"), MAX_ENTRY_BYTES)
    with Redis.from_url(redis.url) as client:
        rows: Any = client.xrange("warmlane:view:1")
    return [opener.open(value) for _, fields in rows for value in fields.values()]


def without_model(record: dict[str, Any]) -> dict[str, Any]:
    """Of a record: the model's name is no secret there, and nowhere else (THREATS.md)."""
    return {**record, "model": ""}


def marked(text: str) -> list[str]:
    """Lines with a marked word, short enough to read."""
    return [line[:400] for line in text.splitlines() if any(secret in line for secret in SECRETS)]


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as one:
        yield one


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector().running() as one:
        yield one


@pytest.mark.parametrize("keys", [False, True], ids=["open", "keys"])
@pytest.mark.parametrize("mode", ["fast", "asgi"])
async def test_marked_words_turn_up_nowhere_and_each_request_has_one_record(
    tmp_path: Path, mode: str, keys: bool, redis: RedisServer, collector: Collector
) -> None:
    async with ScriptedReplica(replica_script).running() as replica:
        tables = {"tracing": {"endpoint": collector.url}, "redis": {"url": redis.url}}
        async with gateway_in_front(tmp_path, replica, mode, keys, **tables) as client:
            gateway = client.gateway
            sent = 0
            for name, (status, send) in (REQUESTS | (WITHOUT_KEY if keys else {})).items():
                with contextlib.suppress(httpx.RemoteProtocolError):  # cut short on purpose
                    await send(client)
                sent += 1
                await eventually(lambda n=sent: len(gateway.log_records()) >= n, f"{name}: its record is written", 10.0)
                assert status in (None, gateway.log_records()[-1]["status"]), name
            for send in CONTROL.values():
                await send(client)
            for key in (ADMIN_KEY, f"{MARK}-not-the-admin-key"):
                listener = re.search(r"admin listener on (\S+)", gateway.err)[1]
                asked = {"url": f"http://{MARK}-user:{MARK}-password@127.0.0.1"}
                await client.http.post(
                    f"{listener}/warmlane/replicas", json=asked, headers={"authorization": f"Bearer {key}"}
                )
            plain = {"authorization": f"Bearer {INNOCENT_KEY}"}
            hello = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
            innocent = await client.http.post("/v1/chat/completions", json=hello, headers=plain)
            assert innocent.status_code == 200
            page = (await client.http.get("/metrics", headers=plain)).text
            view = (await client.http.get("/warmlane/replicas", headers=plain)).text
            ring = (await client.http.get("/warmlane/decisions", headers=plain)).text
            frame = await first_frame(client, **plain)
            await eventually(lambda: len(collector.roots) > sent, "all traces are there")
            await eventually(lambda: entries_of(redis), "something was shared")
        records = gateway.log_records()
        assert len(records) == sent + 1, "one request, one record"
        assert len({record["request_id"] for record in records}) == len(records)
        told = {
            "stdout": "\n".join(json.dumps(without_model(record)) for record in records),
            "decision log": (tmp_path / DECISIONS).read_text(),
            "traces": b"".join(collector.bodies).decode("latin-1"),
            "what is shared": b"".join(entries_of(redis)).decode("latin-1"),
            "ring": ring,
            "live": frame,
            "stderr": gateway.err,
            "metrics": page,
            "view": view,
            "another's answer": innocent.text + str(innocent.headers),
        }
        assert {name: marked(text) for name, text in told.items() if marked(text)} == {}
        assert len(told["decision log"].splitlines()) >= 5
        assert "cache-cost" in told["ring"]
        assert "cache-cost" in told["live"]
        assert {record["model"] for record in records if marked(json.dumps(record))} == {WORDS["model"]}
        assert all(line.startswith("{") for line in gateway.out.splitlines()), "no forged line"
        assert "withheld" in gateway.err, "the planted bugs were hit, and reported without what they quote"
        if keys:
            captured = b"".join(exchange.raw_head + exchange.body for exchange in replica.exchanges)
            assert WORDS["prompt"].encode() in captured
            for shown in (WORDS["bearer"], WORDS["key"], INNOCENT_KEY):
                assert shown.encode() not in captured, "a client's key ends at the gateway"


@pytest.mark.parametrize("mode", ["fast", "asgi"])
async def test_what_the_gateway_itself_refuses_quotes_nothing(tmp_path: Path, mode: str) -> None:
    async with ScriptedReplica(replica_script).running() as replica:
        async with gateway_in_front(tmp_path, replica, mode) as client:
            for name in ("no JSON", "cut JSON", "too large", "no path", "no HTTP"):
                answer = await REQUESTS[name][1](client)
                assert marked(answer.text + str(answer.headers)) == [], name
            for name in ("too large, in pieces", "bad framing"):
                answer = await REQUESTS[name][1](client)
                assert marked(answer.decode("latin-1")) == [], name
            for name, send in CONTROL.items():
                answer = await send(client)
                text = answer.decode("latin-1") if isinstance(answer, bytes) else answer.text + str(answer.headers)
                assert marked(text) == [], name
