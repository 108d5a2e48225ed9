"""The admin listener: changes of state while the gateway runs. Off unless it is configured, on an address of its own.

Every request needs the admin key, also one for a path that does not exist. What can be changed: which replicas get new
requests (drain), and which there are besides those of the file (registration, `feeds/registry.py`). Nothing of it
outlives the process: the file says what the gateway starts with.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import ssl
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from uvicorn.server import ServerState

from gateway.admin_key import AdminKey
from gateway.changes import Drain, Register, Tell, Unregister, keep_to_oneself
from gateway.config import ConfigError, Seconds, Server, TokensPerSecond, replica_url
from gateway.config_errors import explained
from gateway.core.model import ReplicaId
from gateway.feeds.discovery import Discovery
from gateway.feeds.registry import Refused, Registry
from gateway.listeners import Doorway, base_url
from gateway.proxy import asgi_client
from gateway.proxy.body_budget import BodyBudget
from gateway.proxy.control_connection import ControlConnection
from gateway.proxy.errors import AdminKeyRequired, Blame, ErrorAnswer, answer, refusal
from gateway.proxy.handshakes import accepting
from gateway.proxy.places import Places
from gateway.proxy.sweep import sweep
from gateway.responses import refuse_as_openai_does, response_of, with_body
from gateway.tls import Certificate
from gateway.views import FleetView, is_loopback
from workers.supervisor import RestartRefused, Supervisor

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 * 1024
"""A registration is three short fields."""
SHOWN = 10
"""Replicas in a message."""
BACKLOG = 64
CLOSE_SECONDS = 1.0
"""For requests under way when the gateway stops: none takes longer but one that waits for a resolver."""

PAGE_HOST = re.compile(r"([A-Za-z0-9.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::\d{1,5})?")
ANY_ADDRESS = ("", "0.0.0.0", "::")
WANTED_URL = "The url of a replica is http://HOST[:PORT], without path, query or user."
REFUSED = {
    "registration_off": 403,
    "address_not_allowed": 403,
    "unresolvable": 400,
    "too_many_registrations": 409,
}
"""Status for each code of `registry.Refused`."""
CORS = [(b"access-control-allow-origin", b"*")]
"""The live page is of another origin (the gateway's address). Whoever has the key may ask from anywhere: browsers add
nothing to such a request by themselves, so a page of others has no key to show."""
PREFLIGHT = [
    *CORS,
    (b"access-control-allow-methods", b"POST"),
    (b"access-control-allow-headers", b"authorization"),
    (b"access-control-max-age", b"600"),
]
RESTART_REFUSED = {"no_such_worker": 404, "restart_under_way": 409, "no_stand_in": 409}
"""... and of `RestartRefused`."""


class Wanted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of a registration."""

    url: str
    prefill_rate: TokensPerSecond | None = None
    lease_seconds: Seconds | None = None
    """Forgotten after this unless it is registered again; never, when not given."""


class Restart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of a restart; an empty one means all."""

    replica: str | None = None
    alone: bool = False
    """Also where no other replica stands in."""


def build_admin_api(
    key: AdminKey,
    discovery: Discovery,
    registry: Registry,
    view: FleetView,
    clock: Callable[[], float],
    workers: Supervisor | None = None,
    tell: Tell = keep_to_oneself,
) -> Any:
    """The ASGI application of the admin listener. `tell` hears of each change, for other processes to do the same."""
    api = FastAPI(title="Warmlane admin", docs_url=None, redoc_url=None, redirect_slashes=False)
    refuse_as_openai_does(api)
    bodies = BodyBudget(BACKLOG * MAX_BODY_BYTES)

    @api.get("/warmlane/replicas")
    async def replicas() -> Response:
        """All replicas, what the loss of each would cost, and who is registered but stays out."""
        return JSONResponse(view.show_with_worth(clock()))

    add_registrations(api, registry, view, bodies, tell)
    add_drains(api, discovery, view, clock, tell)
    if workers is not None:
        add_workers(api, workers, bodies)
    return guarded(api, key)


def add_registrations(api: FastAPI, registry: Registry, view: FleetView, bodies: BodyBudget, tell: Tell) -> None:
    """Paths for replicas that come and go by themselves."""

    @api.post("/warmlane/replicas")
    async def register(request: Request) -> Response:
        """Register a replica, or renew its registration."""
        return await with_body(request, MAX_BODY_BYTES, bodies, take_in)

    async def take_in(body: bytes) -> Response:
        try:
            wanted = msgspec.json.decode(body, type=Wanted)
            url = ReplicaId(replica_url(wanted.url))
            registration = await registry.register(url, wanted.prefill_rate, wanted.lease_seconds)
        except (msgspec.DecodeError, RecursionError) as error:
            return response_of(refused(400, "invalid_registration", explained(str(error), Wanted)))
        except ConfigError:  # its message repeats the URL, and with it a password that somebody put there
            return response_of(refused(400, "invalid_replica_url", WANTED_URL))
        except Refused as error:
            return response_of(refused(REFUSED[error.code], error.code, str(error)))
        await tell(Register(url, wanted.prefill_rate, wanted.lease_seconds))
        return JSONResponse(view.show_registration(registration))

    @api.delete("/warmlane/replicas/{replica:path}")
    async def unregister(replica: str) -> Response:
        """Take a registration back. Requests that run there may finish."""
        url = named(replica)
        if not registry.unregister(url):
            return response_of(refused(404, "not_registered", f"Not registered: {replica}"))
        await tell(Unregister(url))
        return Response(status_code=204)


def add_drains(api: FastAPI, discovery: Discovery, view: FleetView, clock: Callable[[], float], tell: Tell) -> None:
    """Paths that decide which replicas get new requests."""

    @api.post("/warmlane/replicas/{replica:path}/drain")
    async def drain(replica: str) -> Response:
        """No new requests for this replica. Those that run there finish."""
        return await switch(replica, True)

    @api.post("/warmlane/replicas/{replica:path}/undrain")
    async def undrain(replica: str) -> Response:
        """It gets requests again."""
        return await switch(replica, False)

    async def switch(replica: str, draining: bool) -> Response:
        url = next((ReplicaId(url) for url, name in view.names.items() if name == replica), named(replica))
        if not discovery.drain(url, draining):
            return response_of(refused(404, "no_such_replica", unknown(replica, view, clock())))
        log.info("%s %s", url, "is drained: no new requests" if draining else "is not drained any more")
        await tell(Drain(url, draining))
        return JSONResponse(view.show_replica(url, clock()))


def add_workers(api: FastAPI, workers: Supervisor, bodies: BodyBudget) -> None:
    """Paths for the replicas that this process runs itself."""

    @api.get("/warmlane/workers")
    async def show() -> Response:
        """Their processes, and the restart that is under way or was the last."""
        return JSONResponse(workers.show())

    @api.post("/warmlane/workers/restart")
    async def restart(request: Request) -> Response:
        """Begin to renew one, or all one after the other."""
        return await with_body(request, MAX_BODY_BYTES, bodies, begin)

    async def begin(body: bytes) -> Response:
        try:
            wanted = msgspec.json.decode(body, type=Restart) if body else Restart()
            workers.restart(wanted.replica, alone=wanted.alone)
        except (msgspec.DecodeError, RecursionError) as error:
            return response_of(refused(400, "invalid_restart", explained(str(error), Restart)))
        except RestartRefused as error:
            return response_of(refused(RESTART_REFUSED[error.code], error.code, str(error)))
        return JSONResponse(workers.show(), status_code=202)


def named(replica: str) -> ReplicaId:
    """A replica as a path names it: its URL, or the URL's `HOST:PORT`. What is neither names none."""
    try:
        return ReplicaId(replica_url(replica if "://" in replica else f"http://{replica}"))
    except ConfigError:
        return ReplicaId("")


def unknown(replica: str, view: FleetView, now: float) -> str:
    """Why nothing is known of a replica, and of which something is."""
    if replica in view.names.values():
        return f"{replica} gets no requests now: it starts, or was given up"
    shown = view.show(now)["replicas"]
    known = [f"{one['name']} ({one['replica']})" if one["name"] else one["replica"] for one in shown]
    more = f" and {len(known) - SHOWN} more" if len(known) > SHOWN else ""
    return f"No such replica: {replica}. There are: {', '.join(known[:SHOWN]) or 'none'}{more}."


def refused(status: int, code: str, message: str) -> ErrorAnswer:
    return refusal(Blame(status, "invalid_request_error", code), message)


def guarded(api: Any, key: AdminKey) -> Any:
    """Nobody gets as far as the paths without the key."""

    async def served(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return

        async def readable(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *CORS]}
            await send(message)

        if is_preflight(scope):
            await send({"type": "http.response.start", "status": 204, "headers": PREFLIGHT})
            await send({"type": "http.response.body"})
        elif key.opens(scope["headers"]):
            await api(scope, receive, readable)
        else:
            await asgi_client.refuse_unread(readable, answer(AdminKeyRequired()), scope, receive, unread=True)

    return served


def is_preflight(scope: Any) -> bool:
    """A browser asks whether a page may ask: without the key, and told nothing that depends on it or on the path."""
    return scope["method"] == "OPTIONS" and any(
        name == b"access-control-request-method" for name, _ in scope["headers"]
    )


class AdminListener:
    """Where it is reached, with the gateway's certificate unless only this machine can reach it."""

    def __init__(self, doorway: Doorway, host: str, certificate: Certificate | None) -> None:
        self._doorway, self._host = doorway, host
        self._tls = None if certificate is None or is_loopback(host) else certificate.context
        self._scheme = "http" if self._tls is None else "https"

    @property
    def url(self) -> str:
        return base_url(self._doorway.address, self._scheme)

    def origin(self, page_host: str) -> str:
        """As a browser reaches it that sees the gateway under this host (`Host` header): by the same name, unless it
        listens on one address alone. Empty where that is no name."""
        name = PAGE_HOST.fullmatch(page_host)
        if name is None:
            return ""
        host = name[1]
        if not (self._host in ANY_ADDRESS or is_loopback(self._host)):
            host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{self._scheme}://{host}:{self._doorway.address[1]}"

    def running(self, api: Any, limits: Server) -> contextlib.AbstractAsyncContextManager[None]:
        return listening(api, self._doorway, limits, self._tls)


@contextlib.asynccontextmanager
async def listening(
    api: Any, doorway: Doorway, limits: Server, tls: ssl.SSLContext | None = None
) -> AsyncIterator[None]:
    """Serve `api` to who comes that way, beside the gateway's own server and with the same limits of time and size."""
    loop, state = asyncio.get_running_loop(), ServerState()
    config = uvicorn.Config(api, ws="none", lifespan="off", access_log=False, log_config=None, log_level="error")

    places = Places(limits.max_connections)

    def connection() -> asyncio.Protocol:
        return ControlConnection(limits, places, config=config, server_state=state, app_state={}, _loop=loop)

    accepted = accepting(connection, tls, limits.header_timeout_seconds, places, state, loop)
    door = await doorway.open(accepted, BACKLOG)
    sweeping = asyncio.create_task(sweep(state, loop))
    try:
        yield
    finally:
        door.close()
        sweeping.cancel()
        for one in list(state.connections):
            one.shutdown()
        if state.tasks:
            await asyncio.wait(set(state.tasks), timeout=CLOSE_SECONDS)
        for one in list(state.connections):
            one.transport.abort()
        await asyncio.gather(sweeping, return_exceptions=True)
