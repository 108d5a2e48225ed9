"""One request's place in a distributed trace: where it comes from, what its replica is told, when its phases ended.

The W3C headers `traceparent` and `tracestate` are read and made here; nothing in this module knows OpenTelemetry. What
a request notes on its way are a few numbers and its decisions; `gateway/spans.py` makes spans of them in the end.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from random import getrandbits

from gateway.core.flight import Flight
from gateway.core.model import Outcome, Reason
from gateway.rankings import Ranking, shortened

Header = tuple[bytes, bytes]

TRACEPARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
"""Version, trace, span, flags; later versions may have more behind them."""
MAX_STATE_BYTES = 512
"""Of `tracestate`, which the standard lets be dropped above it."""
SAMPLED = 1
"""The flag that matters."""


@dataclass(frozen=True, slots=True)
class Parent:
    """The span that the request was sent from, as its headers say."""

    trace_id: int
    span_id: int
    sampled: bool
    state: bytes = b""
    """Its `tracestate`: goes to the replica and nowhere else."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One flight, when it is over. Times are those of the gateway's clock."""

    span_id: int
    policy: str
    reason: Reason
    ranking: Ranking
    """The best candidates; not the whole decision, which holds the prompt's blocks."""
    candidates: int
    """How many there were."""
    decided_from: float
    sent_at: float
    first_token_at: float | None
    ended_at: float
    outcome: Outcome
    status: int
    """Of the replica's answer; 0 when there was none."""


class RequestTrace:
    """What is noted of one request. `sampled`: somebody will see it; else its headers alone go on."""

    __slots__ = ("attempts", "parent", "read_at", "sampled", "sent_at", "span_id", "trace_id", "upstream_id")

    def __init__(self, parent: Parent | None, trace_id: int, *, sampled: bool) -> None:
        self.parent = parent
        self.trace_id = trace_id
        self.span_id = new_span_id()
        self.sampled = sampled
        self.read_at = 0.0
        """Its body is understood, and it comes to the gate; 0 as long as it has not."""
        self.attempts: list[Attempt] = []
        self.upstream_id = 0
        self.sent_at = 0.0

    @property
    def name(self) -> str:
        """As logs and other tools write it."""
        return f"{self.trace_id:032x}"

    def send(self, now: float) -> bytes:
        """An attempt begins: the header lines for its replica, whose spans become children of this attempt's."""
        self.sent_at = now
        parent = self.parent
        self.upstream_id = new_span_id() if self.sampled or parent is None else parent.span_id
        line = b"traceparent: 00-%032x-%016x-%02x\r\n" % (self.trace_id, self.upstream_id, self.sampled * SAMPLED)
        return line + b"tracestate: %b\r\n" % parent.state if parent is not None and parent.state else line

    def landed(self, flight: Flight, outcome: Outcome, status: int, now: float) -> None:
        """The attempt ended."""
        if not self.sampled:
            return
        decision = flight.decision
        self.attempts.append(
            Attempt(
                self.upstream_id,
                decision.policy,
                decision.reason,
                shortened(decision.ranking),
                len(decision.ranking),
                flight.started_at,
                self.sent_at,
                flight.first_token_at,
                now,
                outcome,
                status,
            )
        )


def read_parent(headers: Iterable[Header]) -> Parent | None:
    """The parent that a request's headers (names in lower case) tell of; `None` where they tell of none that the
    standard allows."""
    found: list[bytes] = []
    states: list[bytes] = []
    for name, value in headers:
        if name == b"traceparent":
            found.append(value)
        elif name == b"tracestate":
            states.append(value)
    match = TRACEPARENT.fullmatch(found[0].strip()) if len(found) == 1 else None
    if match is None or match[1] == b"ff" or (match[1] == b"00" and match[5] is not None):
        return None
    trace_id, span_id = int(match[2], 16), int(match[3], 16)
    if not trace_id or not span_id:
        return None
    state = b",".join(one for one in states if one)
    return Parent(trace_id, span_id, bool(int(match[4], 16) & SAMPLED), state if len(state) <= MAX_STATE_BYTES else b"")


def without_trace_headers(headers: list[Header]) -> list[Header]:
    return [header for header in headers if header[0] != b"traceparent" and header[0] != b"tracestate"]


def new_trace_id() -> int:
    return getrandbits(128) or 1


def new_span_id() -> int:
    return getrandbits(64) or 1
