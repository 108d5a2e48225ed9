"""The replicas of one gateway as a fleet: a keeper for each, rolling restarts, and the end of all of them.

It decides nothing about a single replica (`keeper`), and nothing about requests: it tells the gateway who is ready and
asks it who may go (`traffic`). A replica that fails never takes another one down with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from workers.keeper import Keeper, KeeperSettings, State, cancel
from workers.rolling import Rolling
from workers.traffic import Traffic
from workers.worker import Worker


@dataclass(frozen=True, slots=True)
class SupervisorSettings:
    keeper: KeeperSettings
    drain_seconds: float = 600.0
    """In a rolling restart, for the requests of one replica to end."""


class RestartRefused(Exception):
    """`code` is a short word for programs."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class Supervisor:
    """`workers` are templates: they are never started themselves. `on_hopeless` is called when every replica was given
    up; without it that is not the end."""

    def __init__(
        self,
        workers: Sequence[Worker],
        settings: SupervisorSettings,
        *,
        prefill_rate: float | None = None,
        on_hopeless: Callable[[], None] | None = None,
    ) -> None:
        self._workers = tuple(workers)
        self.names = {worker.url: worker.name for worker in workers}
        """Of each replica by its URL, kept up to date: one may move to another port."""
        self._settings = settings
        self._prefill_rate = prefill_rate
        self._on_hopeless = on_hopeless
        self._traffic: Traffic | None = None
        self._keepers: tuple[Keeper, ...] = ()
        self._tasks: list[asyncio.Task[None]] = []
        self._rolling: Rolling | None = None
        self._rolling_task: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Supervisor of {', '.join(map(repr, self._keepers)) or 'nobody yet'}>"

    @property
    def is_hopeless(self) -> bool:
        """Every replica was given up."""
        return bool(self._keepers) and all(one.state is State.GIVEN_UP for one in self._keepers)

    def start(self, traffic: Traffic) -> None:
        """Start all replicas. They join the traffic as they become ready."""
        self._traffic = traffic
        self._keepers = tuple(
            Keeper(
                worker,
                traffic,
                self._settings.keeper,
                prefill_rate=self._prefill_rate,
                changed=self._look,
                is_last=self._is_one_left,
            )
            for worker in self._workers
        )
        self._tasks = [asyncio.create_task(keeper.run(), name=f"keeper of {keeper.name}") for keeper in self._keepers]
        for task in self._tasks:
            task.add_done_callback(report_failure)

    async def wait_settled(self) -> None:
        """Until each replica's first start is over, well or not."""
        await self._settled.wait()

    async def stop(self, insisted: asyncio.Event) -> None:
        """End all replicas; return when nothing of them is left. At once, as soon as somebody insists."""
        if self._rolling_task is not None:
            await cancel(self._rolling_task)
        for task in self._tasks:
            task.cancel()
        insisting = asyncio.create_task(insisted.wait())
        insisting.add_done_callback(lambda insisting: None if insisting.cancelled() else self._kill())
        await asyncio.gather(*self._tasks, return_exceptions=True)
        insisting.cancel()

    def restart(self, replica: str | None = None, *, alone: bool = False) -> None:
        """Begin a rolling restart of one replica (its name, URL or `HOST:PORT`), or of all. Raises `RestartRefused`.

        `alone`: also where no other replica stands in, so that requests fail meanwhile.
        """
        traffic = self._traffic
        chosen = [one for one in self._keepers if replica in (None, one.name, one.url, one.url.partition("://")[2])]
        if traffic is None or not chosen:
            known = ", ".join(self.names.values())
            raise RestartRefused(f"No such replica is run here: {replica}. There are: {known}.", "no_such_worker")
        if self._rolling is not None and not self._rolling.is_over:
            raise RestartRefused("A restart is under way already.", "restart_under_way")
        is_only = len(self._keepers) == 1 and traffic.serves(chosen[0].url)
        if is_only and not alone and not traffic.has_stand_in(chosen[0].url):
            raise RestartRefused(f"Nobody stands in for {chosen[0].name}: requests would fail.", "no_stand_in")
        self._rolling = Rolling(chosen, traffic, drain_seconds=self._settings.drain_seconds, alone=alone)
        self._rolling_task = asyncio.create_task(self._rolling.run(), name="rolling restart")
        self._rolling_task.add_done_callback(report_failure)

    def states(self) -> dict[str, int]:
        """How many are in each state."""
        counts = {state.value: 0 for state in State}
        for keeper in self._keepers:
            counts[keeper.state.value] += 1
        return counts

    def starts(self) -> dict[str, int]:
        """Of each replica, by its URL."""
        return {keeper.url: keeper.lives for keeper in self._keepers}

    def show(self) -> dict[str, Any]:
        """All replicas and the last restart as JSON."""
        rolling = self._rolling
        return {
            "workers": [self._describe(keeper) for keeper in self._keepers],
            "restart": None
            if rolling is None
            else {
                "is_over": rolling.is_over,
                "current": rolling.current.name if rolling.current else None,
                "left": [keeper.name for keeper in rolling.left],
                "renewed": [keeper.name for keeper in rolling.renewed],
                "waits_for": rolling.waits_for,
                "problem": rolling.problem,
            },
        }

    def _kill(self) -> None:
        for keeper in self._keepers:
            keeper.kill()

    def _describe(self, keeper: Keeper) -> dict[str, Any]:
        return {
            "name": keeper.name,
            "replica": keeper.url,
            "state": keeper.state.value,
            "pid": keeper.pid,
            "lives": keeper.lives,
            "failed_starts": keeper.failed_starts,
            "last_end": keeper.last_end,
            "changes": [" ".join(change.words) for change in keeper.changes],
            "proposal": None if keeper.proposal is None else " ".join(keeper.proposal.words),
            "cached_seconds": 0.0 if self._traffic is None else round(self._traffic.cached_seconds(keeper.url), 3),
        }

    def _look(self) -> None:
        if self.names.keys() != {keeper.url for keeper in self._keepers}:
            self.names.clear()
            self.names.update((keeper.url, keeper.name) for keeper in self._keepers)
        if self._keepers and all(keeper.is_settled for keeper in self._keepers):
            self._settled.set()
        if self.is_hopeless and self._on_hopeless is not None:
            self._on_hopeless()

    def _is_one_left(self) -> bool:
        given_up = sum(keeper.state is State.GIVEN_UP for keeper in self._keepers)
        return self._on_hopeless is not None and given_up == len(self._keepers) - 1


def report_failure(task: asyncio.Task[None]) -> None:
    """Neither keepers nor restarts raise: if one does, that is a bug to be seen at once."""
    if not task.cancelled() and (error := task.exception()) is not None:
        context = {"message": f"the {task.get_name()} failed", "exception": error, "task": task}
        task.get_loop().call_exception_handler(context)
