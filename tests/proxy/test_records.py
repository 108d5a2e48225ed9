"""One request, one record (O-22), also where it never became a whole one: refused or left while it was read."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from gateway.assembly import FLUSH_SECONDS
from gateway.request_log import RequestRecord
from tests.proxy.conftest import RunningGateway, eventually, running_gateway
from tests.proxy.scripted import Exchange, ScriptedReplica

BODY = b'{"model": "m", "messages": []}'


def head(path: str = "/v1/chat/completions", *lines: str) -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "host: x", *lines, "", ""]).encode()


def whole(id: str, body: bytes = BODY) -> bytes:
    return head("/v1/chat/completions", f"x-request-id: {id}", f"content-length: {len(body)}") + body


class Log:
    def __init__(self, output: pytest.CaptureFixture[bytes]) -> None:
        self._output = output
        self._text = b""

    def records(self) -> list[RequestRecord]:
        self._text += self._output.readouterr().out
        return [msgspec.json.decode(line, type=RequestRecord) for line in self._text.split(b"\n")[:-1]]

    async def settled(self, count: int) -> list[RequestRecord]:
        """All of them once there are so many, after a moment in which one more would come."""
        await eventually(lambda: len(self.records()) >= count)
        await asyncio.sleep(2 * FLUSH_SECONDS)
        records = self.records()
        assert len(records) == count
        return records


@contextlib.asynccontextmanager
async def logged(output: pytest.CaptureFixture[bytes], mode: str, **server: Any) -> AsyncIterator[tuple[Any, ...]]:
    async with ScriptedReplica().running() as replica:
        async with running_gateway(replica, mode=mode, server={"log": "json", "max_body_mib": 1, **server}) as gateway:
            yield replica, gateway, Log(output)


async def sent(gateway: RunningGateway, data: bytes, *, leave: bool = False) -> bytes:
    reader, writer = await gateway.connect()
    writer.write(data)
    await writer.drain()
    answer = b""
    if leave:
        await asyncio.sleep(0.05)
    else:
        with contextlib.suppress(ConnectionError):
            answer = await asyncio.wait_for(reader.read(), 10.0)
    writer.close()
    return answer


async def test_a_body_that_is_too_large_leaves_one_record(mode: str, capsysbinary) -> None:
    async with logged(capsysbinary, mode) as (replica, gateway, log):
        data = head("/v1/messages", "x-request-id: large-1", "content-length: 2000000")
        assert (await sent(gateway, data)).startswith(b"HTTP/1.1 413 ")
        chunks = b"80000\r\n" + b"x" * 0x80000 + b"\r\n"
        data = head("/v1/chat/completions", "x-request-id: large-2", "transfer-encoding: chunked") + chunks * 3
        assert (await sent(gateway, data)).startswith(b"HTTP/1.1 413 ")
        await gateway.chat()
        announced, unannounced, good = await log.settled(3)
        assert (announced.request_id, announced.route, announced.status) == ("large-1", "/v1/messages", 413)
        assert (announced.outcome, announced.error) == ("rejected", "request_too_large")
        assert (unannounced.request_id, unannounced.status) == ("large-2", 413)
        assert (good.status, good.replica) == (200, replica.url)
        page = await gateway.metrics()
        assert 'warmlane_requests_total{model="none",outcome="rejected",route="/v1/messages",status="4xx"} 1.0' in page


async def test_a_client_that_leaves_while_it_sends_leaves_one_record(mode: str, capsysbinary) -> None:
    async with logged(capsysbinary, mode) as (replica, gateway, log):
        data = head("/v1/embeddings", "x-request-id: left-1", "content-length: 1000") + b"{"
        await sent(gateway, data, leave=True)
        (record,) = await log.settled(1)
        assert (record.request_id, record.route) == ("left-1", "/v1/embeddings")
        assert (record.status, record.outcome, record.error) == (0, "client_left", "")
        assert replica.exchanges == []


EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'


@pytest.mark.parametrize("ends", ["client_left", "stopped"])
async def test_a_stream_that_is_cut_short_keeps_its_status_and_first_token(mode: str, ends: str, capsysbinary) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.start_stream()
        await exchange.chunk(EVENT)
        await exchange.wait_closed(20)

    server = {"log": "json", "drain_seconds": 20.0}
    async with ScriptedReplica(script).running() as replica:
        async with running_gateway(replica, mode=mode, server=server) as gateway:
            reader, writer = await gateway.connect()
            writer.write(whole("cut"))
            await asyncio.wait_for(reader.readuntil(EVENT), 10)
            if ends == "stopped":
                gateway.stop()
                await asyncio.sleep(0)  # two signals that are pending at once would be one
                gateway.stop()
                await asyncio.wait_for(gateway.task, 10)
            writer.close()
            (record,) = await Log(capsysbinary).settled(1)
            assert (record.status, record.outcome, record.stream) == (200, ends, True)
            assert record.ttft_seconds is not None
            assert 0 < record.ttft_seconds <= record.duration_seconds
            assert record.response_bytes == len(EVENT)
            if ends == "client_left":
                page = await gateway.metrics()
                assert 'outcome="client_left",route="/v1/chat/completions",status="2xx"} 1.0' in page
                assert re.search(r'warmlane_time_to_first_token_seconds_count{model="\w+"} 1.0', page)


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        ("200 OK", b"{}", ""),
        ("500 Internal Server Error", b"{}", "replica_error"),
        ("502 Bad Gateway", b"{}", "replica_error"),
        ("503 Service Unavailable", b"{}", "replica_refused"),
        ("429 Too Many Requests", b"{}", "replica_refused"),
        ("400 Bad Request", b"{}", "replica_rejected"),
        ("200 OK", EVENT + b'data: {"error": {"message": "out of memory", "code": 500}}\n\n', "replica_error"),
        ("200 OK", EVENT + b'data: {"error": {"message": "too long", "code": 400}}\n\n', "replica_rejected"),
        ("200 OK", b"data: [DONE]\n\n", "replica_empty"),
    ],
)
async def test_what_a_replica_says_went_wrong_has_a_code(
    mode: str, status: str, body: bytes, error: str, capsysbinary
) -> None:
    kind = b"content-type: text/event-stream\r\n" if body.startswith(b"data") else b""

    async def script(exchange: Exchange) -> None:
        await exchange.answer(body, status=status, headers=kind)

    async with ScriptedReplica(script).running() as replica:
        async with running_gateway(replica, mode=mode, server={"log": "json"}) as gateway:
            await gateway.chat()
            (record,) = await Log(capsysbinary).settled(1)
            assert (record.status, record.error) == (int(status[:3]), error)


async def test_a_client_that_leaves_before_a_held_500_got_no_status(mode: str, capsysbinary) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 100\r\n\r\n{")
        await exchange.wait_closed(20)

    async with ScriptedReplica(script).running() as replica:
        async with running_gateway(replica, mode=mode, server={"log": "json"}) as gateway:
            _, writer = await gateway.connect()
            writer.write(whole("held"))
            await eventually(lambda: replica.exchanges)
            await asyncio.sleep(0.1)
            writer.close()
            (record,) = await Log(capsysbinary).settled(1)
            assert (record.status, record.outcome, record.ttft_seconds) == (0, "client_left", None)


async def test_a_client_that_never_finishes_leaves_one_record(mode: str, capsysbinary) -> None:
    async with logged(capsysbinary, mode, body_timeout_seconds=0.3) as (_, gateway, log):
        assert await sent(gateway, head("/v1/embeddings", "content-length: 1000") + b"{") == b""
        (record,) = await log.settled(1)
        assert (record.route, record.status) == ("/v1/embeddings", 0)


async def test_a_path_that_is_not_served_is_recorded_without_its_text(mode: str, capsysbinary) -> None:
    async with logged(capsysbinary, mode) as (_, gateway, log):
        assert (await gateway.client.post("/v1/secret-path?q=1", content=b"{}")).status_code == 404
        (record,) = await log.settled(1)
        assert (record.route, record.status, record.error) == ("other", 404, "not_found")
        assert b"secret" not in msgspec.json.encode(record)
        assert 'route="other",status="4xx"} 1.0' in await gateway.metrics()


async def test_pipelined_requests_and_a_bad_one_behind_them(capsysbinary) -> None:
    async with logged(capsysbinary, "fast") as (replica, gateway, log):
        bad = head("/v1/chat/completions", "x-request-id: bad", "transfer-encoding: chunked") + b"zz\r\n"
        await sent(gateway, whole("one") + whole("two") + bad)
        records = {record.request_id: record for record in await log.settled(3)}
        assert {id: record.status for id, record in records.items()} == {"one": 200, "two": 200, "bad": 0}
        assert records["bad"].outcome == "rejected"
        assert len(replica.exchanges) == 2


async def test_control_endpoints_leave_none(mode: str, capsysbinary) -> None:
    async with logged(capsysbinary, mode) as (_, gateway, log):
        for path in ("/health", "/ready", "/metrics", "/v1/models", "/warmlane/replicas"):
            assert (await gateway.client.get(path)).status_code == 200
        await gateway.chat()
        (record,) = await log.settled(1)
        assert record.route == "/v1/chat/completions"
