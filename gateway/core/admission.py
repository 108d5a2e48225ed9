"""The door: so many requests are in flight at most, so many wait at most, the rest are shed with a time to come back.

Who goes next: the highest priority; among equals the tenant with the fewest requests in flight (then the one served
least recently); within a tenant the highest response ratio (waited + s) / s^1.3, s being the request's own prefill
time. So short requests overtake long ones, waiting makes up for it, and nobody starves: whoever has waited several
times as long as first come, first served would take is not overtaken any more.

A ticket is held from `admit` until `leave`, whatever happened in between. Leaving twice is harmless. To be fast with
many waiting, each tenant's queue keeps one first-come line for each power of two of s: within a line the oldest has the
highest ratio (to within the width of the line), so only the heads are compared. Tickets that left are skipped when they
come to the head of their line.

The door itself knows no replicas. With late binding the router asks for the next few in turn and lets in those that a
replica can begin with; such a ticket is *bound*, it carries its flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from heapq import heapify, heappop, heapreplace
from math import frexp, inf, pow

from gateway.core.flight import Flight
from gateway.core.model import RouteRequest

LEAST_PREFILL_SECONDS = 0.02
"""Floor of s: below some 200 tokens prefill time says nothing about a request's size."""
SHORT_FIRST = 1.3
"""Exponent of s in the response ratio: 1 is HRRN. At 1.3 simulated chats wait 2 to 3 % less in the mean and the slowest
hundredth 1 to 2 % longer; at 1.5 the mean is no better still, and the slowest pay as much again."""
OUT_OF_PATIENCE = 1e12
LONGEST_RETRY_SECONDS = 60.0
ASSUMED_DEPARTURE_SECONDS = 0.05
RATE_STEP = 0.1
"""Time between departures of a full house: 20 a second until it is known, then a moving mean over about ten of them. It
prices a place at the end of the queue."""


class TicketState(Enum):
    ADMITTED = "admitted"
    WAITING = "waiting"
    SHED = "shed"
    LEFT = "left"


class ShedReason(Enum):
    """Why the gateway refused a request; a metric label, so a closed set."""

    FULL = "full"
    """It came to a full waiting room."""
    DISPLACED = "displaced"
    """It waited, and made room for one with more right to wait."""
    OVERDUE = "overdue"
    """It waited too long."""


class Ticket:
    """One request at the door."""

    __slots__ = (
        "_admission",
        "_flight",
        "arrived_at",
        "prefill_seconds",
        "request",
        "retry_after",
        "shed_reason",
        "state",
    )

    def __init__(self, admission: Admission, request: RouteRequest, prefill_seconds: float, now: float) -> None:
        self._admission = admission
        self.request = request
        self.prefill_seconds = max(prefill_seconds, LEAST_PREFILL_SECONDS)
        self.arrived_at = now
        self.state = TicketState.WAITING
        self.retry_after: float | None = None
        """Seconds, once it was shed."""
        self.shed_reason: ShedReason | None = None
        self._flight: Flight | None = None

    def __repr__(self) -> str:
        return f"<Ticket {self.state.value} of {self.request.tenant!r} since {self.arrived_at:.3f}>"

    def rank(self, now: float, patience: float) -> float:
        """Who ranks higher goes first: the response ratio; beyond all ratios whoever waited longer than `patience`."""
        waited = now - self.arrived_at
        if waited > patience:
            return OUT_OF_PATIENCE + waited
        return (waited + self.prefill_seconds) / pow(self.prefill_seconds, SHORT_FIRST)

    def bind(self, flight: Flight) -> None:
        """Let in for one replica, with everything booked there already."""
        self._flight = flight

    @property
    def is_bound(self) -> bool:
        return self._flight is not None

    def take_flight(self) -> Flight | None:
        """The flight that it was bound to, once: the caller sends and finishes it. `None`: decide, and start one."""
        flight, self._flight = self._flight, None
        return flight

    def leave(self, now: float) -> None:
        """The request is over, or its client has gone. Call it in a `finally`; repeating it changes nothing."""
        if (flight := self.take_flight()) is not None:
            flight.withdraw(now)
        self._admission.leave(self, now)


