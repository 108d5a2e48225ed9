"""Client connections, the fast way: inference requests are served straight from the socket's callbacks.

uvicorn makes one `ClientConnection` for each accepted connection (its `http` setting takes a class). A request whose
method and path are in `ENDPOINTS` is read here and answered through `FrontDoor.serve`, one `Exchange` a request and
nothing a piece of the answer. The first request for anything else (health, metrics, docs, stored responses) hands the
connection over to `control_connection.py` (uvicorn's own protocol) for good, with the bytes received so far; later
inference requests on it take the plain ASGI way (`asgi_client.py`), which answers the same. What this class leans on:
uvicorn's `http` setting, `server_state.connections`, and a `shutdown()` method; the tests of this folder hold them.

State of a connection: reading a request -> answering (pipelined requests queue behind) -> idle -> ... -> closed.
Deadlines are fields that one sweep checks (`sweep.py`).
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from dataclasses import replace
from typing import Any, cast

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from gateway.limits import Caller, Stay
from gateway.proxy.answer_framing import AnswerFraming
from gateway.proxy.call import Call
from gateway.proxy.control_connection import LINGER_SECONDS, WRITE_HIGH_BYTES, ControlConnection, head_without_offer
from gateway.proxy.endpoints import ENDPOINTS, Endpoint
from gateway.proxy.errors import (
    BadHead,
    BodiesFull,
    BodyTooLarge,
    ErrorAnswer,
    HeadTooLarge,
    TooManyConnections,
    answer,
)
from gateway.proxy.exchange import Exchange
from gateway.proxy.front_door import FrontDoor
from gateway.proxy.incoming import IncomingBody
from gateway.proxy.places import is_room
from gateway.proxy.request_head import MAX_BARREN_BYTES, MAX_HEAD_BYTES, MAX_HEADERS, read_framing
from gateway.proxy.upstream import JOIN_BELOW_BYTES, Connection, Header

MAX_PIPELINED = 16
"""Requests read ahead of the one being answered; reading pauses above this."""
MAX_PIPELINED_BYTES = 1024 * 1024
"""Bodies of theirs, or sixteen of the largest would wait in memory for each connection."""


class ClientConnection(asyncio.Protocol):
    """One accepted connection; the `Client` of the exchange that it is answering."""

    def __init__(
        self,
        door: FrontDoor,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._door = door
        self._config = config
        self._server_state = server_state
        self._app_state = app_state
        self._loop = _loop or asyncio.get_running_loop()
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._parser: Any = httptools.HttpRequestParser(self)
        self._max_body = door.server.max_body_mib * 2**20
        self.deadline = self._loop.time() + door.server.header_timeout_seconds
        # the request being read
        self._raw: list[bytes] = []
        self._segment = 0
        """Bytes that came last."""
        self._begin_bytes = self._head_bytes = 0
        """Bytes of the segment in which the head began, and of those after it."""
        self._barren_bytes = 0
        """Bytes of the body's framing since the last byte of the body itself."""
        self._in_message = self._clean_start = self._hand_over = self._refused = False
        self._target = b""
        self._headers: list[Header] = []
        self._endpoint: Endpoint | None = None
        self._caller: Caller | None = None
        self._stay: Stay | None = None
        self._body = IncomingBody(door.bodies)
        self._length = 0
        """Announced length of the body."""
        self._bulk_left = 0
        """Bytes of a large body that come past the parser."""
        self._persistent = True
        self._is_http_1_0 = self._owes_continue = False
        # the request being answered
        self._calls: deque[Call] = deque()
        self._exchange: Exchange | None = None
        self._serving = False
        self._upstream: Connection | None = None
        self._framing = AnswerFraming()
        self._full = False
        self._unsent = 0
        """Bytes that the client had not taken when it was last looked at."""
        self._http_1_0 = False
        self._keep_alive = True
        self._paused = self._closing = False

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(WRITE_HIGH_BYTES)
        connections, places = self._server_state.connections, self._door.places
        now, taken = self._loop.time(), len(connections)
        connections.add(cast(HttpToolsProtocol, self))
        if places.make_room(taken, now):
            places.rest(self._transport, now)
        elif is_room(taken, places.limit):
            self._refuse(answer(TooManyConnections()))
        else:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server_state.connections.discard(cast(HttpToolsProtocol, self))
        self._door.places.wake(self._transport)
        self._note_unread()
        self._forget_unread()
        while self._calls:
            self._calls.popleft().drop(self._door.clock())
        self._parser = None  # it knows us, as we know it: without this each connection waits for the collector
        if self._exchange is not None:
            self._exchange.cancel()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return  # lingering: what still comes is not read
        if self._bulk_left:
            data = self._take_bulk(data)
            if not data:
                return
        self._segment = len(data)
        in_body = False
        body_bytes = self._body.size
        if not self._in_message:
            self._clean_start = True
            self._raw = [data]
        elif self._endpoint is None:
            self._raw.append(data)
            self._head_bytes += len(data)
        else:
            in_body = True
        try:
            self._parser.feed_data(data)
            if self._in_message and not (self._hand_over or self._refused):
                self._bound_rest(in_body and self._body.size == body_bytes, in_body)
        except httptools.HttpParserUpgrade as upgrade:
            self._refuse_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            if not self._hand_over:  # else whoever gets the connection reads these bytes too, and answers
                self._refuse(answer(BadHead("This is not a valid HTTP request.")))
        if self._hand_over:
            self._give_to_uvicorn()

    def _bound_rest(self, barren: bool, was_in_body: bool) -> None:
        """The request goes on in the next segment: what it may still take of bytes and time."""
        if self._endpoint is None:
            if self._head_bytes > MAX_HEAD_BYTES or len(self._headers) > MAX_HEADERS:
                self._refuse(answer(HeadTooLarge()))
            return
        if not self._body.fits():
            self._refuse_for(BodiesFull())
            return
        if not was_in_body and self._exchange is None:
            self.deadline = self._loop.time() + self._door.server.body_timeout_seconds
        self._barren_bytes = self._barren_bytes + self._segment if barren else 0
        left = self._length - self._body.size
        if left >= JOIN_BELOW_BYTES:  # needs no parser, which would copy it once more: its length is known
            self._bulk_left = left
        elif self._barren_bytes > MAX_BARREN_BYTES:
            self._refuse(answer(BadHead("The body's framing takes more than it carries.")))

    def pause_writing(self) -> None:
        self._full = True
        if self._exchange is not None:
            self._unsent = 0
            self.deadline = self._loop.time() + self._door.server.stall_timeout_seconds
        if self._upstream is not None:
            self._upstream.pause()

    def resume_writing(self) -> None:
        self._full = False
        if self._exchange is not None:
            self.deadline = math.inf
        if self._upstream is not None:
            self._upstream.resume()

    # -- httptools: the request is read

    def on_message_begin(self) -> None:
        if self._refused:
            return
        if self._exchange is None:
            self.deadline = self._loop.time() + self._door.server.header_timeout_seconds
        self._door.places.wake(self._transport)
        if self._in_message or self._calls or self._exchange is not None:
            self._clean_start = False
        self._in_message = True
        self._owes_continue = False
        self._begin_bytes, self._head_bytes, self._barren_bytes = self._segment, 0, 0
        self._target = b""
        self._headers = []
        self._endpoint = self._caller = None

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._endpoint is None:  # else a trailer, which must not pass for a header
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._hand_over or self._refused:
            return
        if (
            self._begin_bytes + self._head_bytes > MAX_HEAD_BYTES
            and len(self._target) + sum(len(n) + len(v) for n, v in self._headers) > MAX_HEAD_BYTES
        ):
            self._refuse(answer(HeadTooLarge()))
            return
        version = self._parser.get_http_version()
        framing = read_framing(version, self._target, self._headers)
        if framing.refusal is not None:
            self._refuse(framing.refusal)
            return
        method = self._parser.get_method()
        endpoint = ENDPOINTS.get(self._target.partition(b"?")[0]) if method == b"POST" else None
        if endpoint is None:
            self._hand_over = True
            return
        self._endpoint = endpoint
        self._raw = []
        if self._door.access is not None:
            caller = self._door.caller(self._headers, endpoint)
            if isinstance(caller, ErrorAnswer):  # before its body is read
                self._refuse(caller)
                return
            self._caller = caller
        self._persistent = self._parser.should_keep_alive()
        self._is_http_1_0 = version == "1.0"
        self._length = framing.length
        asked = self._caller
        if asked is not None and (self._exchange is not None or self._calls or self._parser.should_upgrade()):
            asked = None  # behind other requests limits are asked when its turn has come
        length = None if framing.chunked else framing.length
        stay = self._door.arrive(endpoint, length, asked, waits=framing.wants_continue)
        if isinstance(stay, ErrorAnswer):
            self._refuse(stay)
            return
        self._stay = stay
        if framing.wants_continue and not self._parser.should_upgrade():
            self._owes_continue = True
            if self._exchange is None:
                self._continue()

    def _continue(self) -> None:
        """The client waits for this before it sends its body."""
        self._owes_continue = False
        self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        if self._hand_over or self._refused:
            return
        self._body.keep(data)
        if self._body.size > self._max_body:
            self._refuse_for(BodyTooLarge(self._max_body))

    def on_message_complete(self) -> None:
        if self._hand_over or self._refused or self._endpoint is None or self._parser.should_upgrade():
            return
        self._read()

    def _take_bulk(self, data: bytes) -> bytes:
        """Returns what belongs to the next request."""
        rest = data[self._bulk_left :]
        part = data[: self._bulk_left] if rest else data
        self._body.keep(part)
        if not self._body.fits():
            self._refuse_for(BodiesFull())
            return b""
        self._bulk_left -= len(part)
        if not self._bulk_left:
            self._parser = httptools.HttpRequestParser(self)  # the old one still waits for what it did not see
            self._read()
        return rest

    def _read(self) -> None:
        """A whole request has been read."""
        if not self._body.fits():
            self._refuse_for(BodiesFull())
            return
        self._in_message = self._clean_start = self._owes_continue = False
        endpoint, size = self._endpoint, self._body.size
        assert endpoint is not None
        self._length = 0
        call = Call(
            method=b"POST",
            target=self._target,
            endpoint=endpoint,
            headers=self._headers,
            body=self._body.take(),
            received_at=self._door.clock(),
            keep_alive=self._persistent,
            http_1_0=self._is_http_1_0,
            caller=self._caller,
            stay=self._stay,
            budget=self._door.bodies,
            held=size,
        )
        self._stay = None
        self._calls.append(call)
        if self._exchange is None:
            self._serve_queued()
        elif not self._paused and self._reads_too_far():
            self._paused = True
            self._transport.pause_reading()

    def _reads_too_far(self) -> bool:
        """Past the request being answered: too many others, or too much of them."""
        return len(self._calls) > MAX_PIPELINED or sum(len(call.body) for call in self._calls) > MAX_PIPELINED_BYTES

    # -- Client: the answer is written

    def attach(self, connection: Connection | None) -> None:
        self._upstream = connection
        if self._full and connection is not None:
            connection.pause()

    def start(self, status: int, headers: list[Header]) -> None:
        self._keep_alive = self._framing.begin(status, headers, http_1_0=self._http_1_0, keep_alive=self._keep_alive)

    def write(self, data: bytes, last: bool) -> None:
        self._framing.write(self._transport, data, last)
        if last:
            self._answered()

    def abort(self) -> None:
        """Cut the answer short so that the client can tell: what was written goes out, the end does not follow."""
        self._keep_alive = False
        self._exchange = self._upstream = None  # it ends by itself; closing must not look like the client's leaving
        self.deadline = self._loop.time() + LINGER_SECONDS
        self._transport.close()

    # -- from one request to the next

    def _serve_queued(self) -> None:
        """Serve what was read, one after the other. A loop, for an answer may be complete before `start` returns."""
        self._serving = True
        while self._calls and self._exchange is None and not self._transport.is_closing():
            call = self._calls.popleft()
            self._keep_alive = call.keep_alive and not (call.http_1_0 or self._closing or self._door.draining)
            self._http_1_0 = call.http_1_0
            self.deadline = self._loop.time() + self._door.server.stall_timeout_seconds if self._full else math.inf
            self._exchange = call.exchange = Exchange(self._door.serve(call, self))
            self._exchange.start()
        self._serving = False
        if self._paused and not self._reads_too_far():
            self._paused = False
            self._transport.resume_reading()

    def _serve_next(self) -> None:
        self._exchange = None
        self._serve_queued()

    def _answered(self) -> None:
        exchange, self._exchange, self._upstream = self._exchange, None, None
        limits = self._door.server
        if not self._keep_alive or self._closing:
            self.deadline = self._loop.time() + limits.stall_timeout_seconds
            self._transport.close()
        elif self._calls:
            if not self._serving:  # else the loop there goes on
                assert exchange is not None
                self._exchange = exchange  # until it has given back its place, which the next may need
                exchange.ended.call_when_done(self._serve_next)
        elif self._in_message:
            limit = limits.header_timeout_seconds if self._endpoint is None else limits.body_timeout_seconds
            self.deadline = self._loop.time() + limit
            if self._owes_continue:
                self._continue()
        else:
            now = self._loop.time()
            self.deadline = now + limits.keep_alive_seconds
            if not self._transport.get_write_buffer_size():
                self._door.places.rest(self._transport, now)

    def shutdown(self) -> None:
        """uvicorn stops: close when idle, else after the answer that is under way."""
        self._closing = True
        self._keep_alive = False
        if self._exchange is None:
            self.deadline = self._loop.time() + LINGER_SECONDS  # over TLS closing asks the client, who may be asleep
            self._transport.close()

    def expire(self) -> None:
        """Its deadline has passed: an idle connection, or a client that does not finish its request or take its answer.
        One that takes it slowly gets another time."""
        unsent = self._transport.get_write_buffer_size()
        if unsent and unsent != self._unsent:
            self._unsent = unsent
            self.deadline = self._loop.time() + self._door.server.stall_timeout_seconds
        else:
            self._transport.abort()

    @property
    def transport(self) -> asyncio.Transport:
        return self._transport

    def is_paused(self) -> bool:
        """Nothing is read, so nothing tells that the client leaves."""
        return self._paused

    def cut(self) -> None:
        """The gateway stops, or the client has left: no more time for the answer under way."""
        self._transport.abort()
        if self._exchange is not None:
            self._exchange.cancel()

    # -- what does not go on here

    def _refuse_for(self, error: Exception) -> None:
        self._refuse(answer(error, anthropic=self._endpoint is not None and self._endpoint.anthropic))

    def _refuse(self, refusal: ErrorAnswer) -> None:
        """Answer without reading the rest, then close. Behind other answers there is nothing to say: close."""
        if self._refused or self._transport.is_closing():
            return
        self._note_unread(refusal)
        self._refused = True
        self._forget_unread()
        if self._exchange is not None:
            self._close_behind_answers()
            return
        self._transport.write(refusal.closing())
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self.deadline = self._loop.time() + LINGER_SECONDS

    def _forget_unread(self) -> None:
        """The request that was being read ends here: what it holds is given back. One that its client left counts as a
        request of its key."""
        self._body.drop()
        stay, self._stay = self._stay, None
        if stay is not None:
            stay.leave(0, self._door.clock(), refused=self._refused)

    def _note_unread(self, refusal: ErrorAnswer | None = None) -> None:
        """A request whose head was read, and which is no call yet, ends here: that is its record."""
        if self._in_message and self._endpoint is not None and not self._refused:
            if refusal is not None and self._exchange is not None:
                refusal = replace(refusal, status=0)  # behind another answer it is not sent
            self._door.note_unread(self._endpoint, self._headers, self._body.size, refusal, self._caller)

    def _close_behind_answers(self) -> None:
        """What was read whole is still answered."""
        if self._calls:
            self._calls[-1].keep_alive = False
        else:
            self._keep_alive = False

    def _refuse_upgrade(self, rest: bytes) -> None:
        """A client offers another protocol (Java's offers h2c on every request). llhttp stops after such a head and
        would take the body for that protocol: read the request again without the offer, which is how HTTP says no."""
        if self._hand_over or self._refused:
            return
        head = head_without_offer(b"POST", self._target, self._is_http_1_0, self._headers)
        self._parser = httptools.HttpRequestParser(self)
        self._in_message = False
        self.data_received(head + rest)

    def _give_to_uvicorn(self) -> None:
        if not self._clean_start:  # pipelined behind another request: the client asks again on a new connection
            self._refused = True
            self._close_behind_answers()
            if self._exchange is None:
                self._transport.close()
            return
        self._server_state.connections.discard(cast(HttpToolsProtocol, self))
        protocol = ControlConnection(
            self._door.server,
            self._door.places,
            config=self._config,
            server_state=self._server_state,
            app_state=self._app_state,
            _loop=self._loop,
        )
        self._transport.set_protocol(protocol)
        self._parser = None
        protocol.take_over(self._transport)
        protocol.data_received(b"".join(self._raw))
