"""API keys: who a request comes from, and what that key may do.

Only the SHA-256 of a key is kept. That suffices because keys are random (`new_secret`): there is nothing to guess that
a slow hash would protect. A presented key is hashed and looked up by its digest, so how long the answer takes tells
nothing about how much of it was right.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from gateway.config import ConfigError
from gateway.config_errors import explained

log = logging.getLogger(__name__)

KEYS_VARIABLE = "WARMLANE_API_KEYS"
"""Environment variable with plain keys: `name=key,name=key`."""
LEAST_CHARACTERS = 16
"""Shorter ones can be guessed; those that `warmlane key new` makes have 46."""
SECRET_BYTES = 32
"""Of chance in a new key: none is ever guessed."""
PREFIX = "wl-"
"""So that scanners for leaked secrets can tell a key of this gateway."""
MOST_PRESENTED = 4
"""Keys of one request that are looked at: Anthropic's clients may send one in each of the two headers."""

Header = tuple[bytes, bytes]
Name = Annotated[
    str, Meta(pattern=r"\A[A-Za-z0-9_.:@/-]{1,64}\Z", description="1 to 64 letters, digits and _ . : @ / -, no spaces")
]
"""Safe in logs and as a metric label."""
Amount = Annotated[int, Meta(ge=1, le=10**12)]


class Denied(Exception):
    """A request that its key does not allow. `reason` is one of a closed set, for the metric."""

    reason = ""


class NoKey(Denied):
    """None was sent, or not as we know it."""

    reason = "no_key"

    def __init__(self) -> None:
        super().__init__("No API key: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`.")


class WrongKey(Denied):
    """Sent, but not known (any more). The message never repeats it."""

    reason = "wrong_key"

    def __init__(self) -> None:
        super().__init__("Incorrect API key provided.")


@dataclass(frozen=True, slots=True)
class Key:
    """One key as the keys file describes it."""

    name: str
    sha256: bytes
    tenant: str
    models: frozenset[str] | None = None
    """Model names that it may ask for; `None`: all."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    priority: int = 0
    """Larger goes first where requests wait."""


class Entry(Struct, frozen=True, forbid_unknown_fields=True):
    """`[[keys]]` of the keys file."""

    name: Name
    sha256: Annotated[
        str, Meta(pattern=r"\A[0-9a-fA-F]{64}\Z", description="64 hex digits, as `warmlane key new` prints")
    ]
    tenant: Name | None = None
    """Keys of one tenant share its turn in the waiting room, its responses and its salt. Not set: its own name."""
    models: tuple[str, ...] | None = None
    requests_per_minute: Amount | None = None
    tokens_per_minute: Amount | None = None
    concurrent_requests: Amount | None = None
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0

    def key(self) -> Key:
        return Key(
            name=self.name,
            sha256=bytes.fromhex(self.sha256),
            tenant=self.tenant or self.name,
            models=None if self.models is None else frozenset(self.models),
            requests_per_minute=self.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute,
            concurrent_requests=self.concurrent_requests,
            priority=self.priority,
        )


class KeysFile(Struct, frozen=True, forbid_unknown_fields=True):
    keys: list[Entry] = []


def read_keys(text: bytes, called: str) -> list[Key]:
    """Keys of a keys file. Raises `ConfigError`, with what the file is `called`."""
    try:
        table = tomllib.loads(text.decode())
    except RecursionError as error:
        raise ConfigError(f"{called}: not TOML: nested too deeply") from error
    except ValueError as error:  # also a number of some thousand digits
        raise ConfigError(f"{called}: not TOML: {error}") from error
    try:
        return [entry.key() for entry in msgspec.convert(table, KeysFile).keys]
    except msgspec.ValidationError as error:
        raise ConfigError(f"{called}: {explained(str(error), KeysFile)}") from error


def keys_in_variable(value: str) -> list[Key]:
    """Keys of `name=key,name=key`. Raises `ConfigError`, which does not repeat them."""
    found: list[Key] = []
    for number, part in enumerate(value.split(","), 1):
        name, _, secret = (piece.strip() for piece in part.partition("="))
        if not secret or not re.fullmatch(r"[A-Za-z0-9_.:@/-]{1,64}", name):
            raise ConfigError(f"{KEYS_VARIABLE}: entry {number} is not name=key")
        if len(secret) < LEAST_CHARACTERS:
            what = f"the key of {name} has fewer than {LEAST_CHARACTERS} characters"
            log.warning("%s: %s and can be guessed", KEYS_VARIABLE, what)
        found.append(Key(name, digest_of(secret.encode("utf-8", "surrogateescape")), tenant=name))
    return found


def checked_keys(keys: Sequence[Key]) -> dict[bytes, Key]:
    """By digest. Raises `ConfigError` when two have the same name, or are the same key."""
    names: set[str] = set()
    found: dict[bytes, Key] = {}
    for key in keys:
        if key.name in names:
            raise ConfigError(f"keys: the name {key.name} is there twice")
        if key.sha256 in found:
            raise ConfigError(f"keys: {key.name} and {found[key.sha256].name} are the same key")
        names.add(key.name)
        found[key.sha256] = key
    return found


def digest_of(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()


def presented(headers: Iterable[Header]) -> list[bytes]:
    """Keys that a request shows, as `Authorization: Bearer KEY` or `x-api-key: KEY`; header names in lower case."""
    found: list[bytes] = []
    for name, value in headers:
        if name == b"authorization":
            scheme, _, value = value.strip().partition(b" ")
            if scheme.lower() != b"bearer":
                continue
        elif name != b"x-api-key":
            continue
        if value := value.strip():
            found.append(value)
    return found[:MOST_PRESENTED]


def new_secret() -> str:
    """A fresh key. It is not kept anywhere."""
    return PREFIX + secrets.token_urlsafe(SECRET_BYTES)


def new_entry(name: str, secret: str, tenant: str | None) -> str:
    """What to paste into the keys file. Raises `ConfigError` for a name that cannot be one."""
    fields = {"name": name, "sha256": digest_of(secret.encode()).hex()}
    if tenant is not None:
        fields["tenant"] = tenant
    try:
        msgspec.convert(fields, Entry)
    except msgspec.ValidationError as error:
        raise ConfigError(f"key: {explained(str(error), Entry)}") from error
    return "[[keys]]\n" + "".join(f'{field} = "{value}"\n' for field, value in fields.items())
