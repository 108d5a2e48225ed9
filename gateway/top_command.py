"""`warmlane top`: the live page in a terminal; one picture of it where there is none."""

from __future__ import annotations

import asyncio
from typing import Annotated

from typer import Argument, Option

GatewayUrl = Annotated[str, Argument(metavar="[URL]", help="The gateway.")]
AdminUrl = Annotated[
    str | None, Option("--admin", metavar="URL", help="Its admin listener, to drain replicas from here.")
]
KeyVariable = Annotated[
    str, Option("--key-env", metavar="NAME", help="Environment variable with the admin key, where one is needed.")
]
Once = Annotated[bool, Option("--once", help="Print one picture and end, as when the output is no terminal.")]

DONE = 0


def top(
    url: GatewayUrl = "http://127.0.0.1:8000",
    admin: AdminUrl = None,
    key_env: KeyVariable = "WARMLANE_ADMIN_KEY",
    once: Once = False,
) -> int:
    """Watch a gateway in the terminal: replicas, decisions as they come and why, the last 15 minutes."""
    from gateway.cli import asking
    from gateway.top.session import Session, new_console, show_once

    console = new_console()
    with asking(key_env) as key:
        if once or not console.is_terminal or console.is_dumb_terminal:
            asyncio.run(show_once(console, url, key))
        else:
            asyncio.run(Session(console, url, admin, key).run())
    return DONE
