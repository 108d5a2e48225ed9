"""What keys spend, told through a real Redis or Valkey (O-24, and the forged entry of O-23)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from gateway.core.model import ProbeAnswered, ReplicaAdded, ReplicaId
from gateway.core.router import Router
from gateway.core.settings import RoutingSettings
from gateway.feeds.peer_entries import Sender
from gateway.feeds.peers import FIELD, Peers
from gateway.feeds.sealing import RefusedFor
from gateway.fleet_limits import FleetLimits, KeyUse
from gateway.keys import Key
from gateway.limits import Caller, OverLimit
from gateway.series import PeerSeries
from tests.feeds.test_peers import KEY, SECRET, until
from tests.redis_server import RedisServer, redis_server

PER_MINUTE = 60
REPLICA = ReplicaId("http://a:8000")


class Member:
    """One gateway with one key, without its clients."""

    def __init__(self, url: str, secret: bytes = SECRET) -> None:
        now = time.monotonic()
        router = Router(RoutingSettings(block_bytes=512))
        router.observe(ReplicaAdded(REPLICA), now)
        router.observe(ProbeAnswered(REPLICA, True), now)
        self.limits = FleetLimits(gateways=True, processes=False)
        self.caller = Caller(Key("alice", bytes(32), "acme", requests_per_minute=PER_MINUTE), now, self.limits)
        self.series = PeerSeries([reason.value for reason in RefusedFor])
        self.peers = Peers(
            router,
            lambda: None,
            self.series,
            url=url,
            name="warmlane",
            secret=secret,
            max_bytes=2**20,
            clock=time.monotonic,
            limits=self.limits,
        )

    def ask(self, times: int) -> int:
        """How many of so many requests are let in."""
        let_in = 0
        for _ in range(times):
            with contextlib.suppress(OverLimit):
                self.caller.enter(time.monotonic()).leave(0, time.monotonic())
                let_in += 1
        return let_in

    def spent(self) -> float:
        """Of a minute's worth, by what it knows."""
        bucket = self.caller._requests
        assert bucket is not None
        return bucket.wait_seconds(PER_MINUTE, time.monotonic()) * PER_MINUTE / 60

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Member]:
        job = asyncio.create_task(self.peers.run())
        try:
            yield self
        finally:
            assert not job.done()
            job.cancel()
            await asyncio.gather(job, return_exceptions=True)

    @property
    def is_joined(self) -> bool:
        return not self.limits.is_alone


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as server:
        yield server


async def test_what_a_key_spent_at_one_comes_off_at_the_other(server: RedisServer) -> None:
    async with Member(server.url).running() as one, Member(server.url).running() as two:
        await until(lambda: one.is_joined and two.is_joined, "both have joined")
        assert one.ask(50) == 50
        await until(lambda: two.spent() > 40, "the second has heard of it")
        assert two.ask(50) < 20
        async with Redis.from_url(server.url) as redis:
            stored = b"".join(fields[FIELD] for _, fields in await redis.xrange(KEY))
        assert stored
        assert b"alice" not in stored
    async with Member(server.url).running() as late:
        await until(lambda: late.spent() > 40, "who starts later reads of it")


async def test_nobody_without_the_secret_spends_for_a_key(server: RedisServer) -> None:
    """O-23."""
    async with Member(server.url).running() as one, Redis.from_url(server.url) as redis:
        await until(lambda: one.is_joined, "it has joined")
        await redis.xadd(KEY, {FIELD: Sender(b"another", "warmlane").entry([], [KeyUse("alice", 1_000, 0)])})
        sender = Sender(SECRET, "warmlane")
        entry = sender.entry([], [KeyUse("alice", 5, 0)])
        for _ in range(3):
            await redis.xadd(KEY, {FIELD: entry})
        await redis.xadd(KEY, {FIELD: sender.entry([], [KeyUse("alice", 10**10, 0)])})
        await until(lambda: sum(one.series.refused.values()) == 4, "all of it is refused")
        assert one.series.refused == {("malformed",): 1, ("forged",): 1, ("repeated",): 2}
        assert 0 < one.spent() <= 5


async def test_killed_and_back(tmp_path: Path) -> None:
    """O-24: meanwhile each lets in its half, and then both know what was spent."""
    server = RedisServer(tmp_path)
    server.start()
    try:
        async with Member(server.url).running() as one, Member(server.url).running() as two:
            await until(lambda: len(one.series.heard) == len(two.series.heard) == 1, "they have heard of each other")
            server.kill()
            await until(lambda: not one.is_joined and not two.is_joined, "both have noticed")
            assert (one.limits.share, two.limits.share) == (0.5, 0.5)
            assert one.ask(40) == 30
            assert two.ask(20) == 20
            server.start()
            await until(lambda: one.is_joined and two.is_joined, "both have joined", 5.0)
            await until(lambda: one.spent() > 35 and two.spent() > 35, "both know of all")
            assert one.spent() == pytest.approx(two.spent(), abs=1.0)
    finally:
        server.kill()
