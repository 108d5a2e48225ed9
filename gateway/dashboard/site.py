"""The page and its stream over HTTP.

Same rule as the other views: open on loopback, elsewhere with the admin key. A browser cannot show a bearer token when
it opens a page, but it asks for a password when told to; so below the view paths a password counts as the bearer token
(any user name). It does not on the admin listener: what a browser sends by itself must change nothing.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse

from gateway.admin import AdminListener
from gateway.dashboard.decisions import KEPT, shown
from gateway.dashboard.live import MAX_VIEWERS, Live
from gateway.proxy.errors import Blame, NotFound, answer, refusal
from gateway.responses import response_of
from gateway.views import Viewers

Application = Callable[[Any, Any, Any], Awaitable[None]]

PAGE = b"/dashboard"
ASSETS = {
    "page.css": "text/css; charset=utf-8",
    **dict.fromkeys(
        ("page.js", "stream.js", "fleet.js", "decisions.js", "breakdown.js", "plots.js", "dry-run.js", "text.js"),
        "text/javascript; charset=utf-8",
    ),
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'{admin}; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
BASIC = re.compile(rb"basic +([A-Za-z0-9+/=]+) *", re.IGNORECASE)
CHALLENGE = (b"www-authenticate", b'Basic realm="Warmlane: any name, the admin key as password", charset="UTF-8"')


class EventStream(StreamingResponse):
    """The frames, to one who looks; he counts as long as he is there."""

    def __init__(self, live: Live) -> None:
        super().__init__(live.frames(), media_type="text/event-stream", headers={"cache-control": "no-store"})
        self._live = live

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        with self._live.viewer():
            await super().__call__(scope, receive, send)


def add_dashboard(api: FastAPI, viewers: Viewers, live: Live, admin: AdminListener | None) -> None:
    """Paths of the page; what it shows is behind `viewers`, and the page itself too."""
    folder = files("gateway.dashboard") / "static"
    page = (folder / "index.html").read_text(encoding="utf-8")
    assets = {name: (folder / name).read_bytes() for name in ASSETS}

    @api.get("/dashboard", response_class=HTMLResponse)
    async def dashboard(request: Request) -> Response:
        """The live page: replicas, decisions, dry run. Beyond loopback it wants the admin key."""
        viewers.check(request.headers.raw)
        origin = admin.origin(request.headers.get("host", "")) if admin is not None else ""
        policy = POLICY.format(admin=f" {origin}" if origin else "")
        return HTMLResponse(page.replace("{{admin}}", origin), headers={**HEADERS, "content-security-policy": policy})

    @api.get("/dashboard/{name}", include_in_schema=False)
    async def asset(name: str, request: Request) -> Response:
        viewers.check(request.headers.raw)
        if name not in assets:
            return response_of(answer(NotFound("There is no such file.")))
        return Response(assets[name], media_type=ASSETS[name], headers=HEADERS)

    @api.get("/warmlane/live")
    async def stream(request: Request) -> Response:
        """What the page shows, as server-sent events, one each second. Beyond loopback it wants the admin key."""
        viewers.check(request.headers.raw)
        if live.is_leaving() or live.viewers >= MAX_VIEWERS:
            blame = Blame(503, "service_unavailable_error", "too_many_viewers")
            return response_of(refusal(blame, "Too many look already, or the gateway is about to stop."))
        return EventStream(live)

    @api.get("/warmlane/decisions")
    async def last_decisions(request: Request) -> Response:
        """The last decisions, newest first: reason, costs, and how the request ended. No prompt text."""
        viewers.check(request.headers.raw)
        return JSONResponse({"decisions": [shown(entry) for entry in live.decisions.newest_first(KEPT)]})


def for_browsers(application: Application) -> Application:
    """A password counts as the key below the view paths, and who comes to the page without one is asked for it."""

    async def served(scope: Any, receive: Any, send: Any) -> None:
        path = scope["raw_path"] if scope["type"] == "http" else b""
        is_page = path == PAGE or path.startswith(PAGE + b"/")
        if not (is_page or path.startswith(b"/warmlane/")):
            await application(scope, receive, send)
            return

        async def asking(message: Any) -> None:
            if message["type"] == "http.response.start" and message["status"] == 401:
                message = {**message, "headers": [*message["headers"], CHALLENGE]}
            await send(message)

        shown_keys = {**scope, "headers": [with_bearer(name, value) for name, value in scope["headers"]]}
        await application(shown_keys, receive, asking if is_page else send)

    return served


def with_bearer(name: bytes, value: bytes) -> tuple[bytes, bytes]:
    """A header with a password as the one with a bearer token."""
    basic = BASIC.fullmatch(value) if name == b"authorization" else None
    if basic is None:
        return name, value
    try:
        _, _, password = base64.b64decode(basic[1], validate=True).partition(b":")
    except binascii.Error:
        return name, value
    return name, b"Bearer " + password
