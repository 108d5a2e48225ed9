"""What the tests of connections share: a gateway process before replicas of the test's own loop, its memory, and what
normal requests pay while something else goes on."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.chaos.openloop import Load, Traffic, percentile
from tests.chaos.rig import Config, GatewayProcess, Process, ScriptedReplica, eventually

KIB = 1024
MIB = 1024 * 1024


class GatewayUnderTest(GatewayProcess):
    async def until_up(self, replicas: int) -> None:
        async def up() -> bool:
            return (await self.metrics()).total("warmlane_replica_state", state="up") >= replicas

        await eventually(up, f"{replicas} replicas are up")

    async def close_client(self) -> None:
        """Give the connection back that `get` keeps; it is opened again when needed."""
        await self._client.aclose()
        self._client = httpx.AsyncClient(trust_env=False, timeout=10.0)

    def forget_peak(self) -> int:
        """From here on the peak counts; returns what is resident now."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")
        return self.memory_bytes()

    def peak_bytes(self) -> int:
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * KIB  # type: ignore[index]


@contextlib.asynccontextmanager
async def gateway_before(folder: Path, config: Config, *urls: str) -> AsyncIterator[GatewayUnderTest]:
    gateway = GatewayUnderTest("gateway", folder, config, urls)
    try:
        await gateway.start()
        await gateway.until_up(len(urls))
        yield gateway
        assert gateway.running, "the gateway has ended"
    finally:
        await gateway.close()


@contextlib.asynccontextmanager
async def replica_process(folder: Path) -> AsyncIterator[ScriptedReplica]:
    """For normal traffic: a process of its own, which answers at once."""
    replica = ScriptedReplica("replica", folder)
    try:
        await replica.start()
        await replica.behave(first_byte_seconds=0.005, tokens=1)
        yield replica
    finally:
        if replica.running:
            replica.kill()


@dataclass(frozen=True)
class Cost:
    """What whole answers took through the gateway and directly, asked by turns."""

    through: list[float]
    direct: list[float]
    failed: int

    @property
    def added_p99_ms(self) -> float:
        return 1_000 * (percentile(self.through, 0.99) - percentile(self.direct, 0.99))

    @property
    def added_p50_ms(self) -> float:
        return 1_000 * (percentile(self.through, 0.5) - percentile(self.direct, 0.5))

    def __str__(self) -> str:
        return f"added p50 {self.added_p50_ms:.1f} ms, p99 {self.added_p99_ms:.1f} ms of {len(self.through)}"


async def normal_traffic(gateway: Process, replica: Process, seconds: float, rate: float = 60.0) -> Cost:
    """Open-loop requests that are not streamed, by turns through the gateway and directly to the replica."""
    turns = [gateway.url, replica.url]
    asked = iter(range(10**9))
    load = Load(lambda: turns[next(asked) % 2], Traffic(rate=rate, stream_share=0.0, tokens=1))
    results = await load.run(seconds)
    times: dict[bool, list[float]] = {True: [], False: []}
    for one in results:
        if one.end == "whole" and one.status == 200:
            times["x-warmlane-replica" in one.headers].append(one.ended_at - one.sent_at)
    return Cost(times[True], times[False], sum(one.end != "whole" or one.status != 200 for one in results))


class Held(asyncio.Protocol):
    """A client's connection that is only watched: what came, and when it was closed."""

    def __init__(self) -> None:
        self.opened_at = time.monotonic()
        self.closed_at: float | None = None
        self.received = b""
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.opened_at = time.monotonic()

    def data_received(self, data: bytes) -> None:
        self.received += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed_at = time.monotonic()

    @property
    def lasted(self) -> float:
        assert self.closed_at is not None
        return self.closed_at - self.opened_at


async def hold(port: int, count: int, *, at_once: int = 200, first: bytes = b"") -> list[Held]:
    """So many connections, each begun with these bytes."""
    loop = asyncio.get_running_loop()
    held: list[Held] = []
    while len(held) < count:
        wave = range(min(at_once, count - len(held)))
        opened = await asyncio.gather(*(loop.create_connection(Held, "127.0.0.1", port) for _ in wave))
        for _, one in opened:
            if first:
                one.transport.write(first)
            held.append(one)
    return held
