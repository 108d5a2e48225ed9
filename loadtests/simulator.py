"""The gateway's own router and a fleet of engine models, in virtual time.

Nothing of the routing is rebuilt here: `gateway.core.router.Router` gets the calls and facts that it gets in the
gateway, and `workers.engine_model.EngineModel` stands in for each replica. Between two events nothing happens, so an
hour of traffic takes seconds, and the same seed gives the same run.

**Life of a request.** It arrives and knocks (`admit`); admitted, it is decided and started; after the network delay it
enters its replica's queue. First token and end travel back the same way and become `first_token`, `finish` and `leave`.
A request whose replica died before its first token is decided again without that replica; one that had its first token
fails. Times are counted from its arrival, so waiting in the gateway is part of its time to first token.

**Arrivals.** In an open loop requests arrive as recorded, however slow the fleet is. In a closed loop only the first of
each session does; every other one comes when the one before it is over (answered, shed or lost) and was thought about.

**What the router knows.** Its own sends, and what a gateway would hear: probes, load snapshots at each scrape, usage
at the end. Prefill rates it learns, unless the fleet tells it some. Several gateways are several routers over the same
replicas, which share nothing, or what they tell each other (`loadtests.shared_view`).

**Prompts.** Ids of a trace are 512-token blocks, chained already. They go to the router as token-id prompts, which
have four key bytes a token; or, if the fleet says so, as text whose bytes per token the router must learn, in prefix
blocks of about the configured size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

from gateway.core.model import (
    BlockHash,
    Fact,
    LoadReported,
    LoadSnapshot,
    ProbeAnswered,
    ReplicaAdded,
    RouteRequest,
    Space,
)
from gateway.core.router import Router
from gateway.core.settings import RoutingSettings
from gateway.core.sharing import ROUND_SECONDS
from loadtests.fleet import INFINITY, Fleet, GatewayRestart, Restart, Sharing, Station, answers_of
from loadtests.shared_view import SharedView
from loadtests.traces import Request
from loadtests.virtual_gateway import Gateway, Timers, Trip
from workers.engine_model import EngineModel, EngineRequest, Milestone

__all__ = ["Fleet", "GatewayRestart", "Restart", "Sharing", "Simulator", "Trip"]

KEY_BYTES_PER_TOKEN = 4
"""Of a prompt of token ids (`gateway.core.rates.BYTES_PER_TOKEN`)."""
PROGRESS_REQUESTS = 500
"""Progress is reported after so many arrivals: several times a second."""

MakeRouter = Callable[[RoutingSettings, int], Router]


class Simulator:
    """One run of one trace under one policy."""

    def __init__(
        self,
        requests: Sequence[Request],
        fleet: Fleet,
        routing: RoutingSettings | None = None,
        seed: int = 0,
        *,
        closed_loop: bool = False,
        make_router: MakeRouter = Router,
    ) -> None:
        """`make_router` is for experiments with a router that decides otherwise."""
        self.fleet = fleet
        self.trips: list[Trip] = []
        """Of those that arrived, in order of the trace once all is over."""
        self.seconds = 0.0
        """Virtual time of the last event."""
        self._requests = requests
        self._answers = answers_of(requests, fleet.block_tokens) if fleet.cache_answers else [()] * len(requests)
        self._timers = Timers(fleet.network_delay_seconds)
        self._stations = [Station(fleet.url(place), fleet.engine(place)) for place in range(fleet.replicas)]
        self._engine_at = [INFINITY] * fleet.replicas  # next event of each engine
        self._share = 1.0  # of its full speed that each replica has
        settings, self._key_bytes, self._stride = routing or RoutingSettings(), float(KEY_BYTES_PER_TOKEN), 1
        if fleet.text_bytes_per_token is not None:
            self._key_bytes = fleet.text_bytes_per_token
            self._stride = max(1, round(settings.block_bytes / self._key_bytes / fleet.block_tokens))
        settings = replace(settings, block_bytes=int(self._stride * fleet.block_tokens * self._key_bytes))
        self._make_router, self._settings, self._next_seed = make_router, settings, seed
        self.gateways = [self._new_gateway() for _ in range(fleet.deciders)]
        self._away: set[int] = set()
        self._leaving: list[Gateway] = []
        """Replaced, but not done with what they have."""
        self._view = None
        if fleet.sharing is not None:
            hashes_of_block = settings.block_bytes / RoutingSettings().block_bytes
            self._view = SharedView(fleet.sharing, self._timers, seed, hashes_of_block)
        self._coming, self._next_of = in_order(requests, closed_loop)

    @property
    def router(self) -> Router:
        """Of the first gateway."""
        return self.gateways[0].router

    @property
    def preemptions(self) -> int:
        return sum(station.preemptions(self.seconds) for station in self._stations)

    def run(self, on_progress: Callable[[int], None] | None = None) -> list[Trip]:
        """All of it. Call once. `on_progress` hears how many requests have arrived."""
        self._open()
        engine_at, timers, requests, coming = self._engine_at, self._timers, self._requests, self._coming
        arrival_at = requests[coming[0]].arrival if coming else INFINITY
        reported = 0
        while True:
            at, timer_at = min(engine_at), timers.next_at
            # What a replica did is known before what arrives at the same moment is decided.
            if at <= timer_at and at <= arrival_at:
                if at == INFINITY:
                    break
                self._advance(engine_at.index(at), at)
            elif timer_at <= arrival_at:
                at = timer_at
                timers.fire()
            else:
                at = arrival_at
                self._arrive(coming.popleft(), at)
                arrival_at = requests[coming[0]].arrival if coming else INFINITY
            self.seconds = at
            arrived = len(self.trips)
            if on_progress is not None and reported + PROGRESS_REQUESTS <= arrived < len(requests):
                reported = arrived
                on_progress(arrived)
        self.trips.sort(key=lambda trip: trip.number)
        return self.trips

    # ---- the gateways ----------------------------------------------------------------------------------------------

    def _new_gateway(self) -> Gateway:
        router = self._make_router(self._settings, self._next_seed)
        self._next_seed += 1
        return Gateway(router, self._timers, self._stations, self._deliver, self._over)

    def _gateway_in_turn(self) -> Gateway | None:
        """Requests are dealt to those that are there."""
        count = len(self.gateways)
        for place in range(len(self.trips), len(self.trips) + count):
            if place % count not in self._away:
                return self.gateways[place % count]
        return None

    def _take_away(self, place: int, now: float) -> None:
        """It ends with what it has."""
        self._away.add(place)

    def _replace_gateway(self, place: int, now: float) -> None:
        """The one that went away is forgotten once it has nothing in flight."""
        self._leaving.append(self.gateways[place])
        gateway = self.gateways[place] = self._new_gateway()
        gateway.observe([self._added(place) for place in range(len(self._stations))], now)
        gateway.observe([*self._probes(), *self._loads(now)], now)
        if self._view is not None:
            self._view.join(gateway, now)
        self._away.discard(place)

    def _round(self, now: float) -> None:
        assert self._view is not None
        for gateway in [one for one in self._leaving if one.is_idle]:
            self._leaving.remove(gateway)
            self._view.leave(gateway)
        self._view.round(now)
        if not self._is_over:
            self._timers.at(now + ROUND_SECONDS, self._round)

    # ---- the clients -----------------------------------------------------------------------------------------------

    def _arrive(self, number: int, now: float) -> None:
        request = self._requests[number]
        route = RouteRequest(
            blocks=cast(Sequence[BlockHash], request.blocks[self._stride - 1 :: self._stride]),
            length=int(request.input_tokens * self._key_bytes),
            space=Space.TOKENS if self.fleet.text_bytes_per_token is None else Space.TEXT,
            session=request.session,
        )
        gateway = self._gateway_in_turn()
        trip = Trip(request, route, number, now, gateway or self.gateways[0])
        self.trips.append(trip)
        if gateway is None:  # nobody is there to be connected to
            trip.failed = True
            self._over(trip, now)
        else:
            gateway.arrive(trip, now)

    def _over(self, trip: Trip, now: float) -> None:
        """Its client has the answer, or knows that there is none: in a closed loop the next one of its session."""
        session = trip.request.session
        if session is None or not (coming := self._next_of.get(session)):
            return
        number = coming.popleft()
        request = self._requests[number]
        think = request.think_seconds
        at = max(now, request.arrival) if think is None else now + think
        self._timers.at(at, partial(self._arrive, number))

    # ---- the replicas ----------------------------------------------------------------------------------------------

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
                self._timers.travel(at, partial(trip.gateway.first_token, trip))
            else:
                del station.trips[trip]
                self._timers.travel(at, partial(trip.gateway.end, trip))
        self._plan(place, engine)
        self._share_processor(now)

    def _plan(self, place: int, engine: EngineModel) -> None:
        at = engine.next_event()
        self._engine_at[place] = INFINITY if at is None else at

    def _share_processor(self, now: float) -> None:
        """Somebody may have become busy, or idle."""
        if not self.fleet.shared_processor:
            return
        share = self.fleet.share_of_each(sum(station.is_busy for station in self._stations))
        if share == self._share:
            return
        self._share = share
        for place, station in enumerate(self._stations):
            if station.engine is not None:
                station.engine.share_processor(share, now)
                self._plan(place, station.engine)

    def _deliver(self, trip: Trip, now: float) -> None:
        """It reached its replica."""
        place, request = trip.place, trip.request
        station = self._stations[place]
        if station.engine is None:
            self._timers.travel(now, partial(trip.gateway.lost, trip))
            return
        job = EngineRequest(
            request.input_tokens, request.output_tokens, request.blocks, self._answers[trip.number], key=trip
        )
        try:
            station.engine.submit(job, now)
        except ValueError:  # longer than the whole KV cache
            self._timers.travel(now, partial(trip.gateway.rejected, trip))
            return
        station.trips[trip] = None
        self._plan(place, station.engine)
        self._share_processor(now)

    def _die(self, place: int, now: float) -> None:
        lost = self._stations[place].die(now)
        self._engine_at[place] = INFINITY
        self._share_processor(now)
        for trip in lost:
            self._timers.travel(now, partial(trip.gateway.lost, trip))

    def _return(self, place: int, now: float) -> None:
        station = self._stations[place]
        station.engine, station.started_at = self.fleet.engine(place), now
        station.engine.share_processor(self._share, now)

    # ---- the feeds -------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        fleet = self.fleet
        self._observe([self._added(place) for place in range(len(self._stations))], 0.0)
        self._probe(0.0)
        self._scrape(0.0)
        if self._view is not None:
            for gateway in self.gateways:
                self._view.join(gateway, 0.0)
            self._timers.at(ROUND_SECONDS, self._round)
        for one in fleet.gateway_restarts:
            self._timers.at(one.at, partial(self._take_away, one.gateway))
            self._timers.at(one.back_at, partial(self._replace_gateway, one.gateway))
        if (restart := fleet.restart) is not None:
            self._timers.at(restart.at, partial(self._die, restart.replica))
            self._timers.at(restart.back_at, partial(self._return, restart.replica))

    def _observe(self, facts: Sequence[Fact], now: float) -> None:
        for gateway in (*self.gateways, *self._leaving):
            gateway.observe(facts, now)

    def _added(self, place: int) -> Fact:
        return ReplicaAdded(self._stations[place].id, self.fleet.told_prefill_rate(place))

    @property
    def _is_over(self) -> bool:
        """Nobody will be decided any more, whatever becomes known."""
        return len(self.trips) == len(self._requests) and not any(
            gateway.waiting for gateway in (*self.gateways, *self._leaving)
        )

    def _probes(self) -> list[Fact]:
        return [
            ProbeAnswered(station.id, True)
            if station.engine is not None
            else ProbeAnswered(station.id, False, "connection refused")
            for station in self._stations
        ]

    def _probe(self, now: float) -> None:
        self._timers.travel(now, partial(self._observe, self._probes()))
        if self.fleet.restart is not None and not self._is_over:
            self._timers.at(now + self.fleet.probe_seconds, self._probe)

    def _scrape(self, now: float) -> None:
        """Everybody who is there is scraped at once."""
        if now >= self.fleet.scrape_fails_at:
            return
        facts = self._loads(now)
        tell = partial(self._observe, facts)
        if delay := self.fleet.scrape_delay_seconds:
            self._timers.at(now + delay, lambda now: self._timers.travel(now, tell))
        else:
            self._timers.travel(now, tell)
        if self.fleet.scrape_seconds is not None and not self._is_over:
            self._timers.at(now + self.fleet.scrape_seconds, self._scrape)

    def _loads(self, now: float) -> list[Fact]:
        if now >= self.fleet.scrape_fails_at:
            return []
        return [self._load_of(place, now) for place, one in enumerate(self._stations) if one.engine is not None]

    def _load_of(self, place: int, now: float) -> Fact:
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
        return LoadReported(station.id, snapshot)


def in_order(requests: Sequence[Request], closed_loop: bool) -> tuple[deque[int], dict[str, deque[int]]]:
    """Places in the trace of those that arrive as recorded, and by session of those that wait for the one before."""
    if not closed_loop:
        return deque(range(len(requests))), {}
    coming: deque[int] = deque()
    next_of: dict[str, deque[int]] = {}
    for number, request in enumerate(requests):
        if request.session is None:
            coming.append(number)
        elif request.session in next_of:
            next_of[request.session].append(number)
        else:
            coming.append(number)
            next_of[request.session] = deque()
    return coming, next_of
