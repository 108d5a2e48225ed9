"""DNS service records (SRV): which hosts serve, and at which ports. Each address of each host is a replica; with https
each host is, for its certificate proves the name.

Of the priorities the first counts, and the next is added while nobody of those before it can serve. Weights do not
count: shares of the traffic are the router's business, which sees load and caches.

No answer is ever taken for "none": a name that is not there, an empty answer, a server that fails or is silent leave
the last replicas. What is gone for good fails its probes, whereas a server's mistake would empty the fleet. `.` as the
only host is how DNS says that there are none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import dns.asyncresolver
import dns.exception
import dns.name
import dns.resolver
from dns.rdatatype import RdataType

from gateway.config import is_host
from gateway.core.model import ReplicaId
from gateway.feeds.sources import Found, SourceFailed, Standing, replica_at

QUERY_SECONDS = 1.0
"""For one server to answer once; then it, or the next one, is asked again."""
LOOK_UP_SECONDS = 3.0
"""For one name with all servers and repetitions."""
MAX_HOSTS = 256
"""As many as the registry takes."""
MAX_ASKED = 16
"""Hosts that are looked up at the same time."""
PROBLEMS: tuple[tuple[type[dns.exception.DNSException], str], ...] = (
    (dns.resolver.NXDOMAIN, "does not exist (NXDOMAIN)"),
    (dns.resolver.NoAnswer, "has no such record"),
    (dns.resolver.NoNameservers, "no name server gives an answer (SERVFAIL, REFUSED or broken)"),
    (dns.resolver.LifetimeTimeout, "no name server answers in time"),
    (dns.resolver.NoResolverConfiguration, "no name server is configured"),
)
"""The library's own messages have times and addresses in them, each time others."""


@dataclass(frozen=True, slots=True)
class Host:
    priority: int
    name: str
    port: int


class ServiceRecords:
    """A source. `standing` tells of all replicas of the gateway."""

    label = "dns"

    def __init__(
        self, scheme: str, name: str, standing: Callable[[], Standing], nameserver: tuple[str, int] | None = None
    ) -> None:
        self.place = name
        self.known: Mapping[ReplicaId, float | None] = {}
        self._scheme = scheme
        self._standing = standing
        self._nameserver = nameserver
        self._addresses: dict[str, tuple[str, ...]] = {}
        """Last answer for each host."""
        self._last: frozenset[ReplicaId] = frozenset()
        self._asking = asyncio.Semaphore(MAX_ASKED)

    async def look(self) -> Found:
        try:
            return await self._look()
        finally:
            # The resolver waits with `asyncio.wait_for`. Before Python 3.12 that loses a cancellation that comes
            # together with the answer, and who looks again and again would never end.
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise asyncio.CancelledError

    async def _look(self) -> Found:
        try:
            resolver = self._resolver()
            answer = await resolver.resolve(self.place, RdataType.SRV, search=True)
        except (dns.exception.DNSException, OSError) as error:
            raise SourceFailed(problem(error)) from error
        hosts, seconds = hosts_of(answer), float(answer.rrset.ttl if answer.rrset is not None else 0)
        if self._scheme == "https":
            levels = by_priority([(host, (host.name,)) for host in hosts], "https")
        else:
            found = await asyncio.gather(*(self._look_up(resolver, host.name) for host in hosts))
            self._addresses = {host.name: addresses for host, (addresses, _) in zip(hosts, found, strict=True)}
            seconds = min([seconds, *(ttl for _, ttl in found)])
            levels = by_priority([(host, self._addresses[host.name]) for host in hosts], self._scheme)
        chosen = first_that_serve(levels, self._standing() if len(levels) > 1 else {}, self._last)
        if not chosen and not says_none(answer):
            raise SourceFailed("none of its hosts can be connected to")
        self._last = frozenset(chosen)
        return Found(dict.fromkeys(chosen), seconds)

    def _resolver(self) -> dns.asyncresolver.Resolver:
        """A new one for each look: `/etc/resolv.conf` may have changed."""
        resolver = dns.asyncresolver.Resolver(configure=self._nameserver is None)
        if self._nameserver is not None:
            host, resolver.port = self._nameserver
            resolver.nameservers = [host]
        resolver.timeout, resolver.lifetime = QUERY_SECONDS, LOOK_UP_SECONDS
        return resolver

    async def _look_up(self, resolver: dns.asyncresolver.Resolver, name: str) -> tuple[tuple[str, ...], float]:
        """Addresses of one family, IPv4 if there are any, and for how long they are good. The last ones where there is
        no answer."""
        async with self._asking:
            for kind in (RdataType.A, RdataType.AAAA):
                try:
                    answer = await resolver.resolve(f"{name}.", kind)
                except dns.resolver.NoAnswer:
                    continue
                except (dns.exception.DNSException, OSError):
                    break
                return tuple(sorted(one.address for one in answer)), float(answer.rrset.ttl if answer.rrset else 0)
        return self._addresses.get(name, ()), 0.0


def hosts_of(answer: dns.resolver.Answer) -> list[Host]:
    """Those that can be connected to, first priority first."""
    hosts = {Host(one.priority, one.target.to_text(omit_final_dot=True), one.port) for one in answer}
    usable = [one for one in hosts if one.port and is_host(one.name)]
    return sorted(usable, key=lambda one: (one.priority, one.name, one.port))[:MAX_HOSTS]


def says_none(answer: dns.resolver.Answer) -> bool:
    return all(one.target == dns.name.root for one in answer)


def by_priority(hosts: list[tuple[Host, tuple[str, ...]]], scheme: str) -> list[list[ReplicaId]]:
    levels: dict[int, list[ReplicaId]] = {}
    for host, addresses in hosts:
        levels.setdefault(host.priority, []).extend(replica_at(scheme, one, host.port) for one in addresses)
    return list(levels.values())


def first_that_serve(
    levels: list[list[ReplicaId]], standing: Standing, last: frozenset[ReplicaId] = frozenset()
) -> list[ReplicaId]:
    """The replicas of the first priority, and of the next ones while nobody before them can serve. Until that is known
    it stays as it is: neither are those of the next brought in too early, nor let go too early."""
    chosen: list[ReplicaId] = []
    for position, level in enumerate(levels):
        chosen += level
        known = [standing.get(replica) for replica in level]
        later_are_in = any(replica in last for after in levels[position + 1 :] for replica in after)
        if True in known or (None in known and not later_are_in):
            break
    return chosen


def problem(error: Exception) -> str:
    return next(
        (text for kind, text in PROBLEMS if isinstance(error, kind)), f"cannot be asked ({type(error).__name__})"
    )
