"""A request that was sent, until it ends: it gives back exactly what it booked, once."""

from __future__ import annotations

from collections.abc import Callable

from gateway.core.model import Decision, Outcome, ReplicaId, Usage
from gateway.core.replica import Replica

NEVER_RAN = frozenset(
    {Outcome.FAILED, Outcome.UNREACHABLE, Outcome.DRAINING, Outcome.EMPTY, Outcome.REFUSED, Outcome.REJECTED}
)
"""Outcomes that, without a first token, left nothing in the replica's cache. A client that left may have."""
Settle = Callable[["Flight", Outcome, float, Usage | None], None]
"""What the router does with a flight that ended."""


class Flight:
    """A request that was sent, until it ends. It gives back exactly what `Router.start` booked."""

    __slots__ = (
        "_ahead_tokens",
        "_booking",
        "_matched",
        "_sent",
        "_settle",
        "answered",
        "cached_tokens",
        "decision",
        "finished",
        "first_token_at",
        "record",
        "request",
        "started_at",
        "to",
    )

    def __init__(self, settle: Settle, replica: Replica, decision: Decision, ahead_tokens: float, now: float) -> None:
        view = decision.ranking[0][0]
        self._settle = settle
        self._sent = True
        self.decision = decision
        self.to = replica
        self.request = decision.request
        self.started_at = now
        self.first_token_at: float | None = None
        self.finished = False
        self.answered = False
        """The replica itself said how it ended: where that is a failure, the request may have caused it."""
        self.cached_tokens = view.cached_tokens
        """Predicted."""
        self._ahead_tokens = ahead_tokens
        uncached = view.prompt_tokens - view.cached_tokens
        self._booking = replica.load.book(view.prompt_tokens, uncached, now, decision.request.streams)
        self._matched, self.record = replica.index.touch(decision.request.blocks, now)

    @property
    def replica(self) -> ReplicaId:
        return self.to.id

    def __repr__(self) -> str:
        state = "finished" if self.finished else "decoding" if self.first_token_at is not None else "in prefill"
        return f"<Flight to {self.to.id}, {state}, since {self.started_at:.3f}>"

    def first_token(self, now: float) -> None:
        """The first byte of output came: prefill is done. Repeating it changes nothing."""
        if self.first_token_at is None and not self.finished:
            self.first_token_at = now
            self.to.load.prefilled(self._booking, now)

    def finish(self, outcome: Outcome, now: float, usage: Usage | None = None) -> None:
        """The request ended. Exactly once; a second call is a bug of the caller, and changes nothing."""
        assert not self.finished, f"{self!r} was finished twice"
        if self.finished:
            return
        self.finished = True
        self.to.load.release(self._booking, now, ran=outcome is Outcome.COMPLETED)
        if self.record is not None:
            self.to.index.ended(self.record)
        never_ran = self.first_token_at is None and (outcome in NEVER_RAN or not self._sent)
        if self.record is not None and never_ran:
            self.to.index.take_back(self.record, self._matched)
        self._settle(self, outcome, now, usage)

    def withdraw(self, now: float) -> None:
        """Its client left before anything was sent."""
        self._sent = False
        self.finish(Outcome.CLIENT_LEFT, now)

    def teach_rate(self, usage: Usage | None) -> None:
        """Tell the replica's rate what the time to first token says, with the replica's own counts where it gave
        any."""
        if self.first_token_at is None:
            return
        own = self._booking.uncached_tokens
        if usage is not None and usage.prompt_tokens is not None and usage.cached_tokens is not None:
            own = float(usage.prompt_tokens - usage.cached_tokens)
        self.to.rate.learn_flight(own, self._ahead_tokens, self.first_token_at - self.started_at)
