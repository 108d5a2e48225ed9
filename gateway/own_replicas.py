"""The gateway's side of the replicas that this process runs itself (`warmlane up`), for whoever runs them.

They come and go through the registry, as those that others register do, and are drained as by an operator.
"""

from __future__ import annotations

from collections.abc import Callable

from gateway.core.model import HealthState, ReplicaId, ReplicaStatistics
from gateway.core.router import Router
from gateway.feeds.announcer import Announcer
from gateway.feeds.discovery import Discovery
from gateway.feeds.registry import Registry


class OwnReplicas:
    """`workers.traffic.Traffic` over the gateway's objects."""

    def __init__(
        self,
        router: Router,
        discovery: Discovery,
        registry: Registry,
        clock: Callable[[], float],
        announcer: Announcer | None = None,
    ) -> None:
        """`announcer` tells other gateways."""
        self._router = router
        self._discovery = discovery
        self._registry = registry
        self._clock = clock
        self._announcer = announcer
        self._rates: dict[str, float | None] = {}
        self._drained_here: set[ReplicaId] = set()
        """For a restart; the others an operator drained, and they stay so."""
        self._stay_drained: set[ReplicaId] = set()

    def join(self, url: str, prefill_rate: float | None) -> None:
        replica = ReplicaId(url)
        self._registry.adopt(replica, prefill_rate)
        self._rates[url] = prefill_rate
        self._announce(url, True)
        if replica in self._stay_drained:
            self._stay_drained.discard(replica)
            self._discovery.drain(replica, True)

    def leave(self, url: str) -> None:
        replica = ReplicaId(url)
        if self._discovery.is_drained(replica) and replica not in self._drained_here:
            self._stay_drained.add(replica)
        self._drained_here.discard(replica)
        self._discovery.expect_back(replica)
        self._registry.let_go(replica)
        self._announce(url, False)

    def drain(self, url: str, draining: bool) -> None:
        replica = ReplicaId(url)
        if not self._discovery.is_drained(replica):
            self._drained_here.add(replica)
        self._discovery.drain(replica, draining)
        self._announce(url, not draining)

    def requests(self, url: str) -> int:
        found = self._find(url)
        return found.in_flight if found is not None else 0

    def is_up(self, url: str) -> bool:
        found = self._find(url)
        return found is not None and found.health is HealthState.UP

    def serves(self, url: str) -> bool:
        found = self._find(url)
        return found is not None and is_at_work(found)

    def has_stand_in(self, url: str) -> bool:
        found = self._find(url)
        if found is None:
            return True
        others = [one for one in self._replicas() if one.replica != url and is_at_work(one)]
        served = {card.id for one in others for card in one.models}
        return bool(others) and all(card.id in served for card in found.models)

    def cached_seconds(self, url: str) -> float:
        return self._router.cached_seconds(self._clock()).get(ReplicaId(url), 0.0)

    def _announce(self, url: str, is_there: bool) -> None:
        if self._announcer is None:
            return
        if is_there:
            self._announcer.announce(url, self._rates.get(url))
        else:
            self._announcer.withdraw(url)

    def _replicas(self) -> tuple[ReplicaStatistics, ...]:
        return self._router.statistics(self._clock()).replicas

    def _find(self, url: str) -> ReplicaStatistics | None:
        return next((one for one in self._replicas() if one.replica == url), None)


def is_at_work(one: ReplicaStatistics) -> bool:
    return one.health is HealthState.UP and not one.draining
