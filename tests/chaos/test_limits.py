"""Limits of a key over three gateways, and a real Redis between them that is killed and comes back (24, 13; O-24)."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.chaos.conftest import Figures
from tests.chaos.openloop import Load, Result, Traffic
from tests.chaos.rig import GatewayProcess, Metrics, Rig, eventually, span, standing
from tests.redis_server import RedisServer

SECRETS = {"alice": "wl-alice-0123456789", "watch": "wl-watch-0123456789"}
PER_MINUTE = 600
TOKENS = 660
"""Of each request of the load at a scripted replica, as its usage says: 600 and 60."""
LIMITS = {"requests": PER_MINUTE, "tokens": PER_MINUTE * TOKENS}
UNEVEN = (45.0, 12.0, 3.0)
"""Requests a second at each gateway, six times the limit together."""
TARGET = 0.05
TARGET_BACK_SECONDS = 5.0


@dataclass
class Stage:
    rig: Rig
    redis: RedisServer
    client: httpx.AsyncClient

    async def joined(self, gateway: GatewayProcess) -> bool:
        page = await self.metrics(gateway)
        return page.total("warmlane_peers_connected") == 1.0 and page.total("warmlane_peers") == 2.0

    async def metrics(self, gateway: GatewayProcess) -> Metrics:
        return Metrics.read((await self.client.get(f"{gateway.url}/metrics")).text)

    async def all_joined(self) -> bool:
        return all([await self.joined(gateway) for gateway in self.rig.gateways])

    async def none_joined(self) -> bool:
        pages = [await self.metrics(gateway) for gateway in self.rig.gateways]
        return not any(page.total("warmlane_peers_connected") for page in pages)

    async def all_up(self) -> bool:
        pages = [await self.metrics(gateway) for gateway in self.rig.gateways]
        return all(page.total("warmlane_replica_state", state="up") == 1.0 for page in pages)

    @contextlib.asynccontextmanager
    async def under_load(self, rates: tuple[float, ...]) -> AsyncIterator[list[Load]]:
        headers = (("authorization", f"Bearer {SECRETS['alice']}"),)
        loads = [
            Load(gateway.url, Traffic(rate=rate, stream_share=0.0, headers=headers))
            for gateway, rate in zip(self.rig.gateways, rates, strict=True)
        ]
        async with loads[0].running(), loads[1].running(), loads[2].running():
            yield loads


@contextlib.asynccontextmanager
async def three_gateways(folder: Path, limit: str) -> AsyncIterator[Stage]:
    """One key, so much of one thing a minute."""
    keys = folder / "keys.toml"
    more = {"alice": f"{limit}_per_minute = {LIMITS[limit]}", "watch": ""}
    keys.write_text(
        "".join(
            f'[[keys]]\nname = "{name}"\nsha256 = "{hashlib.sha256(secret.encode()).hexdigest()}"\n{more[name]}\n'
            for name, secret in SECRETS.items()
        )
    )
    redis = RedisServer(folder)
    redis.start()
    config = {"redis": {"url": redis.url}, "auth": {"keys_file": str(keys)}, "server": {"log": "off"}}
    watch = {"authorization": f"Bearer {SECRETS['watch']}"}
    try:
        async with (
            standing(folder, replicas=1, gateways=0) as rig,
            httpx.AsyncClient(trust_env=False, timeout=10.0, headers=watch) as client,
        ):
            for _ in range(3):
                await rig.add_gateway(config, wait=False)
            stage = Stage(rig, redis, client)
            await eventually(stage.all_up, "the replica is up everywhere")
            await eventually(stage.all_joined, "the gateways have heard of each other")
            yield stage
    finally:
        redis.kill()


def all_results(loads: list[Load]) -> list[Result]:
    results = [one for load in loads for one in load.results]
    statuses = Counter(one.status for one in results)
    assert set(statuses) == {200, 429}, statuses
    return results


def due(results: list[Result]) -> float:
    """What one gateway would have let in: a minute's worth, and what came back since."""
    sent = [one.sent_at for one in results]
    return PER_MINUTE * (1 + (max(sent) - min(sent)) / 60)


@pytest.mark.parametrize("limit", LIMITS)
async def test_24_one_key_at_three_gateways(limit: str, tmp_path: Path, figures: Figures) -> None:
    async with three_gateways(tmp_path, limit) as stage:
        async with stage.under_load(UNEVEN) as loads:
            await asyncio.sleep(span(40.0, 20.0))
        results = all_results(loads)
    let_in, one = sum(result.ok for result in results), due(results)
    off = let_in / one - 1
    measured = f"{let_in} of {len(results)} requests let in, one gateway {one:.0f} ({off:+.1%})"
    figures.record(24, f"{limit} per minute of a key at three gateways", measured, "within 5 %", abs(off) <= TARGET)
    assert abs(off) <= TARGET


async def test_13_limits_without_redis(tmp_path: Path, figures: Figures) -> None:
    """O-24: killed under load; each gateway lets in its share, and all of them no more than the limit."""
    async with three_gateways(tmp_path, "requests") as stage:
        async with stage.under_load((20.0, 20.0, 20.0)) as loads:
            await asyncio.sleep(3.0)
            stage.redis.kill()
            await eventually(stage.none_joined, "all have noticed")
            await asyncio.sleep(span(15.0, 8.0))
            stage.redis.start()
            began = time.monotonic()
            await eventually(stage.all_joined, "the view is shared again")
            back = time.monotonic() - began
            await asyncio.sleep(span(10.0, 5.0))
        results = all_results(loads)
        shares = [sum(one.ok for one in load.results) for load in loads]
    let_in, one = sum(result.ok for result in results), due(results)
    off = let_in / one - 1
    measured = f"{let_in} let in, one gateway {one:.0f} ({off:+.1%}); nothing but 200 and 429; back after {back:.1f} s"
    met = abs(off) <= TARGET and back <= TARGET_BACK_SECONDS
    figures.record(13, "limit of a key at three gateways, Redis killed", measured, "within 5 %; back within 5 s", met)
    assert off <= TARGET
    assert min(shares) > 0.2 * let_in
