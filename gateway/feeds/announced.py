"""The gateway's side of announcements: looks at all of them again and again, and tells the registry who counts."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping

from gateway.core.model import ReplicaId
from gateway.feeds.announcements import MAX_ANNOUNCEMENTS, Announcement, Ledger, replica_key, set_key
from gateway.feeds.redis_link import RedisLink, in_short
from gateway.feeds.sealing import SENDER_BYTES
from gateway.series import AnnouncementSeries

log = logging.getLogger(__name__)

SENDER = re.compile(rb"[0-9a-f]{%d}" % (2 * SENDER_BYTES))


class Announced:
    """`run` never ends by itself."""

    def __init__(
        self,
        take: Callable[[Mapping[ReplicaId, Announcement]], Awaitable[None]],
        serves: Callable[[ReplicaId], bool],
        series: AnnouncementSeries,
        *,
        url: str,
        fleet: str,
        secret: bytes,
        interval_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        """`take` gets the whole set after each look; `serves` tells whether an announced URL answers requests."""
        self._take = take
        self._serves = serves
        self._series = series
        self._link = RedisLink(url)
        self._fleet = fleet
        self._ledger = Ledger(secret, fleet, self._refuse)
        self._interval_seconds = interval_seconds
        self._clock = clock

    async def run(self) -> None:
        try:
            while True:
                await self._look()
                await asyncio.sleep(self._interval_seconds)
        finally:
            await self._link.close()

    async def _look(self) -> None:
        try:
            found = await self._read()
        except Exception as error:  # whatever a broken server makes of the client: who is announced stays so
            if not self._series.failing:
                log.warning("Redis at %s: %s; announced replicas stay as they are", self._link.place, in_short(error))
            self._series.failing = True
            await self._link.close()
            return
        now = self._clock()
        self._ledger.read(found, now)
        if self._series.failing:
            log.info("Redis at %s is back: announcements are read again", self._link.place)
            self._ledger.forgive(now)
        self._series.failing = False
        try:
            await self._take(self._ledger.announced(now, self._serves))
        except Exception:
            log.exception("the announcements stumbled and go on")

    async def _read(self) -> dict[str, bytes]:
        """Message of each sender. One whose key is gone is taken out of the set."""
        names = set_key(self._fleet)
        (members,) = await self._link.ask(lambda pipeline: pipeline.srandmember(names, MAX_ANNOUNCEMENTS))
        senders = [member.decode() for member in members if SENDER.fullmatch(member)]
        if not senders:
            return {}
        keys = [replica_key(self._fleet, sender) for sender in senders]
        (messages,) = await self._link.ask(lambda pipeline: pipeline.mget(keys))
        found = dict(zip(senders, messages, strict=True))
        gone = [sender for sender, message in found.items() if message is None]
        if gone:
            await self._link.ask(lambda pipeline: pipeline.srem(names, *gone))
        return {sender: message for sender, message in found.items() if message is not None}

    def _refuse(self, reason: str) -> None:
        if not self._series.refused[reason,]:
            log.warning("Redis at %s: an announcement is refused (%s); such are ignored", self._link.place, reason)
        self._series.refused[reason,] += 1
