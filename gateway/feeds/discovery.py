"""Discovery: which replicas exist. The configured URLs always; the addresses behind one DNS name as the resolver says;
those that are registered while the gateway runs (`registry.py`).

Every interval each name is resolved again and the whole set is reconciled, so nothing depends on having seen a change.
A resolver error keeps the last answer. A configured name whose address changed is another server now: it is removed and
added, which forgets what it held and opens new connections. What an operator drains stays drained through that.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping
from urllib.parse import urlsplit

from gateway.core.model import DrainRequested, Fact, ReplicaAdded, ReplicaId, ReplicaRemoved
from gateway.feeds.replicas import Replicas, keep_running

log = logging.getLogger(__name__)

Resolve = Callable[[str, int], Awaitable[frozenset[str]]]
"""(host, port) -> addresses; raises `OSError` or `UnicodeError`."""


async def resolve(host: str, port: int) -> frozenset[str]:
    """Addresses of one family: a pod of a dual-stack service has two addresses, and must not count as two replicas."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for family in (socket.AF_INET, socket.AF_INET6):
        addresses = frozenset(str(address[0]) for kind, _, _, _, address in found if kind == family)
        if addresses:
            return addresses
    raise OSError(f"{host} has no address")


class Discovery:
    """`static`: replica URL -> known prefill rate or `None`. `dns`: URL of the name whose addresses are replicas."""

    def __init__(
        self,
        replicas: Replicas,
        observe: Callable[[Fact], None],
        *,
        static: Mapping[str, float | None],
        dns: str | None = None,
        interval_seconds: float = 5.0,
        resolve: Resolve = resolve,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._replicas = replicas
        self._observe = observe
        self._static = {ReplicaId(url): rate for url, rate in static.items()}
        self._dns = dns
        self._interval_seconds = interval_seconds
        self._resolve = resolve
        self._sleep = sleep
        self._behind_dns: frozenset[ReplicaId] = frozenset()
        self._registered: dict[ReplicaId, float | None] = {}
        self._drained: set[ReplicaId] = set()
        self._returning: set[ReplicaId] = set()
        self._last_addresses: dict[ReplicaId, frozenset[str]] = {}

    async def run(self) -> None:
        """Reports the configured replicas before its first wait, then follows the names until cancelled."""
        self._reconcile()
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.Event().wait())  # without names to follow there is still nothing to return
            for replica in self._static:
                if _is_name(replica):
                    group.create_task(keep_running(self._follow, replica))
            if self._dns is not None:
                group.create_task(keep_running(self._follow, ReplicaId(self._dns)))

    def is_configured(self, replica: ReplicaId) -> bool:
        """Whether the file, or the name in it, says that it exists."""
        return replica in self._static or replica in self._behind_dns

    def source(self, replica: ReplicaId) -> str:
        """Who says that it exists: `configured`, `dns` or `registered`."""
        if replica in self._static:
            return "configured"
        return "dns" if replica in self._behind_dns else "registered"

    def note_registered(self, rates: Mapping[ReplicaId, float | None]) -> None:
        """These are registered now, and no others."""
        for replica in self._registered.keys() - rates.keys():
            if not self.is_configured(replica):
                self._drained.discard(replica)
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

    def is_drained(self, replica: ReplicaId) -> bool:
        return replica in self._drained

    def expect_back(self, replica: ReplicaId) -> None:
        """When it goes now, it is to come back."""
        self._returning.add(replica)

    async def _follow(self, url: ReplicaId) -> None:
        """A task for each name: a resolver that hangs on one must not delay the others."""
        host, port = _address(url)
        note = self._note_static if url in self._static else self._note_dns
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
                note(url, addresses)
            await self._sleep(self._interval_seconds)

    def _note_dns(self, url: ReplicaId, addresses: frozenset[str]) -> None:
        _, port = _address(url)
        scheme = urlsplit(url).scheme
        self._behind_dns = frozenset(ReplicaId(f"{scheme}://{bracketed(one)}:{port}") for one in addresses)
        self._reconcile()

    def _note_static(self, replica: ReplicaId, addresses: frozenset[str]) -> None:
        """Moved means that no old address is left: one more address behind the same name changes nothing."""
        before = self._last_addresses.get(replica)
        self._last_addresses[replica] = addresses
        if before is not None and before.isdisjoint(addresses):
            log.info("%s moved from %s to %s", replica, ", ".join(sorted(before)), ", ".join(sorted(addresses)))
            self._apply(removed=[replica], added=[replica])

    def _reconcile(self) -> None:
        wanted = dict.fromkeys([*self._static, *sorted(self._behind_dns), *self._registered])
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
        self._returning.difference_update(added)
        for replica in added:
            self._observe(ReplicaAdded(replica, self._static.get(replica, self._registered.get(replica))))
            if replica in self._drained:
                self._observe(DrainRequested(replica))


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _is_name(url: str) -> bool:
    """Whether the host can change its address. `localhost` cannot."""
    host, _ = _address(url)
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host != "localhost"
    return False
