"""One bounded question: what it takes for an answer, and what becomes of its connection."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Iterator

import pytest
import uvloop
from scripted_replica import ok

from gateway.feeds.fetch import FetchFailed, ReplicaClient, fetch
from gateway.tls import replica_context

EARLY = b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"


@pytest.fixture
def no_collector() -> Iterator[None]:
    """It would close what was forgotten."""
    gc.disable()
    yield
    gc.enable()


async def cut_in_the_handshake(ends: str) -> None:
    greeted, left = asyncio.Event(), asyncio.Event()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)  # the hello
        greeted.set()
        with contextlib.suppress(ConnectionError):
            await reader.read()
        left.set()
        writer.close()

    silent = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    url = f"https://127.0.0.1:{silent.sockets[0].getsockname()[1]}/health"
    async with silent:
        client = ReplicaClient(replica_context(None))
        asking = asyncio.create_task(
            fetch(client, url, timeout_seconds=0.3 if ends == "too late" else 60.0, max_bytes=1_000)
        )
        await asyncio.wait_for(greeted.wait(), 10)
        if ends == "cancelled":
            asking.cancel()
        with pytest.raises((FetchFailed, asyncio.CancelledError)):
            await asking
        await asyncio.wait_for(left.wait(), 10)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
@pytest.mark.parametrize("ends", ["too late", "cancelled"])
def test_a_server_silent_in_the_handshake_keeps_no_socket(ends: str, run, no_collector: None) -> None:
    run(cut_in_the_handshake(ends))


@pytest.mark.parametrize(
    "answer",
    [
        ok(b"page"),
        INTERIM + EARLY * 10 + ok(b"page"),
        b"HTTP/1.1 200 OK\r\n\r\npage",
        EARLY + b"HTTP/1.0 200 OK\r\ncontent-encoding: identity\r\n\r\npage",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\np\r\n3;x=y\r\nage\r\n0\r\nx-late: 9\r\n\r\n",
        ok(b"page") + ok(b"another", "500 Oops"),
    ],
)
async def test_any_way_to_frame_an_answer_and_interim_answers_before_it(answer, start_replica, client) -> None:
    async def whole(writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        writer.write_eof()

    async def in_bytes(writer: asyncio.StreamWriter) -> None:
        for byte in answer:
            writer.write(bytes((byte,)))
            await writer.drain()
            await asyncio.sleep(0)
        writer.write_eof()

    one = await start_replica()
    one.answers = {"/whole": whole, "/in_bytes": in_bytes}
    for path in one.answers:
        assert await fetch(client, f"{one.id}{path}", timeout_seconds=10.0, max_bytes=100) == b"page"


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"", "the connection was lost"),
        (INTERIM, "the connection was lost"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\npage", "the connection was lost"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\npage\r\n", "the connection was lost"),
        (b"220 mail.example ESMTP\r\n", "the answer is not HTTP"),
        (b"HTTP/1.1 101 Switching\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n", "the answer is not HTTP"),
        (ok(b"page", "503 Service Unavailable"), "HTTP 503"),
        (ok(b"page", "204 No Content"), "HTTP 204"),
        (ok(b"page", headers="Content-Encoding: gzip\r\n"), "compressed although not asked for"),
        (ok(b"p" * 101), "more than 100 bytes"),
    ],
)
async def test_what_is_no_page_says_why(answer, problem, start_replica, client) -> None:
    async def script(writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        writer.write_eof()

    one = await start_replica()
    one.answers = {"/page": script}
    with pytest.raises(FetchFailed) as raised:
        await fetch(client, f"{one.id}/page", timeout_seconds=10.0, max_bytes=100)
    assert str(raised.value) == problem


@pytest.mark.parametrize(
    ("begins", "goes_on", "problem"),
    [
        (b"", EARLY * 100, "too large a head"),
        (b"HTTP/1.1 200 OK\r\n", b"x-more: and more\r\n" * 100, "too large a head"),
        (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5;",
            b"a" * 6_000,
            "its framing takes more than it carries",
        ),
        (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n",
            b"a: b\r\n" * 1_000,
            "its framing takes more than it carries",
        ),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"1\r\na\r\n" * 1_000, "more than 100 bytes"),
    ],
)
async def test_an_answer_without_end_is_broken_off(begins, goes_on, problem, start_replica, client) -> None:
    """Interim answers, too: they burned a core for as long as the replica went on."""
    left = asyncio.Event()

    async def endless(writer: asyncio.StreamWriter) -> None:
        writer.write(begins)
        try:
            while True:
                writer.write(goes_on)
                await writer.drain()
                await asyncio.sleep(0)
        finally:
            left.set()

    one = await start_replica()
    one.answers = {"/page": endless}
    with pytest.raises(FetchFailed) as raised:
        await fetch(client, f"{one.id}/page", timeout_seconds=60.0, max_bytes=100)
    assert str(raised.value) == problem
    await asyncio.wait_for(left.wait(), 10)


async def test_interim_answers_that_come_slowly_win_no_time(start_replica, client) -> None:
    async def drip(writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(EARLY)
            await writer.drain()
            await asyncio.sleep(0.02)

    one = await start_replica()
    one.answers = {"/page": drip}
    began = time.monotonic()
    with pytest.raises(FetchFailed, match="no whole answer in"):
        await fetch(client, f"{one.id}/page", timeout_seconds=0.3, max_bytes=100)
    assert time.monotonic() - began < 10.0