@dataclass(frozen=True, slots=True)
class Admitted:
    ticket: Ticket

    def leave(self, now: float) -> None:
        self.ticket.leave(now)


@dataclass(frozen=True, slots=True)
class Waiting:
    """It waits; some later `release` lists the ticket as ready or as shed."""

    ticket: Ticket

    def leave(self, now: float) -> None:
        self.ticket.leave(now)


@dataclass(frozen=True, slots=True)
class Shed:
    ticket: Ticket
    retry_after: float
    """Seconds."""

    def leave(self, now: float) -> None:
        self.ticket.leave(now)


@dataclass(frozen=True, slots=True)
class Release:
    """What changed in the waiting room."""

    ready: list[Ticket]
    """Admitted now, in this order."""
    again_at: float | None
    """Ask again at this time at the latest; `None` while nobody waits."""
    shed: list[Ticket]
    """They waited too long, or had to make room for others; each has `retry_after` and `shed_reason`."""


class Tenant:
    """Requests of one tenant at one priority: lines by size."""

    __slots__ = ("lines", "stored", "waiting")

    def __init__(self) -> None:
        self.lines: dict[int, deque[Ticket]] = {}
        self.waiting = 0
        self.stored = 0
        """Tickets in the lines, those that left included."""

    def put(self, ticket: Ticket) -> None:
        size = frexp(ticket.prefill_seconds)[1]
        self.lines.setdefault(size, deque()).append(ticket)
        self.waiting += 1
        self.stored += 1
        if is_mostly_gone(self.stored, self.waiting):
            self.lines = {size: still_waiting(line) for size, line in self.lines.items()}
            self.stored = self.waiting

    def newest(self) -> Ticket:
        """The waiting ticket that arrived last; there is one."""
        for line in self.lines.values():
            while line and line[-1].state is not TicketState.WAITING:
                line.pop()
                self.stored -= 1
        return max((line[-1] for line in self.lines.values() if line), key=lambda ticket: ticket.arrived_at)

    def in_turn(self, now: float, patience: float) -> Iterator[Ticket]:
        """Waiting tickets, highest rank first. Nothing may come or go while they are asked for."""
        heads: list[tuple[Ticket, Iterator[Ticket]]] = []
        for size, line in list(self.lines.items()):
            while line and line[0].state is not TicketState.WAITING:
                line.popleft()
                self.stored -= 1
            if line:
                rest = iter(line)
                heads.append((next(rest), rest))
            else:
                del self.lines[size]
        while heads:
            best, best_rank = 0, -1.0
            for place, (head, _) in enumerate(heads):
                rank = head.rank(now, patience)
                if rank > best_rank:
                    best, best_rank = place, rank
            ticket, rest = heads[best]
            yield ticket
            following = next((ticket for ticket in rest if ticket.state is TicketState.WAITING), None)
            if following is None:
                del heads[best]
            else:
                heads[best] = (following, rest)


def is_mostly_gone(stored: int, waiting: int) -> bool:
    return stored > 2 * waiting + 64


def still_waiting(tickets: deque[Ticket]) -> deque[Ticket]:
    return deque(ticket for ticket in tickets if ticket.state is TicketState.WAITING)


def lane_of(request: RouteRequest) -> str | None:
    """Who waits for the same replicas: those of one model, or the one that a request is pinned to."""
    return request.model if request.pinned is None else request.pinned


