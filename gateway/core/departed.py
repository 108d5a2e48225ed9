"""Models of replicas that left a moment ago and are to come back: they are restarted, or moved.

Whoever asks for one is told to come again. That it does not exist would be final for clients, and wrong.
"""

from __future__ import annotations

from gateway.core.model import ReplicaId

EXPECTED_SECONDS = 600.0
"""A large model needs minutes to start again. One that stays away does not exist any more."""
MAX_REPLICAS = 64
"""Addresses come and go; those that left first are forgotten."""


class Departed:
    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left: dict[ReplicaId, tuple[float, frozenset[str]]] = {}
        """When, and with which models; oldest first."""

    def __repr__(self) -> str:
        return f"<Departed: {len(self._left)} replicas>"

    def note(self, replica: ReplicaId, models: frozenset[str], now: float) -> None:
        """It is gone."""
        self.forget(replica)
        self._left[replica] = (now, models)
        if len(self._left) > MAX_REPLICAS:
            del self._left[next(iter(self._left))]

    def forget(self, replica: ReplicaId) -> None:
        """It is back, and says itself what it serves."""
        self._left.pop(replica, None)

    def is_expected(self, model: str, now: float) -> bool:
        return any(model in models and now - left_at < EXPECTED_SECONDS for left_at, models in self._left.values())
