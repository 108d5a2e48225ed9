"""Who is there: configured, behind a DNS name, gone, moved, and unresolvable."""

from __future__ import annotations

import asyncio
import logging

import pytest
from scripted_replica import wait_until

from gateway.core.model import ReplicaAdded, ReplicaRemoved
from gateway.feeds.discovery import Discovery
from gateway.feeds.replicas import Replicas
from gateway.feeds.sources import Addresses, resolve


class Names:
    """A resolver that answers from a table, and a sleep that lasts until the test moves on by one round."""

    def __init__(self, **addresses: set[str]) -> None:
        self.addresses = addresses
        self.failing: set[str] = set()
        self.rounds = 0
        self._woken = asyncio.Condition()

    async def resolve(self, host: str, port: int) -> frozenset[str]:
        if host in self.failing:
            raise OSError(-2, "Name or service not known")
        return frozenset(self.addresses[host])

    def source(self) -> Addresses:
        return Addresses("http://vllm:8000", self.resolve)

    async def sleep(self, seconds: float) -> None:
        assert seconds == 5.0
        async with self._woken:
            self.rounds += 1
            await self._woken.wait()

    async def next_round(self) -> None:
        seen = self.rounds
        async with self._woken:
            self._woken.notify_all()
        await wait_until(lambda: self.rounds > seen)


@pytest.fixture
def replicas() -> Replicas:
    return Replicas()


async def test_configured_replicas_are_reported_with_their_rate_before_anything_is_waited_for(replicas, facts, running):
    static = {"http://10.0.0.1:8000": 39_000.0, "http://10.0.0.2:8000": None}
    running(Discovery(replicas, facts.append, static=static).run())
    await asyncio.sleep(0)
    assert facts == [ReplicaAdded("http://10.0.0.1:8000", 39_000.0), ReplicaAdded("http://10.0.0.2:8000", None)]
    assert list(replicas) == list(static)


async def test_follows_the_addresses_behind_a_name(replicas, facts, running):
    names = Names(vllm={"10.0.0.1", "10.0.0.2"})
    running(Discovery(replicas, facts.append, static={}, sources=[names.source()], sleep=names.sleep).run())
    await wait_until(lambda: names.rounds == 1)
    assert facts == [ReplicaAdded("http://10.0.0.1:8000"), ReplicaAdded("http://10.0.0.2:8000")]

    names.addresses["vllm"] = {"10.0.0.2", "fd00::7"}
    await names.next_round()
    assert facts[2:] == [ReplicaRemoved("http://10.0.0.1:8000"), ReplicaAdded("http://[fd00::7]:8000")]
    assert set(replicas) == {"http://10.0.0.2:8000", "http://[fd00::7]:8000"}

    await names.next_round()
    assert len(facts) == 4, "an unchanged answer is no news"


async def test_a_resolver_error_keeps_the_last_answer_and_is_logged_once(replicas, facts, running, caplog):
    names = Names(vllm={"10.0.0.1"})
    running(Discovery(replicas, facts.append, static={}, sources=[names.source()], sleep=names.sleep).run())
    await wait_until(lambda: names.rounds == 1)
    with caplog.at_level(logging.INFO, logger="gateway.feeds.discovery"):
        names.failing.add("vllm")
        await names.next_round()
        await names.next_round()
        assert list(replicas) == ["http://10.0.0.1:8000"]
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        names.failing.clear()
        names.addresses["vllm"] = {"10.0.0.9"}
        await names.next_round()
    assert list(replicas) == ["http://10.0.0.9:8000"]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


async def test_a_configured_name_that_moves_is_removed_and_added(replicas, facts, running):
    """O-08."""
    """Its cache, connections and counters belong to the old address."""
    names = Names(gpu={"10.0.0.1"})
    running(
        Discovery(
            replicas, facts.append, static={"http://gpu:8000": 5e4}, resolve=names.resolve, sleep=names.sleep
        ).run()
    )
    await wait_until(lambda: names.rounds == 1)
    before = replicas.incarnations
    names.addresses["gpu"] = {"10.0.0.2"}
    await names.next_round()
    assert facts == [
        ReplicaAdded("http://gpu:8000", 5e4),
        ReplicaRemoved("http://gpu:8000", returns=True),
        ReplicaAdded("http://gpu:8000", 5e4),
    ]
    assert list(replicas) == ["http://gpu:8000"]
    assert replicas.incarnations != before


async def test_one_more_address_behind_a_configured_name_is_no_move(replicas, facts, running):
    names = Names(gpu={"10.0.0.1"})
    running(
        Discovery(
            replicas, facts.append, static={"http://gpu:8000": None}, resolve=names.resolve, sleep=names.sleep
        ).run()
    )
    await wait_until(lambda: names.rounds == 1)
    names.addresses["gpu"] = {"10.0.0.1", "10.0.0.2"}
    await names.next_round()
    assert len(facts) == 1


async def test_a_replica_that_is_configured_stays_when_the_name_drops_its_address(replicas, facts, running):
    names = Names(vllm={"10.0.0.1", "10.0.0.2"})
    discovery = Discovery(
        replicas,
        facts.append,
        static={"http://10.0.0.1:8000": None},
        sources=[names.source()],
        sleep=names.sleep,
    )
    running(discovery.run())
    await wait_until(lambda: names.rounds == 1)
    assert len(replicas) == 2
    names.addresses["vllm"] = {"10.0.0.2"}
    await names.next_round()
    assert set(replicas) == {"http://10.0.0.1:8000", "http://10.0.0.2:8000"}
    assert facts.of(ReplicaRemoved) == []


async def test_a_resolver_that_hangs_on_one_name_does_not_delay_another(replicas, facts, running):
    names = Names(vllm={"10.0.0.1"})

    async def hang_for_gpu(host: str, port: int) -> frozenset[str]:
        if host == "gpu":
            await asyncio.sleep(3600)
        return await names.resolve(host, port)

    discovery = Discovery(
        replicas,
        facts.append,
        static={"http://gpu:8000": None},
        sources=[names.source()],
        resolve=hang_for_gpu,
        sleep=names.sleep,
    )
    running(discovery.run())
    await wait_until(lambda: ReplicaAdded("http://10.0.0.1:8000") in facts)


async def test_the_system_resolver_gives_addresses_of_one_family():
    assert await resolve("localhost", 80) in ({"127.0.0.1"}, {"::1"})
    with pytest.raises((OSError, UnicodeError)):
        await resolve("a" * 64 + ".invalid", 80)
