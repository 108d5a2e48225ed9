"""Streams pass unchanged and without delay, however the network cuts them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from tests.chaos.bench import Bench, built, first_as_well
from tests.chaos.light import STREAM_HEAD, LightClient, Served, chat, gateway_before, light_replicas, post, send
from tests.chaos.rig import SHORT, span

SPLITTINGS = 1_000 if SHORT else 10_000
AT_ONCE = 16
LARGEST_SEGMENT = 1 << 20
STREAMS = 200
QUIET = {"server": {"log": "off"}}

USAGE = b'data: {"id":"c","choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2,"total_tokens":9}}\n\n'
EMOJI = "\U0001f469\u200d\U0001f680 \u4f60\u597d e\u0301 \U0001f1e9\U0001f1ea"
EVENTS = (
    b'data: {"choices":[{"delta":{"content":"' + EMOJI.encode() + b'"}}]}\n\n',
    b'data: {"choices":[{"delta":{"content":"windows"}}]}\r\n\r\n',
    b'data: {"choices":[{"delta":{"content":"old mac"}}]}\r\r',
    b": a comment\n\n",
    b":\n\n",
    b"event: ping\nid: 7\nretry: 10\ndata:\n\n",
    b"data: two\ndata: lines\n\n",
    b'data:{"no":"space"}\n\n',
    b"data: \xff\xfe not text \x00\n\n",
    b"\n\n\n",
    b'data: {"choices":[],"usage":null}\n\n',
)


def content(random: Random) -> bytes:
    """One answer: events of every kind, sometimes one long line; the last may lack its end."""
    parts = [EVENTS[0], *(random.choice(EVENTS) for _ in range(random.randint(0, 30)))]
    if random.random() < 0.1:
        parts.append(b"data: " + random.randbytes(int(2 ** random.uniform(10, 18))).replace(b"\n", b" ") + b"\n\n")
    if random.random() < 0.002:
        parts.append(b'data: {"content":"' + b"x" * (4 << 20) + b'"}\n\n')
    random.shuffle(parts)
    parts += [USAGE, b"data: [DONE]\n\n"] if random.random() < 0.8 else [b"data: [DO"]
    return b"".join(parts)


def cut(data: bytes, random: Random, smallest: int = 1) -> Iterator[bytes]:
    """Pieces from one byte to a MiB, small ones as likely as large ones; of long data small ones are rare."""
    smallest = max(smallest, len(data) // 2_000)
    at = 0
    while at < len(data):
        size = int(smallest * (LARGEST_SEGMENT / smallest) ** (random.random() ** 3))
        yield data[at : at + size]
        at += size


def split(seed: int) -> tuple[bytes, list[bytes]]:
    """An answer, and the TCP segments in which it is sent: cut once into HTTP chunks and, elsewhere, into segments."""
    random = Random(seed)
    data = content(random)
    chunks = [data] if random.random() < 0.2 else list(cut(data, random))
    framed = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    return data, list(cut(STREAM_HEAD + framed, random))


def send_split(served: Served) -> None:
    asyncio.get_running_loop().call_soon(send_next, served, iter(split(int(served.id.removeprefix("seed-")))[1]))


def send_next(served: Served, segments: Iterator[bytes]) -> None:
    segment = next(segments, None)
    if segment is None:
        served.connection.ended(served)
        return
    served.write(segment)
    asyncio.get_running_loop().call_soon(send_next, served, segments)


async def test_16_streams_are_the_same_bytes_however_they_are_cut(tmp_path: Path, figures) -> None:
    """O-17: emoji cut anywhere, every kind of line end, comments, lines of 4 MB, usage: nothing added, nothing lost."""
    async with light_replicas(2, send_split) as replicas, gateway_before(replicas, tmp_path, QUIET) as gateway:
        seeds, unequal = iter(range(SPLITTINGS)), list[int]()

        async def client() -> None:
            for seed in seeds:
                request = post(chat(f"splitting {seed}", stream=True), f"seed-{seed}", close=True)
                one = await send(gateway.port, request)
                assert await asyncio.wait_for(one.ended, 60.0) == "whole", seed
                expected = hashlib.sha256(split(seed)[0]).digest()
                if hashlib.sha256(b"".join(one.parts)).digest() != expected:
                    unequal.append(seed)
                one.transport.abort()
                for replica in replicas:
                    replica.served.clear()

        await asyncio.gather(*(client() for _ in range(AT_ONCE)))
        page = await gateway.metrics()
    measured = f"{SPLITTINGS - len(unequal):,} of {SPLITTINGS:,} equal"
    figures.record(16, "random splittings", measured, "all, by SHA-256", not unequal)
    assert not unequal
    assert page.total("warmlane_requests_total", outcome="completed") == SPLITTINGS


async def test_16_events_are_not_delayed(tmp_path: Path, figures) -> None:
    """From the replica's send to the client's recv, with 200 streams, less what the way without a gateway takes."""
    bench = Bench(built(tmp_path), interval_ms=50, events=round(span(20.0, 6.0) / 0.05))
    async with bench.mocks(2) as mocks:
        direct = await bench.load(mocks[0].port, STREAMS, ramp_seconds=2.0)
        async with bench.gateway(tmp_path, mocks) as gateway:
            through = await bench.load(gateway.port, STREAMS, ramp_seconds=2.0)
    assert direct.event_delay_us is not None
    assert through.event_delay_us is not None
    p50 = (through.event_delay_us.p50 - direct.event_delay_us.p50) / 1e3
    p99 = (through.event_delay_us.p99 - direct.event_delay_us.p99) / 1e3
    measured = f"p50 {p50:.2f} ms, p99 {p99:.2f} ms over {through.events:,} events"
    figures.record(16, f"added delay, {STREAMS} streams", measured, "p50 <= 1 ms, p99 <= 10 ms", p50 <= 1 and p99 <= 10)
    assert p50 <= 1.0
    assert p99 <= 10.0


class Pieces(LightClient):
    """Notes what came together in one read: the numbers of the events."""

    together: list[list[float]]

    def data_received(self, data: bytes) -> None:
        stamps = [float(part.split(b'"', 1)[0]) for part in data.split(b'"sent":"')[1:]]
        if stamps:
            self.together.append(stamps)
        super().data_received(data)


def paced(served: Served) -> None:
    served.write(STREAM_HEAD)
    asked = json.loads(served.body)
    pace(served, asyncio.get_running_loop(), asked["apart"], time.monotonic() + asked["seconds"])


def pace(served: Served, loop: asyncio.AbstractEventLoop, apart: float, until: float) -> None:
    now = time.monotonic()
    if now > until or served.over:
        served.end_stream()
        return
    served.piece(b'data: {"sent":"%.6f"}\n\n' % now)
    loop.call_later(apart, pace, served, loop, apart, until)


@pytest.mark.parametrize(("streams", "apart"), [(40, 0.012), (STREAMS, 0.05)])
async def test_16_events_ten_milliseconds_apart_stay_apart(tmp_path: Path, figures, streams: int, apart: float) -> None:
    """Events sent so far apart are read one by one, as far as this test itself reads in time: a direct stream tells."""
    seconds = span(5.0, 3.0)
    async with light_replicas(2, paced) as replicas, gateway_before(replicas, tmp_path, QUIET) as gateway:
        with first_as_well():
            direct = await coalesced(replicas[0].port, streams, seconds, apart)
            through = await coalesced(gateway.port, streams, seconds, apart)
    measured = f"{through:.3%} of events came with one sent more than 10 ms before (direct {direct:.3%})"
    met = through <= max(0.001, direct)
    figures.record(
        16,
        f"coalescing, {streams} streams, events {apart * 1e3:.0f} ms apart",
        measured,
        "none beyond the direct path's",
        met,
    )
    assert met


async def coalesced(port: int, streams: int, seconds: float, apart: float) -> float:
    """Share of events that came in one read with an event sent more than 10 ms earlier."""
    loop = asyncio.get_running_loop()
    clients: list[Pieces] = []
    for number in range(streams):
        _, client = await loop.create_connection(lambda: Pieces(loop), "127.0.0.1", port)
        client.together = []
        body = chat(f"paced {number}", stream=True, seconds=seconds, apart=apart)
        client.transport.write(post(body, f"paced-{number}"))
        clients.append(client)
    ends = await asyncio.wait_for(asyncio.gather(*(client.ended for client in clients)), seconds + 30.0)
    assert set(ends) == {"whole"}
    reads = [stamps for client in clients for stamps in client.together]
    late = sum(1 for stamps in reads for at in range(1, len(stamps)) if stamps[at] - stamps[at - 1] > 0.010)
    for client in clients:
        client.transport.abort()
    return late / sum(map(len, reads))
