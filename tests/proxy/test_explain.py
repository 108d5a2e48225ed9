"""What a gateway says about its decisions is what it does: the dry run, the shadow policies, the request's record."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.assembly import Gateway
from gateway.config import Config, Feeds, Replica, Routing, Server
from gateway.control import build_api
from gateway.core.model import Decision
from gateway.request_log import RequestRecord
from gateway.views import explained
from tests.proxy.conftest import RunningGateway, eventually, running_gateway, until_ready
from tests.proxy.scripted import Exchange, ScriptedReplica

PROMPT = random.Random(1).randbytes(20_000).hex()
"""About 10,000 tokens: whoever holds it is worth a queue of several others."""
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'


def chat(content: str, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": content}], **fields}


class Script:
    """Answers at once; a stream gets one token and is then held open until `released`."""

    def __init__(self) -> None:
        self.released = asyncio.Event()

    async def __call__(self, exchange: Exchange) -> None:
        if b'"stream":true' not in exchange.body.replace(b" ", b""):
            await exchange.answer(b'{"usage":{"prompt_tokens":10000,"prompt_tokens_details":{"cached_tokens":64}}}')
            return
        await exchange.start_stream()
        await exchange.chunk(TOKEN)
        await self.released.wait()
        await exchange.end_stream()


Output = pytest.CaptureFixture[bytes]


class Watched:
    """A gateway in this process: its decisions and records as they come, over real connections to its replicas."""

    def __init__(self, gateway: Gateway, client: httpx.AsyncClient, output: Output) -> None:
        self.gateway = gateway
        self.client = client
        self.decisions: list[Decision] = []
        self._output = output
        self._log = b""
        gateway.router.before_start = lambda decision, now: self.decisions.append(decision)

    async def record(self, response: httpx.Response) -> RequestRecord:
        """What the log says of this request."""
        id = response.headers["x-request-id"].encode()
        self.gateway.telemetry.flush()

        def is_written() -> bool:
            self._log += self._output.readouterr().out
            return any(id in line for line in self._log.split(b"\n")[:-1])

        await eventually(is_written)
        (line,) = [line for line in self._log.split(b"\n") if id in line]
        return msgspec.json.decode(line, type=RequestRecord)

    async def explain(self, body: dict[str, Any], **headers: str) -> dict[str, Any]:
        answer = await self.client.post("/warmlane/route", json=body, headers=headers)
        assert answer.status_code == 200
        return answer.json()  # type: ignore[no-any-return]

    async def send(self, body: dict[str, Any], **headers: str) -> httpx.Response:
        return await self.client.post("/v1/chat/completions", json=body, headers=headers)


@contextlib.asynccontextmanager
async def watched(output: Output, *replicas: ScriptedReplica, **routing: Any) -> AsyncIterator[Watched]:
    config = Config(
        server=Server(log="json"),
        replicas=[Replica(url=replica.url) for replica in replicas],
        routing=Routing(**routing),
        feeds=Feeds(probe_interval_seconds=0.1, scrape_interval_seconds=0.1, tokenize=False),
    )
    gateway = Gateway(config, asyncio.get_running_loop())
    transport = httpx.ASGITransport(build_api(gateway))
    async with gateway.run_beside(), httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        await until_ready(client, len(replicas))
        await eventually(lambda: all(one.load for one in gateway.router.statistics(gateway.clock()).replicas))
        yield Watched(gateway, client, output)


async def check(said: dict[str, Any], watched: Watched, response: httpx.Response) -> None:
    """The dry run against the decision, the headers and the record of the request that followed it."""
    decision, record = watched.decisions[-1], await watched.record(response)
    assert said == explained(decision)  # every replica's cost, part by part
    for candidate in said["ranking"]:
        assert sum(candidate["parts"].values()) == pytest.approx(candidate["total_seconds"])
    assert response.headers["x-warmlane-replica"] == said["replica"] == record.replica
    cached = said["ranking"][0]["cached_tokens"]
    assert abs(int(response.headers["x-warmlane-cached-tokens"]) - cached) <= 1  # rounded there, cut off here
    assert abs(record.cached_tokens_predicted - cached) <= 1
    assert (record.policy, record.reason) == (said["policy"], said["reason"])


async def test_the_dry_run_says_what_the_next_request_does(capsysbinary: Output) -> None:
    script = Script()
    async with ScriptedReplica(script).running() as one, ScriptedReplica(script).running() as two:
        async with watched(capsysbinary, one, two) as gateway:
            said = await gateway.explain(chat(PROMPT))
            assert said["reason"] == "cold"
            assert not gateway.decisions
            await check(said, gateway, await gateway.send(chat(PROMPT)))
            assert len(one.exchanges) + len(two.exchanges) == 1
            said = await gateway.explain(chat(PROMPT + "and more" * 300))
            assert said["reason"] == "warm"
            assert said["ranking"][0]["cached_tokens"] > 5_000
            assert said["ranking"][1]["cached_tokens"] == 0
            await check(said, gateway, await gateway.send(chat(PROMPT + "and more" * 300)))


async def test_the_dry_run_counts_the_requests_that_run(capsysbinary: Output) -> None:
    script = Script()
    async with ScriptedReplica(script).running() as one, ScriptedReplica(script).running() as two:
        async with watched(capsysbinary, one, two) as gateway:
            streams = [asyncio.create_task(gateway.send(chat(f"{n}" * 2000, stream=True))) for n in range(3)]
            await eventually(lambda: len(gateway.decisions) == 3)
            flights = gateway.gateway.router
            await eventually(
                lambda: all(one.pending_tokens == 0 for one in flights.statistics(gateway.gateway.clock()).replicas)
            )
            said = await gateway.explain(chat("short"))
            assert sorted(candidate["in_flight"] for candidate in said["ranking"]) == [1, 2]
            assert all(candidate["parts"]["requests"] > 0 for candidate in said["ranking"])
            await check(said, gateway, await gateway.send(chat("short")))
            script.released.set()
            for stream in streams:
                assert (await stream).status_code == 200


async def test_the_dry_run_reads_the_session_as_the_front_door_does(capsysbinary: Output) -> None:
    async with ScriptedReplica(Script()).running() as one, ScriptedReplica(Script()).running() as two:
        async with watched(capsysbinary, one, two, policy="session-hash") as gateway:
            homes = set()
            for number in range(16):
                said = await gateway.explain(chat("same"), **{"x-session-id": f"s{number}"})
                homes.add(said["replica"])
                await check(said, gateway, await gateway.send(chat("same"), **{"x-session-id": f"s{number}"}))
            assert len(homes) == 2


async def test_a_body_that_the_front_door_refuses_is_not_explained(capsysbinary: Output) -> None:
    async with ScriptedReplica().running() as replica, watched(capsysbinary, replica) as gateway:
        for path in ("/warmlane/route", "/v1/chat/completions"):
            answer = await gateway.client.post(path, content=b"{not json")
            assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
        packed = await gateway.client.post("/warmlane/route", content=b"\x1f\x8b", headers={"content-encoding": "gzip"})
        assert packed.json()["reason"] == "only"


async def series(gateway: RunningGateway, name: str) -> dict[tuple[str, ...], float]:
    """Samples of one name by the values of their labels, these in the order of the labels' names."""
    return {
        tuple(value for _, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(await gateway.metrics())
        for sample in family.samples
        if sample.name == name
    }


async def test_shadows_are_counted_exactly_and_change_nothing(mode: str) -> None:
    """One replica is warm and busy: the blind policy would go to the other one, each time."""
    script, body = Script(), chat(PROMPT, stream=True)
    async with ScriptedReplica(script).running() as one, ScriptedReplica(script).running() as two:
        shadow = ("least-requests", "cache-cost")
        async with running_gateway(one, two, mode=mode, routing={"shadow": shadow}) as gateway:
            async with gateway.client.stream("POST", "/v1/chat/completions", json=body) as first:
                warm = first.headers["x-warmlane-replica"]
                pieces = first.aiter_bytes()  # kept: the answer is closed with it
                await anext(pieces)
                predicted = 0
                for _ in range(5):
                    answer = await gateway.chat(PROMPT)
                    assert answer.headers["x-warmlane-replica"] == warm
                    predicted += int(answer.headers["x-warmlane-cached-tokens"])
                script.released.set()
            assert await series(gateway, "warmlane_shadow_decisions_total") == {
                ("same", "least-requests"): 1,  # nobody was busy or warm
                ("other", "least-requests"): 5,
                ("same", "cache-cost"): 6,
                ("other", "cache-cost"): 0,
            }
            cached = await series(gateway, "warmlane_shadow_cached_tokens_total")
            assert cached["live", "least-requests"] == cached["shadow", "cache-cost"] == predicted > 5 * 5_000
            assert cached["shadow", "least-requests"] == 0
            regret = await series(gateway, "warmlane_shadow_regret_seconds_count")
            assert regret == {("least-requests",): 5, ("cache-cost",): 0}
            assert (await series(gateway, "warmlane_shadow_regret_seconds_sum"))["least-requests",] > 5 * 0.5
            assert set((await series(gateway, "warmlane_shadow_failures_total")).values()) == {0}


async def test_without_shadows_nothing_is_asked() -> None:
    async with ScriptedReplica().running() as replica, running_gateway(replica) as gateway:
        await gateway.chat()
        assert "warmlane_shadow_decisions_total{" not in await gateway.metrics()


async def test_a_replica_that_caches_nothing_shows_as_a_wrong_prediction() -> None:
    async def forgetful(exchange: Exchange) -> None:
        usage = {"prompt_tokens": 10_000, "prompt_tokens_details": {"cached_tokens": 0}}
        await exchange.answer(msgspec.json.encode({"usage": usage}))

    async with ScriptedReplica(forgetful).running() as replica, running_gateway(replica) as gateway:
        predicted = [int((await gateway.chat(PROMPT)).headers["x-warmlane-cached-tokens"]) for _ in range(3)]
        cached = await series(gateway, "warmlane_replica_cached_tokens_total")
        assert cached == {("predicted", replica.url): sum(predicted), ("reported", replica.url): 0}
        errors = await series(gateway, "warmlane_prediction_error_ratio_bucket")
        assert (errors["0.02",], errors["0.5",], errors["+Inf",]) == (1, 1, 3)
