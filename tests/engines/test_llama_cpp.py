"""Real llama.cpp behind a real gateway: what docs/engines.md promises of it."""

from __future__ import annotations

import asyncio
import json
import re

import httpx
import pytest

from gateway.feeds.dialects import LLAMA_CPP, dialect_of_page
from gateway.feeds.fetch import ReplicaClient, fetch
from gateway.feeds.metrics_text import read_load
from tests.chaos.rig import eventually

MODEL = "tiny"
CONTEXT, SLOTS = 8_192, 2
PATIENCE_SECONDS = 100.0
"""A prompt of 2,000 tokens takes a second where eight others use the same two cores."""


def prompt(number: int, words: int = 250) -> str:
    """Some 2,000 bytes, and as many tokens: four prefix blocks."""
    return " ".join(f"w{number}-{word}" for word in range(words))


async def shown(gateway) -> list[dict]:
    return (await gateway.get("/warmlane/replicas")).json()["replicas"]


async def chat(gateway, *turns: str, **fields) -> httpx.Response:
    roles = ("user", "assistant")
    messages = [{"role": roles[turn % 2], "content": content} for turn, content in enumerate(turns)]
    return await post(gateway, "/v1/chat/completions", messages=messages, **fields)


async def post(gateway, path: str, **fields) -> httpx.Response:
    body = {"model": MODEL, "max_tokens": 4, **fields}
    async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE_SECONDS) as client:
        return await client.post(gateway.url + path, json=body)


async def test_it_is_recognised_and_what_it_tells_is_read(standing) -> None:
    async with standing(2, "--metrics") as fleet:

        async def known() -> bool:
            return all(one["cache_tokens_known"] and one["load"] for one in await shown(fleet.gateway))

        await eventually(known, "size and load of both caches are known")
        for one in await shown(fleet.gateway):
            assert (one["engine"], one["models"], one["cache_tokens"]) == ("llama.cpp", [MODEL], CONTEXT)
            assert (one["load"]["running"], one["load"]["waiting"], one["load"]["kv_usage"]) == (0, 0, None)
        card = (await fleet.gateway.get(f"/v1/models/{MODEL}")).json()
        assert (card["owned_by"], card["max_model_len"]) == ("llamacpp", CONTEXT // SLOTS)
        assert fleet.gateway.err.count("runs llama.cpp") == 2
        assert "not usable" not in fleet.gateway.err


async def test_its_page_still_has_the_families_of_the_table(standing) -> None:
    async with standing(1, "--metrics") as fleet:
        (replica,) = fleet.replicas
        await chat(fleet.gateway, prompt(1))
        page = await fetch(ReplicaClient(), f"{replica.url}/metrics", timeout_seconds=10.0, max_bytes=100_000)
        assert dialect_of_page(page) is LLAMA_CPP
        load = read_load(page, 0.0, LLAMA_CPP.families)
        assert (load.running, load.waiting, load.prefix_hits) == (0, 0, 0)
        assert load.prefix_queries > 1_500


async def test_a_chat_that_goes_on_finds_its_cache(standing) -> None:
    async with standing(2, "--metrics") as fleet:
        homes = set()
        for number in range(6):
            first = await chat(fleet.gateway, prompt(number))
            second = await chat(fleet.gateway, prompt(number), "yes", "and then?")
            assert first.headers["x-warmlane-replica"] == second.headers["x-warmlane-replica"]
            assert second.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 1_500
            assert int(second.headers["x-warmlane-cached-tokens"]) > 0
            homes.add(first.headers["x-warmlane-replica"])
        assert len(homes) == 2

        records = fleet.gateway.log_records
        await eventually(lambda: len(records()) == 12, "all requests are logged")
        assert sum(record["cached_tokens"] or 0 for record in records()) > 6 * 1_500


async def test_streams_come_through_whole(standing) -> None:
    async with standing(1, "--metrics") as fleet:
        answer = await chat(
            fleet.gateway, prompt(1), stream=True, stream_options={"include_usage": True}, max_tokens=20
        )
        events = re.findall(r"^data: (.*)$", answer.text, re.MULTILINE)
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["usage"]["completion_tokens"] >= 1


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "once"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "once"}]}),
        ("/v1/responses", {"input": "once"}),
    ],
)
async def test_its_other_endpoints(standing, path, fields) -> None:
    async with standing(1, "--metrics") as fleet:
        answer = await post(fleet.gateway, path, **fields)
        assert answer.status_code == 200, answer.text


async def test_it_closes_each_connection_after_a_hundred_requests_and_nobody_notices(standing) -> None:
    async with standing(1, "--metrics") as fleet:
        for number in range(130):
            assert (await chat(fleet.gateway, str(number), max_tokens=1)).status_code == 200
        assert (await fleet.gateway.metrics()).total("warmlane_replays_total") == 0


@pytest.mark.parametrize("slots", [1, 2])
async def test_more_requests_at_once_than_slots(standing, slots) -> None:
    async with standing(2, "--metrics", slots=slots) as fleet:
        answers = await asyncio.gather(*(chat(fleet.gateway, prompt(number), max_tokens=50) for number in range(24)))
        assert {answer.status_code for answer in answers} == {200}
        shares = [answer.headers["x-warmlane-replica"] for answer in answers]
        assert min(shares.count(replica.url) for replica in fleet.replicas) >= 6


async def test_without_its_metrics_it_serves_and_the_remedy_is_named(standing) -> None:
    async with standing(2) as fleet:
        await eventually(lambda: "start llama-server with --metrics" in fleet.gateway.err, "the remedy is named")
        answers = await asyncio.gather(*(chat(fleet.gateway, prompt(number)) for number in range(8)))
        assert {answer.status_code for answer in answers} == {200}
        for one in await shown(fleet.gateway):
            assert (one["engine"], one["load"], one["cache_tokens"]) == ("llama.cpp", None, CONTEXT)


async def test_one_that_is_killed_is_replaced_and_comes_back(standing) -> None:
    async with standing(2, "--metrics") as fleet:
        first, second = fleet.replicas
        first.kill()
        answers = [await chat(fleet.gateway, prompt(number)) for number in range(10)]
        assert {(answer.status_code, answer.headers["x-warmlane-replica"]) for answer in answers} == {(200, second.url)}
        await first.start()
        await fleet.gateway.wait_state(first, "up")
