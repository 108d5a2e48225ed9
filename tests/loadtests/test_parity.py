"""The simulator and the live gateway decide alike: one small trace through both.

Live means real: the front door behind uvicorn, bodies over sockets, replicas that answer over sockets. Only time is
taken from its hands. The clock is moved from event to event of the simulated run, timers of the gate included, and
replicas give first tokens and ends when the simulated ones do. So both routers must see the same calls at the same
times, and end in the same state: a call that the gateway forgot shows.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any, cast

import msgspec
import pytest
import uvicorn

from gateway.assembly import Gateway
from gateway.config import Config, Server, Upstream
from gateway.control import build_api
from gateway.core import holding
from gateway.core.admission import Admitted, Release, Shed, Waiting
from gateway.core.flight import Flight
from gateway.core.model import Fact, LoadReported, Outcome, RouteRequest, Usage
from gateway.core.router import Router
from gateway.core.settings import RoutingSettings
from gateway.listeners import listen
from gateway.proxy import http_client
from gateway.proxy.control_connection import ControlConnection
from gateway.proxy.front_door import FrontDoor
from gateway.proxy.gate import Gate
from gateway.server import Server as ControlServer
from gateway.stop_signals import StopSignals
from gateway.telemetry import Telemetry
from loadtests.simulator import KEY_BYTES_PER_TOKEN, Fleet, Simulator, Trip
from loadtests.traces import BLOCK_TOKENS, Request
from tests.proxy.conftest import MODES, eventually
from tests.proxy.scripted import Exchange, ScriptedReplica

REPLICAS = 3
SETTINGS = RoutingSettings(block_bytes=BLOCK_TOKENS * KEY_BYTES_PER_TOKEN)
SEED = 7
PATIENCE_SECONDS = 10.0
"""For what takes a millisecond, on a machine that does other things too."""
ROUNDING_SECONDS = 1e-9


# ---- the trace -----------------------------------------------------------------------------------------------------


def requests(gap_seconds: float, count: int = 60) -> list[Request]:
    """Prompts that begin with one of four prefixes of two to nine blocks, at random times."""
    random = Random(3)
    made, now = [], 0.0
    for number in range(count):
        group = random.randrange(4)
        shared = 2 + 2 * group + random.randrange(2)
        blocks = (*range(100 * group, 100 * group + shared), 1_000 + number)
        tokens = len(blocks) * BLOCK_TOKENS + random.randrange(1, BLOCK_TOKENS)
        made.append(Request(now, tokens, 2 + random.randrange(60), blocks))
        now += gap_seconds if gap_seconds > 1 else random.expovariate(1 / gap_seconds)
    return made


def token_ids(request: Request, number: int) -> list[int]:
    """A prompt with these blocks: each is its id, over and over; what follows them is the request's own."""
    ids = [block for block in request.blocks for _ in range(BLOCK_TOKENS)]
    return ids + [100_000 + number] * (request.input_tokens - len(ids))


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that the simulated world did, and the live one must do too."""

    at: float
    trip: Trip | None = None
    is_arrival: bool = False
    is_first_token: bool = False
    is_release: bool = False
    """The simulated gateway asked who may go on: the live one's timer is due at the same time."""
    facts: tuple[Fact, ...] = ()


def simulated(trace: list[Request], fleet: Fleet) -> tuple[Simulator, list[Moment]]:
    simulator = Simulator(trace, fleet, SETTINGS, SEED)
    moments: list[Moment] = []
    gateway = simulator.gateways[0]
    observe = gateway.observe

    def note(facts: list[Fact], now: float) -> None:
        moments.append(Moment(now, facts=tuple(facts)))
        observe(facts, now)

    def note_release(now: float) -> None:
        moments.append(Moment(now, is_release=True))
        release(now)

    release = gateway._release_due
    gateway._release_due = note_release  # type: ignore[method-assign]
    gateway.observe = note  # type: ignore[method-assign,assignment]
    for trip in simulator.run():
        assert trip.first_token_at is not None
        assert trip.ended_at is not None
        moments.append(Moment(trip.arrived_at, trip, is_arrival=True))
        moments.append(Moment(trip.first_token_at, trip, is_first_token=True))
        moments.append(Moment(trip.ended_at, trip))
    # As in the simulator: what a replica did is known first, then what was told, then who arrives.
    moments.sort(key=lambda moment: (moment.at, 2 * moment.is_arrival + bool(moment.facts)))
    return simulator, moments


