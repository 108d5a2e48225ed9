"""One answer on its way from a replica to a client: bytes through unchanged, and what they tell on the way.

The relay is the sink of an upstream `Connection`. Whatever arrives is written to the client at once; on the side it
notices the first token (in a stream of events), the usage at the end, an error event inside a 200, and the id of a
stored response. It keeps the last few KB for that, however finely they were cut, never the whole answer. `finished`
resolves once: to `True` when the answer is complete, to `False` when another attempt may be made because nothing has
reached the client yet. Only a 500 is held back, a moment, for it may say that the engine shuts down and somebody else
should be asked.
"""

from __future__ import annotations

import http
import re
from collections.abc import Callable, Sequence
from typing import Protocol

from gateway.core.flight import Flight
from gateway.core.model import Outcome, Usage
from gateway.proxy.errors import DeadlineExceeded, EngineDraining, UpstreamError, error_event
from gateway.proxy.exchange import Completion
from gateway.proxy.response_ids import answered_id
from gateway.proxy.upstream import Connection, Header

HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)

NOTED_IN_ANSWER = HOP_BY_HOP | {b"content-type", b"x-request-id"}
"""Headers of an answer that are looked at. Its `x-request-id` is the one we sent, and we set it ourselves."""

# An event that carries generated text: a non-empty string in one of the fields that the APIs put it in.
FIRST_TOKEN = re.compile(
    rb'"(?:content|reasoning|reasoning_content|text|delta|thinking|arguments|partial_json|refusal)"\s*:\s*"[^"]'
)
USAGE = re.compile(rb'"usage"\s*:\s*\{')
PROMPT_TOKENS = re.compile(rb'"(?:prompt_tokens|input_tokens)"\s*:\s*(\d{1,12})')
CREATED_TOKENS = re.compile(rb'"cache_creation_input_tokens"\s*:\s*(\d{1,12})')
CACHED_TOKENS = re.compile(rb'"(?:cached_tokens|cache_read_input_tokens)"\s*:\s*(\d{1,12})')
COMPLETION_TOKENS = re.compile(rb'"(?:completion_tokens|output_tokens)"\s*:\s*(\d{1,12})')
ERROR_EVENT = re.compile(rb'(?:^|\n)data: ?\{"(?:error"|type": ?"error")')
ERROR_CODE = re.compile(rb'"code"\s*:\s*"?(\d{3})\b')
ERROR_OF_CLIENT = re.compile(
    rb'"type"\s*:\s*"(?:invalid_request_error|not_found_error|request_too_large|BadRequestError|NotFoundError)"'
)
"""Quotes within a message are escaped, so what a client wrote passes for neither."""

CANNOT_SCHEDULE = b"cannot schedule new futures after shutdown"
"""A vLLM that drains (`--shutdown-timeout`) answers new requests with a 500 that says this, and its probes with 200."""
CHOICE = re.compile(rb'"choices"\s*:\s*\[\s*\{')
DONE = b"data: [DONE]"
MAX_HELD_BYTES = 4 * 1024
"""A 500 above this is passed on unread; that of an engine that shuts down has some hundred bytes."""

TAIL_BYTES = 16 * 1024
"""How much of the end of an answer is searched for its usage; vLLM puts it last."""
JOIN_BELOW_BYTES = 2_048
"""Pieces are kept as one up to this size: usage and an error event are found also where the network, or a proxy before
the replica, cut them into single bytes. Larger ones are kept as they came, the last two of them."""


STATUS_LINES: dict[int, bytes] = {}


def status_line(status: int) -> bytes:
    line = STATUS_LINES.get(status)
    if line is None:
        phrase = http.HTTPStatus(status).phrase if status in set(http.HTTPStatus) else ""
        line = STATUS_LINES[status] = b"HTTP/1.1 %d %s\r\n" % (status, phrase.encode())
    return line


class Client(Protocol):
    """The client's side of one exchange. `write` may be called with no data; the last call has `last`."""

    def attach(self, connection: Connection | None) -> None:
        """From now on a full client socket pauses this connection (back-pressure)."""

    def start(self, status: int, headers: list[Header]) -> None: ...
    def write(self, data: bytes, last: bool) -> None: ...
    def abort(self) -> None: ...


