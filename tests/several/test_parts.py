"""The parts of several processes, each by itself."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from dataclasses import dataclass, field
from typing import Any

import pytest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from gateway.changes import Drain, Register, Unregister
from gateway.families import FAMILIES
from gateway.several import hub as hub_module
from gateway.several.doorman import CLIENT, END, Doorman, Taker
from gateway.several.handed import Handed
from gateway.several.hub import Hub, Seat
from gateway.several.messages import Alive, Answer, Ask, Asked, CatchUp, Counted, Done, DrainOver, Heard, Told
from gateway.several.output import SAME_SECONDS, Funnel, Said, pass_on
from gateway.several.parent import HUNG_SECONDS, LOOK_SECONDS, Hearing, called
from gateway.several.totals import ADDED, Page, page_of, with_others
from tests.chaos.rig import eventually

KNOWN_ALIKE = {
    "warmlane_build_info",
    "warmlane_index_blocks",
    "warmlane_index_capacity_blocks",
    "warmlane_cache_share_ratio",
    "warmlane_peers",
    "warmlane_peers_connected",
    "warmlane_announcements_connected",
    "warmlane_workers",
}
"""Gauges of which the answering worker's own stand for all, beside those of each replica."""


# -- totals


def page(count: float, gauge: float, *, replica: str = "a") -> list[Metric]:
    counter = CounterMetricFamily("warmlane_upstream_attempts", "x", labels=("replica", "result"))
    counter.add_metric((replica, "completed"), count)
    added = GaugeMetricFamily("warmlane_tasks", "x")
    added.add_metric((), gauge)
    alike = GaugeMetricFamily("warmlane_index_blocks", "x")
    alike.add_metric((), gauge)
    histogram = HistogramMetricFamily("warmlane_wait_seconds", "x")
    histogram.add_metric((), buckets=[("0.1", count), ("+Inf", 2 * count)], sum_value=count / 4)
    return [counter, added, alike, histogram]


def test_counts_are_added_and_what_all_know_alike_is_not() -> None:
    text = with_others(page(3, 5), page_of(page(4, 7)), {"a"}).decode()
    for line in (
        'warmlane_upstream_attempts_total{replica="a",result="completed"} 7.0',
        "warmlane_tasks 12.0",
        "warmlane_index_blocks 5.0",
        'warmlane_wait_seconds_bucket{le="0.1"} 7.0',
        'warmlane_wait_seconds_bucket{le="+Inf"} 14.0',
        "warmlane_wait_seconds_count 14.0",
        "warmlane_wait_seconds_sum 1.75",
    ):
        assert f"\n{line}\n" in text


def test_the_page_has_begun_when_the_parent_has_whoever_answers() -> None:
    """Else each answer of another worker looks like a restart, to the doctor for one."""
    parent = Page([], [("process_start_time_seconds", (), 100.0)])
    for own in (101.0, 102.0):
        family = GaugeMetricFamily("process_start_time_seconds", "x", value=own)
        assert page_of([family]) == Page([], [])
        assert "\nprocess_start_time_seconds 100.0\n" in with_others([family], parent, set()).decode()


def test_what_only_others_have_counted_is_there_unless_its_replica_is_gone() -> None:
    others = page_of(page(4, 7, replica="b"))
    assert 'attempts_total{replica="b",result="completed"} 4.0' in with_others(page(3, 5), others, {"a", "b"}).decode()
    assert 'replica="b"' not in with_others(page(3, 5), others, {"a"}).decode()


def test_it_is_said_of_every_gauge_whether_it_is_added() -> None:
    gauges = {one.name for one in FAMILIES if one.kind == "gauge"}
    of_replicas = {one.name for one in FAMILIES if one.kind == "gauge" and one.labels[:1] == ("replica",)}
    ours = {name for name in ADDED if name.startswith("warmlane_")}
    assert ours <= gauges
    assert not ours & KNOWN_ALIKE
    assert gauges == ours | KNOWN_ALIKE | of_replicas


# -- the hub


@dataclass
class FakeChannel:
    """Another end that does not read when it is full."""

    is_full: bool = False
    sent: list[Any] = field(default_factory=list)

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def of(self, kind: type) -> list[Any]:
        return [one for one in self.sent if isinstance(one, kind)]


def new_hub() -> Hub:
    loop = asyncio.get_running_loop()
    return Hub(loop, lambda seat: None, lambda seat: None, lambda: Page([], []))


def seated(hub: Hub, number: int) -> tuple[Seat, FakeChannel]:
    channel = FakeChannel()
    seat = Seat(number, channel, is_ready=True)  # type: ignore[arg-type]
    hub.enter(seat)
    return seat, channel


