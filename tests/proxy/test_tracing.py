"""Traces: what a collector gets of real requests, and that it can do no harm."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest

from gateway import tracing
from gateway.config import Config, ConfigError, checked
from gateway.config import Tracing as TracingConfig
from gateway.request_log import RequestRecord
from gateway.trace_context import Parent, read_parent
from gateway.tracing import BATCH, MAX_WAITING, EndedRequest, Tracing, open_tracing
from tests.proxy.collector import Collector, Seen
from tests.proxy.conftest import RunningGateway, eventually, running_gateway
from tests.proxy.scripted import Exchange, ScriptedReplica, answer_chat

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'
USAGE = (
    b'data: {"choices":[],"usage":{"prompt_tokens":90,"completion_tokens":2,"prompt_tokens_details":'
    b'{"cached_tokens":64}}}\n\ndata: [DONE]\n\n'
)


async def stream(exchange: Exchange) -> None:
    await exchange.start_stream()
    await exchange.chunk(TOKEN)
    await exchange.chunk(TOKEN + USAGE)
    await exchange.end_stream()


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """A closed gateway's thread may try on for a while, and draws its pauses from the generator that all share."""
    yield
    for thread in threading.enumerate():
        if thread.name == "traces":
            thread.join(30.0)
            assert not thread.is_alive()


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector().running() as one:
        yield one


def parent_of(exchange: Exchange) -> tuple[str, str, str]:
    """Trace, span and flags that a replica was told."""
    (told,) = [value for name, value in exchange.headers if name == "traceparent"]
    _, trace, span, flags = told.split("-")
    return trace, span, flags


async def counted(gateway: RunningGateway, result: str, count: int) -> bool:
    return f'warmlane_traces_total{{result="{result}"}} {count}.0' in await gateway.metrics()


async def tree(collector: Collector, number: int = 0) -> tuple[Seen, list[Seen]]:
    await eventually(lambda: len(collector.roots) > number)
    root = collector.roots[number]
    return root, collector.children(root)


async def test_one_request_is_one_tree_and_its_replica_goes_on_with_it(mode: str, collector: Collector, capsysbinary):
    async with ScriptedReplica(stream).running() as replica, ScriptedReplica(stream).running() as other:
        where = {"endpoint": collector.url, "service_name": "front"}
        async with running_gateway(replica, other, mode=mode, tracing=where, server={"log": "json"}) as gateway:
            before = time.time()
            answer = await gateway.chat("hello", stream=True)
            assert answer.status_code == 200
            root, children = await tree(collector)
            await eventually(lambda: counted(gateway, "sent", 1))
            assert await counted(gateway, "lost", 0)
    assert (root.name, root.kind, root.parent, root.failed) == ("POST /v1/chat/completions", "SERVER", "", False)
    assert root.resource["service.name"] == "front"
    assert root["http.route"] == "/v1/chat/completions"
    assert (root["http.response.status_code"], root["warmlane.outcome"]) == (200, "completed")
    assert (root["gen_ai.operation.name"], root["gen_ai.request.model"]) == ("chat", "m")
    assert (root["gen_ai.usage.input_tokens"], root["gen_ai.usage.output_tokens"]) == (90, 2)
    assert root["gen_ai.usage.cache_read.input_tokens"] == 64
    assert root["gen_ai.request.stream"] is True
    assert 0 < root["gen_ai.response.time_to_first_chunk"] < root.seconds
    decide, attempt = children[2:]
    assert [one.name for one in children] == ["read", "admission", "decide", root.name]
    assert [one.kind for one in children] == ["INTERNAL", "INTERNAL", "INTERNAL", "CLIENT"]
    asked = replica if replica.exchanges else other
    assert decide["warmlane.replica"] == attempt["warmlane.replica"] == root["warmlane.replica"] == asked.url
    assert (decide["warmlane.policy"], decide["warmlane.candidates"]) == ("cache-cost", 2)
    assert set(decide["warmlane.candidate.replica"]) == {replica.url, other.url}
    costs = decide["warmlane.candidate.cost"]
    parts = [decide[f"warmlane.candidate.cost.{part}"] for part in ("queue", "prefill", "kv")]
    assert costs == sorted(costs)
    assert len(costs) == 2 == len(parts[0])
    assert (attempt["http.response.status_code"], attempt["warmlane.outcome"]) == (200, "completed")
    assert attempt["server.port"] == int(asked.url.rsplit(":", 1)[1])
    assert attempt.events == ["first_token"]
    assert parent_of(asked.exchanges[0]) == (root.trace, attempt.id, "01")
    (record,) = [json.loads(line) for line in capsysbinary.readouterr().out.splitlines()]
    assert record["trace_id"] == root.trace, "the log leads to the trace"
    # One after the other, within the whole, at the time of day.
    times = [(one.span.start_time_unix_nano, one.span.end_time_unix_nano) for one in children]
    assert times == sorted(times)
    assert all(start <= end for start, end in times)
    assert root.span.start_time_unix_nano == times[0][0]
    assert times[-1][1] <= root.span.end_time_unix_nano
    assert before - 1 < root.span.start_time_unix_nano / 1e9 < before + 60


