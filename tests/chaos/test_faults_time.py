"""Dead kept connections, moved addresses, limits of time (tests 10, 11, 30; O-03, O-06, O-08, O-27)."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from tests.chaos.conftest import Figures
from tests.chaos.openloop import Load, Result, Traffic, ask, ends, percentile
from tests.chaos.rig import SHORT, GatewayProcess, ScriptedReplica, eventually, span, standing
from tests.chaos.test_faults_loss import split_at

CONNECT_SECONDS = 2.0
"""The gateway's own limit for a connection, as it is by default."""


# -- the keep-alive race


async def test_10_keep_alive_race(tmp_path: Path, figures: Figures) -> None:
    """O-06: uvicorn closes an idle connection after 5 s, just when the gateway sends on it."""
    clients, rounds = 50, 2 if SHORT else 10
    patient = {"upstream": {"pool_idle_seconds": 60.0}}
    async with standing(tmp_path, replicas=0, embedded=1) as rig:
        await rig.add_gateway(patient)
        random = Random(10)
        statuses: dict[str, Counter[int]] = {gateway.url: Counter() for gateway in rig.gateways}

        async def client(gateway: GatewayProcess) -> None:
            for _ in range(rounds):
                statuses[gateway.url][(await gateway.chat(f"{random.random()}", max_tokens=2)).status_code] += 1
                await asyncio.sleep(random.uniform(4.8, 5.2))

        await asyncio.gather(*(client(gateway) for gateway in rig.gateways for _ in range(clients)))
        replays = [(await gateway.metrics()).total("warmlane_replays_total", cause="kept") for gateway in rig.gateways]
    for gateway, sent_again, title in zip(
        rig.gateways, replays, ("kept connections end before the replica's", "kept connections outlive it"), strict=True
    ):
        bad = sum(count for status, count in statuses[gateway.url].items() if status != 200)
        figures.record(
            10,
            title,
            f"{bad} errors of {clients * rounds} requests 4.8 to 5.2 s apart, {sent_again:.0f} sent again",
            "0 x 502",
            bad == 0,
        )
        assert statuses[gateway.url] == {200: clients * rounds}


# -- a name that moves


