"""Gateways in front of the same replicas share what they know, through one stream of a Redis or Valkey.

Each gateway adds what it has done to the stream, and reads what the others did: 40 times a second, in one round trip.
The facts go into its own router, which stays the one place where anything is decided. Nothing on the way of a request
waits for Redis, or asks it anything.

**Redis is a convenience.** Every round has a time limit; one that fails is tried again after half a second, a second,
and then every two. Until it is back each gateway decides by what it knows, and by a hash where that leaves a choice
(`core.pickers.agreed`), and keeps a bounded journal. What a failed round had taken out goes back there.

**The stream is bounded, and is the snapshot.** It is cut at the configured size by whoever adds to it. A gateway that
starts reads all of it, so it knows what was sent where before its first decision: as old as it is, since the oldest
blocks are the first to go. Reports of load are believed only when they are fresh.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from functools import partial

from redis.asyncio.client import Pipeline

from gateway.core.model import HealthState, PeerFact, PeerReported
from gateway.core.router import Router
from gateway.core.sharing import REPORT_SECONDS, ROUND_SECONDS, Journal, Outbox, credible
from gateway.feeds.peer_entries import Receiver, Sender, Told
from gateway.feeds.redis_link import RedisLink, in_short
from gateway.feeds.sealing import Refused, RefusedFor, sender_of
from gateway.fleet_limits import FleetLimits
from gateway.series import PeerSeries

log = logging.getLogger(__name__)

BACK_OFF_SECONDS = (0.5, 1.0, 2.0)
"""After the first, second and every further failure in a row: with the time limit, back within 3 s of its return."""
READ_ENTRIES = 16
"""Of one round. Only a gateway that has just started finds as many, and reads on at once."""
KEEP_SECONDS = 3_600
"""The stream is gone so long after the last gateway: no cache is warm for longer."""
START_SECONDS = 5.0
"""Wait so long for replicas that are up before the stream is read: facts about replicas that are not known are lost."""
ENTRY_OVERHEAD_BYTES = 96
"""Of an entry in Redis beside its payload: id, field, and its share of a node."""
LONG_ENTRY_BYTES = 4_096
"""From here on an entry takes up to a millisecond to observe."""
MARKS = 64
FIELD = b"e"
START = b"0-0"


class StreamMarks:
    """Where the stream has to be cut to stay below its size: ids of entries, a sixty-fourth of the size apart."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._marks: deque[tuple[bytes, int]] = deque()
        """Id of the first entry, and bytes from there to the next mark."""
        self._bytes = 0

    def note(self, id: bytes, size: int) -> None:
        """The next entry of the stream."""
        if self._marks and self._marks[-1][1] < self._max_bytes // MARKS:
            first, bytes_ = self._marks.pop()
            self._marks.append((first, bytes_ + size))
        else:
            self._marks.append((id, size))
        self._bytes += size
        while self._bytes > self._max_bytes and len(self._marks) > 1:
            self._bytes -= self._marks.popleft()[1]

    @property
    def first(self) -> bytes | None:
        """The oldest entry that may stay."""
        return self._marks[0][0] if self._marks else None

    def clear(self) -> None:
        self._marks.clear()
        self._bytes = 0


