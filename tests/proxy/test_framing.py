"""The framing corpus (`tests.chaos.framing`, O-18) through both ways of serving, and the limits of what a head and a
body's framing may take."""

from __future__ import annotations

import asyncio

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.proxy.control_connection import ControlConnection
from gateway.proxy.places import LEAST_REST_SECONDS
from tests.chaos.framing import CORPUS, HOST, LINE, exchange, problem
from tests.proxy.conftest import RunningGateway, eventually, running_gateway
from tests.proxy.scripted import ANSWER, Exchange, ScriptedReplica
from tests.proxy.test_front_door import ODD_BODY, post, raw_request

QUICK = {"header_timeout_seconds": 0.2, "body_timeout_seconds": 0.2}


def test_the_corpus_is_large_enough_and_no_payload_is_there_twice() -> None:
    assert len({payload.raw for payload in CORPUS}) == len({payload.name for payload in CORPUS}) == len(CORPUS) >= 60


async def test_no_payload_becomes_another_request_than_it_is(mode: str) -> None:
    """O-18: ambiguous is 400 and the end of the connection; never two requests upstream from one."""
    problems = []
    async with ScriptedReplica().running() as replica, running_gateway(replica, mode=mode, server=QUICK) as gateway:
        for payload in CORPUS:
            before = len(replica.exchanges)
            answer = await exchange(gateway.port, payload, 5.0)
            problems.append(problem(payload, answer, [one.body for one in replica.exchanges[before:]]))
        assert "\n".join(one for one in problems if one) == ""
        assert (await gateway.chat()).status_code == 200


async def drip(gateway: RunningGateway, begin: bytes, piece: bytes, most: int) -> tuple[bytes, int]:
    """Send a beginning, then the piece again and again until the gateway has enough; what it said, how many it took."""
    reader, writer = await gateway.connect()
    writer.write(begin)
    for sent in range(most):
        writer.write(piece)
        try:
            await writer.drain()
            answer = await asyncio.wait_for(reader.read(65_536), 0.002)
        except TimeoutError:
            continue
        except ConnectionError:
            answer = b""
        writer.transport.abort()
        return answer, sent
    writer.transport.abort()
    return b"", most


ENDLESS = [
    ("one header", LINE + HOST + b"x: ", b"a" * 8_000, b" 431 "),
    ("many headers", LINE + HOST, b"a:\r\n" * 50, b" 431 "),
    ("a target", b"POST /v1/chat/completions?", b"a" * 8_000, b" 431 "),
    ("a header of another path", b"GET /health HTTP/1.1\r\n" + HOST + b"x: ", b"a" * 8_000, b" 431 "),
    ("an extension", LINE + HOST + b"transfer-encoding: chunked\r\n\r\n1;", b"a" * 8_000, b" 400 "),
    ("a trailer", LINE + HOST + b"transfer-encoding: chunked\r\n\r\n0\r\nx: ", b"a" * 8_000, b" 400 "),
    ("many trailers", LINE + HOST + b"transfer-encoding: chunked\r\n\r\n0\r\n", b"a: b\r\n" * 2_000, b" 400 "),
]


@pytest.mark.parametrize(("begin", "piece", "status"), [one[1:] for one in ENDLESS], ids=[one[0] for one in ENDLESS])
async def test_what_has_no_end_is_refused_after_64_kib(mode: str, begin: bytes, piece: bytes, status: bytes) -> None:
    async with ScriptedReplica().running() as replica, running_gateway(replica, mode=mode) as gateway:
        answer, taken = await drip(gateway, begin, piece, 200)
        assert status in answer[:20]
        assert taken * len(piece) < 600_000
        assert replica.exchanges == []
        assert (await gateway.chat()).status_code == 200


