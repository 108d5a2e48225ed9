"""A seal is opened by who has the secret, for one purpose of one fleet, once, and as it was made."""

from __future__ import annotations

import hashlib
import hmac

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from gateway.feeds import sealing
from gateway.feeds.sealing import HEAD_BYTES, MARK_BYTES, MAX_SENDERS, Opener, Refused, RefusedFor, Seal, Sealer

SECRET = b"a secret of the fleet"
SEAL = Seal(SECRET, "view", "warmlane")


def opener(seal: Seal = SEAL) -> Opener:
    return Opener(seal, 4_096)


def refusal(one: Opener, message: bytes) -> RefusedFor:
    with pytest.raises(Refused) as refused:
        one.open(message)
    return refused.value.reason


def test_what_is_sealed_is_opened_and_shows_nothing() -> None:
    sealer, one = Sealer(SEAL), opener()
    messages = [sealer.seal(content) for content in (b"a tenant's name", b"", b"a tenant's name")]
    assert [one.open(message) for message in messages] == [b"a tenant's name", b"", b"a tenant's name"]
    assert b"tenant" not in b"".join(messages)
    assert len({message[HEAD_BYTES:] for message in messages}) == 3


def test_keys_are_of_hkdf_and_the_nonce_is_the_number() -> None:
    """Made here by hand from RFC 5869, for nothing else tells when the form changes."""

    def expand(key: bytes, info: bytes) -> bytes:
        return hmac.digest(key, info + b"\1", "sha256")

    sealer = Sealer(SEAL)
    sealer.seal(b"first")
    message = sealer.seal(b"second")
    fleet = expand(hmac.digest(bytes(hashlib.sha256().digest_size), SECRET, "sha256"), b"warmlane 2\0view\0warmlane")
    cipher = AESGCM(expand(fleet, sealer.name))
    head = b"WL2" + sealer.name + (2).to_bytes(8, "big")
    assert message == head + cipher.encrypt(bytes(11) + b"\2", b"second", head)


def test_each_start_has_a_key_of_its_own_so_no_nonce_repeats() -> None:
    one, other = Sealer(SEAL), Sealer(SEAL)
    assert one.name != other.name
    assert one.seal(b"the same")[HEAD_BYTES:] != other.seal(b"the same")[HEAD_BYTES:]


def test_no_bit_may_change() -> None:
    """Nor may the number or the sender: an old message does not become a new one."""
    message = Sealer(SEAL).seal(b"content")
    for place in range(len(message)):
        for bit in (1, 128):
            changed = bytearray(message)
            changed[place] ^= bit
            expected = RefusedFor.MALFORMED if place < len(sealing.MAGIC) else RefusedFor.FORGED
            assert refusal(opener(), bytes(changed)) is expected, place
    assert opener().open(message) == b"content"


@pytest.mark.parametrize(
    "seal", [Seal(b"another", "view", "warmlane"), Seal(SECRET, "replica", "warmlane"), Seal(SECRET, "view", "other")]
)
def test_another_secret_purpose_or_fleet_is_forged(seal: Seal) -> None:
    """O-23."""
    assert refusal(opener(), Sealer(seal).seal(b"content")) is RefusedFor.FORGED


def test_an_old_message_is_refused_also_out_of_order() -> None:
    """O-23."""
    sealer, one = Sealer(SEAL), opener()
    first, second, third = (sealer.seal(b"content") for _ in range(3))
    assert one.open(first) == b"content"
    assert refusal(one, first) is RefusedFor.REPEATED
    assert one.open(third) == b"content"
    assert refusal(one, second) is RefusedFor.REPEATED


@pytest.mark.parametrize("wrong", [b"", b"WL2", b"WL1" + bytes(100), b"WL2" + bytes(23 + MARK_BYTES), b"x" * 5_000])
def test_what_is_no_message_is_refused(wrong: bytes) -> None:
    assert refusal(opener(), wrong) in (RefusedFor.MALFORMED, RefusedFor.FORGED)


def test_a_message_that_is_too_long_is_refused_before_it_is_opened() -> None:
    assert refusal(opener(), Sealer(SEAL).seal(bytes(5_000))) is RefusedFor.MALFORMED


def test_forged_senders_push_nobody_out() -> None:
    """Else a flood of them would make old messages good again."""
    sealer, one, forger = Sealer(SEAL), opener(), Seal(b"another", "view", "warmlane")
    message = sealer.seal(b"content")
    one.open(message)
    for _ in range(MAX_SENDERS + 1):
        refusal(one, Sealer(forger).seal(b""))
    assert refusal(one, message) is RefusedFor.REPEATED