@pytest.mark.parametrize("flags", ["01", "00"])
async def test_a_trace_that_comes_in_goes_on(mode: str, flags: str, collector: Collector):
    async with ScriptedReplica().running() as replica:
        async with running_gateway(replica, mode=mode, tracing={"endpoint": collector.url}) as gateway:
            headers = {"traceparent": f"00-{TRACE}-{SPAN}-{flags}", "tracestate": "vendor=1"}
            for extra in (headers, {}):
                body = {"model": "m", "messages": []}
                assert (await gateway.client.post("/v1/chat/completions", json=body, headers=extra)).is_success
            root, children = await tree(collector, 1 if flags == "01" else 0)
    followed, own = replica.exchanges
    assert followed.header("tracestate") == "vendor=1"
    assert own.header("tracestate") is None
    assert root.parent == ""
    if flags == "01":
        first, *_ = collector.roots
        assert (first.trace, first.parent) == (TRACE, SPAN)
        assert parent_of(followed) == (TRACE, collector.children(first)[-1].id, "01")
    else:
        assert len(collector.roots) == 1, "who is not sampled above is not here"
        assert parent_of(followed) == (TRACE, SPAN, "00")
    assert parent_of(own) == (root.trace, children[-1].id, "01")


async def test_what_is_not_sampled_is_not_sent_and_the_replica_is_told(collector: Collector):
    async with ScriptedReplica().running() as replica:
        async with running_gateway(replica, tracing={"endpoint": collector.url, "sample_ratio": 0.0}) as gateway:
            await gateway.chat()
            body = {"model": "m", "messages": []}
            await gateway.client.post("/v1/chat/completions", json=body, headers={"traceparent": PARENT})
            root, _ = await tree(collector)
    assert [parent_of(exchange)[2] for exchange in replica.exchanges] == ["00", "01"]
    assert [one.trace for one in collector.roots] == [root.trace] == [TRACE]


async def test_switched_off_the_headers_pass_as_they_came(mode: str):
    headers = [("traceparent", "whatever"), ("tracestate", "a=1"), ("tracestate", "b=2")]
    async with ScriptedReplica().running() as replica:
        async with running_gateway(replica, mode=mode) as gateway:
            body = {"model": "m", "messages": []}
            await gateway.client.post("/v1/chat/completions", json=body, headers=headers)
            assert "warmlane_traces_total{" not in await gateway.metrics()
    assert [pair for pair in replica.exchanges[0].headers if pair[0].startswith("trace")] == headers


async def test_a_replay_is_two_attempts(collector: Collector):
    asked: list[Exchange] = []

    async def lose_the_first(exchange: Exchange) -> None:
        asked.append(exchange)
        if len(asked) == 1:
            exchange.reset()
        else:
            await answer_chat(exchange)

    replicas = ScriptedReplica(lose_the_first), ScriptedReplica(lose_the_first)
    async with replicas[0].running() as one, replicas[1].running() as other:
        async with running_gateway(one, other, tracing={"endpoint": collector.url}) as gateway:
            assert (await gateway.chat()).status_code == 200
            root, children = await tree(collector)
    lost, again = [child for child in children if child.kind == "CLIENT"]
    assert [child.name for child in children] == ["read", "admission", *["decide", root.name] * 2]
    assert (root.failed, root["warmlane.attempts"]) == (False, 2)
    assert (lost.failed, lost["error.type"], lost["http.request.resend_count"]) == (True, "failed", None)
    assert (again.failed, again["http.request.resend_count"], again["http.response.status_code"]) == (False, 1, 200)
    assert lost["warmlane.replica"] != again["warmlane.replica"]
    assert [parent_of(exchange)[1] for exchange in asked] == [lost.id, again.id]


