"""A worker's end of what joins it to the parent and the other workers.

It takes its connections from there, says several times a second that it lives, tells the others what it sends where and
hears the same of them, does what the admin of another did, and shows the metrics of all.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from gateway.changes import Change, Drain, Register
from gateway.config import Config
from gateway.core.model import PeerFact, PeerReported, ReplicaId
from gateway.core.router import Router
from gateway.core.sharing import ROUND_SECONDS, Journal, Outbox, credible
from gateway.feeds.discovery import Discovery
from gateway.feeds.peer_entries import Facts, facts_of, uses_of, wire_of
from gateway.feeds.peers import until_known
from gateway.feeds.registry import Registry
from gateway.fleet_limits import FleetLimits, KeyUse
from gateway.several.doorman import ADMIN, CLIENT
from gateway.several.handed import Handed, HandedDoorway
from gateway.several.messages import (
    Alive,
    Answer,
    Ask,
    Asked,
    Begin,
    CatchUp,
    Channel,
    Counted,
    Done,
    DrainOver,
    FromParent,
    Heard,
    Leaving,
    Ready,
    Stop,
    Told,
)
from gateway.several.totals import Page, page_of, with_others
from gateway.stop_signals import StopSignals
from gateway.telemetry import Telemetry

log = logging.getLogger(__name__)

ALIVE_SECONDS = 0.25
COUNT_SECONDS = 0.5
"""So much of its counts a worker takes along that is killed."""
ANSWER_SECONDS = 2.0
"""The parent answers sooner, unless it hangs."""
LAST_SECONDS = 1.0
"""For the last words to leave."""


class WorkerSignals(StopSignals):
    """The parent says when to stop. Whoever signals the worker itself, or signals all processes of a group, makes it
    leave as well, but only the parent insists."""

    def __init__(self, on_leaving: Callable[[], None]) -> None:
        super().__init__()
        self._on_leaving = on_leaving

    def signalled(self) -> None:
        if not self.asked.is_set():
            self._on_leaving()
            self.ask()


@dataclass(frozen=True)
class Parts:
    """Of the gateway in this process, as far as others have to do with them."""

    router: Router
    telemetry: Telemetry
    discovery: Discovery
    registry: Registry
    on_heard: Callable[[], None]
    connections: Callable[[], int]
    requests: Callable[[], int]
    clock: Callable[[], float]
    name: bytes
    """What the others know it by."""
    siblings: set[bytes]
    """Where the names of the others are noted."""
    limits: FleetLimits


class Member:
    def __init__(self, handing: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self.signals = WorkerSignals(self._leave)
        self._handed = Handed(handing, loop)
        self._begun: asyncio.Future[Begin] = loop.create_future()
        self._channel = Channel(FromParent, self._hear, self._parent_is_gone)
        self._ended = asyncio.Event()
        self._leaves = False
        self._parts: Parts | None = None
        self._outbox: Outbox | None = None
        self._early: deque[Asked] = deque()
        """Changes that came before it had made those of before its start."""
        self._is_as_the_others = False
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Answer]] = {}
        self._others = Page([], [])
        self._tasks: set[asyncio.Task[None]] = set()
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Facts).decode

    async def join(self, talking: socket.socket) -> Config:
        """What the parent wants served."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self._channel, sock=talking)
        return (await self._begun).config

    @property
    def doorways(self) -> tuple[HandedDoorway, HandedDoorway | None]:
        begin = self._begun.result()
        admin = begin.admin_address
        clients = self._handed.doorway(CLIENT, begin.address)
        return clients, None if admin is None else self._handed.doorway(ADMIN, admin)

    @property
    def called(self) -> str:
        begin = self._begun.result()
        return f"worker {begin.number} of {begin.config.server.workers}"

    def attach(self, parts: Parts) -> None:
        """There is a gateway now."""
        self._parts = parts
        parts.discovery.drain_is_over = lambda replica: self._channel.send(DrainOver(replica))
        journal = parts.router.journal = Journal(beside=parts.router.journal)
        self._outbox = Outbox(journal, partial(parts.router.report_to_peers, parts.name.hex()))

    def ready(self) -> None:
        self._channel.send(Ready())
        self._say_alive()

    async def run(self) -> None:
        """Runs beside the requests, without end."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._live())
            group.create_task(self._begin_as_the_others())
            group.create_task(self._tell_others())

    async def end(self) -> None:
        """Its last words."""
        self._leaves = True
        self._handed.close()
        self._channel.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), LAST_SECONDS)

    # ---- what it says ------------------------------------------------------------------------------------------------

    async def _live(self) -> None:
        beats = round(COUNT_SECONDS / ALIVE_SECONDS)
        for beat in itertools.count():
            self._say_alive()
            if beat % beats == 0 and not self._channel.is_full:
                self.count()
            await asyncio.sleep(ALIVE_SECONDS)

    def _say_alive(self) -> None:
        if (parts := self._parts) is not None:
            self._channel.send(Alive(parts.connections(), self._handed.received, parts.requests()))

    def count(self) -> None:
        """Its metrics now."""
        if self._parts is not None:
            self._channel.send(Counted(page_of(self._parts.telemetry.families())))

    async def _begin_as_the_others(self) -> None:
        assert self._parts is not None
        now = time.monotonic()
        await asyncio.gather(*(self._make(change, now - at) for at, change in self._begun.result().changes))
        while self._early:  # after them: it may be the end of a drain, or of a registration
            early = self._early.popleft()
            if early.change is not None:
                await self._do_change(early.number, early.change)
        self._is_as_the_others = True
        await until_known(self._parts.router, self._parts.clock)
        self._channel.send(CatchUp())

    async def _tell_others(self) -> None:
        assert self._outbox is not None
        assert self._parts is not None
        limits = self._parts.limits
        while True:
            if not self._channel.is_full:
                now = self._parts.clock()
                self._send([], limits.inside.uses(now), keep=True)
                limits.told_inside(now)
                for facts in self._outbox.bundles(time.monotonic()):
                    self._send([one for one in facts if isinstance(one, PeerReported)], keep=False)
                    self._send([one for one in facts if not isinstance(one, PeerReported)], keep=True)
            await asyncio.sleep(ROUND_SECONDS)

    def _send(self, facts: list[PeerFact], uses: Sequence[KeyUse] = (), *, keep: bool) -> None:
        if (facts or uses) and self._parts is not None:
            self._channel.send(Told(self._parts.name, self._encode(wire_of(facts, uses)), keep))

    def _leave(self) -> None:
        self._channel.send(Leaving())

    # ---- what it hears -----------------------------------------------------------------------------------------------

    def _hear(self, message: FromParent) -> None:
        match message:
            case Heard():
                self._observe(message)
            case Asked():
                self._do(message)
            case Answer(number=number):
                if (waiting := self._answers.get(number)) is not None and not waiting.done():
                    waiting.set_result(message)
            case Begin():
                self._begun.set_result(message)
            case Stop(now=now):
                self._say_alive()  # how many requests are to finish
                if not self.signals.asked.is_set():
                    self.signals.ask()
                if now:
                    self.signals.ask()

    def _observe(self, heard: Heard) -> None:
        parts = self._parts
        if parts is None or heard.name == parts.name:
            return
        parts.siblings.add(heard.name)
        age = max(0.0, time.monotonic() - heard.at)
        now = parts.clock()
        peer, wire = heard.name.hex(), self._decode(heard.facts)
        parts.limits.hear_nearby(peer, uses_of(wire), now - age, now)
        for fact in credible(facts_of(wire, peer), age):
            parts.router.observe(fact, now - age)
        parts.on_heard()

    def _parent_is_gone(self) -> None:
        self._ended.set()
        if not self._leaves:
            os._exit(1)  # at once: nobody would hand it connections, or end it

    def _do(self, asked: Asked) -> None:
        if asked.change is None:
            self.count()
            self._channel.send(Done(asked.number))
            return
        if not self._is_as_the_others:
            self._early.append(asked)
            return
        task = asyncio.get_running_loop().create_task(self._do_change(asked.number, asked.change))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _do_change(self, number: int, change: Change) -> None:
        await self._make(change)
        self._channel.send(Done(number))

    async def _make(self, change: Change, age_seconds: float = 0.0) -> None:
        """What another's admin did so long ago."""
        assert self._parts is not None
        discovery, registry = self._parts.discovery, self._parts.registry
        match change:
            case Drain(replica=url, draining=draining):
                if not discovery.drain(ReplicaId(url), draining):
                    discovery.expect(ReplicaId(url), drained=draining)
            case Register(url=url, prefill_rate=rate, lease_seconds=lease):
                left = None if lease is None else lease - age_seconds
                if left is None or left > 0:
                    await registry.take(ReplicaId(url), rate, left)
            case _:
                registry.unregister(ReplicaId(change.url))

    # ---- what it asks ------------------------------------------------------------------------------------------------

    async def tell(self, change: Change) -> None:
        """Returns once the others have done it, or a second later."""
        await self._ask(change)

    async def metrics(self) -> bytes:
        """The page of all workers together. Where the parent does not answer, with what the others had last."""
        assert self._parts is not None
        parts = self._parts
        families = parts.telemetry.families()
        self._channel.send(Counted(page_of(families)))  # so that what is shown here stays counted, whatever comes
        answer = await self._ask(None)
        if answer is not None and answer.page is not None:
            self._others = answer.page
        replicas = {one.replica for one in parts.router.statistics(parts.clock()).replicas}
        return with_others(families, self._others, replicas)

    async def _ask(self, change: Change | None) -> Answer | None:
        number = next(self._numbers)
        waiting = self._answers[number] = asyncio.get_running_loop().create_future()
        self._channel.send(Ask(number, change))
        try:
            return await asyncio.wait_for(waiting, ANSWER_SECONDS)
        except TimeoutError:
            return None
        finally:
            del self._answers[number]
