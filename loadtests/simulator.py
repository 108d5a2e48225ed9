"""The gateway's own router and a fleet of engine models, in virtual time.

Nothing of the routing is rebuilt here: `gateway.core.router.Router` gets the calls and facts that it gets in the
gateway, and `workers.engine_model.EngineModel` stands in for each replica. Between two events nothing happens, so an
hour of traffic takes seconds, and the same seed gives the same run.

**Life of a request.** It arrives and knocks (`admit`); admitted, it is decided and started; after the network delay it
enters its replica's queue. First token and end travel back the same way and become `first_token`, `finish` and `leave`.
A request whose replica died before its first token is decided again without that replica; one that had its first token
fails. Times are counted from its arrival, so waiting in the gateway is part of its time to first token.

**What the router knows.** Its own sends, and what a gateway would hear: probes, load snapshots at each scrape, usage
at the end. Prefill rates it learns, unless the fleet tells it one.

**Prompts.** Ids of a trace are 512-token blocks, chained already. They go to the router as token-id prompts, which
have four key bytes a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count
from typing import cast

from gateway.core.admission import Admitted, Shed, Ticket, Waiting
from gateway.core.flight import Flight
from gateway.core.model import (
    BlockHash,
    LoadReported,
    LoadSnapshot,
    NoReplica,
    Outcome,
    ProbeAnswered,
    ReplicaAdded,
    ReplicaId,
    RouteRequest,
    Space,
    Usage,
)
from gateway.core.router import Router
from gateway.core.settings import RoutingSettings
from loadtests.traces import BLOCK_TOKENS, Request
from workers.engine_model import EngineModel, EngineRequest, EngineSettings, Milestone

KEY_BYTES_PER_TOKEN = 4
"""Of a prompt of token ids (`gateway.core.rates.BYTES_PER_TOKEN`)."""
INFINITY = float("inf")
PROGRESS_REQUESTS = 500
"""Progress is reported after so many arrivals: several times a second."""


@dataclass(frozen=True, slots=True)
class Restart:
    """One replica dies and comes back with an empty cache."""

    replica: int
    at: float
    down_seconds: float = 30.0


@dataclass(frozen=True, slots=True)
class Fleet:
    """Replicas and the way to them. The defaults are one generic large GPU, eight times."""

    replicas: int = 8
    cache_tokens: int = 1_500_000
    """KV cache of each replica."""
    reported_cache_tokens: int | None = None
    """What it reports, where that is not the truth."""
    prefill_rate: float = 20_000.0
    """Uncached prompt tokens per second."""
    decode_rate: float = 60.0
    """Tokens per second of each request."""
    max_num_seqs: int = 64
    first_token_floor_seconds: float = 0.03
    """Least time from leaving the engine's queue to the first token. It delays the token, not the next prefill."""
    speeds: tuple[float, ...] = ()
    """How many times faster each replica is than that, first replica first; 1 where none is given."""
    network_delay_seconds: float = 0.0
    """Between gateway and replica, each way."""
    scrape_seconds: float | None = 0.5
    """As in the gateway's configuration; `None`: capacity is told once, load never."""
    told_prefill_rate: float | None = None
    """What the gateway is told about prefill, as a preset would; it learns in any case."""
    restart: Restart | None = None

    def speed(self, place: int) -> float:
        return self.speeds[place] if place < len(self.speeds) else 1.0

    @property
    def total_prefill_rate(self) -> float:
        return self.prefill_rate * sum(self.speed(place) for place in range(self.replicas))

    def engine(self, place: int) -> EngineModel:
        settings = EngineSettings(
            cache_tokens=self.cache_tokens,
            block_size=BLOCK_TOKENS,
            prefill_rate=self.prefill_rate * self.speed(place),
            decode_rate=self.decode_rate * self.speed(place),
            max_num_seqs=self.max_num_seqs,
            first_token_floor_seconds=self.first_token_floor_seconds,
        )
        return EngineModel(settings)


@dataclass(slots=True, eq=False)
class Trip:
    """What became of one request."""

    request: Request
    route: RouteRequest
    place: int = -1
    """Replica that it was sent to last."""
    predicted_tokens: float = 0.0
    """Cached tokens that the router expected there."""
    longest_tokens: float = 0.0
    """Cached tokens that it expected where it expected most."""
    cached_tokens: int = 0
    """Those that were there."""
    first_token_at: float | None = None
    ended_at: float | None = None
    shed: bool = False
    failed: bool = False
    """Lost with its replica, refused by all, or too long for any."""
    retries: int = 0
    ticket: Ticket | None = None
    flight: Flight | None = None

    @property
    def ttft_seconds(self) -> float | None:
        return None if self.first_token_at is None else self.first_token_at - self.request.arrival