class Peers:
    """Shares this gateway's view with the others, and theirs with its router. `run` never ends by itself."""

    def __init__(
        self,
        router: Router,
        on_heard: Callable[[], None],
        series: PeerSeries,
        *,
        url: str,
        name: str,
        secret: bytes,
        max_bytes: int,
        clock: Callable[[], float],
        limits: FleetLimits | None = None,
    ) -> None:
        """`on_heard` is called after facts were observed. Gives the router its journal. `limits`: of keys, where there
        are any."""
        self._router = router
        self._limits = limits
        router.journal = Journal(beside=router.journal)
        self._on_heard = on_heard
        self._series = series
        self._clock = clock
        self._sender = Sender(secret, name)
        self._outbox = Outbox(router.journal, partial(router.report_to_peers, self._sender.name.hex()))
        self._receiver = Receiver(secret, name, self._sender.name)
        self.siblings: set[bytes] = set()
        """Names of gateways that are heard in another way already."""
        self._key = f"{name}:view:1".encode()
        self._marks = StreamMarks(max_bytes)
        self._position = START
        self._newest_ms = 0
        """Of the stream's newest entry, by the clock of Redis."""
        self._link = RedisLink(url)
        self._failures = 0
        """In a row."""
        self._worked_at = float("-inf")

    @property
    def name(self) -> bytes:
        """What the others know this gateway by."""
        return self._sender.name

    async def run(self) -> None:
        try:
            await until_known(self._router, self._clock)
            while True:
                try:
                    await self._find_position()
                    await self._exchange()
                except Exception as error:  # whatever a broken server makes of the client: the view is not worth more
                    self._note_connected(False)
                    self._series.failures += 1
                    if not self._failures:
                        log.warning(
                            "Redis at %s: %s; deciding alone until it is back", self._link.place, in_short(error)
                        )
                    self._deem_alone()
                    await self._link.close()
                    await asyncio.sleep(BACK_OFF_SECONDS[min(self._failures, len(BACK_OFF_SECONDS) - 1)])
                    self._failures += 1
        finally:
            await self._link.close()

    def _note_connected(self, connected: bool) -> None:
        self._series.connected = connected
        self._router.cut_off = not connected

    def _deem_alone(self) -> None:
        """With those in mind who were there until now."""
        if self._limits is not None:
            others = [at for at in self._series.heard.values() if at >= self._worked_at - REPORT_SECONDS]
            self._limits.be_alone(len(others), self._clock())

    async def _find_position(self) -> None:
        """Where to read on: at the start if the stream is another one, or its clock went back."""
        (newest,) = await self._link.ask(lambda pipeline: pipeline.xrevrange(self._key, count=1))
        self._newest_ms = milliseconds(newest[0][0]) if newest else 0
        if not newest or order(newest[0][0]) < order(self._position):
            self._position = START
            self._marks.clear()

    async def _exchange(self) -> None:
        """Rounds without end. Raises what the client raises."""
        while True:
            now = self._clock()
            bundles = self._outbox.bundles(now)
            try:
                found = await self._round(self._entries(bundles, now))
            except Exception:
                self._outbox.put_back(bundles)
                raise
            self._note_success()
            await self._hear(found)
            if len(found) < READ_ENTRIES:
                if self._limits is not None:
                    self._limits.join(self._clock())
                await asyncio.sleep(ROUND_SECONDS)

    def _entries(self, bundles: list[list[PeerFact]], now: float) -> list[bytes]:
        """What keys spent goes with the first. It is told only when all is heard that was spent before, so that it
        comes off in the same order everywhere."""
        limits = self._limits
        uses = [] if limits is None or limits.is_alone else limits.outside.uses(now)
        if uses and not bundles:
            bundles = [[]]
        return [self._sender.entry(facts, () if number else uses) for number, facts in enumerate(bundles)]

    def _note_success(self) -> None:
        """Of a whole round: a Redis that is full can be read all the time, and takes nothing."""
        if self._failures:
            log.info("Redis at %s is back: the view is shared again", self._link.place)
        self._failures = 0
        self._note_connected(True)
        self._worked_at = self._clock()
        if self._limits is not None and not self._limits.is_alone:
            self._limits.told_outside(self._worked_at)

    async def _round(self, entries: list[bytes]) -> list[tuple[bytes, dict[bytes, bytes]]]:
        def commands(pipeline: Pipeline) -> None:
            for entry in entries:
                pipeline.xadd(self._key, {FIELD: entry})
            if entries:
                if (first := self._marks.first) is not None:
                    pipeline.xtrim(self._key, minid=first, approximate=False)
                pipeline.expire(self._key, KEEP_SECONDS)
            pipeline.xread({self._key: self._position}, count=READ_ENTRIES)

        answers = await self._link.ask(commands)
        self._series.sent += len(entries)
        if entries:  # so its clock says now
            self._newest_ms = max(self._newest_ms, milliseconds(answers[0]))
        return answers[-1][0][1] if answers[-1] else []

    async def _hear(self, found: list[tuple[bytes, dict[bytes, bytes]]]) -> None:
        if not found:
            return
        self._newest_ms = max(self._newest_ms, milliseconds(found[-1][0]))
        heard = False
        for id, fields in found:
            self._position = id
            entry = fields.get(FIELD, b"")
            self._marks.note(id, sum(map(len, fields)) + sum(map(len, fields.values())) + ENTRY_OVERHEAD_BYTES)
            if sender_of(entry) in self.siblings:
                continue
            try:
                told = self._receiver.read(entry)
            except Refused as refused:
                self._refuse(refused.reason)
                continue
            if told is not None:
                heard = heard or bool(told.facts)
                self._series.received += 1
                self._observe(told, (self._newest_ms - milliseconds(id)) / 1e3)
            if len(entry) > LONG_ENTRY_BYTES:
                await asyncio.sleep(0)  # requests first
        if heard:
            self._on_heard()

    def _observe(self, told: Told, age_seconds: float) -> None:
        now = self._clock()
        age_seconds = min(max(0.0, age_seconds), KEEP_SECONDS)
        if self._limits is not None:
            self._limits.hear(told.peer, told.uses, now - age_seconds, now)
        for fact in credible(told.facts, age_seconds):
            if isinstance(fact, PeerReported):
                self._series.heard[fact.peer] = now
            self._router.observe(fact, now - age_seconds)
        if len(self._series.heard) > 1:
            self._series.forget_before(now - REPORT_SECONDS)

    def _refuse(self, reason: RefusedFor) -> None:
        refused = self._series.refused
        if reason is RefusedFor.FORGED and not refused[reason.value,]:
            log.warning("Redis at %s: an entry is not made with our secret; such are ignored", self._link.place)
        refused[reason.value,] += 1


async def until_known(router: Router, clock: Callable[[], float]) -> None:
    """Waits a moment for replicas that have been heard of: facts about others are lost."""
    until = clock() + START_SECONDS
    while clock() < until:
        replicas = router.statistics(clock()).replicas
        if replicas and all(one.health is not HealthState.UNKNOWN for one in replicas):
            return
        await asyncio.sleep(ROUND_SECONDS)


def milliseconds(id: bytes) -> int:
    return order(id)[0]


def order(id: bytes) -> tuple[int, int]:
    """Of ids of a stream: milliseconds and number. Raises `ValueError`."""
    first, _, second = id.partition(b"-")
    return int(first), int(second)