async def test_a_stream_that_dies_is_an_error_with_a_first_token(collector: Collector):
    async def script(exchange: Exchange) -> None:
        await exchange.start_stream()
        await exchange.chunk(TOKEN)
        exchange.reset()

    async with ScriptedReplica(script).running() as replica:
        async with running_gateway(replica, tracing={"endpoint": collector.url}) as gateway:
            with pytest.raises(httpx.RemoteProtocolError):
                await gateway.chat(stream=True)
            root, children = await tree(collector)
    attempt = children[-1]
    assert (root.failed, root["http.response.status_code"]) == (True, 200)
    assert (root["error.type"], root["warmlane.outcome"]) == ("replica_connection_lost", "failed")
    assert (attempt.failed, attempt["error.type"], attempt.events) == (True, "failed", ["first_token"])


REFUSED: dict[str, tuple[dict[str, Any], int, str, list[str]]] = {
    "no JSON": ({"content": b"{"}, 400, "invalid_json", ["read"]),
    "unknown model": ({"json": {"model": "made-up", "messages": []}}, 404, "model_not_found", ["read", "admission"]),
    "too large": ({"content": b" " * (2**20 + 1)}, 413, "request_too_large", []),
}


async def test_what_is_refused_has_a_span_with_the_reason(mode: str, collector: Collector):
    async with ScriptedReplica().running() as replica:
        server = {"max_body_mib": 1}
        async with running_gateway(replica, mode=mode, tracing={"endpoint": collector.url}, server=server) as gateway:
            for number, (name, (sent, status, error, phases)) in enumerate(REFUSED.items()):
                answer = await gateway.client.post("/v1/chat/completions", **sent)
                root, children = await tree(collector, number)
                assert answer.status_code == status, name
                told = root["http.response.status_code"], root["error.type"], root.failed
                assert told == (status, error, False), name
                assert [child.name for child in children] == phases, name
                assert root["gen_ai.request.model"] in (None, "other"), "made-up names are not told"


async def test_a_client_that_leaves_is_no_error(collector: Collector):
    async def script(exchange: Exchange) -> None:
        await exchange.start_stream()
        await exchange.chunk(TOKEN)
        await exchange.wait_closed(20)

    async with ScriptedReplica(script).running() as replica:
        async with running_gateway(replica, tracing={"endpoint": collector.url}) as gateway:
            _, writer = await gateway.connect()
            body = b'{"model": "m", "messages": [], "stream": true}'
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            await eventually(lambda: replica.exchanges)
            await asyncio.sleep(0.05)
            writer.close()
            root, children = await tree(collector)
    assert (root["warmlane.outcome"], root.failed, children[-1].failed) == ("client_left", False, False)
    assert children[-1].events == ["first_token"]


async def ask(gateway: RunningGateway, count: int) -> None:
    for _ in range(count):
        assert (await gateway.chat()).status_code == 200


@pytest.mark.parametrize("status", [200, 400])
async def test_a_collector_that_refuses_or_hangs_costs_its_traces_and_nothing_else(status: int, monkeypatch, caplog):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.3")
    caplog.set_level("INFO", "gateway.tracing")
    with Collector(status=status, hangs=status == 200).running() as collector:
        async with ScriptedReplica().running() as replica:
            async with running_gateway(replica, tracing={"endpoint": collector.url}) as gateway:
                await ask(gateway, 3)
                await eventually(lambda: counted(gateway, "lost", 3))
                await ask(gateway, 2)
                await eventually(lambda: counted(gateway, "lost", 5))
                told = [record for record in caplog.records if "traces" in record.getMessage()]
                assert len(told) == 1, "said once, not for each batch"
                collector.status, collector.hangs = 200, False
                collector.released.set()
                await ask(gateway, 1)
                await eventually(lambda: collector.spans)
                await eventually(lambda: any("takes them again; 5 were lost" in line for line in caplog.messages))


