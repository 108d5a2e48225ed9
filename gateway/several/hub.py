"""The hub: passes on what workers tell each other, remembers it for those that start later, and asks all for one.

A worker that does not read holds up nobody: what it has not been sent yet waits in the one memory that all share,
behind its own mark, and what falls out of that memory it misses.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.changes import Change, Drain, Register, Unregister
from gateway.several.messages import (
    Alive,
    Answer,
    Ask,
    Asked,
    CatchUp,
    Channel,
    Counted,
    Done,
    DrainOver,
    FromWorker,
    Heard,
    Leaving,
    Ready,
    Told,
)
from gateway.several.totals import Page, Sums, add, rows_of

MEMORY_BYTES = 32 * 1024 * 1024
"""Half of what `[redis] memory_mib` keeps by default: some 40,000 prompts of 10,000 tokens."""
ENTRY_OVERHEAD_BYTES = 200
METRICS_SECONDS = 0.05
"""For all to send their metrics; for one that hangs its last ones count, so that a scrape stays below 100 ms."""
CHANGE_SECONDS = 1.0
"""For all to do what an admin asks for, before he is told that it is done."""


@dataclass(eq=False)
class Seat:
    """A worker as the hub knows it, from its start to its end."""

    number: int
    channel: Channel | None = None
    name: bytes = b""
    """What the others know it by, once it has told something."""
    is_ready: bool = False
    is_leaving: bool = False
    alive_at: float = 0.0
    connections: int = 0
    requests: int = 0
    received: int = 0
    """Connections that it says it was handed."""
    position: int | None = None
    """Of the next entry of the memory for it; `None` until it can use them."""
    page: Page = field(default_factory=lambda: Page([], []))


@dataclass(eq=False)
class Question:
    seat: Seat
    number: int
    """As who asks knows it."""
    wants_metrics: bool
    waits_for: set[Seat]
    timer: asyncio.TimerHandle


class Hub:
    """`on_ready` hears of each worker that begins to serve, `on_leaving` of who ends by itself."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_ready: Callable[[Seat], None],
        on_leaving: Callable[[Seat], None],
        own_page: Callable[[], Page],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.seats: set[Seat] = set()
        self._loop = loop
        self._on_ready, self._on_leaving = on_ready, on_leaving
        self._own_page = own_page
        self._clock = clock
        self._past: Sums = {}
        """Counts of workers that are gone."""
        self._memory: deque[Heard] = deque()
        self._memory_bytes = 0
        self._forgotten = 0
        """Entries that are not in the memory any more: the position of its first one."""
        self._changes: dict[str, tuple[float, Change]] = {}
        self._questions: dict[int, Question] = {}
        self._asked = 0

    def enter(self, seat: Seat) -> None:
        seat.alive_at = self._clock()
        self.seats.add(seat)

    def leave(self, seat: Seat) -> None:
        """It has ended: its counts stay, and nobody waits for it."""
        self.seats.discard(seat)
        add(self._past, seat.page.counts)
        for question in [one for one in self._questions.values() if one.seat is seat]:
            question.timer.cancel()
        self._questions = {id: one for id, one in self._questions.items() if one.seat is not seat}
        for id in list(self._questions):
            self._answered(id, seat)

    def changes(self) -> list[tuple[float, Change]]:
        """What a worker that starts now has to do to be like the others."""
        self._forget_expired()
        return list(self._changes.values())

    def hear(self, seat: Seat, message: FromWorker) -> None:
        match message:
            case Told():
                self._pass_on(seat, message)
            case Alive():
                seat.alive_at = self._clock()
                seat.connections, seat.requests, seat.received = message.connections, message.requests, message.received
            case Counted(page=page):
                seat.page = page
            case Ask():
                self._ask(seat, message)
            case Done(number=number):
                self._answered(number, seat)
            case DrainOver(replica=replica):
                self._changes.pop(f"drain {replica}", None)
            case CatchUp():
                seat.position = self._forgotten
                self.tell(seat)
            case Leaving():
                seat.is_leaving = True
                self._on_leaving(seat)
            case Ready():
                seat.is_ready = True
                self._on_ready(seat)

    # ---- what one tells the others -----------------------------------------------------------------------------------

    def _pass_on(self, seat: Seat, told: Told) -> None:
        seat.name = told.name
        heard = Heard(told.name, self._clock(), told.facts)
        if not told.keep:
            for other in self.seats - {seat}:
                if other.position is not None and other.channel is not None and not other.channel.is_full:
                    other.channel.send(heard)
            return
        self._memory.append(heard)
        self._memory_bytes += len(heard.facts) + ENTRY_OVERHEAD_BYTES
        while self._memory_bytes > MEMORY_BYTES:
            self._memory_bytes -= len(self._memory.popleft().facts) + ENTRY_OVERHEAD_BYTES
            self._forgotten += 1
        for other in self.seats:
            self.tell(other)

    def tell(self, seat: Seat) -> None:
        """What it does not know yet, as far as it has room."""
        channel = seat.channel
        if channel is None or seat.position is None:
            return
        end = self._forgotten + len(self._memory)
        seat.position = max(seat.position, self._forgotten)
        while seat.position < end and not channel.is_full:
            heard = self._memory[seat.position - self._forgotten]
            if heard.name != seat.name:
                channel.send(heard)
            seat.position += 1

    # ---- what one asks all others ------------------------------------------------------------------------------------

    def _ask(self, seat: Seat, ask: Ask) -> None:
        others = {one for one in self.seats if one is not seat and one.channel is not None and one.is_ready}
        self._asked += 1
        id = self._asked
        if ask.change is not None:
            self._remember(ask.change)
            others |= {one for one in self.seats if one is not seat and one.channel is not None}
        limit = METRICS_SECONDS if ask.change is None else CHANGE_SECONDS
        timer = self._loop.call_later(limit, self._answer, id)
        self._questions[id] = Question(seat, ask.number, ask.change is None, others, timer)
        for other in others:
            assert other.channel is not None
            other.channel.send(Asked(id, ask.change))
        if not others:
            self._answer(id)

    def _answered(self, id: int, by: Seat) -> None:
        question = self._questions.get(id)
        if question is None:
            return
        question.waits_for.discard(by)
        if not question.waits_for:
            self._answer(id)

    def _answer(self, id: int) -> None:
        question = self._questions.pop(id)
        question.timer.cancel()
        page = self._page_for(question.seat) if question.wants_metrics else None
        if question.seat.channel is not None:
            question.seat.channel.send(Answer(question.number, page))

    def _page_for(self, seat: Seat) -> Page:
        """All but its own."""
        counts, gauges, own = dict(self._past), Sums(), self._own_page()
        add(counts, own.counts)
        add(gauges, own.gauges)
        for other in self.seats - {seat}:
            add(counts, other.page.counts)
            add(gauges, other.page.gauges)
        return Page(rows_of(counts), rows_of(gauges))

    def _remember(self, change: Change) -> None:
        """The last word about each replica, and each registration that was not taken back and is still good."""
        self._forget_expired()
        match change:
            case Drain(replica=replica, draining=draining):
                self._changes.pop(f"drain {replica}", None)
                if draining:
                    self._changes[f"drain {replica}"] = self._clock(), change
            case Register(url=url):
                self._changes[f"register {url}"] = self._clock(), change
            case Unregister(url=url):
                self._changes.pop(f"register {url}", None)
                self._changes.pop(f"drain {url}", None)

    def _forget_expired(self) -> None:
        now = self._clock()
        for name, (at, change) in list(self._changes.items()):
            if isinstance(change, Register) and change.lease_seconds is not None and at + change.lease_seconds <= now:
                del self._changes[name]
