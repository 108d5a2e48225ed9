"""History: hit rate and time to first token of the last quarter of an hour.

The counters are there anyway, so nothing is counted for it: every few seconds they are looked at, and the difference to
the last look is a point. Hits are those of the engines' own counters; where an engine has none there is no rate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gateway.core.model import LoadSnapshot, ReplicaId, ReplicaStatistics
from gateway.series import TTFT_BOUNDS

STEP_SECONDS = 5.0
"""The least that shows a burst, and as often as replicas are scraped at most."""
POINTS = 180
"""A quarter of an hour."""


class Point(NamedTuple):
    at: float
    """Unix time of its end."""
    hit_rate: float | None
    ttft_p50: float | None
    ttft_p90: float | None
    first_tokens: int


class Hits:
    """Tokens that one replica looked up in its prefix cache, and found there, step by step."""

    def __init__(self) -> None:
        self._seen: tuple[int, int] | None = None
        self._steps: deque[tuple[int, int]] = deque(maxlen=POINTS)
        self._queries = self._hits = 0

    def step(self, load: LoadSnapshot | None) -> tuple[int, int]:
        """What came since the last look."""
        queries, hits = (None, None) if load is None else (load.prefix_queries, load.prefix_hits)
        step = (0, 0)
        if queries is not None and hits is not None:
            if self._seen is not None:
                before = self._seen if queries >= self._seen[0] else (0, 0)  # the replica began anew
                step = (queries - before[0], max(0, hits - before[1]))
            self._seen = (queries, hits)
        if len(self._steps) == POINTS:
            self._queries -= self._steps[0][0]
            self._hits -= self._steps[0][1]
        self._steps.append(step)
        self._queries += step[0]
        self._hits += step[1]
        return step

    @property
    def rate(self) -> float | None:
        return ratio(self._hits, self._queries)


class History:
    def __init__(self) -> None:
        self.points: deque[Point] = deque(maxlen=POINTS)
        self._hits: dict[ReplicaId, Hits] = {}
        self._ttft: list[int] = [0] * (len(TTFT_BOUNDS) + 1)

    def look(self, at: float, replicas: Iterable[ReplicaStatistics], ttft: list[int]) -> Point:
        """`ttft`: first tokens so far, by the buckets of `TTFT_BOUNDS`."""
        kept, queries, hits = dict[ReplicaId, Hits](), 0, 0
        for one in replicas:
            of_one = kept[one.replica] = self._hits.get(one.replica) or Hits()
            step = of_one.step(one.load)
            queries, hits = queries + step[0], hits + step[1]
        self._hits = kept
        counts = [new - old for new, old in zip(ttft, self._ttft, strict=True)]
        self._ttft = ttft
        point = Point(at, ratio(hits, queries), quantile(counts, 0.5), quantile(counts, 0.9), sum(counts))
        self.points.append(point)
        return point

    def hit_rate(self, replica: ReplicaId) -> float | None:
        found = self._hits.get(replica)
        return None if found is None else found.rate


def ratio(part: int, whole: int) -> float | None:
    return min(1.0, part / whole) if whole else None


def quantile(counts: Sequence[int], share: float) -> float | None:
    """As Prometheus reads it from a histogram: straight between the bounds, and the last bound beyond it."""
    wanted = share * sum(counts)
    if not wanted:
        return None
    below, lower = 0, 0.0
    for count, bound in zip(counts, TTFT_BOUNDS, strict=False):
        if below + count >= wanted:
            return lower + (bound - lower) * (wanted - below) / count
        below, lower = below + count, bound
    return TTFT_BOUNDS[-1]
