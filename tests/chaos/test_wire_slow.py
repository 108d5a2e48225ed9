"""Tests 21 to 23: readers and senders that take their time, connections that do nothing, and none left to have."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import time
from pathlib import Path

import httpx
import pytest

from tests.chaos.conftest import Figures
from tests.chaos.rig import SHORT, eventually, span
from tests.chaos.wire import KIB, MIB, GatewayUnderTest, gateway_before, hold, normal_traffic, replica_process
from tests.proxy.conftest import MODES
from tests.proxy.scripted import ANSWER, Exchange, ScriptedReplica

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\n"
SLOW = b'{"model":"slow","messages":[]}'
PLAIN = b'{"model":"m","messages":[]}'


def request(body: bytes) -> bytes:
    return HEAD + b"content-length: %d\r\n\r\n" % len(body) + body


# -- 21: slow readers

READERS = 60 if SHORT else 200
LARGE_BYTES = 50 * MIB
READ_SECONDS = span(20.0, 6.0)


class LargeAnswers:
    """A replica's script: 50 MB, as fast as they are taken; counts what was taken."""

    def __init__(self, *, events: bool) -> None:
        self.taken = 0
        self.running = 0
        self._events = events

    async def __call__(self, exchange: Exchange) -> None:
        exchange.writer.transport.set_write_buffer_limits(high=0)
        self.running += 1
        try:
            if self._events:
                await exchange.start_stream()
                event = b"data: " + b"x" * 2_000 + b"\n\n"
                for _ in range(LARGE_BYTES // len(event)):
                    await exchange.chunk(event)
                    self.taken += len(event)
                await exchange.end_stream()
            else:
                await exchange.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % LARGE_BYTES)
                piece = b"x" * 64 * KIB
                for _ in range(LARGE_BYTES // len(piece)):
                    await exchange.send(piece)
                    self.taken += len(piece)
        finally:
            self.running -= 1


class SlowReaders:
    """Sockets with a small receive buffer, of which a kilobyte is read each second."""

    def __init__(self, port: int, count: int) -> None:
        self.sockets: list[socket.socket] = []
        for _ in range(count):
            one = socket.socket()
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 * KIB)
            one.connect(("127.0.0.1", port))
            one.sendall(request(SLOW))
            one.setblocking(False)
            self.sockets.append(one)

    async def read(self) -> None:
        while True:
            for one in self.sockets:
                with contextlib.suppress(BlockingIOError):
                    one.recv(KIB)
            await asyncio.sleep(1.0)

    def close(self) -> None:
        for one in self.sockets:
            one.close()


@pytest.mark.parametrize("kind", ["one body", "events"])
@pytest.mark.parametrize("way", MODES)
async def test_21_slow_readers(tmp_path: Path, figures: Figures, way: str, kind: str) -> None:
    """What is not read waits at the replica; the gateway holds one read of it, other clients notice nothing."""
    script = LargeAnswers(events=kind == "events")
    config = {"server": {"http": way}, "routing": {"hold": False}, "upstream": {"connect_timeout_seconds": 30.0}}
    async with ScriptedReplica(script, models=("slow",)).running() as slow, replica_process(tmp_path) as normal:
        async with gateway_before(tmp_path, config, slow.url, normal.url) as gateway:
            await normal_traffic(gateway, normal, 2.0)
            before = gateway.memory_bytes()
            readers = SlowReaders(gateway.port, READERS)
            reading = asyncio.create_task(readers.read())
            await eventually(lambda: script.running == READERS, "all answers are under way")
            taken = -1
            while taken != script.taken:  # until the flow has stopped
                taken = script.taken
                await asyncio.sleep(1.0)
            cost = await normal_traffic(gateway, normal, READ_SECONDS)
            per_reader = (gateway.memory_bytes() - before) / READERS
            at_end = script.taken
            reading.cancel()
            readers.close()
            await eventually(lambda: script.running == 0, "the replica is told that the readers have left")
    paused = at_end < READERS * LARGE_BYTES / 2
    measured = (
        f"{READERS} readers: {per_reader / KIB:.0f} KiB each, {at_end / READERS / MIB:.1f} MiB of 50 taken from the"
        f" replica (buffers of the kernel), others {cost}"
    )
    target = "<= 256 KiB each, replica paused, others' added p99 <= 5 ms"
    met = per_reader <= 256 * KIB and paused and cost.added_p99_ms <= 5 and cost.failed == 0
    figures.record(21, f'{kind}, http = "{way}"', measured, target, met)
    assert per_reader <= 256 * KIB
    assert paused
    assert cost.failed == 0


