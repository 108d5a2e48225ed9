"""A replica that just came back takes its share, and no more.

It has nothing in flight, so by every count of requests it is the least loaded, and all would go there until it has
caught up: to a cold cache, at a server that failed a moment ago. For some seconds it therefore counts as having more
requests in flight than it has: at first as many more as the others have in the mean, then ever fewer.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.core.model import ReplicaView
from gateway.core.replica import SETTLING_SECONDS, Replica


def seen(views: list[ReplicaView], candidates: Sequence[Replica], now: float) -> list[ReplicaView]:
    """The views, with more requests in flight for those that settle: a share of the mean of those that do not."""
    shares = [max(0.0, replica.settling_until - now) / SETTLING_SECONDS for replica in candidates]
    others = [view.in_flight for view, share in zip(views, shares, strict=True) if not share]
    if not others or len(others) == len(views):
        return views
    mean = sum(others) / len(others)
    return [
        view._replace(in_flight=view.in_flight + round(mean * share)) if share else view
        for view, share in zip(views, shares, strict=True)
    ]
