"""TLS as clients begin it: a socket is a connection from its acceptance on, not only once its handshake is done.

The event loop would do handshakes by itself, but then nobody knows of those under way: whoever opens sockets and says
nothing would hold as many descriptors as he likes. Here each takes a place while it shakes hands, in limited time; then
the protocol that serves it takes over.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from gateway.proxy.exchange import Exchange
from gateway.proxy.places import Places, is_room


class Handshake(asyncio.Protocol):
    """One accepted socket, until what `serve` makes takes over, or until it is closed."""

    def __init__(
        self,
        serve: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext,
        limit_seconds: float,
        places: Places,
        state: ServerState,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.transport = cast(asyncio.Transport, None)
        self._serve = serve
        self._context = context
        self._limit_seconds = limit_seconds
        self._places = places
        self._connections = state.connections
        self._loop = loop
        self._early = b""
        """What came with the last message of the handshake."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        now, taken = self._loop.time(), len(self._connections)
        if not self._places.make_room(taken, now) and not is_room(taken, self._places.limit):
            self.transport.abort()
            return
        self._connections.add(cast(HttpToolsProtocol, self))
        self._places.rest(self.transport, now)
        Exchange(self._shake_hands()).start()  # at once: the next bytes are TLS already

    async def _shake_hands(self) -> None:
        try:
            encrypted = await self._loop.start_tls(
                self.transport,
                self,
                self._context,
                server_side=True,
                ssl_handshake_timeout=self._limit_seconds,
            )
        except OSError:  # it left, took too long, or does not speak TLS
            self.transport.abort()
            return
        finally:
            self._connections.discard(cast(HttpToolsProtocol, self))
            self._places.wake(self.transport)
        if encrypted is None or encrypted.is_closing():
            return
        protocol = self._serve()
        encrypted.set_protocol(protocol)
        protocol.connection_made(encrypted)
        if self._early:
            protocol.data_received(self._early)

    def data_received(self, data: bytes) -> None:
        self._early += data

    def shutdown(self) -> None:
        """The server stops."""
        self.transport.abort()


def accepting(
    serve: Callable[[], asyncio.Protocol],
    context: ssl.SSLContext | None,
    limit_seconds: float,
    places: Places,
    state: ServerState,
    loop: asyncio.AbstractEventLoop,
) -> Callable[[], asyncio.Protocol]:
    """What makes the protocol of each accepted socket. Without a context clients do not speak TLS."""
    if context is None:
        return serve
    tls = context
    return lambda: Handshake(serve, tls, limit_seconds, places, state, loop)