async def test_entries_reach_the_others_and_those_that_come_later() -> None:
    hub = new_hub()
    (one, first), (two, second) = seated(hub, 1), seated(hub, 2)
    hub.hear(one, CatchUp())
    hub.hear(two, CatchUp())
    hub.hear(one, Told(b"one", b"prompts", keep=True))
    hub.hear(one, Told(b"one", b"load", keep=False))
    assert [heard.facts for heard in second.of(Heard)] == [b"prompts", b"load"]
    assert first.of(Heard) == []
    three, third = seated(hub, 3)
    hub.hear(two, Told(b"two", b"more", keep=True))
    assert third.of(Heard) == []  # it does not know its replicas yet
    hub.hear(three, CatchUp())
    assert [heard.facts for heard in third.of(Heard)] == [b"prompts", b"more"]


async def test_a_worker_that_does_not_read_costs_the_shared_memory_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "MEMORY_BYTES", 100_000)
    hub = new_hub()
    (one, _), (two, second) = seated(hub, 1), seated(hub, 2)
    for seat in (one, two):
        hub.hear(seat, CatchUp())
    second.is_full = True
    for number in range(100):
        hub.hear(one, Told(b"one", bytes([number]) * 10_000, keep=True))
        hub.hear(one, Told(b"one", b"load", keep=False))
    assert second.sent == []
    second.is_full = False
    hub.tell(two)
    facts = [heard.facts[0] for heard in second.of(Heard)]
    assert facts == list(range(91, 100))  # the newest, as many as are kept


async def test_metrics_are_asked_of_all_and_the_last_ones_count_for_who_hangs() -> None:
    hub = new_hub()
    (one, first), (two, second), (three, _) = (seated(hub, number) for number in (1, 2, 3))
    hub.hear(three, Counted(Page([("n_total", (), 5.0)], [("g", (), 1.0)])))
    hub.hear(one, Ask(7))
    (asked,) = second.of(Asked)
    hub.hear(two, Counted(Page([("n_total", (), 2.0)], [("g", (), 1.0)])))
    hub.hear(two, Done(asked.number))
    assert first.of(Answer) == []
    await eventually(lambda: bool(first.of(Answer)), "it is answered without the third")
    (answer,) = first.of(Answer)
    assert (answer.number, answer.page.counts, answer.page.gauges) == (7, [("n_total", (), 7.0)], [("g", (), 2.0)])


async def test_counts_of_who_is_gone_stay_and_its_gauges_do_not() -> None:
    hub = new_hub()
    (one, first), (two, _) = seated(hub, 1), seated(hub, 2)
    hub.hear(two, Counted(Page([("n_total", (), 2.0)], [("g", (), 1.0)])))
    hub.hear(one, Ask(1))
    hub.leave(two)  # while it is asked
    (answer,) = first.of(Answer)
    assert (answer.page.counts, answer.page.gauges) == ([("n_total", (), 2.0)], [])


async def test_a_worker_that_starts_is_told_what_admins_have_changed() -> None:
    hub = new_hub()
    one, first = seated(hub, 1)
    for number, change in enumerate(
        [Drain("http://a", True), Drain("http://b", True), Drain("http://b", False), Register("http://c", None, 60.0)]
    ):
        hub.hear(one, Ask(number, change))
    assert [change for _, change in hub.changes()] == [Drain("http://a", True), Register("http://c", None, 60.0)]
    hub.hear(one, Ask(9, Unregister("http://c")))
    assert [change for _, change in hub.changes()] == [Drain("http://a", True)]
    assert [answer.number for answer in first.of(Answer)] == [0, 1, 2, 3, 9]


async def test_what_has_run_out_is_told_to_nobody_who_starts() -> None:
    """Else a worker that starts later drains a replica that all others send requests to."""
    now = [0.0]
    loop = asyncio.get_running_loop()
    hub = Hub(loop, lambda seat: None, lambda seat: None, lambda: Page([], []), lambda: now[0])
    one, _ = seated(hub, 1)
    for number, change in enumerate([Register("http://a", None, 60.0), Drain("http://a", True)]):
        hub.hear(one, Ask(number, change))
    now[0] = 61.0
    assert [change for _, change in hub.changes()] == [Drain("http://a", True)]
    hub.hear(one, DrainOver("http://a"))
    assert hub.changes() == []


async def test_a_worker_tells_how_busy_it_is() -> None:
    hub = new_hub()
    one, _ = seated(hub, 1)
    hub.hear(one, Alive(connections=5, received=9, requests=2))
    assert (one.connections, one.received, one.requests) == (5, 9, 2)


# -- workers that end, and a parent that cannot hear them


