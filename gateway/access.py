"""Who may come in: the keys as they are now, each with its limits. `None` in place of an `Access`: nobody is asked.

Keys come from a file, from the environment, or both. With either configured every path needs a key but those in `OPEN`,
and a file that has lost all its keys lets nobody in rather than everybody. The file is read again each second: a change
counts from then on, also for connections that are open, and one that cannot be used changes nothing.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from gateway.config import Auth, ConfigError
from gateway.config import Upstream as UpstreamConfig
from gateway.isolation import Isolation
from gateway.keys import (
    KEYS_VARIABLE,
    Header,
    Key,
    NoKey,
    WrongKey,
    checked_keys,
    digest_of,
    keys_in_variable,
    presented,
    read_keys,
)
from gateway.limits import Caller, Fleet
from gateway.regular_file import read_regular
from gateway.secret import read_secret

log = logging.getLogger(__name__)

OPEN = frozenset((b"/health", b"/ready"))
"""Paths, exactly as received, that answer GET and HEAD without a key: load balancers have none."""
CREDENTIALS = frozenset((b"authorization", b"x-api-key"))
"""Request headers that hold a key."""
RELOAD_SECONDS = 1.0


class Access:
    """`clock` is the data path's. `file` is looked at again by `watch`."""

    def __init__(
        self,
        keys: list[Key],
        clock: Callable[[], float],
        *,
        file: Path | None = None,
        isolation: Isolation | None = None,
        fleet: Fleet | None = None,
    ) -> None:
        """`keys`: those of the environment; they stay. `fleet`: who else counts for their limits. Raises
        `ConfigError`."""
        self.isolation = isolation
        self._fleet = fleet
        self._fixed = keys
        self._clock = clock
        self._file = file
        self._seen: bytes | str = b""
        """What was last read of the file, or why it could not be."""
        self._callers: dict[bytes, Caller] = {}
        if file is not None:
            try:
                self._seen = read_regular(file)
            except OSError as error:
                raise ConfigError(f"auth.keys_file: {file}: {error.strerror}") from error
        self._use(self._seen)

    def __len__(self) -> int:
        return len(self._callers)

    def __repr__(self) -> str:
        return f"<Access for {len(self)} keys>"

    def caller(self, headers: Iterable[Header]) -> Caller:
        """Whose request it is; header names in lower case. Raises `NoKey` or `WrongKey`."""
        shown = presented(headers)
        for secret in shown:
            digest = digest_of(secret)
            found = self._callers.get(digest)
            if found is not None and hmac.compare_digest(found.key.sha256, digest):
                return found
        raise WrongKey if shown else NoKey

    async def watch(self) -> None:
        """Runs as long as the gateway: takes over what changes in the file."""
        while self._file is not None:
            await asyncio.sleep(RELOAD_SECONDS)
            try:
                self.reload(await asyncio.to_thread(read_regular, self._file))
            except OSError as error:
                self.reload(error.strerror or "cannot be read")

    def reload(self, seen: bytes | str) -> None:
        """The file's content, or why it could not be read. Says once what is new."""
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._use(seen)
        except ConfigError as error:
            log.warning("%s; the keys from before stay", error)
        else:
            if len(self):
                log.info("%s has changed: %d keys now", self._file, len(self))
            else:
                log.warning("%s has changed and holds no keys now: every request will be refused", self._file)

    def _use(self, seen: bytes | str) -> None:
        """Raises `ConfigError`, and then nothing has changed."""
        if isinstance(seen, str):
            raise ConfigError(f"{self._file}: {seen}")
        keys = checked_keys([*self._fixed, *read_keys(seen, str(self._file))])
        known = {caller.key.name: caller for caller in self._callers.values()}
        now = self._clock()
        callers: dict[bytes, Caller] = {}
        for digest, key in keys.items():
            caller = callers[digest] = known.get(key.name) or Caller(key, now, self._fleet)
            caller.renew(key, now)
        self._callers = callers


def configured_access(
    auth: Auth, environ: Mapping[str, str], clock: Callable[[], float], fleet: Fleet | None = None
) -> Access | None:
    """`None` when no keys are configured. Raises `ConfigError`."""
    listed = environ.get(KEYS_VARIABLE, "").strip()
    if not listed and auth.keys_file is None:
        for name, wanted in (("required", auth.required), ("isolate_tenants", auth.isolate_tenants)):
            if wanted:
                raise ConfigError(f"auth.{name} is true, but there are no keys: set auth.keys_file or {KEYS_VARIABLE}")
        if KEYS_VARIABLE in environ:
            log.warning("%s is set but holds no keys: nobody will be asked for one", KEYS_VARIABLE)
        return None
    isolation = None
    if auth.isolate_tenants:
        secret = environ.get(auth.isolation_secret_env, "")
        isolation = Isolation(secret.encode("utf-8", "surrogateescape") or secrets.token_bytes(32))
    file = Path(auth.keys_file) if auth.keys_file is not None else None
    access = Access(keys_in_variable(listed) if listed else [], clock, file=file, isolation=isolation, fleet=fleet)
    if not len(access):
        if auth.required:
            raise ConfigError(f"auth.required is true, but {file} holds no keys")
        log.warning("%s holds no keys yet: every request will be refused", file)
    return access


def replica_key(upstream: UpstreamConfig, environ: Mapping[str, str]) -> str | None:
    """The key that replicas ask for, if any. Raises `ConfigError`, which does not repeat it."""
    secret = read_secret("upstream.api_key", upstream.api_key_env, upstream.api_key_file, environ)
    return None if secret is None else secret.text


def without_credentials(headers: list[Header]) -> list[Header]:
    """Clients' keys end here: a replica must not see them."""
    return [header for header in headers if header[0] not in CREDENTIALS]
