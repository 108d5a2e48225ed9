"""Places for client connections: when all are taken, whoever has asked for nothing for longest gives his up.

At rest is a connection that is kept after an answer, one whose client has said nothing yet, and a TLS handshake under
way. One that is in the middle of a request, or of its answer, never has to go.
"""

from __future__ import annotations

import asyncio

LEAST_REST_SECONDS = 1.0
"""Who came, or had an answer, less than this ago may be about to ask: he keeps his place, and the newcomer is refused
where nobody else rests."""
TOLD = 256
"""Connections beyond the limit that are told so before they are closed; more are cut at once."""


def is_room(taken: int, limit: int) -> bool:
    """To tell one more client that there is none to serve it."""
    return taken < limit + TOLD


class Places:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._resting: dict[asyncio.Transport, float] = {}
        """Since when; whoever rests for longest is first. Nothing is on its way on any of them."""

    def __repr__(self) -> str:
        return f"<Places: {self.limit}, {len(self._resting)} at rest>"

    def make_room(self, taken: int, now: float) -> bool:
        """Whether there is a place beside `taken` connections; somebody at rest may have to go for it."""
        if taken < self.limit:
            return True
        for one, since in self._resting.items():
            if now - since < LEAST_REST_SECONDS:
                return False
            del self._resting[one]
            one.abort()
            return True
        return False

    def rest(self, one: asyncio.Transport, now: float) -> None:
        self._resting[one] = now

    def wake(self, one: asyncio.Transport) -> None:
        """It asks for something, or has gone."""
        self._resting.pop(one, None)