class Admission:
    """Counts who is in and who waits."""

    def __init__(self, max_in_flight: int, max_waiting: int, max_wait_seconds: float) -> None:
        self._max_in_flight = max_in_flight
        self._max_waiting = max_waiting
        self._max_wait_seconds = max_wait_seconds
        self.in_flight = 0
        self.waiting = 0
        self.waiting_prefill_seconds = 0.0
        """Own prefill of all that wait, added up."""
        self._lanes: dict[str | None, int] = {}  # where anybody waits
        self._rooms: dict[int, dict[str, Tenant]] = {}  # by priority, then tenant; only where somebody waits
        self._arrivals: deque[Ticket] = deque()  # all that waited, in order of arrival, for time-outs
        self._in_flight_of: dict[str, int] = {}  # tenants with any
        self._served_at: dict[str, int] = {}  # tenants in flight or waiting: sequence number of the last one admitted
        self._served = 0
        self._displaced: list[Ticket] = []  # shed to make room, not yet told
        self._departed_at: float | None = None
        self._departure_seconds = ASSUMED_DEPARTURE_SECONDS

    def __repr__(self) -> str:
        return (
            f"<Admission {self.in_flight}/{self._max_in_flight} in flight, {self.waiting}/{self._max_waiting} waiting>"
        )

    @property
    def is_crowded(self) -> bool:
        """Whether the next request would have to wait."""
        return self.waiting > 0 or self.in_flight >= self._max_in_flight

    def admit(self, request: RouteRequest, prefill_seconds: float, now: float) -> Admitted | Waiting | Shed:
        if self.is_crowded:
            return self.wait(request, prefill_seconds, now)
        ticket = Ticket(self, request, prefill_seconds, now)
        self._enter(ticket)
        return Admitted(ticket)

    def wait(self, request: RouteRequest, prefill_seconds: float, now: float) -> Waiting | Shed:
        """It must wait, though there may be room."""
        ticket = Ticket(self, request, prefill_seconds, now)
        if self.waiting >= self._max_waiting and not self._make_room_for(request):
            return Shed(ticket, self._shed(ticket, ShedReason.FULL))
        self._wait(ticket)
        return Waiting(ticket)

    def release(self, now: float) -> Release:
        """Admit as many as there is room for, and shed who waited too long."""
        shed = self.turned_away(now)
        ready: list[Ticket] = []
        while self.waiting and self.in_flight < self._max_in_flight:
            ready += self.next_in_turn(now, 1)
            self.let_in(ready[-1])
        return Release(ready, self.next_overdue_at, shed)

    def turned_away(self, now: float) -> list[Ticket]:
        """Those shed since the last call: they waited too long, or had to make room."""
        shed, self._displaced = self._displaced + self._overdue(now), []
        return shed

    @property
    def next_overdue_at(self) -> float | None:
        return self._arrivals[0].arrived_at + self._max_wait_seconds if self.waiting else None

    @property
    def lanes(self) -> int:
        """How many lanes somebody waits in."""
        return len(self._lanes)

    @property
    def room(self) -> int:
        """How many more may be in flight."""
        return self._max_in_flight - self.in_flight

    def next_in_turn(self, now: float, limit: int, patience: float = inf) -> list[Ticket]:
        """The waiting tickets in the order in which they would go if there were room for `limit`. All stay. Whoever
        waited longer than `patience` seconds is not overtaken within his tenant."""
        found: list[Ticket] = []
        for priority in sorted(self._rooms, reverse=True):
            room = self._rooms[priority]
            lines = {name: tenant.in_turn(now, patience) for name, tenant in room.items()}
            heap = [self._standing(name) for name in room]
            heapify(heap)
            while heap:
                if len(found) == limit:
                    return found
                in_flight, served, name = heap[0]
                ticket = next(lines[name], None)
                if ticket is None:
                    heappop(heap)
                else:
                    found.append(ticket)
                    heapreplace(heap, (in_flight + 1, served, name))
        return found

    def let_in(self, ticket: Ticket) -> None:
        """A waiting ticket need not wait any longer."""
        self._gone(ticket)
        self._enter(ticket)

    def leave(self, ticket: Ticket, now: float) -> None:
        if ticket.state is TicketState.ADMITTED:
            self._time_departure(now)
            self.in_flight -= 1
            self._count(ticket.request.tenant, -1)
        elif ticket.state is TicketState.WAITING:
            self._gone(ticket)
        ticket.state = TicketState.LEFT

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _time_departure(self, now: float) -> None:
        """Only a full house tells how fast places become free."""
        if not self.is_crowded:
            self._departed_at = None
            return
        if self._departed_at is not None:
            self._departure_seconds += RATE_STEP * (now - self._departed_at - self._departure_seconds)
        self._departed_at = now

    def _wait(self, ticket: Ticket) -> None:
        priority, name = ticket.request.priority, ticket.request.tenant
        room = self._rooms.setdefault(priority, {})
        if name not in room:
            room[name] = Tenant()
        room[name].put(ticket)
        self._arrivals.append(ticket)
        self.waiting += 1
        lane = lane_of(ticket.request)
        self._lanes[lane] = self._lanes.get(lane, 0) + 1
        self.waiting_prefill_seconds += ticket.prefill_seconds
        if is_mostly_gone(len(self._arrivals), self.waiting):
            self._arrivals = still_waiting(self._arrivals)

    def _make_room_for(self, request: RouteRequest) -> bool:
        """In a full room, shed one who has less right to wait: lower priority, or a tenant with many more waiting.

        Otherwise one tenant could keep all others out just by being first. The newest goes: it has lost least.
        """
        if not self.waiting:
            return False
        priority = min(self._rooms)
        room = self._rooms[priority]
        greediest = max(room, key=lambda name: room[name].waiting)
        own = room[request.tenant].waiting if request.tenant in room else 0
        if priority > request.priority or (priority == request.priority and room[greediest].waiting < own + 2):
            return False
        ticket = room[greediest].newest()
        self._gone(ticket)
        self._shed(ticket, ShedReason.DISPLACED)
        self._displaced.append(ticket)
        return True

    def _enter(self, ticket: Ticket) -> None:
        ticket.state = TicketState.ADMITTED
        self.in_flight += 1
        self._served += 1
        self._served_at[ticket.request.tenant] = self._served
        self._count(ticket.request.tenant, 1)

    def _count(self, tenant: str, change: int) -> None:
        count = self._in_flight_of.get(tenant, 0) + change
        if count:
            self._in_flight_of[tenant] = count
        else:
            del self._in_flight_of[tenant]
        if not count and not any(tenant in room for room in self._rooms.values()):
            self._served_at.pop(tenant, None)

    def waiting_by(self) -> dict[str, int]:
        """How many wait, by tenant."""
        found: dict[str, int] = {}
        for room in self._rooms.values():
            for name, tenant in room.items():
                if tenant.waiting:
                    found[name] = found.get(name, 0) + tenant.waiting
        return found

    def _standing(self, tenant: str) -> tuple[int, int, str]:
        return self._in_flight_of.get(tenant, 0), self._served_at.get(tenant, 0), tenant

    def _gone(self, ticket: Ticket) -> None:
        """A waiting ticket will not be served; its line skips it later."""
        priority, tenant = ticket.request.priority, ticket.request.tenant
        room = self._rooms[priority]
        room[tenant].waiting -= 1
        self.waiting -= 1
        lane = lane_of(ticket.request)
        self._lanes[lane] -= 1
        if not self._lanes[lane]:
            del self._lanes[lane]
        self.waiting_prefill_seconds = self.waiting_prefill_seconds - ticket.prefill_seconds if self.waiting else 0.0
        if not room[tenant].waiting:
            del room[tenant]
            if not room:
                del self._rooms[priority]
            if tenant not in self._in_flight_of and not any(tenant in other for other in self._rooms.values()):
                self._served_at.pop(tenant, None)
        if not self.waiting:
            self._arrivals.clear()

    def _overdue(self, now: float) -> list[Ticket]:
        shed: list[Ticket] = []
        arrivals = self._arrivals
        while arrivals:
            oldest = arrivals[0]
            if oldest.state is TicketState.WAITING:
                if now < oldest.arrived_at + self._max_wait_seconds:  # exactly what `again_at` says
                    break
                arrivals.popleft()
                self._gone(oldest)
                self._shed(oldest, ShedReason.OVERDUE)
                shed.append(oldest)
            else:
                arrivals.popleft()
        return shed

    def _shed(self, ticket: Ticket, reason: ShedReason) -> float:
        ticket.state = TicketState.SHED
        ticket.shed_reason = reason
        ticket.retry_after = min(max(1.0, (self.waiting + 1) * self._departure_seconds), LONGEST_RETRY_SECONDS)
        return ticket.retry_after
