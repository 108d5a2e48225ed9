"""Open-loop load: requests go out at their times, whatever became of those before, and each one's end gets a name.

A request is one connection, so that nothing but the gateway decides what happens to it. How it ended is judged as a
careful client would: a stream is whole only with all its tokens in order, a finish reason and `[DONE]`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import cast
from urllib.parse import urlsplit

import httptools

CLIENT_SECONDS = 60.0
"""A request that has not ended by then ends as `late`, unless its load allows it more."""
TOKEN = re.compile(rb'"content":"((?:t\d+ ?)+)"')
ERROR_EVENT = re.compile(rb'(?:^|\n)data: ?\{"(?:error"|type": ?"error")')


@dataclass(frozen=True)
class Traffic:
    """What is sent. The reference rig of the fault tests: 200 requests/s, half of them streams of 60 tokens."""

    rate: float = 200.0
    stream_share: float = 0.5
    tokens: int = 60
    families: int = 12
    """Prompts share one of so many prefixes of 2 KiB."""
    headers: tuple[tuple[str, str], ...] = ()

    def streams(self, number: int) -> bool:
        return int(number * self.stream_share) > int((number - 1) * self.stream_share)

    def request(self, number: int, host: str) -> bytes:
        prefix = f"family {number * 7919 % self.families} knows this: " * 80
        body = json.dumps(
            {
                "model": "m",
                "messages": [{"role": "system", "content": prefix}, {"role": "user", "content": f"request {number}"}],
                "stream": self.streams(number),
            }
        ).encode()
        lines = [
            "POST /v1/chat/completions HTTP/1.1",
            f"host: {host}",
            "content-type: application/json",
            f"x-request-id: load-{number}",
            *(f"{name}: {value}" for name, value in self.headers),
            f"content-length: {len(body)}",
        ]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@dataclass(frozen=True)
class Result:
    """One request as its client saw it. Times are `time.monotonic()`."""

    number: int
    stream: bool
    sent_at: float
    ended_at: float
    end: str
    """`whole`, `error event`, `cut` (an answer that does not end), `no answer`, `refused` (no connection), `late`,
    `short` (ended properly, but tokens or `[DONE]` are missing)."""
    status: int = 0
    head_at: float | None = None
    first_token_at: float | None = None
    tokens: int = 0
    done: bool = False
    """`[DONE]` came."""
    finished: bool = False
    """A finish reason came."""
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    """Of answers that are not whole."""

    @property
    def ok(self) -> bool:
        return self.status == 200 and self.end == "whole"

    @property
    def replica(self) -> str:
        return self.headers.get("x-warmlane-replica", "")

    @property
    def seconds(self) -> float:
        return self.ended_at - self.sent_at

    @property
    def name(self) -> str:
        """For counting: `ok`, or what went wrong."""
        return "ok" if self.ok else f"{self.status} {self.end}"


class Reading(asyncio.Protocol):
    """One client connection: reads one answer to its end, whatever that is."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.ended: asyncio.Future[str] = loop.create_future()
        self.transport = cast(asyncio.Transport, None)
        self.parser = httptools.HttpResponseParser(self)
        self.headers: dict[str, str] = {}
        self.parts: list[bytes] = []
        self.status = 0
        self.head_at: float | None = None
        self.first_token_at: float | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.end("cut")

    def connection_lost(self, exc: Exception | None) -> None:
        self.end("cut" if self.status else "no answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self.parser.get_status_code()
        self.head_at = time.monotonic()

    def on_body(self, data: bytes) -> None:
        self.parts.append(data)
        if self.first_token_at is None and b'"content":"t' in data:
            self.first_token_at = time.monotonic()

    def on_message_complete(self) -> None:
        self.end("whole")

    def end(self, how: str) -> None:
        if not self.ended.done():
            self.ended.set_result(how)


async def ask(url: str, number: int, traffic: Traffic, seconds: float = CLIENT_SECONDS) -> Result:
    """Send one request on a connection of its own and read what comes."""
    loop = asyncio.get_running_loop()
    parts = urlsplit(url)
    sent_at = time.monotonic()
    stream = traffic.streams(number)
    try:
        _, reading = await loop.create_connection(lambda: Reading(loop), parts.hostname, parts.port)
    except OSError:
        return Result(number, stream, sent_at, time.monotonic(), "refused")
    reading.transport.write(traffic.request(number, parts.netloc))
    try:
        async with asyncio.timeout(seconds):
            how = await reading.ended
    except TimeoutError:
        how = "late"
    finally:
        reading.transport.abort()
    return judged(reading, how, Result(number, stream, sent_at, time.monotonic(), how), traffic)


def judged(reading: Reading, how: str, raw: Result, traffic: Traffic) -> Result:
    """What the bytes say about the end."""
    body = b"".join(reading.parts)
    tokens = b"".join(found[1] for found in TOKEN.finditer(body)).split()
    in_order = tokens == [b"t%d" % token for token in range(len(tokens))]
    done = b"data: [DONE]" in body
    if raw.stream and reading.status == 200:
        if ERROR_EVENT.search(body):
            how = "error event"
        elif how == "whole" and not (in_order and len(tokens) == traffic.tokens and done):
            how = "short"
    elif reading.status == 200 and how == "whole" and not (in_order and len(tokens) == traffic.tokens):
        how = "short"
    return replace(
        raw,
        end=how,
        status=reading.status,
        head_at=reading.head_at,
        first_token_at=reading.first_token_at,
        tokens=len(tokens) if in_order else -1,
        done=done,
        finished=b'"finish_reason":"' in body,
        headers=reading.headers,
        body=b"" if how == "whole" and reading.status == 200 else body[-2_048:],
    )


class Load:
    """Requests at a fixed rate against `url` (or whatever `choose` names for each) while it is `running`."""

    def __init__(
        self,
        url: str | Callable[[], str],
        traffic: Traffic | None = None,
        *,
        first: int = 1,
        limit_seconds: float = CLIENT_SECONDS,
    ) -> None:
        self.choose: Callable[[], str] = (lambda: url) if isinstance(url, str) else url
        self.traffic = traffic or Traffic()
        self.results: list[Result] = []
        self.sent = first - 1
        self._limit_seconds = limit_seconds
        self._open: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Load]:
        """Sends inside the block; at its end waits until every request has ended."""
        sending = asyncio.create_task(self._send())
        try:
            yield self
        finally:
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sending
            await self.settled()

    async def run(self, seconds: float) -> list[Result]:
        async with self.running():
            await asyncio.sleep(seconds)
        return self.results

    async def settled(self) -> None:
        while self._open:
            await asyncio.wait(set(self._open))

    async def _send(self) -> None:
        began, first = time.monotonic(), self.sent
        while True:
            self.sent += 1
            task = asyncio.create_task(self._ask(self.sent))
            self._open.add(task)
            task.add_done_callback(self._open.discard)
            due = began + (self.sent - first) / self.traffic.rate
            await asyncio.sleep(max(0.0, due - time.monotonic()))

    async def _ask(self, number: int) -> None:
        self.results.append(await ask(self.choose(), number, self.traffic, self._limit_seconds))


def ends(results: Iterable[Result]) -> str:
    """How many ended how, for a figure: `1000 ok, 2 504 whole`."""
    counts = Counter(result.name for result in results)
    return ", ".join(f"{count} {name}" for name, count in counts.most_common()) or "nothing"


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of them do not exceed; NaN of nothing."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan
