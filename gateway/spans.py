"""Ended requests as OpenTelemetry spans, and their way to a collector over OTLP/HTTP. Imported where traces are on.

    POST /v1/chat/completions      server: route, status, outcome, tokens as the replica reported them
      read                         body -> routing key
      admission                    the wait at the gate
      decide                       policy, reason, candidates with their costs
      POST /v1/chat/completions    client, one for each attempt: replica, status; the first token as an event

Attributes are numbers, names of our own configuration and short codes of closed sets. Nothing that a client wrote is
among them: no text, no header, no key, no query; a model's name only if a replica lists it. Names are those of
OpenTelemetry's conventions for HTTP and for generative AI where they have one, else they begin with `warmlane.`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from typing import Any
from urllib.parse import urlsplit

from opentelemetry import trace as otel
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.sampling import Decision as SamplingDecision
from opentelemetry.sdk.trace.sampling import ParentBased, Sampler, TraceIdRatioBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from gateway.collector_session import new_session
from gateway.config import Tracing as TracingConfig
from gateway.core.model import Outcome
from gateway.trace_context import Attempt, Parent, new_span_id
from gateway.tracing import EndedRequest

FLAGS = TraceFlags(TraceFlags.SAMPLED)
SCOPE = InstrumentationScope("warmlane", version("warmlane"))
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
"""`gen_ai.operation.name`, by route; the other routes have none in the conventions."""
FAILED = frozenset(
    {Outcome.FAILED, Outcome.UNREACHABLE, Outcome.DRAINING, Outcome.EMPTY, Outcome.REFUSED, Outcome.OVERDUE}
)
"""Outcomes of which somebody behind the client is to blame; a client that left is no error."""
FAILED_VALUES = frozenset(outcome.value for outcome in FAILED)

Attributes = dict[str, Any]


class Otlp:
    """A `tracing.Collector` behind OTLP/HTTP."""

    def __init__(self, exporter: OTLPSpanExporter, sampler: Sampler, resource: Resource) -> None:
        self._exporter = exporter
        self._sampler = sampler
        self._resource = resource

    @classmethod
    def configured(cls, config: TracingConfig) -> Otlp | None:
        """By the configuration, and where it says nothing by OpenTelemetry's variables. `None`: those switch it off."""
        if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
            return None
        named = config.service_name or os.environ.get("OTEL_SERVICE_NAME") or "warmlane"
        resource = Resource.create({"service.name": named, "service.version": version("warmlane")})
        ratio = config.sample_ratio
        own = None if ratio is None else ParentBased(TraceIdRatioBased(ratio))
        sampler = TracerProvider(sampler=own, resource=resource, shutdown_on_exit=False).sampler
        exporter = OTLPSpanExporter(endpoint=config.endpoint, session=new_session())
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)  # `Tracing` says it, once
        return cls(exporter, sampler, resource)

    def samples(self, trace_id: int, parent: Parent | None) -> bool:
        context = None
        if parent is not None:
            flags = FLAGS if parent.sampled else TraceFlags()
            span = NonRecordingSpan(SpanContext(parent.trace_id, parent.span_id, True, flags))
            context = otel.set_span_in_context(span)
        sampled = self._sampler.should_sample(context, trace_id, "request", SpanKind.SERVER)
        return sampled.decision is SamplingDecision.RECORD_AND_SAMPLE

    def send(self, ended: Sequence[EndedRequest]) -> bool:
        spans: list[ReadableSpan] = []
        for one in ended:
            spans += Tree(one, self._resource).spans()
            time.sleep(0)  # the event loop goes first
        return self._exporter.export(spans) is SpanExportResult.SUCCESS

    def close(self) -> None:
        shutdown: Callable[[], None] = self._exporter.shutdown  # which has no types
        shutdown()