class Sent(Protocol):
    """The request that was sent."""

    def let_go(self) -> None:
        """Of its body."""


class Relay:
    """Takes one replica's answer. Made anew for each attempt."""

    __slots__ = (
        "_anthropic",
        "_choices",
        "_client",
        "_clock",
        "_extra_headers",
        "_first_token",
        "_flight",
        "_head",
        "_held",
        "_last",
        "_movable",
        "_previous",
        "_sent",
        "_streaming",
        "_wants_id",
        "error",
        "finished",
        "first_token_at",
        "response_bytes",
        "status",
    )

    def __init__(
        self,
        client: Client,
        sent: Sent,
        flight: Flight,
        first_token: Callable[[Flight, float], None],
        extra_headers: list[Header],
        clock: Callable[[], float],
        finished: Completion[bool],
        *,
        anthropic: bool = False,
        wants_id: bool = False,
        choices: bool = False,
        movable: bool = False,
    ) -> None:
        """`choices`: its streams consist of OpenAI's choices. `movable`: another replica may be asked while the client
        has got nothing."""
        self._client = client
        self._sent = sent
        self._flight = flight
        self._first_token = first_token
        self._extra_headers = extra_headers
        self._clock = clock
        self._anthropic = anthropic
        self._wants_id = wants_id
        self._choices = choices
        self._movable = movable
        self._held: list[Header] | None = None
        self._streaming = False
        self._head = self._previous = self._last = b""
        self.finished = finished
        self.status = 0
        self.error: UpstreamError | None = None
        self.first_token_at: float | None = None
        self.response_bytes = 0

    # -- Sink

    def head(self, status: int, headers: Sequence[Header]) -> None:
        self.status = status
        passed: list[Header] = []
        named: frozenset[bytes] = frozenset()
        for header in headers:
            name = header[0]
            if name not in NOTED_IN_ANSWER:
                passed.append(header)
            elif name == b"content-type":
                self._streaming = header[1].startswith(b"text/event-stream")
                passed.append(header)
            elif name == b"connection":
                named |= connection_tokens(header[1])
        if named:
            passed = [header for header in passed if header[0] not in named or header[0] == b"content-length"]
        passed += self._extra_headers
        if status == 500 and self._movable:
            self._held = passed
        else:
            self._begin(passed)

    def _begin(self, headers: list[Header]) -> None:
        """The client hears of it, so the request is not sent again: thousands of long answers must not keep prompts."""
        self._sent.let_go()
        self._client.start(self.status, headers)

    def piece(self, data: bytes, last: bool) -> None:
        if self._held is not None:
            self._hold(data, last)
            return
        if last:  # before it is written: behind it the client's next exchange may attach its own
            self._client.attach(None)
        self._client.write(data, last)
        if data:
            self.response_bytes += len(data)
            if len(self._last) < JOIN_BELOW_BYTES:
                self._last += data
            else:
                self._previous, self._last = self._last, data
            if self.first_token_at is None:
                self._look_for_start(data)
            if len(self._last) > TAIL_BYTES:  # no more of a large piece is kept than will be looked at
                self._previous, self._last = b"", self._last[-TAIL_BYTES:]
        if last:
            self.finished.complete(True)

    def failed(self, error: UpstreamError) -> None:
        """The replica will send no more. Before the head another attempt may follow, then the client must know."""
        self.error = error
        self._client.attach(None)
        if self.status == 0 or self._held is not None:
            self.status = 0
            self.finished.complete(False)
            return
        if self._streaming and self._at_event_boundary():
            self._client.write(error_event(error, anthropic=self._anthropic), False)
        self._client.abort()
        self.finished.complete(True)

    # -- what the bytes told

    @property
    def sent_status(self) -> int:
        """As the client has it; 0 as long as it has nothing."""
        return 0 if self._held is not None else self.status

    @property
    def streaming(self) -> bool:
        return self._streaming

    @property
    def outcome(self) -> Outcome:
        if self.error is not None:
            return ERROR_OUTCOMES.get(type(self.error), Outcome.FAILED)
        if self.status in (429, 503):
            return Outcome.REFUSED
        if self.status >= 500:
            return Outcome.DRAINING if CANNOT_SCHEDULE in self._tail() else Outcome.FAILED
        if self.status >= 400:
            return Outcome.REJECTED
        if self._streaming:
            tail = self._tail()
            if (error := ERROR_EVENT.search(tail)) is not None:
                return blame_event(tail[error.end() :].partition(b"\n")[0])
            if self._choices and self.first_token_at is None and self._is_empty():
                return Outcome.EMPTY
        return Outcome.COMPLETED

    def response_id(self) -> str | None:
        """Of the stored response that it is, as far as its beginning tells."""
        return answered_id(self._head, streaming=self._streaming) if self._wants_id else None

    def usage(self) -> Usage | None:
        """Token counts from the end of the answer, or from its beginning (Anthropic's `message_start`, or what vLLM
        puts behind the usage: ids of tokens, messages)."""
        counts = from_usage(self._tail())
        if counts is None and not self._streaming:
            counts = from_usage(self._head)
        if counts is None:
            return None
        completion = number(COMPLETION_TOKENS, counts)
        prompt = number(PROMPT_TOKENS, counts)
        if prompt is None:
            if completion is None:
                return None
            counts = self._head
            prompt = number(PROMPT_TOKENS, counts)
        cached = number(CACHED_TOKENS, counts)
        if self._anthropic and prompt is not None:  # there the parts are given, not the whole
            prompt += (cached or 0) + (number(CREATED_TOKENS, counts) or 0)
        return Usage(prompt, cached, completion)

    def _hold(self, data: bytes, last: bool) -> None:
        """Of a 500: its end decides whether the client gets it."""
        self._head += data
        if not last and len(self._head) <= MAX_HELD_BYTES:
            return
        held, self._held = self._held, None
        if last and CANNOT_SCHEDULE in self._head:
            self.status = 0
            self.error = EngineDraining("The replica is shutting down.")
            self._client.attach(None)
            self.finished.complete(False)
            return
        assert held is not None
        self._begin(held)
        data, self._head = self._head, b""
        self.piece(data, last)

    def _is_empty(self) -> bool:
        """A stream of choices that ended properly without a single one: so an engine that shuts down answers some."""
        return len(self._head) < TAIL_BYTES and DONE in self._tail() and CHOICE.search(self._head) is None

    def _look_for_start(self, data: bytes) -> None:
        """Until the first token: keep the beginning, and tell the flight when the prefill is done."""
        if len(self._head) < TAIL_BYTES:
            self._head += data[: TAIL_BYTES - len(self._head)]
        if self._streaming and FIRST_TOKEN.search(self._last):
            self.first_token_at = self._clock()
            self._first_token(self._flight, self.first_token_at)

    def _tail(self) -> bytes:
        return (self._previous + self._last)[-TAIL_BYTES:]

    def _at_event_boundary(self) -> bool:
        """An event of our own can follow only where the last one has ended."""
        tail = (self._previous[-4:] + self._last)[-4:]
        return not tail or tail.endswith((b"\n\n", b"\r\r", b"\r\n\r\n"))


