"""Looking: asks servers for their metrics at equal times, and each once what else it says of itself.

A URL is a gateway if it has a gateway's view or page; the replicas of a gateway are looked at as well. Each server has
its own task, so one that hangs delays nobody, and pages of the same number were read at the same time.

Keys go only where they belong: the replicas' key to `/v1/models` of replicas, that of a gateway's client to its
`/metrics`, the admin key to its view of the replicas.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from gateway.config import ConfigError, replica_url
from gateway.core.model import ModelCard, ReplicaId
from gateway.doctor.causes import KEY_WANTED
from gateway.doctor.page import Page, read_page
from gateway.doctor.window import Gateway, Look, Replica, Window
from gateway.feeds.dialects import DIALECTS, PLAIN, Dialect, dialect_of_owners, dialect_of_page
from gateway.feeds.fetch import FetchFailed, ReplicaClient, fetch
from gateway.feeds.probes import MODELS_PATH, NOT_THERE, list_models
from gateway.operate import Fleet

TIMEOUT_SECONDS = 2.0
"""As long as the gateway's scrape waits: what is late here is late there."""
MAX_BYTES = 4 * 1024 * 1024
INTERVALS = 10
"""Of a window, so it has eleven looks: enough to tell growth from noise."""
LEAST_INTERVAL_SECONDS = 0.1
VERSION_MAX_LENGTH = 64


@dataclass(frozen=True, slots=True)
class Keys:
    replica: str | None = None
    gateway: str | None = None
    admin: str | None = None


async def look_around(urls: Iterable[str], window_seconds: float, keys: Keys) -> Window:
    """Takes `window_seconds`, and a moment before that. `urls` are normalised."""
    return await Looking(ssl.create_default_context(), window_seconds, keys).look(list(dict.fromkeys(urls)))


