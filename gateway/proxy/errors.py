"""One table from exceptions to what a client is told: status, OpenAI error type and code.

Errors are sorted by blame. The client's own (`BadBody`, `BodyTooLarge`, `UnknownModel`, what its key does not allow)
are 4xx; a replica's (`UpstreamError` and its children) are 502 or 504; the fleet's (`NoReplica`, `OwnerGone`, a replica
that cannot be connected to or leaves when there is no other) and our own (`OutOfSockets`, `Stopping`) are 503 with
`Retry-After`.
The object carries OpenAI's four fields and, for `/v1/messages`, is wrapped as Anthropic clients expect it; that form
is a superset, so every client can read every error.
"""

from __future__ import annotations

import http
import math
from dataclasses import dataclass, replace

import msgspec

from gateway.core.model import NoReplica, Outcome, OwnerGone, RoutingError, UnknownModel
from gateway.isolation import CannotSalt, TooManyNames
from gateway.keys import NoKey, WrongKey
from gateway.limits import ModelNotAllowed, OverLimit


class BadBody(Exception):
    """The body is not JSON. The message says where, never what it held."""


class BodyTooLarge(Exception):
    def __init__(self, limit_bytes: int) -> None:
        size = f"{limit_bytes // 2**20} MiB" if limit_bytes >= 2**20 else f"{limit_bytes // 2**10} KiB"
        super().__init__(f"The request body is larger than this gateway accepts ({size}).")


class BodiesFull(Exception):
    """`[server] max_bodies_mib` are in memory."""

    def __init__(self) -> None:
        super().__init__("The gateway holds as much of request bodies as it may. Please retry later.")


class BadHead(Exception):
    """What came is not an HTTP request, or one whose framing two servers could read differently."""


class BadVersion(Exception):
    """Another version of HTTP."""

    def __init__(self) -> None:
        super().__init__("Only HTTP/1.1 and HTTP/1.0 are spoken here.")


class HeadTooLarge(Exception):
    def __init__(self) -> None:
        super().__init__("The request's headers are too large.")


class TooManyConnections(Exception):
    """`[server] max_connections` are open."""

    def __init__(self) -> None:
        super().__init__("The gateway has as many connections as it may. Please retry later.")


class OutOfSockets(Exception):
    """This machine has no descriptor or port left for a connection to a replica, which is not the replica's fault."""

    def __init__(self) -> None:
        super().__init__("The gateway cannot open more connections to replicas. Please retry later.")


class NotFound(Exception):
    """No such path: only the paths of `endpoints.py` are served."""


class EncodedBody(Exception):
    """The body is compressed, and what it names must be known."""


class IdTaken(Exception):
    """Another request that is under way makes a response with the same id."""


class NotOpen(Exception):
    """A view for operators, asked for from where it is not open."""


class AdminKeyRequired(Exception):
    """A view or a change for which the admin key was not shown."""

    def __init__(self) -> None:
        super().__init__("The admin key is required here: Authorization: Bearer KEY.")


class Overloaded(Exception):
    """The waiting room is full, or the wait too long. `retry_after` in seconds, `reason` a value of `ShedReason`."""

    def __init__(self, retry_after: float, reason: str) -> None:
        super().__init__("The gateway is at capacity. Please retry later.")
        self.retry_after = retry_after
        self.reason = reason


class Stopping(Exception):
    """The gateway stops, and the request still waited for its turn: nothing was begun."""

    def __init__(self) -> None:
        super().__init__("The gateway is stopping. Please retry elsewhere, or later.")


class UpstreamError(Exception):
    """A replica failed us. Raised by `upstream.py` only, which translates what the sockets say."""

    replayable = False
    """Proven that the replica sent nothing and the connection is lost, so that another may be asked."""
    executed = True
    """The replica may have begun with the request."""


class ConnectFailed(UpstreamError):
    """Nothing was sent: safe to try another replica whatever the request is."""

    replayable = True
    executed = False


class EngineDraining(UpstreamError):
    """The replica said that its engine shuts down, and did nothing; the client has not heard of it."""

    replayable = True
    executed = False


class TlsFailed(ConnectFailed):
    """The replica's certificate was not accepted, or it does not speak TLS. Nothing was sent."""


class ConnectionLost(UpstreamError):
    """The connection ended before the answer was complete."""

    def __init__(self, message: str, *, answered: bool) -> None:
        super().__init__(message)
        self.replayable = not answered
        self.stale = False
        """As a rule the replica had closed the connection before our bytes came, but nothing proves it."""


class BadAnswer(UpstreamError):
    """What came back is not HTTP."""


class FirstByteTimeout(UpstreamError):
    """Nothing came back in time. The replica may still be at work, so the request is not sent again."""


class IdleTimeout(UpstreamError):
    """The answer stalled."""


class DeadlineExceeded(UpstreamError):
    """The time that the request had as a whole is over: no replica's fault, but it ends like one."""


@dataclass(frozen=True, slots=True)
class Blame:
    status: int
    type: str
    code: str


