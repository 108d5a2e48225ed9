"""Discovery: which replicas exist. The configured ones always; those that its sources name (`sources.py`: a DNS name, a
service record, a file); those that are registered while the gateway runs (`registry.py`).

Every look at a source reconciles the whole set, over all of them together: a replica that two name exists once, and
goes when none names it any more. So nothing depends on having seen a change. A source that fails keeps its last answer.

A name whose address changed is another server now: it is removed and added, which forgets what it held and opens new
connections. What an operator drains stays drained through that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from gateway.core.model import DrainRequested, Fact, ReplicaAdded, ReplicaId, ReplicaRemoved
from gateway.feeds.replicas import Replicas, keep_running, watch_each
from gateway.feeds.sources import Resolve, Source, SourceFailed, address_of, is_name, resolve

log = logging.getLogger(__name__)


class Discovery:
    """`static`: replica URL -> known prefill rate or `None`."""

    def __init__(
        self,
        replicas: Replicas,
        observe: Callable[[Fact], None],
        *,
        static: Mapping[str, float | None],
        sources: Sequence[Source] = (),
        interval_seconds: float = 5.0,
        longest_interval_seconds: float = 5.0,
        resolve: Resolve = resolve,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._replicas = replicas
        self._observe = observe
        self._static = {ReplicaId(url): rate for url, rate in static.items()}
        self._named: dict[Source, Mapping[ReplicaId, float | None]] = {source: source.known for source in sources}
        """What each source said last."""
        self._interval_seconds = interval_seconds
        self._longest_interval_seconds = max(interval_seconds, longest_interval_seconds)
        self._resolve = resolve
        self._sleep = sleep
        self._registered: Mapping[ReplicaId, float | None] = {}
        self._drained: set[ReplicaId] = set()
        self.drain_is_over: Callable[[ReplicaId], None] = lambda replica: None
        """Hears of a drained replica that is registered no more: the next at this URL is another one."""
        self._returning: set[ReplicaId] = set()
        self._last_addresses: dict[ReplicaId, frozenset[str]] = {}

    async def run(self) -> None:
        """Reports the configured replicas before its first wait, then follows sources and names until cancelled."""
        self._reconcile()
        async with asyncio.TaskGroup() as group:
            group.create_task(watch_each(self._replicas, self._follow, only=is_name))
            for source in self._named:
                group.create_task(keep_running(self._look, source))

    def is_configured(self, replica: ReplicaId) -> bool:
        """Whether the configuration, or what it points to, says that it exists."""
        return replica in self._static or any(replica in named for named in self._named.values())

    def source(self, replica: ReplicaId) -> str:
        """Who says that it exists: `configured`, `dns`, `file` or `registered`."""
        if replica in self._static:
            return "configured"
        return next((source.label for source, named in self._named.items() if replica in named), "registered")

    def note_registered(self, rates: Mapping[ReplicaId, float | None]) -> None:
        """These are registered now, and no others."""
        for replica in self._registered.keys() - rates.keys():
            if not self.is_configured(replica) and replica in self._drained:
                self._drained.discard(replica)
                self.drain_is_over(replica)
        self._registered = dict(rates)
        self._reconcile()

    def drain(self, replica: ReplicaId, draining: bool) -> bool:
        """An operator wants it to get no new requests, or to get them again. Returns whether there is such a one."""
        if replica not in self._replicas:
            return False
        if draining:
            self._drained.add(replica)
        else:
            self._drained.discard(replica)
        self._observe(DrainRequested(replica, draining))
        return True

    def expect(self, replica: ReplicaId, *, drained: bool) -> None:
        """Whether it gets no requests when it comes; an operator has decided so elsewhere."""
        if drained:
            self._drained.add(replica)
        else:
            self._drained.discard(replica)

    def is_drained(self, replica: ReplicaId) -> bool:
        return replica in self._drained

    def expect_back(self, replica: ReplicaId) -> None:
        """When it goes now, it is to come back."""
        self._returning.add(replica)

    async def _look(self, source: Source) -> None:
        """A task for each source: one that hangs must not delay the others."""
        said: set[str] = set()
        """Problems since it last worked: each is said once."""
        while True:
            wait = self._interval_seconds
            try:
                found = await source.look()
            except SourceFailed as error:
                if str(error) not in said:
                    log.warning("%s: %s; its last replicas stay", source.place, error)
                said.add(str(error))
            else:
                if said:
                    log.info("%s works again", source.place)
                said.clear()
                self._named[source] = found.replicas
                self._reconcile()
                wait = min(max(wait, found.good_for_seconds), self._longest_interval_seconds)
            await self._sleep(wait)

    async def _follow(self, replica: ReplicaId) -> None:
        """... and for each name."""
        host, port = address_of(replica)
        failing = False
        while True:
            try:
                addresses = await self._resolve(host, port)
            except (OSError, UnicodeError) as error:
                if not failing:
                    log.warning("%s does not resolve, keeping the last addresses: %s", host, error)
                failing = True
            else:
                if failing:
                    log.info("%s resolves again", host)
                failing = False
                self._note_addresses(replica, addresses)
            await self._sleep(self._interval_seconds)

    def _note_addresses(self, replica: ReplicaId, addresses: frozenset[str]) -> None:
        """Moved means that no old address is left: one more address behind the same name changes nothing."""
        before = self._last_addresses.get(replica)
        self._last_addresses[replica] = addresses
        if before is not None and before.isdisjoint(addresses):
            log.info("%s moved from %s to %s", replica, ", ".join(sorted(before)), ", ".join(sorted(addresses)))
            self._apply(removed=[replica], added=[replica])

    def _wanted(self) -> dict[ReplicaId, float | None]:
        """All that exist, with the first rate that anybody knows."""
        wanted: dict[ReplicaId, float | None] = {}
        for named in (self._static, *self._named.values(), self._registered):
            for replica, rate in named.items():
                if wanted.get(replica) is None:
                    wanted[replica] = rate
        return wanted

    def _reconcile(self) -> None:
        wanted = self._wanted()
        self._apply(
            removed=[replica for replica in self._replicas if replica not in wanted],
            added=[replica for replica in wanted if replica not in self._replicas],
        )

    def _apply(self, *, removed: Iterable[ReplicaId], added: Iterable[ReplicaId]) -> None:
        removed, added = list(removed), list(added)
        if not removed and not added:
            return
        self._replicas.update(removed=removed, added=added)
        for replica in removed:
            self._observe(ReplicaRemoved(replica, returns=replica in added or replica in self._returning))
            if replica not in added:
                self._last_addresses.pop(replica, None)
        self._returning.difference_update(added)
        wanted = self._wanted()
        for replica in added:
            self._observe(ReplicaAdded(replica, wanted[replica]))
            if replica in self._drained:
                self._observe(DrainRequested(replica))
