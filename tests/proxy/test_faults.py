"""What happens when replicas or clients fail in mid-request: real sockets, scripted replicas."""

from __future__ import annotations

import asyncio
import socket
import struct

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from gateway.proxy.upstream import STALE_SECONDS
from tests.proxy.conftest import RunningGateway, eventually, running_gateway
from tests.proxy.scripted import ANSWER, Exchange, ScriptedReplica
from tests.proxy.test_front_door import ODD_BODY, post, raw_request

EVENT = (
    b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m",'
    b'"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'
)


async def answer_after_going(exchange: Exchange) -> None:
    exchange.reset()


async def test_refused_connection_fails_over(mode: str) -> None:
    first, second = ScriptedReplica(), ScriptedReplica()
    async with first.running(), second.running(), running_gateway(first, second, mode=mode) as gateway:
        await first.stop()
        for number in range(10):
            assert (await gateway.chat(f"{number}")).status_code == 200
        assert len(second.exchanges) == 10


async def test_lost_connection_is_replayed_once_on_another_replica(mode: str) -> None:
    async def dies(exchange: Exchange) -> None:
        exchange.reset()

    first, second = ScriptedReplica(dies), ScriptedReplica()
    async with first.running(), second.running(), running_gateway(first, second, mode=mode) as gateway:
        for number in range(6):
            response = await gateway.chat(f"{number}")
            assert response.status_code == 200
            assert response.headers["x-warmlane-replica"] == second.url
        assert len(second.exchanges) == 6


async def test_requests_that_create_state_are_never_replayed(mode: str) -> None:
    """O-05, O-28."""
    first, second = ScriptedReplica(answer_after_going), ScriptedReplica(answer_after_going)
    async with first.running(), second.running(), running_gateway(first, second, mode=mode) as gateway:
        response = await gateway.client.post("/v1/responses", json={"model": "m", "input": "x"})
        assert response.status_code == 502
        assert response.json()["error"]["code"] == "replica_connection_lost"
        assert len(first.exchanges) + len(second.exchanges) == 1


async def test_stateless_requests_are_replayed_at_most_once(mode: str) -> None:
    """O-05 (a)."""
    replicas = [ScriptedReplica(answer_after_going) for _ in range(3)]
    async with replicas[0].running(), replicas[1].running(), replicas[2].running():
        async with running_gateway(*replicas, mode=mode) as gateway:
            assert (await gateway.chat()).status_code == 502
            assert sum(len(one.exchanges) for one in replicas) == 2


async def test_reused_connection_that_died_is_replaced_without_blame(mode: str) -> None:
    """O-06, the keep-alive race: the replica closes an idle connection just as the gateway sends on it."""

    async def closes_on_second_use(exchange: Exchange) -> None:
        if exchange.on_connection == 2:
            exchange.reset()
        else:
            await exchange.answer(ANSWER)

    async with ScriptedReplica(closes_on_second_use).running() as replica:
        async with running_gateway(replica, mode=mode) as gateway:
            for _ in range(3):
                assert (await gateway.chat()).status_code == 200
                await asyncio.sleep(STALE_SECONDS + 0.05)
            assert 'state="up"} 1.0' in await gateway.metrics()


async def test_requests_that_create_state_never_meet_a_dead_kept_connection(mode: str) -> None:
    async def works_then_resets_on_second_use(exchange: Exchange) -> None:
        if exchange.on_connection == 2:
            exchange.reset()
        else:
            await exchange.answer(b'{"id":"resp_1","object":"response"}')

    async with ScriptedReplica(works_then_resets_on_second_use).running() as replica:
        async with running_gateway(replica, mode=mode) as gateway:
            for _ in range(6):
                response = await gateway.client.post("/v1/responses", json={"model": "m", "input": "x"})
                assert response.status_code == 200
            assert [exchange.on_connection for exchange in replica.exchanges] == [1] * 6