async def test_a_refusal_does_not_fall_into_another_answer(mode: str) -> None:
    """A malformed request behind one that is being answered: that answer ends whole, then the connection."""
    free = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.start_stream()
        await exchange.chunk(b"data: a\n\n")
        await free.wait()
        await exchange.chunk(b"data: b\n\n")
        await exchange.end_stream()

    async with ScriptedReplica(script).running() as replica, running_gateway(replica, mode=mode) as gateway:
        for behind in (b"BAD\0\r\n\r\n", LINE + HOST + b"content-length: x\r\n\r\n", LINE + b"\r\n"):
            free.clear()
            reader, writer = await gateway.connect()
            writer.write(post(ODD_BODY, close=False))
            begun = await asyncio.wait_for(reader.readuntil(b"data: a\n\n\r\n"), 5)
            writer.write(behind)
            await asyncio.sleep(0.05)
            free.set()
            rest = await asyncio.wait_for(reader.read(), 5)
            writer.close()
            assert begun.count(b"HTTP/1.1") == 1
            assert rest == b"9\r\ndata: b\n\n\r\n0\r\n\r\n"


async def test_a_slow_head_is_cut_and_a_slow_body_gets_its_own_time(mode: str) -> None:
    limits = {"header_timeout_seconds": 0.3, "body_timeout_seconds": 60.0, "keep_alive_seconds": 60.0}
    async with ScriptedReplica().running() as replica, running_gateway(replica, mode=mode, server=limits) as gateway:
        for head in (b"POST /v1/chat/comp", b"GET /hea", LINE + HOST):
            reader, writer = await gateway.connect()
            writer.write(head)
            assert await asyncio.wait_for(reader.read(), 5) == b""
            writer.close()
        reader, writer = await gateway.connect()
        request = post(ODD_BODY)
        writer.write(request[:-10])
        await asyncio.sleep(1.6)  # longer than a head may take, and a sweep
        writer.write(request[-10:])
        assert (await asyncio.wait_for(reader.read(), 5)).endswith(ANSWER)
        writer.close()
        assert len(replica.exchanges) == 1


async def test_who_never_asks_is_cut_in_the_time_for_a_head(mode: str) -> None:
    limits = {"header_timeout_seconds": 0.3, "keep_alive_seconds": 60.0}
    async with ScriptedReplica().running() as replica, running_gateway(replica, mode=mode, server=limits) as gateway:
        reader, writer = await gateway.connect()
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
        reader, writer = await gateway.connect()
        writer.write(post(ODD_BODY, close=False))
        await asyncio.wait_for(reader.readuntil(ANSWER), 5)
        await asyncio.sleep(1.6)  # longer than a head may take, and a sweep
        writer.write(post(ODD_BODY))
        assert (await asyncio.wait_for(reader.read(), 5)).endswith(ANSWER), "an idle one has more time"
        writer.close()


@pytest.mark.parametrize("first", [b"", post(ODD_BODY, close=False), b"GET /health HTTP/1.1\r\nhost: g\r\n\r\n"])
async def test_empty_lines_do_not_keep_an_idle_connection(mode: str, first: bytes) -> None:
    limits = {"keep_alive_seconds": 0.5, "header_timeout_seconds": 0.5}
    async with ScriptedReplica().running() as replica, running_gateway(replica, mode=mode, server=limits) as gateway:
        reader, writer = await gateway.connect()
        writer.write(first)
        async with asyncio.timeout(5):
            while not reader.at_eof():
                writer.write(b"\r\n")
                try:
                    await asyncio.wait_for(reader.read(65_536), 0.1)
                except TimeoutError:
                    continue
                except ConnectionError:
                    break
        writer.close()


async def test_more_connections_than_may_be_are_told_and_closed(mode: str) -> None:
    """O-02's cousin: a place is free again as soon as its connection is gone."""
    async with ScriptedReplica().running() as replica:
        async with running_gateway(replica, mode=mode, server={"max_connections": 5}) as gateway:
            await gateway.client.aclose()
            taken = [await gateway.connect() for _ in range(5)]
            for _, writer in taken:
                writer.write(LINE)  # in the middle of a request: none of them has to go
            await asyncio.sleep(0.05)
            refused = await raw_request(gateway, post(ODD_BODY))
            assert refused.startswith(b"HTTP/1.1 503 ")
            assert b"retry-after: 1\r\n" in refused
            assert b'"code":"too_many_connections"' in refused
            for _, writer in taken:
                writer.close()
            answers = []
            async with asyncio.timeout(5):
                while not answers or not answers[-1].startswith(b"HTTP/1.1 200 "):
                    answers.append(await raw_request(gateway, post(ODD_BODY)))
            assert len(replica.exchanges) == 1


