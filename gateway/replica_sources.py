"""What the configuration says of where replicas come from, as objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from gateway.config import Discovery, endpoint, service_name
from gateway.core.model import HealthState, ReplicaId, ReplicaStatistics
from gateway.feeds.engines import Said
from gateway.feeds.replicas_file import ReplicasFile
from gateway.feeds.sources import Addresses, Source, Standing, resolve

__all__ = ["Standing", "sources_of", "standing"]


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
