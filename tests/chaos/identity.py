"""What must pass unchanged, generated: JSON bodies spelt in every way that JSON allows, headers, and the contract of
about forty headers in both directions."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import http.client
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.chaos.rig import GatewayProcess
from tests.proxy.scripted import Exchange, Script, ScriptedReplica

START_SECONDS = 30.0

# -- a gateway process and a replica in a thread, for tests that are not coroutines


@contextlib.contextmanager
def replica_in_a_thread(script: Script) -> Iterator[ScriptedReplica]:
    loop = asyncio.new_event_loop()
    replica, ready = ScriptedReplica(script), threading.Event()
    stop = asyncio.Event()

    async def run() -> None:
        async with replica.running():
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()), name="replica")
    thread.start()
    try:
        assert ready.wait(START_SECONDS)
        yield replica
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(START_SECONDS)
        loop.close()


@contextlib.contextmanager
def gateway_before(replica: ScriptedReplica, folder: Path, way: str) -> Iterator[str]:
    """URL of a gateway that serves clients this way (`[server] http`)."""
    config = {"server": {"http": way, "log": "off"}}
    gateway = GatewayProcess(f"gateway-{way}", folder, config, [replica.url])

    async def start() -> None:
        await gateway.start()
        async with asyncio.timeout(START_SECONDS), httpx.AsyncClient(trust_env=False) as client:
            while (await client.get(f"{gateway.url}/ready")).status_code != 200:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.05)

    try:
        asyncio.run(start())
        yield gateway.url
    finally:
        asyncio.run(gateway.close())


# -- test 15: bodies

BLANK = st.sampled_from(["", "", "", " ", "\n", "\t", "\r\n  "])
NUMBERS = st.from_regex(r"-?(0|[1-9][0-9]{0,30})(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,2})?", fullmatch=True)
LETTERS = st.one_of(
    st.characters(min_codepoint=0x20, exclude_categories=["Cs"], exclude_characters='"\\'),
    st.sampled_from([r"\"", r"\\", r"\/", r"\b", r"\f", r"\n", r"\r", r"\t", r"\u00e9", r"\uD83D\uDE00", r"\u0000"]),
)
STRINGS = st.lists(LETTERS, max_size=12).map(lambda letters: f'"{"".join(letters)}"')
SCALARS = st.one_of(NUMBERS, STRINGS, st.sampled_from(["true", "false", "null", "1.0", "-0", "1E400", '""']))


def in_brackets(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Arrays and objects of these, with blanks wherever they may stand. Keys may repeat."""
    item = st.tuples(BLANK, values, BLANK).map("".join)
    member = st.tuples(BLANK, STRINGS, BLANK, st.just(":"), BLANK, values, BLANK).map("".join)
    return st.one_of(
        st.lists(item, max_size=4).map(lambda items: f"[{','.join(items)}]"),
        st.lists(member, max_size=4).map(lambda members: f"{{{','.join(members)}}}"),
    )


VALUES = st.recursive(SCALARS, in_brackets, max_leaves=8)
ROLES = st.sampled_from(["system", "user", "assistant", "tool", "developer"])
MESSAGES = st.lists(
    st.tuples(ROLES, BLANK, VALUES).map(lambda parts: f'{{"role":"{parts[0]}",{parts[1]}"content":{parts[2]}}}'),
    max_size=3,
).map(lambda messages: f'"messages":[{",".join(messages)}]')
FURTHER = st.lists(st.tuples(STRINGS, BLANK, VALUES).map(lambda parts: f"{parts[0]}:{parts[1]}{parts[2]}"), max_size=4)
BODIES = st.tuples(BLANK, BLANK, MESSAGES, FURTHER, st.randoms(use_true_random=False))


def body_of(parts: tuple[str, str, str, list[str], object]) -> bytes:
    blank, other, messages, further, random = parts
    members = ['"model":"m"', messages, *further]
    random.shuffle(members)  # type: ignore[attr-defined]
    return f"{blank}{{{blank}{f'{other},{blank}'.join(members)}{other}}}{other}".encode()


