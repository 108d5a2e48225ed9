"""What the parent and its workers say to each other: msgpack with its length before it, over a pair of stream sockets.

Both ends run the same code and trust each other, so a message that cannot be read is a bug and ends the worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import msgspec
from msgspec import Struct

from gateway.changes import Change
from gateway.config import Config
from gateway.several.totals import Page

LENGTH_BYTES = 4
MAX_UNSENT_BYTES = 1024 * 1024
"""For one who does not read. What may be lost or can wait is not sent beyond; the few small messages that must arrive
are. Some ten entries of 64 KiB are a second of a busy gateway."""

Address = tuple[str, int]


# ---- from a worker ---------------------------------------------------------------------------------------------------


class Ready(Struct, tag=True, array_like=True):
    """It serves."""


class Leaving(Struct, tag=True, array_like=True):
    """It wants no more connections."""


class Alive(Struct, tag=True, array_like=True):
    """Said several times a second."""

    connections: int
    received: int
    """Connections that it was handed since its start."""
    requests: int


class Told(Struct, tag=True, array_like=True):
    """Facts for the other workers (`peer_entries.Facts`). `keep`: also for those that start later."""

    name: bytes
    facts: bytes
    keep: bool


class Counted(Struct, tag=True, array_like=True):
    """Its metrics now."""

    page: Page


class CatchUp(Struct, tag=True, array_like=True):
    """It knows its replicas, so it can use what the others have told."""


class Ask(Struct, tag=True, array_like=True):
    """All others: to do the same, or without a change for their metrics."""

    number: int
    change: Change | None = None


class Done(Struct, tag=True, array_like=True):
    """The answer to `Asked`. Asked for its metrics, it has sent them before."""

    number: int


class DrainOver(Struct, tag=True, array_like=True):
    """A drained replica went, and is not to be drained when it comes back."""

    replica: str


FromWorker = Ready | Leaving | Alive | Told | Counted | CatchUp | Ask | Done | DrainOver


# ---- from the parent -------------------------------------------------------------------------------------------------


class Begin(Struct, tag=True, array_like=True):
    """The first message."""

    config: Config
    address: Address
    admin_address: Address | None
    number: int
    """Of this worker, from 1."""
    changes: list[tuple[float, Change]]
    """What admins have changed before, and when (`time.monotonic()`, which is one for all processes)."""


class Heard(Struct, tag=True, array_like=True):
    """What another worker told at a time."""

    name: bytes
    at: float
    facts: bytes


class Asked(Struct, tag=True, array_like=True):
    number: int
    change: Change | None = None


class Answer(Struct, tag=True, array_like=True):
    """To `Ask`: the metrics of all others, those that are gone included."""

    number: int
    page: Page | None = None


class Stop(Struct, tag=True, array_like=True):
    now: bool = False


FromParent = Begin | Heard | Asked | Answer | Stop


class Channel(asyncio.Protocol):
    """One end. `hear` gets each message, `lost` is called once at the end, `has_room` when more may be sent again."""

    def __init__(
        self,
        kind: Any,
        hear: Callable[[Any], None],
        lost: Callable[[], None],
        has_room: Callable[[], None] = lambda: None,
    ) -> None:
        self._decode = msgspec.msgpack.Decoder(kind).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._hear, self._lost, self._has_room = hear, lost, has_room
        self._transport: asyncio.Transport | None = None
        self._begun = bytearray()
        self.is_full = False

    def send(self, message: Struct) -> None:
        """Nothing when the other end is gone."""
        if self._transport is None or self._transport.is_closing():
            return
        body = self._encode(message)
        self._transport.write(len(body).to_bytes(LENGTH_BYTES, "big") + body)

    def close(self) -> None:
        """After what is sent already."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=MAX_UNSENT_BYTES)

    def data_received(self, data: bytes) -> None:
        begun = self._begun
        begun += data
        start = 0
        while len(begun) - start >= LENGTH_BYTES:
            end = start + LENGTH_BYTES + int.from_bytes(begun[start : start + LENGTH_BYTES], "big")
            if len(begun) < end:
                break
            self._hear(self._decode(bytes(begun[start + LENGTH_BYTES : end])))
            start = end
        del begun[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost()

    def pause_writing(self) -> None:
        self.is_full = True

    def resume_writing(self) -> None:
        self.is_full = False
        self._has_room()
