"""Replicas that announce themselves through the Redis that gateways share: what is written there, and who counts.

Each replica has a key of its own, which holds one sealed announcement (`sealing.py`) and expires; a set names the keys.
So each look reads all of them, in a bounded answer, and nothing depends on having seen a change.

An announcement is good for `LEASE_SECONDS` from when a *new* one was read: the same one again, or an older one, renews
nothing. It also has the time at which it was made, so that no old one counts for a gateway that has just started.
Nothing depends on keys being there: a replica goes when its announcement says so, or when nothing new was read of it
for the lease and it does not answer either. A Redis that was emptied, is full, or lost what it knew takes out nobody
who serves; while it does not answer, no lease runs out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from gateway.config import ConfigError, TokensPerSecond, replica_url
from gateway.core.model import ReplicaId
from gateway.feeds.sealing import Opener, Refused, RefusedFor, Seal

log = logging.getLogger(__name__)

PURPOSE = "replica"
LEASE_SECONDS = 15.0
REFRESH_SECONDS = 5.0
"""A third of it: two lost ones are no loss."""
MAX_SKEW_SECONDS = 60.0
"""Between the clocks of two hosts. So long an old announcement is good for a gateway that has just started."""
MAX_ANNOUNCEMENTS = 512
"""Read at one look: twice as many as may be registered, for those that went lately."""
MAX_BYTES = 40 * 1024
"""So many take names of the most letters, each of four bytes."""
MAX_MODELS = 32
MAX_NAME = 256
EXPIRED = "expired"
REFUSALS = (*(reason.value for reason in RefusedFor), EXPIRED)
"""Why one is not taken; a metric label."""

Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]


class Announcement(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    made_at: float
    """Seconds since 1970."""
    url: Annotated[str, Meta(max_length=512)]
    models: Annotated[tuple[Name, ...], Meta(max_length=MAX_MODELS)] = ()
    """That it lists itself; none where it did not say."""
    prefill_rate: TokensPerSecond | None = None
    is_leaving: bool = False


def set_key(fleet: str) -> str:
    """Of the set with the senders of all announcements."""
    return f"{fleet}:replicas:1"


def replica_key(fleet: str, sender: str) -> str:
    return f"{fleet}:replica:1:{sender}"


@dataclass(slots=True)
class Lease:
    announcement: Announcement
    until: float


class Ledger:
    """Who is announced, by what was read. Decides without Redis; time is told."""

    def __init__(self, secret: bytes, fleet: str, refuse: Callable[[str], None]) -> None:
        """`refuse` hears why something was not taken."""
        self._opener = Opener(Seal(secret, PURPOSE, fleet), MAX_BYTES)
        self._refuse = refuse
        self._decode = msgspec.msgpack.Decoder(Announcement).decode
        self._leases: dict[str, Lease] = {}
        """By sender."""
        self._read: dict[str, bytes] = {}
        """At the last look."""

    def read(self, found: Mapping[str, bytes], now: float, wall: float | None = None) -> None:
        """All announcements that there are, by sender. `wall`: seconds since 1970, the clock's unless given."""
        for sender, message in found.items():
            if self._read.get(sender) != message:
                self._take(sender, message, now, time.time() if wall is None else wall)
        self._read = dict(found)

    def forgive(self, now: float) -> None:
        """It could not be read for a while, and nobody may have been able to write."""
        for lease in self._leases.values():
            lease.until = max(lease.until, now + LEASE_SECONDS)

    def announced(self, now: float, serves: Callable[[ReplicaId], bool]) -> dict[ReplicaId, Announcement]:
        """Who counts now. Whoever `serves` outlives his lease."""
        found: dict[ReplicaId, Announcement] = {}
        for sender, lease in list(self._leases.items()):
            url = ReplicaId(lease.announcement.url)
            if lease.until <= now and not serves(url):
                del self._leases[sender]
                continue
            if url not in found or found[url].made_at < lease.announcement.made_at:
                found[url] = lease.announcement
        return found

    def _take(self, sender: str, message: bytes, now: float, wall: float) -> None:
        try:
            announcement = self._decode(self._opener.open(message, sender))
            url = replica_url(announcement.url)
        except Refused as refused:
            self._refuse(refused.reason.value)
        except (msgspec.DecodeError, ConfigError, UnicodeDecodeError):
            self._refuse(RefusedFor.MALFORMED.value)
        else:
            if not abs(wall - announcement.made_at) <= MAX_SKEW_SECONDS:  # what is no number is no time either
                self._refuse(EXPIRED)
            elif announcement.is_leaving:
                self._leases.pop(sender, None)
            else:
                self._leases[sender] = Lease(msgspec.structs.replace(announcement, url=url), now + LEASE_SECONDS)
