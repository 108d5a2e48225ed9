"""The gateway's own work for one request, without sockets: parse, hash, decide, book, relay, record.

    python -m loadtests.bench.micro_proxy [BODY_KB ...]

Drives a real `ClientConnection`, `FrontDoor` and upstream `Connection` over transports that only count what is written
and answer at once. Prints microseconds a request, best of several rounds: what remains of the figures of `run.py` is
the kernel's work. For comparing two versions of the code on one machine, one after the other.
"""

from __future__ import annotations

import asyncio
import io
import sys
import time
from typing import Any, cast

import uvloop

from gateway import config
from gateway.core.model import ModelCard, ModelsListed, ProbeAnswered, ReplicaAdded, ReplicaId
from gateway.core.router import Router
from gateway.memory import tune_memory
from gateway.proxy.front_door import FrontDoor
from gateway.proxy.http_client import ClientConnection
from gateway.proxy.upstream import Connection
from gateway.telemetry import Telemetry
from loadtests.bench.bodies import BodyFile, make_body

ROUNDS = 7
REQUESTS = 2_000
ANSWER_BODY = (
    b'{"id":"chatcmpl-0","object":"chat.completion","created":1,"model":"mock-model","choices":[{"index":0,"message":'
    b'{"role":"assistant","content":"Hello, this is a fixed answer."},"finish_reason":"stop"}],"usage":'
    b'{"prompt_tokens":190,"total_tokens":206,"completion_tokens":16,"prompt_tokens_details":null}}'
)
ANSWER = (
    b"HTTP/1.1 200 OK\r\ndate: Mon, 30 Nov 2026 08:43:23 GMT\r\nserver: uvicorn\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n" % len(ANSWER_BODY) + ANSWER_BODY
)


class Wire:
    """A transport that answers every write with `ANSWER` in the next loop iteration, or only counts."""

    def __init__(self, loop: asyncio.AbstractEventLoop, protocol: asyncio.Protocol, answers: bool) -> None:
        self._loop = loop
        self._protocol = protocol
        self._answers = answers
        self.writes = 0

    def write(self, data: bytes) -> None:
        self.writes += 1
        if self._answers:
            self._loop.call_soon(self._protocol.data_received, ANSWER)

    def writelines(self, parts: Any) -> None:
        self.write(b"")

    def is_closing(self) -> bool:
        return False

    def set_write_buffer_limits(self, high: int) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def close(self) -> None: ...


class State:
    def __init__(self) -> None:
        self.connections: set[Any] = set()
        self.tasks: set[Any] = set()


def build(loop: asyncio.AbstractEventLoop) -> FrontDoor:
    router = Router(config.Routing().settings())
    for port in (1, 2):
        replica = ReplicaId(f"http://127.0.0.1:{port}")
        router.observe(ReplicaAdded(replica), 0.0)
        router.observe(ProbeAnswered(replica, True), 0.0)
        router.observe(ModelsListed(replica, (ModelCard("mock-model"),)), 0.0)
    telemetry = Telemetry(router=router, log=io.BytesIO())
    settings = config.Routing().settings()
    door = FrontDoor(
        router, telemetry, config.Server(), config.Upstream(), time.monotonic, loop, block_bytes=settings.block_bytes
    )
    for port in (1, 2):
        upstream = door.upstreams.of(ReplicaId(f"http://127.0.0.1:{port}"))
        connection = Connection(upstream, loop)
        connection.connection_made(cast(asyncio.Transport, Wire(loop, connection, answers=True)))
        upstream.give_back(connection)
    return door


async def measure(kb: int) -> float:
    """Microseconds a request with a body of that size."""
    loop = asyncio.get_running_loop()
    door = build(loop)
    client = ClientConnection(door, cast(Any, None), cast(Any, State()), {}, loop)
    wire = Wire(loop, client, answers=False)
    client.connection_made(cast(asyncio.Transport, wire))
    file = BodyFile("micro", kb * 1024, stream=False)
    bodies = [make_body(file, number % 8, number) for number in range(64)]
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:9000\r\nContent-Type: application/json\r\n"
        b"Accept: */*\r\nAuthorization: Bearer sk-1234\r\nUser-Agent: loadgen\r\nContent-Length: %d\r\n\r\n"
    )
    requests = [head % len(body) + body for body in bodies]
    best = float("inf")
    count = max(64, REQUESTS // max(1, kb // 8))
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for number in range(count):
            expected = wire.writes + 1
            client.data_received(requests[number % 64])
            while wire.writes < expected:  # noqa: ASYNC110 - one iteration of the loop is what is measured
                await asyncio.sleep(0)
        best = min(best, (time.perf_counter() - began) / count)
        door.telemetry.flush()
    return best * 1e6


async def main() -> None:
    tune_memory()
    for kb in [int(argument) for argument in sys.argv[1:]] or [1, 32, 256]:
        print(f"{kb:4d} KB  {await measure(kb):8.1f} us/request")


if __name__ == "__main__":
    uvloop.run(main())
