"""Sources: who says, while the gateway runs, which replicas exist. Each is looked at again and again, and each look
gives its whole set, so nothing depends on having seen a change. What a look cannot tell stays as it was.

Here are the addresses behind one name. `service_records.py` has DNS SRV, `replicas_file.py` a file.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

from gateway.config import DEFAULT_PORTS
from gateway.core.model import ReplicaId

Resolve = Callable[[str, int], Awaitable[frozenset[str]]]
"""(host, port) -> addresses; raises `OSError` or `UnicodeError`."""

Standing = Mapping[ReplicaId, bool | None]
"""Whether each replica can serve; `None` where that is not known yet."""


class SourceFailed(Exception):
    """Nothing new is known. The message is one short line for people."""


@dataclass(frozen=True, slots=True)
class Found:
    replicas: Mapping[ReplicaId, float | None]
    """With their prefill rates where known."""
    good_for_seconds: float = 0.0
    """As the source says; to look earlier would bring the same."""


class Source(Protocol):
    @property
    def label(self) -> str:
        """What views call it."""

    @property
    def place(self) -> str:
        """Name or path, for messages."""

    @property
    def known(self) -> Mapping[ReplicaId, float | None]:
        """What there is to say before the first look."""

    async def look(self) -> Found:
        """The whole set. Raises `SourceFailed`."""


class Addresses:
    """Each address behind the host name of a URL is a replica."""

    label = "dns"

    def __init__(self, url: str, resolve: Resolve) -> None:
        self.place, self._port = address_of(url)
        self._scheme = urlsplit(url).scheme
        self._resolve = resolve
        self.known: Mapping[ReplicaId, float | None] = {}

    async def look(self) -> Found:
        try:
            addresses = await self._resolve(self.place, self._port)
        except (OSError, UnicodeError) as error:
            raise SourceFailed(f"does not resolve: {error}") from error
        return Found({replica_at(self._scheme, one, self._port): None for one in sorted(addresses)})


async def resolve(host: str, port: int) -> frozenset[str]:
    """Addresses of one family: a pod of a dual-stack service has two addresses, and must not count as two replicas."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for family in (socket.AF_INET, socket.AF_INET6):
        addresses = frozenset(str(address[0]) for kind, _, _, _, address in found if kind == family)
        if addresses:
            return addresses
    raise OSError(f"{host} has no address")


def address_of(url: str) -> tuple[str, int]:
    """Host and port."""
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or DEFAULT_PORTS[parts.scheme]


def replica_at(scheme: str, host: str, port: int) -> ReplicaId:
    return ReplicaId(f"{scheme}://{bracketed(host)}:{port}")


def bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def is_name(url: str) -> bool:
    """Whether the host can change its address. `localhost` cannot."""
    host, _ = address_of(url)
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host != "localhost"
    return False
