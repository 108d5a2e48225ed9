"""Connections to one replica: a keep-alive pool, and one request at a time on each connection.

A `Connection` is an `asyncio.Protocol` on llhttp (httptools). It hands each piece of the answer to its `Sink` in the
loop iteration in which it arrived: no task and no queue stand between the two sockets. Its life:

    connect -> idle -> busy (send .. last byte) -> idle ... -> closed

A connection never carries two requests, and is closed rather than reused when anything about the last one was odd.
Deadlines are checked by one periodic sweep (`expire`), not by a timer for each request; they are exact to the sweep's
period.
"""

from __future__ import annotations

import asyncio
import math
import socket
import ssl
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

import httptools

from gateway.config import DEFAULT_PORTS
from gateway.config import Upstream as UpstreamConfig
from gateway.core.model import ReplicaId
from gateway.descriptors import OURS
from gateway.proxy.errors import (
    BadAnswer,
    ConnectFailed,
    ConnectionLost,
    FirstByteTimeout,
    IdleTimeout,
    OutOfSockets,
    TlsFailed,
    UpstreamError,
)

Header = tuple[bytes, bytes]

JOIN_BELOW_BYTES = 65_536
"""Head and body go out as one buffer below this; above, copying the body costs more than a second write."""
FRAMING = frozenset((b"content-length", b"transfer-encoding"))
RECEIVE_BUFFER_BYTES = 96 * 1024
"""What the kernel keeps for us of an answer (it doubles this): the most that one read brings, hence what a client that
reads slowly holds here. Left alone it grows to 6 MiB for each. Enough for 10 MB/s to a replica 10 ms away."""
STALE_SECONDS = 1.0
"""Servers close connections that idle for longer than this (uvicorn: 5 s). One that is lost sooner was lost with its
replica, or by it."""
MAX_HEAD_BYTES = 64 * 1024
"""Response heads are refused above this, and framing between two pieces; real ones have a few hundred bytes."""


class Sink(Protocol):
    """Who takes the answer. The order of calls: head, pieces, the last of them with `last`; or `failed` at any time."""

    def head(self, status: int, headers: Sequence[Header]) -> None: ...
    def piece(self, data: bytes, last: bool) -> None: ...
    def failed(self, error: UpstreamError) -> None: ...


class Connection(asyncio.Protocol):
    """One socket to a replica."""

    __slots__ = (
        "_answered",
        "_barren_bytes",
        "_close_delimited",
        "_complete",
        "_head_bytes",
        "_head_done",
        "_headers",
        "_loop",
        "_parser",
        "_parts",
        "_pool",
        "_reusable",
        "_sink",
        "_transport",
        "deadline",
        "idle_since",
        "may_be_stale",
    )

    def __init__(self, pool: Upstream, loop: asyncio.AbstractEventLoop) -> None:
        self._pool = pool
        self._loop = loop
        self._parser: Any = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._sink: Sink | None = None
        self._headers: list[Header] = []
        self._parts: list[bytes] = []
        self._head_bytes = self._barren_bytes = 0
        self._head_done = self._complete = self._answered = self._close_delimited = False
        self._reusable = True
        self.may_be_stale = False
        """It had idled long enough for the replica to have closed it before our bytes came."""
        self.idle_since = 0.0
        self.deadline = 0.0

    # -- what the relay's side calls

    def send(self, sink: Sink, head: bytes, body: bytes) -> None:
        """Send one request; its answer goes to `sink`."""
        self._sink = sink
        self._headers = []
        self._head_bytes = self._barren_bytes = 0
        self._head_done = self._complete = self._answered = self._close_delimited = False
        self.deadline = self._loop.time() + self._pool.config.first_byte_timeout_seconds
        self._pool.busy.add(self)
        if len(body) < JOIN_BELOW_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))

    def abort(self, sink: Sink) -> None:
        """The answer to `sink` is not wanted any more: cut the connection, so that the replica stops working on it."""
        if self._sink is not sink:
            return  # it has ended, and the connection may serve another by now
        self._sink = None
        self._pool.busy.discard(self)
        self._transport.abort()

    def pause(self) -> None:
        """The client reads slower than the replica writes: stop reading. Its own idling is not the replica's fault."""
        if self._sink is not None and not self._transport.is_closing():
            self._transport.pause_reading()
            self.deadline = math.inf

    def resume(self) -> None:
        if self._sink is not None and not self._transport.is_closing():
            self._transport.resume_reading()
            limits = self._pool.config
            limit = limits.idle_timeout_seconds if self._head_done else limits.first_byte_timeout_seconds
            self.deadline = self._loop.time() + limit

    def close(self) -> None:
        """It is idle: nothing is on its way, and over TLS a polite end would take the replica's answer."""
        self._transport.abort()

    @property
    def answered(self) -> bool:
        """Any byte of the answer has come."""
        return self._answered

    @property
    def usable(self) -> bool:
        return not self._transport.is_closing()

    def expire(self) -> None:
        """Its deadline has passed."""
        limits = self._pool.config
        if self._head_done:
            self._fail(IdleTimeout(f"The replica sent nothing for {limits.idle_timeout_seconds:g} s in mid-answer."))
        else:
            self._fail(FirstByteTimeout(f"The replica did not answer within {limits.first_byte_timeout_seconds:g} s."))

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        sink = self._sink
        if sink is None:  # bytes that nobody asked for: this connection cannot be trusted
            self._transport.abort()
            return
        self._answered = True
        head_was_done = self._head_done
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(BadAnswer(f"The replica's answer is not HTTP ({type(error).__name__})."))
            return
        if not self._head_done:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._fail(BadAnswer("The replica's answer has too large a head."))
            return
        self.deadline = self._loop.time() + self._pool.config.idle_timeout_seconds
        if not head_was_done:
            sink.head(self._parser.get_status_code(), self._headers)
        parts = self._parts
        if parts or self._complete:
            self._barren_bytes = 0
        else:  # framing only: trailers, or extensions of a chunk
            self._barren_bytes += len(data)
            if self._barren_bytes > MAX_HEAD_BYTES:
                self._fail(BadAnswer("The answer's framing takes more than it carries."))
                return
        piece = parts[0] if len(parts) == 1 else b"".join(parts)
        self._parts = []
        if self._complete:
            self._end()
        sink.piece(piece, self._complete)

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.forget(self)
        self._parser = None  # it knows us, as we know it: without this each connection waits for the collector
        sink, self._sink = self._sink, None
        if sink is None:
            return
        if exc is None and self._head_done and self._close_delimited:
            sink.piece(b"", True)
        else:
            where = "in mid-answer" if self._answered else "before it answered"
            sink.failed(ConnectionLost(f"The replica closed the connection {where}.", answered=self._answered))

    # -- httptools

    def on_message_begin(self) -> None:
        if self._complete:
            raise ValueError("a second answer to one request")  # reaches `data_received` as HttpParserCallbackError

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._head_done:  # else a trailer, which must not pass for a header
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if not 100 <= status <= 599:
            raise ValueError("not a status")  # reaches `data_received` as HttpParserCallbackError
        if status < 200:  # 100 Continue and its like: the real answer follows
            self._headers = []
            return
        self._head_done = True
        self._close_delimited = status not in (204, 304) and not any(name in FRAMING for name, _ in self._headers)
        self._reusable = self._parser.should_keep_alive() and not self._close_delimited

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)

    def on_message_complete(self) -> None:
        if self._head_done:
            self._complete = True

    # -- ends

    def _end(self) -> None:
        self._sink = None
        self._pool.busy.discard(self)
        if self._reusable and not self._transport.is_closing() and not self._transport.get_write_buffer_size():
            self._transport.resume_reading()
            self._pool.give_back(self)
        else:
            self._transport.close()

    def _fail(self, error: UpstreamError) -> None:
        sink, self._sink = self._sink, None
        self._pool.busy.discard(self)
        self._transport.abort()
        if sink is not None:
            sink.failed(error)

    def __repr__(self) -> str:
        return f"<Connection to {self._pool.replica} {'busy' if self._sink else 'idle'}>"


