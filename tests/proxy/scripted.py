"""A replica that follows a script, byte by byte, and records what reached it.

Probes, model lists and scrapes are answered by themselves and not recorded; every other request goes to `script`, an
async function that gets the `Exchange` and writes whatever raw bytes it wants.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import msgspec

METRICS = b"""\
vllm:num_requests_running{engine="0",model_name="m"} 0.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.0
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="6250"} 1.0
"""


@dataclass
class Exchange:
    """One recorded request and the socket to answer it on."""

    raw_head: bytes
    body: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    number: int
    """Of this request on its replica, from 1."""
    on_connection: int
    """Of this request on its connection, from 1."""
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    """The gateway has closed its side."""

    @property
    def request_line(self) -> bytes:
        return self.raw_head.split(b"\r\n", 1)[0]

    @property
    def headers(self) -> list[tuple[str, str]]:
        lines = self.raw_head.decode("latin-1").split("\r\n")[1:]
        return [(name.strip().lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]

    def header(self, name: str) -> str | None:
        return dict(self.headers).get(name)

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, body: bytes, *, status: str = "200 OK", headers: bytes = b"") -> None:
        head = b"HTTP/1.1 " + status.encode() + b"\r\ncontent-type: application/json\r\n" + headers
        await self.send(head + b"content-length: %d\r\n\r\n" % len(body) + body)

    async def start_stream(self, headers: bytes = b"") -> None:
        await self.send(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
            + headers
            + b"transfer-encoding: chunked\r\n\r\n"
        )

    async def chunk(self, data: bytes) -> None:
        await self.send(b"%x\r\n%b\r\n" % (len(data), data))

    async def end_stream(self) -> None:
        await self.send(b"0\r\n\r\n")

    def reset(self) -> None:
        """RST instead of FIN."""
        self.writer.transport.abort()

    async def wait_closed(self, timeout: float = 5.0) -> None:
        """Until the gateway closes its side. Raises `TimeoutError`."""
        await asyncio.wait_for(self.closed.wait(), timeout)


Script = Callable[[Exchange], Awaitable[None]]

ANSWER = (
    b'{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":'
    b'{"role":"assistant","content":"hello"},"finish_reason":"stop"}],"usage":{"prompt_tokens":7,"total_tokens":9,'
    b'"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4}}}'
)


async def answer_chat(exchange: Exchange) -> None:
    await exchange.answer(ANSWER)


class ScriptedReplica:
    def __init__(self, script: Script = answer_chat, models: tuple[str, ...] = ("m",)) -> None:
        self.script = script
        self.metrics = METRICS
        self.models = [{"id": model, "object": "model", "created": 5, "max_model_len": 1000} for model in models]
        self.exchanges: list[Exchange] = []
        self.connections = 0
        self.url = ""
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def running(self, port: int = 0, tls: ssl.SSLContext | None = None) -> AsyncIterator[ScriptedReplica]:
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", port, limit=2**20, ssl=tls)
        scheme = "http" if tls is None else "https"
        self.url = f"{scheme}://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            await self.stop()

    async def stop(self) -> None:
        """Stop listening and reset every connection, as a killed process does."""
        server, self._server = self._server, None
        if server is None:
            return
        for listener in server.sockets:  # what was accepted must have its transport before the server closes, else it
            asyncio.get_running_loop().remove_reader(listener.fileno())  # would never be closed (Python 3.11)
        for _ in range(3):
            await asyncio.sleep(0)
        server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await server.wait_closed()

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._server is None:  # accepted just before it stopped
            writer.transport.abort()
            return
        self._writers.add(writer)  # here: a task that is cancelled before it has begun closes nothing
        task = asyncio.create_task(self._connected(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        count = 0
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n"))[:-4]
                if head.startswith(b"GET") and b"/v1/responses/" not in head:
                    await self._control(head, writer)
                    continue
                count += 1
                exchange = Exchange(
                    head, await self._body(head, reader), reader, writer, len(self.exchanges) + 1, count
                )
                self.exchanges.append(exchange)
                await self._run(exchange)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _run(self, exchange: Exchange) -> None:
        """Run the script; meanwhile notice that the gateway closes."""
        watcher = asyncio.create_task(self._watch(exchange))
        try:
            await self.script(exchange)
        finally:
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher

    async def _watch(self, exchange: Exchange) -> None:
        while not exchange.reader.at_eof() and exchange.reader.exception() is None:  # noqa: ASYNC110 - has no event
            await asyncio.sleep(0.005)
        exchange.closed.set()

    async def _body(self, head: bytes, reader: asyncio.StreamReader) -> bytes:
        for line in head.split(b"\r\n")[1:]:
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                return await reader.readexactly(int(value))
        return b""

    async def _control(self, head: bytes, writer: asyncio.StreamWriter) -> None:
        path = head.split(b" ")[1]
        body = {
            b"/v1/models": msgspec.json.encode({"object": "list", "data": self.models}),
            b"/metrics": self.metrics,
        }.get(path, b"")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
