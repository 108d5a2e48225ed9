"""An OpenTelemetry collector for tests: takes spans over OTLP/HTTP and decodes them, or behaves badly."""

from __future__ import annotations

import contextlib
import gzip
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


def value_of(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    return [value_of(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, str(kind))


def attributes_of(pairs: Any) -> dict[str, Any]:
    found: list[KeyValue] = list(pairs)
    return {pair.key: value_of(pair.value) for pair in found}


@dataclass
class Seen:
    """One span."""

    span: Span
    resource: dict[str, Any]

    @property
    def name(self) -> str:
        return self.span.name

    @property
    def id(self) -> str:
        return self.span.span_id.hex()

    @property
    def parent(self) -> str:
        return self.span.parent_span_id.hex()

    @property
    def trace(self) -> str:
        return self.span.trace_id.hex()

    @property
    def kind(self) -> str:
        return Span.SpanKind.Name(self.span.kind).removeprefix("SPAN_KIND_")

    @property
    def failed(self) -> bool:
        return self.span.status.code == 2

    @property
    def seconds(self) -> float:
        return (self.span.end_time_unix_nano - self.span.start_time_unix_nano) / 1e9

    @property
    def events(self) -> list[str]:
        return [event.name for event in self.span.events]

    @property
    def names(self) -> set[str]:
        """Of its attributes."""
        return set(attributes_of(self.span.attributes))

    def __getitem__(self, name: str) -> Any:
        return attributes_of(self.span.attributes).get(name)


@dataclass
class Collector:
    status: int = 200
    hangs: bool = False
    spans: list[Seen] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    heads: list[dict[str, str]] = field(default_factory=list)
    url: str = ""
    released: threading.Event = field(default_factory=threading.Event)

    def take(self, path: str, head: dict[str, str], body: bytes) -> tuple[int, bytes]:
        self.heads.append({"path": path, **head})
        if self.hangs:
            self.released.wait(30)
        plain = gzip.decompress(body) if head.get("content-encoding") == "gzip" else body
        self.bodies.append(plain)
        if self.status == 200:
            message = ExportTraceServiceRequest.FromString(plain)
            for group in message.resource_spans:
                resource = attributes_of(group.resource.attributes)
                self.spans += [Seen(span, resource) for scope in group.scope_spans for span in scope.spans]
        return self.status, ExportTraceServiceResponse().SerializeToString()

    @property
    def roots(self) -> list[Seen]:
        return [span for span in self.spans if span.kind == "SERVER"]

    def children(self, root: Seen) -> list[Seen]:
        return [span for span in self.spans if span.parent == root.id and span.trace == root.trace]

    @contextlib.contextmanager
    def running(self) -> Iterator[Collector]:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                status, answer = collector.take(
                    self.path, {name.lower(): value for name, value in self.headers.items()}, body
                )
                with contextlib.suppress(OSError):
                    self.send_response(status)
                    self.send_header("content-type", "application/x-protobuf")
                    self.send_header("content-length", str(len(answer)))
                    self.end_headers()
                    self.wfile.write(answer)

            def log_message(self, *_: Any) -> None:
                """Silent."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.released.set()
            server.shutdown()
            server.server_close()
            thread.join(5)
