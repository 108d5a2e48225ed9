"""The replica set as the feeds share it: discovery writes it, probes and scrapes run one task for each replica in it.

A replica is tracked together with its *incarnation*: when a name starts to point to another address, the URL stays the
same but what answers there is a different server, so its tasks start afresh.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TypeVar

from gateway.core.model import ReplicaId

log = logging.getLogger(__name__)

RESTART_SECONDS = 1.0
"""A feed that stumbles over the unforeseen starts again after this, slowly enough not to fill the log."""

Incarnation = tuple[ReplicaId, int]
Subject = TypeVar("Subject")


class Replicas:
    """The current replicas in the order of their arrival, and a signal when that changes."""

    def __init__(self) -> None:
        self._incarnations: dict[ReplicaId, int] = {}
        self._arrivals = 0
        self._changed = asyncio.Event()

    def __iter__(self) -> Iterator[ReplicaId]:
        return iter(tuple(self._incarnations))

    def __len__(self) -> int:
        return len(self._incarnations)

    def __contains__(self, replica: object) -> bool:
        return replica in self._incarnations

    def __repr__(self) -> str:
        return f"Replicas({', '.join(self._incarnations)})"

    @property
    def incarnations(self) -> frozenset[Incarnation]:
        return frozenset(self._incarnations.items())

    @property
    def changed(self) -> asyncio.Event:
        """Set once at the next change. Take it before reading the set, then nothing is missed."""
        return self._changed

    def update(self, *, removed: Iterable[ReplicaId] = (), added: Iterable[ReplicaId] = ()) -> None:
        """A replica that is in both has moved: same name, new incarnation."""
        for replica in removed:
            self._incarnations.pop(replica, None)
        for replica in added:
            self._arrivals += 1
            self._incarnations[replica] = self._arrivals
        self._changed.set()
        self._changed = asyncio.Event()


async def watch_each(
    replicas: Replicas,
    watch: Callable[[ReplicaId], Awaitable[None]],
    only: Callable[[ReplicaId], bool] = lambda replica: True,
) -> None:
    """Run `watch(replica)` as one task for each replica, as long as it is in the set. Ends only when cancelled."""
    tasks: dict[Incarnation, asyncio.Future[None]] = {}
    try:
        while True:
            changed = replicas.changed
            current = {one for one in replicas.incarnations if only(one[0])}
            for incarnation in tasks.keys() - current:
                tasks.pop(incarnation).cancel()
            for incarnation in current - tasks.keys():
                tasks[incarnation] = asyncio.ensure_future(keep_running(watch, incarnation[0]))
            await changed.wait()
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)


async def keep_running(work: Callable[[Subject], Awaitable[None]], subject: Subject) -> None:
    """The top of a feed's task: `work(subject)` for ever. What it did not foresee is logged, and it begins anew."""
    while True:
        try:
            await work(subject)
        except Exception:
            log.exception("a feed of %s stumbled and starts again", subject)
        await asyncio.sleep(RESTART_SECONDS)
