"""Test 20: large bodies, announced and in chunks, many at once, and those that are too large (O-19)."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.conftest import Figures
from tests.chaos.framing import status_of
from tests.chaos.rig import SHORT
from tests.chaos.wire import MIB, gateway_before
from tests.proxy.conftest import MODES
from tests.proxy.scripted import Exchange, ScriptedReplica

AT_ONCE = 16 if SHORT else 64
BODY_BYTES = 10 * MIB
PIECE_BYTES = 128 * 1024
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\nconnection: close\r\ncontent-type: application/json\r\n"
FORMS = ("length", "chunked", "expect")


async def answer_with_digest(exchange: Exchange) -> None:
    await exchange.answer(hashlib.sha256(exchange.body).hexdigest().encode())


def picture(number: int) -> bytes:
    """A chat with one picture: a body of exactly `BODY_BYTES`."""
    begin = (
        b'{"model":"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;'
    )
    begin += b"base64,"
    end = b'"}}]}]}'
    filler = hashlib.sha256(b"%d" % number).hexdigest().encode() * (BODY_BYTES // 64)
    return begin + filler[: BODY_BYTES - len(begin) - len(end)] + end


def pieces(body: bytes) -> Iterator[bytes]:
    for at in range(0, len(body), PIECE_BYTES):
        yield body[at : at + PIECE_BYTES]


async def send(port: int, body: bytes, form: str) -> bytes:
    """The answer's body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        if form == "chunked":
            writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        else:
            expect = b"expect: 100-continue\r\n" if form == "expect" else b""
            writer.write(HEAD + expect + b"content-length: %d\r\n\r\n" % len(body))
        if form == "expect":
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        for piece in pieces(body):
            writer.writelines((b"%x\r\n" % len(piece), piece, b"\r\n") if form == "chunked" else (piece,))
            await writer.drain()
        if form == "chunked":
            writer.write(b"0\r\n\r\n")
        answer = await reader.read()
        assert status_of(answer) == 200, answer[:200]
        return answer.partition(b"\r\n\r\n")[2]
    finally:
        writer.transport.abort()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", MODES)
async def test_20_large_bodies_at_once(tmp_path: Path, figures: Figures, way: str, form: str) -> None:
    """O-19: base64 pictures of 10 MB; all arrive whole, within the memory that is named."""
    bodies = [picture(number) for number in range(AT_ONCE)]
    digests = [hashlib.sha256(body).hexdigest().encode() for body in bodies]
    config = {"server": {"http": way}, "routing": {"hold": False}, "upstream": {"connect_timeout_seconds": 30.0}}
    async with ScriptedReplica(answer_with_digest).running() as replica:
        async with gateway_before(tmp_path, config, replica.url) as gateway:
            await send(gateway.port, bodies[0], form)
            base = gateway.forget_peak()
            async with asyncio.timeout(120):
                answers = await asyncio.gather(*(send(gateway.port, body, form) for body in bodies))
            peak = gateway.peak_bytes()
    right = sum(answer == digest for answer, digest in zip(answers, digests, strict=True))
    limit = 3 * AT_ONCE * BODY_BYTES
    measured = f"{right} of {AT_ONCE} arrived whole, peak memory base + {(peak - base) / MIB:.0f} MiB"
    target = f"all, <= base + 3 x {AT_ONCE} x 10 MB"
    figures.record(20, f'10 MB, {form}, http = "{way}"', measured, target, right == AT_ONCE and peak - base <= limit)
    assert right == AT_ONCE
    assert peak - base <= limit


@pytest.mark.parametrize("way", MODES)
async def test_20_over_the_limit(tmp_path: Path, figures: Figures, way: str) -> None:
    """O-19: 413 without reading the rest; the replica sees nothing; no 100 is sent for what will not be read."""
    config = {"server": {"http": way, "max_body_mib": 10}}
    async with ScriptedReplica(answer_with_digest).running() as replica:
        async with gateway_before(tmp_path, config, replica.url) as gateway:
            waits = []
            for expect in (b"", b"expect: 100-continue\r\n"):
                reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
                began = time.monotonic()
                writer.write(HEAD + expect + b"content-length: %d\r\n\r\n" % (BODY_BYTES + 1))
                answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
                waits.append(time.monotonic() - began)
                assert answer.startswith(b"HTTP/1.1 413 ")
                writer.transport.abort()
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n")
            for piece in pieces(picture(1) + b" " * (4 * MIB)):
                writer.writelines((b"%x\r\n" % len(piece), piece, b"\r\n"))
            writer.write(b"0\r\n\r\n")
            answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
            assert answer.startswith(b"HTTP/1.1 413 ")
            writer.transport.abort()
            exact = await send(gateway.port, picture(2), "length")
            assert exact == hashlib.sha256(picture(2)).hexdigest().encode()
            assert len(replica.exchanges) == 1
    slowest = 1_000 * max(waits)
    measured = f"413 after {slowest:.1f} ms (announced), also in chunks; nothing at the replica"
    figures.record(20, f'over the limit, http = "{way}"', measured, "413 within a round trip", slowest < 100)
