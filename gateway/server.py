"""How uvicorn serves a gateway: it accepts connections, and ends as the configuration wants it to."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any, cast

import uvicorn

from gateway.admin import AdminListener
from gateway.assembly import Gateway
from gateway.control import build_api
from gateway.dashboard.site import for_browsers
from gateway.listeners import BACKLOG, Bound, Doorway
from gateway.proxy import http_client
from gateway.proxy.control_connection import ControlConnection
from gateway.proxy.guard import guarded
from gateway.proxy.handshakes import accepting
from gateway.stop_signals import StopSignals
from gateway.tls import Certificate

log = logging.getLogger(__name__)

BACKSTOP_SECONDS = 2
"""Longer than what each is behind: the grace of a server that hangs, the delay of a parent that closes the doorway."""


class Server(uvicorn.Server):
    """uvicorn, which tells when it listens. The first signal makes it unready at once, closes the listener after the
    announced delay, and gives running requests their grace; the second ends it. The exit code is 0."""

    def __init__(
        self,
        config: uvicorn.Config,
        gateway: Gateway,
        on_ready: Callable[[], None],
        signals: StopSignals,
        doorway: Doorway | None = None,
    ) -> None:
        """`doorway`: where connections come from, if not from sockets that `serve` is given."""
        super().__init__(config)
        self._doorway = doorway
        self._gateway = gateway
        self._signals = signals
        self._on_ready = on_ready
        self._close_at = math.inf
        """End of the announced delay."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's own, with TLS handshakes that count as connections."""
        loop, config, door, state = asyncio.get_running_loop(), self.config, self._gateway.door, self.server_state

        def connection() -> asyncio.Protocol:
            protocol: Any = config.http_protocol_class
            made: asyncio.Protocol = protocol(config=config, server_state=state, app_state={}, _loop=loop)
            return made

        limit = door.server.header_timeout_seconds
        accepted = accepting(connection, config.ssl, limit, door.places, state, loop)
        doorways = [Bound(sock) for sock in sockets or ()] if self._doorway is None else [self._doorway]
        self.servers = [cast(asyncio.Server, await one.open(accepted, config.backlog)) for one in doorways]
        self.started = True
        self._on_ready()

    async def on_tick(self, counter: int) -> bool:
        if self._gateway.clock() >= self._close_at or (self._doorway is not None and self._doorway.is_over):
            self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        seconds = self._gateway.config.server.drain_seconds
        grace = asyncio.get_running_loop().call_later(seconds, self._end_grace)
        try:
            await super().shutdown(sockets)
        finally:
            grace.cancel()

    def _end_grace(self) -> None:
        self.force_exit = True

    def handle_exit(self, sig: int, frame: Any) -> None:
        limits = self._gateway.config.server
        if self._gateway.draining:
            self.should_exit = self.force_exit = True
        elif (running := self._gateway.requests()) and self._doorway is None:
            seconds = limits.drain_delay_seconds + limits.drain_seconds
            what = "1 request" if running == 1 else f"{running} requests"
            log.info("draining: %s running, up to %g s; again to stop now", what, seconds)
        self._gateway.door.draining = True
        delay = limits.drain_delay_seconds if self._doorway is None else limits.drain_delay_seconds + BACKSTOP_SECONDS
        self._close_at = min(self._close_at, self._gateway.clock() + delay)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        with self._signals.heeded_by(lambda: self.handle_exit(signal.SIGTERM, None)):
            yield


def http_settings(gateway: Gateway, admin: AdminListener | None, certificate: Certificate | None) -> uvicorn.Config:
    """How uvicorn serves: which connections, which application, and as little of its own as can be."""
    limits = gateway.config.server
    http: Any = functools.partial(ControlConnection, limits, gateway.door.places)
    if limits.http == "fast":
        http = functools.partial(http_client.ClientConnection, gateway.door)
    api = guarded(build_api(gateway, admin), gateway.door, gateway.viewers.is_admin)
    return uvicorn.Config(
        quiet_when_stopped(for_browsers(api)),
        http=http,
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,  # what it has to say goes the way of everything else
        log_level="error",  # below that it prints a line for each client that does not speak HTTP
        backlog=BACKLOG,
        timeout_keep_alive=math.ceil(limits.keep_alive_seconds),
        # The grace is kept by `Server`, which can tell what it cuts; this is for the case that uvicorn hangs.
        timeout_graceful_shutdown=math.ceil(limits.drain_seconds) + BACKSTOP_SECONDS,
        server_header=False,
        date_header=False,
        ssl_context_factory=None if certificate is None else certificate.for_server,
    )


def quiet_when_stopped(api: Any) -> Any:
    """uvicorn cancels what outlives the grace, and would print a traceback for each."""

    async def served(scope: Any, receive: Any, send: Any) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await api(scope, receive, send)

    return served


async def end_what_is_left(server: uvicorn.Server) -> None:
    """What its grace did not suffice for. Each request writes its record."""
    for connection in list(server.server_state.connections):
        if isinstance(connection, http_client.ClientConnection):
            connection.cut()
    tasks = list(server.server_state.tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