async def test_all_replicas_down_is_a_clear_error(mode: str) -> None:
    async with ScriptedReplica().running() as replica, running_gateway(replica, mode=mode) as gateway:
        await replica.stop()
        response = await gateway.chat()
        assert response.status_code in (502, 503)
        assert response.json()["error"]["code"] in ("replica_unreachable", "no_replica")

        async def unready() -> bool:
            return (await gateway.client.get("/ready")).status_code == 503

        await eventually(unready)
        response = await gateway.chat()
        assert response.status_code in (502, 503)
        assert int(response.headers.get("retry-after", "1")) >= 1
        assert (await gateway.client.get("/health")).status_code == 200


async def test_health_and_readiness_answer_head_like_get_without_a_body(mode: str) -> None:
    async def heads(gateway: RunningGateway) -> list[int]:
        found = []
        for path in (b"/health", b"/ready"):
            reader, writer = await gateway.connect()
            writer.write(b"HEAD " + path + b" HTTP/1.1\r\nhost: g\r\nconnection: close\r\n\r\n")
            answer = await asyncio.wait_for(reader.read(), 10)
            writer.close()
            assert answer.endswith(b"\r\n\r\n"), "nothing behind the head"
            found.append(int(answer.split()[1]))
        return found

    async with ScriptedReplica().running() as replica, running_gateway(replica, mode=mode) as gateway:
        assert await heads(gateway) == [200, 200]
    async with running_gateway(mode=mode, wait_ready=False) as gateway:
        assert await heads(gateway) == [200, 503]


ERROR = b'{"error":{"message":"Internal server error","type":"InternalServerError","param":null,"code":500}}'


async def fails_what_is_bad(exchange: Exchange) -> None:
    if b"stream bad" in exchange.body:
        await exchange.start_stream()
        await exchange.chunk(b"data: " + ERROR + b"\n\ndata: [DONE]\n\n")
        await exchange.end_stream()
    elif b"bad" in exchange.body:
        await exchange.answer(ERROR, status="500 Internal Server Error")
    else:
        await exchange.answer(ANSWER)


async def test_requests_that_fail_everywhere_take_no_replica_out(mode: str) -> None:
    """O-13 for what a client can make any engine answer with a 500."""
    replicas = [ScriptedReplica(fails_what_is_bad) for _ in range(3)]
    async with replicas[0].running(), replicas[1].running(), replicas[2].running():
        async with running_gateway(*replicas, mode=mode) as gateway:
            for number in range(90):
                await gateway.chat(f"{'stream bad' if number % 2 else 'bad'} {number}", stream=bool(number % 2))
                if number % 10 == 0:
                    assert (await gateway.chat(f"good {number}")).content == ANSWER
            assert (await gateway.client.get("/ready")).status_code == 200
            assert len((await gateway.client.get("/v1/models")).json()["data"]) == 1
            assert (await gateway.metrics()).count('state="up"} 1.0') == 3
            assert min(len(replica.exchanges) for replica in replicas) > 0


async def test_a_replica_that_answers_with_errors_where_others_do_not_is_out(mode: str) -> None:
    async def fails(exchange: Exchange) -> None:
        await exchange.answer(ERROR, status="500 Internal Server Error")

    sick, well = ScriptedReplica(fails), ScriptedReplica()
    async with sick.running(), well.running(), running_gateway(sick, well, mode=mode) as gateway:

        async def is_out() -> bool:
            await gateway.chat("anything")
            return f'{sick.url}",state="ejected"}} 1.0' in await gateway.metrics()

        await eventually(is_out)
        assert (await gateway.chat("anything")).content == ANSWER


async def test_no_replica_configured() -> None:
    async with running_gateway(wait_ready=False) as gateway:
        assert (await gateway.client.get("/ready")).status_code == 503
        response = await gateway.chat()
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "no_replica"
        assert "retry-after" in response.headers


async def broken_stream(exchange: Exchange, how: str) -> None:
    await exchange.start_stream()
    for _ in range(3):
        await exchange.chunk(EVENT)
    if how == "reset":
        exchange.reset()
    elif how == "end":
        exchange.writer.close()
    else:
        await exchange.wait_closed(10)


