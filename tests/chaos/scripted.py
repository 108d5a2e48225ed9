"""A scripted replica as a process that can be killed or frozen: `python -m tests.chaos.scripted --port 0 --record F`.

It answers chat requests as its `Behaviour` says, which `POST /behave` changes in mid-run (a JSON object with the fields
to change). Every request is written to the record file as it comes and as it ends, unbuffered, so that a killed replica
leaves what it saw. Times are CLOCK_MONOTONIC, the same in all processes of a machine.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import hashlib
import json
import os
import signal
import time
from dataclasses import dataclass
from typing import Any, cast

import httptools
import uvloop

MODEL = "m"
CANNOT_SCHEDULE = (
    b'{"error":{"message":"cannot schedule new futures after shutdown","type":"InternalServerError","param":null,'
    b'"code":500}}'
)
"""What vLLM answers while it shuts down with a time to drain."""
KEPT_BODY_BYTES = 64 * 1024


@dataclass
class Behaviour:
    """What the replica does with what comes next. `None` and zero mean: nothing odd."""

    first_byte_seconds: float = 0.05
    """Silence before the head of an answer."""
    tokens: int = 60
    """Events with content of a stream."""
    token_seconds: float = 0.02
    status: int = 200
    """Of the `fail_share` of requests, or of those with `fail_word` in them; others are answered properly."""
    fail_share: float = 1.0
    fail_word: str = ""
    retry_after: int | None = None
    cannot_schedule: bool = False
    """500, as an engine that shuts down."""
    empty_stream: bool = False
    """200 with a usage event and nothing else, as an engine that shuts down."""
    drop_before_head: bool = False
    """The request is read whole, then its connection is reset."""
    break_after: int | None = None
    """A stream is reset after so many events with content."""
    stall_after: int | None = None
    """A stream says nothing more after so many events with content."""
    comment_seconds: float | None = None
    """While a stream is silent, an SSE comment this often."""
    silent_seconds: float = 0.0
    """Of a stream, between its head and its first event."""
    health_status: int = 200
    health_seconds: float = 0.0
    metrics_status: int = 200


class Connection(asyncio.Protocol):
    """One accepted connection: reads requests, answers one after the other."""

    def __init__(self, replica: Replica, number: int) -> None:
        self.replica = replica
        self.number = number
        self.served = 0
        self.gone = False
        self.transport = cast(asyncio.Transport, None)
        self.raw = b""
        self.parser = httptools.HttpRequestParser(self)
        self.url = b""
        self.head_length = 0
        self.body: list[bytes] = []
        self.task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone = True
        if self.task is not None:
            self.task.cancel()

    def data_received(self, data: bytes) -> None:
        self.raw += data
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.replica.write({"bad": self.raw[:KEPT_BODY_BYTES].decode("latin-1"), "connection": self.number})
            self.transport.abort()

    def on_message_begin(self) -> None:
        self.url, self.body = b"", []

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_body(self, data: bytes) -> None:
        self.body.append(data)

    def on_message_complete(self) -> None:
        raw, self.raw = self.raw, b""
        body = b"".join(self.body)
        head = raw.partition(b"\r\n\r\n")[0]
        self.served += 1
        self.task = asyncio.ensure_future(self.replica.serve(self, head, self.url, body))
        self.task.add_done_callback(lambda task: task.cancelled() or task.exception())

    def send(self, data: bytes) -> None:
        if not self.gone:
            self.transport.write(data)

    def answer(self, status: int, body: bytes, headers: bytes = b"content-type: application/json\r\n") -> None:
        self.send(b"HTTP/1.1 %d X\r\n%bcontent-length: %d\r\n\r\n%b" % (status, headers, len(body), body))


class Replica:
    """What all connections share: the behaviour, the record, the count of requests."""

    def __init__(self, record: str) -> None:
        self.behaviour = Behaviour()
        self.count = self.connections = self.running = 0
        self.started_at = time.time()
        self._record = os.open(record, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, line: dict[str, Any]) -> None:
        os.write(self._record, json.dumps(line).encode() + b"\n")

    def connect(self) -> Connection:
        self.connections += 1
        return Connection(self, self.connections)

    async def serve(self, connection: Connection, head: bytes, url: bytes, body: bytes) -> None:
        if head.startswith(b"GET ") or url == b"/behave":
            await self.control(connection, url, body)
            return
        self.count += 1
        number, behaviour = self.count, dataclasses.replace(self.behaviour)
        self.write(
            {
                "number": number,
                "at": time.monotonic(),
                "head": head.decode("latin-1"),
                "body": body[:KEPT_BODY_BYTES].decode("latin-1"),
                "sha256": hashlib.sha256(body).hexdigest(),
                "connection": connection.number,
                "on_connection": connection.served,
            }
        )
        self.running += 1
        end = "cut"
        try:
            end = await self.generate(connection, behaviour, number, body)
        finally:
            self.running -= 1
            self.write({"number": number, "ended_at": time.monotonic(), "end": end})

    async def control(self, connection: Connection, url: bytes, body: bytes) -> None:
        behaviour = self.behaviour
        if url == b"/health":
            await asyncio.sleep(behaviour.health_seconds)
            connection.answer(behaviour.health_status, b"")
        elif url == b"/v1/models":
            card = {"id": MODEL, "object": "model", "created": 5, "owned_by": "vllm", "max_model_len": 32_768}
            connection.answer(200, json.dumps({"object": "list", "data": [card]}).encode())
        elif url == b"/metrics":
            connection.answer(behaviour.metrics_status, self.metrics(), b"content-type: text/plain\r\n")
        elif url == b"/behave":
            self.behaviour = dataclasses.replace(behaviour, **json.loads(body))
            connection.answer(200, json.dumps(dataclasses.asdict(self.behaviour)).encode())
        else:
            connection.answer(404, b'{"detail":"Not Found"}')

    def metrics(self) -> bytes:
        labels = '{engine="0",model_name="m"}'
        return (
            f"process_start_time_seconds {self.started_at}\n"
            f"vllm:num_requests_running{labels} {float(self.running)}\n"
            f"vllm:num_requests_waiting{labels} 0.0\n"
            f"vllm:kv_cache_usage_perc{labels} 0.1\n"
            'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="25000"} 1.0\n'
        ).encode()

    async def generate(self, connection: Connection, behaviour: Behaviour, number: int, body: bytes) -> str:
        """Answer one request; returns how that ended, as the record says it."""
        await asyncio.sleep(behaviour.first_byte_seconds)
        if behaviour.drop_before_head:
            connection.transport.abort()
            return "dropped"
        share = behaviour.fail_share if behaviour.fail_word.encode() in body else 0.0
        if behaviour.cannot_schedule:
            connection.answer(500, CANNOT_SCHEDULE)
            return "refused"
        if behaviour.status != 200 and int(number * share) > int((number - 1) * share):
            error = {"error": {"message": "scripted", "type": "Scripted", "param": None, "code": behaviour.status}}
            headers = b"content-type: application/json\r\n"
            if behaviour.retry_after is not None:
                headers += b"retry-after: %d\r\n" % behaviour.retry_after
            connection.answer(behaviour.status, json.dumps(error).encode(), headers)
            return "refused"
        if b'"stream": true' in body or b'"stream":true' in body:
            return await self.stream(connection, behaviour, number)
        connection.answer(200, whole_answer(number, behaviour.tokens))
        return "answered"

    async def stream(self, connection: Connection, behaviour: Behaviour, number: int) -> str:
        connection.send(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        await silence(connection, behaviour.silent_seconds, behaviour.comment_seconds)
        loop = asyncio.get_running_loop()
        began = loop.time()
        tokens = 0 if behaviour.empty_stream else behaviour.tokens
        for token in range(tokens):
            await asyncio.sleep(began + token * behaviour.token_seconds - loop.time())
            if token == behaviour.break_after:
                connection.transport.abort()
                return "broken"
            if token == behaviour.stall_after:
                await silence(connection, 3_600.0, behaviour.comment_seconds)
            connection.send(as_piece(event(number, token, last=token == tokens - 1)))
        usage = {"prompt_tokens": 600, "completion_tokens": tokens, "total_tokens": 600 + tokens}
        end = {"id": f"chatcmpl-{number}", "object": "chat.completion.chunk", "choices": [], "usage": usage}
        connection.send(as_piece(b"data: " + json.dumps(end).encode() + b"\n\ndata: [DONE]\n\n") + b"0\r\n\r\n")
        return "answered"


async def silence(connection: Connection, seconds: float, comment_seconds: float | None) -> None:
    """Say nothing for so long, but comments."""
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    while (left := until - loop.time()) > 0:
        await asyncio.sleep(min(left, comment_seconds or left))
        if comment_seconds is not None:
            connection.send(as_piece(b": still here\n\n"))


def as_piece(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(number: int, token: int, *, last: bool) -> bytes:
    return (
        b'data: {"id":"chatcmpl-%d","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,'
        b'"delta":{"content":"t%d "},"finish_reason":%b}]}\n\n'
    ) % (number, token, b'"stop"' if last else b"null")


def whole_answer(number: int, tokens: int) -> bytes:
    return (
        b'{"id":"chatcmpl-%d","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":'
        b'{"role":"assistant","content":"%b"},"finish_reason":"stop"}],"usage":{"prompt_tokens":600,'
        b'"total_tokens":%d,"completion_tokens":%d}}'
    ) % (number, b"".join(b"t%d " % token for token in range(tokens)), 600 + tokens, tokens)


async def serve(host: str, port: int, record: str) -> None:
    """Until SIGTERM: then as a killed process does, without a word."""
    replica = Replica(record)
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stopped.set)
    server = await loop.create_server(replica.connect, host, port, backlog=2048)
    print(f"ready http://{host}:{server.sockets[0].getsockname()[1]}", flush=True)
    await stopped.wait()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--record", required=True)
    options = parser.parse_args()
    uvloop.run(serve(options.host, options.port, options.record))


if __name__ == "__main__":
    main()
