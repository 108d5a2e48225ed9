"""One trace through the gateway and a real vLLM, which goes on with it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.proxy.collector import Collector
from tests.proxy.conftest import eventually, running_gateway
from tests.vllm.conftest import HOST, ROOT, STATE, Run, close, free_port, log_of, start_all, stop_all, vllm_executable
from workers import presets
from workers.launch import Request, prepare
from workers.placement import Machine
from workers.worker import Worker

pytestmark = pytest.mark.vllm

SPANS_SECONDS = 30.0
"""vLLM sends its spans every five seconds."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector().running() as one:
        yield one


@pytest.fixture
def replica(background: Run[None], collector: Collector, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    model = None if Path.cwd() == ROOT else str(ROOT / presets.load("cpu-tiny").model)
    flags = ("--otlp-traces-endpoint", f"{collector.url}/v1/traces")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")  # the process inherits it
    request = Request("cpu-tiny", vllm=vllm_executable(), model=model, extra=flags)
    launch = prepare(request, Machine(environment={**os.environ, "XDG_STATE_HOME": str(STATE)}))
    worker, _ = launch.worker("traced", HOST, free_port())
    worker.output = log_of("traced")
    try:
        background(start_all([worker]))
        yield worker
    finally:
        background(stop_all([worker]))
        close(worker)


async def test_vllm_goes_on_with_the_trace_of_the_attempt(replica: Worker, collector: Collector) -> None:
    async with running_gateway(replica, tracing={"endpoint": collector.url}) as gateway:  # type: ignore[arg-type]
        answer = await gateway.chat("How is the weather?", model="tiny", max_tokens=4)
        assert answer.status_code == 200
        await eventually(
            lambda: [one for one in collector.spans if "gen_ai.usage.completion_tokens" in one.names], SPANS_SECONDS
        )
    (root,) = [one for one in collector.roots if one.resource["service.name"] == "warmlane"]
    attempt = collector.children(root)[-1]
    theirs = [one for one in collector.spans if "gen_ai.usage.completion_tokens" in one.names]
    assert [(one.trace, one.parent) for one in theirs] == [(root.trace, attempt.id)]
    assert theirs[0]["gen_ai.usage.completion_tokens"] == root["gen_ai.usage.output_tokens"] == 4