# -- 22: slow senders

HALF_HEADS = 500 if SHORT else 2_000
SLOW_BODIES = 125 if SHORT else 500
HEAD_SECONDS, BODY_SECONDS = (4.0, 10.0) if SHORT else (15.0, 60.0)
SLACK_SECONDS = 2.5
"""The sweep looks once a second, and the clients share two cores with it."""


@pytest.mark.parametrize("way", MODES)
async def test_22_slow_senders(tmp_path: Path, figures: Figures, way: str) -> None:
    """Half heads and trickled bodies, a byte a second each, are closed in their time; others notice nothing."""
    limits = {"http": way, "header_timeout_seconds": HEAD_SECONDS, "body_timeout_seconds": BODY_SECONDS}
    async with replica_process(tmp_path) as normal:
        async with gateway_before(tmp_path, {"server": limits}, normal.url) as gateway:
            before = gateway.memory_bytes()
            heads = await hold(gateway.port, HALF_HEADS, first=HEAD + b"x-slow: ")
            bodies = await hold(gateway.port, SLOW_BODIES, first=HEAD + b"content-length: 100000\r\n\r\n{")
            senders = [*heads, *bodies]

            async def trickle() -> None:
                while any(one.closed_at is None for one in senders):
                    for one in senders:
                        if one.closed_at is None:
                            one.transport.write(b"a")
                    await asyncio.sleep(1.0)

            trickling = asyncio.create_task(trickle())
            cost = await normal_traffic(gateway, normal, min(HEAD_SECONDS, BODY_SECONDS) - 2.0)
            memory = (gateway.memory_bytes() - before) / len(senders)
            await eventually(lambda: trickling.done(), "all are closed", BODY_SECONDS + 20)
            slowest_head, slowest_body = (max(one.lasted for one in kind) for kind in (heads, bodies))
            first_head, first_body = (min(one.lasted for one in kind) for kind in (heads, bodies))
            received = [one for one in normal.received() if not one.request_id.startswith("load-")]
    in_time = slowest_head <= HEAD_SECONDS + SLACK_SECONDS and slowest_body <= BODY_SECONDS + SLACK_SECONDS
    measured = (
        f"{HALF_HEADS} half heads closed after {first_head:.1f} to {slowest_head:.1f} s, {SLOW_BODIES} bodies after"
        f" {first_body:.1f} to {slowest_body:.1f} s; {memory / KIB:.0f} KiB each; others {cost}"
    )
    target = f"{HEAD_SECONDS:g} s / {BODY_SECONDS:g} s, others' added p99 <= 10 ms"
    figures.record(22, f'http = "{way}"', measured, target, in_time and cost.added_p99_ms <= 10 and cost.failed == 0)
    assert in_time
    assert first_head >= HEAD_SECONDS - 0.5
    assert first_body >= BODY_SECONDS - 0.5
    assert cost.failed == 0
    assert received == []


# -- 23: idle connections, and no descriptors

IDLE = 2_000 if SHORT else 10_000