class Upstream:
    """All connections to one replica."""

    def __init__(
        self,
        replica: ReplicaId,
        config: UpstreamConfig,
        loop: asyncio.AbstractEventLoop,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`tls`: how an `https://` replica is verified."""
        parts = urlsplit(replica)
        self.replica = replica
        self.name = replica.encode()
        self.config = config
        self.host = parts.hostname or ""
        self.port = parts.port or DEFAULT_PORTS[parts.scheme]
        self._tls: ssl.SSLContext | None = None
        if parts.scheme == "https":
            self._tls = tls or ssl.create_default_context()
        self._server_name = (config.tls_server_name or self.host) if self._tls is not None else None
        self.host_header = parts.netloc.encode()
        self.idle: deque[Connection] = deque()
        self.busy: set[Connection] = set()
        self.retired = False
        """Its replica was removed."""
        self._loop = loop

    def lease(self) -> Connection | None:
        """An idle connection that is still good, the most recently used first."""
        now = self._loop.time()
        fresh_after = now - self.config.pool_idle_seconds
        while self.idle:
            connection = self.idle.pop()
            if connection.idle_since >= fresh_after and connection.usable:
                connection.may_be_stale = now - connection.idle_since >= STALE_SECONDS
                return connection
            connection.close()
        return None

    async def connect(self) -> Connection:
        """A new connection. Raises `ConnectFailed`, or `OutOfSockets`."""
        limit = self.config.connect_timeout_seconds
        try:
            async with asyncio.timeout(limit):
                transport, connection = await self._loop.create_connection(
                    lambda: Connection(self, self._loop),
                    self.host,
                    self.port,
                    ssl=self._tls,
                    server_hostname=self._server_name,
                )
        except TimeoutError as error:
            raise ConnectFailed(f"The replica did not accept a connection within {limit:g} s.") from error
        except ssl.CertificateError as error:
            raise TlsFailed(
                f"The replica's TLS certificate was not accepted: {error.verify_message.rstrip('.')}."
            ) from error
        except ssl.SSLError as error:
            raise TlsFailed(f"The replica does not speak TLS as it should ({error.reason}).") from error
        except (OSError, UnicodeError) as error:  # the latter from a name that cannot be one
            if isinstance(error, OSError) and error.errno in OURS:
                raise OutOfSockets from error
            raise ConnectFailed("The replica refused the connection.") from error
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        return connection

    def give_back(self, connection: Connection) -> None:
        connection.idle_since = self._loop.time()
        self.idle.append(connection)

    def forget(self, connection: Connection) -> None:
        self.busy.discard(connection)
        try:
            self.idle.remove(connection)
        except ValueError:
            pass  # it was busy

    def sweep(self, now: float) -> None:
        """Close what idled too long, fail what is overdue."""
        stale_before = now - self.config.pool_idle_seconds
        while self.idle and self.idle[0].idle_since < stale_before:
            self.idle.popleft().close()
        for connection in [one for one in self.busy if one.deadline < now]:
            connection.expire()

    def close(self) -> None:
        while self.idle:
            self.idle.pop().close()

    def __repr__(self) -> str:
        return f"<Upstream {self.replica} idle={len(self.idle)} busy={len(self.busy)}>"
