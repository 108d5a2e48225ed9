"""Traces: what requests noted on their way goes to a collector when they are over, as a tree of spans each.

The event loop does two things for a request: `begin` makes its ids, `ended` puts it into a queue. A thread takes it
from there, makes the spans and sends them (`gateway/spans.py`, the one module that knows OpenTelemetry, which is an
extra). The queue is bounded: where the collector is away or hangs, traces are lost and counted, and nobody waits, at
the end of the gateway neither.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.config import ConfigError
from gateway.config import Tracing as TracingConfig
from gateway.request_log import RequestRecord
from gateway.trace_context import (
    Header,
    Parent,
    RequestTrace,
    new_trace_id,
    read_parent,
    without_trace_headers,
)

log = logging.getLogger(__name__)

MAX_WAITING = 4_096
"""Requests whose spans nobody has taken yet: some 10 MB, and a minute of a busy gateway that samples a tenth."""
BATCH = 32
"""Requests in one message of some 70 KB. To encode it takes the interpreter 4 ms, in which the event loop waits: not
longer than it would wait for any other thread."""
BATCH_SECONDS = 0.2
"""A batch that is not full goes after this, as the request log does."""
CLOSE_SECONDS = 1.0
"""For the last spans at the end; a collector that does not take them by then does not get them."""


@dataclass(frozen=True, slots=True)
class EndedRequest:
    trace: RequestTrace
    record: RequestRecord
    method: str
    """Empty when it ended before it was a whole request."""
    model: str
    """As metrics call it: made-up names are `other`. Empty when it named none."""
    received_at: float
    ended_at: float
    """By the gateway's clock, as all times in `trace`."""
    wall_offset: float
    """Unix time less that clock."""


class Collector(Protocol):
    """Who takes spans, and which."""

    def samples(self, trace_id: int, parent: Parent | None) -> bool: ...

    def send(self, ended: Sequence[EndedRequest]) -> bool:
        """Whether they were taken. May block for long; called by one thread."""

    def close(self) -> None: ...


class Tracing:
    """`begin` and `ended` belong to the event loop."""

    def __init__(
        self,
        collector: Collector,
        *,
        model_label: Callable[[str], str],
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self.sent = self.lost = 0
        """Requests whose spans the collector took, or never will."""
        self._collector = collector
        self._model_label = model_label
        self._clock, self._wall_clock = clock, wall_clock
        self._waiting: deque[EndedRequest] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._failing = False
        self._thread: threading.Thread | None = None

    def begin(self, headers: list[Header]) -> tuple[RequestTrace, list[Header]]:
        """The trace of a request, and its headers without those that the replica gets anew."""
        parent = read_parent(headers)
        trace_id = new_trace_id() if parent is None else parent.trace_id
        trace = RequestTrace(parent, trace_id, sampled=self._collector.samples(trace_id, parent))
        return trace, without_trace_headers(headers)

    def unread(self, headers: list[Header], record: RequestRecord) -> None:
        """A request that ended before it was a whole one: one span, without a length."""
        trace, _ = self.begin(headers)
        self.ended(trace, record, b"", self._clock())

    def ended(self, trace: RequestTrace, record: RequestRecord, method: bytes, received_at: float) -> None:
        """Called exactly once for each request, after its record was written. Never waits."""
        if not trace.sampled:
            return
        now = self._clock()
        model = self._model_label(record.model) if record.model else ""
        one = EndedRequest(trace, record, method.decode("latin-1"), model, received_at, now, self._wall_clock() - now)
        with self._changed:
            if len(self._waiting) >= MAX_WAITING:
                self.lost += 1
                return
            self._waiting.append(one)
            if len(self._waiting) in (1, BATCH):
                self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Wait a moment for the thread to send what there is."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while batch := self._next_batch():
            if self._is_taken(batch):
                self.sent += len(batch)
                self._tell(failing=False)
            else:
                self.lost += len(batch)
                self._tell(failing=True)
        self._collector.close()

    def _is_taken(self, batch: list[EndedRequest]) -> bool:
        try:
            return self._collector.send(batch)
        except Exception:  # what the exporter foresaw it has caught; the thread must go on
            if not self._failing:
                log.warning("traces: spans could not be sent", exc_info=True)
            return False

    def _next_batch(self) -> list[EndedRequest]:
        """Empty at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            self._changed.wait_for(lambda: len(self._waiting) >= BATCH or self._closing, BATCH_SECONDS)
            return [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]

    def _tell(self, *, failing: bool) -> None:
        """Once for each time that it begins or ends."""
        if failing and not self._failing:
            log.warning("traces: the collector does not take them; until it does they are lost, and counted")
        elif self._failing and not failing:
            log.info("traces: the collector takes them again; %d were lost so far", self.lost)
        self._failing = failing


def open_tracing(
    config: TracingConfig,
    model_label: Callable[[str], str],
    clock: Callable[[], float],
    wall_clock: Callable[[], float],
) -> Tracing | None:
    """`None` when traces are off. Raises `ConfigError`."""
    if not config.is_on:
        return None
    try:
        from gateway.spans import Otlp
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("opentelemetry"):
            raise
        raise ConfigError(
            "tracing: needs OpenTelemetry, which is an extra of this package: pip install 'warmlane[otel]'"
        ) from error
    collector = Otlp.configured(config)
    if collector is None:  # OTEL_SDK_DISABLED
        return None
    return Tracing(collector, model_label=model_label, clock=clock, wall_clock=wall_clock)
