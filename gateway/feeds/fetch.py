"""One bounded question to a replica: time, size of its head and of its body limited; no redirects, proxies,
decompression or kept connection.

A kept connection would go on answering for a server that its name no longer points to, so every question opens its own.
The answer is parsed as the data path parses it, in the callbacks of the socket: a replica that sends ten thousand tiny
pieces, or interim answers (1xx) without end, costs microseconds for each, and only until a limit is reached.
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

from gateway.config import DEFAULT_PORTS
from gateway.descriptors import OURS

MAX_HEAD_BYTES = 64 * 1024
"""Of the head, interim answers before it included; later of what frames the body."""


class FetchFailed(Exception):
    """The page could not be had. The message is one short line for people."""


class Unreachable(FetchFailed):
    """No connection: there is no server, or none that is let to be reached."""


class TimedOut(FetchFailed):
    """No whole answer in its time."""


class Hindered(FetchFailed):
    """Nobody was asked: this machine had no descriptor, memory or port left. No word about the replica."""


@dataclass(frozen=True, slots=True)
class ReplicaClient:
    """How all feeds ask."""

    tls: ssl.SSLContext | None = None
    """How `https://` replicas are verified; by the system's authorities if nobody says."""
    tls_server_name: str | None = None
    """The name in their certificates, if it is not that of the URL."""
    key: str | None = None
    """What replicas ask for."""

    def question(self, netloc: str, path: str, posting: bytes | None) -> bytes:
        lines = [
            f"{'GET' if posting is None else 'POST'} {path} HTTP/1.1",
            f"Host: {netloc}",
            "User-Agent: warmlane",
            "Accept: */*",
            "Accept-Encoding: identity",
            "Connection: close",
        ]
        if self.key is not None:
            lines.append(f"Authorization: Bearer {self.key}")
        if posting is not None:
            lines += ("Content-Type: application/json", f"Content-Length: {len(posting)}")
        return "\r\n".join((*lines, "", "")).encode() + (posting or b"")

    async def connect(self, url: str, max_bytes: int) -> tuple[asyncio.Transport, Answer]:
        """Raises `OSError` and `UnicodeError`."""
        parts = urlsplit(url)
        host = parts.hostname or ""
        tls = (self.tls or ssl.create_default_context()) if parts.scheme == "https" else None
        loop = asyncio.get_running_loop()
        return await loop.create_connection(
            lambda: Answer(max_bytes, loop.create_future()),
            host,
            parts.port or DEFAULT_PORTS[parts.scheme],
            ssl=tls,
            server_hostname=None if tls is None else self.tls_server_name or host,
        )


class Answer(asyncio.Protocol):
    """The answer on one connection, until `ended`: then it is whole, or `problem` says why it never will be."""

    def __init__(self, max_bytes: int, ended: asyncio.Future[None]) -> None:
        self.ended = ended
        self.problem = ""
        self.body = bytearray()
        self._max_bytes = max_bytes
        self._parser: Any = httptools.HttpResponseParser(self)
        self._transport = cast(asyncio.Transport, None)
        self._taken = 0
        self._in_body = self._is_framed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.ended.done():
            return
        self._taken += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._end("the answer is not HTTP")
        if not self._in_body and self._taken > MAX_HEAD_BYTES:
            self._end("too large a head")
        elif self._taken > self._max_bytes + 2 * MAX_HEAD_BYTES:
            self._end("its framing takes more than it carries")

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("" if self._in_body and not self._is_framed and exc is None else "the connection was lost")
        self._parser = None  # it knows us, as we know it: without this each answer waits for the collector

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_body:
            return  # a trailer
        name = name.lower()
        if name in (b"content-length", b"transfer-encoding"):
            self._is_framed = True
        elif name == b"content-encoding" and value.lower() != b"identity" and self._parser.get_status_code() == 200:
            self._end("compressed although not asked for")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:  # the real answer follows
            self._is_framed = False
            return
        self._in_body = True
        if status != 200:
            self._end(f"HTTP {status}")

    def on_body(self, data: bytes) -> None:
        if len(self.body) + len(data) > self._max_bytes:
            self._end(f"more than {self._max_bytes} bytes")
        if not self.ended.done():
            self.body += data

    def on_message_complete(self) -> None:
        if self._in_body:
            self._end("")

    def _end(self, problem: str) -> None:
        """The first that is said counts."""
        if not self.ended.done():
            self.problem = problem
            self.ended.set_result(None)
            self._transport.abort()


async def fetch(
    client: ReplicaClient, url: str, *, timeout_seconds: float, max_bytes: int, posting: bytes | None = None
) -> bytes:
    """Body of a 200 answer to a GET, or to a POST of JSON. Raises `FetchFailed` for everything else: too late, too big,
    another status, no server."""
    parts = urlsplit(url)
    transport: asyncio.Transport | None = None
    try:
        async with asyncio.timeout(timeout_seconds):
            transport, answer = await client.connect(url, max_bytes)
            transport.write(client.question(parts.netloc, parts.path, posting))
            await answer.ended
    except TimeoutError:
        missing = "connection" if transport is None else "whole answer"
        raise TimedOut(f"no {missing} in {timeout_seconds:g} s") from None
    except (OSError, UnicodeError) as error:  # the latter from a name that cannot be one
        if isinstance(error, OSError) and error.errno in OURS:
            raise Hindered("this machine has no socket left") from error
        raise Unreachable(reason_of(error)) from error
    finally:
        if transport is not None:
            transport.abort()
    if answer.problem:
        raise FetchFailed(answer.problem)
    return bytes(answer.body)


def reason_of(error: OSError | UnicodeError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its TLS certificate was not accepted: {error.verify_message.rstrip('.')}"
    return str(error).partition("\n")[0] or type(error).__name__
