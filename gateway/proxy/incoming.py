"""The body of a request while it comes: its pieces, few however they were cut, and counted in the budget of all."""

from __future__ import annotations

from gateway.proxy.body_budget import BodyBudget

MAX_PARTS = 1024
"""Pieces of a body kept as they came; from there on they are joined at once. A hostile client sends a byte a chunk, and
each piece weighs forty."""


class IncomingBody:
    """`keep` what comes, ask whether it `fits`, `take` it whole; or `drop` it. Then it is empty, for the next."""

    __slots__ = ("_budget", "_counted", "_parts", "_tail", "size")

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._parts: list[bytes] = []
        self._tail = bytearray()
        self._counted = 0
        """Bytes of it that are in the budget."""
        self.size = 0

    def __repr__(self) -> str:
        return f"<IncomingBody {self.size} bytes>"

    def keep(self, data: bytes) -> None:
        self.size += len(data)
        if len(self._parts) < MAX_PARTS:
            self._parts.append(data)
        else:
            self._tail += data

    def fits(self) -> bool:
        """Whether the budget has room for what came since it was asked last; then that counts."""
        if self.size != self._counted:
            if not self._budget.take(self.size - self._counted):
                return False
            self._counted = self.size
        return True

    def joined(self) -> bytes:
        """All of it, which stays."""
        return b"".join((*self._parts, self._tail))

    def take(self) -> bytes:
        """All of it. What it takes of the budget is from now on the taker's to give back."""
        body = self._parts[0] if len(self._parts) == 1 else self.joined()
        self.size = self._counted = 0
        self._parts = []
        if self._tail:
            self._tail = bytearray()
        return body

    def drop(self) -> None:
        self._budget.give_back(self._counted)
        self.size = self._counted = 0
        self._parts, self._tail = [], bytearray()