class Looking:
    def __init__(self, tls: ssl.SSLContext, window_seconds: float, keys: Keys) -> None:
        self._open = ReplicaClient(tls)
        self._for_replicas = ReplicaClient(tls, key=keys.replica)
        self._for_gateways = ReplicaClient(tls, key=keys.gateway)
        self._for_views = ReplicaClient(tls, key=keys.admin)
        self._seconds = window_seconds
        self._interval = max(LEAST_INTERVAL_SECONDS, window_seconds / INTERVALS)

    async def look(self, urls: list[str]) -> Window:
        kinds = await asyncio.gather(*(self._is_gateway(url) for url in urls))
        gateways = [url for url, is_gateway in zip(urls, kinds, strict=True) if is_gateway]
        listed = await asyncio.gather(*(self._gateway(url) for url in gateways))
        up_for: dict[str, str] = {}
        for one in listed:
            for url in filter(is_address, one.replicas):
                up_for[url] = up_for.get(url) or (one.url if one.state(url) == "up" else "")
        replicas = {**up_for, **{url: "" for url in urls if url not in gateways}}
        engines = {one.replica: one.engine for view in listed if view.fleet for one in view.fleet.replicas}
        facts = await asyncio.gather(*(self._facts(url, engines.get(url)) for url in replicas))
        began = asyncio.get_running_loop().time()
        asked = [(url, "/metrics", self._for_gateways) for url in gateways]
        for url, fact in zip(replicas, facts, strict=True):
            asked.append((url, dialect_of(fact["engine"]).metrics or "", self._open))
        looks = await asyncio.gather(*(self._looks(url, path, began, client) for url, path, client in asked))
        ready = await asyncio.gather(*(self._ready_problem(url) for url in gateways))
        return Window(
            seconds=self._seconds,
            gateways=tuple(
                replace(one, looks=seen, ready_problem=problem)
                for one, seen, problem in zip(listed, looks[: len(gateways)], ready, strict=True)
            ),
            replicas=tuple(
                Replica(url, seen, up_for=up, **fact)
                for (url, up), seen, fact in zip(replicas.items(), looks[len(gateways) :], facts, strict=True)
            ),
        )

    async def _is_gateway(self, url: str) -> bool:
        """Engines have no such view (and one must not be asked for /metrics without need). One that asks for a key may
        be anything, but vLLM's own key guards neither."""
        try:
            msgspec.json.decode(await self._ask(self._open, f"{url}/warmlane/replicas"), type=Fleet)
        except FetchFailed as error:
            return str(error) in KEY_WANTED and await self._has_page_of_gateway(url)
        except (msgspec.DecodeError, RecursionError):
            return False
        return True

    async def _has_page_of_gateway(self, url: str) -> bool:
        try:
            return (await self._page(self._open, f"{url}/metrics", 0.0)).is_gateway
        except FetchFailed as error:
            return str(error) in KEY_WANTED

    async def _gateway(self, url: str) -> Gateway:
        """As it is now: who its replicas are."""
        fleet, problem = None, ""
        try:
            answer = await self._ask(self._for_views, f"{url}/warmlane/replicas")
            fleet = msgspec.json.decode(answer, type=Fleet)
        except (FetchFailed, msgspec.DecodeError, RecursionError) as error:
            problem = str(error)
        return Gateway(url, (await self._look(self._for_gateways, f"{url}/metrics", 0.0),), fleet, problem)

    async def _ready_problem(self, url: str) -> str:
        """A gateway tells it to everybody."""
        try:
            await self._ask(self._open, f"{url}/ready")
        except FetchFailed as error:
            return str(error)
        return ""

    # -- the looks

    async def _looks(self, url: str, path: str, began: float, client: ReplicaClient) -> tuple[Look, ...]:
        """One for each time that it was due; what is late misses its turn. None where there is no page."""
        loop, looks, count = asyncio.get_running_loop(), [], round(self._seconds / self._interval)
        for number in range(count + 1 if path else 0):
            due = began + number * self._seconds / count
            if loop.time() - due > self._interval and number < count:
                continue
            await asyncio.sleep(due - loop.time())
            looks.append(await self._look(client, f"{url}{path}", loop.time() - began))
        return tuple(looks)

    async def _look(self, client: ReplicaClient, url: str, at: float) -> Look:
        try:
            return Look(at, await self._page(client, url, at))
        except FetchFailed as error:
            return Look(at, None, str(error))

    async def _page(self, client: ReplicaClient, url: str, at: float) -> Page:
        return read_page(await self._ask(client, url), at)

    # -- what a replica says of itself

    async def _facts(self, url: str, engine: str | None) -> dict[str, Any]:
        """`engine`: as its gateway says."""
        models = await self._models(url)
        problem: str = models["models_problem"]
        if problem and not problem.startswith("HTTP "):  # nobody is there, or nobody has time
            return {"engine": engine, "health_problem": problem, **models}
        engine = engine or await self._engine(url, models["models"] or ())
        dialect = dialect_of(engine)
        version, events, paused, health = await asyncio.gather(
            self._json(f"{url}/version"),
            self._json(f"{url}/kv_event_sources"),
            self._json(f"{url}/is_paused") if dialect.can_pause else nothing(),
            self._health_problem(url, dialect),
        )
        return {
            "engine": engine,
            "version": version_of(version),
            "kv_events": publishes(events),
            "paused": paused["is_paused"] is True if isinstance(paused, dict) and "is_paused" in paused else None,
            "health_problem": health,
            **models,
        }

    async def _engine(self, url: str, models: tuple[ModelCard, ...]) -> str | None:
        """By who owns its models, else by its page; feeds, which read that anyway, ask in the other order."""
        found = dialect_of_owners(card.owned_by for card in models)
        if found is None:
            try:
                found = dialect_of_page(await self._ask(self._open, f"{url}/metrics"))
            except FetchFailed:
                return None
        return None if found is None else found.engine

    async def _health_problem(self, url: str, dialect: Dialect) -> str:
        """Of the first of its paths that there is."""
        problem = ""
        for path in dialect.health:
            try:
                await self._ask(self._for_replicas if path == MODELS_PATH else self._open, f"{url}{path}")
            except FetchFailed as error:
                problem = str(error)
                if problem != NOT_THERE:
                    return problem
            else:
                return ""
        return problem

    async def _models(self, url: str) -> dict[str, Any]:
        try:
            models = await list_models(self._for_replicas, ReplicaId(url), timeout_seconds=TIMEOUT_SECONDS)
        except FetchFailed as error:
            return {"models": None, "models_problem": str(error)}
        return {"models": models, "models_problem": ""}

    async def _json(self, url: str) -> object:
        """`None` where there is no such page."""
        try:
            return msgspec.json.decode(await self._ask(self._open, url))
        except (FetchFailed, msgspec.DecodeError, RecursionError):
            return None

    async def _ask(self, client: ReplicaClient, url: str) -> bytes:
        return await fetch(client, url, timeout_seconds=TIMEOUT_SECONDS, max_bytes=MAX_BYTES)


def dialect_of(engine: str | None) -> Dialect:
    return next((one for one in DIALECTS.values() if one.engine == engine), PLAIN)


async def nothing() -> None:
    """Not asked."""


def is_address(text: str) -> bool:
    """Whether a gateway's name for a replica can be asked."""
    try:
        return replica_url(text) == text
    except ConfigError:
        return False


def version_of(answer: object) -> str | None:
    version = answer.get("version") if isinstance(answer, dict) else None
    return version[:VERSION_MAX_LENGTH] if isinstance(version, str) else None


def publishes(answer: object) -> bool | None:
    """vLLM names a source for each rank, or none at all."""
    if not isinstance(answer, dict):
        return None
    return any(isinstance(one, dict) and one.get("enable_kv_cache_events") is True for one in answer.values())
