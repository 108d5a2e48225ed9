"""The one request handler. Read `serve` and `attempts` and you have followed a request through Warmlane.

    read the body -> wait at the gate -> decide -> start -> send upstream -> relay -> finish, record

Facts about replicas come in from the side (`feeds`), never through here. A second attempt happens only while nothing
has reached the client: on another replica when the first could not be connected, or, for stateless requests and once,
when its connection was lost before it answered; on the same replica when a *reused* connection turned out to be dead,
which says nothing about the replica. A client that leaves cancels its task, in whatever phase it is.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from gateway import prompt
from gateway.config import Server as ServerConfig
from gateway.config import Upstream as UpstreamConfig
from gateway.core.flight import Flight
from gateway.core.model import Decision, NoReplica, Outcome, ReplicaId, RouteRequest, RoutingError, Usage
from gateway.core.router import Router
from gateway.prompt import Shape
from gateway.proxy.endpoints import Endpoint
from gateway.proxy.errors import (
    KNOWN,
    BadBody,
    ConnectFailed,
    ConnectionLost,
    ErrorAnswer,
    Overloaded,
    UpstreamError,
    answer,
    code_of,
)
from gateway.proxy.gate import Gate
from gateway.proxy.relay import HOP_BY_HOP, Client, Relay
from gateway.proxy.upstream import Header, Upstream
from gateway.telemetry import RequestRecord, Telemetry

NOT_FORWARDED = HOP_BY_HOP | {b"host", b"content-length", b"expect"}
REQUEST_ID = re.compile(rb"[A-Za-z0-9_.:/+=@-]{1,128}")
SWEEP_SECONDS = 0.25
"""Period of the deadline sweep over upstream connections: deadlines are exact to this."""


@dataclass(slots=True)
class Call:
    """One client request as it came."""

    method: bytes
    target: bytes
    """Path and query exactly as received; exactly this is forwarded."""
    endpoint: Endpoint
    headers: list[Header]
    """Names in lower case, order and repetition kept."""
    body: bytes
    received_at: float
    response_id: str | None = None
    """Id in the path of a stored response."""
    keep_alive: bool = True
    """The client will send more on this connection."""
    http_1_0: bool = False
    """The client does not understand chunked bodies."""

    def header(self, name: bytes) -> bytes | None:
        for key, value in self.headers:
            if key == name:
                return value
        return None


class FrontDoor:
    """Everything that one request needs; built once, knows no request by itself."""

    def __init__(
        self,
        router: Router,
        telemetry: Telemetry,
        server: ServerConfig,
        upstream: UpstreamConfig,
        clock: Callable[[], float],
        loop: asyncio.AbstractEventLoop,
        *,
        block_bytes: int,
    ) -> None:
        self.server = server
        self.clock = clock
        self.router = router
        self.telemetry = telemetry
        self.gate = Gate(router, clock, loop)
        self._loop = loop
        self._upstream_config = upstream
        self._upstreams: dict[ReplicaId, Upstream] = {}
        self._block_bytes = block_bytes
        self._id_prefix = secrets.token_hex(6)
        self._id_count = itertools.count(1)

    async def serve(self, call: Call, client: Client) -> None:
        """Answer one call. Raises nothing but `CancelledError`, when the client left."""
        record = self._record(call)
        ticket = None
        try:
            request = self.read(call, record)
            ticket = await self.gate.enter(request)
            record.waited_seconds = self.clock() - call.received_at
            await self._attempts(call, request, client, record)
        except asyncio.CancelledError:
            record.outcome = Outcome.CLIENT_LEFT.value
            raise
        except KNOWN as error:
            self._refuse(client, call, error, record)
        finally:
            if ticket is not None:
                self.gate.leave(ticket)
            client.attach(None)
            record.duration_seconds = self.clock() - call.received_at
            self.telemetry.request_ended(record)

    def read(self, call: Call, record: RequestRecord) -> RouteRequest:
        """Body and headers -> what the core needs to know. Raises `BadBody`, `OwnerGone`."""
        session = call.header(b"x-session-id")
        shape = call.endpoint.shape
        encoding = call.header(b"content-encoding")
        if encoding is not None and encoding != b"identity":
            return RouteRequest(length=len(call.body))  # compressed: passed as it is, without affinity
        pinned = None
        owned = call.response_id or (prompt.previous_response(call.body) if shape is Shape.RESPONSES else None)
        if owned is not None:
            pinned = self.router.owner(owned)
        try:
            request = prompt.parse(
                call.body,
                shape,
                block_bytes=self._block_bytes,
                session=session.decode("latin-1") if session else None,
                pinned=pinned,
            )
        except prompt.NotJson as error:
            raise BadBody(str(error)) from error
        record.model = request.model or ""
        return request

    async def _attempts(self, call: Call, request: RouteRequest, client: Client, record: RequestRecord) -> None:
        excluded: set[ReplicaId] = set()
        last_error: UpstreamError | None = None
        replays = 0
        while True:
            try:
                decision = self.router.decide(request, self.clock(), exclude=excluded)
            except RoutingError as error:
                raise last_error or error from None
            last_error = await self._attempt(call, decision, client, record)
            if last_error is None:
                return
            if isinstance(last_error, ConnectionLost):
                replays += 1
            if not last_error.replayable or replays > (1 if call.endpoint.stateless else 0):
                raise last_error
            excluded.add(decision.replica)

    async def _attempt(
        self, call: Call, decision: Decision, client: Client, record: RequestRecord
    ) -> UpstreamError | None:
        """One flight. Returns the error when nothing has reached the client, else `None`."""
        flight = self.router.start(decision, self.clock())
        record.started(decision)
        outcome, usage = Outcome.FAILED, None
        relay: Relay | None = None
        try:
            relay = await self._fly(call, decision, flight, client, record)
            outcome, usage = relay.outcome, relay.usage()
        except ConnectFailed as error:
            return error
        except asyncio.CancelledError:
            outcome = Outcome.CLIENT_LEFT
            raise
        finally:
            flight.finish(outcome, self.clock(), usage)
            self.telemetry.attempt_ended(decision.replica, outcome)
        if relay.status == 0:
            return relay.error
        self._note(record, relay, outcome, usage, call)
        if relay.response_id is not None:
            self.router.own(relay.response_id, decision.replica)
        return None

    async def _fly(
        self, call: Call, decision: Decision, flight: Flight, client: Client, record: RequestRecord
    ) -> Relay:
        """Send the call to the decided replica and relay its answer. Raises `ConnectFailed`."""
        upstream = self.upstream(decision.replica)
        head = request_head(call, upstream.host_header, record.request_id.encode())
        extra = [
            (b"x-request-id", record.request_id.encode()),
            (b"x-warmlane-replica", decision.replica.encode()),
            (b"x-warmlane-cached-tokens", b"%d" % decision.cached_tokens),
        ]
        connection = upstream.lease() or await upstream.connect()
        while True:
            relay = Relay(
                client,
                flight,
                extra,
                self.clock,
                self._loop.create_future(),
                anthropic=call.endpoint.anthropic,
                wants_id=call.endpoint.shape is Shape.RESPONSES,
            )
            client.attach(connection)
            connection.send(relay, head, call.body)
            if not record.overhead_seconds:
                record.overhead_seconds = self.clock() - call.received_at - record.waited_seconds
            try:
                complete = await relay.finished
            except asyncio.CancelledError:
                connection.abort(relay)
                raise
            if complete or not connection.reused or connection.answered:
                return relay
            # The replica had closed this kept connection before our bytes came: a fresh one, once.
            connection = await upstream.connect()

    def upstream(self, replica: ReplicaId) -> Upstream:
        found = self._upstreams.get(replica)
        if found is None:
            found = self._upstreams[replica] = Upstream(replica, self._upstream_config, self._loop)
        found.retired = False
        return found

    def retire(self, replica: ReplicaId) -> None:
        """The replica was removed: what runs may finish, nothing is kept."""
        if (upstream := self._upstreams.get(replica)) is not None:
            upstream.retired = True
            upstream.close()

    async def sweep(self) -> None:
        """Runs as long as the gateway: enforces upstream deadlines and forgets replicas that are gone."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            now = self._loop.time()
            for replica, upstream in list(self._upstreams.items()):
                upstream.sweep(now)
                if upstream.retired and not upstream.busy:
                    del self._upstreams[replica]

    def close(self) -> None:
        for upstream in self._upstreams.values():
            upstream.close()

    # -- records and refusals

    def _record(self, call: Call) -> RequestRecord:
        given = call.header(b"x-request-id")
        if given is not None and REQUEST_ID.fullmatch(given):
            request_id = given.decode()
        else:
            request_id = f"{self._id_prefix}-{next(self._id_count):x}"
        return RequestRecord(request_id=request_id, route=call.endpoint.path, request_bytes=len(call.body))

    def _note(self, record: RequestRecord, relay: Relay, outcome: Outcome, usage: Usage | None, call: Call) -> None:
        record.status = relay.status
        record.outcome = outcome.value
        record.stream = relay.streaming
        record.response_bytes = relay.response_bytes
        record.error = code_of(relay.error) if relay.error else ""
        if usage is not None:
            record.prompt_tokens = usage.prompt_tokens
            record.cached_tokens = usage.cached_tokens
            record.completion_tokens = usage.completion_tokens
        if relay.first_token_at is not None:
            record.ttft_seconds = relay.first_token_at - call.received_at

    def _refuse(self, client: Client, call: Call, error: Exception, record: RequestRecord) -> None:
        refusal: ErrorAnswer = answer(error, anthropic=call.endpoint.anthropic)
        record.status = refusal.status
        record.error = refusal.code
        record.outcome = blame_outcome(error).value
        headers = [*refusal.headers, (b"x-request-id", record.request_id.encode())]
        client.start(refusal.status, headers)
        client.write(refusal.body, True)


def blame_outcome(error: Exception) -> Outcome:
    if isinstance(error, UpstreamError):
        return Outcome.FAILED
    return Outcome.REFUSED if isinstance(error, NoReplica | Overloaded) else Outcome.REJECTED


def request_head(call: Call, host: bytes, request_id: bytes) -> bytes:
    """The request line and headers for the replica: the client's, less what ends at a proxy."""
    lines = [call.method, b" ", call.target, b" HTTP/1.1\r\nhost: ", host, b"\r\n"]
    dropped = NOT_FORWARDED
    named = [value for name, value in call.headers if name == b"connection"]
    if named and named != [b"keep-alive"]:
        dropped = dropped | {token.strip().lower() for value in named for token in value.split(b",")}
    for name, value in call.headers:
        if name not in dropped and name != b"x-request-id":
            lines += (name, b": ", value, b"\r\n")
    lines += (b"x-request-id: ", request_id, b"\r\n")
    lines.append(b"content-length: %d\r\n\r\n" % len(call.body) if call.method != b"GET" else b"\r\n")
    return b"".join(lines)
