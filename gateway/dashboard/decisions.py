"""Decisions: the last ones with their reason and the cost of each candidate, and what became of the request.

A ring in memory. It has numbers, names of replicas and models, and request ids; no prompt text, no block hashes, no
session. The data path adds a tuple for each flight; everything else happens when somebody looks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from gateway.core.model import Decision
from gateway.rankings import Ranking, ranked_rows, shortened, why
from gateway.request_log import RequestRecord, clean

KEPT = 200
"""Some minutes of a calm fleet; a megabyte or two of a large one."""


class Entry(NamedTuple):
    number: int
    at: float
    """Unix time."""
    record: RequestRecord
    """The request's own, still being filled while it runs."""
    attempt: int
    policy: str
    reason: str
    ranking: Ranking
    candidates: int
    """How many there were; `ranking` has the best of them."""

    @property
    def is_over(self) -> bool:
        """It ended, or the request was sent elsewhere."""
        return self.record.duration_seconds > 0.0 or self.record.attempts > self.attempt


class Decisions:
    """`note` is called for each flight."""

    def __init__(self, wall_clock: Callable[[], float]) -> None:
        self._wall_clock = wall_clock
        self._ring: deque[Entry] = deque(maxlen=KEPT)
        self.last = 0
        """Number of the newest."""

    def note(self, record: RequestRecord, decision: Decision) -> None:
        self.last += 1
        ranking, reason = shortened(decision.ranking), decision.reason.value
        total = len(decision.ranking)
        self._ring.append(
            Entry(self.last, self._wall_clock(), record, record.attempts, decision.policy, reason, ranking, total)
        )

    def newest_first(self, limit: int, after: int = 0) -> Iterator[Entry]:
        """At most `limit` of those whose number is larger than `after`."""
        for entry, _ in zip(reversed(self._ring), range(limit), strict=False):
            if entry.number <= after:
                return
            yield entry


def shown(entry: Entry) -> dict[str, Any]:
    """An entry as JSON."""
    record = entry.record
    return {
        "number": entry.number,
        "at": round(entry.at, 3),
        "request_id": clean(record.request_id),
        "route": record.route,
        "model": clean(record.model),
        "tenant": record.tenant,
        "attempt": entry.attempt,
        "policy": entry.policy,
        "reason": entry.reason,
        "replica": entry.ranking[0][0].replica,
        "why": why(entry.reason, entry.ranking),
        "candidates": entry.candidates,
        "ranking": ranked_rows(entry.ranking),
        "end": ended(entry),
    }


def ended(entry: Entry) -> dict[str, Any] | None:
    """How it ended; `None` while it runs."""
    record = entry.record
    if not entry.is_over:
        return None
    if record.attempts > entry.attempt:
        return {"outcome": "moved", "error": ""}
    return {
        "outcome": record.outcome,
        "error": record.error,
        "status": record.status,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "completion_tokens": record.completion_tokens,
        "waited_seconds": record.waited_seconds,
        "overhead_seconds": record.overhead_seconds,
        "ttft_seconds": record.ttft_seconds,
        "duration_seconds": record.duration_seconds,
    }
