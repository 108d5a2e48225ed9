"""Replicas and clients as bare protocols in the test's own process: thousands at once, and each end dated.

A `LightReplica` answers probes, model lists and scrapes by itself; every other request becomes a `Served` and goes to
`script`, a plain function that writes at once or sets timers. Times are `time.monotonic()`, on both sides alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import cast

from tests.chaos.bench import put_first
from tests.chaos.openloop import Reading, percentile
from tests.chaos.rig import Config, GatewayProcess, Metrics, eventually

STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
METRICS = (
    'vllm:num_requests_running{{engine="0",model_name="m"}} {running}.0\n'
    'vllm:num_requests_waiting{{engine="0",model_name="m"}} 0.0\n'
    'vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} 0.1\n'
    'vllm:cache_config_info{{block_size="16",engine="0",num_gpu_blocks="{blocks}"}} 1.0\n'
)
MODELS = json.dumps(
    {"object": "list", "data": [{"id": "m", "object": "model", "created": 5, "max_model_len": 1_000_000}]}
).encode()
CONTENT_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
REQUEST_ID = re.compile(rb"\r\nx-request-id: *([^\r]*)", re.IGNORECASE)


class Served:
    """One request at a replica."""

    __slots__ = ("at", "body", "connection", "id", "lost_at", "over")

    def __init__(self, connection: ReplicaConnection, id: str, body: bytes) -> None:
        self.connection = connection
        self.id = id
        self.body = body
        self.at = time.monotonic()
        self.lost_at: float | None = None
        """When the gateway closed before the answer was complete."""
        self.over = False
        """Answered, or lost."""

    @property
    def streams(self) -> bool:
        return b'"stream": true' in self.body or b'"stream":true' in self.body

    def write(self, data: bytes) -> None:
        if not self.over:
            self.connection.transport.write(data)

    def piece(self, data: bytes) -> None:
        self.write(b"%x\r\n%b\r\n" % (len(data), data))

    def end_stream(self) -> None:
        self.write(b"0\r\n\r\n")
        self.connection.ended(self)

    def answer(self, body: bytes, status: bytes = b"200 OK") -> None:
        self.write(
            b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)
        )
        self.connection.ended(self)

    def reset(self) -> None:
        self.connection.ended(self)
        self.connection.transport.abort()


class ReplicaConnection(asyncio.Protocol):
    def __init__(self, replica: LightReplica) -> None:
        self.replica = replica
        self.transport = cast(asyncio.Transport, None)
        self.raw = bytearray()
        self.now: Served | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.replica.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.replica.connections.discard(self)
        if self.now is not None:
            self.now.lost_at = time.monotonic()
            self.ended(self.now)

    def data_received(self, data: bytes) -> None:
        self.raw += data
        while (end := self.raw.find(b"\r\n\r\n")) >= 0:
            head = bytes(self.raw[: end + 2])
            length = CONTENT_LENGTH.search(head)
            whole = end + 4 + (int(length[1]) if length else 0)
            if len(self.raw) < whole:
                return
            body = bytes(self.raw[end + 4 : whole])
            del self.raw[:whole]
            self.request(head, body)

    def request(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"GET "):
            self.control(head.split(b" ", 2)[1])
            return
        named = REQUEST_ID.search(head)
        self.now = Served(self, named[1].decode() if named else "", body)
        self.replica.served.append(self.now)
        self.replica.running += 1
        self.replica.script(self.now)

    def ended(self, served: Served) -> None:
        served.over = True
        if self.now is served:
            self.now = None
            self.replica.running -= 1

    def control(self, path: bytes) -> None:
        if path == b"/metrics" and self.replica.odd_metrics is not None:
            self.replica.odd_metrics(self.transport)
            return
        page = METRICS.format(running=self.replica.running, blocks=self.replica.cache_blocks).encode()
        body = {b"/v1/models": MODELS, b"/metrics": page}.get(path, b"")
        self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))


class LightReplica:
    """All connections to one replica."""

    def __init__(self, script: Callable[[Served], None]) -> None:
        self.script = script
        self.served: list[Served] = []
        self.connections: set[ReplicaConnection] = set()
        self.running = 0
        """As its metrics say."""
        self.cache_blocks = 25_000
        self.odd_metrics: Callable[[asyncio.Transport], None] | None = None
        """Answers a scrape instead of the proper page."""
        self.url = ""
        self.port = 0

    @contextlib.asynccontextmanager
    async def standing(self) -> AsyncIterator[LightReplica]:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: ReplicaConnection(self), "127.0.0.1", 0, backlog=4096)
        self.port = server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        try:
            yield self
        finally:
            server.close()
            for connection in list(self.connections):
                connection.transport.abort()


@contextlib.asynccontextmanager
async def light_replicas(count: int, script: Callable[[Served], None]) -> AsyncIterator[list[LightReplica]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(LightReplica(script).standing()) for _ in range(count)]


def post(body: bytes, request_id: str, *, path: str = "/v1/chat/completions", close: bool = False) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/json\r\nx-request-id: {request_id}\r\n"
    last = (b"connection: close\r\n" if close else b"") + b"content-length: %d\r\n\r\n" % len(body)
    return head.encode() + last + body


def chat(content: str, **fields: object) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": content}], **fields}).encode()


class LightClient(Reading):
    """One client connection with one request on it, which may go away at any time."""

    closed_at = 0.0

    def close(self) -> None:
        """A proper end of the connection."""
        self.closed_at = time.monotonic()
        self.transport.close()

    def reset(self) -> None:
        """As a process that is killed, or a network that is gone."""
        self.closed_at = time.monotonic()
        sock: socket.socket = self.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()


class KeptClient(LightClient):
    """One connection that is kept from request to request."""

    def begin(self, request: bytes) -> asyncio.Future[str]:
        self.ended = asyncio.get_running_loop().create_future()
        self.headers, self.parts, self.status = {}, [], 0
        self.transport.write(request)
        return self.ended


async def connect(port: int) -> LightClient:
    loop = asyncio.get_running_loop()
    _, client = await loop.create_connection(lambda: LightClient(loop), "127.0.0.1", port)
    return client


async def send(port: int, request: bytes) -> LightClient:
    client = await connect(port)
    client.transport.write(request)
    return client


@contextlib.asynccontextmanager
async def gateway_before(
    replicas: list[LightReplica], folder: Path, config: Config | None = None, key: str | None = None
) -> AsyncIterator[GatewayProcess]:
    """A gateway in front of these replicas, which knows that all are up. `key`: to look at its metrics with."""
    gateway = GatewayProcess("gateway", folder, config or {}, [replica.url for replica in replicas])
    if key is not None:
        gateway._client.headers["authorization"] = f"Bearer {key}"
    try:
        await gateway.start()
        put_first(gateway.pid)
        await eventually(lambda: all_up(gateway, len(replicas)), "all replicas are up")
        yield gateway
    finally:
        await gateway.close()


async def all_up(gateway: GatewayProcess, replicas: int) -> bool:
    return (await gateway.metrics()).total("warmlane_replica_state", state="up") == replicas


async def emptied(gateway: GatewayProcess) -> float:
    """Seconds until every gauge of what is under way is at zero."""

    async def empty() -> bool:
        page = await gateway.metrics()
        gauges = ("in_flight_requests", "waiting_requests", "replica_in_flight_requests", "replica_pending_tokens")
        return not any(page.total(f"warmlane_{name}") for name in gauges)

    return await eventually(empty, "all gauges are at zero", 10.0)


def lag_bound(before: Metrics, after: Metrics, share: float) -> float:
    """Seconds: upper bound of the bucket in which this share of the looks at the loop ended between the two pages."""
    name = "warmlane_loop_lag_seconds_bucket"
    bounds = [float(one.labels["le"]) for one in after.samples if one.name == name]
    counts = {bound: after.total(name, le=text(bound)) - before.total(name, le=text(bound)) for bound in bounds}
    return min(bound for bound, count in counts.items() if count >= share * counts[math.inf])


def text(bound: float) -> str:
    return "+Inf" if bound == math.inf else repr(bound)


class OwnLag:
    """How late this test's own loop is: what a client here sees, and no gateway can do anything about."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[OwnLag]:
        watching = asyncio.create_task(self._watch())
        try:
            yield self
        finally:
            watching.cancel()

    async def _watch(self) -> None:
        while True:
            due = time.monotonic() + 0.01
            await asyncio.sleep(0.01)
            self.seconds.append(time.monotonic() - due)

    @property
    def p99(self) -> float:
        return percentile(self.seconds, 0.99)
