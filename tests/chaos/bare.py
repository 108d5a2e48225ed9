"""An ASGI application that counts the whole requests that reach it, to see what uvicorn's parsers make of a payload."""

from __future__ import annotations

from typing import Any

count = 0


async def app(scope: Any, receive: Any, send: Any) -> None:
    global count
    assert scope["type"] == "http"
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        if not message.get("more_body", False):
            break
    body = b"%d" % count
    if scope["path"] != "/count":
        count += 1
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})
