"""Attacks: what broke the gateway once, or was tried in order to break it. Raw bytes from both sides."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import time
from typing import Any

import pytest

from gateway.assembly import Gateway
from gateway.config import Config, Server
from gateway.config import Upstream as UpstreamConfig
from gateway.core.model import ReplicaId, RouteRequest
from gateway.core.router import Router
from gateway.core.settings import RoutingSettings
from gateway.proxy import sweep
from gateway.proxy.call import Call
from gateway.proxy.endpoints import ENDPOINTS
from gateway.proxy.errors import ConnectFailed
from gateway.proxy.exchange import Exchange
from gateway.proxy.front_door import FrontDoor
from gateway.proxy.gate import Gate
from gateway.proxy.upstream import Upstream
from tests.proxy.conftest import RunningGateway, eventually, running_gateway
from tests.proxy.scripted import ANSWER, ScriptedReplica
from tests.proxy.scripted import Exchange as ReplicaExchange
from tests.proxy.test_client_connection import GET_HEALTH, read_answer, refused
from tests.proxy.test_faults import nothing_in_flight
from tests.proxy.test_front_door import ODD_BODY, post, raw_request


async def test_the_body_of_a_get_never_becomes_a_request_of_its_own(mode: str) -> None:
    smuggled = post(b'{"model":"m","messages":[],"smuggled":1}', close=False)
    get = b"GET /v1/responses/resp_1 HTTP/1.1\r\nhost: g\r\ncontent-length: %d\r\n\r\n" % len(smuggled) + smuggled
    async with ScriptedReplica().running() as replica, running_gateway(replica, mode=mode) as gateway:
        reader, writer = await gateway.connect()
        writer.write(get)
        assert (await read_answer(reader))[1] == ANSWER
        writer.close()
        assert (await gateway.chat("next")).status_code == 200
        assert [one.request_line.split()[0] for one in replica.exchanges] == [b"GET", b"POST"]
        assert replica.exchanges[0].body == smuggled
        assert b"next" in replica.exchanges[1].body


async def test_a_time_out_on_a_kept_connection_is_not_sent_again(mode: str) -> None:
    async def script(exchange: ReplicaExchange) -> None:
        if b"slow" in exchange.body:
            await exchange.wait_closed()
        else:
            await exchange.answer(ANSWER)

    limits = {"first_byte_timeout_seconds": 0.5}
    async with ScriptedReplica(script).running() as replica, running_gateway(replica, mode=mode, upstream=limits) as g:
        assert (await g.chat("quick")).status_code == 200
        response = await g.chat("slow")
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "replica_timeout"
        assert len(replica.exchanges) == 2


@pytest.mark.parametrize("endless", [b"0\r\nx: " + b"y" * 9 + b"\r\n", b"5;"])
async def test_framing_without_end_breaks_an_answer_off(mode: str, endless: bytes) -> None:
    async def script(exchange: ReplicaExchange) -> None:
        await exchange.start_stream()
        await exchange.send(endless)
        while not exchange.closed.is_set():
            await exchange.send(b"a: b\r\n" * 1_000 if endless[:1] == b"0" else b"a" * 6_000)
            await asyncio.sleep(0.001)

    async with ScriptedReplica(script).running() as replica, running_gateway(replica, mode=mode) as gateway:
        assert b"replica_bad_answer" in await asyncio.wait_for(raw_request(gateway, post(ODD_BODY)), 10)


EARLY = b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n"


async def test_interim_answers_are_passed_over_and_those_without_end_are_broken_off(mode: str) -> None:
    """The replica's connection ends with it: whoever goes on sending into it must not burn a core here."""

    async def script(exchange: ReplicaExchange) -> None:
        if b"some" in exchange.body:
            await exchange.send(EARLY * 20)
            await exchange.answer(ANSWER)
        while not exchange.closed.is_set() and b"endless" in exchange.body:
            await exchange.send(EARLY * 100)
            await asyncio.sleep(0.001)

    async with ScriptedReplica(script).running() as replica, running_gateway(replica, mode=mode) as gateway:
        assert (await gateway.chat("some")).content == ANSWER
        response = await gateway.chat("endless")
        assert (response.status_code, response.json()["error"]["code"]) == (502, "replica_bad_answer")
        await eventually(lambda: replica.exchanges[-1].reader.exception() or replica.exchanges[-1].reader.at_eof())
        assert len(replica.exchanges) == 2


