"""Order of the candidates once they have costs: cheapest first, ties broken without a preference for anybody.

Ties go to the fewest in flight, then to a draw. The draw is a pure function of the number of requests started so far:
each run of n draws among n candidates is one permutation of them, so even a tie between the same replicas for ever
spreads evenly, and no rhythm in the traffic can line up with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from xxhash import xxh3_64_intdigest

from gateway.core.model import Cost, ReplicaView

Ranking = tuple[tuple[ReplicaView, Cost], ...]


def ranked(views: Sequence[ReplicaView], costs: Sequence[Cost], draw: int, margin: float = 0.0) -> Ranking:
    """Candidates in order of cost. Those within `margin` (a share of the lowest cost) of the best count as tied with
    it."""
    if len(views) == 1:
        return ((views[0], costs[0]),)
    keys = [(cost.total, view.in_flight) for view, cost in zip(views, costs, strict=True)]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    best = keys[order[0]]
    if keys[order[1]][0] <= best[0] * (1.0 + margin):
        order = _settled(order, keys, views, draw, best[0] * (1.0 + margin))
    return tuple([(views[i], costs[i]) for i in order])


def _settled(
    order: list[int], keys: list[tuple[float, int]], views: Sequence[ReplicaView], draw: int, limit: float
) -> list[int]:
    """The same order with its tied head sorted by requests in flight, then by draw."""
    tied = [i for i in order if keys[i][0] <= limit]
    fewest = min(keys[i][1] for i in tied)
    drawn = shuffled([i for i in tied if keys[i][1] == fewest], [views[i].replica for i in range(len(views))], draw)
    rest = sorted((i for i in tied if keys[i][1] != fewest), key=lambda i: (keys[i][1], keys[i][0]))
    return drawn + rest + order[len(tied) :]


def shuffled(positions: list[int], names: Sequence[str], draw: int) -> list[int]:
    """Positions in an order drawn without memory: draws n*k to n*k + n - 1 put each of n positions first once."""
    count = len(positions)
    if count == 1:
        return positions
    turn, offset = divmod(draw, count)
    hashed = sorted((xxh3_64_intdigest(names[i].encode(), turn), i) for i in positions)
    order = list(map(itemgetter(1), hashed))
    return order[offset:] + order[:offset]
