"""Facts for other gateways as one sealed entry of a stream, and back: msgpack within a seal (`sealing.py`).

Whatever is wrong with an entry, it is refused as a whole: nothing of it is observed.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from gateway.core.model import BlockHash, PeerFact, PeerReported, PeerSent, PeerStored, ReplicaId
from gateway.feeds.sealing import Opener, Refused, RefusedFor, Seal, Sealer, sender_of
from gateway.fleet_limits import MAX_TOLD, MOST_TOLD, KeyUse

PURPOSE = "view"
MAX_ENTRY_BYTES = 1024 * 1024
"""A gateway makes entries of some 64 KiB and no more than 130; a larger one is not ours."""

Place = Annotated[int, Meta(ge=0, lt=4_096)]
"""Of a replica in the entry's list."""
Count = Annotated[int, Meta(ge=0, le=1_000_000)]
Tokens = Annotated[int, Meta(ge=0, le=10**12)]
MOST_MILLIS = 10**9
Millis = Annotated[int, Meta(ge=0, le=MOST_MILLIS)]
"""Since something, twelve days at most."""
Url = Annotated[str, Meta(max_length=512)]
Id = Annotated[str, Meta(min_length=1, max_length=512)]
Tenant = Annotated[str, Meta(max_length=512)]
Blocks = Annotated[bytes, Meta(max_length=8 * 8_192)]
KeyName = Annotated[str, Meta(min_length=1, max_length=64)]
Spent = Annotated[int, Meta(ge=-2 * MOST_TOLD, le=2 * MOST_TOLD)]
"""Requests or tokens of one key in one round. Twice, since a limit that has just changed has two buckets."""


class Facts(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    replicas: Annotated[list[Url], Meta(max_length=4_096)]
    sent: list[tuple[Place, Blocks]]
    reports: list[tuple[Place, Count, Tokens, Tokens, bool, Tokens, Millis, Millis | None]]
    stored: list[tuple[Place, Id, Tenant]]
    keys: Annotated[list[tuple[KeyName, Spent, Spent, Count | None]], Meta(max_length=2 * MAX_TOLD)] = []


class Sender:
    """Makes the entries of one gateway."""

    def __init__(self, secret: bytes, fleet: str) -> None:
        self._sealer = Sealer(Seal(secret, PURPOSE, fleet))
        self._encode = msgspec.msgpack.Encoder().encode

    @property
    def name(self) -> bytes:
        """Of this start of this gateway; no other has it."""
        return self._sealer.name

    def entry(self, facts: Sequence[PeerFact], uses: Sequence[KeyUse] = ()) -> bytes:
        return self._sealer.seal(self._encode(wire_of(facts, uses)))


@dataclass(frozen=True, slots=True)
class Told:
    """What an entry says."""

    peer: str
    facts: list[PeerFact]
    uses: list[KeyUse]


class Receiver:
    """Reads the entries of all others."""

    def __init__(self, secret: bytes, fleet: str, own_name: bytes) -> None:
        self._opener = Opener(Seal(secret, PURPOSE, fleet), MAX_ENTRY_BYTES)
        self._own_name = own_name
        self._decode = msgspec.msgpack.Decoder(Facts).decode

    def read(self, entry: bytes) -> Told | None:
        """`None` for our own. Raises `Refused`."""
        sender = sender_of(entry)
        if sender is None:
            raise Refused(RefusedFor.MALFORMED)
        if sender == self._own_name:
            return None
        try:
            wire = self._decode(self._opener.open(entry))
            return Told(sender.hex(), facts_of(wire, sender.hex()), uses_of(wire))
        except (msgspec.DecodeError, IndexError, ValueError, UnicodeDecodeError) as error:
            raise Refused(RefusedFor.MALFORMED) from error


def wire_of(facts: Sequence[PeerFact], uses: Sequence[KeyUse] = ()) -> Facts:
    places: dict[ReplicaId, int] = {}
    wire = Facts([], [], [], [], [(one.key, one.requests, one.tokens, one.running) for one in uses])
    for fact in facts:
        place = places.setdefault(fact.replica, len(places))
        match fact:
            case PeerSent(blocks=blocks):
                wire.sent.append((place, bytes_of(blocks)))
            case PeerReported():
                tokens = round(fact.pending_tokens), round(fact.running_tokens)
                head = round(fact.head_tokens), millis(fact.head_seconds)
                seen = None if fact.first_token_seconds is None else millis(fact.first_token_seconds)
                wire.reports.append((place, fact.in_flight, *tokens, fact.ejected, *head, seen))
            case PeerStored(id=id, tenant=tenant):
                wire.stored.append((place, id, tenant))
    wire.replicas = list(places)
    return wire


def facts_of(wire: Facts, peer: str) -> list[PeerFact]:
    """Raises `IndexError` or `ValueError` for what no gateway writes."""
    replicas = [ReplicaId(url) for url in wire.replicas]
    facts: list[PeerFact] = [PeerSent(replicas[place], blocks_of(data)) for place, data in wire.sent]
    facts += [PeerStored(replicas[place], id, tenant) for place, id, tenant in wire.stored]
    for place, in_flight, pending, running, ejected, head, since_sent, since_seen in wire.reports:
        seen = None if since_seen is None else since_seen / 1e3
        replica, ago = replicas[place], since_sent / 1e3
        facts.append(PeerReported(replica, peer, in_flight, pending, running, ejected, head, ago, seen))
    return facts


def millis(seconds: float) -> int:
    return min(max(0, round(1e3 * seconds)), MOST_MILLIS)


def uses_of(wire: Facts) -> list[KeyUse]:
    return [KeyUse(*one) for one in wire.keys]


def bytes_of(blocks: Sequence[BlockHash]) -> bytes:
    """Eight bytes a hash, least first."""
    hashes = array("Q", blocks)
    if sys.byteorder == "big":
        hashes.byteswap()
    return hashes.tobytes()


def blocks_of(data: bytes) -> list[BlockHash]:
    """Raises `ValueError` for what is no whole number of hashes."""
    hashes = array("Q")
    hashes.frombytes(data)
    if sys.byteorder == "big":
        hashes.byteswap()
    return [BlockHash(one) for one in hashes]
