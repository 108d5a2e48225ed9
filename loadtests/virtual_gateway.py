"""What the live gateway does around its router, in virtual time: the door, the order of calls, retries.

`Gateway` follows `gateway.proxy.gate` and `front_door` call by call; `tests/loadtests/test_parity.py` holds both to the
same decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count

from gateway.core.admission import Admitted, Shed, Ticket, Waiting
from gateway.core.flight import Flight
from gateway.core.model import Fact, NoReplica, Outcome, PromptCounted, ReplicaId, RouteRequest, Space, Usage
from gateway.core.router import Router
from gateway.feeds.token_counts import PROMPTS_OF_MODEL
from loadtests.fleet import INFINITY, Station
from loadtests.traces import Request

COUNT_SECONDS = 0.05
"""Until a replica has counted a prompt's tokens, beside the request (`gateway.feeds.token_counts`)."""


@dataclass(slots=True, eq=False)
class Trip:
    """What became of one request."""

    request: Request
    route: RouteRequest
    number: int
    """Its place in the trace."""
    arrived_at: float
    """In a closed loop not what the trace says."""
    gateway: Gateway
    place: int = -1
    """Replica that it was sent to last."""
    predicted_tokens: float = 0.0
    """Cached tokens that the router expected there."""
    longest_tokens: float = 0.0
    """Cached tokens that it expected where it expected most."""
    cached_tokens: int = 0
    """Those that were there."""
    sent_at: float | None = None
    """Last time."""
    first_token_at: float | None = None
    ended_at: float | None = None
    shed: bool = False
    failed: bool = False
    """Lost with its replica, refused by all, or too long for any."""
    tried: list[ReplicaId] = field(default_factory=list)
    """Replicas that lost it before its first token."""
    ticket: Ticket | None = None
    flight: Flight | None = None

    @property
    def ttft_seconds(self) -> float | None:
        return None if self.first_token_at is None else self.first_token_at - self.arrived_at

    @property
    def retries(self) -> int:
        return len(self.tried)


class Timers:
    """What is due when, and messages under way."""

    __slots__ = ("_due", "_order", "_travel_seconds")

    def __init__(self, travel_seconds: float) -> None:
        self._travel_seconds = travel_seconds
        self._due: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()

    @property
    def next_at(self) -> float:
        return self._due[0][0] if self._due else INFINITY

    def fire(self) -> None:
        """The first one."""
        at, _, act = heappop(self._due)
        act(at)

    def at(self, time: float, act: Callable[[float], None]) -> None:
        heappush(self._due, (time, next(self._order), act))

    def travel(self, now: float, act: Callable[[float], None]) -> None:
        """`act` once a message sent now has come over."""
        if self._travel_seconds:
            self.at(now + self._travel_seconds, act)
        else:
            act(now)


class Gateway:
    """One router, and what the live gateway does around it: the door, retries, the order of calls."""

    def __init__(
        self,
        router: Router,
        timers: Timers,
        stations: Sequence[Station],
        deliver: Callable[[Trip, float], None],
        on_over: Callable[[Trip, float], None],
    ) -> None:
        self.router = router
        self._timers = timers
        self._stations = stations
        self._place_of = {station.id: place for place, station in enumerate(stations)}
        self._deliver = deliver
        self._on_over = on_over
        self._at_door: dict[Ticket, Trip] = {}
        self._release_at = INFINITY
        self._to_count = PROMPTS_OF_MODEL

    @property
    def waiting(self) -> int:
        return len(self._at_door)

    @property
    def is_idle(self) -> bool:
        return not self._at_door and not self.router.in_flight

    def observe(self, facts: Sequence[Fact], now: float) -> None:
        for fact in facts:
            self.router.observe(fact, now)
        if self._at_door:
            self._release(now)

    def arrive(self, trip: Trip, now: float) -> None:
        match self.router.admit(trip.route, now):
            case Admitted(ticket=ticket):
                trip.ticket = ticket
                self._dispatch(trip, now)
            case Waiting(ticket=ticket):
                trip.ticket = ticket
                self._at_door[ticket] = trip
                self._release(now)
            case Shed(ticket=ticket):
                self._shed(trip, ticket, now)

    def first_token(self, trip: Trip, now: float) -> None:
        assert trip.flight is not None
        trip.first_token_at = now
        trip.flight.first_token(now)
        if self._at_door:
            self._release(now)

    def end(self, trip: Trip, now: float) -> None:
        assert trip.flight is not None
        trip.ended_at = now
        request = trip.request
        trip.flight.finish(
            Outcome.COMPLETED, now, Usage(request.input_tokens, trip.cached_tokens, request.output_tokens)
        )
        self._leave(trip, now)

    def lost(self, trip: Trip, now: float) -> None:
        """Its replica is gone: another one, if the client has seen nothing yet."""
        assert trip.flight is not None
        trip.flight.finish(Outcome.FAILED, now)
        if trip.first_token_at is not None:
            self._give_up(trip, now)
            return
        trip.tried.append(self._stations[trip.place].id)
        self._dispatch(trip, now)

    def rejected(self, trip: Trip, now: float) -> None:
        assert trip.flight is not None
        trip.flight.finish(Outcome.REJECTED, now)
        self._give_up(trip, now)

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _release(self, now: float) -> None:
        """Let in who may go on, and come back when the router says so."""
        answer = self.router.release(now)
        for ticket in answer.shed:
            self._shed(self._at_door.pop(ticket), ticket, now)
        for ticket in answer.ready:
            self._dispatch(self._at_door.pop(ticket), now)
        again_at = INFINITY if answer.again_at is None else answer.again_at
        if again_at != self._release_at:
            self._release_at = again_at
            if answer.again_at is not None:
                self._timers.at(again_at, self._release_due)

    def _release_due(self, now: float) -> None:
        """As in the gate, the last word counts: earlier timers are off."""
        if now == self._release_at:
            self._release_at = INFINITY
            if self._at_door:
                self._release(now)

    def _dispatch(self, trip: Trip, now: float) -> None:
        flight = None if trip.ticket is None or trip.tried else trip.ticket.take_flight()
        if flight is None:
            try:
                decision = self.router.decide(trip.route, now, trip.tried)
            except NoReplica:
                self._give_up(trip, now)
                return
            flight = self.router.start(decision, now)
        decision, trip.flight = flight.decision, flight
        trip.predicted_tokens = decision.view.cached_tokens
        trip.longest_tokens = max([view.cached_tokens for view, _ in decision.ranking])
        trip.place, trip.sent_at = self._place_of[decision.replica], now
        if self._to_count and trip.route.space is Space.TEXT:
            self._to_count -= 1
            counted = PromptCounted(
                decision.replica, trip.route.model, Space.TEXT, trip.route.length, trip.request.input_tokens
            )
            self._timers.at(now + COUNT_SECONDS, partial(self.observe, [counted]))
        self._timers.travel(now, partial(self._deliver, trip))

    def _shed(self, trip: Trip, ticket: Ticket, now: float) -> None:
        trip.shed = True
        ticket.leave(now)
        self._on_over(trip, now)

    def _give_up(self, trip: Trip, now: float) -> None:
        trip.failed = True
        self._leave(trip, now)

    def _leave(self, trip: Trip, now: float) -> None:
        assert trip.ticket is not None
        trip.ticket.leave(now)
        if self._at_door:
            self._release(now)
        self._on_over(trip, now)
