"""One bounded question: what becomes of its connection."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Iterator

import pytest

from gateway.feeds.fetch import FetchFailed, fetch, new_client
from gateway.tls import replica_context


@pytest.fixture
def no_collector() -> Iterator[None]:
    """It would close what was forgotten."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("ends", ["too late", "cancelled"])
async def test_a_server_silent_in_the_handshake_keeps_no_socket(ends: str, no_collector: None) -> None:
    greeted, left = asyncio.Event(), asyncio.Event()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)  # the hello
        greeted.set()
        with contextlib.suppress(ConnectionError):
            await reader.read()
        left.set()
        writer.close()

    silent = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    url = f"https://127.0.0.1:{silent.sockets[0].getsockname()[1]}/health"
    async with silent, new_client(replica_context(None)) as client:
        asking = asyncio.create_task(
            fetch(client, url, timeout_seconds=0.3 if ends == "too late" else 60.0, max_bytes=1_000)
        )
        await asyncio.wait_for(greeted.wait(), 10)
        if ends == "cancelled":
            asking.cancel()
        with pytest.raises((FetchFailed, asyncio.CancelledError)):
            await asking
        await asyncio.wait_for(left.wait(), 10)
