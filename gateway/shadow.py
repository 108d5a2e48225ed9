"""Shadow policies: what others would have decided, asked about each live decision and only counted.

A shadow is asked just before the live decision is booked, about the same candidates as the live policy saw them. So a
second opinion costs some microseconds of a request and nothing else: whatever a shadow answers, or raises, the request
goes where the live policy sends it.

What the figures mean, and what not: index and queues are those that the *live* policy made. They tell what one other
choice would have cost here and now, by the live policy's own price; not how the fleet would look after a day under the
shadow, whose choices would have left other prefixes elsewhere. For that there is the replay.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from gateway.core.model import Decision
from gateway.core.policy import Policy

log = logging.getLogger(__name__)


class Reconsiders(Protocol):
    """What is needed of the router."""

    def reconsider(self, decision: Decision, now: float, policy: Policy) -> Decision: ...


class Counts(Protocol):
    """Where the answers of one shadow are counted (`gateway.series.ShadowSeries`)."""

    def agreed(self, live: Decision) -> None: ...
    def differed(self, live: Decision, shadow: Decision, regret_seconds: float) -> None: ...
    def failed(self) -> None: ...


class Shadows:
    """Policies and where to count what each would have done."""

    def __init__(self, router: Reconsiders, shadows: Sequence[tuple[Policy, Counts]]) -> None:
        self._router = router
        self._shadows = tuple(shadows)
        self._reported: set[str] = set()

    def __repr__(self) -> str:
        return f"<Shadows {', '.join(policy.name for policy, _ in self._shadows)}>"

    def compare(self, decision: Decision, now: float) -> None:
        """Ask everybody about a decision that is about to be started. Raises nothing."""
        for policy, counts in self._shadows:
            try:
                other = self._router.reconsider(decision, now, policy)
                if other.replica == decision.replica:
                    counts.agreed(decision)
                else:
                    counts.differed(decision, other, regret_seconds(decision, other))
            except Exception:  # a policy on trial must never harm the request that it is asked about
                counts.failed()
                if policy.name not in self._reported:  # once is enough: it may fail for every request
                    self._reported.add(policy.name)
                    log.exception("shadow policy %s failed; further failures are only counted", policy.name)


def regret_seconds(live: Decision, shadow: Decision) -> float:
    """How much dearer the live policy holds the shadow's choice. Never negative: its own is the cheapest to it."""
    price = next(cost.total for view, cost in live.ranking if view.replica == shadow.replica)
    return price - live.ranking[0][1].total