async def test_interim_answers_that_come_slowly_win_no_time(mode: str) -> None:
    async def script(exchange: ReplicaExchange) -> None:
        while not exchange.closed.is_set():
            await exchange.send(EARLY)
            await asyncio.sleep(0.05)

    limits = {"first_byte_timeout_seconds": 0.5, "idle_timeout_seconds": 60.0}
    async with ScriptedReplica(script).running() as replica, running_gateway(replica, mode=mode, upstream=limits) as g:
        response = await g.chat()
        assert (response.status_code, response.json()["error"]["code"]) == (504, "replica_timeout")


async def test_trailers_are_no_headers(mode: str) -> None:
    async def script(exchange: ReplicaExchange) -> None:
        await exchange.send(
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nx-late: 1\r\nset-cookie: a=b\r\n\r\n"
        )

    request = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
        b"%x\r\n%b\r\n0\r\nauthorization: Bearer stolen\r\nx-late: 1\r\n\r\n" % (len(ODD_BODY), ODD_BODY)
    )
    async with ScriptedReplica(script).running() as replica, running_gateway(replica, mode=mode) as gateway:
        answer = await raw_request(gateway, request)
        assert not {"authorization", "x-late"} & dict(replica.exchanges[0].headers).keys()
        assert replica.exchanges[0].body == ODD_BODY
        head, _, body = answer.lower().partition(b"\r\n\r\n")
        assert b"x-late" not in head
        assert b"set-cookie" not in head
        assert body == b"2\r\n{}\r\n0\r\n\r\n"


async def test_a_pipelined_request_sets_no_time_limit_on_the_answer_before_it(mode: str) -> None:
    free = asyncio.Event()

    async def script(exchange: ReplicaExchange) -> None:
        if exchange.number == 1:
            await exchange.start_stream()
            await exchange.chunk(b"data: a\n\n")
            await free.wait()
            await exchange.chunk(b"data: b\n\n")
            await exchange.end_stream()
        else:
            await exchange.answer(ANSWER)

    limits = {"header_timeout_seconds": 0.2, "body_timeout_seconds": 0.2, "keep_alive_seconds": 30.0}
    request = post(ODD_BODY, close=False)
    async with ScriptedReplica(script).running() as replica, running_gateway(replica, mode=mode, server=limits) as g:
        reader, writer = await g.connect()
        writer.write(request)
        await asyncio.wait_for(reader.readuntil(b"data: a\n\n"), 5)
        writer.write(request[:-5])
        await asyncio.sleep(2 * sweep.SWEEP_SECONDS + 0.2)  # every deadline that is wrongly set has passed
        free.set()
        await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 5)
        writer.write(request[-5:])
        assert (await read_answer(reader))[1] == ANSWER
        writer.close()


