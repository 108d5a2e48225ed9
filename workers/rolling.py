"""A rolling restart: replicas are renewed one after the other, and no request fails for it.

Each is drained first, so that the gateway sends it nothing new, and renewed when its last request has ended, or after
a bounded time. The next one's turn comes when it gets requests again. The order is by what would be lost: whoever's
cache is worth least goes first, judged anew each time, for what a drained replica held the others learn meanwhile.

It stops at the first replica that does not come back, with the others as they are: whatever broke this one (a new
version, a file that was changed) would break them, too.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence

from workers.keeper import Keeper, State
from workers.traffic import Traffic

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.1


class RollingStopped(Exception):
    """The message says at which replica and why."""


class Rolling:
    """`left`: whose turn has not come. `current`: whose it is. `problem`: why it stopped before the end."""

    def __init__(
        self,
        keepers: Sequence[Keeper],
        traffic: Traffic,
        *,
        drain_seconds: float,
        alone: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.left = list(keepers)
        self.current: Keeper | None = None
        self.renewed: list[Keeper] = []
        self.problem = ""
        self.is_over = False
        self._waits_for: Callable[[], str] = str
        self._traffic = traffic
        self._drain_seconds = drain_seconds
        self._alone = alone
        """Also where nobody stands in for it."""
        self._clock = clock

    @property
    def waits_for(self) -> str:
        """What the turn of `current` needs now."""
        return "" if self.is_over else self._waits_for()

    async def run(self) -> None:
        try:
            while self.left:
                self.current = self._least_worth()
                await self._renew(self.current)
                self.renewed.append(self.current)
        except RollingStopped as error:
            self.problem = str(error)
            log.error("the restart has stopped: %s", error)
        finally:
            self.current, self.is_over = None, True

    def _least_worth(self) -> Keeper:
        found = min(self.left, key=lambda one: (one.state is State.READY, self._traffic.cached_seconds(one.url)))
        self.left.remove(found)
        return found

    async def _renew(self, keeper: Keeper) -> None:
        traffic, url = self._traffic, keeper.url
        if keeper.state is State.READY:
            if not self._alone:
                await self._wait_stand_in(keeper)
            log.info("%s is drained for its restart: %d requests there", keeper.name, traffic.requests(url))
            self._waits_for = lambda: f"{traffic.requests(url)} requests there to end"
            traffic.drain(url, True)
            if not await self._wait(lambda: not traffic.requests(url), self._drain_seconds):
                log.warning("%s is restarted with %d requests there", keeper.name, traffic.requests(url))
        traffic.leave(url)  # at once: a request that can go nowhere else would still be sent there
        before = keeper.lives
        self._waits_for = lambda: f"it to get requests again; it is {keeper.state.value}"
        keeper.restart()
        await self._wait(lambda: keeper.lives > before and (keeper.state is State.GIVEN_UP or traffic.is_up(url)))
        if keeper.state is State.GIVEN_UP:
            raise RollingStopped(f"{keeper.name} does not come back: {keeper.last_end}")

    async def _wait_stand_in(self, keeper: Keeper) -> None:
        if not self._may_go(keeper.url):
            self._waits_for = lambda: "another replica that stands in for it"
            log.info("the restart of %s waits until somebody stands in for it", keeper.name)
            if not await self._wait(lambda: self._may_go(keeper.url), self._drain_seconds):
                raise RollingStopped(f"nobody stands in for {keeper.name}")

    def _may_go(self, url: str) -> bool:
        return not self._traffic.serves(url) or self._traffic.has_stand_in(url)

    async def _wait(self, condition: Callable[[], bool], seconds: float = math.inf) -> bool:
        """Whether it came true in time. The gateway's view changes with its probes, so it is looked at, not told."""
        deadline = self._clock() + seconds
        while not condition():
            if self._clock() >= deadline:
                return False
            await asyncio.sleep(LOOK_SECONDS)
        return True
