"""A worker's door: connections that the parent has accepted come through a socket from it (`doorman`)."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

from gateway.several.doorman import END
from gateway.several.messages import Address

AT_ONCE = 64
"""Taken in one go; then requests have their turn."""


class Handed:
    """`received` counts; `is_over` once no more will come."""

    def __init__(self, sock: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        sock.setblocking(False)
        self.received = 0
        self.is_over = False
        self._sock = sock
        self._loop = loop
        self._protocols: dict[bytes, Callable[[], asyncio.Protocol]] = {}
        self._beginning: set[asyncio.Task[None]] = set()

    def doorway(self, kind: bytes, address: Address) -> HandedDoorway:
        return HandedDoorway(self, kind, address)

    def serve(self, kind: bytes, protocol: Callable[[], asyncio.Protocol]) -> None:
        if not self._protocols:
            self._loop.add_reader(self._sock, self._receive)
        self._protocols[kind] = protocol

    def stop(self, kind: bytes) -> None:
        """What comes of this kind is closed from now on."""
        self._protocols.pop(kind, None)

    def close(self) -> None:
        self._loop.remove_reader(self._sock)
        self._sock.close()

    def _receive(self) -> None:
        for _ in range(AT_ONCE):
            try:
                kind, descriptors, _, _ = socket.recv_fds(self._sock, 1, 1)
            except BlockingIOError:
                return
            except OSError:
                kind, descriptors = b"", []
            if kind in (b"", END):
                self.is_over = True
                self._loop.remove_reader(self._sock)
                return
            self.received += 1  # also without its descriptor, where none is free: then the client is told by the end
            for descriptor in descriptors:
                self._begin(kind, socket.socket(fileno=descriptor))

    def _begin(self, kind: bytes, connection: socket.socket) -> None:
        connection.setblocking(False)
        protocol = self._protocols.get(kind)
        if protocol is None:
            connection.close()
            return
        task = self._loop.create_task(self._connect(protocol, connection))
        self._beginning.add(task)
        task.add_done_callback(self._beginning.discard)

    async def _connect(self, protocol: Callable[[], asyncio.Protocol], connection: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it has left again
            await self._loop.connect_accepted_socket(protocol, connection)


class HandedDoorway:
    """`gateway.listeners.Doorway` of one kind."""

    def __init__(self, handed: Handed, kind: bytes, address: Address) -> None:
        self.address = address
        self._handed, self._kind = handed, kind

    @property
    def is_over(self) -> bool:
        return self._handed.is_over

    async def open(self, protocol: Callable[[], asyncio.Protocol], backlog: int) -> HandedDoorway:
        self._handed.serve(self._kind, protocol)
        return self

    def close(self) -> None:
        self._handed.stop(self._kind)

    async def wait_closed(self) -> None:
        """Nothing is left to wait for."""
