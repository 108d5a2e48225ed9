"""The gateway as those see it who run replicas: who gets requests, and how much would be lost with whom."""

from __future__ import annotations

from typing import Protocol


class Traffic(Protocol):
    """Replicas are named by their URLs. One that is not there has no requests and nothing to lose."""

    def join(self, url: str, prefill_rate: float | None) -> None:
        """It is ready and may get requests. `prefill_rate`: uncached prompt tokens per second, if known."""

    def leave(self, url: str) -> None:
        """It ended, or will at once."""

    def drain(self, url: str, draining: bool) -> None:
        """It is to get no new requests, or to get them again."""

    def requests(self, url: str) -> int:
        """Running there now."""

    def is_up(self, url: str) -> bool:
        """Whether the gateway has found it healthy."""

    def serves(self, url: str) -> bool:
        """... and sends it requests."""

    def has_stand_in(self, url: str) -> bool:
        """Whether other healthy replicas serve all that it serves."""

    def cached_seconds(self, url: str) -> float:
        """Prefill that would have to be done again if it were gone."""