async def read_contents(stream: openai.AsyncStream[ChatCompletionChunk], into: list[str | None]) -> None:
    async for chunk in stream:
        into.append(chunk.choices[0].delta.content)  # noqa: PERF401 - what came before the error counts


@pytest.mark.parametrize("how", ["reset", "end", "stall"])
async def test_a_stream_that_breaks_raises_in_the_sdk(mode: str, how: str) -> None:
    """O-03; and O-05 (c): it is not sent again."""

    async def script(exchange: Exchange) -> None:
        await broken_stream(exchange, how)

    limits = {"idle_timeout_seconds": 0.3}
    async with ScriptedReplica(script).running() as replica:
        async with running_gateway(replica, mode=mode, upstream=limits) as gateway:
            client = openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key="k", max_retries=0)
            stream = await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "x"}], stream=True
            )
            received: list[str | None] = []
            with pytest.raises(openai.APIError):
                await read_contents(stream, received)
            assert received == ["a", "a", "a"]
            await client.close()
            assert len(replica.exchanges) == 1
            page = await gateway.metrics()
            assert 'outcome="failed"' in page


@pytest.mark.parametrize("how", ["reset", "end"])
async def test_a_broken_stream_ends_with_one_error_and_without_done(mode: str, how: str) -> None:
    async def script(exchange: Exchange) -> None:
        await broken_stream(exchange, how)

    async with ScriptedReplica(script).running() as replica, running_gateway(replica, mode=mode) as gateway:
        answer = await raw_request(gateway, post(ODD_BODY, close=False))
        assert answer.count(b'data: {"error":') == 1
        assert b"[DONE]" not in answer
        assert b'"finish_reason":"stop"' not in answer
        assert not answer.endswith(b"0\r\n\r\n")


