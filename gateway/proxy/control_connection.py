"""Connections that uvicorn's own protocol serves (control endpoints, stored responses, everything in the plain ASGI
way), with what it lacks: a time for the head, for the whole request, for the idle beginning and for a client that takes
nothing of its answer (the sweep of `http_client.py` enforces them), sizes of head and framing, the judgement of
`request_head.py`, refusals as JSON that never fall into the middle of another answer, and the body of a request that
offers another protocol, which uvicorn loses.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.config import Server
from gateway.proxy.errors import BadHead, ErrorAnswer, HeadTooLarge, TooManyConnections, answer
from gateway.proxy.places import Places, is_room
from gateway.proxy.relay import connection_tokens
from gateway.proxy.request_head import MAX_BARREN_BYTES, MAX_HEAD_BYTES, MAX_HEADERS, read_framing

UPGRADE = frozenset((b"upgrade", b"http2-settings"))
"""Headers that belong to an offer of another protocol."""
LINGER_SECONDS = 2.0
"""After a refusal the socket drains this long, lest a reset cost the client the answer."""
WRITE_HIGH_BYTES = 4096
"""Unsent bytes of an answer above which its replica is read no further. One read brings up to 256,000: that is what a
slow reader holds here; what keeps the line busy meanwhile is the kernel's buffer."""


def head_without_offer(method: bytes, target: bytes, http_1_0: bool, headers: list[tuple[bytes, bytes]]) -> bytes:
    """A request's head without `Upgrade`; other options of its `Connection` stay."""
    lines = [method, b" ", target, b" HTTP/1.0\r\n" if http_1_0 else b" HTTP/1.1\r\n"]
    for name, value in headers:
        if name == b"connection":
            value = b", ".join(connection_tokens(value) - UPGRADE)
        if name not in UPGRADE:
            lines += (name, b": ", value, b"\r\n")
    return b"".join((*lines, b"\r\n"))


class ControlConnection(HttpToolsProtocol):
    def __init__(self, limits: Server, places: Places, **rest: Any) -> None:
        super().__init__(**rest)
        self._limits = limits
        self._places = places
        self._in_head = self._in_message = self._refused = self._body_came = False
        self._head_bytes = self._barren_bytes = 0
        self._unanswered = 0
        """Whole requests."""
        self._unsent = 0
        self._answering: RequestResponseCycle | None = None
        """Others may be read, and wait behind it."""
        self.deadline = self.loop.time() + limits.header_timeout_seconds

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        now, taken = self.loop.time(), len(self.connections)
        self.take_over(transport)
        if self._places.make_room(taken, now):
            self._places.rest(transport, now)
        elif is_room(taken, self._places.limit):
            self.refuse(answer(TooManyConnections()))
        else:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._places.wake(self.transport)
        super().connection_lost(exc)
        answering = self._answering
        if answering is not None and not answering.response_complete:  # uvicorn tells the one that was read last
            answering.disconnected = True
            answering.message_event.set()

    def take_over(self, transport: asyncio.Transport) -> None:
        """A connection that was let in already."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(WRITE_HIGH_BYTES)
        self.deadline = self.loop.time() + self._limits.header_timeout_seconds

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return  # lingering: what still comes is not read
        self._unset_keepalive_if_required()
        self._body_came = False
        was_in_body = self._in_message and not self._in_head
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._refuse_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.refuse(answer(BadHead("This is not a valid HTTP request.")))
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES or len(self.headers) > MAX_HEADERS:
                self.refuse(answer(HeadTooLarge()))
        elif self._in_message:
            self._barren_bytes = self._barren_bytes + len(data) if was_in_body and not self._body_came else 0
            if self._barren_bytes > MAX_BARREN_BYTES:
                self.refuse(answer(BadHead("The body's framing takes more than it carries.")))

    def on_message_begin(self) -> None:
        if self._refused:
            return
        self._places.wake(self.transport)
        super().on_message_begin()
        self._in_head = self._in_message = True
        self._head_bytes = self._barren_bytes = 0
        self.deadline = self.loop.time() + self._limits.header_timeout_seconds

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # else a trailer, which must not pass for a header
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self._refused:
            return
        framing = read_framing(self.parser.get_http_version(), self.url, self.headers)
        if framing.refusal is not None:
            self.refuse(framing.refusal)
            return
        self.deadline = self.loop.time() + self._limits.body_timeout_seconds
        if not self.parser.should_upgrade():
            super().on_headers_complete()
            if not self.pipeline:
                self._answering = self.cycle

    def on_body(self, body: bytes) -> None:
        self._body_came = True
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_message = False
        if self._refused or self.parser.should_upgrade():
            return
        self._unanswered += 1
        self.deadline = math.inf
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._unanswered -= 1
        limits = self._limits
        if not self._in_message and self._unanswered <= 0:  # uvicorn has a timer for that, which an empty line ends
            now = self.loop.time()
            self.deadline = now + limits.keep_alive_seconds
            if not self.transport.get_write_buffer_size():
                self._places.rest(self.transport, now)
        elif self._in_message and self._unanswered >= 0:  # the next one, begun behind it
            limit = limits.header_timeout_seconds if self._in_head else limits.body_timeout_seconds
            self.deadline = self.loop.time() + limit
        if self.pipeline:
            self._answering = self.pipeline[-1][0]
        super().on_response_complete()
        if self._refused and self._unanswered <= 0:
            self.transport.close()

    def refuse(self, refusal: ErrorAnswer) -> None:
        """Answer without reading the rest, then close. Behind other answers there is nothing to say: close."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        cycle = self.cycle
        if self._unanswered > 0:
            cycle.keep_alive = False  # of the last that was read whole
            return
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True  # whoever reads the body that cannot be read learns that it does not come
            cycle.message_event.set()
            if cycle.response_started:
                self.transport.abort()
                return
        self.transport.write(refusal.closing())
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.deadline = self.loop.time() + LINGER_SECONDS

    def _refuse_upgrade(self, rest: bytes) -> None:
        """As on the fast way: read the request again without the offer. What is no offer (CONNECT) is refused."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self.refuse(answer(BadHead("CONNECT is not supported.")))
        if self._refused:
            return
        head = head_without_offer(method, self.url, self.parser.get_http_version() == "1.0", self.headers)
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(head + rest)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unsent = 0
        self.deadline = self.loop.time() + self._limits.stall_timeout_seconds

    def resume_writing(self) -> None:
        super().resume_writing()
        self.deadline = math.inf

    def shutdown(self) -> None:
        super().shutdown()
        if self.transport.is_closing():
            self.deadline = self.loop.time() + LINGER_SECONDS  # over TLS closing asks the client, who may be asleep

    def is_paused(self) -> bool:
        """Nothing is read, so nothing tells that the client leaves."""
        return self.flow.read_paused

    def cut(self) -> None:
        """The client has left."""
        self.transport.abort()

    def expire(self) -> None:
        """Its deadline has passed. An answer under way has no deadline but that its client takes it."""
        unsent = self.transport.get_write_buffer_size()
        if unsent and unsent != self._unsent:
            self._unsent = unsent
            self.deadline = self.loop.time() + self._limits.stall_timeout_seconds
        elif unsent or self._unanswered <= 0:
            self.transport.abort()
