"""The life of a gateway process: what is opened, started, served and ended, in this order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Callable

import uvloop

from gateway.admin import AdminListener, build_admin_api
from gateway.assembly import Gateway
from gateway.changes import keep_to_oneself
from gateway.config import Config
from gateway.descriptors import raise_limit, within_descriptors
from gateway.feeds.announcer import Announcer
from gateway.feeds.sealing import SENDER_BYTES
from gateway.listeners import Bound, Doorway, base_url, listen_all
from gateway.memory import tune_memory
from gateway.own_replicas import OwnReplicas
from gateway.proxy.sweep import sweep
from gateway.server import Server, end_what_is_left, http_settings
from gateway.several.member import Member, Parts
from gateway.stderr_log import report_unforeseen
from gateway.stop_signals import StopSignals
from gateway.tls import Certificate
from gateway.views import is_loopback
from workers.supervisor import Supervisor

log = logging.getLogger(__name__)

TOLD_SECONDS = 0.1
"""For those that waited for their turn until the end, to be told that it does not come."""


@contextlib.asynccontextmanager
async def admin_listener(
    gateway: Gateway, listener: AdminListener | None, workers: Supervisor | None
) -> AsyncIterator[None]:
    """Runs it where one is configured."""
    if listener is None or gateway.admin_key is None:
        yield
        return
    view, registry = gateway.view, gateway.registry
    tell = keep_to_oneself if gateway.member is None else gateway.member.tell
    api = build_admin_api(gateway.admin_key, gateway.discovery, registry, view, gateway.clock, workers, tell)
    async with listener.running(api, gateway.config.server):
        if gateway.member is None:
            log.info("admin listener on %s", listener.url)
        yield


async def serve(config: Config, *, on_ready: Callable[[str], None] | None = None) -> int:
    """Run one gateway until a signal stops it. Returns the exit code. Raises `StartError` and `ConfigError`."""
    with StopSignals().heard() as signals:
        return await serve_until(signals, config, on_ready=on_ready)


async def serve_until(
    signals: StopSignals,
    config: Config,
    *,
    on_ready: Callable[[str], None] | None = None,
    workers: Supervisor | None = None,
    announcer: Announcer | None = None,
    member: Member | None = None,
) -> int:
    """`serve`, for whoever hears the signals. `workers` are started once all that can be wrong with the configuration
    is known; they outlive this call. The `announcer` tells other gateways of them. `member`: this is one of several
    processes, which gets its connections there."""
    config = within_descriptors(config, raise_limit())
    loop = asyncio.get_running_loop()
    certificate = own_certificate(config)
    gateway = Gateway(config, loop)
    if gateway.door.access is None and not is_loopback(config.server.host):
        log.warning("listening on %s without keys: whoever reaches it may use the replicas", config.server.host)
    doorway, admin_doorway, sockets = doorways(config, member)
    admin = AdminListener(admin_doorway, config.admin.host, certificate) if admin_doorway is not None else None
    url = base_url(doorway.address, "http" if certificate is None else "https")
    settings = http_settings(gateway, admin, certificate)
    served_through = doorway if member is not None else None
    server = Server(settings, gateway, lambda: on_ready(url) if on_ready else None, signals, served_through)
    tune_memory()
    beside = [sweep(server.server_state, loop)]
    if certificate is not None:
        beside.append(certificate.follow())
    if member is not None:
        join(member, gateway, lambda: len(server.server_state.connections))
    async with gateway.run_beside(*beside), admin_listener(gateway, admin, workers):
        if workers is not None:
            gateway.telemetry.workers = workers
            gateway.view.names = workers.names
            workers.start(OwnReplicas(gateway.router, gateway.discovery, gateway.registry, gateway.clock, announcer))
        await server.serve(sockets=sockets)
        gateway.door.stopping = True
        if gateway.door.gate.close():
            await asyncio.sleep(TOLD_SECONDS)
        await end_what_is_left(server)
        if member is not None:
            member.count()
    return 0 if server.started else 1


def doorways(config: Config, member: Member | None) -> tuple[Doorway, Doorway | None, list[socket.socket]]:
    """Where clients come in, where admins do, and the sockets of clients that are to be closed. Raises `StartError`."""
    if member is not None:
        return *member.doorways, []
    sock, admin_sock = listen_all(config)
    return Bound(sock), Bound(admin_sock) if admin_sock is not None else None, [sock]


def join(member: Member, gateway: Gateway, connections: Callable[[], int]) -> None:
    """The gateway becomes one of several."""
    gateway.member = member
    gateway.live.process = member.called
    peers = gateway.peers
    member.attach(
        Parts(
            gateway.router,
            gateway.telemetry,
            gateway.discovery,
            gateway.registry,
            on_heard=gateway.door.gate.release,
            connections=connections,
            requests=gateway.requests,
            clock=gateway.clock,
            name=secrets.token_bytes(SENDER_BYTES) if peers is None else peers.name,
            siblings=set() if peers is None else peers.siblings,
            limits=gateway.limits,
        )
    )


def own_certificate(config: Config) -> Certificate | None:
    """Raises `ConfigError`."""
    file = config.server.tls_certificate
    return None if file is None else Certificate(file, config.server.tls_key)


async def check(config: Config) -> None:
    """Raises `ConfigError` for what a gateway would refuse."""
    own_certificate(config)
    Gateway(config, asyncio.get_running_loop()).telemetry.close()


def run(config: Config, *, on_ready: Callable[[str], None] | None = None) -> int:
    """`serve` on an event loop of its own."""

    async def run_alone() -> int:
        asyncio.get_running_loop().set_exception_handler(report_unforeseen)
        return await serve(config, on_ready=on_ready)

    return uvloop.run(run_alone())
