"""Connections that uvicorn's own protocol serves (control endpoints, stored responses, everything in the plain ASGI
way), with what it lacks: a time for the whole request, for the idle beginning and for a client that takes nothing of
its answer (the sweep of `http_client.py` enforces them), a size of the head, and the body of a request that offers
another protocol, which uvicorn loses.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.config import Server
from gateway.proxy.relay import connection_tokens

MAX_HEAD_BYTES = 64 * 1024
"""As on the fast way, exact to one segment."""
UPGRADE = frozenset((b"upgrade", b"http2-settings"))
"""Headers that belong to an offer of another protocol."""


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
    def __init__(self, limits: Server, **rest: Any) -> None:
        super().__init__(**rest)
        self._limits = limits
        self._in_head = self._in_message = False
        self._head_bytes = 0
        self._unanswered = 0
        """Whole requests."""
        self._unsent = 0
        self.deadline = self.loop.time() + limits.keep_alive_seconds

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.deadline = self.loop.time() + self._limits.keep_alive_seconds

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._refuse_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = self._in_message = True
        self._head_bytes = 0
        self.deadline = self.loop.time() + self._limits.body_timeout_seconds

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # else a trailer, which must not pass for a header
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_message = False
        if self.parser.should_upgrade():
            return
        self._unanswered += 1
        self.deadline = math.inf
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._unanswered -= 1
        if self._in_message and self._unanswered >= 0:  # the next one, begun behind it
            self.deadline = self.loop.time() + self._limits.body_timeout_seconds
        super().on_response_complete()

    def _refuse_upgrade(self, rest: bytes) -> None:
        """As on the fast way: read the request again without the offer. What is no offer (CONNECT) is refused."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self.send_400_response("CONNECT is not supported.")
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

    def expire(self) -> None:
        """Its deadline has passed. An answer under way has no deadline but that its client takes it."""
        unsent = self.transport.get_write_buffer_size()
        if unsent and unsent != self._unsent:
            self._unsent = unsent
            self.deadline = self.loop.time() + self._limits.stall_timeout_seconds
        elif unsent or self._unanswered <= 0:
            self.transport.abort()
