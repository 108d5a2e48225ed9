"""Second attempts after a connection was lost, a kept one too: allowed at all, and how many.

A replay is work that may be done twice. When one replica dies, all that it was at goes to the others, and should;
when the network or the fleet is in trouble again and again, so would everybody's requests, and the trouble would grow.
So each request earns a fifth of a replay, and what is saved suffices to lose all that is in flight at one moment, once.
Attempts that follow a refused connection, or the word of an engine that it did nothing, double no work and are not
counted.
"""

from __future__ import annotations

from collections.abc import Callable

from gateway.proxy.errors import ConnectFailed, ConnectionLost, EngineDraining, TlsFailed, UpstreamError

KEPT_CONNECTION = "kept"
CAUSES: dict[type[UpstreamError], str] = {
    ConnectFailed: "unreachable",
    TlsFailed: "unreachable",
    ConnectionLost: "lost",
    EngineDraining: "draining",
}
"""Why a request was sent once more, as metrics call it; `kept`: its connection had idled, and was probably dead."""
PRICE = 5
"""Requests that pay for one replay, in the long run. Envoy's default budget for retries, but earned over time: a fifth
of what is in flight at the moment would not do where one of two replicas dies, or one of three."""
LEAST_SAVED = 10
"""So that a gateway with little to do, or one that just started, survives the loss of a replica too."""


def is_stale(error: UpstreamError | None) -> bool:
    return isinstance(error, ConnectionLost) and error.stale


def cause_of(error: UpstreamError) -> str:
    """Why it is sent once more."""
    return KEPT_CONNECTION if is_stale(error) else CAUSES[type(error)]


class Replays:
    """`earn` with each request, `take` before a replay."""

    __slots__ = ("_earned", "_in_flight")

    def __init__(self, in_flight: Callable[[], int]) -> None:
        self._in_flight = in_flight
        self._earned = LEAST_SAVED * PRICE
        """Counted in requests."""

    def earn(self) -> None:
        self._earned = min(self._earned + 1, PRICE * max(LEAST_SAVED, self._in_flight()))

    def take(self) -> bool:
        """Whether one more may run; then it is spent."""
        if self._earned < PRICE:
            return False
        self._earned -= PRICE
        return True

    def __repr__(self) -> str:
        return f"<Replays {self._earned / PRICE:g} saved>"
