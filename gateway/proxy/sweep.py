"""Deadlines of client connections, of both kinds: fields that one sweep looks at, instead of a timer for each."""

from __future__ import annotations

import asyncio

from uvicorn.server import ServerState

from gateway.proxy.control_connection import ControlConnection
from gateway.proxy.http_client import ClientConnection

SWEEP_SECONDS = 1.0


async def sweep(server_state: ServerState, loop: asyncio.AbstractEventLoop) -> None:
    """Runs as long as the server: closes client connections whose deadline has passed."""
    while True:
        await asyncio.sleep(SWEEP_SECONDS)
        now = loop.time()
        for connection in list(server_state.connections):
            one: object = connection
            if isinstance(one, (ClientConnection, ControlConnection)) and one.deadline < now:
                one.expire()
