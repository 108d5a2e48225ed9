"""The key check in front of everything that is an ASGI application here: control endpoints and inference alike.

Denies by default: what is not in `OPEN` needs a key, also a path that does not exist. It looks at the path exactly as
it was received (`raw_path`), like `endpoints.py`: `/%68ealth` is not `/health`. The fast way asks the same `Access` at
the end of each head (`http_client.py`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from gateway.access import OPEN
from gateway.keys import Denied, Header
from gateway.proxy import asgi_client
from gateway.proxy.asgi_client import Message, Receive, Send
from gateway.proxy.front_door import FrontDoor

Application = Callable[[Message, Receive, Send], Awaitable[None]]


Opens = Callable[[Iterable[Header]], bool]
VIEWS = (b"/warmlane/", b"/dashboard")
"""Paths for operators, who need no client's key: the views ask for the admin key themselves."""


def guarded(application: Application, door: FrontDoor, is_admin: Opens) -> Application:
    """`application`, for whoever has a key; `scope["auth"]` says who it is. `is_admin`: whether headers hold the admin
    key, which opens views only."""
    access = door.access
    if access is None:
        return application

    async def served(scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not is_open(scope):
            try:
                scope["auth"] = access.caller(scope["headers"])
            except Denied as error:
                if not (scope["raw_path"].startswith(VIEWS) and is_admin(scope["headers"])):
                    await asgi_client.refuse(door, error, scope, receive, send)
                    return
        await application(scope, receive, send)

    return served


def is_open(scope: Message) -> bool:
    return scope["raw_path"] in OPEN and scope["method"] in ("GET", "HEAD")
