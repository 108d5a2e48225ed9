"""Everything that one gateway process is made of, put together once from the configuration."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from random import Random
from typing import Any

from gateway.access import configured_access, replica_key
from gateway.admin_key import read_admin_key
from gateway.config import Config, ConfigError
from gateway.config import Server as ServerConfig
from gateway.core.model import (
    Decision,
    Fact,
    HealthState,
    ModelCard,
    ReplicaId,
    ReplicaRemoved,
)
from gateway.core.policy import policy_named
from gateway.core.router import Router
from gateway.dashboard.live import Live
from gateway.feeds.addresses import Allowlist
from gateway.feeds.announced import Announced
from gateway.feeds.announcements import REFUSALS
from gateway.feeds.background import Background
from gateway.feeds.discovery import Discovery
from gateway.feeds.engines import Engines, Said
from gateway.feeds.fetch import ReplicaClient
from gateway.feeds.peers import Peers
from gateway.feeds.probes import Probes, list_models
from gateway.feeds.registry import Registry
from gateway.feeds.replicas import Replicas
from gateway.feeds.scrape import Scrape
from gateway.feeds.sealing import RefusedFor
from gateway.feeds.token_counts import TokenCounts
from gateway.fleet_limits import FleetLimits
from gateway.notices import Notices
from gateway.proxy.front_door import FrontDoor
from gateway.redis_feeds import announced_in, peers_in
from gateway.replica_sources import Standing, sources_of, standing
from gateway.request_log import RequestRecord
from gateway.rotated_file import RotatedFile
from gateway.several.member import Member
from gateway.shadow import Shadows
from gateway.stderr_log import report_failure
from gateway.telemetry import Telemetry
from gateway.tls import replica_context
from gateway.tracing import open_tracing
from gateway.views import FleetView, Viewers

FLUSH_SECONDS = 0.2
"""Log records are written in batches this far apart; a crash loses at most these."""
LAG_SECONDS = 0.05
"""Between two looks at how late the event loop is: a 99th percentile within seconds, for 0.02 % of a core."""


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
            connections=lambda: self.door.upstreams.connections(),
            clock=self.clock,
        )
        if config.routing.shadow:
            shadows = [(policy_named(name), self.telemetry.shadow(name)) for name in config.routing.shadow]
            self.router.before_start = Shadows(self.router, shadows).compare
        key = replica_key(config.upstream, os.environ)
        self.limits = FleetLimits(gateways=config.redis.url is not None, processes=config.server.workers > 1)
        shared = self.limits if self.limits.has_others else None
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
            access=configured_access(config.auth, os.environ, self.clock, shared),
            replica_key=key,
        )
        self.tracing = open_tracing(config.tracing, self.telemetry.model_label, self.clock, time.time)
        self.door.tracing = self.telemetry.traces = self.tracing
        self.replicas = Replicas()
        said = {ReplicaId(one.url): Said(one.engine, one.cache_tokens) for one in config.replicas}
        self.engines = Engines(said, isolated=config.auth.isolate_tenants)
        self.discovery = self._discovery()
        self.registry = self._registry()
        self.admin_key = read_admin_key(config.admin, os.environ)
        self.viewers = Viewers(config.server.host, self.admin_key)
        self.peers: Peers | None = None
        if config.redis.url is not None:
            peers = self.telemetry.peers([reason.value for reason in RefusedFor])
            release = self.door.gate.release
            self.peers = peers_in(config.redis, os.environ, self.router, release, peers, self.clock, self.limits)
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
            self.door.upstreams.retire(fact.replica)
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
        beside = (self.door.upstreams.sweep(), self.flush(), self.watch_lag(), notices.run())
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
            self.door.upstreams.close()
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

    def _discovery(self) -> Discovery:
        config = self.config
        return Discovery(
            self.replicas,
            self.observe,
            static={replica.url: replica.prefill_rate for replica in config.replicas},
            sources=sources_of(config.discovery, self.engines.say, self._standing),
            interval_seconds=config.discovery.interval_seconds,
            longest_interval_seconds=config.discovery.longest_interval_seconds,
        )

    def _registry(self) -> Registry:
        config = self.config
        return Registry(
            Allowlist(config.admin.allow),
            self.discovery.note_registered,
            self.discovery.is_configured,
            self._list_models,
            allow_existing_models=config.admin.allow_existing_models,
            interval_seconds=config.discovery.interval_seconds,
        )

    def _standing(self) -> Standing:
        return standing(self.router.statistics(self.clock()).replicas)

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
