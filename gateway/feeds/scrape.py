"""Scrape: what each replica says about its load, several times a second. One task for each replica.

A scrape that fails reports nothing: the last snapshot grows old where it is kept, and the core judges it by its age.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from random import Random

from gateway.core.model import Fact, LoadReported, LoadSnapshot, ReplicaId
from gateway.feeds.engines import Engines
from gateway.feeds.fetch import FetchFailed, ReplicaClient, fetch
from gateway.feeds.metrics_text import Absurd, read_load
from gateway.feeds.replicas import Replicas, watch_each

log = logging.getLogger(__name__)

JITTER = 0.1
"""Share of the interval: scrapes of many replicas spread out instead of arriving in one burst."""
WARN_AFTER = 2
"""Failures in a row. One is noise, and by the second it is known which engine does not answer, and what to do."""
MAX_PAUSE_SECONDS = 5.0
"""A replica whose page fails is asked less and less often, down to this, so a hung one costs little."""


class Scrape:
    def __init__(
        self,
        replicas: Replicas,
        observe: Callable[[Fact], None],
        client: ReplicaClient,
        *,
        interval_seconds: float,
        timeout_seconds: float,
        max_bytes: int,
        random: Random,
        engines: Engines | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._replicas = replicas
        self._observe = observe
        self._client = client
        self._interval_seconds = interval_seconds
        self._timeout_seconds = timeout_seconds
        self._max_bytes = max_bytes
        self._random = random
        self._engines = engines or Engines()
        self._clock = clock
        self._sleep = sleep

    async def run(self) -> None:
        await watch_each(self._replicas, self._watch)

    async def _watch(self, replica: ReplicaId) -> None:
        failures = 0
        while True:
            began = self._clock()
            dialect = self._engines.dialect(replica)
            if dialect.metrics is None:
                await self._sleep(MAX_PAUSE_SECONDS)
                continue
            url = f"{replica}{dialect.metrics}"
            try:
                snapshot = await self._load(replica, url, began)
            except FetchFailed as error:
                failures += 1
                if failures == WARN_AFTER:
                    remedy = f"; {dialect.without_metrics}" if dialect.without_metrics else ""
                    log.warning("%s is not usable: %s%s", url, error, remedy)
            else:
                if failures >= WARN_AFTER:
                    log.info("%s is usable again", url)
                failures = 0
                self._observe(LoadReported(replica, snapshot))
            pause = self._pause_seconds(failures) * self._random.uniform(1 - JITTER, 1 + JITTER)
            await self._sleep(max(0.0, pause - (self._clock() - began)))

    def _pause_seconds(self, failures: int) -> float:
        longest = max(self._interval_seconds, MAX_PAUSE_SECONDS)
        return min(longest, self._interval_seconds * 2.0 ** min(failures, 16))

    async def _load(self, replica: ReplicaId, url: str, began: float) -> LoadSnapshot:
        """Dated to the question, not the answer: what was sent in between may or may not be counted."""
        page = await fetch(self._client, url, timeout_seconds=self._timeout_seconds, max_bytes=self._max_bytes)
        self._engines.hear_page(replica, page)
        try:
            return read_load(page, taken_at=began, families=self._engines.dialect(replica).families)
        except Absurd as error:
            raise FetchFailed(str(error)) from error
