"""Second attempts after a connection was lost, a kept one too: allowed at all, and how many may run at once.

A replay is work that may be done twice. When one replica dies, a few requests go to the others; when the network or
the fleet is in trouble, everybody's requests would, and the trouble would grow. So replays that run are limited to a
share of all requests in flight. Attempts that follow a refused connection, or the word of an engine that it did
nothing, double no work and are not counted.
"""

from __future__ import annotations

from collections.abc import Callable

BUDGET_SHARE = 0.2
"""Of the requests in flight. Envoy's default budget for retries."""
LEAST_BUDGET = 3
"""So that a gateway with little to do survives the loss of a replica too."""


class Replays:
    """`take` before a replay, `give_back` when its request has ended."""

    __slots__ = ("_in_flight", "running")

    def __init__(self, in_flight: Callable[[], int]) -> None:
        self._in_flight = in_flight
        self.running = 0

    def take(self) -> bool:
        """Whether one more may run; then it counts."""
        if self.running >= max(LEAST_BUDGET, BUDGET_SHARE * self._in_flight()):
            return False
        self.running += 1
        return True

    def give_back(self) -> None:
        self.running -= 1

    def __repr__(self) -> str:
        return f"<Replays {self.running} running>"