async def test_a_collector_that_is_not_there_or_hangs_does_not_hold_up_the_end(caplog):
    """Both are at work on a batch when the gateway stops, and have ten seconds for it."""
    with Collector(hangs=True).running() as hanging:
        for url in (hanging.url, "http://127.0.0.1:9"):
            async with ScriptedReplica().running() as replica:
                async with running_gateway(replica, tracing={"endpoint": url}) as gateway:
                    await ask(gateway, 2)
                    if url == hanging.url:
                        await eventually(lambda: hanging.heads)
                    stopped = time.monotonic()
                assert gateway.task.result() == 0
                assert time.monotonic() - stopped < 8, "far from the ten seconds"


async def test_the_last_spans_are_sent_at_the_end(collector: Collector):
    async with ScriptedReplica().running() as replica:
        async with running_gateway(replica, tracing={"endpoint": collector.url}) as gateway:
            await ask(gateway, 5)
    assert len(collector.roots) == 5


class Babbler:
    """What is behind a wrong address: it answers each request with a head, and then with a piece of text again and
    again."""

    def __init__(self, head: bytes, text: bytes, pause_seconds: float = 0.0) -> None:
        self.said = self.answering = 0
        self._answer = b"HTTP/1.1 " + head + b"\r\n\r\n"
        self._text, self._pause_seconds = text, pause_seconds

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.answering += 1
        with contextlib.suppress(ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(self._answer)
            while self._text and self.said < 2**26:
                writer.write(self._text)
                await writer.drain()
                self.said += len(self._text)
                await asyncio.sleep(self._pause_seconds)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        self.answering -= 1


@pytest.mark.parametrize(
    ("babbler", "taken"),
    [
        (Babbler(b"500 No", b"x" * 65_536), False),
        (Babbler(b"200 OK\r\ncontent-encoding: gzip", gzip.compress(b"\0" * 2**23)), True),
        (Babbler(b"200 OK", b"x", 0.02), True),
        (Babbler(b"200 OK\r\ncontent-length: 9", b""), True),
        (Babbler(b"307 Elsewhere\r\nlocation: /\r\ncontent-length: 0", b""), False),
    ],
)
async def test_an_answer_without_an_end_is_not_read(babbler: Babbler, taken: bool, monkeypatch):
    from gateway import collector_session
    from gateway.spans import Otlp

    monkeypatch.setattr(collector_session, "ANSWER_SECONDS", 0.2)
    async with await asyncio.start_server(babbler.serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        collector = Otlp.configured(TracingConfig(endpoint=f"http://127.0.0.1:{port}/v1/traces"))
        assert collector is not None
        assert await asyncio.to_thread(collector.send, []) is taken
        collector.close()
        await eventually(lambda: not babbler.answering)
    assert babbler.said < 2**25, "far less than there is"


class Blocked:
    """A collector that is stuck."""

    def __init__(self) -> None:
        self.took = 0
        self.go = threading.Event()

    def samples(self, trace_id: int, parent: Parent | None) -> bool:
        return True

    def send(self, ended: Sequence[EndedRequest]) -> bool:
        self.took += len(ended)
        return self.go.wait(30)

    def close(self) -> None:
        pass


async def test_what_waits_is_bounded_and_the_rest_is_counted():
    blocked = Blocked()
    traces = Tracing(blocked, model_label=str, clock=time.monotonic, wall_clock=time.time)

    def end_one() -> None:
        trace, _ = traces.begin([])
        traces.ended(trace, RequestRecord("id", "/v1/completions"), b"POST", 0.0)

    for _ in range(BATCH):
        end_one()
    await eventually(lambda: blocked.took)
    for _ in range(MAX_WAITING + 10):
        end_one()
    assert (blocked.took, traces.lost) == (BATCH, 10)
    blocked.go.set()
    traces.close()
    assert traces.sent == BATCH + MAX_WAITING


class Broken(Blocked):
    def send(self, ended: Sequence[EndedRequest]) -> bool:
        if self.took:
            return True
        self.took += len(ended)
        raise LookupError("of the exporter")


async def test_an_exporter_that_raises_loses_that_batch_only(caplog):
    traces = Tracing(Broken(), model_label=str, clock=time.monotonic, wall_clock=time.time)
    for sent in (0, 1):
        trace, _ = traces.begin([])
        traces.ended(trace, RequestRecord("id", "/v1/completions"), b"POST", 0.0)
        await eventually(lambda sent=sent: (traces.lost, traces.sent) == (1, sent))
    traces.close()
    assert "LookupError" in caplog.text


async def test_opentelemetrys_own_variables_count(collector: Collector, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20xyz")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "named-there")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    async with ScriptedReplica().running() as replica:
        async with running_gateway(replica, tracing={"enabled": True}) as gateway:
            await ask(gateway, 1)
            root, _ = await tree(collector)
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
        async with running_gateway(replica, tracing={"enabled": True}) as gateway:
            await ask(gateway, 1)
        assert parent_of(replica.exchanges[-1])[2] == "00"
        monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
        async with running_gateway(replica, tracing={"enabled": True}) as gateway:
            await ask(gateway, 1)
        assert replica.exchanges[-1].header("traceparent") is None
    assert len(collector.roots) == 1
    assert (root.resource["service.name"], root.resource["deployment.environment.name"]) == ("named-there", "test")
    assert collector.heads[0]["path"] == "/v1/traces"
    assert (collector.heads[0]["authorization"], collector.heads[0]["content-encoding"]) == ("Bearer xyz", "gzip")


@pytest.mark.parametrize(
    ("values", "state"),
    [
        ([PARENT], True),
        ([f" {PARENT} "], True),
        ([f"01-{TRACE}-{SPAN}-01-more"], True),
        ([f"00-{TRACE}-{SPAN}-03"], True),
        ([], None),
        ([PARENT, PARENT], None),
        ([f"00-{TRACE}-{SPAN}-01-more"], None),
        ([f"ff-{TRACE}-{SPAN}-01"], None),
        ([f"00-{TRACE.upper()}-{SPAN}-01"], None),
        ([f"00-{'0' * 32}-{SPAN}-01"], None),
        ([f"00-{TRACE}-{'0' * 16}-01"], None),
        ([f"00-{TRACE}-{SPAN}"], None),
        ([f"00-{TRACE}-{SPAN}-1"], None),
        ([""], None),
        (["x" * 60_000], None),
    ],
)
def test_what_is_no_trace_context_is_ignored(values: list[str], state: bool | None):
    parent = read_parent([(b"traceparent", value.encode()) for value in values] + [(b"tracestate", b"a=1")])
    if state is None:
        assert parent is None
    else:
        assert parent == Parent(int(TRACE, 16), int(SPAN, 16), True, b"a=1")


def test_states_are_joined_and_an_endless_one_is_dropped():
    def state(*values: bytes) -> bytes:
        parent = read_parent([(b"traceparent", PARENT.encode()), *((b"tracestate", value) for value in values)])
        assert parent is not None
        return parent.state

    assert state() == b""
    assert state(b"a=1", b"", b"b=2") == b"a=1,b=2"
    assert state(b"x" * 513) == b""


def opened(**config: Any) -> Tracing | None:
    return open_tracing(TracingConfig(**config), str, time.monotonic, time.time)


def test_without_the_extra_one_line_says_which(monkeypatch):
    monkeypatch.delitem(sys.modules, "gateway.spans", raising=False)
    exporter = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    monkeypatch.setitem(sys.modules, exporter, None)  # the API alone is there anyway: FastAPI brings it
    assert opened() is None
    with pytest.raises(ConfigError) as said:
        opened(enabled=True)
    needed = "which is an extra of this package: pip install 'warmlane[otel]'"
    assert str(said.value) == f"tracing: needs OpenTelemetry, {needed}"


@pytest.mark.parametrize(
    ("endpoint", "posted_to"),
    [
        ("http://collector:4318", "http://collector:4318/v1/traces"),
        ("http://collector:4318/", "http://collector:4318/v1/traces"),
        ("https://host/otlp/v1/traces", "https://host/otlp/v1/traces"),
        ("collector:4318", None),
        ("grpc://collector:4317", None),
        ("http://", None),
        ("http://user:secret@[::1", None),
    ],
)
def test_the_endpoint_is_a_url_and_gets_its_path(endpoint: str, posted_to: str | None):
    config = Config(tracing=TracingConfig(endpoint=endpoint))
    if posted_to is not None:
        assert checked(config).tracing.endpoint == posted_to
        return
    with pytest.raises(ConfigError, match=r"^tracing\.endpoint: ") as said:
        checked(config)
    assert "secret" not in str(said.value)


def test_an_endpoint_switches_it_on_unless_told_otherwise():
    assert not TracingConfig().is_on
    assert TracingConfig(endpoint="http://a").is_on
    assert not TracingConfig(endpoint="http://a", enabled=False).is_on
    assert tracing.open_tracing(TracingConfig(), str, time.monotonic, time.time) is None