# ---- time, moved by hand -------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Timer:
    at: float
    callback: Callable[[], None]
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True


@dataclass
class HandMovedLoop:
    """What the gate needs of an event loop, in the time of the clock here."""

    loop: asyncio.AbstractEventLoop
    now: float = 0.0
    timers: list[Timer] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def create_future(self) -> asyncio.Future[None]:
        return self.loop.create_future()

    def call_later(self, delay: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(self.now + delay, callback)
        self.timers.append(timer)
        return timer

    def next_timer(self) -> Timer | None:
        self.timers = [timer for timer in self.timers if not timer.is_cancelled]
        return min(self.timers, key=lambda timer: timer.at, default=None)


# ---- the live side -------------------------------------------------------------------------------------------------


class HandDriven(Gateway):
    """The gateway's own objects, with a router and a clock that are given."""

    def __init__(self, config: Config, router: Router, time: HandMovedLoop) -> None:
        super().__init__(config, time.loop)
        self.clock = time.clock
        self.router = router
        self.telemetry = Telemetry(log=io.BytesIO(), log_blocks=False, router=router, clock=self.clock)
        block_bytes = SETTINGS.block_bytes
        self.door = FrontDoor(
            router, self.telemetry, config.server, config.upstream, self.clock, time.loop, block_bytes=block_bytes
        )
        self.door.gate = Gate(router, self.clock, cast(asyncio.AbstractEventLoop, time))


@contextlib.asynccontextmanager
async def listening(gateway: HandDriven, mode: str) -> AsyncIterator[int]:
    sock = listen("127.0.0.1", 0, "")
    http: Any = functools.partial(ControlConnection, gateway.config.server, gateway.door.places)
    if mode == "fast":
        http = functools.partial(http_client.ClientConnection, gateway.door)
    config = uvicorn.Config(build_api(gateway), http=http, ws="none", lifespan="off", log_level="error")
    ready = asyncio.Event()
    server = ControlServer(config, gateway, ready.set, StopSignals())
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        await asyncio.wait_for(ready.wait(), 10)
        yield sock.getsockname()[1]
    finally:
        server.should_exit = server.force_exit = True
        await asyncio.wait_for(serving, 10)
        gateway.door.upstreams.close()
        gateway.telemetry.close()


class Obedient:
    """What the replicas do: each step of each answer when told."""

    def __init__(self, count: int) -> None:
        self.first_token = [asyncio.Event() for _ in range(count)]
        self.end = [asyncio.Event() for _ in range(count)]
        self.usage = [b""] * count
        self.places: dict[int, int] = {}
        """Of requests that reached a replica, in that order."""

    async def answer(self, place: int, exchange: Exchange) -> None:
        number = int(exchange.header("x-number") or -1)
        self.places[number] = place
        await self.first_token[number].wait()
        await exchange.start_stream()
        await exchange.chunk(b'data: {"choices":[{"index":0,"text":"x"}]}\n\n')
        await self.end[number].wait()
        await exchange.chunk(b'data: {"choices":[],"usage":' + self.usage[number] + b"}\n\n")
        await exchange.chunk(b"data: [DONE]\n\n")
        await exchange.end_stream()


class Client:
    """One request over a connection of its own."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.received = b""

    @classmethod
    async def send(cls, port: int, number: int, request: Request) -> Client:
        body = msgspec.json.encode({"model": "m", "prompt": token_ids(request, number), "stream": True})
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-number: {number}\r\nconnection: close\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        return cls(reader, writer)

    async def read_until(self, marker: bytes) -> None:
        while marker not in self.received:
            data = await asyncio.wait_for(self._reader.read(65_536), PATIENCE_SECONDS)
            assert data, self.received
            self.received += data

    async def read_all(self) -> None:
        self.received += await asyncio.wait_for(self._reader.read(), PATIENCE_SECONDS)

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    def header(self, name: str) -> str:
        lines = self.received.split(b"\r\n\r\n", 1)[0].decode().split("\r\n")
        return dict(line.split(": ", 1) for line in lines[1:])[name]


class Live:
    """The live gateway on its way through the moments."""

    def __init__(self, gateway: HandDriven, time: HandMovedLoop, port: int, replicas: Obedient) -> None:
        self.gateway = gateway
        self.time = time
        self.port = port
        self.replicas = replicas
        self.clients: dict[int, Client] = {}
        self.arrived = self.ended = 0

    async def go_through(self, moments: list[Moment]) -> None:
        for moment in moments:
            # The gate counts from now on: the time that it means comes back rounded.
            due = moment.at + (ROUNDING_SECONDS if moment.is_release else -ROUNDING_SECONDS)
            while (timer := self.time.next_timer()) is not None and timer.at <= due:
                self.time.now = moment.at if moment.is_release else max(self.time.now, timer.at)
                self.time.timers.remove(timer)
                timer.callback()
                await self.settle()
            self.time.now = moment.at
            await self.act(moment)
            await self.settle()

    async def act(self, moment: Moment) -> None:
        for fact in moment.facts:
            self.gateway.observe(fact)
        trip = moment.trip
        if trip is None:
            return
        number, request = trip.number, trip.request
        if moment.is_arrival:
            self.clients[number] = await Client.send(self.port, number, request)
            self.arrived += 1
        elif moment.is_first_token:
            self.replicas.first_token[number].set()
            await self.clients[number].read_until(b'"text":"x"')
        else:
            self.replicas.usage[number] = msgspec.json.encode(
                {
                    "prompt_tokens": request.input_tokens,
                    "completion_tokens": request.output_tokens,
                    "prompt_tokens_details": {"cached_tokens": trip.cached_tokens},
                }
            )
            self.replicas.end[number].set()
            await self.clients[number].read_all()
            self.ended += 1

    async def close(self) -> None:
        for client in self.clients.values():
            await client.close()

    async def settle(self) -> None:
        """Until all that was set off has come to rest: read, sent, finished."""

        def is_at_rest() -> bool:
            now = self.gateway.router.statistics(self.time.now)
            return (
                now.started + now.waiting == self.arrived
                and now.started - now.in_flight == self.ended
                and len(self.replicas.places) == now.started
            )

        await eventually(is_at_rest, timeout=PATIENCE_SECONDS)


async def replay(
    trace: list[Request], mode: str, fleet: Fleet, make_router: Callable[..., Router] = Router
) -> tuple[Simulator, Live]:
    """The trace through both."""
    obedient, time = Obedient(len(trace)), HandMovedLoop(asyncio.get_running_loop())
    async with contextlib.AsyncExitStack() as stack:
        for place in range(REPLICAS):
            replica = ScriptedReplica(functools.partial(obedient.answer, place))
            await stack.enter_async_context(replica.running())
            fleet = Fleet(**{**as_dict(fleet), "urls": (*fleet.urls, replica.url)})
        simulator, moments = simulated(trace, fleet)
        config = Config(server=Server(log="off"), upstream=Upstream())
        gateway = HandDriven(config, make_router(SETTINGS, SEED), time)
        port = await stack.enter_async_context(listening(gateway, mode))
        live = Live(gateway, time, port, obedient)
        stack.push_async_callback(live.close)
        await live.go_through(moments)
        return simulator, live


def as_dict(fleet: Fleet) -> dict[str, Any]:
    return {name: getattr(fleet, name) for name in Fleet.__dataclass_fields__}


def compare(simulator: Simulator, live: Live) -> None:
    """Same replica for each, same expectation of what it holds, same state of both routers in the end."""
    trips, now = simulator.trips, live.time.now
    assert {trip.number: trip.place for trip in trips} == live.replicas.places
    predicted = [int(live.clients[trip.number].header("x-warmlane-cached-tokens")) for trip in trips]
    assert predicted == [int(trip.predicted_tokens) for trip in trips]
    for expected, found in zip(
        simulator.router.statistics(now).replicas, live.gateway.router.statistics(now).replicas, strict=True
    ):
        assert found.prefill_rate == pytest.approx(expected.prefill_rate, rel=1e-9)
        assert found.pending_tokens == expected.pending_tokens == 0
        assert (found.in_flight, found.index_blocks) == (expected.in_flight, expected.index_blocks)
        assert (found.replica, found.health, found.load) == (expected.replica, expected.health, expected.load)


# ---- the tests -----------------------------------------------------------------------------------------------------

APART = Fleet(replicas=REPLICAS, cache_tokens=20_000)
CROWDED = Fleet(replicas=REPLICAS, cache_tokens=20_000, prefill_rate=6_000.0, speeds=(1.0, 1.0, 0.4))
"""One of them is slow, caches are small, and many wait in the gateway."""


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are smaller than a real engine's step, and shall wait nevertheless."""
    monkeypatch.setattr(holding, "STEP_TOKENS", 0.0)


@pytest.mark.parametrize("mode", MODES)
async def test_one_request_at_a_time_goes_where_the_simulator_sends_it(mode: str) -> None:
    simulator, live = await replay(requests(10.0), mode, APART)
    compare(simulator, live)
    assert len(set(live.replicas.places.values())) >= 2
    assert sum(trip.cached_tokens > 0 for trip in simulator.trips) > 30


@pytest.mark.parametrize("mode", MODES)
async def test_many_at_once_go_where_the_simulator_sends_them(mode: str) -> None:
    simulator, live = await replay(requests(0.03), mode, CROWDED)
    compare(simulator, live)
    held = [trip for trip in simulator.trips if trip.sent_at != trip.arrived_at]
    assert len(held) > 10
    assert len({trip.place for trip in held}) >= 2


class DeafToLoad(Router):
    """Forgets `observe`."""

    def observe(self, fact: Fact, now: float) -> None:
        if not isinstance(fact, LoadReported):
            super().observe(fact, now)


class Doorless(Router):
    """Forgets `admit`: everybody goes on at once."""

    def admit(self, request: RouteRequest, now: float) -> Admitted | Waiting | Shed:
        return self._admission.admit(request, 0.0, now)


class Unrelenting(Router):
    """Forgets `release`."""

    def release(self, now: float) -> Release:
        return Release([], None, [])


class Forgetful(Flight):
    """Forgets `first_token`."""

    def first_token(self, now: float) -> None:
        pass


class Wasteful(Flight):
    """Forgets what `finish` is told."""

    def finish(self, outcome: Outcome, now: float, usage: Usage | None = None) -> None:
        super().finish(Outcome.CLIENT_LEFT, now)


class Flying(Router):
    """Its flights are of that kind."""

    def __init__(self, kind: type[Flight], settings: RoutingSettings, seed: int) -> None:
        super().__init__(settings, seed)
        self._kind = kind

    def start(self, decision: Any, now: float) -> Flight:
        flight = super().start(decision, now)
        flight.__class__ = self._kind
        return flight


FORGOTTEN = {
    "observe": DeafToLoad,
    "admit": Doorless,
    "release": Unrelenting,
    "first_token": functools.partial(Flying, Forgetful),
    "finish": functools.partial(Flying, Wasteful),
}


@pytest.mark.parametrize("call", FORGOTTEN)
async def test_a_forgotten_call_shows(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`decide` and `start` cannot be forgotten: without them nothing is sent."""
    monkeypatch.setattr("tests.loadtests.test_parity.PATIENCE_SECONDS", 1.0)
    with pytest.raises((AssertionError, TimeoutError)):
        compare(*await replay(requests(0.03), "fast", CROWDED, cast(Callable[..., Router], FORGOTTEN[call])))
