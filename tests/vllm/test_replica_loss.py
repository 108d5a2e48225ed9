"""A real replica dies: its streams end with an error, the other one serves everybody else, and it is taken back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.vllm.conftest import Fleet, wait_until

pytestmark = pytest.mark.vllm


@pytest.fixture
def gateway(vllm_fleet: Fleet) -> Iterator[openai.OpenAI]:
    url = f"{vllm_fleet.gateway}/v1"
    with openai.OpenAI(base_url=url, api_key="unused", max_retries=0, timeout=120.0) as client:
        yield client


def ask(gateway: openai.OpenAI, text: str) -> str:
    """Where the request went; raises when it failed."""
    messages: Any = [{"role": "user", "content": text}]
    to_the_end: Any = {"ignore_eos": True}  # random weights may well say it
    raw = gateway.chat.completions.with_raw_response.create(
        model="tiny", messages=messages, max_tokens=2, extra_body=to_the_end
    )
    assert raw.parse().choices[0].finish_reason == "length"
    return raw.headers["x-warmlane-replica"]


def test_a_killed_replica_is_survived_and_taken_back(
    gateway: openai.OpenAI, vllm_fleet: Fleet, vllm_replica: str
) -> None:
    victim = next(url for url in vllm_fleet.replicas if url != vllm_replica)
    texts = [f"Story {number}: " + f"word{number} " * 1_000 for number in range(8)]
    warm_there = [text for text in texts if ask(gateway, text) == victim]
    assert warm_there

    messages: Any = [{"role": "user", "content": warm_there[0]}]
    endless: Any = {"ignore_eos": True}
    stream = gateway.chat.completions.create(
        model="tiny", messages=messages, max_tokens=12_000, stream=True, extra_body=endless
    )
    assert stream.response.headers["x-warmlane-replica"] == victim
    events = iter(stream)
    next(events)
    vllm_fleet.kill(victim)
    with pytest.raises((openai.APIError, httpx.TransportError)):
        list(events)

    assert {ask(gateway, text) for text in texts} == {vllm_replica}
    assert [model.id for model in gateway.models.list()] == ["tiny"]
    wait_until(lambda: not vllm_fleet.is_up(victim), "the gateway noticed")
    assert httpx.get(f"{vllm_fleet.gateway}/ready", trust_env=False).status_code == 200

    vllm_fleet.restart(victim)
    fresh = iter(range(1_000))
    wait_until(lambda: ask(gateway, f"Fresh {next(fresh)} " * 50) == victim, "it gets requests again")


def test_a_kill_under_load_costs_no_request_that_had_no_byte_of_an_answer(
    gateway: openai.OpenAI, vllm_fleet: Fleet, vllm_replica: str
) -> None:
    victim = next(url for url in vllm_fleet.replicas if url != vllm_replica)
    wait_until(lambda: vllm_fleet.is_up(victim), "both are up")
    killed = threading.Event()

    def client(name: int) -> list[str]:
        asked = []
        while not killed.is_set() or len(asked) < 5:
            asked.append(ask(gateway, f"Client {name} asks {len(asked)}: " + "word " * 400))
        return asked

    with ThreadPoolExecutor(6) as threads:
        clients = [threads.submit(client, name) for name in range(6)]
        wait_until(lambda: in_flight(vllm_fleet, victim) >= 2, "the victim is at work")
        vllm_fleet.kill(victim)
        wait_until(lambda: not vllm_fleet.is_up(victim), "the gateway noticed")
        killed.set()
        served_by = [replica for one in clients for replica in one.result()]  # raises where a request failed
    assert set(served_by) <= set(vllm_fleet.replicas)
    vllm_fleet.restart(victim)
    wait_until(lambda: vllm_fleet.is_up(victim), "it is back")


def test_an_engine_that_drains_finishes_its_streams_and_gets_nothing_new(
    gateway: openai.OpenAI, vllm_fleet: Fleet, vllm_replica: str
) -> None:
    """With `--shutdown-timeout` its health stays 200, while it answers new requests with an error of its own."""
    victim = next(url for url in vllm_fleet.replicas if url != vllm_replica)
    wait_until(lambda: vllm_fleet.is_up(victim), "both are up")
    texts = [f"Drain {number}: " + f"word{number} " * 1_000 for number in range(8)]
    warm_there = [text for text in texts if ask(gateway, text) == victim]
    assert warm_there

    messages: Any = [{"role": "user", "content": warm_there[0]}]
    to_the_end: Any = {"ignore_eos": True}
    stream = gateway.chat.completions.create(
        model="tiny", messages=messages, max_tokens=1_500, stream=True, extra_body=to_the_end
    )
    assert stream.response.headers["x-warmlane-replica"] == victim
    events = iter(stream)
    next(events)
    vllm_fleet.terminate(victim)
    assert {ask(gateway, text) for text in warm_there for _ in range(3)} == {vllm_replica}
    assert list(events)[-1].choices[0].finish_reason == "length"
    vllm_fleet.wait_gone(victim)
    assert {ask(gateway, text) for text in texts} == {vllm_replica}
    vllm_fleet.restart(victim)
    wait_until(lambda: vllm_fleet.is_up(victim), "it is back")


def in_flight(fleet: Fleet, replica: str) -> float:
    page = httpx.get(f"{fleet.gateway}/metrics", trust_env=False).text
    name = f'warmlane_replica_in_flight_requests{{replica="{replica}"}} '
    return float(page.partition(name)[2].partition("\n")[0])
