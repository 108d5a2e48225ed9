"""Facts for other gateways as one sealed entry of a stream, and back.

    b"WL1" | sender, 8 bytes | number, 8 bytes | sealed facts | mark, 16 bytes

Facts are msgpack, xored with a SHAKE-256 key stream that the secret, the sender and the number make: whoever reads
Redis learns no block hash, tenant or id. The mark is a keyed BLAKE2b of all before it, and numbers of one sender only
grow, so whoever writes to Redis can neither make an entry, nor change one, nor bring an old one again. Where there is
no secret both are made with an empty one, and protect against accidents only.

Whatever is wrong with an entry, it is refused as a whole: nothing of it is observed.
"""

from __future__ import annotations

import hashlib
import hmac
import sys
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from enum import Enum
from typing import Annotated

import msgspec
from msgspec import Meta

from gateway.core.model import BlockHash, PeerFact, PeerReported, PeerSent, PeerStored, ReplicaId

MAGIC = b"WL1"
SENDER_BYTES = 8
NUMBER_BYTES = 8
MARK_BYTES = 16
HEAD_BYTES = len(MAGIC) + SENDER_BYTES + NUMBER_BYTES
MAX_ENTRY_BYTES = 1024 * 1024
"""A gateway makes entries of some 64 KiB and no more than 130; a larger one is not ours."""
MAX_SENDERS = 256
"""Gateways whose last numbers are remembered; each start of one is another. Those silent for longest are forgotten."""

Place = Annotated[int, Meta(ge=0, lt=4_096)]
"""Of a replica in the entry's list."""
Count = Annotated[int, Meta(ge=0, le=1_000_000)]
Tokens = Annotated[int, Meta(ge=0, le=10**12)]
Url = Annotated[str, Meta(max_length=512)]
Id = Annotated[str, Meta(min_length=1, max_length=512)]
Tenant = Annotated[str, Meta(max_length=512)]
Blocks = Annotated[bytes, Meta(max_length=8 * 8_192)]


class Facts(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    replicas: Annotated[list[Url], Meta(max_length=4_096)]
    sent: list[tuple[Place, Blocks]]
    reports: list[tuple[Place, Count, Tokens, Tokens, bool]]
    stored: list[tuple[Place, Id, Tenant]]


class RefusedFor(Enum):
    """Why an entry is refused; a metric label."""

    MALFORMED = "malformed"
    FORGED = "forged"
    """Its mark is not made with our secret."""
    REPEATED = "repeated"
    """Its number is not above its sender's last."""


class Refused(Exception):
    def __init__(self, reason: RefusedFor) -> None:
        super().__init__(reason.value)
        self.reason = reason


class Seal:
    """What the secret makes: the key stream, and marks."""

    def __init__(self, secret: bytes) -> None:
        self._stream_key = hashlib.blake2b(secret, person=b"warmlane stream").digest()
        self._mark_key = hashlib.blake2b(secret, person=b"warmlane mark").digest()

    def crypt(self, data: bytes, head: bytes) -> bytes:
        """Sealed, or opened again."""
        stream = hashlib.shake_256(self._stream_key + head).digest(len(data))
        return (int.from_bytes(data, "big") ^ int.from_bytes(stream, "big")).to_bytes(len(data), "big")

    def mark(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, key=self._mark_key, digest_size=MARK_BYTES).digest()


class Sender:
    """Makes the entries of one gateway."""

    def __init__(self, seal: Seal, name: bytes) -> None:
        """`name`: 8 bytes that no other start of any gateway has."""
        assert len(name) == SENDER_BYTES
        self.name = name
        self._seal = seal
        self._number = 0
        self._encode = msgspec.msgpack.Encoder().encode

    def entry(self, facts: Sequence[PeerFact]) -> bytes:
        self._number += 1
        head = MAGIC + self.name + self._number.to_bytes(NUMBER_BYTES, "big")
        sealed = head + self._seal.crypt(self._encode(wire_of(facts)), head)
        return sealed + self._seal.mark(sealed)


class Receiver:
    """Reads the entries of all others."""

    def __init__(self, seal: Seal, own_name: bytes) -> None:
        self._seal = seal
        self._own_name = own_name
        self._last: OrderedDict[bytes, int] = OrderedDict()
        """Number of each sender's last entry."""
        self._decode = msgspec.msgpack.Decoder(Facts).decode

    def facts(self, entry: bytes) -> list[PeerFact]:
        """Of an entry; none of our own. Raises `Refused`."""
        if not HEAD_BYTES + MARK_BYTES < len(entry) <= MAX_ENTRY_BYTES or not entry.startswith(MAGIC):
            raise Refused(RefusedFor.MALFORMED)
        head = entry[:HEAD_BYTES]
        sender = head[len(MAGIC) : len(MAGIC) + SENDER_BYTES]
        if sender == self._own_name:
            return []
        if not hmac.compare_digest(self._seal.mark(entry[:-MARK_BYTES]), entry[-MARK_BYTES:]):
            raise Refused(RefusedFor.FORGED)
        number = int.from_bytes(head[-NUMBER_BYTES:], "big")
        if number <= self._last.get(sender, 0):
            raise Refused(RefusedFor.REPEATED)
        try:
            wire = self._decode(self._seal.crypt(entry[HEAD_BYTES:-MARK_BYTES], head))
            facts = facts_of(wire, sender.hex())
        except (msgspec.DecodeError, IndexError, ValueError, UnicodeDecodeError) as error:
            raise Refused(RefusedFor.MALFORMED) from error
        self._last[sender] = number
        self._last.move_to_end(sender)
        if len(self._last) > MAX_SENDERS:
            self._last.popitem(last=False)
        return facts


def wire_of(facts: Sequence[PeerFact]) -> Facts:
    places: dict[ReplicaId, int] = {}
    wire = Facts([], [], [], [])
    for fact in facts:
        place = places.setdefault(fact.replica, len(places))
        match fact:
            case PeerSent(blocks=blocks):
                wire.sent.append((place, bytes_of(blocks)))
            case PeerReported():
                tokens = round(fact.pending_tokens), round(fact.running_tokens)
                wire.reports.append((place, fact.in_flight, *tokens, fact.ejected))
            case PeerStored(id=id, tenant=tenant):
                wire.stored.append((place, id, tenant))
    wire.replicas = list(places)
    return wire


def facts_of(wire: Facts, peer: str) -> list[PeerFact]:
    """Raises `IndexError` or `ValueError` for what no gateway writes."""
    replicas = [ReplicaId(url) for url in wire.replicas]
    facts: list[PeerFact] = [PeerSent(replicas[place], blocks_of(data)) for place, data in wire.sent]
    facts += [PeerStored(replicas[place], id, tenant) for place, id, tenant in wire.stored]
    facts += [
        PeerReported(replicas[place], peer, in_flight, pending_tokens, running_tokens, ejected)
        for place, in_flight, pending_tokens, running_tokens, ejected in wire.reports
    ]
    return facts


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
