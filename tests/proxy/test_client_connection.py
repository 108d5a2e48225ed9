"""The client's side of the wire: pipelining, hand-over to uvicorn, upgrades, HTTP/1.0, framing, shut-down."""

from __future__ import annotations

import asyncio
import socket

import pytest

from gateway.listeners import listen
from tests.proxy.conftest import eventually, running_gateway
from tests.proxy.scripted import ANSWER, Exchange, ScriptedReplica
from tests.proxy.test_front_door import ODD_BODY, post, raw_request

GET_HEALTH = b"GET /health HTTP/1.1\r\nhost: g\r\n\r\n"


async def read_answer(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return head, await asyncio.wait_for(reader.readexactly(int(line.split(b":")[1])), 5)
    return head, b""


async def test_small_writes_go_at_once() -> None:
    """Else the second of two waits for the first to be acknowledged: 40 ms an answer whose head and body are two."""
    accepted: asyncio.Future[asyncio.StreamWriter] = asyncio.get_running_loop().create_future()
    with listen("127.0.0.1", 0, "") as sock:
        async with await asyncio.start_server(lambda _, writer: accepted.set_result(writer), sock=sock):
            _, client = await asyncio.open_connection(*sock.getsockname())
            server = await accepted
            assert server.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            server.close()
            client.close()


async def test_one_connection_serves_many_requests(mode: str) -> None:
    async with ScriptedReplica().running() as replica, running_gateway(replica, mode=mode) as gateway:
        reader, writer = await gateway.connect()
        for _ in range(20):
            writer.write(post(ODD_BODY, close=False))
            head, body = await read_answer(reader)
            assert head.startswith(b"HTTP/1.1 200 ")
            assert body == ANSWER
        writer.close()
        assert len(replica.exchanges) == 20
        assert replica.exchanges[-1].on_connection == 20, "one upstream connection carries them all"


async def test_pipelined_requests_are_answered_in_order(mode: str) -> None:
    async def script(exchange: Exchange) -> None:
        await asyncio.sleep(0.05 if exchange.number % 2 else 0)
        await exchange.answer(exchange.body)

    bodies = [b'{"model":"m","messages":[],"n":%d}' % number for number in range(1, 31)]
    async with ScriptedReplica(script).running() as replica, running_gateway(replica, mode=mode) as gateway:
        reader, writer = await gateway.connect()
        writer.write(b"".join(post(body, close=False) for body in bodies))
        for body in bodies:
            assert (await read_answer(reader))[1] == body
        writer.close()


async def test_control_and_inference_share_a_connection(mode: str) -> None:
    async with ScriptedReplica().running() as replica, running_gateway(replica, mode=mode) as gateway:
        reader, writer = await gateway.connect()
        for request in (post(ODD_BODY, close=False), GET_HEALTH, post(ODD_BODY, close=False), GET_HEALTH):
            writer.write(request)
            head, body = await read_answer(reader)
            assert head.startswith(b"HTTP/1.1 200 ")
            assert body == (b"ok" if request == GET_HEALTH else ANSWER)
        writer.close()


async def test_a_head_may_arrive_byte_by_byte(mode: str) -> None:
    async with ScriptedReplica().running() as replica, running_gateway(replica, mode=mode) as gateway:
        for request, expected in ((post(ODD_BODY, close=False), ANSWER), (GET_HEALTH, b"ok")):
            reader, writer = await gateway.connect()
            for byte in request:
                writer.write(bytes([byte]))
                await asyncio.sleep(0)
            assert (await read_answer(reader))[1] == expected
            writer.close()


async def test_an_offered_upgrade_is_ignored() -> None:
    """Java's HTTP client offers h2c on every plain request. (uvicorn itself loses such a request's body.)"""
    upgrade = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAA\r\n"
    async with ScriptedReplica().running() as replica, running_gateway(replica) as gateway:
        reader, writer = await gateway.connect()
        for _ in range(2):
            writer.write(post(ODD_BODY, close=False, headers=upgrade))
            head, body = await read_answer(reader)
            assert head.startswith(b"HTTP/1.1 200 ")
            assert body == ANSWER
        writer.close()
        assert replica.exchanges[0].body == ODD_BODY
        assert not {"upgrade", "http2-settings"} & dict(replica.exchanges[0].headers).keys()


async def test_http_1_0_client_gets_a_stream_without_chunks() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.start_stream()
        await exchange.chunk(b"data: a\n\n")
        await exchange.chunk(b"data: b\n\n")
        await exchange.end_stream()

    async with ScriptedReplica(script).running() as replica, running_gateway(replica) as gateway:
        request = b"POST /v1/chat/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n" % len(ODD_BODY)
        head, _, body = (await raw_request(gateway, request + ODD_BODY)).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head.lower()
        assert body == b"data: a\n\ndata: b\n\n"


AMBIGUOUS = [
    b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello",
    b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n\r\n0\r\n\r\n",
    b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
    b"content-length: +5\r\n\r\nhello",
    b"content-length: 0x5\r\n\r\nhello",
    b"content-length : 5\r\n\r\nhello",
    b"x: a\nb: c\r\ncontent-length: 2\r\n\r\n{}",
    b"x: a\0b\r\ncontent-length: 2\r\n\r\n{}",
    b"transfer-encoding: chunked\r\n\r\n0x2\r\n{}\r\n0\r\n\r\n",
    b"transfer-encoding: chunked\r\n\r\n2_\r\n{}\r\n0\r\n\r\n",
    b"transfer-encoding: chunked\r\n\r\n-2\r\n{}\r\n0\r\n\r\n",
]


@pytest.mark.parametrize("rest", AMBIGUOUS, ids=range(len(AMBIGUOUS)))
async def test_ambiguous_framing_never_makes_two_requests(mode: str, rest: bytes) -> None:
    smuggled = post(b'{"model":"m","messages":[],"smuggled":1}', close=False)
    async with ScriptedReplica().running() as replica, running_gateway(replica, mode=mode) as gateway:
        reader, writer = await gateway.connect()
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\n" + rest + smuggled)
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        assert answer.startswith(b"HTTP/1.1 400 ")
        await asyncio.wait_for(reader.read(), 5)  # and closes
        writer.close()
        assert replica.exchanges == []


async def test_too_large_a_head_is_refused() -> None:
    async with ScriptedReplica().running() as replica, running_gateway(replica) as gateway:
        answer = await raw_request(gateway, post(ODD_BODY, headers=b"x-big: " + b"a" * 70_000 + b"\r\n"))
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert replica.exchanges == []


async def test_unfinished_requests_are_cut_off_after_their_time() -> None:
    limits = {"header_timeout_seconds": 0.5, "body_timeout_seconds": 0.5, "keep_alive_seconds": 0.5}
    async with ScriptedReplica().running() as replica, running_gateway(replica, server=limits) as gateway:
        for begun in (b"POST /v1/chat/comp", post(ODD_BODY)[:-10], b""):
            reader, writer = await gateway.connect()
            writer.write(begun)
            assert await asyncio.wait_for(reader.read(), 5) == b""
            writer.close()
        assert replica.exchanges == []


async def test_shutdown_lets_running_requests_finish(mode: str) -> None:
    free = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.start_stream()
        await exchange.chunk(b"data: a\n\n")
        await free.wait()
        await exchange.chunk(b"data: b\n\n")
        await exchange.end_stream()

    async with ScriptedReplica(script).running() as replica:
        async with running_gateway(replica, mode=mode, server={"drain_seconds": 10}) as gateway:
            _, idle = await gateway.connect()
            reader, writer = await gateway.connect()
            writer.write(post(ODD_BODY, close=False))
            await asyncio.wait_for(reader.readuntil(b"data: a\n\n"), 5)
            gateway.stop()
            await eventually(lambda: refused(gateway.port))
            free.set()
            rest = await asyncio.wait_for(reader.read(), 5)
            assert b"data: b\n\n" in rest
            assert rest.endswith(b"0\r\n\r\n")
            writer.close()
            idle.close()
            assert await asyncio.wait_for(gateway.task, 5) == 0


async def refused(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionError:  # a connection in the backlog of a listener that closes is reset
        return True
    writer.close()
    return False


@pytest.mark.parametrize("size", [65_535, 65_536, 200_000, 1_000_000])
async def test_large_bodies_in_any_pieces_and_what_follows_them(mode: str, size: int) -> None:
    """Large bodies go past the parser; the request behind them, even in the same segment, must not."""
    body = b'{"model":"m","messages":[],"x":"' + b"y" * size + b'"}'

    async def script(exchange: Exchange) -> None:
        await exchange.answer(b"%d" % len(exchange.body))

    async with ScriptedReplica(script).running() as replica, running_gateway(replica, mode=mode) as gateway:
        reader, writer = await gateway.connect()
        stream = (post(body, close=False) + post(ODD_BODY, close=False)) * 2
        for at in range(0, len(stream), 49_999):
            writer.write(stream[at : at + 49_999])
            await writer.drain()
        for expected in (body, ODD_BODY, body, ODD_BODY):
            assert (await read_answer(reader))[1] == b"%d" % len(expected)
        writer.close()
        assert [exchange.body for exchange in replica.exchanges] == [body, ODD_BODY, body, ODD_BODY]


async def test_control_request_pipelined_behind_a_refused_one() -> None:
    """What cannot be handed over cleanly is not answered wrongly: the connection closes, the client asks again."""
    async with ScriptedReplica().running() as replica, running_gateway(replica) as gateway:
        answer = await raw_request(gateway, post(b"{", close=False) + GET_HEALTH)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"invalid_json" in answer
