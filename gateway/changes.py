"""What the admin listener changes, as values: one gateway process tells the others of its host, which do the same."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from msgspec import Struct


class Drain(Struct, tag=True, array_like=True, frozen=True):
    """No new requests for it, or requests again."""

    replica: str
    draining: bool


class Register(Struct, tag=True, array_like=True, frozen=True):
    url: str
    prefill_rate: float | None
    lease_seconds: float | None


class Unregister(Struct, tag=True, array_like=True, frozen=True):
    url: str


Change = Drain | Register | Unregister
Tell = Callable[[Change], Awaitable[None]]
"""Returns once the others have done it, or do not answer."""


async def keep_to_oneself(change: Change) -> None:
    """There are no others."""
