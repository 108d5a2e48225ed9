"""The one request handler. Read `serve` and `attempts` and you have followed a request through Warmlane.

    read the body -> wait at the gate -> decide -> start -> send upstream -> relay -> finish, record

Facts about replicas come in from the side (`feeds`), never through here. A second attempt happens only while nothing
has reached the client: on another replica when the first could not be connected, or, for stateless requests, when its
engine said that it shuts down, or its connection was lost before it answered; on the same replica when that was a
*reused* one, which as a rule was dead already and says nothing about the replica. After a loss the replica may have
begun, and may have died of it: whichever way, a request gets past one loss only, within a budget, and is never begun
more than twice. A client that leaves cancels its exchange, in whatever phase it is, and so does the deadline of a
request that has one.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import secrets
import ssl
from collections.abc import Callable
from dataclasses import replace

from gateway import prompt
from gateway.access import Access, without_credentials
from gateway.config import Server as ServerConfig
from gateway.config import Upstream as UpstreamConfig
from gateway.core.flight import Flight
from gateway.core.model import Decision, Outcome, Reason, ReplicaId, RouteRequest, RoutingError
from gateway.core.router import Router
from gateway.keys import Denied
from gateway.limits import Caller, OverLimit, Stay
from gateway.prompt import Shape
from gateway.proxy import keyed
from gateway.proxy.answer_notes import note_answer, note_end
from gateway.proxy.body_budget import BodyBudget
from gateway.proxy.call import Call
from gateway.proxy.endpoints import Endpoint
from gateway.proxy.errors import (
    KNOWN,
    BadBody,
    BodiesFull,
    BodyTooLarge,
    ConnectFailed,
    ConnectionLost,
    DeadlineExceeded,
    ErrorAnswer,
    OutOfSockets,
    Overloaded,
    UpstreamError,
    answer,
    outcome_of,
)
from gateway.proxy.exchange import Completion
from gateway.proxy.forwarding import Forwarding, asking_plain, read_headers, request_head
from gateway.proxy.gate import Gate
from gateway.proxy.places import Places
from gateway.proxy.relay import Client, Relay
from gateway.proxy.replays import Replays, cause_of, is_stale
from gateway.proxy.response_ids import is_servable
from gateway.proxy.upstream import JOIN_BELOW_BYTES, Header
from gateway.proxy.upstreams import Upstreams
from gateway.telemetry import RequestRecord, Telemetry
from gateway.tracing import Tracing

COUNTED = frozenset((Shape.CHAT, Shape.COMPLETION))
"""Bodies that vLLM's `/tokenize` takes as they are; their streams are of choices."""
REQUEST_ID = re.compile(rb"[A-Za-z0-9_.:/+=@-]{1,128}")
SMALL_BYTES = JOIN_BELOW_BYTES
"""A body that is read even where its key is over its limit."""


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
        tls: ssl.SSLContext | None = None,
        access: Access | None = None,
        replica_key: str | None = None,
    ) -> None:
        self.server = server
        self.clock = clock
        self.router = router
        self.telemetry = telemetry
        self.gate = Gate(router, clock, loop, telemetry.decided_in)
        self.places = Places(server.max_connections)
        self.replays = Replays(lambda: router.in_flight)
        self._max_body = server.max_body_mib * 2**20
        self.bodies = BodyBudget(server.max_bodies_mib * 2**20)
        self.draining = False
        """The gateway is about to leave: clients are asked to open no further request on their connections."""
        self.stopping = False
        """The gateway stops: from now on it is we who cut off what runs."""
        self.access = access
        self._isolation = access.isolation if access is not None else None
        self._key_line = b"" if replica_key is None else b"authorization: Bearer %b\r\n" % replica_key.encode()
        self._credentials_end_here = access is not None or replica_key is not None
        self._loop = loop
        self._upstream_config = upstream
        self.upstreams = Upstreams(upstream, loop, tls)
        self._block_bytes = block_bytes
        self.on_prompt: Callable[[ReplicaId, RouteRequest, bytes], None] | None = None
        """Hears of each prompt whose body is plain text as soon as it is known where it goes."""
        self.background: keyed.Background | None = None
        """Who sees to the limits of what goes on behind its answer."""
        self.on_flight: Callable[[RequestRecord, Decision], None] | None = None
        self.tracing: Tracing | None = None
        self._id_prefix = secrets.token_hex(6)
        self._id_count = itertools.count(1)

    async def serve(self, call: Call, client: Client) -> None:
        """Answer one call. Raises nothing but `CancelledError`, when the client left."""
        if self._credentials_end_here:
            call.headers = without_credentials(call.headers)
        if call.endpoint.shape is Shape.RESPONSES:
            call.headers = asking_plain(call.headers)
        if self.tracing is not None:
            call.trace, call.headers = self.tracing.begin(call.headers)
        forwarding = read_headers(call.headers)
        record = self._record(call, forwarding)
        ticket = timer = None
        if forwarding.timeout is not None or self._upstream_config.deadline_seconds is not None:
            timer = self._set_deadline(call, forwarding.timeout)
        try:
            request = self.read(call, forwarding)
            record.model = request.model or ""
            self.telemetry.request_read(record, request)
            if call.caller is not None:
                call.stay = call.stay or call.caller.enter(self.clock(), works=call.endpoint.works)
                keyed.reserve(call.stay, request, self.clock())
                keyed.claim(self.background, call)
            self.replays.earn()
            came = self.clock()
            if call.trace is not None:
                call.trace.read_at = came
            ticket = await self.gate.enter(request)
            record.waited_seconds = self.clock() - came
            lines = self._key_line + forwarding.lines if self._key_line else forwarding.lines
            await self._attempts(call, request, ticket.take_flight(), lines, client, record)
        except asyncio.CancelledError:
            if not call.overdue:
                record.outcome = self._cancelled(call).value
                raise
            self._refuse(client, call, DeadlineExceeded("The request was not finished in its time."), record)
        except KNOWN as error:
            self._refuse(client, call, call.honest(error), record)
        except Exception:  # a bug: reported where exchanges end, but this client must not wait for ever
            record.outcome = Outcome.FAILED.value
            client.abort()
            raise
        finally:
            if timer is not None:
                timer.cancel()
            call.exchange = call.lost = None
            if ticket is not None:
                self.gate.leave(ticket)
            call.let_go()
            if call.stay is not None or call.response_id is not None:
                keyed.end(self.background, call, record, self.clock())
            record.duration_seconds = self.clock() - call.received_at
            self.telemetry.request_ended(record)
            if self.tracing is not None and call.trace is not None:
                self.tracing.ended(call.trace, record, call.method, call.received_at)

    def caller(self, headers: list[Header], endpoint: Endpoint) -> Caller | ErrorAnswer:
        """Whose request it is, where keys are asked for; or what to tell whoever has none."""
        assert self.access is not None
        try:
            return self.access.caller(headers)
        except Denied as error:
            self.telemetry.key_refused("", error.reason)
            return answer(error, anthropic=endpoint.anthropic)

    def arrive(
        self, endpoint: Endpoint, length: int | None, caller: Caller | None, *, waits: bool
    ) -> Stay | ErrorAnswer | None:
        """A request's head has come, its body not yet: its place within the limits of its key, or why its body need not
        come. `length`: as announced, `None` when it is not; `caller`: `None` when limits are not to be asked now;
        `waits`: the client sends the body only when it is told to. Where there is no place, but the body is so small
        that reading it costs less than another connection, the answer is `None`, and it is asked again then."""
        if length is not None and length > self._max_body:
            return answer(BodyTooLarge(self._max_body), anthropic=endpoint.anthropic)
        if not self.bodies.has_room(length or 0):
            return answer(BodiesFull(), anthropic=endpoint.anthropic)
        if caller is None:
            return None
        try:
            return caller.enter(self.clock(), works=endpoint.works)
        except OverLimit as error:
            if length is not None and length < SMALL_BYTES and not waits:
                return None
            self.telemetry.key_refused(caller.key.tenant, error.reason)
            return answer(error, anthropic=endpoint.anthropic)

    def read(self, call: Call, forwarding: Forwarding) -> RouteRequest:
        """Body and headers -> what the core needs to know. Raises `BadBody`, and what the key does not allow."""
        if call.caller is None:
            return self._read(call, forwarding)
        key, shape = call.caller.key, call.endpoint.shape
        keyed.check_readable(shape, encoded=forwarding.encoded)
        if self._isolation is not None:
            call.body = keyed.salted(self._isolation, call.body, shape, key.tenant, encoded=forwarding.encoded)
        request = self._read(call, forwarding)
        keyed.check_model(key, request, shape, call.headers, call.body)
        return replace(request, tenant=key.tenant, priority=key.priority)

    def _read(self, call: Call, forwarding: Forwarding) -> RouteRequest:
        shape = call.endpoint.shape
        if forwarding.encoded:
            return RouteRequest(length=len(call.body))  # passed as it is, without affinity
        try:
            pinned = self._pinned(call)
            return prompt.parse(
                call.body, shape, block_bytes=self._block_bytes, session=forwarding.session, pinned=pinned
            )
        except prompt.NotJson as error:
            raise BadBody(str(error)) from error

    def _pinned(self, call: Call) -> ReplicaId | None:
        """Who keeps the stored response that the call is about. Raises what the key does not allow."""
        owned, wanted = call.response_id, None
        if owned is None and call.endpoint.shape is Shape.RESPONSES:
            stored = prompt.stored(call.body)
            owned, wanted = stored.continues, stored.wanted
            call.background = stored.background
        if call.caller is not None:
            keyed.check_ids(self.router, call.caller.key, owned, wanted)
        if wanted is not None and is_servable(wanted):
            call.made = wanted
        return self.router.owner(owned) if owned is not None else None

    async def _attempts(
        self,
        call: Call,
        request: RouteRequest,
        bound: Flight | None,
        lines: bytes,
        client: Client,
        record: RequestRecord,
    ) -> None:
        """Until one attempt has reached the client. `bound`: the gate has decided and started the first already."""
        excluded: set[ReplicaId] = set()
        last_error: UpstreamError | None = None
        while True:
            try:
                flight = bound or self._start(request, excluded)
            except RoutingError as error:
                if not is_stale(last_error):
                    raise last_error or error from None
                flight = self._start(request, set())  # nobody else: the same one, on a new connection
            if last_error is not None:
                self.telemetry.replayed(cause_of(last_error))
            if self.on_prompt is not None and call.endpoint.shape in COUNTED:
                self.on_prompt(flight.replica, request, call.body)
            last_error = await self._attempt(call, flight, lines, client, record)
            if last_error is None:
                return
            if last_error.executed and not self._may_replay(call, last_error):
                raise last_error
            excluded.add(flight.replica)
            bound = None

    def _may_replay(self, call: Call, error: UpstreamError) -> bool:
        """Whether what may have been begun may be begun once more: once, and if so the budget is charged."""
        if call.lost is not None or not (error.replayable and self._is_movable(call)):
            return False
        call.lost = error
        if self.replays.take():
            return True
        self.telemetry.replay_refused()
        return False

    def _is_movable(self, call: Call) -> bool:
        return call.endpoint.stateless and self._upstream_config.replay

    def _start(self, request: RouteRequest, excluded: set[ReplicaId]) -> Flight:
        """Decide, and book. Raises `RoutingError`."""
        now = self.clock()
        flight = self.router.start(self.router.decide(request, now, exclude=excluded), now)
        self.telemetry.decided_in(self.clock() - now)
        return flight

    def _count_lost_hits(self, record: RequestRecord, decision: Decision) -> None:
        if record.attempts:
            self.telemetry.hits_lost("moved", record.cached_tokens_predicted - decision.cached_tokens)
        if decision.reason is Reason.SPILLED:
            longest = max(view.cached_tokens for view, _ in decision.ranking)
            self.telemetry.hits_lost("spilled", int(longest) - decision.cached_tokens)

    async def _attempt(
        self, call: Call, flight: Flight, lines: bytes, client: Client, record: RequestRecord
    ) -> UpstreamError | None:
        """One flight. Returns the error when nothing has reached the client, else `None`."""
        decision = flight.decision
        if record.attempts or decision.reason is Reason.SPILLED:
            self._count_lost_hits(record, decision)
        record.started(decision)
        if self.on_flight is not None:
            self.on_flight(record, decision)
        outcome, usage, status = Outcome.FAILED, None, 0
        relay: Relay | None = None
        try:
            relay = await self._fly(call, flight, lines, client, record)
            outcome, usage, status = relay.outcome, relay.usage(), relay.status
            if is_stale(relay.error):
                outcome = Outcome.REJECTED  # as a rule it never came: no word about the replica
            flight.answered = relay.error is None
        except OutOfSockets:
            outcome = Outcome.REJECTED  # it never left: no word about the replica
            raise
        except ConnectFailed as error:
            outcome = Outcome.UNREACHABLE
            return error
        except asyncio.CancelledError:
            outcome, status = self._cancelled(call), record.status
            raise
        finally:
            now = self.clock()
            flight.finish(outcome, now, usage)
            if call.trace is not None:
                call.trace.landed(flight, outcome, status, now)
            self.telemetry.attempt_ended(decision.replica, outcome)
        if relay.status == 0:
            return relay.error
        note_answer(record, relay, call)
        note_end(record, relay, outcome, usage)
        self._own(call, flight, relay)
        return None

    def _own(self, call: Call, flight: Flight, relay: Relay) -> None:
        """The stored response that the answer is, whoever heard it to its end, is its tenant's."""
        if call.made is not None and 200 <= relay.status < 300:
            self.router.own(call.made, flight.replica, flight.decision.request.tenant)

    async def _fly(self, call: Call, flight: Flight, lines: bytes, client: Client, record: RequestRecord) -> Relay:
        """Send the call to the flight's replica and relay its answer. Raises `ConnectFailed`."""
        upstream = self.upstreams.of(flight.replica)
        request_id = record.request_id.encode()
        if call.trace is not None:
            lines += call.trace.send(self.clock())
        head = request_head(call, upstream.host_header, lines, request_id)
        extra = [
            (b"x-request-id", request_id),
            (b"x-warmlane-replica", upstream.name),
            (b"x-warmlane-cached-tokens", b"%d" % flight.decision.cached_tokens),
        ]
        # A kept connection may be dead. What makes state must not be sent twice, and what was lost before has no third
        # chance: those get a new one.
        movable = self._is_movable(call)
        kept = upstream.lease() if movable and call.lost is None else None
        connection = kept or await self.upstreams.connect(upstream)
        relay = Relay(
            client,
            call,
            flight,
            self.gate.first_token,
            extra,
            self.clock,
            Completion(),
            anthropic=call.endpoint.anthropic,
            wants_id=call.endpoint.shape is Shape.RESPONSES,
            choices=call.endpoint.shape in COUNTED,
            movable=movable,
        )
        connection.send(relay, head, call.body)
        client.attach(connection)
        if not record.overhead_seconds:
            record.overhead_seconds = self.clock() - call.received_at - record.waited_seconds
        try:
            await relay.finished
        except asyncio.CancelledError:
            note_answer(record, relay, call)
            self._own(call, flight, relay)
            connection.abort(relay)
            if not call.overdue:
                raise
            relay.failed(DeadlineExceeded("The request was not finished in its time."))
            return relay
        if isinstance(relay.error, ConnectionLost):
            relay.error.stale = connection.may_be_stale and relay.error.replayable
            upstream.close()  # those that idle are no better than this one was
        return relay

    # -- deadlines

    def _set_deadline(self, call: Call, timeout: float | None) -> asyncio.TimerHandle:
        """The earlier of the client's and the configured one ends the request, in whatever phase it is."""
        given = [seconds for seconds in (timeout, self._upstream_config.deadline_seconds) if seconds is not None]
        return self._loop.call_later(max(0.0, min(given) - (self.clock() - call.received_at)), call.end_overdue)

    def _cancelled(self, call: Call) -> Outcome:
        """Why the exchange was cancelled."""
        if call.overdue:
            return Outcome.OVERDUE
        return Outcome.STOPPED if self.stopping else Outcome.CLIENT_LEFT

    # -- records and refusals

    def note_unread(
        self,
        endpoint: Endpoint,
        headers: list[Header],
        body_bytes: int,
        refusal: ErrorAnswer | None = None,
        caller: Caller | None = None,
    ) -> None:
        """The one record of a request whose head was read and that never became a call: refused while its body came, or
        left by its client (no `refusal`)."""
        record = RequestRecord(
            request_id=self._request_id(next((value for name, value in headers if name == b"x-request-id"), None)),
            route=endpoint.path,
            outcome=Outcome.CLIENT_LEFT.value,
            request_bytes=body_bytes,
        )
        if refusal is not None:
            record.status, record.error, record.outcome = refusal.status, refusal.code, refusal.outcome.value
        if caller is not None:
            record.key, record.tenant = caller.key.name, caller.key.tenant
        self.telemetry.request_ended(record)
        if self.tracing is not None:
            self.tracing.unread(headers, record)

    def _record(self, call: Call, forwarding: Forwarding) -> RequestRecord:
        request_id = self._request_id(forwarding.request_id)
        record = RequestRecord(request_id=request_id, route=call.endpoint.path, request_bytes=len(call.body))
        if call.caller is not None:
            record.key, record.tenant = call.caller.key.name, call.caller.key.tenant
        if call.trace is not None and call.trace.sampled:
            record.trace_id = call.trace.name
        return record

    def _request_id(self, given: bytes | None) -> str:
        """The client's, if it is harmless in a header and a log line."""
        if given is not None and REQUEST_ID.fullmatch(given):
            return given.decode()
        return f"{self._id_prefix}-{next(self._id_count):x}"

    def _refuse(self, client: Client, call: Call, error: Exception, record: RequestRecord) -> None:
        refusal: ErrorAnswer = answer(error, anthropic=call.endpoint.anthropic)
        record.status = refusal.status
        record.error = refusal.code
        record.outcome = outcome_of(error).value
        if isinstance(error, Overloaded):
            record.shed = error.reason
        if isinstance(error, Denied):
            self.telemetry.key_refused(record.tenant, error.reason)
        headers = [*refusal.headers, (b"x-request-id", record.request_id.encode())]
        client.start(refusal.status, headers)
        client.write(refusal.body, True)
