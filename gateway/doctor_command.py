"""`warmlane doctor`: look at a running fleet and say what is wrong with it; again and again with `--watch`."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

if TYPE_CHECKING:
    from gateway.doctor.looking import Keys
    from gateway.doctor.report import Report

Urls = Annotated[
    list[str], Argument(metavar="URL...", help="Gateways (their replicas are looked at too), or replicas.")
]
Seconds = Annotated[
    float, Option("--seconds", metavar="N", min=0.5, max=3600, help="How long to look; growth wants a minute.")
]
Watch = Annotated[bool, Option("--watch", help="Again and again, until Ctrl-C: what came (+) and what went (-).")]
Json = Annotated[bool, Option("--json", help="Print JSON; with --watch a line whenever the findings change.")]
ReplicaKey = Annotated[
    str | None, Option("--key-env", metavar="NAME", help="Environment variable with the key that replicas ask for.")
]
GatewayKey = Annotated[
    str | None, Option("--gateway-key-env", metavar="NAME", help="The same for a client of the gateway.")
]
AdminKey = Annotated[
    str, Option("--admin-key-env", metavar="NAME", help="And with its admin key, where one is needed.")
]

NO_ERROR, ERRORS = 0, 1
ADMIN_KEY = "WARMLANE_ADMIN_KEY"


def doctor(
    urls: Urls,
    seconds: Seconds = 10.0,
    watch: Watch = False,
    as_json: Json = False,
    key_env: ReplicaKey = None,
    gateway_key_env: GatewayKey = None,
    admin_key_env: AdminKey = ADMIN_KEY,
) -> int:
    """Look at the metrics of a running fleet for some seconds: findings, by which figures, and the flag to change.

    Exit code 1 if a finding is an error, else 0."""
    from gateway.config import replica_url
    from gateway.doctor.looking import Keys

    keys = Keys(named(key_env, "--key-env"), named(gateway_key_env, "--gateway-key-env"), admin_key(admin_key_env))
    addresses = [replica_url(url, "URL") for url in urls]
    shown: list[Report] = []
    try:
        asyncio.run(show(shown, addresses, seconds, keys, watch=watch, as_json=as_json))
    except KeyboardInterrupt:
        pass
    return ERRORS if shown and shown[-1].worst == "error" else NO_ERROR


async def show(shown: list[Report], urls: list[str], seconds: float, keys: Keys, *, watch: bool, as_json: bool) -> None:
    """Prints a report; then, watching, what is different in each further one. `shown` ends with the last of them."""
    from gateway.doctor import report as reports
    from gateway.doctor.looking import look_around
    from gateway.doctor.rules import examine

    while watch or not shown:
        window = await look_around(urls, seconds, keys)
        told = reports.report(window, examine(window))
        if not shown:
            print(reports.as_json(told, one_line=watch) if as_json else reports.as_text(told), flush=True)
        elif changed := reports.changes(shown[-1], told):
            lines = [reports.as_json(told, one_line=True)] if as_json else stamped(changed)
            print(*lines, sep="\n", flush=True)
        shown[:] = [told]


def stamped(lines: list[str]) -> list[str]:
    return [f"{time.strftime('%H:%M:%S')} {line}" for line in lines]


def named(variable: str | None, option: str) -> str | None:
    """The key in the variable that an option names. Raises `Refused`, never with any of the key in it."""
    from gateway.cli import Refused

    if variable is None:
        return None
    key = key_in(variable)
    if key is None:
        raise Refused(f"{option}: ${variable} is not set, or empty")
    return key


def admin_key(variable: str) -> str | None:
    """One of the default's name may be missing, for most gateways ask for none. Raises `Refused`."""
    is_asked = variable != ADMIN_KEY or variable in os.environ
    return named(variable, "--admin-key-env") if is_asked else None


def key_in(variable: str) -> str | None:
    """`None` where the variable is not set or empty. Raises `Refused`."""
    from gateway.cli import Refused

    key = os.environ.get(variable, "").strip()
    if not key.isascii() or not key.isprintable() or " " in key:
        raise Refused(f"${variable}: a key has letters, digits and signs only")
    return key or None