@pytest.mark.parametrize(
    ("code", "name"), [(3, "exit code 3"), (-9, "SIGKILL"), (-(signal.SIGRTMIN + 1), f"signal {signal.SIGRTMIN + 1}")]
)
def test_every_end_of_a_worker_has_a_name(code: int, name: str) -> None:
    assert called(code) == name


def test_a_parent_that_was_stopped_itself_does_not_take_that_for_silence() -> None:
    hearing = Hearing(100.0)
    hearing.look(101.0)
    hearing.look(102.0 + HUNG_SECONDS)  # it was late, as on a busy machine
    assert hearing.since == 100.0
    hearing.look(200.0)
    assert hearing.since == 200.0
    hearing.look(200.0 + LOOK_SECONDS)
    assert hearing.since == 200.0


# -- connections


class Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)  # type: ignore[attr-defined]


@dataclass
class Hand(Taker):
    """Passes connections on as the parent does, or cannot."""

    to: socket.socket
    taken: int = 0
    is_choked: bool = False

    def take(self, kind: bytes, connection: socket.socket) -> bool:
        if self.is_choked:
            return False
        socket.send_fds(self.to, [kind], [connection.fileno()])
        self.taken += 1
        return True


async def answered(port: int) -> bool:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"hello")
    back = await asyncio.wait_for(reader.readexactly(5), 10)
    writer.close()
    await writer.wait_closed()
    return back == b"hello"


async def test_a_connection_is_served_by_who_takes_it() -> None:
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    handed = Handed(theirs, loop)
    doorway = handed.doorway(CLIENT, ("127.0.0.1", 1))
    door = await doorway.open(Echo, 1)
    choked, hand = Hand(ours, is_choked=True), Hand(ours)
    takers: list[Taker] = []
    doorman = Doorman(loop, lambda: takers)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    doorman.open(listener, CLIENT)
    waiting = asyncio.create_task(answered(port))  # nobody serves yet: it waits, and is not refused
    await asyncio.sleep(0.05)
    assert not waiting.done()
    takers[:] = [choked, hand]
    assert await waiting
    assert all(await asyncio.gather(*(answered(port) for _ in range(20))))
    assert (choked.taken, hand.taken, handed.received) == (0, 21, 21)
    hand.is_choked = True
    waiting = asyncio.create_task(answered(port))  # accepted, and nobody can take it: it is kept
    await asyncio.sleep(0.05)
    assert not waiting.done()
    hand.is_choked = False
    assert await waiting
    doorman.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 1.0)
    assert not doorway.is_over
    ours.send(END)
    await eventually(lambda: doorway.is_over, "the end is noticed")
    door.close()
    handed.close()
    ours.close()


async def test_a_connection_that_comes_without_its_descriptor_has_come() -> None:
    """So it is with a worker that has none free: it must not count as on its way for ever."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    handed = Handed(theirs, asyncio.get_running_loop())
    await handed.doorway(CLIENT, ("127.0.0.1", 1)).open(Echo, 1)
    ours.send(CLIENT)
    await eventually(lambda: handed.received == 1, "it is counted")
    handed.close()
    ours.close()


# -- what they print


def test_a_line_of_several_workers_is_news_once() -> None:
    now = [0.0]
    said = Said(lambda: now[0])
    assert [said.is_news("http://a is up", worker) for worker in (1, 2, 3)] == [True, False, False]
    assert said.is_news("http://a is up", 2)  # once more: it has happened again
    assert not said.is_news("http://a is up", 1)
    now[0] = SAME_SECONDS + 1
    assert said.is_news("http://a is up", 3)
    assert said.is_news("http://b is up", 3)


async def test_half_a_line_is_passed_on_with_its_other_half_or_not_at_all() -> None:
    reader = asyncio.StreamReader()
    lines: list[bytes] = []
    passing = asyncio.create_task(pass_on(reader, lines.append))
    for data in (b"one\ntw", b"o\nthree\nfo", b"ur"):
        reader.feed_data(data)
        await asyncio.sleep(0)
    reader.feed_eof()
    await passing
    assert b"".join(lines) == b"one\ntwo\nthree\n"


async def test_who_does_not_read_the_log_holds_up_its_writers_and_not_the_loop() -> None:
    ours, theirs = os.pipe()
    funnel = Funnel(theirs)
    lines = b"x" * 99_999 + b"\n"  # more than a pipe takes
    writing = [asyncio.create_task(funnel.write(lines)) for _ in range(3)]
    await asyncio.sleep(0.05)
    assert not any(one.done() for one in writing)
    read = bytearray()
    while len(read) < 3 * len(lines):
        read += await asyncio.to_thread(os.read, ours, 65_536)
    await asyncio.gather(*writing)
    assert bytes(read) == 3 * lines
    await funnel.finish()
    os.close(ours)
    os.close(theirs)
