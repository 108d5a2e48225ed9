"""Notices: one line on stderr when a replica is taken out, comes back, falls asleep or is gone.

They are found by looking, not told by the core, so a replica that changes faster than the look costs one line, and the
back-off of an ejection bounds the rest.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from gateway.core.model import HealthState, ReplicaId, ReplicaStatistics

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
MAX_LINES = 20
"""For one look: when a whole fleet goes, the first of them say enough."""

UNKNOWN, UP, EJECTED, ASLEEP = HealthState.UNKNOWN, HealthState.UP, HealthState.EJECTED, HealthState.ASLEEP
TEXTS: dict[tuple[HealthState, HealthState], str] = {
    (UNKNOWN, UP): "is up",
    (EJECTED, UP): "is back",
    (ASLEEP, UP): "is awake",
    (UNKNOWN, EJECTED): "gets no requests: {reason}",
    (UP, EJECTED): "gets no requests: {reason}",
    (ASLEEP, EJECTED): "gets no requests: {reason}",
    (UNKNOWN, ASLEEP): "is asleep",
    (UP, ASLEEP): "is asleep",
    (EJECTED, ASLEEP): "is asleep",
}


class Notices:
    def __init__(self, replicas: Callable[[], Iterable[ReplicaStatistics]]) -> None:
        self._replicas = replicas
        self._known: dict[ReplicaId, HealthState] = {}

    async def run(self) -> None:
        while True:
            for line in self.look():
                log.info("%s", line)
            await asyncio.sleep(LOOK_SECONDS)

    def look(self) -> list[str]:
        """What has changed since the last look, a line each."""
        lines: list[str] = []
        known, self._known = self._known, {}
        for one in self._replicas():
            self._known[one.replica] = one.health
            text = TEXTS.get((known.pop(one.replica, UNKNOWN), one.health))
            if text is not None:
                lines.append(f"{one.replica} {text.format(reason=one.last_failure or 'no reason known')}")
        lines += [f"{replica} is gone" for replica in known]
        if len(lines) > MAX_LINES:
            lines[MAX_LINES:] = [f"and {len(lines) - MAX_LINES} replicas more have changed"]
        return lines
