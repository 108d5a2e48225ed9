"""The admin key: one secret that opens the admin listener and, where the gateway can be reached from elsewhere, the
views.

Kept as a digest from the first moment on. A presented key is digested too, and the digests are compared in constant
time, so neither length nor content of a wrong one shows in how long the answer takes.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable, Mapping
from hashlib import sha256

from gateway.config import Admin, ConfigError
from gateway.secret import read_secret

LEAST_CHARACTERS = 16
"""A digest protects only what nobody can guess; `openssl rand -hex 32` makes 64."""
_DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})")
_BEARER = re.compile(rb"bearer +(\S+) *", re.IGNORECASE)


class AdminKey:
    def __init__(self, digest: bytes) -> None:
        self._digest = digest

    def opens(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Whether a request with these headers (names in lower case) shows the key: once, as a bearer token."""
        given = [value for name, value in headers if name == b"authorization"]
        bearer = _BEARER.fullmatch(given[0]) if len(given) == 1 else None
        presented = sha256(bearer[1] if bearer else b"").digest()
        return hmac.compare_digest(presented, self._digest)


def read_admin_key(admin: Admin, environ: Mapping[str, str]) -> AdminKey | None:
    """The configured key; `None` when there is none. Raises `ConfigError`, never with any of the key in it."""
    secret = read_secret("admin.key", admin.key_env, admin.key_file, environ)
    if secret is None:
        return None
    if digest := _DIGEST.fullmatch(secret.text):
        return AdminKey(bytes.fromhex(digest[1]))
    if len(secret.text) < LEAST_CHARACTERS:
        raise ConfigError(
            f"{secret.place}: expected a key of at least {LEAST_CHARACTERS} characters, or sha256: and its digest"
        )
    return AdminKey(sha256(secret.text.encode()).digest())
