"""What the configuration says of where replicas come from, as objects: the sources, and the reader of announcements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from gateway.config import Config, ConfigError, Discovery, endpoint, service_name
from gateway.core.model import HealthState, ReplicaId, ReplicaStatistics
from gateway.feeds.announced import Announced
from gateway.feeds.engines import Said
from gateway.feeds.registry import Registry
from gateway.feeds.replicas_file import ReplicasFile
from gateway.feeds.sources import Addresses, Source, Standing, resolve
from gateway.series import AnnouncementSeries

__all__ = ["Standing", "announced_in", "sources_of", "standing"]


def standing(replicas: Iterable[ReplicaStatistics]) -> Standing:
    return {
        one.replica: None
        if one.health is HealthState.UNKNOWN and not one.draining
        else one.health is HealthState.UP and not one.draining
        for one in replicas
    }


def sources_of(
    discovery: Discovery, say: Callable[[Mapping[ReplicaId, Said]], None], standing: Callable[[], Standing]
) -> list[Source]:
    """`say` hears what a file says of engines. Raises `ConfigError`."""
    sources: list[Source] = []
    if discovery.replicas_file is not None:
        sources.append(ReplicasFile(Path(discovery.replicas_file), say))
    if (service := service_name(discovery.dns)) is not None:
        from gateway.feeds.service_records import ServiceRecords  # its resolver takes 80 ms to import

        server = None if discovery.nameserver is None else endpoint(discovery.nameserver)
        sources.append(ServiceRecords(*service, standing, server))
    elif discovery.dns is not None:
        sources.append(Addresses(discovery.dns, resolve))
    return sources


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
    secret = environ.get(redis.secret_env, "")
    if not secret:
        raise ConfigError(f"discovery.redis: whoever writes there could add replicas; set ${redis.secret_env}")

    def serves(url: ReplicaId) -> bool:
        known = standing()
        return any(known.get(one) for one in registry.addresses(url))

    try:
        return Announced(
            registry.take_announced,
            serves,
            series,
            url=redis.url or "",
            fleet=redis.name,
            secret=secret.encode("utf-8", "surrogateescape"),
            interval_seconds=config.discovery.interval_seconds,
            clock=clock,
        )
    except ValueError as error:
        raise ConfigError("redis.url: is not understood by the Redis client") from error