@pytest.fixture
def names(tmp_path: Path) -> dict[str, str]:
    """Environment in which `replica.test` resolves to what the file holds."""
    library = tmp_path / "names.so"
    source = Path(__file__).with_name("names.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return {"LD_PRELOAD": str(library), "NAMES_FILE": str(tmp_path / "address")}


def point(names: dict[str, str], address: str) -> None:
    Path(names["NAMES_FILE"]).write_text(f"{address}\n")


@contextlib.contextmanager
def black_hole(host: str, port: int) -> Iterator[None]:
    """Nobody accepts there, and the queue is full: what tries to connect hears nothing."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(0)
        for _ in range(2):
            filling = stack.enter_context(socket.socket())
            filling.setblocking(False)
            filling.connect_ex((host, port))
        yield


async def test_11_a_name_moves_to_another_address(names: dict[str, str], tmp_path: Path, figures: Figures) -> None:
    """O-08: the old address is black-holed, and nothing tells of the change."""
    point(names, "127.0.0.2")
    async with standing(tmp_path, replicas=2, gateways=0) as rig:
        urls = [replica.url for replica in rig.replicas]
        old = ScriptedReplica("old", tmp_path, host="127.0.0.2")
        rig.replicas.append(old)
        await old.start()
        new = ScriptedReplica("new", tmp_path, old.port, host="127.0.0.3")
        rig.replicas.append(new)
        await new.start()
        urls.append(f"http://replica.test:{old.port}")
        gateway = GatewayProcess("gateway", tmp_path, {}, urls, names)
        rig.gateways.append(gateway)
        await gateway.start()
        await eventually(lambda: all_up(gateway, 3), "all replicas are up")
        load = Load(gateway.url)
        async with load.running():
            await eventually(lambda: bool(old.received()), "the old address is used")
            await asyncio.sleep(3.0)
            old.kill()
            with black_hole("127.0.0.2", old.port):
                moved_at = time.monotonic()
                point(names, "127.0.0.3")
                await eventually(lambda: bool(new.received()), "the new address is used", 20.0)
                await asyncio.sleep(span(6.0, 4.0))
        first = new.received()[0].at - moved_at
    begun, rest = split_at(load.results, moved_at)
    waits = [r.head_at - r.sent_at for r in rest if r.head_at is not None]
    errors = [r for r in rest if not r.ok]
    replay = percentile([r.head_at - r.sent_at for r in begun if r.head_at is not None], 0.99)
    figures.record(11, "traffic at the new address", f"{first:.1f} s", "<= 5 s", first <= 5.0)
    figures.record(
        11,
        "nobody waits longer",
        f"{max(waits):.2f} s at most, {len(errors)} errors of {len(rest)}",
        "<= connect time-out (2 s) + one replay",
        max(waits) <= CONNECT_SECONDS + replay + 0.5 and not errors,
    )
    assert not errors, ends(errors)
    assert first <= 5.0
    assert max(waits) <= CONNECT_SECONDS + replay + 0.5


async def all_up(gateway: GatewayProcess, count: int) -> bool:
    page = await gateway.metrics()
    return page.total("warmlane_replica_state", state="up") == count


# -- limits of time


async def test_30_a_long_silent_prefill_succeeds(tmp_path: Path, figures: Figures) -> None:
    """O-27: no limit of 5 s or a minute hides anywhere."""
    silence = span(300.0, 8.0)
    async with standing(tmp_path, replicas=1) as rig:
        await rig.replicas[0].behave(first_byte_seconds=silence, tokens=3)
        streams, whole = Traffic(stream_share=1.0, tokens=3), Traffic(stream_share=0.0, tokens=3)
        results = await asyncio.gather(*(ask(rig.gateway.url, 1, one, silence + 30.0) for one in (streams, whole)))
    good = all(r.ok for r in results)
    figures.record(30, f"{silence:g} s of silence", ends(results), "succeeds, stream and not", good)
    assert good


async def test_30_a_stall_in_mid_stream_is_an_explicit_error(tmp_path: Path, figures: Figures) -> None:
    """O-03 (c)."""
    async with standing(tmp_path, replicas=1, config={"upstream": {"idle_timeout_seconds": 2.0}}) as rig:
        await rig.replicas[0].behave(stall_after=5)
        result = await ask(rig.gateway.url, 1, Traffic(stream_share=1.0))
        await eventually(lambda: rig.replicas[0].received()[0].end == "cut", "the replica's work is stopped", 2.0)
    explicit = result.end == "error event" and result.tokens == 5 and not (result.done or result.finished)
    took = result.seconds - 0.15
    figures.record(
        30,
        "stall in mid-stream, limit 2 s",
        f"{result.end} after {took:.2f} s",
        "explicit error",
        explicit and took < 4.0,
    )
    assert explicit, result
    assert took < 4.0


async def test_30_comments_of_the_replica_are_forwarded_and_keep_a_stream_alive(
    tmp_path: Path, figures: Figures
) -> None:
    async with standing(tmp_path, replicas=1, config={"upstream": {"idle_timeout_seconds": 1.0}}) as rig:
        await rig.replicas[0].behave(silent_seconds=4.0, comment_seconds=0.3, tokens=3)
        kept = await ask_raw(rig.gateway, Traffic(stream_share=1.0, tokens=3))
    comments = kept.count(b": still here\n\n")
    figures.record(30, "comments through 4 s of silence, limit 1 s", f"{comments} forwarded", "all", comments >= 12)
    assert comments >= 12
    assert b"data: [DONE]" in kept


async def ask_raw(gateway: GatewayProcess, traffic: Traffic) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(traffic.request(1, "g"))
    try:
        return await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 30.0)
    finally:
        writer.close()


async def test_30_an_absolute_deadline_is_enforced(tmp_path: Path, figures: Figures) -> None:
    """Before an answer a 504, in mid-stream an error event; the replica's work ends in both cases."""
    seconds = 1.0
    async with standing(tmp_path, replicas=1, config={"upstream": {"deadline_seconds": 30.0}}) as rig:
        replica = rig.replicas[0]
        limited = Traffic(stream_share=1.0, headers=(("x-request-timeout", f"{seconds:g}"),))
        await replica.behave(token_seconds=0.1)
        streamed = await ask(rig.gateway.url, 1, limited)
        await replica.behave(first_byte_seconds=20.0)
        silent = await ask(rig.gateway.url, 2, limited)
        await eventually(lambda: [one.end for one in replica.received()] == ["cut", "cut"], "both are aborted", 5.0)
        late = abort_delay(replica, [streamed, silent], seconds)
    good = silent.status == 504 and streamed.end == "error event" and not streamed.done
    figures.record(
        30,
        f"deadline of {seconds:g} s",
        f"{silent.status} after {silent.seconds:.2f} s, in mid-stream {streamed.end} after {streamed.seconds:.2f} s; "
        f"replica aborted {late * 1e3:.0f} ms after",
        "enforced, upstream aborted",
        good and late <= 1.0,
    )
    assert good, (silent, streamed)
    assert max(silent.seconds, streamed.seconds) < seconds + 1.0
    assert late <= 1.0


def abort_delay(replica: ScriptedReplica, results: list[Result], seconds: float) -> float:
    """The longest time that the replica worked on after a deadline."""
    return max(
        (one.ended_at or 0.0) - (result.sent_at + seconds)
        for one, result in zip(replica.received(), results, strict=True)
    )
