"""Replicas that announce themselves: what counts and for how long, whatever is in Redis and whatever happens to it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from redis.asyncio import Redis
from scripted_replica import wait_until

from gateway.core.model import ModelCard, ModelsListed, ReplicaAdded, ReplicaId
from gateway.feeds import announcements, announcer
from gateway.feeds.addresses import Allowlist
from gateway.feeds.announced import Announced
from gateway.feeds.announcements import LEASE_SECONDS, MAX_SKEW_SECONDS, PURPOSE, REFUSALS, Announcement, Ledger
from gateway.feeds.announcer import Announcer
from gateway.feeds.discovery import Discovery
from gateway.feeds.fetch import FetchFailed
from gateway.feeds.registry import Registry
from gateway.feeds.replicas import Replicas
from gateway.feeds.sealing import Seal, Sealer
from gateway.series import AnnouncementSeries
from tests.redis_server import RedisServer, redis_server

SECRET, FLEET = b"a secret of the fleet", "warmlane"
CONFIGURED, A, B = (ReplicaId(f"http://10.0.0.{n}:8000") for n in (1, 7, 8))
SET = announcements.set_key(FLEET)


def nobody(replica: ReplicaId) -> bool:
    return False


# -- what counts, without Redis


class Replica:
    """Makes announcements as a replica does."""

    def __init__(self, url: str = A, *, secret: bytes = SECRET, fleet: str = FLEET, purpose: str = PURPOSE) -> None:
        self.url = url
        self.sealer = Sealer(Seal(secret, purpose, fleet))
        self.name = self.sealer.name.hex()

    def says(self, at: float = 1_000.0, **more: object) -> dict[str, bytes]:
        message = Announcement(at, **{"url": self.url, **more})
        return {self.name: self.sealer.seal(msgspec.msgpack.encode(message))}


@pytest.fixture
def refused() -> list[str]:
    return []


@pytest.fixture
def ledger(refused) -> Ledger:
    return Ledger(SECRET, FLEET, refused.append)


def test_it_counts_until_its_lease_runs_out(ledger):
    said = Replica().says(models=("m",), prefill_rate=4e4)
    ledger.read(said, 0.0, 1_000.0)
    for now in (0.0, LEASE_SECONDS - 0.1):
        ledger.read(said, now, 1_000.0 + now)
        assert ledger.announced(now, nobody) == {A: Announcement(1_000.0, A, ("m",), 4e4)}
    ledger.read(said, LEASE_SECONDS, 1_000.0)
    assert ledger.announced(LEASE_SECONDS, nobody) == {}, "the same one again renews nothing"


def test_a_new_one_renews_it_and_a_goodbye_ends_it_at_once(ledger, refused):
    replica = Replica()
    first = replica.says()
    ledger.read(first, 0.0, 1_000.0)
    ledger.read(replica.says(), 10.0, 1_000.0)
    assert list(ledger.announced(20.0, nobody)) == [A]
    ledger.read(replica.says(is_leaving=True), 20.0, 1_000.0)
    assert ledger.announced(20.0, nobody) == {}
    ledger.read(first, 21.0, 1_000.0)
    assert (ledger.announced(21.0, nobody), refused) == ({}, ["repeated"])


def test_a_key_that_is_gone_ends_nothing_before_the_lease_does(ledger):
    """A Redis that was emptied, or restarted without its data."""
    ledger.read(Replica().says(), 0.0, 1_000.0)
    ledger.read({}, 2.0, 1_000.0)
    assert list(ledger.announced(2.0, nobody)) == [A]
    assert ledger.announced(LEASE_SECONDS, nobody) == {}


def test_who_serves_outlives_his_lease(ledger):
    """A Redis that takes nothing more (it is full) must not take out a fleet."""
    ledger.read(Replica().says(), 0.0, 1_000.0)
    assert list(ledger.announced(1_000.0, lambda url: url == A)) == [A]
    assert ledger.announced(1_001.0, nobody) == {}
    assert ledger.announced(1_002.0, lambda url: True) == {}, "once out, only a new announcement brings it back"


def test_no_lease_runs_out_while_nothing_can_be_read(ledger):
    ledger.read(Replica().says(), 0.0, 1_000.0)
    ledger.forgive(500.0)
    assert list(ledger.announced(500.0 + LEASE_SECONDS - 0.1, nobody)) == [A]


def test_a_restarted_replica_does_not_go_with_its_predecessor(ledger):
    before, after = Replica(), Replica()
    ledger.read(before.says(1_000.0, models=("old",)), 0.0, 1_000.0)
    ledger.read(before.says(is_leaving=True) | after.says(1_001.0, models=("new",)), 1.0, 1_001.0)
    assert ledger.announced(1.0, nobody)[A].models == ("new",)


def test_the_longest_that_a_replica_makes_is_taken(ledger, refused):
    names = tuple(chr(0x1F600 + number) * announcements.MAX_NAME for number in range(announcements.MAX_MODELS))
    ledger.read(Replica("http://" + "a" * 63 + ":8000").says(models=names), 0.0, 1_000.0)
    assert (len(ledger.announced(0.0, nobody)), refused) == (1, [])


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (Replica(secret=b"another").says(), "forged"),
        (Replica(fleet="other").says(), "forged"),
        (Replica(purpose="view").says(), "forged"),
        (Replica().says(1_000.0 - MAX_SKEW_SECONDS - 1), "expired"),
        (Replica().says(1_000.0 + MAX_SKEW_SECONDS + 1), "expired"),
        (Replica().says(float("nan")), "expired"),
        (Replica("http://user:pw@10.0.0.7").says(), "malformed"),
        (Replica("ftp://10.0.0.7").says(), "malformed"),
        (Replica().says(prefill_rate=-1.0), "malformed"),
        (Replica().says(models=("",)), "malformed"),
        ({Replica().name: next(iter(Replica().says().values()))}, "malformed"),  # under another's key
        ({Replica().name: b"nonsense"}, "malformed"),
        ({Replica().name: b"WL2" + bytes(100_000)}, "malformed"),
    ],
)
def test_what_is_not_ours_is_refused_and_counted_once(ledger, refused, said, reason):
    """O-23."""
    for now in (0.0, 2.0):
        ledger.read(said, now, 1_000.0)
    assert (ledger.announced(2.0, nobody), refused) == ({}, [reason])


# -- through a real Redis, into a registry


class World:
    """The models of replicas that answer, and the addresses that names have."""

    def __init__(self) -> None:
        self.models: dict[str, set[str]] = {}
        self.serving: set[str] = set()

    async def resolve(self, host: str, port: int) -> frozenset[str]:
        return frozenset({host})

    async def names(self, url: str) -> tuple[str, ...]:
        return tuple(sorted(self.models.get(url, ())))

    async def cards(self, replica: ReplicaId) -> tuple[ModelCard, ...]:
        if replica not in self.models:
            raise FetchFailed("nobody is there")
        return tuple(map(ModelCard, sorted(self.models[replica])))


class Gateway:
    def __init__(self, world: World, url: str, facts) -> None:
        self.replicas = Replicas()
        self.discovery = Discovery(self.replicas, facts.append, static={CONFIGURED: None})
        self.registry = Registry(
            Allowlist(["10.0.0.0/8"]),
            self.discovery.note_registered,
            self.discovery.is_configured,
            world.cards,
            resolve=world.resolve,
        )
        self.discovery.note_registered({})
        self.registry.heard(ModelsListed(CONFIGURED, (ModelCard("configured"),)))
        self.series = AnnouncementSeries(REFUSALS)
        self.announced = Announced(
            self.registry.take_announced,
            lambda url: url in world.serving,
            self.series,
            url=url,
            fleet=FLEET,
            secret=SECRET,
            interval_seconds=0.02,
            clock=time.monotonic,
        )

    def problems(self) -> list[str]:
        return [one.problem or next(c.problem for c in one.candidates.values()) for one in self.registry]


@pytest.fixture
def server(tmp_path: Path) -> AsyncIterator[RedisServer]:
    with redis_server(tmp_path) as server:
        yield server


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def gateway(world, server, facts, running) -> Gateway:
    gateway = Gateway(world, server.url, facts)
    running(gateway.announced.run())
    return gateway


@contextlib.asynccontextmanager
async def announcing(world: World, url: str, *replicas: str, secret: bytes = SECRET) -> AsyncIterator[Announcer]:
    one = Announcer(url, FLEET, secret, world.names)
    for replica in replicas:
        one.announce(replica, 4e4)
    job = asyncio.create_task(one.run())
    try:
        yield one
    finally:
        job.cancel()
        await asyncio.gather(job, return_exceptions=True)


async def test_one_that_announces_itself_comes_in_and_goes_when_it_says_so(world, server, gateway, facts):
    world.models = {A: {"m"}, B: {"m"}}
    async with announcing(world, server.url, A, B) as one, Redis.from_url(server.url) as redis:
        await wait_until(lambda: set(gateway.replicas) == {CONFIGURED, A, B})
        assert ReplicaAdded(A, 4e4) in facts
        keys = [key async for key in redis.scan_iter()]
        stored = b"".join([await redis.get(key) for key in keys if key != SET.encode()])
        assert b"10.0.0" not in stored
        assert all([await redis.pttl(key) > 0 for key in keys])
        one.withdraw(B)
        await wait_until(lambda: set(gateway.replicas) == {CONFIGURED, A})
    await wait_until(lambda: list(gateway.replicas) == [CONFIGURED])
    assert not any(gateway.series.refused.values())


async def test_one_that_dies_goes_after_its_lease(world, server, gateway, monkeypatch):
    monkeypatch.setattr(announcements, "LEASE_SECONDS", 0.3)
    world.models = {A: {"m"}}
    replica = Replica()
    async with Redis.from_url(server.url) as redis:
        await redis.sadd(SET, replica.name)
        key = announcements.replica_key(FLEET, replica.name)
        await redis.set(key, replica.says(time.time())[replica.name], px=300)
        await wait_until(lambda: A in gateway.replicas)
        await wait_until(lambda: A not in gateway.replicas)
        assert await redis.scard(SET) == 0, "and nothing is left of it"


async def test_what_others_serve_is_not_taken_over(world, server, gateway):
    """O-23: the checks of a registration through the admin listener."""
    world.models = {A: {"configured"}, B: {"m"}, "http://192.168.0.1:8000": {"m"}}
    async with announcing(world, server.url, A, B, "http://192.168.0.1:8000", "http://10.0.0.9:8000"):
        await wait_until(lambda: B in gateway.replicas and len(gateway.problems()) == 4)
        await wait_until(lambda: all("was not asked" not in one for one in gateway.problems()))
        assert set(gateway.replicas) == {CONFIGURED, B}
        problems = "; ".join(gateway.problems())
        assert "lists models that others serve: 'configured'" in problems
        assert "192.168.0.1 is outside the networks of admin.allow" in problems
        assert "does not list its models: nobody is there" in problems


@pytest.mark.parametrize("first", ["announced", "registered"])
async def test_between_announced_and_registered_the_first_keeps_its_models(world, server, gateway, first):
    """O-23: nobody pushes out who is in."""
    world.models = {A: {"m"}, B: {"m"}}
    if first == "registered":
        await gateway.registry.register(B)
    async with announcing(world, server.url, A):
        await wait_until(lambda: gateway.registry.addresses(A) and (A in gateway.replicas) == (first == "announced"))
        if first == "announced":
            await gateway.registry.register(B)
        await wait_until(lambda: any("lists models that others serve: 'm'" in one for one in gateway.problems()))
        assert set(gateway.replicas) == {CONFIGURED, A if first == "announced" else B}


async def test_another_server_at_its_address_stays_out(world, server, gateway):
    """An address that was given to somebody else: it lists none of the models that were announced."""
    replica, redis = Replica(), Redis.from_url(server.url)
    world.models = {A: {"something else"}}
    async with redis:
        await redis.set(
            announcements.replica_key(FLEET, replica.name), replica.says(time.time(), models=("m",))[replica.name]
        )
        await redis.sadd(SET, replica.name)
        await wait_until(lambda: any("names: 'm'" in one for one in gateway.problems()))
    assert list(gateway.replicas) == [CONFIGURED]


async def test_forgers_add_nobody(world, server, gateway):
    """O-23: neither with another secret, nor with what was true once, nor by filling the set."""
    world.models = {A: {"m"}}
    async with Redis.from_url(server.url) as redis:
        await redis.sadd(SET, *(f"nonsense {n}" for n in range(2_000)), b"\xff\x00")
        async with announcing(world, server.url, A, secret=b"another"):
            await redis.delete(SET)
            await wait_until(lambda: gateway.series.refused["forged",] == 1)
    assert list(gateway.replicas) == [CONFIGURED]


@pytest.mark.parametrize("fault", ["killed", "frozen", "emptied", "full"])
async def test_whatever_happens_to_redis_the_last_set_stays(world, server, gateway, monkeypatch, fault):
    """O-24: no replica that serves is lost, and changes count again afterwards."""
    monkeypatch.setattr(announcer, "REFRESH_SECONDS", 0.1)
    monkeypatch.setattr(announcements, "LEASE_SECONDS", 0.5)
    world.models, world.serving = {A: {"m"}, B: {"m"}}, {A}
    async with announcing(world, server.url, A) as one:
        await wait_until(lambda: A in gateway.replicas)
        if fault == "killed":
            server.kill()
        elif fault == "frozen":
            server.freeze()
        async with Redis.from_url(server.url) as redis:
            if fault == "emptied":
                await redis.flushall()
            elif fault == "full":
                await redis.config_set("maxmemory", "1")
            else:
                await wait_until(lambda: gateway.series.failing)
            one.announce(B, None)
            for _ in range(8):
                await asyncio.sleep(0.1)
                assert A in gateway.replicas
            if fault == "killed":
                server.start()
            elif fault == "frozen":
                server.thaw()
            elif fault == "full":
                await redis.config_set("maxmemory", "0")
            await wait_until(lambda: set(gateway.replicas) == {CONFIGURED, A, B})
            assert not gateway.series.failing