async def test_a_short_body_is_not_made_to_look_whole(mode: str) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n{")
        exchange.writer.close()

    async with ScriptedReplica(script).running() as replica, running_gateway(replica, mode=mode) as gateway:
        with pytest.raises(httpx.RemoteProtocolError):
            await gateway.chat()


async def test_an_answer_that_is_not_http_is_a_502(mode: str) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.send(b"SMTP ready\r\n\r\n")

    async with ScriptedReplica(script).running() as replica, running_gateway(replica, mode=mode) as gateway:
        response = await gateway.chat()
        assert (response.status_code, response.json()["error"]["code"]) == (502, "replica_bad_answer")


async def test_two_answers_to_one_request_do_not_reach_the_next_client(mode: str) -> None:
    async def script(exchange: Exchange) -> None:
        smuggled = b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\nsmuggled"
        await exchange.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        await exchange.send(smuggled)

    async with ScriptedReplica(script).running() as replica, running_gateway(replica, mode=mode) as gateway:
        for _ in range(5):
            response = await gateway.chat()
            assert b"smuggled" not in response.content


async def test_no_answer_in_time_is_a_504_and_not_sent_again(mode: str) -> None:
    """O-05 (b), O-07 (a)."""

    async def silent(exchange: Exchange) -> None:
        await exchange.wait_closed()

    first, second = ScriptedReplica(silent), ScriptedReplica(silent)
    limits = {"first_byte_timeout_seconds": 0.3}
    async with first.running(), second.running():
        async with running_gateway(first, second, mode=mode, upstream=limits) as gateway:
            response = await gateway.chat()
            assert (response.status_code, response.json()["error"]["code"]) == (504, "replica_timeout")
            exchanges = first.exchanges + second.exchanges
            assert len(exchanges) == 1
            await exchanges[0].wait_closed(2)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", ["before the head", "after the head"])
async def test_a_client_that_leaves_stops_the_replica(mode: str, stream: bool, phase: str) -> None:
    """O-01."""

    async def script(exchange: Exchange) -> None:
        if phase == "after the head":
            if stream:
                await exchange.start_stream()
                await exchange.chunk(EVENT)
            else:
                await exchange.send(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n{")
        await exchange.wait_closed()

    first, second = ScriptedReplica(script), ScriptedReplica(script)
    async with first.running(), second.running(), running_gateway(first, second, mode=mode) as gateway:
        reader, writer = await gateway.connect()
        writer.write(post(ODD_BODY, close=False))
        await eventually(lambda: first.exchanges + second.exchanges)
        if phase == "after the head":
            await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        writer.close()
        exchanges = first.exchanges + second.exchanges
        await exchanges[0].wait_closed(1.0)
        await eventually(lambda: nothing_in_flight(gateway))
        assert len(first.exchanges + second.exchanges) == 1
        page = await gateway.metrics()
        assert 'outcome="client_left"' in page
        assert page.count('state="up"} 1.0') == 2


@pytest.mark.parametrize("reset", [False, True], ids=["FIN", "RST"])
@pytest.mark.parametrize("size", [50, 60_000])
async def test_a_client_that_leaves_is_noticed_where_reading_is_paused(mode: str, size: int, reset: bool) -> None:
    """O-01: requests pipelined behind the one being answered lie unread before the end of the connection."""

    async def script(exchange: Exchange) -> None:
        await exchange.wait_closed(10.0)

    control = b"GET /health HTTP/1.1\r\nhost: g\r\n\r\n"
    behind = post(b"x" * size, close=False) * (20 if mode == "fast" else 3)  # the fast way reads 16, or 1 MiB
    async with ScriptedReplica(script).running() as replica, running_gateway(replica, mode=mode) as gateway:
        with socket.create_connection(("127.0.0.1", gateway.port)) as client:
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            if mode == "asgi":
                await loop.sock_sendall(client, control)
                assert (await loop.sock_recv(client, 4096)).startswith(b"HTTP/1.1 200")
            await loop.sock_sendall(client, post(ODD_BODY, close=False) + behind)
            await eventually(lambda: replica.exchanges)
            if reset:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await replica.exchanges[0].wait_closed(5.0)
        await eventually(lambda: nothing_in_flight(gateway))
        assert 'outcome="client_left"' in await gateway.metrics()
        assert len(replica.exchanges) == 1


async def nothing_in_flight(gateway: RunningGateway) -> bool:
    lines = [
        line
        for line in (await gateway.metrics()).splitlines()
        if line.startswith("warmlane_replica_in_flight_requests{")
    ]
    return bool(lines) and all(line.endswith(" 0.0") for line in lines)


async def test_mass_disconnect_leaves_nothing_behind(mode: str) -> None:
    """O-02."""

    async def script(exchange: Exchange) -> None:
        await exchange.start_stream()
        await exchange.chunk(EVENT)
        await exchange.wait_closed(20)

    async with ScriptedReplica(script).running() as replica, running_gateway(replica, mode=mode) as gateway:
        writers = []
        for _ in range(100):
            _, writer = await gateway.connect()
            writer.write(post(ODD_BODY, close=False))
            writers.append(writer)
        await eventually(lambda: len(replica.exchanges) == 100)
        for writer in writers:
            abort = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, abort)
            writer.close()
        for exchange in replica.exchanges:
            await exchange.wait_closed(5)
        await eventually(lambda: nothing_in_flight(gateway))


async def test_a_slow_reader_slows_the_replica_and_not_the_gateway(mode: str) -> None:
    total = 30_000_000
    sent = 0

    async def script(exchange: Exchange) -> None:
        nonlocal sent
        await exchange.start_stream()
        while sent < total:
            await exchange.chunk(b"x" * 10_000)
            sent += 10_000
        await exchange.end_stream()

    async with ScriptedReplica(script).running() as replica, running_gateway(replica, mode=mode) as gateway:
        sock = socket.create_connection(("127.0.0.1", gateway.port))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        sock.sendall(post(ODD_BODY))
        last = -1
        while last != sent or sent == 0:  # until the flow has stopped
            last = sent
            await asyncio.sleep(0.3)
        assert sent < total / 2, "the gateway took it all although its client does not read"
        assert (await gateway.client.get("/health")).status_code == 200
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        received = 0
        while data := await asyncio.wait_for(loop.sock_recv(sock, 1_000_000), 10):
            received += len(data)
        sock.close()
        assert received > total


async def test_too_large_a_body_is_refused_unread(mode: str) -> None:
    async with ScriptedReplica().running() as replica:
        async with running_gateway(replica, mode=mode, server={"max_body_mib": 1}) as gateway:
            reader, writer = await gateway.connect()
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ncontent-length: 1048577\r\n\r\n")
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
            assert head.startswith(b"HTTP/1.1 413 ")
            writer.close()

            async def endless():  # type: ignore[no-untyped-def]
                for _ in range(40):
                    yield b"x" * 65_536

            response = await gateway.client.post("/v1/chat/completions", content=endless())
            assert response.status_code == 413
            assert response.json()["error"]["code"] == "request_too_large"
            assert replica.exchanges == []
            fits = b'{"model":"m","messages":[],"x":"' + b"y" * (2**20 - 40) + b'"}'
            assert (await gateway.client.post("/v1/chat/completions", content=fits)).status_code == 200


async def test_expect_100_continue(mode: str) -> None:
    async with ScriptedReplica().running() as replica:
        async with running_gateway(replica, mode=mode, server={"max_body_mib": 1}) as gateway:
            reader, writer = await gateway.connect()
            head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\nexpect: 100-continue\r\n"
            writer.write(head + b"content-length: %d\r\n\r\n" % len(ODD_BODY))
            assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5) == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(ODD_BODY)
            assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)).startswith(b"HTTP/1.1 200 ")
            assert replica.exchanges[0].header("expect") is None
            writer.close()
            refused = await raw_request(gateway, head + b"content-length: 9000000\r\n\r\n")
            assert refused.startswith(b"HTTP/1.1 413 ")


