"""Gateways that share their view through a real Redis or Valkey (O-24, and the forged entry of O-23)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from redis.asyncio import Redis

from gateway.core.model import BlockHash, PeerReported, ProbeAnswered, ReplicaAdded, ReplicaId, RouteRequest
from gateway.core.router import Router
from gateway.core.settings import RoutingSettings
from gateway.feeds.peer_entries import Receiver, Sender
from gateway.feeds.peers import FIELD, Peers, StreamMarks
from gateway.feeds.sealing import RefusedFor
from gateway.series import PeerSeries
from tests.redis_server import RedisServer, redis_server

A, B = ReplicaId("http://a:8000"), ReplicaId("http://b:8000")
SECRET = b"a secret of the fleet"
KEY = "warmlane:view:1"


class Member:
    """One gateway without its clients."""

    def __init__(self, url: str, *, secret: bytes = SECRET, max_bytes: int = 2**20) -> None:
        self.router = Router(RoutingSettings(block_bytes=512))
        for replica in (A, B):
            self.router.observe(ReplicaAdded(replica), time.monotonic())
            self.router.observe(ProbeAnswered(replica, True), time.monotonic())
        self.series = PeerSeries([reason.value for reason in RefusedFor])
        self.heard = 0
        self.peers = Peers(
            self.router,
            self.note_heard,
            self.series,
            url=url,
            name="warmlane",
            secret=secret,
            max_bytes=max_bytes,
            clock=time.monotonic,
        )

    def note_heard(self) -> None:
        self.heard += 1

    def send(self, first: int, blocks: int = 20) -> ReplicaId:
        """One more request, which stays in flight."""
        now = time.monotonic()
        decision = self.router.decide(prompt(first, blocks), now)
        self.router.start(decision, now)
        return decision.replica

    def cached_tokens(self, first: int, replica: ReplicaId, blocks: int = 20) -> float:
        decision = self.router.decide(prompt(first, blocks), time.monotonic())
        return next(view.cached_tokens for view, _ in decision.ranking if view.replica == replica)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Member]:
        job = asyncio.create_task(self.peers.run())
        try:
            yield self
        finally:
            assert not job.done()
            job.cancel()
            await asyncio.gather(job, return_exceptions=True)


def prompt(first: int, blocks: int = 20) -> RouteRequest:
    return RouteRequest(blocks=[BlockHash(first * 100_000 + i) for i in range(blocks)], length=512 * blocks)


async def until(condition: Callable[[], bool], what: str, seconds: float = 15.0) -> float:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, f"waited in vain until {what}"
        await asyncio.sleep(0.01)
    return time.monotonic() - began


@pytest.fixture
def server(tmp_path: Path) -> AsyncIterator[RedisServer]:
    with redis_server(tmp_path) as server:
        yield server


async def test_what_one_has_sent_the_other_knows(server: RedisServer) -> None:
    async with Member(server.url).running() as one, Member(server.url).running() as two:
        replica = one.send(1)
        await until(lambda: two.cached_tokens(1, replica) > 0, "the second knows the prefix")
        view = next(v for v, _ in two.router.decide(prompt(2), time.monotonic()).ranking if v.replica == replica)
        assert view.in_flight == 1
        assert view.pending_tokens > 0
        one.router.own("resp_1", replica, "tenant")
        await until(lambda: two.router.owner("resp_1") == replica, "the second knows the stored response")
        assert two.router.is_foreign("resp_1", "another")
        assert two.heard
        assert two.series.heard


async def test_nothing_of_a_prompt_and_no_name_is_in_redis(server: RedisServer) -> None:
    async with Member(server.url).running() as one, Member(server.url).running() as two:
        replica = one.send(7)
        one.router.own("resp_secret", replica, "tenant_secret")
        await until(lambda: two.router.owner("resp_secret") is not None, "the second knows the stored response")
    async with Redis.from_url(server.url) as redis:
        stored = b"".join(fields[FIELD] for _, fields in await redis.xrange(KEY))
    for hidden in (b"resp_secret", b"tenant_secret", b"http://", (700_000).to_bytes(8, "little")):
        assert hidden not in stored


async def test_a_gateway_that_starts_knows_what_was_sent_before(server: RedisServer) -> None:
    """Warm restart: the stream is the snapshot. Load in it is old, and is not believed."""
    async with Member(server.url).running() as one, Member(server.url).running() as witness:
        places = {first: one.send(first) for first in range(40)}
        await until(lambda: all(witness.cached_tokens(f, r) for f, r in places.items()), "all is in the stream")
    async with Member(server.url).running() as late:
        await until(lambda: all(late.cached_tokens(f, r) > 0 for f, r in places.items()), "it has caught up")


@pytest.mark.parametrize("wrong", [b"", b"nonsense", b"WL1" + bytes(100), b"x" * 2_000_000])
async def test_what_is_no_entry_is_refused(server: RedisServer, wrong: bytes) -> None:
    """O-23: a forged Redis entry."""
    async with Member(server.url).running() as one, Redis.from_url(server.url) as redis:
        await until(lambda: one.series.connected, "it is connected")
        await redis.xadd(KEY, {FIELD: wrong})
        await until(lambda: sum(one.series.refused.values()) == 1, "it is refused")
        assert one.series.connected


async def test_an_entry_with_another_secret_or_an_old_number_is_refused(server: RedisServer) -> None:
    """O-23: nobody without the secret steers requests, nor with an entry that was true once."""
    async with Member(server.url).running() as one, Member(server.url, secret=b"other").running() as stranger:
        replica = stranger.send(3)
        await until(lambda: one.series.refused["forged",] > 0, "it is refused")
        assert one.cached_tokens(3, replica) == 0.0
        assert not one.series.heard
        sender = Sender(SECRET, "warmlane")
        entry = sender.entry([])
        async with Redis.from_url(server.url) as redis:
            await redis.xadd(KEY, {FIELD: entry})
            await redis.xadd(KEY, {FIELD: entry})
        await until(lambda: one.series.refused["repeated",] == 1, "the second time it is refused")


async def test_a_key_of_another_type_is_a_failure_like_any_other(server: RedisServer) -> None:
    async with Redis.from_url(server.url) as redis:
        await redis.set(KEY, "taken")
        async with Member(server.url).running() as one:
            await until(lambda: one.series.failures > 0, "it fails")
            assert not one.series.connected
            await redis.delete(KEY)
            await until(lambda: one.series.connected, "it works")


async def shares_again(one: Member, two: Member, first: int) -> float:
    """Seconds until what is sent now arrives."""
    began = time.monotonic()
    replica = one.send(first)
    await until(lambda: two.cached_tokens(first, replica) > 0, "the view is shared")
    return time.monotonic() - began


async def test_absent_at_start_and_killed(tmp_path: Path) -> None:
    """O-24: it comes later, goes, comes back empty, and stays where it was."""
    server = RedisServer(tmp_path)
    async with Member(server.url).running() as one, Member(server.url).running() as two:
        await until(lambda: one.series.failures > 0 and two.series.failures > 0, "both have noticed")
        one.send(1)
        for round in range(2):
            server.start()
            try:
                await shares_again(one, two, 10 + round)
            finally:
                server.kill()
            await until(lambda: not one.series.connected and not two.series.connected, "both have noticed")


async def test_frozen(server: RedisServer) -> None:
    """O-24: it accepts connections and says nothing."""
    async with Member(server.url).running() as one, Member(server.url).running() as two:
        await shares_again(one, two, 1)
        server.freeze()
        await until(lambda: not one.series.connected and not two.series.connected, "both have noticed")
        assert one.router.cut_off
        failures = one.series.failures
        replica = one.send(2)
        await until(lambda: one.series.failures > failures, "another round fails")
        server.thaw()
        await until(lambda: two.cached_tokens(2, replica) > 0, "what was sent meanwhile is told")
        await shares_again(one, two, 3)
        assert not one.router.cut_off


async def test_it_ends_when_it_is_cancelled_at_any_moment(server: RedisServer) -> None:
    """Before Python 3.12 `asyncio.wait_for`, in a client that is given time limits, loses a cancellation now and then:
    a gateway that was told to stop did not."""
    for turns in range(250):
        one = Member(server.url)
        one.send(turns)
        job = asyncio.create_task(one.peers.run())
        for _ in range(turns):
            await asyncio.sleep(0)
        job.cancel()
        await asyncio.wait({job}, timeout=5.0)
        assert job.cancelled(), f"cancelled after {turns} turns of the loop"


async def test_wrong_password(tmp_path: Path) -> None:
    """O-24."""
    with redis_server(tmp_path, "--requirepass", "right") as server:
        right = server.url.replace("redis://", "redis://:right@")
        async with (
            Member(server.url).running() as wrong,
            Member(right).running() as one,
            Member(right).running() as two,
        ):
            await until(lambda: wrong.series.failures > 1, "it fails")
            await shares_again(one, two, 1)
            assert not wrong.series.connected


async def test_out_of_memory(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    """O-24: it refuses what is added, and takes it again when there is room. It is said once, without what was sent."""
    caplog.set_level("INFO", "gateway.feeds.peers")
    async with Member(server.url).running() as one, Member(server.url).running() as two:
        async with Redis.from_url(server.url) as redis:
            await shares_again(one, two, 1)
            await redis.config_set("maxmemory", "1")
            replica = one.send(2)
            await until(lambda: one.series.failures > 1 and two.series.failures > 1, "it fails again")
            said = [record.message for record in caplog.records]
            assert len(said) == 2
            assert all("maxmemory" in line and "WL2" not in line for line in said)
            assert not one.series.connected
            await redis.config_set("maxmemory", "0")
        await until(lambda: two.cached_tokens(2, replica) > 0, "what the failed round had is told again")
        await shares_again(one, two, 3)


async def test_the_stream_stays_below_its_size(server: RedisServer) -> None:
    limit = 2**20
    one, two = Member(server.url, max_bytes=limit), Member(server.url, max_bytes=limit)
    async with one.running(), two.running(), Redis.from_url(server.url) as redis:
        for first in range(60):
            replica = one.send(first, 4_000)
            await until(lambda r=replica, f=first: two.cached_tokens(f, r, 4_000) > 0, "it arrived")
        await shares_again(one, two, 1_000)
        assert limit / 2 < await redis.memory_usage(KEY, samples=0) < limit * 1.25
        assert await redis.ttl(KEY) > 0


def test_a_request_that_hangs_for_weeks_can_be_told_of() -> None:
    """Else every entry of its gateway would be refused from then on."""
    hanging = PeerReported(A, "peer", 1, 9.0, 9.0, head_tokens=9.0, head_seconds=2e6, first_token_seconds=3e6)
    told = Receiver(SECRET, "fleet", b"own").read(Sender(SECRET, "fleet").entry([hanging]))
    assert told is not None
    (fact,) = told.facts
    assert isinstance(fact, PeerReported)
    assert (fact.head_seconds, fact.first_token_seconds) == (1e6, 1e6)


def test_marks_keep_the_latest_bytes() -> None:
    marks = StreamMarks(6_400)
    for number in range(1_000):
        marks.note(b"%d-0" % number, 50)
    assert marks.first is not None
    kept = 1_000 - int(marks.first.partition(b"-")[0])
    assert 6_400 * 0.95 <= kept * 50 <= 6_400