@pytest.mark.parametrize("way", MODES)
async def test_23_idle_connections(tmp_path: Path, figures: Figures, way: str) -> None:
    """Each has had an answer and stays open."""
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > IDLE + 500, "this machine allows too few open files"
    config = {"server": {"http": way, "keep_alive_seconds": 600.0, "log": "off"}, "routing": {"hold": False}}
    async with ScriptedReplica().running() as served, replica_process(tmp_path) as normal:
        async with gateway_before(tmp_path, config, normal.url) as gateway:
            await normal_traffic(gateway, normal, 2.0)
            before = gateway.memory_bytes()
            idle = await hold(gateway.port, IDLE, at_once=100, first=request(PLAIN))
            await eventually(lambda: all(b"\r\n\r\n" in one.received for one in idle), "all are answered", 120)
            cost = await normal_traffic(gateway, normal, span(10.0, 4.0))
            growth = gateway.memory_bytes() - before
            open_still = sum(one.closed_at is None for one in idle)
            answered = sum(one.received.startswith(b"HTTP/1.1 200 ") for one in idle)
            for one in idle:
                one.transport.abort()
            await eventually(lambda: gateway.descriptors() < 200, "their descriptors are free again")
        assert served.exchanges == []
    measured = (
        f"{open_still} of {IDLE} open, memory + {growth / MIB:.0f} MiB ({growth / IDLE / KIB:.1f} KiB each), new ones"
        f" {cost}"
    )
    met = open_still == IDLE == answered and growth <= 500 * MIB and cost.added_p99_ms <= 50 and cost.failed == 0
    figures.record(23, f'idle, http = "{way}"', measured, "10,000: <= + 500 MB, added p99 <= 50 ms", met)
    assert open_still == answered == IDLE
    assert growth <= 500 * MIB
    assert cost.failed == 0


async def answered(gateway: GatewayUnderTest) -> bool:
    """A new connection gets a proper answer."""
    async with httpx.AsyncClient(trust_env=False, timeout=2.0) as client:
        with contextlib.suppress(httpx.HTTPError):
            return (await client.post(f"{gateway.url}/v1/chat/completions", content=PLAIN)).status_code == 200
    return False


@pytest.mark.parametrize("way", MODES)
async def test_23_out_of_descriptors(tmp_path: Path, figures: Figures, way: str) -> None:
    """O-02's cousin: the process is left without descriptors (its limit is lowered under it); it refuses, it does not
    end, and it serves again as soon as there are some. No replica is blamed."""
    async with ScriptedReplica().running() as replica:
        async with gateway_before(tmp_path, {"server": {"http": way}}, replica.url) as gateway:
            assert await answered(gateway)
            before = resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE)
            few = gateway.descriptors() + 20
            resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE, (few, before[1]))
            held = await hold(gateway.port, 200, first=request(PLAIN)[:-5])
            await asyncio.sleep(span(5.0, 2.0))
            assert gateway.running
            refused = sum(one.closed_at is not None for one in held)
            for one in held:
                one.transport.abort()
            began = time.monotonic()
            await eventually(lambda: answered(gateway), "it serves again with the few it has", 10)
            back = time.monotonic() - began
            resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE, before)
            again = await hold(gateway.port, 200, first=request(PLAIN))
            await eventually(lambda: all(ANSWER in one.received for one in again), "all are served", 30)
            page = await gateway.metrics()
            ejected = page.total("warmlane_replica_state", state="ejected")
    measured = (
        f"{refused} of 200 refused, none crashed it, served again after {back:.2f} s, {ejected:.0f} replicas ejected"
    )
    met = refused > 0 and back < 5 and ejected == 0
    figures.record(23, f'no descriptors, http = "{way}"', measured, "refuse, not crash, and recover", met)
    assert refused > 0
    assert ejected == 0


@pytest.mark.parametrize("way", MODES)
async def test_23_more_than_may_be(tmp_path: Path, figures: Figures, way: str) -> None:
    """`max_connections`: those beyond it are told so, those within it are served on."""
    config = {"server": {"http": way, "max_connections": 100}}
    async with ScriptedReplica().running() as replica:
        async with gateway_before(tmp_path, config, replica.url) as gateway:
            await gateway.close_client()
            held = await hold(gateway.port, 100, first=request(PLAIN)[:-5])  # who rests would have to go
            beyond = await hold(gateway.port, 100, first=request(PLAIN))
            await eventually(lambda: all(one.closed_at is not None for one in beyond), "those beyond are closed")
            told = sum(one.received.startswith(b"HTTP/1.1 503 ") for one in beyond)
            for one in held:
                one.transport.write(request(PLAIN)[-5:])
            await eventually(lambda: all(ANSWER in one.received for one in held), "those within are served")
            for one in held:
                one.transport.abort()
            back = await eventually(lambda: answered(gateway), "there is room again", 10)
    measured = f"100 within served, {told} of 100 beyond told 503, room again after {back:.2f} s"
    figures.record(23, f'connection cap, http = "{way}"', measured, "refuse, not crash, and recover", told == 100)
    assert told == 100