async def test_full_house_sheds_with_retry_after(mode: str) -> None:
    free = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await free.wait()
        await exchange.answer(ANSWER)

    async with ScriptedReplica(script).running() as replica:
        async with running_gateway(replica, mode=mode, routing={"max_in_flight": 2, "max_waiting": 1}) as gateway:
            held = [asyncio.create_task(gateway.chat(f"{number}")) for number in range(3)]
            await eventually(lambda: len(replica.exchanges) == 2)
            await eventually(lambda: waiting(gateway))
            shed = await gateway.chat("one too many")
            assert shed.status_code == 429
            assert shed.json()["error"]["code"] == "gateway_overloaded"
            assert int(shed.headers["retry-after"]) >= 1
            free.set()
            assert [response.status_code for response in await asyncio.gather(*held)] == [200, 200, 200]


async def waiting(gateway: RunningGateway) -> bool:
    return any(
        line.startswith("warmlane_waiting_requests") and line.endswith(" 1.0")
        for line in (await gateway.metrics()).splitlines()
    )


async def test_a_client_that_leaves_while_waiting_gives_its_place_back(mode: str) -> None:
    free = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await free.wait()
        await exchange.answer(ANSWER)

    async with ScriptedReplica(script).running() as replica:
        async with running_gateway(replica, mode=mode, routing={"max_in_flight": 1, "max_waiting": 1}) as gateway:
            held = asyncio.create_task(gateway.chat("held"))
            await eventually(lambda: len(replica.exchanges) == 1)
            _, writer = await gateway.connect()
            writer.write(post(ODD_BODY, close=False))
            await eventually(lambda: waiting(gateway))
            writer.close()

            async def nobody() -> bool:
                return not await waiting(gateway)

            await eventually(nobody)
            second = asyncio.create_task(gateway.chat("second"))
            await eventually(lambda: waiting(gateway))
            free.set()
            assert (await held).status_code == (await second).status_code == 200
            assert len(replica.exchanges) == 2
