"""Where a request waits until the core lets it in.

The core's `admit` and `release` decide; the gate only keeps one future for each waiting ticket and one timer, and asks
again whenever something may have changed: a first token, an end, a fact, the time that the core named. It adds nothing
to a request that is admitted at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.core.admission import Shed, ShedReason, Ticket, Waiting
from gateway.core.flight import Flight
from gateway.core.model import RouteRequest
from gateway.core.router import Router
from gateway.proxy.errors import Overloaded, Stopping


class Gate:
    def __init__(
        self,
        router: Router,
        clock: Callable[[], float],
        loop: asyncio.AbstractEventLoop,
        decided_in: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        """`decided_in` is told how long each decision took that was made at once."""
        self._router = router
        self._clock = clock
        self._loop = loop
        self._decided_in = decided_in
        self._waiting: dict[Ticket, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    async def enter(self, request: RouteRequest) -> Ticket:
        """Returns when the request may be decided; the caller must `leave` with the ticket. Raises `Overloaded`, and
        `Stopping` once it is closed."""
        if self._closed:
            raise Stopping
        came = self._clock()
        answer = self._router.admit(request, came)
        if isinstance(answer, Shed):
            raise refusal(answer.ticket)
        if isinstance(answer, Waiting):
            await self._wait(answer.ticket)
        elif answer.ticket.is_bound:
            self._decided_in(self._clock() - came)
        return answer.ticket

    def leave(self, ticket: Ticket) -> None:
        ticket.leave(self._clock())
        if self._waiting:
            self.release()

    def first_token(self, flight: Flight, now: float) -> None:
        """The replica's first output came: it can begin with the next prompt."""
        flight.first_token(now)
        if self._waiting:
            self.release()

    def release(self) -> None:
        """Something may have made room: let in whoever may go now, turn away who waited too long."""
        if not self._waiting:
            return
        released = self._router.release(self._clock())
        for ticket in released.ready:
            if (future := self._waiting.get(ticket)) is not None and not future.done():
                future.set_result(None)
        for ticket in released.shed:
            if (future := self._waiting.get(ticket)) is not None and not future.done():
                future.set_exception(refusal(ticket))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if released.again_at is not None:
            self._timer = self._loop.call_later(max(0.0, released.again_at - self._clock()), self.release)

    def close(self) -> bool:
        """The gateway stops: nobody is let in any more. Returns whether somebody waited, and is told now."""
        self._closed = True
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(Stopping())
        return bool(self._waiting)

    async def _wait(self, ticket: Ticket) -> None:
        """Raises `Overloaded` when shed, `Stopping` when closed. A client that leaves gives its place back."""
        future = self._waiting[ticket] = self._loop.create_future()
        self.release()
        try:
            await future
        except BaseException:
            if future.done() and not future.cancelled():
                future.exception()  # told too late, and heard
            self.leave(ticket)  # it may have been let in a moment ago: its place is free for the next
            raise
        finally:
            del self._waiting[ticket]


def refusal(ticket: Ticket) -> Overloaded:
    """What the client of a ticket that was shed is told."""
    reason = ticket.shed_reason or ShedReason.FULL
    return Overloaded(ticket.retry_after or 1.0, reason.value)