async def test_back_pressure_holds_for_each_of_several_pipelined_answers() -> None:
    total, sent = 64 * 2**20, [0, 0]

    async def script(exchange: ReplicaExchange) -> None:
        await exchange.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % total)
        for _ in range(total // 2**16):
            await exchange.send(b"x" * 2**16)
            sent[exchange.number - 1] += 2**16

    async with ScriptedReplica(script).running() as replica, running_gateway(replica) as gateway:
        reader, writer = await gateway.connect()
        writer.write(post(ODD_BODY, close=False) * 2)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        await reader.readexactly(total)
        await eventually(lambda: sent[1] > 0)
        seen = -1
        while seen != sent[1]:  # until the replica is held up
            seen = sent[1]
            await asyncio.sleep(0.3)
        assert sent[1] < total // 2, "the second answer must wait for its reader too"
        writer.close()


@pytest.mark.parametrize("pieces", [1, 50])
async def test_the_target_counts_as_head(pieces: int) -> None:
    request = post(ODD_BODY, path="/v1/chat/completions?" + "a" * 100_000)
    async with ScriptedReplica().running() as replica, running_gateway(replica) as gateway:
        reader, writer = await gateway.connect()
        step = -(-len(request) // pieces)
        for at in range(0, len(request), step):
            writer.write(request[at : at + step])
            await asyncio.sleep(0.002 if pieces > 1 else 0)
        assert (await asyncio.wait_for(reader.readuntil(b"\r\n"), 5)).startswith(b"HTTP/1.1 431 ")
        writer.close()
        assert replica.exchanges == []


async def test_a_broken_answer_leaves_no_traceback(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    async def script(exchange: ReplicaExchange) -> None:
        await exchange.start_stream()
        await exchange.chunk(b"data: a\n\n")
        exchange.reset()

    async with ScriptedReplica(script).running() as replica, running_gateway(replica, mode=mode) as gateway:
        answer = await raw_request(gateway, post(ODD_BODY))
        assert b"replica_connection_lost" in answer
        assert not answer.endswith(b"0\r\n\r\n")
    assert "Traceback" not in capsys.readouterr().err


async def test_a_client_that_leaves_the_dry_run_leaves_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    async with ScriptedReplica().running() as replica, running_gateway(replica) as gateway:
        reader, writer = await gateway.connect()
        writer.write(post(ODD_BODY, path="/warmlane/route")[:-5])
        await asyncio.sleep(0.05)
        writer.close()
        assert (await gateway.client.get("/health")).status_code == 200
        await asyncio.wait_for(reader.read(), 5)
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("first", [b"", b"GET /health HTTP/1.1\r\nhost: g\r\n\r\n"], ids=["at first", "later"])
async def test_bad_framing_where_uvicorn_reads_is_refused_once(
    first: bytes, pieces: int, caplog: pytest.LogCaptureFixture
) -> None:
    head = b"POST /warmlane/route HTTP/1.1\r\nhost: g\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n"
    async with ScriptedReplica().running() as replica, running_gateway(replica) as gateway:
        reader, writer = await gateway.connect()
        if first:
            writer.write(first)
            await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        writer.write(head + b"zz\r\n" if pieces == 1 else head)
        if pieces == 2:
            await asyncio.sleep(0.05)
            writer.write(b"zz\r\n")
        answer = await asyncio.wait_for(reader.read(), 5)
        assert answer.count(b"HTTP/1.1 400 ") == 1
        assert b"not a valid HTTP request" in answer
        writer.close()
    assert [record for record in caplog.records if record.exc_info] == []


@pytest.mark.parametrize("reset", [False, True], ids=["FIN", "RST"])
async def test_who_leaves_with_another_request_behind_leaves_no_traceback(
    reset: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """uvicorn tells only the request that it read last, here one that waits for its turn."""
    going = asyncio.Event()

    async def script(exchange: ReplicaExchange) -> None:
        await exchange.start_stream()
        await going.wait()
        for _ in range(20):
            await exchange.chunk(b"data: a\n\n")
            await asyncio.sleep(0.002)

    async with ScriptedReplica(script).running() as replica, running_gateway(replica, mode="asgi") as gateway:
        reader, writer = await gateway.connect()
        writer.write(post(ODD_BODY, close=False) + post(ODD_BODY, close=False)[:-5])
        await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        if reset:
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()
        await asyncio.sleep(0.05)
        going.set()
        await eventually(lambda: nothing_in_flight(gateway))
    assert "Traceback" not in capsys.readouterr().err


async def test_the_dry_run_takes_no_larger_bodies_than_the_paths_it_explains() -> None:
    async with ScriptedReplica().running() as replica, running_gateway(replica, server={"max_body_mib": 1}) as gateway:
        response = await gateway.client.post("/warmlane/route", content=b"x" * 2**21)
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "request_too_large"


@pytest.mark.parametrize("status", [b"099 Odd", b"000 Odd"])
async def test_a_status_that_is_none_is_a_bad_answer(mode: str, status: bytes) -> None:
    async def script(exchange: ReplicaExchange) -> None:
        await exchange.answer(b"{}", status=status.decode())

    async with ScriptedReplica(script).running() as replica, running_gateway(replica, mode=mode) as gateway:
        response = await gateway.chat()
        assert response.status_code == 502
        assert response.json()["error"]["code"] == "replica_bad_answer"


@pytest.mark.parametrize(
    "begun", [b"GET /hea", b"POST /warmlane/route HTTP/1.1\r\nhost: g\r\ncontent-length: 9\r\n\r\n{", b""]
)
async def test_unfinished_requests_end_also_where_uvicorn_reads(mode: str, begun: bytes) -> None:
    limits = {"header_timeout_seconds": 0.5, "body_timeout_seconds": 0.5, "keep_alive_seconds": 1.0}
    async with ScriptedReplica().running() as replica, running_gateway(replica, mode=mode, server=limits) as gateway:
        reader, writer = await gateway.connect()
        writer.write(GET_HEALTH)
        assert (await read_answer(reader))[1] == b"ok"
        writer.write(begun)
        assert await asyncio.wait_for(reader.read(), 8) == b""
        writer.close()


async def test_an_endless_head_is_cut_off_also_where_uvicorn_reads(mode: str) -> None:
    async with ScriptedReplica().running() as replica, running_gateway(replica, mode=mode) as gateway:
        reader, writer = await gateway.connect()
        writer.write(GET_HEALTH)
        assert (await read_answer(reader))[1] == b"ok"
        cut = asyncio.create_task(asyncio.wait_for(reader.read(), 8))
        writer.write(b"GET /health HTTP/1.1\r\nhost: g\r\n")
        for _ in range(1000):
            writer.write(b"x-more: " + b"y" * 10_000 + b"\r\n")
            await asyncio.sleep(0)
            if cut.done():
                break
        assert cut.done()
        assert cut.exception() is None or isinstance(cut.exception(), ConnectionError)
        writer.close()


async def test_stopping_with_streams_in_flight_is_quiet(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    failures: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))

    async def script(exchange: ReplicaExchange) -> None:
        await exchange.start_stream()
        await exchange.chunk(b"data: a\n\n")
        await exchange.wait_closed(20)

    async with ScriptedReplica(script).running() as replica:
        async with running_gateway(replica, mode=mode, server={"drain_seconds": 1.0}) as gateway:
            streams = [await gateway.connect() for _ in range(5)]
            for reader, writer in streams:
                writer.write(post(ODD_BODY, close=False))
                await asyncio.wait_for(reader.readuntil(b"data: a\n\n"), 5)
            gateway.stop()
            assert await asyncio.wait_for(gateway.task, 10) == 0
            for _, writer in streams:
                writer.close()
        await eventually(lambda: all(exchange.closed.is_set() for exchange in replica.exchanges))
    assert failures == []
    assert "Traceback" not in capsys.readouterr().err


async def test_a_client_that_reads_nothing_is_cut_off_in_the_end(mode: str) -> None:
    async def script(exchange: ReplicaExchange) -> None:
        try:
            await exchange.answer(b"x" * (64 * 2**20))
        except ConnectionError:
            exchange.closed.set()

    limits = {"stall_timeout_seconds": 0.5}
    async with (
        ScriptedReplica(script).running() as replica,
        running_gateway(replica, mode=mode, server=limits) as gateway,
    ):
        _, writer = await gateway.connect()
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(post(ODD_BODY, close=False))
        await eventually(lambda: bool(replica.exchanges))
        await replica.exchanges[0].wait_closed(10)
        writer.close()


@pytest.mark.parametrize("signals", [1, 2])
async def test_what_is_cut_off_at_the_end_is_still_recorded(
    mode: str, signals: int, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    async def script(exchange: ReplicaExchange) -> None:
        await exchange.start_stream()
        await exchange.chunk(b"data: a\n\n")
        await exchange.wait_closed(20)

    drain = 0.5 if signals == 1 else 20.0
    async with ScriptedReplica(script).running() as replica:
        settings = {"drain_seconds": drain, "log": "json"}
        async with running_gateway(replica, mode=mode, server=settings) as gateway:
            reader, writer = await gateway.connect()
            writer.write(post(ODD_BODY, close=False))
            await asyncio.wait_for(reader.readuntil(b"data: a\n\n"), 5)
            for _ in range(signals):
                gateway.stop()
                await eventually(lambda: refused(gateway.port))
            assert await asyncio.wait_for(gateway.task, 10) == 0
            writer.close()
        await eventually(replica.exchanges[0].closed.is_set)
    out = capfdbinary.readouterr().out
    assert out.count(b'"route":"/v1/chat/completions"') == 1
    assert b'"outcome":"stopped"' in out


@pytest.mark.parametrize("signals", [1, 2])
async def test_who_waits_until_the_end_is_told_to_come_back(
    mode: str, signals: int, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """Nothing of it was begun: a bare cut would leave its client in doubt."""

    async def script(exchange: ReplicaExchange) -> None:
        await exchange.wait_closed(20)

    settings = {"drain_seconds": 0.5 if signals == 1 else 20.0, "log": "json"}
    async with ScriptedReplica(script).running() as replica:
        async with running_gateway(replica, mode=mode, server=settings, routing={"max_in_flight": 1}) as gateway:
            _, holder = await gateway.connect()
            holder.write(post(ODD_BODY, close=False))
            await eventually(lambda: bool(replica.exchanges))
            waiting = [await gateway.connect() for _ in range(3)]
            for _, writer in waiting:
                writer.write(post(ODD_BODY, close=False))

            async def all_wait() -> bool:
                return "warmlane_waiting_requests 3.0" in await gateway.metrics()

            await eventually(all_wait)
            for _ in range(signals):
                gateway.stop()
                await eventually(lambda: refused(gateway.port))
            for reader, writer in waiting:
                answer = (await asyncio.wait_for(reader.read(), 10)).lower()
                assert answer.startswith(b"http/1.1 503 ")
                assert b"\r\nretry-after: 1\r\n" in answer
                assert b"\r\nconnection: close\r\n" in answer
                assert b'"code":"gateway_stopping"' in answer
                writer.close()
            assert await asyncio.wait_for(gateway.task, 10) == 0
            holder.close()
        assert len(replica.exchanges) == 1
    out = capfdbinary.readouterr().out
    assert out.count(b'"outcome":"stopped"') == 4
    assert out.count(b'"status":503') == 3


async def test_a_place_given_to_a_client_that_just_left_goes_to_the_next() -> None:
    """Both happen in one iteration of the loop: the gate lets the second in, its client leaves before it is told."""
    loop = asyncio.get_running_loop()
    failures: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: failures.append(context))
    gate = Gate(Router(RoutingSettings(max_in_flight=1)), time.monotonic, loop)
    inside: list[str] = []

    async def enter(name: str) -> None:
        await gate.enter(RouteRequest())
        inside.append(name)

    first = await gate.enter(RouteRequest())
    second, third = Exchange(enter("second")), Exchange(enter("third"))
    second.start()
    third.start()
    gate.leave(first)
    second.cancel()
    await eventually(lambda: third.ended.done)
    assert inside == ["third"]
    assert second.ended.done
    assert failures == []


async def test_a_connection_made_just_as_its_client_leaves_is_kept_for_the_next(mode: str) -> None:
    failures: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))

    async def leave(gateway: RunningGateway, seconds: float) -> None:
        _, writer = await gateway.connect()
        writer.write(post(ODD_BODY, close=False))
        await asyncio.sleep(seconds)
        writer.transport.abort()

    async with ScriptedReplica().running() as replica, running_gateway(replica, mode=mode) as gateway:
        rng = random.Random(7)
        for _ in range(10):
            await asyncio.gather(*(leave(gateway, rng.random() * 0.01) for _ in range(50)))
        assert (await gateway.chat()).status_code == 200

        async def idle() -> bool:
            return "warmlane_in_flight_requests 0.0" in await gateway.metrics()

        await eventually(idle)
        assert 'state="up"} 1.0' in await gateway.metrics()
    assert failures == []


async def test_a_name_that_cannot_be_one_is_an_unreachable_replica() -> None:
    upstream = Upstream(ReplicaId("http://a..b:1"), UpstreamConfig(), asyncio.get_running_loop())
    with pytest.raises(ConnectFailed):
        await upstream.connect()


async def test_a_bug_in_an_exchange_cuts_its_connection() -> None:
    """Never seen, hence made, by a size that makes hashing fail: the client must not wait for ever."""
    failures: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    config = Config(server=Server(port=0, log="off"))
    gateway = Gateway(config, asyncio.get_running_loop())
    loop = asyncio.get_running_loop()
    door = FrontDoor(
        gateway.router, gateway.telemetry, config.server, config.upstream, gateway.clock, loop, block_bytes=0
    )
    call = Call(b"POST", b"/v1/chat/completions", ENDPOINTS[b"/v1/chat/completions"], [], ODD_BODY, 0.0)
    client = NotingClient()
    Exchange(door.serve(call, client)).start()
    assert client.aborted
    assert len(failures) == 1
    assert "warmlane_in_flight_requests 0.0" in gateway.telemetry.render().decode()


class NotingClient:
    def __init__(self) -> None:
        self.aborted = False

    def attach(self, connection: object) -> None: ...

    def start(self, status: int, headers: object) -> None: ...

    def write(self, data: bytes, last: bool) -> None: ...

    def abort(self) -> None:
        self.aborted = True


@pytest.mark.parametrize("pieces", [1, 7, 5000])
async def test_chunked_bodies_of_tiny_chunks(mode: str, pieces: int) -> None:
    body = b'{"model":"m","messages":[],"x":"' + b"y" * 20_000 + b'"}'
    step = max(1, len(body) // pieces)
    chunks = [body[at : at + step] for at in range(0, len(body), step)]
    request = b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ntransfer-encoding: chunked\r\n\r\n"
    request += b"".join(b"%x;ext=1\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    async with ScriptedReplica().running() as replica, running_gateway(replica, mode=mode) as gateway:
        reader, writer = await gateway.connect()
        writer.write(request + request)
        for _ in range(2):
            assert (await read_answer(reader))[1] == ANSWER
        writer.close()
        assert [exchange.body for exchange in replica.exchanges] == [body, body]


async def test_a_request_that_waits_for_100_behind_another_gets_it() -> None:
    async def script(exchange: ReplicaExchange) -> None:
        if exchange.number == 1:
            await asyncio.sleep(0.1)
        await exchange.answer(exchange.body)

    waiting = post(b'{"n":2}', close=False, headers=b"expect: 100-continue\r\n")
    async with ScriptedReplica(script).running() as replica, running_gateway(replica) as gateway:
        reader, writer = await gateway.connect()
        writer.write(post(b'{"n":1}', close=False) + waiting[:-7])
        assert (await read_answer(reader))[1] == b'{"n":1}'
        assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5) == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(waiting[-7:])
        assert (await read_answer(reader))[1] == b'{"n":2}'
        writer.close()


async def test_an_offered_upgrade_hides_no_other_connection_option() -> None:
    headers = b"connection: Upgrade, close, x-hop\r\nupgrade: h2c\r\nx-hop: 1\r\nexpect: 100-continue\r\n"
    async with ScriptedReplica().running() as replica, running_gateway(replica) as gateway:
        answer = await raw_request(gateway, post(ODD_BODY, close=False, headers=headers))
        assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 ")
        assert answer.endswith(ANSWER)
        assert not {"upgrade", "x-hop"} & dict(replica.exchanges[0].headers).keys()


async def test_whole_requests_ahead_of_a_bad_one_are_answered() -> None:
    async with ScriptedReplica().running() as replica, running_gateway(replica) as gateway:
        for bad in (b"\x00\r\n\r\n", GET_HEALTH):
            answer = await raw_request(gateway, post(ODD_BODY, close=False) * 3 + bad)
            assert answer.count(ANSWER) == 3
            assert answer.count(b"connection: close") == 1


@pytest.mark.parametrize(
    "answer", [b"204 No\r\ntransfer-encoding: chunked", b"304 Not\r\ncontent-length: 5", b"204 No"]
)
async def test_answers_without_a_body(mode: str, answer: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    async def script(exchange: ReplicaExchange) -> None:
        await exchange.send(b"HTTP/1.1 " + answer + b"\r\n\r\n")

    async with ScriptedReplica(script).running() as replica, running_gateway(replica, mode=mode) as gateway:
        for _ in range(2):
            response = await gateway.chat()
            assert response.status_code == int(answer[:3])
            assert response.content == b""
    assert "Traceback" not in capsys.readouterr().err


async def test_offered_upgrades_lose_no_body_also_where_uvicorn_reads(mode: str) -> None:
    offer = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAA\r\n"
    async with ScriptedReplica().running() as replica, running_gateway(replica, mode=mode) as gateway:
        reader, writer = await gateway.connect()
        for _ in range(2):
            writer.write(GET_HEALTH[:-2] + offer + b"\r\n")
            assert (await read_answer(reader))[1] == b"ok"
            writer.write(post(ODD_BODY, close=False, headers=offer))
            assert (await read_answer(reader))[1] == ANSWER
        writer.write(b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n")
        assert (await read_answer(reader))[0].startswith(b"HTTP/1.1 400 ")
        writer.close()
        assert [exchange.body for exchange in replica.exchanges] == [ODD_BODY, ODD_BODY]