BLAME: dict[type[Exception], Blame] = {
    BadBody: Blame(400, "invalid_request_error", "invalid_json"),
    BodyTooLarge: Blame(413, "invalid_request_error", "request_too_large"),
    BodiesFull: Blame(503, "service_unavailable_error", "too_many_bodies"),
    AdminKeyRequired: Blame(401, "invalid_request_error", "invalid_api_key"),
    BadHead: Blame(400, "invalid_request_error", "bad_request"),
    BadVersion: Blame(505, "invalid_request_error", "http_version"),
    HeadTooLarge: Blame(431, "invalid_request_error", "headers_too_large"),
    TooManyConnections: Blame(503, "service_unavailable_error", "too_many_connections"),
    OutOfSockets: Blame(503, "service_unavailable_error", "out_of_sockets"),
    CannotSalt: Blame(415, "invalid_request_error", "encoded_body"),
    EncodedBody: Blame(415, "invalid_request_error", "encoded_body"),
    IdTaken: Blame(409, "invalid_request_error", "response_id_taken"),
    TooManyNames: Blame(400, "invalid_request_error", "too_many_names"),
    NoKey: Blame(401, "invalid_request_error", "invalid_api_key"),
    WrongKey: Blame(401, "invalid_request_error", "invalid_api_key"),
    ModelNotAllowed: Blame(403, "permission_error", "model_not_allowed"),
    OverLimit: Blame(429, "rate_limit_error", "rate_limit_exceeded"),
    NotOpen: Blame(403, "permission_error", "not_open"),
    NotFound: Blame(404, "invalid_request_error", "not_found"),
    UnknownModel: Blame(404, "invalid_request_error", "model_not_found"),
    Overloaded: Blame(429, "rate_limit_error", "gateway_overloaded"),
    Stopping: Blame(503, "service_unavailable_error", "gateway_stopping"),
    NoReplica: Blame(503, "service_unavailable_error", "no_replica"),
    OwnerGone: Blame(503, "service_unavailable_error", "response_owner_unavailable"),
    ConnectFailed: Blame(503, "service_unavailable_error", "replica_unreachable"),
    EngineDraining: Blame(503, "service_unavailable_error", "replica_draining"),
    TlsFailed: Blame(502, "upstream_error", "replica_tls_failed"),
    ConnectionLost: Blame(502, "upstream_error", "replica_connection_lost"),
    BadAnswer: Blame(502, "upstream_error", "replica_bad_answer"),
    FirstByteTimeout: Blame(504, "upstream_error", "replica_timeout"),
    IdleTimeout: Blame(504, "upstream_error", "replica_stalled"),
    DeadlineExceeded: Blame(504, "timeout_error", "deadline_exceeded"),
}

SAID_BY_REPLICA: dict[Outcome, str] = {
    Outcome.FAILED: "replica_error",
    Outcome.REFUSED: "replica_refused",
    Outcome.REJECTED: "replica_rejected",
    Outcome.DRAINING: "replica_draining",
    Outcome.EMPTY: "replica_empty",
}
"""Short codes of whole answers that went wrong: a replica's status, or an event in its stream, was passed on."""

# Errors that a handler may translate; anything else is a bug and stays one.
KNOWN: tuple[type[Exception], ...] = (*BLAME, RoutingError, UpstreamError)

NO_ROOM = (NoReplica, Overloaded, OverLimit, OutOfSockets, BodiesFull)
"""Not the request's fault: it may come again."""

# What Anthropic's SDK expects in `error.type`, by status.
ANTHROPIC_TYPE = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """A complete answer: status, headers (lower-case names) and body."""

    status: int
    code: str
    headers: list[tuple[bytes, bytes]]
    body: bytes
    outcome: Outcome = Outcome.REJECTED
    """Of the request that gets it."""

    def closing(self) -> bytes:
        """As bytes for a connection that ends with it."""
        lines = [b"HTTP/1.1 %d %s\r\n" % (self.status, http.HTTPStatus(self.status).phrase.encode())]
        for name, value in self.headers:
            lines += (name, b": ", value, b"\r\n")
        return b"".join((*lines, b"connection: close\r\n\r\n", self.body))


def answer(error: Exception, *, anthropic: bool = False) -> ErrorAnswer:
    """The answer for an error of `KNOWN`."""
    blame = BLAME[type(error)]
    found = refusal(blame, str(error), anthropic=anthropic)
    retry_after = getattr(error, "retry_after", 1.0 if blame.status == 503 else None)
    if blame.status == 401:
        found.headers.append((b"www-authenticate", b"Bearer"))
    if retry_after is not None:
        found.headers.append((b"retry-after", b"%d" % max(1, math.ceil(retry_after))))
    return replace(found, outcome=outcome_of(error))


def refusal(blame: Blame, message: str, *, anthropic: bool = False) -> ErrorAnswer:
    """An answer for what is refused without an exception of its own."""
    body = error_body(blame, message, anthropic=anthropic)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    return ErrorAnswer(blame.status, blame.code, headers, body)


def code_of(error: Exception) -> str:
    """The short code of an error of `KNOWN`."""
    return BLAME[type(error)].code


def outcome_of(error: Exception) -> Outcome:
    """How a request ended that was answered with an error of `KNOWN`."""
    if isinstance(error, DeadlineExceeded):
        return Outcome.OVERDUE
    if isinstance(error, UpstreamError):
        return Outcome.FAILED
    if isinstance(error, Stopping):
        return Outcome.STOPPED
    return Outcome.REFUSED if isinstance(error, NO_ROOM) else Outcome.REJECTED


def error_body(blame: Blame, message: str, *, anthropic: bool = False) -> bytes:
    param = "model" if blame.code in ("model_not_found", "model_not_allowed") else None
    kind = ANTHROPIC_TYPE.get(blame.status, "api_error") if anthropic else blame.type
    error = {"message": message, "type": kind, "param": param, "code": blame.code}
    return msgspec.json.encode({"type": "error", "error": error} if anthropic else {"error": error})


def error_event(error: UpstreamError, *, anthropic: bool = False) -> bytes:
    """One server-sent event that makes OpenAI's and Anthropic's SDKs raise, for a stream that cannot go on."""
    body = error_body(BLAME[type(error)], str(error), anthropic=anthropic)
    return b"event: error\ndata: " + body + b"\n\n" if anthropic else b"data: " + body + b"\n\n"
