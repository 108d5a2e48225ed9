"""The budget of all request bodies: what counts, what is refused, and that every end of a request gives back what it
took."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable

import pytest

from gateway.proxy import asgi_client
from gateway.proxy.body_budget import BodyBudget
from gateway.proxy.incoming import MAX_PARTS, IncomingBody
from tests.proxy.conftest import RunningGateway, eventually, running_gateway
from tests.proxy.scripted import ANSWER, Exchange, ScriptedReplica
from tests.proxy.test_front_door import ODD_BODY, post, raw_request

MIB = 2**20
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\n"
SMALL = {"max_body_mib": 1, "max_bodies_mib": 2}


def body_of(size: int) -> bytes:
    return b'{"model":"m","messages":[],"x":"' + b"y" * (size - 34) + b'"}'


async def held(gateway: RunningGateway) -> int:
    page = await gateway.metrics()
    return int(float(page.partition("\nwarmlane_held_body_bytes ")[2].partition("\n")[0]))


async def until_held(gateway: RunningGateway, expected: int) -> None:
    async def equal() -> bool:
        return await held(gateway) == expected

    await eventually(equal)


def test_what_came_is_counted_once_and_given_back_once() -> None:
    rng = random.Random(11)
    budget = BodyBudget(10_000)
    body = IncomingBody(budget)
    for _ in range(300):
        pieces = [rng.randbytes(rng.randrange(40)) for _ in range(rng.choice((1, 3, MAX_PARTS + 5)))]
        fits = True
        for piece in pieces:
            body.keep(piece)
            if rng.random() < 0.5:
                fits = fits and body.fits()
                assert budget.held <= 10_000
        if fits and body.fits():
            size = body.size
            assert body.joined() == b"".join(pieces)
            assert budget.held == size == sum(map(len, pieces))
            assert body.take() == b"".join(pieces)
            budget.give_back(size)
        else:
            body.drop()
        assert (budget.held, body.size) == (0, 0)


async def test_a_body_counts_from_its_first_byte_to_its_answer(mode: str) -> None:
    free = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await free.wait()
        await exchange.start_stream()
        await exchange.chunk(b"data: a\n\n")
        await exchange.wait_closed()

    body = body_of(900_000)
    async with ScriptedReplica(script).running() as replica:
        async with running_gateway(replica, mode=mode, server=SMALL) as gateway:
            reader, writer = await gateway.connect()
            writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body[:600_000])
            await until_held(gateway, 600_000)
            writer.write(body[600_000:])
            await eventually(lambda: len(replica.exchanges) == 1)
            assert await held(gateway) == len(body)
            free.set()
            await asyncio.wait_for(reader.readuntil(b"data: a\n\n"), 5)
            assert await held(gateway) == 0, "it is not sent again, so it is not kept"
            writer.close()


async def test_beyond_the_budget_clients_are_told_to_come_back(mode: str, capfdbinary) -> None:  # type: ignore[no-untyped-def]
    """Announced, in chunks, and small ones too; who is refused takes nothing from those that are under way."""
    body = body_of(MIB)
    async with ScriptedReplica().running() as replica:
        async with running_gateway(replica, mode=mode, server={**SMALL, "log": "json"}) as gateway:
            under_way = []
            for _ in range(2):
                reader, writer = await gateway.connect()
                writer.write(HEAD + b"content-length: %d\r\n\r\n" % MIB + body[: MIB - 10])
                under_way.append((reader, writer))
            await until_held(gateway, 2 * MIB - 20)
            announced = await raw_request(gateway, HEAD + b"content-length: 21\r\n\r\n")
            waits = await raw_request(gateway, HEAD + b"expect: 100-continue\r\ncontent-length: 99999\r\n\r\n")
            chunk = b"40\r\n" + b"x" * 64 + b"\r\n"
            chunked = await raw_request(gateway, HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunk)
            for answer in (announced, waits, chunked):
                head, _, told = answer.partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 503 ")
                assert b"\r\nretry-after: 1" in head.lower()
                assert json.loads(told)["error"]["code"] == "too_many_bodies"
            assert await held(gateway) == 2 * MIB - 20
            for reader, writer in under_way:
                writer.write(body[MIB - 10 :])
                assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)).startswith(b"HTTP/1.1 200 ")
                writer.close()
            assert (await gateway.chat()).status_code == 200
            assert len(replica.exchanges) == 3
            assert await held(gateway) == 0
    records = [json.loads(line) for line in capfdbinary.readouterr().out.splitlines()]
    refused = [record for record in records if record["error"] == "too_many_bodies"]
    assert [(record["status"], record["outcome"]) for record in refused] == [(503, "refused")] * 3


async def test_who_only_announces_takes_nobodys_room(mode: str) -> None:
    async with ScriptedReplica().running() as replica:
        async with running_gateway(replica, mode=mode, server=SMALL) as gateway:
            announcing = [await gateway.connect() for _ in range(10)]
            for _, writer in announcing:
                writer.write(HEAD + b"content-length: %d\r\n\r\n{" % MIB)
            await until_held(gateway, 10)
            answer = await gateway.client.post("/v1/chat/completions", content=body_of(MIB))
            assert answer.status_code == 200
            for _, writer in announcing:
                writer.close()
            await until_held(gateway, 0)


# -- every end of a request

Scenario = Callable[[RunningGateway, ScriptedReplica], Awaitable[None]]
BODY = body_of(150_000)
WHOLE = post(BODY, close=False)


async def leave_after(gateway: RunningGateway, request: bytes) -> None:
    _, writer = await gateway.connect()
    writer.write(request)
    await writer.drain()
    await asyncio.sleep(0.01)
    writer.transport.abort()


async def left_in_mid_body(gateway: RunningGateway, replica: ScriptedReplica) -> None:
    await leave_after(gateway, WHOLE[:-1])


async def left_in_mid_chunk(gateway: RunningGateway, replica: ScriptedReplica) -> None:
    await leave_after(gateway, HEAD + b"transfer-encoding: chunked\r\n\r\nffff\r\n" + b"x" * 9_000)


async def left_while_the_replica_works(gateway: RunningGateway, replica: ScriptedReplica) -> None:
    await leave_after(gateway, WHOLE)


async def left_with_others_read_ahead(gateway: RunningGateway, replica: ScriptedReplica) -> None:
    await leave_after(gateway, WHOLE + post(b"[]", close=False) * 5 + WHOLE[:-9])


async def broken_framing(gateway: RunningGateway, replica: ScriptedReplica) -> None:
    await raw_request(gateway, HEAD + b"transfer-encoding: chunked\r\n\r\n4\r\nabcd\r\nzz\r\n")


async def too_large_in_chunks(gateway: RunningGateway, replica: ScriptedReplica) -> None:
    chunk = b"10000\r\n" + b"x" * 65_536 + b"\r\n"
    await raw_request(gateway, HEAD + b"transfer-encoding: chunked\r\n\r\n" + 17 * chunk)


async def not_json(gateway: RunningGateway, replica: ScriptedReplica) -> None:
    assert (await gateway.client.post("/v1/chat/completions", content=b"{" * 200_000)).status_code == 400


async def no_such_model(gateway: RunningGateway, replica: ScriptedReplica) -> None:
    assert (await gateway.chat("x" * 100_000, model="unknown")).status_code in (404, 429)  # there may be no room


async def overdue(gateway: RunningGateway, replica: ScriptedReplica) -> None:
    request = post(BODY, headers=b"x-request-timeout: 0.05\r\n")
    assert (await raw_request(gateway, request)).startswith(b"HTTP/1.1 504 ")


async def lost_by_the_replica(gateway: RunningGateway, replica: ScriptedReplica) -> None:
    request = post(BODY, headers=b"x-end: lost\r\n")
    assert (await raw_request(gateway, request)).startswith(b"HTTP/1.1 502 ")


async def answered(gateway: RunningGateway, replica: ScriptedReplica) -> None:
    request = post(BODY, headers=b"x-end: answered\r\n")
    assert (await raw_request(gateway, request)).startswith(b"HTTP/1.1 200 ")


async def dry_run(gateway: RunningGateway, replica: ScriptedReplica) -> None:
    assert (await gateway.client.post("/warmlane/route", content=BODY)).status_code == 200
    await leave_after(gateway, post(BODY, path="/warmlane/route")[:-1])


SCENARIOS: list[Scenario] = [
    left_in_mid_body,
    left_in_mid_chunk,
    left_while_the_replica_works,
    left_with_others_read_ahead,
    broken_framing,
    too_large_in_chunks,
    not_json,
    no_such_model,
    overdue,
    lost_by_the_replica,
    answered,
    dry_run,
]


@pytest.mark.parametrize("max_in_flight", [100, 1])
async def test_every_end_gives_back_what_it_took(mode: str, max_in_flight: int) -> None:
    """Also of those that wait in the gateway: there is room for one, and the first never gets its answer."""

    async def script(exchange: Exchange) -> None:
        match exchange.header("x-end"):
            case "answered":
                await exchange.answer(ANSWER)
            case "lost":
                exchange.reset()
            case _:
                await exchange.wait_closed(60)

    rng = random.Random(5)
    routing = {"max_in_flight": max_in_flight, "max_wait_seconds": 0.3}
    server = {"max_body_mib": 1, "max_bodies_mib": 64}
    async with ScriptedReplica(script).running() as replica:
        async with running_gateway(replica, mode=mode, server=server, routing=routing) as gateway:
            if max_in_flight == 1:
                _, blocker = await gateway.connect()
                blocker.write(post(ODD_BODY, close=False))
                await eventually(lambda: len(replica.exchanges) == 1)
            left_out: set[Scenario] = {lost_by_the_replica, answered} if max_in_flight == 1 else set()
            if mode == "asgi":  # uvicorn reads no further there, so it does not see who leaves
                left_out.add(left_with_others_read_ahead)
            scenarios = [one for one in SCENARIOS if one not in left_out]
            for _ in range(2):
                rng.shuffle(scenarios)
                await asyncio.gather(*(one(gateway, replica) for one in scenarios))
            await until_held(gateway, len(ODD_BODY) if max_in_flight == 1 else 0)
            if max_in_flight == 1:
                blocker.close()
                await until_held(gateway, 0)


async def test_a_replay_keeps_the_body_until_it_is_answered(mode: str) -> None:
    seen: list[int] = []

    async def script(exchange: Exchange) -> None:
        seen.append(await held(gateway))
        if len(seen) == 1:
            exchange.reset()
        else:
            await exchange.answer(ANSWER)

    async with ScriptedReplica(script).running() as first, ScriptedReplica(script).running() as second:
        async with running_gateway(first, second, mode=mode) as gateway:
            answer = await gateway.client.post("/v1/chat/completions", content=BODY)
            assert answer.status_code == 200
            assert seen == [len(BODY), len(BODY)]
            assert await held(gateway) == 0
            bodies = [exchange.body for one in (first, second) for exchange in one.exchanges]
            assert bodies == [BODY, BODY]


async def test_the_dry_run_is_refused_before_its_body_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer comes first; what the client still sends is read behind it, for a while."""
    monkeypatch.setattr(asgi_client, "LINGER_SECONDS", 60.0)
    async with ScriptedReplica().running() as replica, running_gateway(replica, server=SMALL) as gateway:
        for framing in (b"content-length: 2000000\r\n\r\n", b"transfer-encoding: chunked\r\n\r\n"):
            reader, writer = await gateway.connect()
            writer.write(b"POST /warmlane/route HTTP/1.1\r\nhost: g\r\n" + framing)
            if b"chunked" in framing:
                writer.write(17 * (b"10000\r\n" + b"x" * 65_536 + b"\r\n"))
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
            assert head.startswith(b"HTTP/1.1 413 ")
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            told = await asyncio.wait_for(reader.readexactly(length), 10)
            assert json.loads(told)["error"]["code"] == "request_too_large"
            writer.transport.abort()
