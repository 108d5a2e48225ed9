"""Keeps one replica running: start, ready, end, pause, start again.

A *life* is one process of the replica, from its start to its end. What ends a life decides what comes next:

| end                                | next                                                                       |
|------------------------------------|----------------------------------------------------------------------------|
| the start failed                   | a pause that grows (`back_off`); after too many in a row it is given up    |
| ended by itself, or is lost        | a pause that grows, forgotten after a calm time                            |
| ran out of memory, either way      | as above, and a remedy is proposed or taken (`remedies`)                   |
| somebody ordered a restart         | the next life at once; this also revives one that was given up             |
| cancelled                          | none: the process and all its kin are gone before `run` returns            |

The gateway hears of the replica only between ready and the first sign of its end.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from workers.back_off import BackOff, BackOffSettings
from workers.causes import Cause, Causes, Kind
from workers.remedies import Change, next_change
from workers.traffic import Traffic
from workers.vitals import Vitals
from workers.worker import STOP_GRACE_SECONDS, PortTaken, Worker, WorkerFailed, how_it_ended

log = logging.getLogger(__name__)


class State(Enum):
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    PAUSED = "paused"
    """Ended, and to be started again."""
    GIVEN_UP = "given up"


@dataclass(frozen=True, slots=True)
class KeeperSettings:
    back_off: BackOffSettings = field(default_factory=BackOffSettings)
    ready_seconds: float = 1_800.0
    """From the start until it answers."""
    stop_seconds: float = STOP_GRACE_SECONDS
    silent_seconds: float = 60.0
    """Without any answer on `/health`, then it counts as lost."""
    takes_remedies: bool = False
    """Start again with the changed flags, instead of saying which they would be."""
    is_verbatim: bool = False
    """The command is a specification: remedies are said, never taken."""


@dataclass(frozen=True, slots=True)
class End:
    """Of a life."""

    what: str
    started: bool = False
    """It was ready once."""
    ready_seconds: float = 0.0
    ordered: bool = False


class Keeper:
    """`template` is a worker that is never started itself. `changed` is called after each change of state.
    `is_last`: all ends when this one is given up."""

    def __init__(
        self,
        template: Worker,
        traffic: Traffic,
        settings: KeeperSettings,
        *,
        prefill_rate: float | None = None,
        changed: Callable[[], None] = lambda: None,
        is_last: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self.url = template.name, template.url
        self.lives = 0
        self.last_end = ""
        self.changes: list[Change] = []
        """Remedies taken so far."""
        self.proposal: Change | None = None
        """The remedy to take; `None` when none is wanted, or it was taken."""
        self._template = template
        self._traffic = traffic
        self._settings = settings
        self._prefill_rate = prefill_rate
        self._changed = changed
        self._is_last = is_last
        self._clock = clock
        self._state = State.STARTING
        self._worker: Worker | None = None
        self._back_off = BackOff(settings.back_off)
        self._causes = Causes(clock)
        self._ordered = asyncio.Event()
        self._grace_seconds = settings.stop_seconds

    def __repr__(self) -> str:
        return f"<Keeper {self.name} {self.state.value}, {self.lives} lives, {self._back_off!r}>"

    @property
    def state(self) -> State:
        return self._state

    @property
    def pid(self) -> int | None:
        """Of the running process."""
        worker = self._worker
        return worker.pid if worker is not None and worker.exit_code is None else None

    @property
    def is_settled(self) -> bool:
        """Its first start is over, well or not."""
        return self.lives > 1 or self._state is not State.STARTING

    @property
    def failed_starts(self) -> int:
        return self._back_off.failed_starts

    def restart(self) -> None:
        """End this life, or pause, and begin the next."""
        self._back_off.forget()
        self._ordered.set()

    def kill(self) -> None:
        """For one that is being cancelled: without the time to finish."""
        self._grace_seconds = 0.0
        if self._worker is not None:
            self._worker.kill()

    async def run(self) -> None:
        while True:
            end = await self._live()
            self.last_end = "" if end.ordered else end.what
            if end.ordered:
                continue
            pause = self._judge(end)
            self._become(State.GIVEN_UP if pause is None else State.PAUSED)
            try:
                async with asyncio.timeout(pause):
                    await self._ordered.wait()
            except TimeoutError:
                pass

    # ---- one life --------------------------------------------------------------------------------------------------

    async def _live(self) -> End:
        self._ordered.clear()
        words = [word for change in self.changes for word in change.words]
        worker = self._worker = self._template.again(*words, on_line=self._causes.note)
        self.lives += 1
        self._become(State.STARTING)
        try:
            if not await self._unless_ordered(self._come_up(worker)):
                return End("restarted while it started", ordered=True)
            return await self._serve(worker)
        except PortTaken as error:
            return self._move(error.reason)
        except WorkerFailed as error:
            return End(error.reason)
        except OSError as error:  # no descriptor or process left for it on this machine
            return End(f"{self.name} cannot be started: {error.strerror or error}")
        finally:
            await worker.stop(self._grace_seconds)

    def _move(self, reason: str) -> End:
        """To another port, at once, where nothing needs this very one."""
        if self._template.elsewhere is None:
            return End(reason)
        self._template = self._template.elsewhere()
        self.url = self._template.url
        log.warning("%s: it moves to %s", reason, self.url)
        return End(reason, ordered=True)

    async def _come_up(self, worker: Worker) -> None:
        began = self._clock()
        starting = asyncio.ensure_future(worker.start())
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.wait({starting})  # given up half way, it would leave a process that nobody knows
            raise
        await worker.wait_ready(self._settings.ready_seconds)
        log.info("%s is ready at %s after %.1f s", self.name, self.url, self._clock() - began)

    async def _serve(self, worker: Worker) -> End:
        ready_at = self._clock()
        self._causes.forget()
        self._back_off.started()
        self._traffic.join(self.url, self._prefill_rate)
        self._become(State.READY)
        ending = asyncio.ensure_future(self._wait_end(worker))
        ended = await self._unless_ordered(ending)
        self._traffic.leave(self.url)
        self._become(State.STOPPING)
        what = ending.result() if ended else "restarted"
        return End(what, started=True, ready_seconds=self._clock() - ready_at, ordered=not ended)

    async def _wait_end(self, worker: Worker) -> str:
        vitals = Vitals(self.url, silent_seconds=self._settings.silent_seconds, clock=self._clock)
        ended, lost = asyncio.ensure_future(worker.wait()), asyncio.ensure_future(vitals.wait_lost())
        try:
            await asyncio.wait({ended, lost}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                return f"{self.name} ended by itself: {how_it_ended(ended.result())}"
            return f"{self.name} {lost.result()}"
        finally:
            await cancel(ended, lost)

    async def _unless_ordered(self, work: Coroutine[Any, Any, Any] | asyncio.Future[Any]) -> bool:
        """Whether the work was done before somebody ordered a restart. Raises what it raises."""
        working, order = asyncio.ensure_future(work), asyncio.ensure_future(self._ordered.wait())
        try:
            await asyncio.wait({working, order}, return_when=asyncio.FIRST_COMPLETED)
            is_done = working.done()
            if is_done:
                working.result()
            return is_done
        finally:
            await cancel(working, order)

    # ---- between two -----------------------------------------------------------------------------------------------

    def _judge(self, end: End) -> float | None:
        """Seconds until the next life; `None`: it is given up."""
        pause = self._back_off.ended(end.ready_seconds) if end.started else self._back_off.start_failed()
        cause = self._causes.last
        if cause is not None:
            self._heal(cause, at_start=not end.started)
        if self._back_off.is_over:
            log.error(
                "%s; given up after %d failed starts in a row%s",
                end.what,
                self.failed_starts,
                "" if self._is_last() else "; `warmlane restart` tries again",
            )
            return None
        log.warning("%s; again in %g s", end.what, pause)
        return pause

    def _heal(self, cause: Cause, *, at_start: bool) -> None:
        log.warning("%s %s%s: %s", self.name, cause.kind.value, "" if at_start else ", under load", cause.line)
        if cause.kind is Kind.MEMORY_TAKEN and self.failed_starts < 2:
            return  # whoever has it may be about to leave: an engine that was killed, say
        command = (*self._template.command, *(word for change in self.changes for word in change.words))
        change = next_change(cause, command, at_start=at_start, made=self.changes)
        self.proposal = None
        if change is None:
            log.warning("%s: no remedy is left for that", self.name)
        elif self._settings.takes_remedies and not self._settings.is_verbatim:
            self.changes.append(change)
            log.warning("%s starts with %s from now on", self.name, change)
        else:
            self.proposal = change
            why = (
                "its profile is kept as written"
                if self._settings.is_verbatim
                else '[workers] remedies = "apply" does it'
            )
            log.warning("%s: the remedy is %s; %s", self.name, change, why)

    def _become(self, state: State) -> None:
        self._state = state
        self._changed()


async def cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancel what is not done, and see it end. What was raised is the business of whoever asked for the result."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
