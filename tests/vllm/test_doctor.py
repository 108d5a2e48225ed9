"""The doctor in front of real replicas and a gateway: quiet where all is well, and sees what goes past the gateway."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from tests.doctor.processes import codes, findings
from tests.vllm.conftest import Fleet, wait_until

pytestmark = pytest.mark.vllm


def ask(url: str, text: str) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 4}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120, trust_env=False)
    assert answer.status_code == 200


@contextmanager
def traffic(url: str) -> Iterator[None]:
    """One request after the other, about three subjects."""
    over = threading.Event()

    def send() -> None:
        number = 0
        while not over.is_set():
            ask(url, f"Subject {number % 3}: " + "word " * 300)
            number += 1

    thread = threading.Thread(target=send)
    thread.start()
    yield
    over.set()
    thread.join()


def test_a_healthy_fleet_has_no_findings_but_figures(vllm_fleet: Fleet) -> None:
    wait_until(lambda: all(map(vllm_fleet.is_up, vllm_fleet.replicas)), "both are up")
    for number in range(12):
        ask(vllm_fleet.gateway, f"Subject {number % 3}: " + "word " * 300)
    with traffic(vllm_fleet.gateway):
        code, told = findings(vllm_fleet.gateway, "--seconds", "4")
    assert code == 0
    assert codes(told) == set()
    assert {(one["version"], *one["models"]) for one in told["replicas"]} == {("0.32.0", "tiny")}
    busy = [one for one in told["replicas"] if one["prompt_tokens_per_second"]]
    assert busy
    assert all(one["hit_rate"] > 0.5 and one["generation_tokens_per_second"] > 0 for one in busy)


def test_requests_past_the_gateway_are_noticed(vllm_fleet: Fleet, vllm_replica: str) -> None:
    with traffic(vllm_replica):
        _, told = findings(vllm_fleet.gateway, "--seconds", "4")
    assert ("bypassed", vllm_replica) in codes(told)
