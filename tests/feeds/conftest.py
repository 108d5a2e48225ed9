"""Fixtures of the feeds' tests: where facts go, real clients and servers, and feeds that run until the test ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from scripted_replica import Facts, ScriptedReplica

from gateway.feeds.fetch import ReplicaClient


@pytest.fixture
def facts() -> Facts:
    return Facts()


@pytest.fixture
def client() -> ReplicaClient:
    return ReplicaClient()


@pytest.fixture
async def start_replica() -> AsyncIterator[Callable[[], Awaitable[ScriptedReplica]]]:
    started: list[ScriptedReplica] = []

    async def start() -> ScriptedReplica:
        replica = ScriptedReplica()
        await replica.start()
        started.append(replica)
        return replica

    yield start
    for replica in started:
        await replica.stop()


@pytest.fixture
async def running() -> AsyncIterator[Callable[[Awaitable[None]], None]]:
    """Runs a feed until the end of the test."""
    tasks: list[asyncio.Future[None]] = []

    def run(feed: Awaitable[None]) -> None:
        tasks.append(asyncio.ensure_future(feed))

    yield run
    for task in tasks:
        assert not task.done(), f"a feed ended by itself: {task!r}"
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
