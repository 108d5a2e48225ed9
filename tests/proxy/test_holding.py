"""Late binding over real sockets: what waits in the gateway, what lets it go on, and what it leaves behind."""

from __future__ import annotations

import asyncio
import random
import string
from collections.abc import Callable

import httpx
import pytest

from tests.proxy.conftest import MODES, RunningGateway, eventually, running_gateway
from tests.proxy.scripted import Exchange, ScriptedReplica

EVENT = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'
ANSWER = b'{"choices":[{"message":{"content":"x"}}],"usage":{"prompt_tokens":9,"completion_tokens":1}}'

pytestmark = pytest.mark.parametrize("mode", MODES)


def prompt(seed: int, size: int = 120_000) -> str:
    """About 30,000 tokens: 3 s of prefill until the gateway knows better."""
    return "".join(random.Random(seed).choices(string.ascii_letters, k=size))


class Paced:
    """Streams whose first token and end come when the test says so."""

    def __init__(self) -> None:
        self.first = [asyncio.Event() for _ in range(8)]
        self.end = [asyncio.Event() for _ in range(8)]

    async def script(self, exchange: Exchange) -> None:
        number = exchange.number - 1
        await self.first[number].wait()
        await exchange.start_stream()
        await exchange.chunk(EVENT)
        await self.end[number].wait()
        await exchange.chunk(b"data: [DONE]\n\n")
        await exchange.end_stream()


def waiting(gateway: RunningGateway, count: int) -> Callable[[], object]:
    async def counted() -> bool:
        page = await gateway.metrics()
        return f"\nwarmlane_waiting_requests {count}.0" in page

    return counted


def stream(gateway: RunningGateway, seed: int) -> asyncio.Task[httpx.Response]:
    return asyncio.create_task(gateway.chat(prompt(seed), stream=True))


async def test_a_first_token_lets_the_next_one_go(mode: str) -> None:
    paced = Paced()
    async with ScriptedReplica(paced.script).running() as replica, running_gateway(replica, mode=mode) as gateway:
        first = stream(gateway, 1)
        await eventually(lambda: len(replica.exchanges) == 1)
        second = stream(gateway, 2)
        await eventually(waiting(gateway, 1))
        assert len(replica.exchanges) == 1
        paced.first[0].set()
        await eventually(lambda: len(replica.exchanges) == 2)
        assert not first.done()
        for event in (*paced.first, *paced.end):
            event.set()
        for response in (await first, await second):
            assert (response.status_code, response.content.endswith(b"[DONE]\n\n")) == (200, True)
        assert "\nwarmlane_waiting_requests 0.0" in await gateway.metrics()


async def test_without_a_stream_the_end_lets_the_next_one_go(mode: str) -> None:
    released = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await released.wait()
        await exchange.answer(ANSWER)

    async with ScriptedReplica(script).running() as replica, running_gateway(replica, mode=mode) as gateway:
        calls = [asyncio.create_task(gateway.chat(prompt(seed))) for seed in range(2)]
        await eventually(waiting(gateway, 1))
        assert len(replica.exchanges) == 1
        released.set()
        assert [(await call).status_code for call in calls] == [200, 200]


async def test_time_lets_the_next_one_go_where_no_first_token_is_to_be_seen(mode: str) -> None:
    released = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await released.wait()
        await exchange.answer(ANSWER)

    rates = {"default_prefill_rate": 20_000.0}  # the first prompt is done after 1.5 s, and 1.05 s are sent ahead
    async with (
        ScriptedReplica(script).running() as replica,
        running_gateway(replica, mode=mode, routing=rates) as gateway,
    ):
        calls = [asyncio.create_task(gateway.chat(prompt(seed))) for seed in range(2)]
        await eventually(waiting(gateway, 1))
        await eventually(lambda: len(replica.exchanges) == 2)
        released.set()
        assert [(await call).status_code for call in calls] == [200, 200]


async def test_a_client_that_leaves_while_it_is_held_sends_nothing(mode: str) -> None:
    paced = Paced()
    async with ScriptedReplica(paced.script).running() as replica, running_gateway(replica, mode=mode) as gateway:
        first = stream(gateway, 1)
        await eventually(lambda: len(replica.exchanges) == 1)
        second = stream(gateway, 2)
        await eventually(waiting(gateway, 1))
        second.cancel()
        await eventually(waiting(gateway, 0))
        third = stream(gateway, 3)
        await eventually(waiting(gateway, 1))
        for event in (*paced.first, *paced.end):
            event.set()
        assert [(await call).status_code for call in (first, third)] == [200, 200]
        assert len(replica.exchanges) == 2
        assert prompt(3)[:100].encode() in replica.exchanges[1].body


async def test_one_held_for_a_replica_that_dies_goes_to_another(mode: str) -> None:
    scripts = Paced(), Paced()
    chat = prompt(1)
    async with (
        ScriptedReplica(scripts[0].script).running() as one,
        ScriptedReplica(scripts[1].script).running() as other,
        running_gateway(one, other, mode=mode) as gateway,
    ):
        first = asyncio.create_task(gateway.chat(chat, stream=True))
        await eventually(lambda: one.exchanges or other.exchanges)
        dying, living = (one, other) if one.exchanges else (other, one)
        held = asyncio.create_task(gateway.chat(chat + "and more", stream=True))
        await eventually(waiting(gateway, 1))
        for paced in scripts:
            for event in (*paced.first, *paced.end):
                event.set()
        dying.exchanges[0].reset()
        assert [(await call).status_code for call in (first, held)] == [200, 200]
        assert living.exchanges


async def test_it_can_be_switched_off(mode: str) -> None:
    paced = Paced()
    off = {"hold": False}
    async with (
        ScriptedReplica(paced.script).running() as replica,
        running_gateway(replica, mode=mode, routing=off) as gateway,
    ):
        calls = [stream(gateway, seed) for seed in range(3)]
        await eventually(lambda: len(replica.exchanges) == 3)
        for event in (*paced.first, *paced.end):
            event.set()
        assert [(await call).status_code for call in calls] == [200] * 3
