"""Wires the gateway: builds every object once, starts and stops what runs beside the requests.

FastAPI carries the control endpoints (`/health`, `/ready`, `/metrics`, `/v1/models`, the dry run, API docs);
everything else falls through to the inference paths. uvicorn accepts the connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from importlib.metadata import version
from random import Random
from typing import Any, cast

import uvicorn
import uvloop
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from gateway.access import configured_access, replica_key
from gateway.admin import AdminListener, build_admin_api
from gateway.admin_key import read_admin_key
from gateway.changes import keep_to_oneself
from gateway.config import Config, ConfigError
from gateway.config import Server as ServerConfig
from gateway.core.model import (
    Decision,
    Fact,
    HealthState,
    ModelCard,
    ReplicaId,
    ReplicaRemoved,
    RoutingError,
    UnknownModel,
)
from gateway.core.policy import policy_named
from gateway.core.router import Router
from gateway.dashboard.live import Live
from gateway.dashboard.site import add_dashboard, for_browsers
from gateway.descriptors import raise_limit, within_descriptors
from gateway.feeds.addresses import Allowlist
from gateway.feeds.announced import Announced
from gateway.feeds.announcements import REFUSALS
from gateway.feeds.announcer import Announcer
from gateway.feeds.background import Background
from gateway.feeds.discovery import Discovery
from gateway.feeds.engines import Engines, Said
from gateway.feeds.fetch import ReplicaClient
from gateway.feeds.peers import Peers
from gateway.feeds.probes import Probes, list_models
from gateway.feeds.registry import Registry
from gateway.feeds.replicas import Replicas
from gateway.feeds.scrape import Scrape
from gateway.feeds.sealing import SENDER_BYTES, RefusedFor
from gateway.feeds.token_counts import TokenCounts
from gateway.fleet_limits import FleetLimits
from gateway.isolation import CannotSalt
from gateway.keys import Denied
from gateway.listeners import BACKLOG, Bound, Doorway, base_url, listen_all
from gateway.memory import tune_memory
from gateway.model_list import caller_of, model_object, models_for
from gateway.notices import Notices
from gateway.own_replicas import OwnReplicas
from gateway.proxy import asgi_client, http_client
from gateway.proxy.call import Call
from gateway.proxy.control_connection import ControlConnection
from gateway.proxy.endpoints import ENDPOINTS
from gateway.proxy.errors import BadBody, EncodedBody, NotFound, answer
from gateway.proxy.forwarding import read_headers
from gateway.proxy.front_door import FrontDoor
from gateway.proxy.guard import guarded
from gateway.proxy.handshakes import accepting
from gateway.proxy.sweep import sweep
from gateway.proxy.upstream import Header
from gateway.replica_sources import Standing, announced_in, sources_of, standing
from gateway.request_log import RequestRecord
from gateway.responses import refuse_as_openai_does, response_of, with_body
from gateway.rotated_file import RotatedFile
from gateway.several.member import Member, Parts
from gateway.shadow import Shadows
from gateway.stderr_log import report_failure, report_unforeseen
from gateway.stop_signals import StopSignals
from gateway.telemetry import Telemetry
from gateway.tls import Certificate, replica_context
from gateway.tracing import open_tracing
from gateway.views import FleetView, Viewers, explained, is_loopback
from workers.supervisor import Supervisor

log = logging.getLogger(__name__)

FLUSH_SECONDS = 0.2
"""Log records are written in batches this far apart; a crash loses at most these."""
LAG_SECONDS = 0.05
"""Between two looks at how late the event loop is: a 99th percentile within seconds, for 0.02 % of a core."""
BACKSTOP_SECONDS = 2
TOLD_SECONDS = 0.1
"""For those that waited for their turn until the end, to be told that it does not come."""


class Gateway:
    """All objects of one gateway process. `run_beside` holds what runs beside the requests. Raises `ConfigError`."""

    def __init__(self, config: Config, loop: asyncio.AbstractEventLoop) -> None:
        self.config = config
        self.clock = time.monotonic
        self.replica_tls = replica_context(config.upstream.ca_file)
        settings = config.routing.settings()
        self.router = Router(settings, seed=secrets.randbits(32))
        self.telemetry = Telemetry(
            log=sys.stdout.buffer if config.server.log == "json" else None,
            decision_log=decision_log(config.server),
            log_blocks=config.server.log_blocks,
            router=self.router,
            tasks=lambda: len(asyncio.all_tasks(loop)),
            held_bytes=lambda: self.door.bodies.held,
            connections=lambda: self.door.connections(),
            clock=self.clock,
        )
        if config.routing.shadow:
            shadows = [(policy_named(name), self.telemetry.shadow(name)) for name in config.routing.shadow]
            self.router.before_start = Shadows(self.router, shadows).compare
        key = replica_key(config.upstream, os.environ)
        self.limits = FleetLimits(gateways=config.redis.url is not None, processes=config.server.workers > 1)
        self.client = ReplicaClient(self.replica_tls, config.upstream.tls_server_name, key)
        self.door = FrontDoor(
            self.router,
            self.telemetry,
            config.server,
            config.upstream,
            self.clock,
            loop,
            block_bytes=settings.block_bytes,
            tls=self.replica_tls,
            access=configured_access(
                config.auth, os.environ, self.clock, self.limits if self.limits.has_others else None
            ),
            replica_key=key,
        )
        self.tracing = open_tracing(config.tracing, self.telemetry.model_label, self.clock, time.time)
        self.door.tracing = self.telemetry.traces = self.tracing
        self.replicas = Replicas()
        said = {ReplicaId(one.url): Said(one.engine, one.cache_tokens) for one in config.replicas}
        self.engines = Engines(said, isolated=config.auth.isolate_tenants)
        self.discovery = Discovery(
            self.replicas,
            self.observe,
            static={replica.url: replica.prefill_rate for replica in config.replicas},
            sources=sources_of(config.discovery, self.engines.say, self._standing),
            interval_seconds=config.discovery.interval_seconds,
            longest_interval_seconds=config.discovery.longest_interval_seconds,
        )
        self.registry = Registry(
            Allowlist(config.admin.allow),
            self.discovery.note_registered,
            self.discovery.is_configured,
            self._list_models,
            allow_existing_models=config.admin.allow_existing_models,
            interval_seconds=config.discovery.interval_seconds,
        )
        self.admin_key = read_admin_key(config.admin, os.environ)
        self.viewers = Viewers(config.server.host, self.admin_key)
        self.peers = self._peers() if config.redis.url is not None else None
        self.announced: Announced | None = None
        if config.discovery.redis:
            series = self.telemetry.announcements(REFUSALS)
            self.announced = announced_in(config, os.environ, self.registry, self._standing, series, self.clock)
        self.member: Member | None = None
        """The way to the other processes, if this is one of several."""
        self.view = FleetView(self.router, self.discovery, self.registry, self.engines)
        policy = config.routing.policy
        self.live = Live(self.router, self.telemetry, self.engines, self.clock, policy, lambda: self.draining)
        self.door.on_flight = self._on_flight()

    def _on_flight(self) -> Callable[[RequestRecord, Decision], None] | None:
        """Who hears of decisions."""
        ring = self.live.decisions.note if self.config.server.dashboard else None
        if self.config.server.decision_log_file is None:
            return ring
        note = self.telemetry.decided
        if ring is None:
            return note

        def both(record: RequestRecord, decision: Decision) -> None:
            ring(record, decision)
            note(record, decision)

        return both

    @property
    def draining(self) -> bool:
        return self.door.draining

    def observe(self, fact: Fact) -> None:
        self.registry.heard(fact)
        self.router.observe(fact, self.clock())
        if isinstance(fact, ReplicaRemoved):
            self.door.retire(fact.replica)
            self.engines.forget(fact.replica)
        self.door.gate.release()

    def requests(self) -> int:
        """That run, or wait for a replica."""
        now = self.router.statistics(self.clock())
        return now.in_flight + now.waiting

    def ready(self) -> bool:
        """Some replica is up. A replica that is tried only because none is better does not count."""
        replicas = self.router.statistics(self.clock()).replicas
        return not self.draining and any(one.health is HealthState.UP and not one.draining for one in replicas)

    @contextlib.asynccontextmanager
    async def run_beside(self, *more: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
        """Feeds, deadline sweeps and log flush, from start-up until shut-down."""
        if (access := self.door.access) is not None:
            more = (*more, access.watch())
        notices = Notices(lambda: self.router.statistics(self.clock()).replicas)
        beside = (self.door.sweep(), self.flush(), self.watch_lag(), notices.run())
        if self.config.server.dashboard:
            more = (*more, self.live.run())
        tasks = [asyncio.create_task(job) for job in (*self._feeds(), *beside, *more)]
        for task in tasks:
            task.add_done_callback(report_failure)
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.door.close()
            self.telemetry.close()
            if self.tracing is not None:
                self.tracing.close()

    def _feeds(self) -> list[Coroutine[Any, Any, None]]:
        feeds, replicas, client = self.config.feeds, self.replicas, self.client
        probes = Probes(
            replicas,
            self.observe,
            client,
            interval_seconds=feeds.probe_interval_seconds,
            timeout_seconds=feeds.probe_timeout_seconds,
            random=Random(),
            engines=self.engines,
        )
        scrape = Scrape(
            replicas,
            self.observe,
            client,
            interval_seconds=feeds.scrape_interval_seconds,
            timeout_seconds=feeds.scrape_timeout_seconds,
            max_bytes=feeds.scrape_max_bytes,
            random=Random(),
            engines=self.engines,
        )
        jobs = [self.discovery.run(), probes.run(), scrape.run()]
        if self.peers is not None:
            jobs.append(self.peers.run())
        if self.member is not None:
            jobs.append(self.member.run())
        if self.door.access is not None:
            background = self.door.background = Background(self.clock, self.telemetry.tokens_charged)
            jobs.append(background.run(client))
        if self.config.admin.allow:
            jobs.append(self.registry.run())
        if self.announced is not None:
            jobs.append(self.announced.run())
        if feeds.tokenize and policy_named(self.config.routing.policy).reads_cache:
            counts = TokenCounts(self.observe, self.engines)
            self.door.on_prompt = counts.note
            jobs.append(counts.run(client))
        return jobs

    def _standing(self) -> Standing:
        return standing(self.router.statistics(self.clock()).replicas)

    def _peers(self) -> Peers:
        """Raises `ConfigError`."""
        redis = self.config.redis
        secret = os.environ.get(redis.secret_env, "")
        if not secret:
            log.warning("[redis] without $%s: whoever writes to that Redis can steer requests", redis.secret_env)
        try:
            return Peers(
                self.router,
                self.door.gate.release,
                self.telemetry.peers([reason.value for reason in RefusedFor]),
                url=redis.url or "",
                name=redis.name,
                secret=secret.encode("utf-8", "surrogateescape"),
                max_bytes=redis.memory_mib * 2**20,
                clock=self.clock,
                limits=self.limits,
            )
        except ValueError as error:
            raise ConfigError("redis.url: is not understood by the Redis client") from error

    async def _list_models(self, replica: ReplicaId) -> tuple[ModelCard, ...]:
        """What a replica that is not known yet serves."""
        return await list_models(self.client, replica, timeout_seconds=self.config.feeds.probe_timeout_seconds)

    async def flush(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            self.telemetry.flush()

    async def watch_lag(self) -> None:
        """How late a timer fires is how long an event that comes now would lie there."""
        while True:
            due = self.clock() + LAG_SECONDS
            await asyncio.sleep(LAG_SECONDS)
            self.telemetry.loop_was_late(self.clock() - due)


def build_api(gateway: Gateway, admin: AdminListener | None = None) -> FastAPI:
    """The control endpoints. What they do not match goes to the inference paths. `admin`: where its listener is."""

    api = FastAPI(title="Warmlane", version=version("warmlane"), redirect_slashes=False)
    refuse_as_openai_does(api)

    @api.head("/health", include_in_schema=False)  # load balancers ask so; the server sends no body then
    @api.get("/health", response_class=PlainTextResponse)
    async def health() -> str:
        """Liveness: the process answers."""
        return "ok"

    @api.head("/ready", include_in_schema=False)
    @api.get("/ready")
    async def ready() -> Response:
        """Readiness: 200 when at least one replica can serve, else 503."""
        ready = gateway.ready()
        return JSONResponse({"ready": ready, "draining": gateway.draining}, status_code=200 if ready else 503)

    @api.get("/metrics")
    async def metrics() -> Response:
        """Prometheus metrics."""
        page = gateway.telemetry.render() if gateway.member is None else await gateway.member.metrics()
        return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")

    @api.get("/v1/models")
    async def models(request: Request) -> Response:
        """The models of all available replicas, merged; with keys, those that the key may use."""
        return JSONResponse(
            {"object": "list", "data": [model_object(card) for card in models_for(gateway.router, request)]}
        )

    @api.get("/v1/models/{model:path}")
    async def model(model: str, request: Request) -> Response:
        """One model; ids may contain slashes."""
        for card in models_for(gateway.router, request):
            if card.id == model:
                return JSONResponse(model_object(card))
        return response_of(answer(UnknownModel(model)))

    @api.post("/warmlane/route")
    async def route(request: Request, path: str = "/v1/chat/completions") -> Response:
        """Dry run: where would this request body go, and why? Books nothing. Beyond loopback it wants the admin key."""
        gateway.viewers.check(request.headers.raw)

        async def explain(body: bytes) -> Response:
            return dry_run(gateway, body, path, request)

        return await with_body(request, gateway.config.server.max_body_mib * 2**20, gateway.door.bodies, explain)

    @api.get("/warmlane/replicas")
    async def replicas(request: Request) -> Response:
        """All replicas: health, load and its age, drain, models. Beyond loopback it wants the admin key."""
        gateway.viewers.check(request.headers.raw)
        return JSONResponse(gateway.view.show(gateway.clock()))

    if gateway.config.server.dashboard:
        add_dashboard(api, gateway.viewers, gateway.live, admin)
    api.router.default = inference_paths(gateway.door)
    return api


def inference_paths(door: FrontDoor) -> Any:
    """The ASGI application behind the control endpoints."""

    async def inference(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await asgi_client.serve(door, scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})

    return inference


def quiet_when_stopped(api: Any) -> Any:
    """uvicorn cancels what outlives the grace, and would print a traceback for each."""

    async def served(scope: Any, receive: Any, send: Any) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await api(scope, receive, send)

    return served


def dry_run(gateway: Gateway, body: bytes, path: str, asked: Request) -> Response:
    """Read as the front door reads it, decided as the router decides now; nothing is booked."""
    endpoint = ENDPOINTS.get(path.encode())
    if endpoint is None:
        return response_of(answer(NotFound(f"Not an inference path: {path}")))
    headers: list[Header] = asked.headers.raw
    call = Call(b"POST", path.encode(), endpoint, headers, body, gateway.clock(), caller=caller_of(asked))
    try:
        request = gateway.door.read(call, read_headers(headers))
        return JSONResponse(explained(gateway.router.decide(request, gateway.clock())))
    except (BadBody, CannotSalt, Denied, EncodedBody, NotFound, RoutingError) as error:
        return response_of(answer(error))


class Server(uvicorn.Server):
    """uvicorn, which tells when it listens. The first signal makes it unready at once, closes the listener after the
    announced delay, and gives running requests their grace; the second ends it. The exit code is 0."""

    def __init__(
        self,
        config: uvicorn.Config,
        gateway: Gateway,
        on_ready: Callable[[], None],
        signals: StopSignals,
        doorway: Doorway | None = None,
    ) -> None:
        """`doorway`: where connections come from, if not from sockets that `serve` is given."""
        super().__init__(config)
        self._doorway = doorway
        self._gateway = gateway
        self._signals = signals
        self._on_ready = on_ready
        self._close_at = math.inf
        """End of the announced delay."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's own, with TLS handshakes that count as connections."""
        loop, config, door, state = asyncio.get_running_loop(), self.config, self._gateway.door, self.server_state

        def connection() -> asyncio.Protocol:
            protocol: Any = config.http_protocol_class
            made: asyncio.Protocol = protocol(config=config, server_state=state, app_state={}, _loop=loop)
            return made

        limit = door.server.header_timeout_seconds
        accepted = accepting(connection, config.ssl, limit, door.places, state, loop)
        doorways = [Bound(sock) for sock in sockets or ()] if self._doorway is None else [self._doorway]
        self.servers = [cast(asyncio.Server, await one.open(accepted, config.backlog)) for one in doorways]
        self.started = True
        self._on_ready()

    async def on_tick(self, counter: int) -> bool:
        if self._gateway.clock() >= self._close_at or (self._doorway is not None and self._doorway.is_over):
            self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        seconds = self._gateway.config.server.drain_seconds
        grace = asyncio.get_running_loop().call_later(seconds, self._end_grace)
        try:
            await super().shutdown(sockets)
        finally:
            grace.cancel()

    def _end_grace(self) -> None:
        self.force_exit = True

    def handle_exit(self, sig: int, frame: Any) -> None:
        limits = self._gateway.config.server
        if self._gateway.draining:
            self.should_exit = self.force_exit = True
        elif (running := self._gateway.requests()) and self._doorway is None:
            seconds = limits.drain_delay_seconds + limits.drain_seconds
            what = "1 request" if running == 1 else f"{running} requests"
            log.info("draining: %s running, up to %g s; again to stop now", what, seconds)
        self._gateway.door.draining = True
        delay = limits.drain_delay_seconds if self._doorway is None else limits.drain_delay_seconds + BACKSTOP_SECONDS
        self._close_at = min(self._close_at, self._gateway.clock() + delay)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        with self._signals.heeded_by(lambda: self.handle_exit(signal.SIGTERM, None)):
            yield


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


