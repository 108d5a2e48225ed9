"""The parent's door: it accepts connections and hands each to the worker that has the fewest.

Clients of a gateway keep few connections open for a long time, so which worker gets one matters for hours. Left to the
kernel they spread unevenly: with one shared socket whoever wakes first takes all that wait, with `SO_REUSEPORT` a hash
decides, which gives two of four clients to one worker more often than not, and to a worker that hangs as to any other.
Here the socket itself is passed on (`SCM_RIGHTS`); from then on the parent has no part in it.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Protocol

CLIENT, ADMIN, END = b"c", b"a", b"e"
"""What is said with a socket: which listener it came to; `END` comes without one, and is the last."""
AT_ONCE = 64
"""Accepted in one go; then whatever else the parent does has its turn."""
RETRY_SECONDS = 0.02
"""Where nobody can take a connection, it waits, and those behind it in the kernel's queue."""


class Taker(Protocol):
    """A worker as it gets connections."""

    def take(self, kind: bytes, connection: socket.socket) -> bool:
        """Whether it could be handed over."""


class Doorman:
    """`choose`: whom to ask, the best first; nobody while none serves."""

    def __init__(self, loop: asyncio.AbstractEventLoop, choose: Callable[[], list[Taker]]) -> None:
        self._loop = loop
        self._choose = choose
        self._listeners: dict[socket.socket, bytes] = {}
        self._pausing: dict[socket.socket, asyncio.TimerHandle] = {}
        self._held: dict[socket.socket, socket.socket] = {}
        """By listener: one that was accepted, and that nobody could take."""

    def open(self, listener: socket.socket, kind: bytes) -> None:
        listener.setblocking(False)
        self._listeners[listener] = kind
        self._loop.add_reader(listener, self._accept, listener)

    def close(self) -> None:
        """Nobody comes in any more: connections that wait in the kernel's queue are refused."""
        for listener in self._listeners:
            if (pause := self._pausing.pop(listener, None)) is not None:
                pause.cancel()
            self._loop.remove_reader(listener)
            listener.close()
        for connection in self._held.values():
            connection.close()
        self._listeners.clear()
        self._held.clear()

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(AT_ONCE):
            takers = self._choose()
            if not takers:
                self._pause(listener)
                return
            try:
                connection = self._held.pop(listener, None) or listener.accept()[0]
            except (BlockingIOError, ConnectionError):
                return
            except OSError:  # no descriptor is left: another connection has to end before
                self._pause(listener)
                return
            kind = self._listeners[listener]
            if not any(taker.take(kind, connection) for taker in takers):
                self._held[listener] = connection
                self._pause(listener)
                return
            connection.close()  # it is the taker's now

    def _pause(self, listener: socket.socket) -> None:
        self._loop.remove_reader(listener)
        self._pausing[listener] = self._loop.call_later(RETRY_SECONDS, self._go_on, listener)

    def _go_on(self, listener: socket.socket) -> None:
        self._pausing.pop(listener, None)
        self._loop.add_reader(listener, self._accept, listener)
        if listener in self._held:
            self._accept(listener)
