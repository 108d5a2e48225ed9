"""The gateway leaves: SIGTERM under load, a second signal, two gateways replaced in turn (test 12)."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx

from tests.chaos.conftest import Figures
from tests.chaos.openloop import Load, Traffic, ask, ends
from tests.chaos.rig import GatewayProcess, Rig, eventually, span, standing

DELAY_SECONDS = 2.0
LOOK_SECONDS = 0.25
"""How often the load balancer of these tests looks at `/ready`."""


class Balancer:
    """What stands in front of two gateways: requests go in turn to those that were ready at the last look."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._ready = list(rig.gateways)
        self._turn = 0

    def choose(self) -> str:
        self._turn += 1
        return self._ready[self._turn % len(self._ready)].url

    def sends_to(self, gateway: GatewayProcess) -> bool:
        return gateway in self._ready

    @contextlib.asynccontextmanager
    async def looking(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._look())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _look(self) -> None:
        while True:
            ready = [gateway for gateway in self._rig.gateways if await is_ready(gateway)]
            self._ready = ready or self._ready
            await asyncio.sleep(LOOK_SECONDS)


async def is_ready(gateway: GatewayProcess) -> bool:
    try:
        return gateway.running and (await gateway.get("/ready")).status_code == 200
    except httpx.HTTPError:
        return False


async def test_12_sigterm_under_load(tmp_path: Path, figures: Figures) -> None:
    """Streams that end within the grace are whole."""
    tokens = int(span(600, 60))
    length, grace = tokens * 0.1, tokens * 0.1 + 10.0
    config = {"server": {"drain_delay_seconds": DELAY_SECONDS, "drain_seconds": grace}}
    async with standing(tmp_path, config=config) as rig:
        for replica in rig.replicas:
            await replica.behave(tokens=tokens, token_seconds=0.1)
        streams = Load(rig.gateway.url, Traffic(rate=50.0, stream_share=1.0, tokens=tokens), limit_seconds=grace + 30.0)
        async with streams.running():
            await asyncio.sleep(2.0)
            rig.gateway.send(signal.SIGTERM)
            signalled_at = time.monotonic()
            unready = await eventually(lambda: is_draining(rig.gateway), "it is not ready", 5.0)
            await asyncio.sleep(DELAY_SECONDS - 0.5 - (time.monotonic() - signalled_at))
        inside = list(streams.results)
        took = time.monotonic() - signalled_at + await rig.gateway.ended(grace)
        refused = await ask(rig.gateway.url, 0, streams.traffic)
    accepted = sum(r.sent_at > signalled_at for r in inside)
    bad = [r for r in inside if not r.ok]
    figures.record(12, "readiness 503", f"{unready:.2f} s", "<= 1 s", unready <= 1.0)
    figures.record(
        12,
        f"streams of {length:g} s, SIGTERM",
        f"{len(bad)} of {len(inside)} cut, {accepted} of them accepted in the announced {DELAY_SECONDS:g} s; "
        f"exit after {took:.1f} s",
        "0 cut inside the grace; exit <= grace + 5 s",
        not bad and accepted > 0 and took <= grace + 5.0,
    )
    assert unready <= 1.0
    assert not bad, ends(bad)
    assert accepted > 0
    assert refused.end == "refused"
    assert rig.gateway.exit_code == 0
    assert took <= DELAY_SECONDS + grace + 5.0


async def is_draining(gateway: GatewayProcess) -> bool:
    return (await gateway.get("/ready")).status_code == 503


async def test_12_what_outlives_the_grace_is_cut_and_recorded(tmp_path: Path, figures: Figures) -> None:
    grace = 2.0
    config = {"server": {"drain_delay_seconds": 0.5, "drain_seconds": grace}}
    async with standing(tmp_path, config=config) as rig:
        for replica in rig.replicas:
            await replica.behave(tokens=600, token_seconds=0.1)
        load = Load(rig.gateway.url, Traffic(rate=20.0, stream_share=1.0, tokens=600))
        async with load.running():
            await asyncio.sleep(1.0)
            rig.gateway.send(signal.SIGTERM)
            signalled_at = time.monotonic()
            await asyncio.sleep(0.3)
        await rig.gateway.ended()
        took = time.monotonic() - signalled_at
        records = rig.gateway.log_records()
    outcomes = {record["outcome"] for record in records}
    figures.record(
        12,
        f"grace of {grace:g} s is over",
        f"exit after {took:.1f} s; {len(records)} of {len(load.results)} recorded, as {', '.join(sorted(outcomes))}",
        "exit <= grace + 5 s, each recorded",
        took <= grace + 5.0 and len(records) == len(load.results),
    )
    assert took <= grace + 5.0
    assert outcomes == {"stopped"}
    assert len(records) == len(load.results)
    assert {r.end for r in load.results} <= {"cut"}, ends(load.results)


async def test_12_a_second_signal_ends_it(tmp_path: Path, figures: Figures) -> None:
    config = {"server": {"drain_delay_seconds": 30.0, "drain_seconds": 60.0}}
    async with standing(tmp_path, config=config) as rig:
        for replica in rig.replicas:
            await replica.behave(tokens=600, token_seconds=0.1)
        load = Load(rig.gateway.url, Traffic(rate=50.0, stream_share=1.0, tokens=600))
        async with load.running():
            await asyncio.sleep(1.0)
            rig.gateway.send(signal.SIGTERM)
            await eventually(lambda: is_draining(rig.gateway), "it is not ready", 5.0)
            rig.gateway.send(signal.SIGTERM)
            took = await rig.gateway.ended(10.0)
    figures.record(12, "second signal", f"exit after {took:.2f} s", "<= 1 s", took <= 1.0)
    assert took <= 1.0
    assert rig.gateway.exit_code == 0


async def test_12_rolling_two_gateways(tmp_path: Path, figures: Figures) -> None:
    config = {"server": {"drain_delay_seconds": DELAY_SECONDS, "drain_seconds": 20.0}}
    async with standing(tmp_path, gateways=2, config=config) as rig:
        balancer = Balancer(rig)
        load = Load(balancer.choose)
        async with balancer.looking(), load.running():
            await asyncio.sleep(2.0)
            for gateway in rig.gateways:
                gateway.send(signal.SIGTERM)
                await gateway.ended(30.0)
                await gateway.start()
                await eventually(lambda gateway=gateway: balancer.sends_to(gateway), "it is back in service")
                await asyncio.sleep(1.0)
    bad = [r for r in load.results if not r.ok]
    figures.record(
        12, "two gateways replaced in turn", f"{len(bad)} errors of {len(load.results)}", "0 errors", not bad
    )
    assert not bad, ends(bad)
