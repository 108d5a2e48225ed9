"""Redis joins two gateways, and goes away in every manner (tests 13 and 14; O-24)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest

from tests.chaos.conftest import Figures
from tests.chaos.openloop import Load, Result, Traffic, ends, percentile
from tests.chaos.rig import SHORT, GatewayProcess, Rig, eventually, span, standing
from tests.redis_server import RedisServer

RATE = 50.0
"""Requests a second at each of two gateways: both, their load, three replicas and Redis share two cores."""
CALM_SECONDS = 5.0
TARGET_P99_MS = 20.0
TARGET_BACK_SECONDS = 5.0
MOST_P99_MS = 200.0
"""What is asserted in the long form: the p99 of some hundred requests moves by tens of milliseconds where anything else
runs beside, and by seconds where much does. Requests that wait for Redis would show in the median as well."""


class End(asyncio.Protocol):
    """One end of what passes through the proxy."""

    def __init__(self, proxy: SlowProxy, other: End | None) -> None:
        self.proxy = proxy
        self.other = other
        self.transport: asyncio.Transport | None = None
        self.early: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.proxy.ends.add(self)
        if self.other is None:
            self.proxy.connect(self)

    def data_received(self, data: bytes) -> None:
        asyncio.get_running_loop().call_later(self.proxy.seconds, self.pass_on, data)

    def pass_on(self, data: bytes) -> None:
        if self.other is None or self.other.transport is None:
            self.early.append(data)
        else:
            self.other.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.proxy.ends.discard(self)
        if self.other is not None and self.other.transport is not None:
            self.other.transport.abort()


class SlowProxy:
    """Between gateways and Redis: passes everything on, after a time."""

    def __init__(self, port: int) -> None:
        self.seconds = 0.0
        self.port = 0
        self.ends: set[End] = set()
        self._to = port
        self._connecting: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def standing(self) -> AsyncIterator[SlowProxy]:
        server = await asyncio.get_running_loop().create_server(lambda: End(self, None), "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            await asyncio.gather(*self._connecting, return_exceptions=True)
            for end in list(self.ends):
                assert end.transport is not None
                end.transport.abort()
            await asyncio.sleep(0)

    def connect(self, end: End) -> None:
        task = asyncio.create_task(self._connect(end))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, end: End) -> None:
        assert end.transport is not None
        below = End(self, end)
        try:
            await asyncio.get_running_loop().create_connection(lambda: below, "127.0.0.1", self._to)
        except OSError:
            end.transport.abort()
            return
        end.other = below
        for data in end.early:
            end.pass_on(data)
        if end.transport.is_closing() and below.transport is not None:
            below.transport.abort()


@dataclass
class Stage:
    rig: Rig
    redis: RedisServer
    proxy: SlowProxy


@contextlib.asynccontextmanager
async def two_gateways(folder: Path, *, absent: bool = False) -> AsyncIterator[Stage]:
    redis = RedisServer(folder)
    if not absent:
        redis.start()
    async with SlowProxy(redis.port).standing() as proxy:
        try:
            config = {"redis": {"url": f"redis://127.0.0.1:{proxy.port}"}}
            async with standing(folder, gateways=2, config=config) as rig:
                if not absent:
                    await eventually(lambda: all_joined(rig), "the gateways have heard of each other")
                yield Stage(rig, redis, proxy)
        finally:
            redis.kill()


async def joined(gateway: GatewayProcess) -> bool:
    page = await gateway.metrics()
    return page.total("warmlane_peers_connected") == 1.0 and page.total("warmlane_peers") == 1.0


async def all_joined(rig: Rig) -> bool:
    return all([await joined(gateway) for gateway in rig.gateways])


async def none_connected(rig: Rig) -> bool:
    return not any([(await gateway.metrics()).total("warmlane_peers_connected") for gateway in rig.gateways])


def added_ms(before: list[Result], during: list[Result]) -> tuple[float, float]:
    """By how much the median and p99 of what is not streamed grew."""
    one, other = ([one.seconds * 1e3 for one in results if not one.stream] for results in (before, during))
    return percentile(other, 0.5) - percentile(one, 0.5), percentile(other, 0.99) - percentile(one, 0.99)


def kill(stage: Stage) -> None:
    stage.redis.kill()


def freeze(stage: Stage) -> None:
    stage.redis.freeze()


def slow_down(stage: Stage) -> None:
    stage.proxy.seconds = 2.0


def start(stage: Stage) -> None:
    stage.redis.start()


def thaw(stage: Stage) -> None:
    stage.redis.thaw()


def speed_up(stage: Stage) -> None:
    stage.proxy.seconds = 0.0


FAULTS: dict[str, tuple[Callable[[Stage], None], Callable[[Stage], None]]] = {
    "killed": (kill, start),
    "frozen": (freeze, thaw),
    "slow (2 s)": (slow_down, speed_up),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_13_redis_goes_away(fault: str, tmp_path: Path, figures: Figures) -> None:
    """O-24: under load, for some seconds; no request notices."""
    begin, end = FAULTS[fault]
    async with two_gateways(tmp_path) as stage:
        rig = stage.rig
        loads = [Load(gateway.url, Traffic(rate=RATE)) for gateway in rig.gateways]
        async with loads[0].running(), loads[1].running():
            await asyncio.sleep(CALM_SECONDS)
            fault_at = time.monotonic()
            begin(stage)
            await asyncio.sleep(span(15.0, 6.0))
            assert await none_connected(rig)
            end(stage)
            back_at = time.monotonic()
            back = await eventually(lambda: all_joined(rig), "the view is shared again")
            await asyncio.sleep(1.0)
        results = [one for load in loads for one in load.results]
    before = [one for one in results if fault_at - CALM_SECONDS + 1.0 < one.sent_at < fault_at]
    during = [one for one in results if fault_at <= one.sent_at < back_at]
    record_13(figures, fault, results, added_ms(before, during), back)


async def test_13_redis_absent_at_start(tmp_path: Path, figures: Figures) -> None:
    """O-24: the gateways start, serve, and share once there is one."""
    async with two_gateways(tmp_path, absent=True) as stage:
        rig = stage.rig
        loads = [Load(gateway.url, Traffic(rate=RATE)) for gateway in rig.gateways]
        async with loads[0].running(), loads[1].running():
            await asyncio.sleep(span(15.0, 6.0))
            assert await none_connected(rig)
            began = time.monotonic()
            start(stage)
            back = await eventually(lambda: all_joined(rig), "the view is shared")
            await asyncio.sleep(CALM_SECONDS)
        results = [one for load in loads for one in load.results]
    without = [one for one in results if one.sent_at < began]
    shared = [one for one in results if one.sent_at > began + back]
    record_13(figures, "absent at start", results, added_ms(shared, without), back)


def record_13(
    figures: Figures, fault: str, results: list[Result], added: tuple[float, float], back_seconds: float
) -> None:
    failed = [one for one in results if not one.ok]
    median, p99 = added
    figures.record(
        13,
        fault,
        f"{len(failed)} of {len(results)} requests failed, p99 {p99:+.1f} ms, shared again after {back_seconds:.1f} s",
        "0; <= +20 ms; <= 5 s",
        not failed and p99 <= TARGET_P99_MS and back_seconds <= TARGET_BACK_SECONDS,
    )
    assert not failed, ends(failed)
    assert median <= TARGET_P99_MS
    assert p99 <= MOST_P99_MS or SHORT
    assert back_seconds <= TARGET_BACK_SECONDS


@pytest.mark.parametrize(("redis", "most"), [(True, 1.5), (False, 2.0)])
async def test_14_two_gateways_one_hot_prefix(redis: bool, most: float, tmp_path: Path, figures: Figures) -> None:
    """All prompts open alike, and come in through both."""
    async with two_gateways(tmp_path, absent=not redis) as stage:
        loads = [Load(gateway.url, Traffic(rate=RATE, families=1)) for gateway in stage.rig.gateways]
        async with loads[0].running(), loads[1].running():
            await asyncio.sleep(span(30.0, 12.0))
        results = [one for load in loads for one in load.results]
        counts = Counter({replica.url: 0 for replica in stage.rig.replicas})
    counts.update(one.replica for one in results if one.ok)
    ratio = max(counts.values()) / (sum(counts.values()) / len(counts))
    title = "with Redis" if redis else "without Redis"
    figures.record(14, title, f"busiest/mean {ratio:.2f}", f"<= {most}", ratio <= most)
    assert all(one.ok for one in results), ends(results)
    assert ratio <= most
