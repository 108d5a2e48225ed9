"""A request that is over, however it ended, is gone: nothing of it waits for the garbage collector."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter

import pytest

from tests.proxy.conftest import RunningGateway, eventually, running_gateway
from tests.proxy.scripted import ANSWER, Exchange, ScriptedReplica
from tests.proxy.test_front_door import ODD_BODY, post

REQUESTS = 10


async def script(exchange: Exchange) -> None:
    if exchange.header("x-end") == "answered":
        await exchange.answer(ANSWER)
        return
    if exchange.header("x-end") == "left in mid-stream":
        await exchange.start_stream()
        await exchange.chunk(b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n')
    await exchange.wait_closed()


async def request(gateway: RunningGateway, replica: ScriptedReplica, end: str) -> None:
    served = len(replica.exchanges)
    reader, writer = await gateway.connect()
    writer.write(post(ODD_BODY, headers=b"x-end: " + end.encode() + b"\r\n", close=False))
    await eventually(lambda: len(replica.exchanges) > served)
    if end != "left before the head":
        await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    writer.transport.abort()
    if end != "answered":
        await replica.exchanges[-1].wait_closed()


@pytest.mark.parametrize("end", ["answered", "left before the head", "left in mid-stream"])
async def test_nothing_of_a_request_waits_for_the_collector(end: str) -> None:
    """A prompt of megabytes would wait with it: the collector counts objects, not bytes."""
    async with ScriptedReplica(script).running() as replica, running_gateway(replica) as gateway:
        await request(gateway, replica, end)
        gc.collect()
        gc.disable()
        try:
            for _ in range(REQUESTS):
                await request(gateway, replica, end)
            await asyncio.sleep(0.05)
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            found = Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.garbage)
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    ours = {name: count for name, count in found.items() if name.startswith(("gateway.", "httptools."))}
    assert not {name: count for name, count in ours.items() if count >= REQUESTS / 2}, ours
