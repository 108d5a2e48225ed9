"""Live: one stream of frames for all who look. Each second what changed is put into one frame, once, whoever many look.

A viewer has no queue. It takes the newest frame when it has sent the one before; if it missed some in between, it takes
a whole picture instead. So what a slow one holds is one frame, and a connection that takes nothing at all is cut off
like any other (`stall_timeout_seconds`). While nobody looks, there are no frames.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from importlib.metadata import version
from typing import Any, Protocol

import msgspec

from gateway.core.model import ReplicaId, ReplicaStatistics, RouterStatistics
from gateway.dashboard.decisions import Decisions, Entry, ended, shown
from gateway.dashboard.history import STEP_SECONDS, History, Point
from gateway.request_log import clean

TICK_SECONDS = 1.0
"""As fast as figures can be read."""
MAX_VIEWERS = 64
"""Each costs a connection and some 20 KB a second; more than a team has open."""
AT_ONCE = 12
"""Decisions in one frame. At 200 a second nobody reads them all; how many were left out is said."""
AT_FIRST = 50
"""... in the first frame."""


class Telemetry(Protocol):
    def ttft_counts(self) -> list[int]: ...


class Router(Protocol):
    def statistics(self, now: float) -> RouterStatistics: ...


class Engines(Protocol):
    def name(self, replica: ReplicaId) -> str | None: ...


class Live:
    def __init__(
        self,
        router: Router,
        telemetry: Telemetry,
        engines: Engines,
        clock: Callable[[], float],
        policy: str,
        is_leaving: Callable[[], bool],
        wall_clock: Callable[[], float] = time.time,
        tick_seconds: float = TICK_SECONDS,
    ) -> None:
        self.viewers = 0
        self.is_leaving = is_leaving
        """The gateway is about to stop: it must not wait for those who look."""
        self.process = ""
        """Which of several this is, whose decisions are shown."""
        self.decisions = Decisions(wall_clock)
        self._history = History()
        self._router, self._telemetry, self._engines = router, telemetry, engines
        self._clock, self._wall_clock, self._tick_seconds = clock, wall_clock, tick_seconds
        self._constant = {
            "run": secrets.token_hex(6),
            "version": version("warmlane"),
            "policy": policy,
            "started": wall_clock(),
        }
        self._encode = msgspec.json.Encoder().encode
        self._number = 0
        self._frame = b""
        self._told = 0
        """Number of the last decision that a frame told of."""
        self._running: dict[int, Entry] = {}
        """Decisions that were told of, and whose end was not."""
        self._ticked = asyncio.Event()

    async def run(self) -> None:
        """Runs as long as the gateway."""
        until_look = 0.0
        while True:
            until_look -= self._tick_seconds
            point = None
            if until_look < 0:
                until_look += STEP_SECONDS
                replicas = self._router.statistics(self._clock()).replicas
                point = self._history.look(self._wall_clock(), replicas, self._telemetry.ttft_counts())
            if self.viewers:
                self._tick(point)
            await asyncio.sleep(self._tick_seconds)

    @contextlib.contextmanager
    def viewer(self) -> Iterator[None]:
        """Around the whole answer to one who looks."""
        if not self.viewers:  # what was decided while nobody looked is told in the whole picture only
            self._told, self._running = self.decisions.last, {}
        self.viewers += 1
        try:
            yield
        finally:
            self.viewers -= 1

    async def frames(self) -> AsyncIterator[bytes]:
        """Server-sent events, from a whole picture on, until the gateway leaves."""
        seen, frame = self._number, self._whole()
        while True:
            yield frame
            if self._number == seen:
                await self._ticked.wait()
            if self.is_leaving():
                return
            frame = self._frame if self._number == seen + 1 else self._whole()
            seen = self._number

    def _tick(self, point: Point | None) -> None:
        """Make the next frame, and wake whoever waits for it."""
        self._number += 1
        new = list(self.decisions.newest_first(AT_ONCE, self._told))
        told = {
            "decisions": [shown(entry) for entry in new],
            "left_out": self.decisions.last - self._told - len(new),
            "ended": self._ended(),
            "point": point,
        }
        self._told = self.decisions.last
        self._note_running(new)
        self._frame = self._event(told)
        ticked, self._ticked = self._ticked, asyncio.Event()
        ticked.set()

    def _whole(self) -> bytes:
        entries = list(self.decisions.newest_first(AT_FIRST))
        self._note_running(entries)
        return self._event(
            {"whole": True, "decisions": [shown(entry) for entry in entries], "points": list(self._history.points)}
        )

    def _event(self, told: dict[str, Any]) -> bytes:
        statistics = self._router.statistics(self._clock())
        frame = {
            **self._constant,
            "process": self.process,
            "at": self._wall_clock(),
            "in_flight": statistics.in_flight,
            "waiting": statistics.waiting,
            "index_blocks": statistics.index_blocks,
            "index_capacity_blocks": statistics.index_capacity_blocks,
            "replicas": [self._row(one) for one in statistics.replicas],
            **told,
        }
        return b"data: %b\n\n" % self._encode(frame)

    def _note_running(self, entries: list[Entry]) -> None:
        self._running.update((entry.number, entry) for entry in entries if not entry.is_over)
        oldest = self.decisions.last - 10 * AT_FIRST  # pages have dropped them
        if len(self._running) > 10 * AT_FIRST:
            self._running = {number: entry for number, entry in self._running.items() if number > oldest}

    def _ended(self) -> list[dict[str, Any]]:
        over = [entry for entry in self._running.values() if entry.is_over]
        for entry in over:
            del self._running[entry.number]
        return [{"number": entry.number, "end": ended(entry)} for entry in over]

    def _row(self, one: ReplicaStatistics) -> dict[str, Any]:
        load = one.load
        return {
            "replica": one.replica,
            "engine": self._engines.name(one.replica),
            "health": one.health.value,
            "available": one.available,
            "draining": one.draining,
            "last_failure": clean(one.last_failure),
            "models": [card.id for card in one.models[:8]],
            "in_flight": one.in_flight,
            "running": None if load is None else load.running,
            "waiting": None if load is None else load.waiting,
            "kv_usage": None if load is None else load.kv_usage,
            "load_age": None if one.load_age is None else round(one.load_age, 1),
            "pending_tokens": round(one.pending_tokens),
            "pending_seconds": round(one.pending_tokens / one.prefill_rate, 3),
            "hit_rate": self._history.hit_rate(one.replica),
        }