def http_settings(gateway: Gateway, admin: AdminListener | None, certificate: Certificate | None) -> uvicorn.Config:
    """How uvicorn serves: which connections, which application, and as little of its own as can be."""
    limits = gateway.config.server
    http: Any = functools.partial(ControlConnection, limits, gateway.door.places)
    if limits.http == "fast":
        http = functools.partial(http_client.ClientConnection, gateway.door)
    api = guarded(build_api(gateway, admin), gateway.door, gateway.viewers.is_admin)
    return uvicorn.Config(
        quiet_when_stopped(for_browsers(api)),
        http=http,
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,  # what it has to say goes the way of everything else
        log_level="error",  # below that it prints a line for each client that does not speak HTTP
        backlog=BACKLOG,
        timeout_keep_alive=math.ceil(limits.keep_alive_seconds),
        # The grace is kept by `Server`, which can tell what it cuts; this is for the case that uvicorn hangs.
        timeout_graceful_shutdown=math.ceil(limits.drain_seconds) + BACKSTOP_SECONDS,
        server_header=False,
        date_header=False,
        ssl_context_factory=None if certificate is None else certificate.for_server,
    )


async def end_what_is_left(server: uvicorn.Server) -> None:
    """What its grace did not suffice for. Each request writes its record."""
    for connection in list(server.server_state.connections):
        if isinstance(connection, http_client.ClientConnection):
            connection.cut()
    tasks = list(server.server_state.tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def decision_log(server: ServerConfig) -> RotatedFile | None:
    """Raises `ConfigError`."""
    if server.decision_log_file is None:
        return None
    try:
        return RotatedFile(
            server.decision_log_file, max_bytes=server.decision_log_mib * 2**20, files=server.decision_log_kept
        )
    except OSError as error:
        raise ConfigError(f"server.decision_log_file: {server.decision_log_file}: {error.strerror}") from error


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
