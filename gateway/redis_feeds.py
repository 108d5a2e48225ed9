"""The Redis that gateways share, as the configuration wants it: the shared view, the reader of announcements."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping

from gateway.config import Config, ConfigError, Redis
from gateway.core.model import ReplicaId
from gateway.core.router import Router
from gateway.feeds.announced import Announced
from gateway.feeds.peers import Peers
from gateway.feeds.registry import Registry
from gateway.feeds.sources import Standing
from gateway.fleet_limits import FleetLimits
from gateway.series import AnnouncementSeries, PeerSeries

log = logging.getLogger(__name__)


def peers_in(
    redis: Redis,
    environ: Mapping[str, str],
    router: Router,
    on_heard: Callable[[], None],
    series: PeerSeries,
    clock: Callable[[], float],
    limits: FleetLimits,
) -> Peers:
    """Raises `ConfigError`."""
    secret = secret_of(redis, environ)
    if not secret:
        log.warning("[redis] without $%s: whoever writes to that Redis can steer requests", redis.secret_env)
    with understood():
        return Peers(
            router,
            on_heard,
            series,
            url=redis.url or "",
            name=redis.name,
            secret=secret,
            max_bytes=redis.memory_mib * 2**20,
            clock=clock,
            limits=limits,
        )


def announced_in(
    config: Config,
    environ: Mapping[str, str],
    registry: Registry,
    standing: Callable[[], Standing],
    series: AnnouncementSeries,
    clock: Callable[[], float],
) -> Announced:
    """Raises `ConfigError`."""
    redis = config.redis
    secret = secret_of(redis, environ)
    if not secret:
        raise ConfigError(f"discovery.redis: whoever writes there could add replicas; set ${redis.secret_env}")

    def serves(url: ReplicaId) -> bool:
        known = standing()
        return any(known.get(one) for one in registry.addresses(url))

    with understood():
        return Announced(
            registry.take_announced,
            serves,
            series,
            url=redis.url or "",
            fleet=redis.name,
            secret=secret,
            interval_seconds=config.discovery.interval_seconds,
            clock=clock,
        )


def secret_of(redis: Redis, environ: Mapping[str, str]) -> bytes:
    return environ.get(redis.secret_env, "").encode("utf-8", "surrogateescape")


@contextlib.contextmanager
def understood(called: str = "redis.url") -> Iterator[None]:
    """Raises `ConfigError` for a URL that the client refuses, without the URL: it may hold a password."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"{called}: is not understood by the Redis client") from error
