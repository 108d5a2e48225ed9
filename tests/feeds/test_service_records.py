"""Service records from a real DNS server on loopback: priorities, failures, and answers that must not empty a fleet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from name_server import NAME, NameServer, name_server
from scripted_replica import wait_until

from gateway.core.model import ReplicaRemoved
from gateway.feeds import service_records
from gateway.feeds.discovery import Discovery
from gateway.feeds.replicas import Replicas
from gateway.feeds.service_records import ServiceRecords, first_that_serve
from gateway.feeds.sources import SourceFailed

A, B, C = "http://10.0.0.1:8001", "http://10.0.0.2:8002", "http://10.0.0.3:8003"


@pytest.fixture
async def server() -> AsyncIterator[NameServer]:
    async with name_server() as server:
        yield server


@pytest.fixture
def standing() -> dict[str, bool | None]:
    return {}


@pytest.fixture
def source(server, standing) -> ServiceRecords:
    return ServiceRecords("http", NAME, lambda: standing, server.address)


async def test_each_address_is_a_replica_at_its_hosts_port(server, source):
    server.serve("0 8001 10.0.0.1", "0 8002 10.0.0.2", "0 8000 fd00::7")
    server.ttl = 30
    found = await source.look()
    assert found.replicas == {A: None, B: None, "http://[fd00::7]:8000": None}
    assert found.good_for_seconds == 30.0


async def test_with_https_the_names_are_the_replicas(server):
    """Certificates are for names."""
    server.serve("0 8001 10.0.0.1")
    source = ServiceRecords("https", NAME, dict, server.address)
    assert (await source.look()).replicas == {"https://host-10-0-0-1.example:8001": None}
    assert {kind for _, kind, _ in server.asked} == {"SRV"}


async def test_a_truncated_answer_is_asked_for_again_over_tcp(server, source):
    server.serve("0 8001 10.0.0.1")
    server.failing[NAME] = "truncated"
    assert list((await source.look()).replicas) == [A]
    assert (NAME, "SRV", "tcp") in server.asked


@pytest.mark.parametrize("failure", ["NXDOMAIN", "SERVFAIL", "REFUSED", "NOERROR", "silent", "garbage"])
async def test_a_failure_keeps_the_last_replicas(server, source, facts, running, failure, monkeypatch, caplog):
    """O-08: also an empty answer (NOERROR) and a name that is gone: what is dead fails its probes, and a mistake of the
    name server must not leave a fleet without replicas."""
    monkeypatch.setattr(service_records, "QUERY_SECONDS", 0.05)
    monkeypatch.setattr(service_records, "LOOK_UP_SECONDS", 0.2)
    server.serve("0 8001 10.0.0.1", "0 8002 10.0.0.2")
    replicas = Replicas()
    discovery = Discovery(replicas, facts.append, static={}, sources=[source], interval_seconds=0.02)
    running(discovery.run())
    await wait_until(lambda: set(replicas) == {A, B})
    assert discovery.source(A) == "dns"
    server.failing[NAME] = failure
    asked = len(server.asked)
    await wait_until(lambda: len(server.asked) >= asked + 4 and caplog.records)
    assert set(replicas) == {A, B}
    assert [one.levelname for one in caplog.records if NAME in one.message] == ["WARNING"]
    server.failing.clear()
    server.serve("0 8002 10.0.0.2")
    await wait_until(lambda: set(replicas) == {B})
    assert ReplicaRemoved(A) in facts


async def test_a_look_ends_when_it_is_cancelled_at_any_moment(server, source):
    server.serve("0 8001 10.0.0.1")

    async def look_for_ever() -> None:
        while True:
            await source.look()

    for turns in range(150):
        job = asyncio.create_task(look_for_ever())
        for _ in range(turns):
            await asyncio.sleep(0)
        job.cancel()
        await asyncio.wait({job}, timeout=5.0)
        assert job.cancelled(), f"cancelled after {turns} turns of the loop"


async def test_a_host_that_does_not_resolve_keeps_its_last_address(server, source):
    server.serve("0 8001 10.0.0.1", "0 8002 10.0.0.2")
    await source.look()
    server.failing["host-10-0-0-1.example"] = "SERVFAIL"
    assert list((await source.look()).replicas) == [A, B]
    server.records[NAME, "SRV"] = ["0 0 8002 host-10-0-0-2.example."]
    assert list((await source.look()).replicas) == [B], "but it goes with its record"


async def test_hosts_of_which_none_resolves_are_no_answer(server, source):
    server.serve("0 8001 10.0.0.1")
    server.failing["host-10-0-0-1.example"] = "NXDOMAIN"
    with pytest.raises(SourceFailed, match="none of its hosts"):
        await source.look()


async def test_a_dot_as_the_only_host_means_none(server, source):
    server.records[NAME, "SRV"] = ["0 0 0 ."]
    assert (await source.look()).replicas == {}


async def test_what_cannot_be_connected_to_is_left_out(server, source):
    server.serve("0 8001 10.0.0.1")
    server.records[NAME, "SRV"] += ["0 0 0 host-10-0-0-2.example.", r"0 0 80 strange\032host.example."]
    assert list((await source.look()).replicas) == [A]


async def test_the_next_priority_comes_in_when_nobody_of_the_first_can_serve(server, source, standing):
    server.serve("10 8001 10.0.0.1", "20 8002 10.0.0.2", "5 8003 10.0.0.3")
    assert list((await source.look()).replicas) == [C]
    standing[C] = False
    assert list((await source.look()).replicas) == [C, A]
    standing |= {A: True, C: True}
    assert list((await source.look()).replicas) == [C]


@pytest.mark.parametrize(
    ("standing", "last", "expected"),
    [
        ({}, (), [A]),  # a start: the first priority has its time to show itself
        ({A: None}, (), [A]),
        ({A: True, B: True}, (A, B), [A]),
        ({A: False}, (A,), [A, B]),
        ({A: False, B: None}, (A, B), [A, B]),
        ({A: False, B: False}, (A, B), [A, B, C]),
        ({A: None, B: True}, (A, B), [A, B]),  # a new one of the first does not send the second away before it is up
    ],
)
def test_priorities_wait_until_it_is_known_who_can_serve(standing, last, expected):
    assert first_that_serve([[A], [B], [C]], standing, frozenset(last)) == expected


async def test_answers_are_kept_for_their_time_within_bounds(server, source, facts, running):
    server.serve("0 8001 10.0.0.1")
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        server.ttl = {1: 3, 2: 600}.get(len(waits), 0)
        await asyncio.sleep(0.01)

    running(
        Discovery(
            Replicas(),
            facts.append,
            static={},
            sources=[source],
            interval_seconds=2.0,
            longest_interval_seconds=5.0,
            sleep=sleep,
        ).run()
    )
    await wait_until(lambda: len(waits) >= 3)
    assert waits[:3] == [2.0, 3.0, 5.0]
