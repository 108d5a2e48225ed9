"""A connection to the Redis that gateways share, for feeds that ask it something every few seconds."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from gateway.feeds.peers import TIMEOUT_SECONDS, place_of


class RedisLink:
    """Connects when it is asked. Raises `ValueError` for a URL that the client does not understand."""

    def __init__(self, url: str) -> None:
        self.place = place_of(url)
        self._redis = Redis.from_url(
            url,
            # No limits of its own: it keeps them with `asyncio.wait_for`, which loses cancellations before Python 3.12.
            socket_timeout=None,
            socket_connect_timeout=None,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )

    async def ask(self, commands: Callable[[Pipeline], object]) -> list[Any]:
        """One round trip: the answers to what `commands` puts into the pipeline. Raises whatever the client does, also
        when it takes too long."""
        async with asyncio.timeout(TIMEOUT_SECONDS):
            pipeline = self._redis.pipeline(transaction=False)
            commands(pipeline)
            return await pipeline.execute()

    async def close(self) -> None:
        """It opens again when it is asked."""
        with contextlib.suppress(Exception):  # it is gone either way
            async with asyncio.timeout(TIMEOUT_SECONDS):
                await self._redis.aclose()