class Station:
    """One replica: its engine while it is up, and who is there."""

    __slots__ = ("engine", "id", "started_at", "trips")

    def __init__(self, place: int, engine: EngineModel) -> None:
        self.id = ReplicaId(f"http://replica-{place}:8000")
        self.engine: EngineModel | None = engine
        self.trips: dict[Trip, None] = {}
        self.started_at = 0.0


class Simulator:
    """One run of one trace under one policy."""

    def __init__(
        self, requests: Sequence[Request], fleet: Fleet, routing: RoutingSettings | None = None, seed: int = 0
    ) -> None:
        self.fleet = fleet
        settings = replace(routing or RoutingSettings(), block_bytes=BLOCK_TOKENS * KEY_BYTES_PER_TOKEN)
        self.router = Router(settings, seed)
        self.trips: list[Trip] = []
        self.seconds = 0.0
        """Virtual time of the last event."""
        self._requests = requests
        self._stations = [Station(place, fleet.engine(place)) for place in range(fleet.replicas)]
        self._place_of = {station.id: place for place, station in enumerate(self._stations)}
        self._engine_at = [INFINITY] * fleet.replicas  # next event of each engine
        self._timers: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self._at_door: dict[Ticket, Trip] = {}
        self._release_at = INFINITY

    def run(self, on_progress: Callable[[int], None] | None = None) -> list[Trip]:
        """All of it. Call once. `on_progress` hears how many requests have arrived."""
        self._open()
        engine_at, timers, requests = self._engine_at, self._timers, self._requests
        arrived, arrival_at = 0, requests[0].arrival if requests else INFINITY
        while True:
            at = min(engine_at)
            timer_at = timers[0][0] if timers else INFINITY
            # What a replica did is known before what arrives at the same moment is decided.
            if at <= timer_at and at <= arrival_at:
                if at == INFINITY:
                    return self.trips
                self._advance(engine_at.index(at), at)
            elif timer_at <= arrival_at:
                at = timer_at
                heappop(timers)[2](at)
            else:
                at = arrival_at
                self._arrive(requests[arrived], at)
                arrived += 1
                arrival_at = requests[arrived].arrival if arrived < len(requests) else INFINITY
                if on_progress is not None and arrived % PROGRESS_REQUESTS == 0 and arrived < len(requests):
                    on_progress(arrived)
            self.seconds = at

    # ---- time ------------------------------------------------------------------------------------------------------

    def _at(self, time: float, act: Callable[[float], None]) -> None:
        heappush(self._timers, (time, next(self._order), act))

    def _travel(self, now: float, act: Callable[[float], None]) -> None:
        """`act` once a message sent now has come over."""
        if self.fleet.network_delay_seconds:
            self._at(now + self.fleet.network_delay_seconds, act)
        else:
            act(now)

    def _advance(self, place: int, now: float) -> None:
        station = self._stations[place]
        engine = station.engine
        assert engine is not None, "a dead engine has no events"
        for at, milestone, request in engine.advance(now):
            if milestone is Milestone.STARTED:
                continue
            trip = cast(Trip, request.key)
            if milestone is Milestone.FIRST_TOKEN:
                trip.cached_tokens = request.cached_tokens
                self._travel(at, lambda now, trip=trip: self._first_token(trip, now))  # type: ignore[misc]
            else:
                del station.trips[trip]
                self._travel(at, lambda now, trip=trip: self._end(trip, now))  # type: ignore[misc]
        self._plan(place, engine)

    def _plan(self, place: int, engine: EngineModel) -> None:
        at = engine.next_event()
        self._engine_at[place] = INFINITY if at is None else at

    # ---- the gateway -----------------------------------------------------------------------------------------------

    def _arrive(self, request: Request, now: float) -> None:
        route = RouteRequest(
            blocks=cast(Sequence[BlockHash], request.blocks),
            length=request.input_tokens * KEY_BYTES_PER_TOKEN,
            space=Space.TOKENS,
            session=request.session,
        )
        trip = Trip(request, route)
        self.trips.append(trip)
        match self.router.admit(route, now):
            case Admitted(ticket=ticket):
                trip.ticket = ticket
                self._dispatch(trip, now)
            case Waiting(ticket=ticket):
                trip.ticket = ticket
                self._at_door[ticket] = trip
                self._release(now)
            case Shed() as answer:
                trip.shed = True
                answer.leave(now)

    def _release(self, now: float) -> None:
        """Let in who may go on, and come back when the router says so."""
        answer = self.router.release(now)
        for ticket in answer.shed:
            trip = self._at_door.pop(ticket)
            trip.shed = True
            ticket.leave(now)
        for ticket in answer.ready:
            self._dispatch(self._at_door.pop(ticket), now)
        if answer.again_at is not None and answer.again_at < self._release_at:
            self._release_at = answer.again_at
            self._at(answer.again_at, self._release_due)

    def _release_due(self, now: float) -> None:
        if now >= self._release_at:
            self._release_at = INFINITY
        self._release(now)

    def _dispatch(self, trip: Trip, now: float, tried: Sequence[ReplicaId] = ()) -> None:
        flight = None if trip.ticket is None or tried else trip.ticket.take_flight()
        if flight is None:
            try:
                decision = self.router.decide(trip.route, now, tried)
            except NoReplica:
                self._give_up(trip, now)
                return
            flight = self.router.start(decision, now)
        decision, trip.flight = flight.decision, flight
        trip.predicted_tokens = decision.view.cached_tokens
        trip.longest_tokens = max([view.cached_tokens for view, _ in decision.ranking])
        trip.place = self._place_of[decision.replica]
        self._travel(now, lambda now: self._deliver(trip, now))

    def _first_token(self, trip: Trip, now: float) -> None:
        assert trip.flight is not None
        trip.first_token_at = now
        trip.flight.first_token(now)
        if self._at_door:
            self._release(now)

    def _end(self, trip: Trip, now: float) -> None:
        assert trip.flight is not None
        trip.ended_at = now
        request = trip.request
        trip.flight.finish(
            Outcome.COMPLETED, now, Usage(request.input_tokens, trip.cached_tokens, request.output_tokens)
        )
        self._leave(trip, now)

    def _lost(self, trip: Trip, now: float) -> None:
        """Its replica is gone: another one, if the client has seen nothing yet."""
        assert trip.flight is not None
        trip.flight.finish(Outcome.FAILED, now)
        if trip.first_token_at is not None:
            self._give_up(trip, now)
            return
        trip.retries += 1
        self._dispatch(trip, now, [self._stations[trip.place].id])

    def _rejected(self, trip: Trip, now: float) -> None:
        assert trip.flight is not None
        trip.flight.finish(Outcome.REJECTED, now)
        self._give_up(trip, now)

    def _give_up(self, trip: Trip, now: float) -> None:
        trip.failed = True
        self._leave(trip, now)

    def _leave(self, trip: Trip, now: float) -> None:
        assert trip.ticket is not None
        trip.ticket.leave(now)
        if self._at_door:
            self._release(now)

    # ---- the replicas ----------------------------------------------------------------------------------------------

    def _open(self) -> None:
        for place, station in enumerate(self._stations):
            self.router.observe(ReplicaAdded(station.id, self.fleet.told_prefill_rate), 0.0)
            self.router.observe(ProbeAnswered(station.id, True), 0.0)
            self._report(place, 0.0)
        if self.fleet.scrape_seconds is not None:
            self._at(self.fleet.scrape_seconds, self._scrape)
        if (restart := self.fleet.restart) is not None:
            self._at(restart.at, lambda now: self._die(restart.replica, now))
            self._at(restart.at + restart.down_seconds, lambda now: self._return(restart.replica, now))

    def _deliver(self, trip: Trip, now: float) -> None:
        """It reached its replica."""
        place, request = trip.place, trip.request
        station = self._stations[place]
        if station.engine is None:
            self._travel(now, lambda now: self._lost(trip, now))
            return
        try:
            station.engine.submit(
                EngineRequest(request.input_tokens, request.output_tokens, request.blocks, key=trip), now
            )
        except ValueError:  # longer than the whole KV cache
            self._travel(now, lambda now: self._rejected(trip, now))
            return
        station.trips[trip] = None
        self._plan(place, station.engine)

    def _die(self, place: int, now: float) -> None:
        station = self._stations[place]
        lost, station.trips, station.engine = station.trips, {}, None
        self._engine_at[place] = INFINITY
        for trip in lost:
            self._travel(now, lambda now, trip=trip: self._lost(trip, now))  # type: ignore[misc]

    def _return(self, place: int, now: float) -> None:
        station = self._stations[place]
        station.engine, station.started_at = self.fleet.engine(place), now
        self.router.observe(ProbeAnswered(station.id, True), now)
        self._report(place, now)

    def _scrape(self, now: float) -> None:
        """Everybody is scraped at once, as long as somebody may still be decided."""
        for place, station in enumerate(self._stations):
            if station.engine is None:
                self.router.observe(ProbeAnswered(station.id, False, "connection refused"), now)
            else:
                self._report(place, now)
        if len(self.trips) < len(self._requests) or self._at_door:
            assert self.fleet.scrape_seconds is not None
            self._at(now + self.fleet.scrape_seconds, self._scrape)

    def _report(self, place: int, now: float) -> None:
        station = self._stations[place]
        engine = station.engine
        assert engine is not None
        statistics = engine.statistics(now)
        self._plan(place, engine)
        snapshot = LoadSnapshot(
            taken_at=now,
            running=statistics.running,
            waiting=statistics.waiting,
            kv_usage=statistics.kv_usage,
            prefix_queries=statistics.prefix_queries,
            prefix_hits=statistics.prefix_hits,
            cache_tokens=self.fleet.reported_cache_tokens or self.fleet.cache_tokens,
            started_at=station.started_at,
        )
        self._travel(now, lambda now: self.router.observe(LoadReported(station.id, snapshot), now))
