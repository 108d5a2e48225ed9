"""What gateways write where others can write too is sealed: only who has the fleet's secret can read it or make it.

    b"WL2" | sender, 16 bytes | number, 8 bytes | AES-256-GCM of the content

The fleet's key comes from the secret by HKDF, with the purpose and the fleet's name in it, so that nothing is good for
another purpose or fleet. Each sender, which is one start of one process, has a key of its own from that one. So the
nonce can be the sender's number: it repeats only if a sender's 16 random bytes do. All before the content is the
associated data, and numbers of one sender only grow: whoever writes there can neither make a message, nor change one,
nor bring an old one again. Where there is no secret all of it is made with an empty one, and protects against accidents
only.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from enum import Enum

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

MAGIC = b"WL2"
SENDER_BYTES = 16
NUMBER_BYTES = 8
NONCE_BYTES = 12
KEY_BYTES = 32
HEAD_BYTES = len(MAGIC) + SENDER_BYTES + NUMBER_BYTES
MARK_BYTES = 16
MAX_SENDERS = 256
"""Whose last numbers are remembered. Those silent for longest are forgotten."""


class RefusedFor(Enum):
    """Why a message is refused; a metric label."""

    MALFORMED = "malformed"
    FORGED = "forged"
    """It is not made with our secret, or not for this purpose and fleet."""
    REPEATED = "repeated"
    """Its number is not above its sender's last."""


class Refused(Exception):
    def __init__(self, reason: RefusedFor) -> None:
        super().__init__(reason.value)
        self.reason = reason


class Seal:
    """What the secret makes for one purpose of one fleet: a key for each sender."""

    def __init__(self, secret: bytes, purpose: str, fleet: str) -> None:
        info = f"warmlane 2\0{purpose}\0{fleet}".encode()
        self._key = HKDF(SHA256(), KEY_BYTES, salt=None, info=info).derive(secret)

    def cipher(self, sender: bytes) -> AESGCM:
        return AESGCM(HKDFExpand(SHA256(), KEY_BYTES, info=sender).derive(self._key))


class Sealer:
    """Seals what one sender says: one start of one process."""

    def __init__(self, seal: Seal) -> None:
        self.name = secrets.token_bytes(SENDER_BYTES)
        self._cipher = seal.cipher(self.name)
        self._number = 0

    def seal(self, content: bytes) -> bytes:
        self._number += 1
        head = MAGIC + self.name + self._number.to_bytes(NUMBER_BYTES, "big")
        return head + self._cipher.encrypt(self._number.to_bytes(NONCE_BYTES, "big"), content, head)


class Opener:
    """Opens what all senders say, each message once."""

    def __init__(self, seal: Seal, max_bytes: int) -> None:
        self._seal = seal
        self._max_bytes = max_bytes
        self._senders: OrderedDict[bytes, tuple[AESGCM, int]] = OrderedDict()
        """The cipher of each sender that proved itself, and the number of its last message."""

    def open(self, message: bytes, expected: str | None = None) -> bytes:
        """The content. `expected`: the sender in hex, where it is known. Raises `Refused`."""
        sender = sender_of(message)
        if sender is None or len(message) > self._max_bytes or expected not in (None, sender.hex()):
            raise Refused(RefusedFor.MALFORMED)
        cipher, last = self._senders.get(sender) or (self._seal.cipher(sender), 0)
        head = message[:HEAD_BYTES]
        number = int.from_bytes(head[-NUMBER_BYTES:], "big")
        try:
            content = cipher.decrypt(number.to_bytes(NONCE_BYTES, "big"), message[HEAD_BYTES:], head)
        except InvalidTag as error:
            raise Refused(RefusedFor.FORGED) from error
        if number <= last:
            raise Refused(RefusedFor.REPEATED)
        self._senders[sender] = cipher, number
        self._senders.move_to_end(sender)
        if len(self._senders) > MAX_SENDERS:
            self._senders.popitem(last=False)
        return content


def sender_of(message: bytes) -> bytes | None:
    """Whose it claims to be; `None` for what is no message."""
    if len(message) < HEAD_BYTES + MARK_BYTES or not message.startswith(MAGIC):
        return None
    return message[len(MAGIC) : len(MAGIC) + SENDER_BYTES]
