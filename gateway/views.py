"""Views: what operators may look at. They change nothing, but they tell who serves what and how busy it is.

Open where only this machine can ask (the gateway listens on loopback); elsewhere they want the admin key.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from typing import Any

from gateway.admin_key import AdminKey
from gateway.core.model import Decision, ReplicaStatistics
from gateway.core.router import Router
from gateway.feeds.discovery import Discovery
from gateway.feeds.engines import Engines
from gateway.feeds.registry import Registration, Registry
from gateway.proxy.errors import AdminKeyRequired, NotOpen
from gateway.rankings import ranked_rows, why


class Viewers:
    """Who may look."""

    def __init__(self, host: str, key: AdminKey | None) -> None:
        self._is_local = is_loopback(host)
        self._key = key

    def check(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Raises `NotOpen` or `AdminKeyRequired`."""
        if self._is_local:
            return
        if self._key is None:
            raise NotOpen(
                "This is open on loopback addresses only, or with an admin key ([admin] in the configuration)."
            )
        if not self._key.opens(headers):
            raise AdminKeyRequired

    def is_admin(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        return self._key is not None and self._key.opens(headers)


class FleetView:
    """All replicas as JSON: what the router knows of each, where it comes from, and who is registered but stays out."""

    def __init__(self, router: Router, discovery: Discovery, registry: Registry, engines: Engines) -> None:
        self._router = router
        self._discovery = discovery
        self._registry = registry
        self._engines = engines
        self.names: Mapping[str, str] = {}
        """Of those that the gateway runs itself, by URL."""

    def show(self, now: float) -> dict[str, Any]:
        replicas = self._router.statistics(now).replicas
        return {
            "replicas": [self._replica(one) for one in replicas],
            "registrations": [self.show_registration(one) for one in self._registry],
        }

    def show_with_worth(self, now: float) -> dict[str, Any]:
        """... and what the loss of each would cost, which is too much work for a page that is asked for each second."""
        worth, shown = self._router.cached_seconds(now), self.show(now)
        for one in shown["replicas"]:
            one["cached_seconds"] = round(worth[one["replica"]], 3)
        return shown

    def show_replica(self, url: str, now: float) -> dict[str, Any] | None:
        """`None` when there is no such replica."""
        replicas = self._router.statistics(now).replicas
        return next((self._replica(one) for one in replicas if one.replica == url), None)

    def show_registration(self, registration: Registration) -> dict[str, Any]:
        addresses = [
            {"replica": replica, "in": replica in self._registry.admitted, "problem": candidate.problem}
            for replica, candidate in registration.candidates.items()
        ]
        return {
            "url": registration.url,
            "announced": registration.is_announced,
            "problem": registration.problem,
            "lease_seconds_left": self._registry.seconds_left(registration),
            "addresses": addresses,
        }

    def _replica(self, one: ReplicaStatistics) -> dict[str, Any]:
        load = one.load
        return {
            "replica": one.replica,
            "name": self.names.get(one.replica),
            "source": "worker" if one.replica in self._registry.own else self._discovery.source(one.replica),
            "engine": self._engines.name(one.replica),
            "health": one.health.value,
            "available": one.available,
            "draining": one.draining,
            "last_failure": one.last_failure,
            "models": [card.id for card in one.models],
            "in_flight": one.in_flight,
            "in_flight_elsewhere": one.in_flight_elsewhere,
            "pending_tokens": round(one.pending_tokens),
            "prefill_tokens_per_second": round(one.prefill_rate),
            "cache_tokens": round(one.cache_tokens),
            "cache_tokens_known": one.cache_tokens_known,
            "index_blocks": one.index_blocks,
            "load": None
            if load is None
            else {
                "age_seconds": one.load_age,
                "running": load.running,
                "waiting": load.waiting,
                "kv_usage": load.kv_usage,
            },
        }


def explained(decision: Decision) -> dict[str, Any]:
    """A decision as JSON: every candidate's cost in seconds, part by part, best first."""
    return {
        "policy": decision.policy,
        "reason": decision.reason.value,
        "replica": decision.replica,
        "why": why(decision.reason.value, decision.ranking),
        "ranking": ranked_rows(decision.ranking),
    }


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