async def answer_with_digest(exchange: Exchange) -> None:
    await exchange.answer(hashlib.sha256(exchange.body).hexdigest().encode())


def quickly(examples: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def send_bodies(url: str, examples: int) -> tuple[int, int, list[bytes]]:
    """How many generated bodies went to the gateway at `url`, how many bytes, and those that did not arrive as sent."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    sent = size = 0
    changed: list[bytes] = []

    @quickly(examples)
    @given(BODIES.map(body_of))
    def send(body: bytes) -> None:
        nonlocal sent, size
        connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        digest = answer.read()
        sent += 1
        size += len(body)
        if answer.status != 200 or digest != hashlib.sha256(body).hexdigest().encode():
            changed.append(body)

    send()
    connection.close()
    return sent, size, changed


# -- headers, generated

TOKEN = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789!#$%&'*+-.^_`|~"
NAMES = st.text(TOKEN, min_size=1, max_size=20).map(lambda name: f"x-{name}")
VISIBLE = st.sampled_from([*range(0x21, 0x7F), *range(0x80, 0x100), 0x20, 0x09])
HEADER_VALUES = st.lists(VISIBLE, max_size=30).map(bytes)
HEADERS = st.lists(st.tuples(NAMES, HEADER_VALUES), max_size=10)
OWN = frozenset((b"x-request-id", b"x-session-id"))
"""Read or set by the gateway; the contract says how."""


async def answer_with_head(exchange: Exchange) -> None:
    await exchange.answer(exchange.raw_head)


def send_headers(url: str, examples: int) -> tuple[int, list[object]]:
    """How many generated lists of headers went out, and those that did not arrive: names in small letters, order and
    repetition kept, blanks around values gone."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    sent = 0
    changed: list[object] = []

    @quickly(examples)
    @given(HEADERS)
    def send(headers: list[tuple[str, bytes]]) -> None:
        nonlocal sent
        connection.putrequest("POST", "/v1/chat/completions", skip_accept_encoding=True)
        for name, value in headers:
            connection.putheader(name, value)
        connection.putheader("content-length", "27")
        connection.endheaders(b'{"model":"m","messages":[]}')
        answer = connection.getresponse()
        lines = answer.read().split(b"\r\n")[1:]
        wanted = [(name.lower().encode(), value.strip(b" \t")) for name, value in headers]
        wanted = [one for one in wanted if one[0] not in OWN]
        got = [(name, value.strip(b" \t")) for name, _, value in (line.partition(b":") for line in lines)]
        sent += 1
        if answer.status != 200 or [one for one in got if one[0].startswith(b"x-") and one[0] not in OWN] != wanted:
            changed.append((headers, answer.status, lines))

    send()
    connection.close()
    return sent, changed


# -- test 17: the contract


@dataclass(frozen=True)
class Field:
    name: str
    value: str
    passes: bool = True


def passing(*lines: str) -> list[Field]:
    return [Field(*line.split(": ", 1)) for line in lines]


def ending(*lines: str) -> list[Field]:
    return [Field(*line.split(": ", 1), passes=False) for line in lines]


REQUEST = [
    *passing(
        "accept: text/event-stream",
        "accept-encoding: gzip, br",
        "accept-language: de",
        "anthropic-beta: tools-2024-04-04",
        "anthropic-version: 2023-06-01",
        "baggage: a=b",
        "cache-control: no-cache",
        "content-type: application/json; charset=utf-8",
        "cookie: a=b; c=d",
        "forwarded: for=1.2.3.4",
        "idempotency-key: k1",
        "openai-beta: assistants=v2",
        "openai-organization: org-1",
        "openai-project: proj-1",
        "origin: https://example.org",
        "priority: u=1",
        "referer: https://example.org/a",
        "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "tracestate: vendor=1",
        "user-agent: OpenAI/Python 1.0",
        "x-custom: one",
        "x-custom: two",
        "x-forwarded-for: 1.2.3.4",
        "x-forwarded-proto: https",
        "x-request-id: my-id-1",
        "x-session-id: s1",
        "x-stainless-lang: python",
    ),
    *ending(
        "connection: x-named, keep-alive",
        "expect: something",
        "keep-alive: timeout=5",
        "proxy-authorization: Basic abc",
        "proxy-connection: keep-alive",
        "te: trailers",
        "trailer: x-late",
        "x-named: 1",
    ),
]

ANSWER = [
    *passing(
        "access-control-allow-origin: *",
        "cache-control: no-store",
        "content-encoding: gzip",
        "content-language: de",
        "content-type: application/json; charset=utf-8",
        "date: Mon, 01 Jan 2024 00:00:00 GMT",
        'etag: "a"',
        "link: <https://example.org>; rel=next",
        "openai-processing-ms: 12",
        "retry-after: 7",
        "server: uvicorn",
        "set-cookie: a=b",
        "set-cookie: c=d",
        "vary: origin",
        "www-authenticate: Bearer",
        "x-accel-buffering: no",
        "x-ratelimit-remaining-requests: 5",
    ),
    *ending(
        "connection: x-hop",
        "keep-alive: timeout=5",
        "proxy-authenticate: Basic",
        "proxy-connection: close",
        "te: trailers",
        "trailer: x-late",
        "upgrade: h2c",
        "x-hop: 1",
    ),
]
BODY = b'{"model":"m","messages":[]}'
SPECIAL = frozenset(("host", "content-length", "x-request-id"))
"""Set by the gateway for the next hop; `broken_rules` looks at them one by one."""


def lines_of(fields: list[Field]) -> bytes:
    return "".join(f"{one.name}: {one.value}\r\n" for one in fields).encode()


def parsed(head: bytes) -> list[tuple[str, str]]:
    lines = (line.partition(":") for line in head.decode("latin-1").split("\r\n")[1:] if line)
    return [(name.lower(), value.strip()) for name, _, value in lines]


async def answer_by_contract(exchange: Exchange) -> None:
    await exchange.answer(BODY, headers=lines_of([one for one in ANSWER if one.name != "content-type"]))


def kept(fields: list[Field], without: frozenset[str] = SPECIAL) -> list[tuple[str, str]]:
    return [(one.name, one.value) for one in fields if one.passes and one.name not in without]


async def broken_rules(port: int, replica: ScriptedReplica) -> list[str]:
    """Send one request that has every field of the table; what the contract says and was not so."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    begin = b"POST /v1/chat/completions HTTP/1.1\r\nhost: gateway.example\r\n"
    writer.write(begin + lines_of(REQUEST) + b"content-length: %d\r\n\r\n" % len(BODY) + BODY)
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10))[:-4]
    body = await asyncio.wait_for(reader.readexactly(len(BODY)), 10)
    writer.transport.abort()
    exchange = replica.exchanges[-1]
    sent, got = parsed(exchange.raw_head), parsed(head)
    own = {"x-warmlane-replica", "x-warmlane-cached-tokens", "content-type"}
    answered = [(name, value) for name, value in got if name not in SPECIAL | own]
    rules = {
        "request fields that pass, in order": [one for one in sent if one[0] not in SPECIAL] == kept(REQUEST),
        "the host is that of the replica": dict(sent)["host"] == urlsplit(replica.url).netloc,
        "one length, that of the body": [v for n, v in sent if n == "content-length"] == [str(len(exchange.body))],
        "one request id, the client's": [v for n, v in sent if n == "x-request-id"] == ["my-id-1"],
        "the body": exchange.body == BODY == body,
        "answer fields that pass, in order": answered == kept(ANSWER, SPECIAL | {"content-type"}),
        "the content type": [v for n, v in got if n == "content-type"] == ["application/json"],
        "the answer's length": [v for n, v in got if n == "content-length"] == [str(len(BODY))],
        "the client gets its request id": [v for n, v in got if n == "x-request-id"] == ["my-id-1"],
        "the client is told the replica": dict(got)["x-warmlane-replica"] == replica.url,
    }
    return [rule for rule, holds in rules.items() if not holds]
