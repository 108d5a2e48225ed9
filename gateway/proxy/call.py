"""One client request as it came, and what it holds here until it ends: bytes of the budget, a place within the limits
of its key. Whoever has a call sees to it that both are given back: `FrontDoor.serve` once it is served, `drop` else."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.limits import Caller, Stay
from gateway.proxy.body_budget import BodyBudget
from gateway.proxy.endpoints import Endpoint
from gateway.proxy.errors import UpstreamError
from gateway.proxy.exchange import Exchange
from gateway.proxy.upstream import Header
from gateway.trace_context import RequestTrace


@dataclass(slots=True)
class Call:
    method: bytes
    target: bytes
    """Path and query exactly as received; exactly this is forwarded."""
    endpoint: Endpoint
    headers: list[Header]
    """Names in lower case, order and repetition kept."""
    body: bytes
    received_at: float
    response_id: str | None = None
    """Id in the path of a stored response."""
    keep_alive: bool = True
    """The client will send more on this connection."""
    http_1_0: bool = False
    """The client does not understand chunked bodies."""
    exchange: Exchange | None = None
    """Who serves it: set by who starts it, for the deadline."""
    overdue: bool = False
    """Its deadline has passed, and cancelled the exchange."""
    caller: Caller | None = None
    """Whose key it came with; `None` while nobody is asked for one."""
    stay: Stay | None = None
    """Its place within the limits of that key, from its head on; `None` when that was not the time to ask."""
    budget: BodyBudget | None = None
    held: int = 0
    """Bytes of the budget that its body takes."""
    background: bool = False
    """Its answer may come before the work is done."""
    made: str | None = None
    """Id of the stored response that it makes, as far as known."""
    claimed: str | None = None
    """The id that it asked for, while nobody else may have it."""
    lost: UpstreamError | None = None
    """How it was first lost unanswered, perhaps by a replica that had begun with it: once more is all it gets."""

    trace: RequestTrace | None = None
    """Where traces are on."""

    def let_go(self) -> None:
        """Of the body: it is not sent again. Repeating it changes nothing."""
        self.body = b""
        if self.budget is not None:
            self.budget.give_back(self.held)
            self.held = 0

    def end_overdue(self) -> None:
        """Its deadline has passed."""
        if self.exchange is not None:
            self.overdue = True
            self.exchange.cancel()

    def honest(self, error: Exception) -> Exception:
        """What the client is told. That nobody else could be asked must not hide that it may have been begun."""
        begun = isinstance(error, UpstreamError) and error.executed
        return error if begun or self.lost is None else self.lost

    def drop(self, now: float, *, refused: bool = False) -> None:
        """It is never served: it was refused, or its client left first."""
        self.let_go()
        if self.stay is not None:
            self.stay.leave(0, now, refused=refused)