class Tree:
    """The spans of one request."""

    def __init__(self, ended: EndedRequest, resource: Resource) -> None:
        self._ended = ended
        self._resource = resource
        trace, parent = ended.trace, ended.trace.parent
        self._root = SpanContext(trace.trace_id, trace.span_id, False, FLAGS)
        self._above = None
        if parent is not None:
            self._above = SpanContext(parent.trace_id, parent.span_id, True, FLAGS)
        self._name = f"{ended.method} {ended.record.route}".strip()

    def spans(self) -> Iterator[ReadableSpan]:
        ended, attempts = self._ended, self._ended.trace.attempts
        record, end = ended.record, ended.ended_at
        failed = record.status >= 500 or record.outcome in FAILED_VALUES
        yield self._span(
            self._name,
            self._root,
            (ended.received_at, end),
            request_attributes(ended),
            kind=SpanKind.SERVER,
            parent=self._above,
            failed=failed and record.status != 429,
        )
        if not ended.method:  # it never was a whole request
            return
        read_at = ended.trace.read_at
        yield self._child("read", (ended.received_at, read_at or end), {"http.request.body.size": record.request_bytes})
        if read_at:
            admitted_at = max(read_at, attempts[0].decided_from) if attempts else end
            shed = {"warmlane.shed": record.shed} if record.shed else {}
            yield self._child("admission", (read_at, admitted_at), shed)
        for number, attempt in enumerate(attempts):
            decided = decision_attributes(attempt)
            yield self._child("decide", (attempt.decided_from, attempt.sent_at), decided)
            yield self._attempt(number, attempt)

    def _attempt(self, number: int, attempt: Attempt) -> ReadableSpan:
        failed = attempt.status >= 400 or attempt.outcome in FAILED
        return self._span(
            self._name,
            SpanContext(self._root.trace_id, attempt.span_id, False, FLAGS),
            (attempt.sent_at, attempt.ended_at),
            attempt_attributes(self._ended.method, number, attempt, failed=failed),
            kind=SpanKind.CLIENT,
            parent=self._root,
            failed=failed,
            first_token_at=attempt.first_token_at,
        )

    def _child(self, name: str, times: tuple[float, float], attributes: Attributes) -> ReadableSpan:
        context = SpanContext(self._root.trace_id, new_span_id(), False, FLAGS)
        return self._span(name, context, times, attributes, parent=self._root)

    def _span(
        self,
        name: str,
        context: SpanContext,
        times: tuple[float, float],
        attributes: Attributes,
        *,
        parent: SpanContext | None,
        kind: SpanKind = SpanKind.INTERNAL,
        failed: bool = False,
        first_token_at: float | None = None,
    ) -> ReadableSpan:
        events = [] if first_token_at is None else [Event("first_token", timestamp=self._wall(first_token_at))]
        return ReadableSpan(
            name,
            context,
            parent,
            self._resource,
            attributes,
            events,
            kind=kind,
            status=Status(StatusCode.ERROR) if failed else Status(),
            start_time=self._wall(times[0]),
            end_time=self._wall(max(times)),
            instrumentation_scope=SCOPE,
        )

    def _wall(self, time: float) -> int:
        """Nanoseconds since 1970."""
        return round((time + self._ended.wall_offset) * 1e9)


def request_attributes(ended: EndedRequest) -> Attributes:
    record = ended.record
    usage = record.prompt_tokens, record.cached_tokens, record.completion_tokens
    found = {
        "http.request.method": ended.method or None,
        "http.route": record.route,
        "http.response.status_code": record.status or None,
        "http.response.body.size": record.response_bytes,
        "error.type": record.error or None,
        "gen_ai.operation.name": OPERATIONS.get(record.route),
        "gen_ai.request.model": ended.model or None,
        "gen_ai.request.stream": record.stream,
        "gen_ai.response.time_to_first_chunk": record.ttft_seconds,
        "gen_ai.usage.input_tokens": usage[0],
        "gen_ai.usage.cache_read.input_tokens": usage[1],
        "gen_ai.usage.output_tokens": usage[2],
        "warmlane.outcome": record.outcome,
        "warmlane.tenant": record.tenant or None,
        "warmlane.attempts": record.attempts,
        "warmlane.replica": record.replica or None,
        "warmlane.overhead_seconds": record.overhead_seconds or None,
    }
    return {name: value for name, value in found.items() if value is not None}


def decision_attributes(attempt: Attempt) -> Attributes:
    """Lists have a place for each candidate, the best first."""
    ranking = attempt.ranking
    chosen = ranking[0][0]
    found: Attributes = {
        "warmlane.policy": attempt.policy,
        "warmlane.reason": attempt.reason.value,
        "warmlane.replica": chosen.replica,
        "warmlane.prompt_tokens.estimated": round(chosen.prompt_tokens),
        "warmlane.cached_tokens.predicted": round(chosen.cached_tokens),
        "warmlane.candidates": attempt.candidates,
        "warmlane.candidate.replica": [view.replica for view, _ in ranking],
        "warmlane.candidate.cached_tokens": [round(view.cached_tokens) for view, _ in ranking],
        "warmlane.candidate.cost": [cost.total for _, cost in ranking],
    }
    parts = [dict(cost.parts) for _, cost in ranking]
    for name in parts[0]:
        found[f"warmlane.candidate.cost.{name}"] = [one.get(name, 0.0) for one in parts]
    return found


def attempt_attributes(method: str, number: int, attempt: Attempt, *, failed: bool) -> Attributes:
    replica = attempt.ranking[0][0].replica
    url = urlsplit(replica)
    found = {
        "http.request.method": method,
        "http.request.resend_count": number or None,
        "http.response.status_code": attempt.status or None,
        "error.type": attempt.outcome.value if failed else None,
        "server.address": url.hostname,
        "server.port": url.port,
        "warmlane.replica": replica,
        "warmlane.outcome": attempt.outcome.value,
    }
    return {name: value for name, value in found.items() if value is not None}
