"""What one sweep looks at on client connections of both kinds, instead of timers for each: deadlines, and whether the
client has left where reading is paused, for there the loop does not hear of it.
"""

from __future__ import annotations

import asyncio
import select

from uvicorn.server import ServerState

from gateway.proxy.control_connection import ControlConnection
from gateway.proxy.http_client import ClientConnection

SWEEP_SECONDS = 1.0
LEFT = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)
"""Told without reading: behind unread bytes the end cannot be read. macOS has no POLLRDHUP, there POLLHUP says it."""


async def sweep(server_state: ServerState, loop: asyncio.AbstractEventLoop) -> None:
    """Runs as long as the server: closes client connections whose deadline has passed or whose client has left."""
    while True:
        await asyncio.sleep(SWEEP_SECONDS)
        now = loop.time()
        for connection in list(server_state.connections):
            one: object = connection
            if not isinstance(one, (ClientConnection, ControlConnection)):
                continue
            if one.deadline < now:
                one.expire()
            elif one.is_paused() and has_left(one.transport):
                one.cut()


def has_left(transport: asyncio.Transport) -> bool:
    """Its client has closed, whatever lies unread before that."""
    if transport.is_closing():
        return False  # it is over already
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), LEFT)
    return any(events & LEFT for _, events in poll.poll(0))
