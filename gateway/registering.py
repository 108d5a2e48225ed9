"""`--register`: what the command line says of how replicas of this machine announce themselves to gateways."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from gateway.config import ConfigError, Redis, check_redis, replica_url
from gateway.feeds.announcer import Announcer
from gateway.redis_feeds import understood
from workers.command_line import base_url

REDIS_PORT = 6379
WILDCARDS = ("0.0.0.0", "::")


def announcer(url: str, fleet: str, secret_env: str = Redis().secret_env) -> Announcer:
    """Raises `ConfigError`, without the URL: it may hold a password."""
    check_redis(url, "--register")
    secret = os.environ.get(secret_env, "")
    if not secret:
        raise ConfigError(f"--register: gateways take only what the fleet's secret made; set ${secret_env}")
    with understood("--register"):
        return Announcer(url, fleet, secret.encode("utf-8", "surrogateescape"))


def announced_url(host: str, port: int, redis: str, told: str | None) -> str:
    """Where gateways reach a replica that listens on `host`: as told, else there; on all addresses, at the one from
    which this machine reaches Redis. Raises `ConfigError`."""
    if told is not None:
        return replica_url(told, "--register-as")
    if host in WILDCARDS:
        host = address_towards(redis)
    return replica_url(base_url(host, port), "the URL that is registered,")


def address_towards(redis: str) -> str:
    """Nothing is sent. Raises `ConfigError`."""
    parts = urlsplit(redis)
    if parts.scheme == "unix":
        return "127.0.0.1"
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port or REDIS_PORT, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as sock:
            sock.connect(address)
            return str(sock.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"--register: {parts.hostname}: {error.strerror}; say --register-as URL") from error


@dataclass(frozen=True, slots=True)
class Registered:
    """The presence of one replica in the foreground (`workers.launch.Presence`)."""

    announcer: Announcer
    url: str

    @contextlib.asynccontextmanager
    async def __call__(self, reached_at: str, prefill_rate: float | None) -> AsyncIterator[None]:
        self.announcer.announce(self.url, prefill_rate, reached_at)
        announcing = asyncio.create_task(self.announcer.run())
        try:
            yield
        finally:
            announcing.cancel()
            await asyncio.gather(announcing, return_exceptions=True)
