"""Clients that leave in every phase, and more load than capacity: nothing leaks, nothing queues without end."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random

import pytest

from tests.chaos.bench import first_as_well
from tests.chaos.light import (
    STREAM_HEAD,
    LightClient,
    LightReplica,
    OwnLag,
    Served,
    all_up,
    chat,
    emptied,
    gateway_before,
    lag_bound,
    light_replicas,
    post,
    send,
)
from tests.chaos.openloop import Load, Result, Traffic, ask, ends, percentile
from tests.chaos.rig import GatewayProcess, Metrics, eventually, span
from tests.chaos.scripted import event, whole_answer

PHASES = ("queued", "before the head", "before the first event", "in mid-stream")
PER_PHASE = 250


def stay(served: Served) -> None:
    """Do what the prompt names, and never come to an end."""
    if b"before the head" in served.body:
        return
    served.write(STREAM_HEAD)
    if b"in mid-stream" in served.body:
        tick(served, itertools.count())


def tick(served: Served, numbers: itertools.count[int]) -> None:
    if not served.over:
        served.piece(event(1, next(numbers), last=False))
        asyncio.get_running_loop().call_later(0.1, tick, served, numbers)


@pytest.mark.parametrize("http", ["fast", "asgi"])
async def test_09_a_thousand_clients_leave_in_four_phases(tmp_path: Path, figures, http: str) -> None:
    """O-01: each replica sees its socket close; nothing is sent again, nobody is blamed, nothing is left behind."""
    limits = {"hold": False, "max_in_flight": 3 * PER_PHASE, "max_waiting": PER_PHASE}
    async with light_replicas(3, stay) as replicas:
        config = {"server": {"http": http}, "routing": limits}
        async with gateway_before(replicas, tmp_path, config) as gateway:
            clients = await fill(gateway, replicas)
            leave(clients)
            await eventually(lambda: all(one.over for one in all_served(replicas)), "all sockets are closed")
            gauges_seconds = await emptied(gateway)
            page = await gateway.metrics()
        served = all_served(replicas)
        delays = [one.lost_at - clients[one.id].closed_at for one in served if one.lost_at is not None]
        again = len(served) - len({one.id for one in served})
        failed = page.total("warmlane_upstream_attempts_total", result="failed")
        p99 = percentile(delays, 0.99)
        figures.record(9, f"socket to the replica closed, {http}", f"p99 {p99 * 1e3:.0f} ms", "p99 <= 1 s", p99 <= 1.0)
        figures.record(9, f"gauges at zero, {http}", f"{gauges_seconds:.2f} s", "<= 2 s", gauges_seconds <= 2.0)
        figures.record(
            9, f"sent again, counted as failed, {http}", f"{again}, {failed:.0f}", "0, 0", again == 0 and failed == 0
        )
        assert len(delays) == len(served) >= 3 * PER_PHASE
        assert p99 <= 1.0
        assert gauges_seconds <= 2.0
        assert (again, failed) == (0, 0)
        assert page.total("warmlane_replica_state", state="up") == 3
        assert page.total("warmlane_requests_total", outcome="client_left") == 4 * PER_PHASE
        assert not any(connection.now for replica in replicas for connection in replica.connections)


def all_served(replicas: list[LightReplica]) -> list[Served]:
    return [one for replica in replicas for one in replica.served]


async def fill(gateway: GatewayProcess, replicas: list[LightReplica]) -> dict[str, LightClient]:
    """A quarter of the clients in each phase, by request id."""
    clients: dict[str, LightClient] = {}
    for phase in (*PHASES[1:], PHASES[0]):
        for number in range(PER_PHASE):
            id = f"{phase.replace(' ', '-')}-{number}"
            clients[id] = await send(gateway.port, post(chat(f"{phase} {number}", stream=True), id))
        if phase == PHASES[3]:
            await eventually(lambda: len(all_served(replicas)) == 3 * PER_PHASE, "all are at the replicas")

    async def all_wait() -> bool:
        page = await gateway.metrics()
        return page.total("warmlane_waiting_requests") == PER_PHASE

    await eventually(all_wait, "the others wait")
    streams = [client for id, client in clients.items() if id.startswith("in-mid")]
    await eventually(lambda: all(client.parts for client in streams), "all streams flow")
    return clients


def leave(clients: dict[str, LightClient]) -> None:
    """All at once, in any order; half of them properly, half by a reset."""
    order = list(clients.values())
    Random(9).shuffle(order)
    for number, client in enumerate(order):
        if number % 2:
            client.close()
        else:
            client.reset()


FAULTS = ("the replica says 500", "the replica resets", "the client resets at the head", "the client resets later")


def misbehave(served: Served) -> None:
    if b"says 500" in served.body:
        served.answer(b'{"error":{"message":"scripted"}}', b"500 Internal Server Error")
    elif b"the replica resets" in served.body:
        served.reset()
    elif b"the client resets" in served.body:
        served.write(STREAM_HEAD)
        tick(served, itertools.count())
    else:
        served.answer(whole_answer(1, 1))


async def test_09_faults_leave_all_slots_free(tmp_path: Path, figures) -> None:
    """O-02: with four slots, four hundred requests that fail in every way, and then one that should not notice."""
    each = 100
    async with light_replicas(2, misbehave) as replicas:
        config = {"routing": {"max_in_flight": 4, "policy": "least-requests"}, "feeds": {"probe_interval_seconds": 0.2}}
        async with gateway_before(replicas, tmp_path, config) as gateway:
            kinds = [kind for kind in FAULTS for _ in range(each)]
            Random(2).shuffle(kinds)
            await in_parallel(8, [lambda kind=kind, at=at: suffer(gateway, kind, at) for at, kind in enumerate(kinds)])
            gauges_seconds = await emptied(gateway)
            began = time.monotonic()
            response = await gateway.chat("a normal request")
            normal_seconds = time.monotonic() - began
            assert response.status_code == 200
            await eventually(lambda: all_up(gateway, 2), "both replicas are up again", 60.0)
            for replica in replicas:
                replica.served.clear()
            answers = [await gateway.chat(f"another {number}") for number in range(100)]
        spread = [len(replica.served) for replica in replicas]
        met = gauges_seconds <= 2.0 and normal_seconds <= 0.1
        measured = f"gauges at zero after {gauges_seconds:.2f} s, the next request took {normal_seconds * 1e3:.0f} ms"
        figures.record(9, "after 400 faults on four slots", measured, "2 s, immediate", met)
        assert met
        assert all(answer.status_code == 200 for answer in answers)
        assert sum(spread) == 100
        assert max(spread) <= 60


async def suffer(gateway: GatewayProcess, kind: str, number: int) -> None:
    client = await send(gateway.port, post(chat(f"{kind} {number}", stream=True), f"fault-{number}", close=True))
    if kind.startswith("the client"):
        enough: Callable[[], bool] = lambda: client.status != 0  # noqa: E731
        if kind.endswith("later"):
            enough = lambda: len(client.parts) >= 2  # noqa: E731
        await eventually(lambda: enough() or client.ended.done(), f"{kind} can happen", 10.0, every=0.005)
        client.reset()
    else:
        await asyncio.wait_for(client.ended, 10.0)
        client.transport.abort()


async def in_parallel(width: int, jobs: list[Callable[[], Awaitable[object]]]) -> None:
    left = deque(jobs)

    async def work() -> None:
        while left:
            await left.popleft()()

    await asyncio.gather(*(work() for _ in range(width)))


class Slots:
    """A replica that serves so many at once, each in a quarter of a second; the others wait in its own queue."""

    AT_ONCE = 4
    PIECES = 5
    PIECE_SECONDS = 0.05
    REQUESTS_PER_SECOND = AT_ONCE / (PIECES * PIECE_SECONDS)

    def __init__(self) -> None:
        self.queue: dict[int, deque[Served]] = {}
        self.busy: Counter[int] = Counter()

    def script(self, served: Served) -> None:
        where = id(served.connection.replica)
        self.queue.setdefault(where, deque()).append(served)
        self.begin(where)

    def begin(self, where: int) -> None:
        queue = self.queue[where]
        while queue and self.busy[where] < self.AT_ONCE:
            served = queue.popleft()
            if not served.over:
                self.busy[where] += 1
                self.go_on(served, where, 0)

    def go_on(self, served: Served, where: int, at: int) -> None:
        loop = asyncio.get_running_loop()
        if at == 0 and served.streams:
            served.write(STREAM_HEAD)
        elif at and served.streams:
            served.piece(event(1, at - 1, last=at == self.PIECES))
        if at < self.PIECES and not served.over:
            loop.call_later(self.PIECE_SECONDS, self.go_on, served, where, at + 1)
            return
        if served.streams:
            served.piece(b"data: [DONE]\n\n")
            served.end_stream()
        else:
            served.answer(whole_answer(1, self.PIECES))
        self.busy[where] -= 1
        self.begin(where)


QUEUE = 96
"""Places in the waiting room: two seconds of work for the three replicas."""


async def test_24_overload(tmp_path: Path, figures) -> None:
    """Five times what the replicas can do: they do as much as ever, the others are told at once to come back later."""
    traffic = Traffic(tokens=Slots.PIECES, rate=5 * 3 * Slots.REQUESTS_PER_SECOND)
    seconds = span(60.0, 12.0)
    async with light_replicas(3, Slots().script) as replicas:
        config = {"routing": {"max_in_flight": 24, "max_waiting": QUEUE}, "server": {"log": "off"}}
        async with gateway_before(replicas, tmp_path, config) as gateway:
            most = await closed_loop(gateway, traffic, span(10.0, 5.0))
            load = Load(gateway.url, traffic, first=100_000)
            depth = asyncio.create_task(deepest(gateway, seconds))
            began = time.monotonic()
            with first_as_well():
                async with load.running(), OwnLag().watched() as own:
                    await asyncio.sleep(seconds)
                    over = time.monotonic()
            normal_seconds = await back_to_normal(gateway, traffic, over)
            page = await gateway.metrics()
            longest = await depth
    report(figures, load.results, most, (began, over), longest, normal_seconds, page, own.p99)


async def closed_loop(gateway: GatewayProcess, traffic: Traffic, seconds: float) -> float:
    """Requests a second with as many clients as keep all replicas busy."""
    numbers, done = itertools.count(1), []
    until = time.monotonic() + seconds + 1.0

    async def client() -> None:
        while time.monotonic() < until:
            done.append(await ask(gateway.url, next(numbers), traffic))

    await asyncio.gather(*(client() for _ in range(2 * 3 * Slots.AT_ONCE)))
    assert all(result.ok for result in done), ends(done)
    counted = [result for result in done if until - seconds <= result.ended_at <= until]
    return len(counted) / seconds


async def deepest(gateway: GatewayProcess, seconds: float) -> float:
    """The longest queue that a look each quarter of a second finds."""
    found, until = 0.0, time.monotonic() + seconds
    while time.monotonic() < until:
        found = max(found, (await gateway.metrics()).total("warmlane_waiting_requests"))
        await asyncio.sleep(0.25)
    return found


async def back_to_normal(gateway: GatewayProcess, traffic: Traffic, over: float) -> float:
    """Seconds from the end of the overload until a request is answered as fast as on an idle fleet."""
    usual = Slots.PIECES * Slots.PIECE_SECONDS
    for number in itertools.count(1_000_000):
        result = await ask(gateway.url, number, traffic)
        if result.ok and result.seconds < usual + 0.1:
            return result.sent_at - over
        assert time.monotonic() - over < 60.0, "never normal again"
        await asyncio.sleep(0.05)
    raise AssertionError


def report(
    figures,
    results: list[Result],
    most: float,
    window: tuple[float, float],
    longest: float,
    normal_seconds: float,
    page: Metrics,
    own_lag: float,
) -> None:
    began, over = window[0] + 2.0, window[1]  # two seconds to fill the queue
    good = sum(result.ok and began <= result.ended_at <= over for result in results) / (over - began)
    shed = [result for result in results if not result.ok]
    refusal_p99 = percentile([result.seconds for result in shed], 0.99)
    polite = all(result.status == 429 and int(result.headers["retry-after"]) >= 1 for result in shed)
    share = good / most
    offered = len(results) / (window[1] - window[0])
    text = f"{good:.0f} of {most:.0f} requests/s at {offered:.0f} offered: {share:.1%}"
    figures.record(24, "goodput", text, ">= 90 % of the maximum", share >= 0.9)
    text = f"{len(shed)} x 429, p99 {refusal_p99 * 1e3:.0f} ms, {own_lag * 1e3:.0f} ms of it this test's own"
    in_time = refusal_p99 - own_lag <= 0.05
    figures.record(24, "refusals", text, "429 or 503 with Retry-After, 50 ms", polite and in_time)
    lag = lag_bound(Metrics([]), page, 0.99)
    figures.record(24, "loop lag", f"p99 <= {lag * 1e3:g} ms", "<= 20 ms", lag <= 0.02)
    figures.record(24, "longest queue", f"{longest:.0f}", f"<= {QUEUE}", longest <= QUEUE)
    figures.record(24, "normal again", f"{normal_seconds:.1f} s", "<= 10 s", normal_seconds <= 10.0)
    assert offered >= 4.5 * most, "the load generator could not keep up"
    assert share >= 0.9
    assert polite, ends(shed)
    assert in_time
    assert longest <= QUEUE
    assert normal_seconds <= 10.0
    assert page.total("warmlane_shed_total", reason="full") == len(shed)


TENANTS = {"greedy": 100.0, "one": 20.0, "two": 20.0, "three": 20.0, "four": 20.0}
"""Requests a second that they ask for; a fifth of 48 is what each can have."""


async def test_24_tenants_share_alike(tmp_path: Path, figures) -> None:
    """Each asks for more than there is for it, one for ten times as much."""
    seconds = span(20.0, 8.0)
    secrets = {tenant: f"wl-secret-of-{tenant}" for tenant in TENANTS}
    entries = [
        f'[[keys]]\nname = "{tenant}"\nsha256 = "{hashlib.sha256(secret.encode()).hexdigest()}"\n'
        for tenant, secret in secrets.items()
    ]
    (tmp_path / "keys.toml").write_text("".join(entries))
    config = {
        "routing": {"max_in_flight": 24, "max_waiting": QUEUE},
        "auth": {"keys_file": str(tmp_path / "keys.toml")},
        "server": {"log": "off"},
    }
    async with light_replicas(3, Slots().script) as replicas:
        async with gateway_before(replicas, tmp_path, config, key=secrets["one"]) as gateway:
            loads = {
                tenant: Load(gateway.url, traffic_of(secrets[tenant], rate), first=10_000 * number + 1)
                for number, (tenant, rate) in enumerate(TENANTS.items(), 1)
            }
            began = time.monotonic()
            await asyncio.gather(*(load.run(seconds) for load in loads.values()))
            page = await gateway.metrics()
    over = began + seconds
    served = [
        sum(result.ok and began + 2.0 <= result.ended_at <= over for result in load.results) for load in loads.values()
    ]
    fairness = sum(served) ** 2 / (len(served) * sum(count * count for count in served))
    measured = f"{fairness:.3f}: {', '.join(map(str, served))} requests"
    figures.record(24, "fairness over tenants (Jain)", measured, ">= 0.95", fairness >= 0.95)
    assert fairness >= 0.95
    for tenant, load in loads.items():
        refused = sum(not result.ok for result in load.results)
        assert page.total("warmlane_shed_total", tenant=tenant) == refused, ends(load.results)
        assert page.total("warmlane_admitted_total", tenant=tenant) == len(load.results) - refused


def traffic_of(secret: str, rate: float) -> Traffic:
    return Traffic(rate=rate, tokens=Slots.PIECES, headers=(("authorization", f"Bearer {secret}"),))
