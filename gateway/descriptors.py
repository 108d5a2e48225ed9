"""How many sockets this process may have: as many as the system allows, and no more clients than they suffice for."""

from __future__ import annotations

import contextlib
import errno
import logging
import resource

import msgspec

from gateway.config import Config

log = logging.getLogger(__name__)

MOST_DESCRIPTORS = 2**20
"""Asked for where the system names no limit."""
OURS = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL))
"""A connection that cannot be opened for these is not the replica's fault: no descriptor, memory or port here."""
SPARE_DESCRIPTORS = 64
"""For the listener, the logs, probes and scrapes."""


def raise_limit() -> int:
    """Take what the hard limit allows (the soft one is often 1,024). Returns what there is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return wanted
    return wanted if soft == resource.RLIM_INFINITY else soft


def within_descriptors(config: Config, descriptors: int) -> Config:
    """The same configuration with a `max_connections` that leaves a descriptor for each request at a replica."""
    for_replicas = min(config.routing.max_in_flight, descriptors // 2)
    room = max(1, descriptors - for_replicas - SPARE_DESCRIPTORS)
    if room >= config.server.max_connections:
        return config
    log.warning("%d open files are allowed: at most %d client connections", descriptors, room)
    return msgspec.structs.replace(config, server=msgspec.structs.replace(config.server, max_connections=room))
