"""Where the gateway listens: bound sockets, or one line that says which cannot be had and what to change."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Protocol

from gateway.config import Config

BACKLOG = 4096
"""Connections the kernel keeps while the loop is busy: a burst of agents reconnecting must not be refused."""


class Door(Protocol):
    def close(self) -> None: ...

    async def wait_closed(self) -> None: ...


class Doorway(Protocol):
    """Where connections come from. `is_over`: no more will come."""

    @property
    def address(self) -> tuple[str, int]: ...

    @property
    def is_over(self) -> bool: ...

    async def open(self, protocol: Callable[[], asyncio.Protocol], backlog: int) -> Door: ...


class Bound:
    """A listening socket of this process."""

    is_over = False

    def __init__(self, sock: socket.socket) -> None:
        self.address: tuple[str, int] = sock.getsockname()[:2]
        self._sock = sock

    async def open(self, protocol: Callable[[], asyncio.Protocol], backlog: int) -> Door:
        return await asyncio.get_running_loop().create_server(protocol, sock=self._sock, backlog=backlog)


class StartError(Exception):
    """The gateway cannot start; one line for the person who started it."""


def listen(host: str, port: int, change: str) -> socket.socket:
    """A listening socket. Raises `StartError`, with what to `change`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named TCP, for asyncio's own loop lets small writes go at once (TCP_NODELAY) only on sockets that say so.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)  # only now the port is ours: two sockets may be bound to one as long as none listens
    except (OSError, ValueError, TypeError) as error:  # the latter two for text that cannot be a host
        sock.close()
        reason = getattr(error, "strerror", None) or error
        raise StartError(f"cannot listen on {host}:{port}: {reason}; {change}") from error
    return sock


def listen_all(config: Config) -> tuple[socket.socket, socket.socket | None]:
    """Sockets of the gateway and of its admin listener, if it has one. Raises `StartError`."""
    sock = listen(config.server.host, config.server.port, "see --host and --port, or [server] host and port")
    if config.admin.port is None:
        return sock, None
    try:
        return sock, listen(config.admin.host, config.admin.port, "see [admin] host and port")
    except StartError:
        sock.close()
        raise


def heard_at(url: str, host: str) -> str:
    """The URL of a listener with the address it was asked to have, where that means every address of the machine."""
    every = {"0.0.0.0": "0.0.0.0", "::": "[::]"}.get(host)
    scheme, port = url.split("://")[0], url.rpartition(":")[2]
    return url if every is None else f"{scheme}://{every}:{port}"


def base_url(address: tuple[str, int], scheme: str = "http") -> str:
    """One that can be called from here."""
    host, port = address
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{scheme}://{host}:{port}"