@pytest.mark.parametrize("first", [b"", post(ODD_BODY, close=False)])
async def test_when_all_places_are_taken_who_rests_for_longest_gives_his_up(mode: str, first: bytes) -> None:
    """A flood of connections that say nothing, or nothing more, keeps nobody out who asks for something."""

    async def script(exchange: Exchange) -> None:
        if b"wait" in exchange.body:
            await exchange.wait_closed()
        else:
            await exchange.answer(ANSWER)

    async with ScriptedReplica(script).running() as replica:
        async with running_gateway(replica, mode=mode, server={"max_connections": 4}) as gateway:
            await gateway.client.aclose()
            busy = await gateway.connect()
            busy[1].write(post(b'{"model":"m","messages":[],"wait":1}', close=False))
            await eventually(lambda: bool(replica.exchanges))
            resting = [await gateway.connect() for _ in range(3)]
            for reader, writer in resting:
                writer.write(first)
                if first:
                    await asyncio.wait_for(reader.readuntil(ANSWER), 5)
            await asyncio.sleep(LEAST_REST_SECONDS + 0.1)
            for _ in resting:
                assert (await raw_request(gateway, post(ODD_BODY))).startswith(b"HTTP/1.1 200 ")
                await asyncio.sleep(0.05)
            assert await asyncio.wait_for(resting[0][0].read(), 5) == b"", "the first to rest is the first to go"
            assert not busy[0].at_eof()
            assert not replica.exchanges[0].closed.is_set()
            for _, writer in (busy, *resting):
                writer.close()


async def test_hand_over_needs_no_second_place() -> None:
    async with ScriptedReplica().running() as replica:
        async with running_gateway(replica, server={"max_connections": 2}) as gateway:
            reader, writer = await gateway.connect()
            writer.write(b"GET /health HTTP/1.1\r\nhost: g\r\nconnection: close\r\n\r\n")
            assert (await asyncio.wait_for(reader.read(), 5)).startswith(b"HTTP/1.1 200 ")
            writer.close()


async def test_a_client_that_closes_its_side_counts_as_gone(mode: str) -> None:
    """O-01: the end of a client's sending looks the same whether it still reads or has left, and the replica must not
    go on for one that left."""

    async def script(exchange: Exchange) -> None:
        await exchange.wait_closed()

    async with ScriptedReplica(script).running() as replica, running_gateway(replica, mode=mode) as gateway:
        reader, writer = await gateway.connect()
        writer.write(post(ODD_BODY, close=False))
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
        for one in replica.exchanges:
            await one.wait_closed(5)


def test_what_the_gateway_needs_of_uvicorns_inside_is_there() -> None:
    """`control_connection.py` leans on uvicorn's protocol on httptools: another uvicorn must fail here, not in service.
    Whoever widens the range in pyproject.toml reads that protocol first."""
    assert uvicorn.__version__.startswith("0.54."), "read uvicorn's httptools_impl.py again, then widen this"
    assert ControlConnection.__mro__[1] is HttpToolsProtocol
    used = "on_url on_header on_body on_message_begin on_headers_complete on_message_complete on_response_complete"
    for name in (*used.split(), "_unset_keepalive_if_required", "shutdown", "pause_writing", "resume_writing"):
        assert callable(getattr(HttpToolsProtocol, name)), name
    made = set(HttpToolsProtocol.__init__.__code__.co_names)
    assert {"parser", "cycle", "headers", "connections", "transport", "loop"} <= made
    held = set(RequestResponseCycle.__init__.__code__.co_names)
    assert {"keep_alive", "disconnected", "response_started", "response_complete", "message_event"} <= held
