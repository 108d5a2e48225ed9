"""A connection to the Redis that gateways share, for feeds that ask it something again and again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

TIMEOUT_SECONDS = 1.0
"""For a whole round. On one network it takes a millisecond; a Redis that needs longer than this is no help."""


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


def place_of(url: str) -> str:
    """The URL without what may be secret."""
    parts = urlsplit(url)
    return parts.path if parts.scheme == "unix" else parts.netloc.rpartition("@")[2]


def in_short(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {TIMEOUT_SECONDS:g} s"
    text = str(error)
    if "pipeline caused error:" in text:  # before it the client repeats the command with its payload
        text = text.rpartition("pipeline caused error:")[2].strip(" (,)'\"")
    return " ".join(text.split())[:200] or type(error).__name__
