"""Notices: one line on stderr when a replica is taken out, comes back, falls asleep or is gone; and when none is up.

They are found by looking, not told by the core, so a replica that changes faster than the look costs one line, and the
back-off of an ejection bounds the rest.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

from gateway.core.model import HealthState, ReplicaId, ReplicaStatistics

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
NONE_UP_SECONDS = 10.0
"""With nobody up before it is said: after the start they need a moment to be found."""
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
    def __init__(
        self, replicas: Callable[[], Iterable[ReplicaStatistics]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._replicas = replicas
        self._clock = clock
        self._some_up_at = clock()
        self._said_none_up = False
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
        if self._has_none_up():
            lines.append(f"no replica is up, of {len(self._known)}: requests will fail")
        return lines

    def _has_none_up(self) -> bool:
        """True once, when those that there are have been down for a while."""
        now = self._clock()
        if not self._known or UP in self._known.values():
            self._some_up_at, self._said_none_up = now, False
        is_news = not self._said_none_up and now - self._some_up_at >= NONE_UP_SECONDS
        self._said_none_up |= is_news
        return is_news
