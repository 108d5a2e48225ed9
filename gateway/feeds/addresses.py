"""Addresses: where a replica that is registered from outside may live. A URL that the gateway fetches on somebody's
word is a way into networks that the somebody cannot reach, so what a name resolves to is checked, never how it is
written.

An address must lie in an allowed network, and some are refused whatever is allowed: nobody runs a replica there, but
machines keep their secrets there. An IPv6 address that carries an IPv4 address counts as both.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address

Address = IPv4Address | IPv6Address

NEVER = tuple(
    (ipaddress.ip_network(network), why)
    for network, why in (
        ("0.0.0.0/8", "this host"),
        ("169.254.0.0/16", "link-local: most clouds keep credentials at 169.254.169.254"),
        ("100.100.100.200/32", "a cloud's metadata service"),
        ("168.63.129.16/32", "a cloud's host agent"),
        ("192.0.0.0/24", "protocol assignments, a cloud's metadata service among them"),
        ("224.0.0.0/4", "multicast"),
        ("240.0.0.0/4", "reserved, broadcast"),
        ("::/128", "this host"),
        ("fe80::/10", "link-local"),
        ("fd00:ec2::/32", "a cloud's metadata service"),
        ("fd20:ce::/32", "a cloud's metadata service"),
        ("ff00::/8", "multicast"),
    )
)
TRANSLATED = ipaddress.ip_network("64:ff9b::/96")
"""NAT64: the last 32 bits are the IPv4 address that a translator connects to."""


class Forbidden(Exception):
    """The address may not be a replica's. The message says why, for the operator."""


class Allowlist:
    """Networks as `[admin] allow` names them. Without any, every address is forbidden."""

    def __init__(self, networks: Iterable[str]) -> None:
        self._networks = tuple(ipaddress.ip_network(network) for network in networks)

    def __bool__(self) -> bool:
        return bool(self._networks)

    def __repr__(self) -> str:
        return f"Allowlist({', '.join(map(str, self._networks))})"

    def check(self, text: str) -> None:
        """Raises `Forbidden`, also for what is no address."""
        try:
            address = ipaddress.ip_address(text)
        except ValueError as error:
            raise Forbidden(f"{text} is no address") from error
        for one in (address, *carried(address)):
            for network, why in NEVER:
                if one in network:
                    raise Forbidden(f"{address} is never allowed ({why})")
            if not any(one in network for network in self._networks):
                raise Forbidden(f"{address} is outside the networks of admin.allow")


def carried(address: Address) -> tuple[IPv4Address, ...]:
    """The IPv4 addresses that packets to an IPv6 address may end at."""
    if isinstance(address, IPv4Address):
        return ()
    found = [address.ipv4_mapped, address.sixtofour]
    if address.teredo is not None:
        found += address.teredo
    if address in TRANSLATED:
        found.append(IPv4Address(int(address) & 0xFFFFFFFF))
    return tuple(one for one in found if one is not None)
