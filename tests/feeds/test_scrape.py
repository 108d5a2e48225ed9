"""Load snapshots over real sockets: what hangs, floods, fails or restarts harms no other and invents nothing."""

from __future__ import annotations

import asyncio
import gzip
import logging
from random import Random

import pytest
from scripted_replica import hang, ok, wait_until

from gateway.core.model import LoadReported
from gateway.feeds.replicas import Replicas
from gateway.feeds.scrape import Scrape

LIMIT = 256 * 1024


def page(running: int = 1, started: int = 1000) -> bytes:
    return f"process_start_time_seconds {started}\nvllm:num_requests_running {running}\n".encode()


@pytest.fixture
def replicas() -> Replicas:
    return Replicas()


@pytest.fixture
def scrape(replicas, facts, client, running):
    def start(**settings) -> None:
        defaults = {"interval_seconds": 0.01, "timeout_seconds": 5.0, "max_bytes": LIMIT, "random": Random(1)}
        running(Scrape(replicas, facts.append, client, **{**defaults, **settings}).run())

    return start


async def test_reports_what_the_replica_says_dated_to_the_question(start_replica, replicas, facts, scrape):
    one = await start_replica()
    one.answers = {"/metrics": ok(page(running=3))}
    replicas.update(added=[one.id])
    scrape(clock=lambda: 42.0)
    await wait_until(lambda: facts)
    snapshot = facts[0].snapshot
    assert facts[0].replica == one.id
    assert (snapshot.taken_at, snapshot.running, snapshot.started_at, snapshot.waiting) == (42.0, 3, 1000.0, None)


async def test_a_page_that_stops_coming_leaves_no_fact_behind(start_replica, replicas, facts, scrape, caplog):
    """O-12 (b)."""
    one = await start_replica()
    one.answers = {"/metrics": ok(page(running=9))}
    replicas.update(added=[one.id])
    scrape()
    await wait_until(lambda: facts)
    with caplog.at_level(logging.INFO, logger="gateway.feeds.scrape"):
        one.answers = {"/metrics": ok(b"", "500 Internal Server Error")}
        await wait_until(lambda: caplog.records)
        facts.clear()
        seen = len(one.asked)
        await wait_until(lambda: len(one.asked) >= seen + 3)
        assert facts == []
        assert [record.getMessage() for record in caplog.records] == [f"{one.id}/metrics is not usable: HTTP 500"]
        one.answers = {"/metrics": ok(page(running=2))}
        await wait_until(lambda: facts)
    assert facts[0].snapshot.running == 2
    assert caplog.records[-1].getMessage() == f"{one.id}/metrics is usable again"


async def test_a_hung_page_ends_at_its_time_limit_and_delays_nobody(start_replica, replicas, facts, scrape, caplog):
    """O-12 (a)."""
    stuck, fine = await start_replica(), await start_replica()

    async def half_a_page(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nvllm:num_requests_running 0\n")
        await hang(writer)

    stuck.answers = {"/metrics": half_a_page}
    fine.answers = {"/metrics": ok(page())}
    replicas.update(added=[stuck.id, fine.id])
    scrape(timeout_seconds=0.1)
    await wait_until(lambda: len(facts) >= 10 and len(stuck.asked) >= 2)
    assert {fact.replica for fact in facts} == {fine.id}


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_huge_page_is_cut_off_and_counts_as_missing(start_replica, replicas, facts, scrape, caplog, chunked):
    """O-12 (e)."""
    one = await start_replica()
    sent = 0

    async def flood(writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        piece = page() + b"# " + b"x" * 65_000 + b"\n"
        framing = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: 52428800"
        writer.write(b"HTTP/1.1 200 OK\r\n" + framing + b"\r\n\r\n")
        while sent < 50 * 1024 * 1024:
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
            sent += len(piece)
            await writer.drain()

    one.answers = {"/metrics": flood}
    replicas.update(added=[one.id])
    scrape()
    await wait_until(lambda: caplog.records)
    assert facts == []
    assert f"more than {LIMIT} bytes" in caplog.records[0].getMessage()
    assert sent < 20 * 1024 * 1024, "the rest was read as well"


async def test_a_page_that_no_engine_writes_counts_as_missing(start_replica, replicas, facts, scrape, caplog):
    one = await start_replica()
    one.answers = {"/metrics": ok(page() + b"\n" * 70_000)}
    replicas.update(added=[one.id])
    scrape()
    await wait_until(lambda: caplog.records)
    assert facts == []
    assert "more than 65536 lines" in caplog.records[0].getMessage()


async def test_a_compressed_page_is_refused_instead_of_inflated(start_replica, replicas, facts, scrape, caplog):
    one = await start_replica()
    one.answers = {"/metrics": ok(gzip.compress(page() + b"\n" * 10_000_000), headers="Content-Encoding: gzip\r\n")}
    replicas.update(added=[one.id])
    scrape()
    await wait_until(lambda: caplog.records)
    assert facts == []


async def test_a_page_that_ends_early_counts_as_missing(start_replica, replicas, facts, scrape, caplog):
    one = await start_replica()

    async def cut(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4096\r\n\r\n" + page())
        await writer.drain()
        writer.close()

    one.answers = {"/metrics": cut}
    replicas.update(added=[one.id])
    scrape()
    await wait_until(lambda: caplog.records)
    assert facts == []


async def test_a_restart_on_the_same_address_shows_in_the_start_time(start_replica, replicas, facts, scrape):
    one = await start_replica()
    one.answers = {"/metrics": ok(page(started=1000))}
    replicas.update(added=[one.id])
    scrape()
    await wait_until(lambda: facts)
    await one.stop()
    one.answers = {"/metrics": ok(page(started=2000))}
    await one.start()
    await wait_until(lambda: facts[-1].snapshot.started_at == 2000.0)
    assert {fact.snapshot.started_at for fact in facts.of(LoadReported)} == {1000.0, 2000.0}


async def test_a_failing_replica_is_asked_less_and_less_often(start_replica, replicas, facts, client, running):
    gone = await start_replica()
    await gone.stop()
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        await asyncio.sleep(0)

    replicas.update(added=[gone.id])
    scrape = Scrape(
        replicas,
        facts.append,
        client,
        interval_seconds=0.5,
        timeout_seconds=5.0,
        max_bytes=LIMIT,
        random=Random(1),
        clock=lambda: 0.0,
        sleep=sleep,
    )
    running(scrape.run())
    await wait_until(lambda: len(pauses) >= 8)
    assert pauses[0] == pytest.approx(1.0, rel=0.11)
    assert pauses[1] == pytest.approx(2.0, rel=0.11)
    assert pauses[6] == pytest.approx(5.0, rel=0.11)
    assert len(set(pauses)) == len(pauses), "without jitter"