ERROR_OUTCOMES: dict[type[UpstreamError], Outcome] = {
    EngineDraining: Outcome.DRAINING,
    DeadlineExceeded: Outcome.OVERDUE,
}
"""Of an answer that ended with an error of ours; all others are the replica's failure."""


def connection_tokens(value: bytes) -> frozenset[bytes]:
    """Names of the headers that a `Connection` header declares hop-by-hop."""
    return frozenset(token.strip().lower() for token in value.split(b","))


def from_usage(data: bytes) -> bytes | None:
    """From the last usage on. In a text its quotes would be escaped, and as a value no object follows."""
    end = len(data)
    while (at := data.rfind(b'"usage"', 0, end)) >= 0:
        if USAGE.match(data, at):
            return data[at:]
        end = at
    return None


def blame_event(error: bytes) -> Outcome:
    """Whose fault an error event in a stream is: vLLM's carry the status that the answer would have had."""
    code = number(ERROR_CODE, error)
    if code is None:
        return Outcome.REJECTED if ERROR_OF_CLIENT.search(error) else Outcome.FAILED
    return Outcome.REJECTED if 400 <= code < 500 else Outcome.FAILED


def number(pattern: re.Pattern[bytes], data: bytes) -> int | None:
    """The first number that the pattern finds."""
    match = pattern.search(data)
    return int(match[1]) if match else None
