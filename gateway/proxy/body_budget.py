"""How many bytes of request bodies may be in memory, of all clients together.

One body is bounded by `max_body_mib`; without this, a hundred that are sent slowly, or that wait for a replica, would
take a hundred times that. Bytes count as they come, not as they are announced: who merely announces takes nobody's
room. They are given back when the replica begins to answer, or when the request ends in another way.
"""

from __future__ import annotations


class BodyBudget:
    """`take` when bytes come, `give_back` when they are not kept any more."""

    __slots__ = ("_limit", "held")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.held = 0
        """Bytes now."""

    def __repr__(self) -> str:
        return f"<BodyBudget {self.held}/{self._limit}>"

    def has_room(self, size: int) -> bool:
        """For so many bytes, now. Takes none."""
        return self.held + size <= self._limit

    def take(self, size: int) -> bool:
        """Whether there is room for them; then they count."""
        if self.held + size > self._limit:
            return False
        self.held += size
        return True

    def give_back(self, size: int) -> None:
        self.held -= size
