"""The replica's side of announcements: says again every few seconds that a replica is there, and says goodbye.

Nothing of the replica waits for Redis: while it cannot be reached, the announcement is tried again each second.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec
from redis.asyncio.client import Pipeline

from gateway.core.model import ReplicaId
from gateway.feeds.announcements import (
    LEASE_SECONDS,
    MAX_MODELS,
    MAX_NAME,
    PURPOSE,
    REFRESH_SECONDS,
    Announcement,
    replica_key,
    set_key,
)
from gateway.feeds.fetch import FetchFailed, ReplicaClient
from gateway.feeds.probes import list_models
from gateway.feeds.redis_link import RedisLink, in_short
from gateway.feeds.sealing import Seal, Sealer

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
ASK_SECONDS = 2.0
"""For a replica to list its models: this is no probe, and the last list will do."""
GOODBYE_SECONDS = 1.0
"""Nobody who stops a replica waits longer for a Redis that does not answer."""
KEEP_SECONDS = 3_600
"""The set is gone so long after the last announcement."""

ListModels = Callable[[str], Awaitable[tuple[str, ...]]]
"""URL -> names. Raises `FetchFailed`."""


@dataclass(slots=True)
class Presence:
    """One replica that is there."""

    sealer: Sealer
    url: str
    asked_at: str
    prefill_rate: float | None
    models: tuple[str, ...] = field(default=())

    def announcement(self, is_leaving: bool) -> Announcement:
        return Announcement(time.time(), self.url, self.models, self.prefill_rate, is_leaving)


async def names_of_models(url: str) -> tuple[str, ...]:
    cards = await list_models(ReplicaClient(), ReplicaId(url), timeout_seconds=ASK_SECONDS)
    return tuple(card.id for card in cards if 0 < len(card.id) <= MAX_NAME)[:MAX_MODELS]


class Announcer:
    """`run` announces until it is cancelled, and then takes everything back."""

    def __init__(self, url: str, fleet: str, secret: bytes, list_models: ListModels = names_of_models) -> None:
        """Raises `ValueError` for a URL that the client does not understand."""
        self._link = RedisLink(url)
        self._fleet = fleet
        self._seal = Seal(secret, PURPOSE, fleet)
        self._list_models = list_models
        self._present: dict[str, Presence] = {}
        self._leaving: list[Presence] = []
        self._changed = asyncio.Event()

    def announce(self, url: str, prefill_rate: float | None, asked_at: str | None = None) -> None:
        """It is there. `asked_at`: where it is reached from here, if not at `url`."""
        if url not in self._present:
            self._present[url] = Presence(Sealer(self._seal), url, asked_at or url, prefill_rate)
            self._changed.set()

    def withdraw(self, url: str) -> None:
        """It is to get nothing more."""
        if (gone := self._present.pop(url, None)) is not None:
            self._leaving.append(gone)
            self._changed.set()

    async def run_until(self, stopping: asyncio.Event) -> None:
        """`run`, and goodbye as soon as everything begins to stop."""
        announcing = asyncio.create_task(self.run())
        try:
            await stopping.wait()
        finally:
            announcing.cancel()
            await asyncio.gather(announcing, return_exceptions=True)

    async def run(self) -> None:
        failing = False
        try:
            while True:
                self._changed.clear()
                try:
                    await self._write()
                except Exception as error:  # whatever a broken server makes of the client
                    if not failing:
                        log.warning(
                            "Redis at %s: %s; not announced until it is back", self._link.place, in_short(error)
                        )
                    failing = True
                    await self._link.close()
                else:
                    if failing:
                        log.info("Redis at %s is back: announced again", self._link.place)
                    failing = False
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RETRY_SECONDS if failing else REFRESH_SECONDS):
                        await self._changed.wait()
        finally:
            await self._say_goodbye()

    async def _say_goodbye(self) -> None:
        self._leaving += self._present.values()
        self._present.clear()
        with contextlib.suppress(Exception):  # the lease runs out where it was not heard
            async with asyncio.timeout(GOODBYE_SECONDS):
                await self._write()
        await self._link.close()

    async def _write(self) -> None:
        present, leaving = list(self._present.values()), list(self._leaving)
        await asyncio.gather(*(self._ask(one) for one in present))
        said = [(one, False) for one in present if one.url in self._present] + [(one, True) for one in leaving]
        if not said:
            return
        names = set_key(self._fleet)

        def commands(pipeline: Pipeline) -> None:
            for one, is_leaving in said:
                sender = one.sealer.name.hex()
                message = one.sealer.seal(msgspec.msgpack.encode(one.announcement(is_leaving)))
                pipeline.sadd(names, sender)
                pipeline.set(replica_key(self._fleet, sender), message, px=round(LEASE_SECONDS * 1_000))
            pipeline.expire(names, KEEP_SECONDS)

        await self._link.ask(commands)
        self._leaving = [one for one in self._leaving if one not in leaving]

    async def _ask(self, one: Presence) -> None:
        with contextlib.suppress(FetchFailed):
            one.models = await self._list_models(one.asked_at)
