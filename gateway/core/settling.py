"""A replica that just came back takes its share, and no more.

It has nothing in flight, so by every count of requests it is the least loaded, and all would go there until it has
caught up: to a cold cache, at a server that failed a moment ago. For some seconds it therefore counts as having as many
requests in flight as the others have in the mean.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.core.model import ReplicaView
from gateway.core.replica import Replica


def seen(views: list[ReplicaView], candidates: Sequence[Replica], now: float) -> list[ReplicaView]:
    """The views, with the requests in flight of those that settle raised to the mean of those that do not."""
    settling = [now < replica.settling_until for replica in candidates]
    others = [view.in_flight for view, settles in zip(views, settling, strict=True) if not settles]
    if not others or len(others) == len(views):
        return views
    mean = round(sum(others) / len(others))
    return [
        view._replace(in_flight=mean) if settles and view.in_flight < mean else view
        for view, settles in zip(views, settling, strict=True)
    ]
