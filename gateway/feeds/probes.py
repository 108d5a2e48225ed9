"""Probes: is each replica alive, and which models does it serve. One task each, so that a hung replica delays no other.

Models are listed before a replica is first reported healthy: nobody routes to a replica whose models are unknown.
A vLLM in developer mode can be paused, which its health does not show; one that knows no pause is asked once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import msgspec

from gateway.core.model import Fact, ModelCard, ModelsListed, PauseReported, ProbeAnswered, ReplicaId
from gateway.feeds.fetch import FetchFailed, Hindered, ReplicaClient, fetch
from gateway.feeds.replicas import Replicas, watch_each

log = logging.getLogger(__name__)

MODELS_INTERVAL_SECONDS = 10.0
"""Adapters come and go by hand, not by the second; a restart is noticed at once anyway, by the failed probe."""
HEALTH_MAX_BYTES = 64 * 1024
"""vLLM answers with an empty body."""
MODELS_MAX_BYTES = 4 * 1024 * 1024
"""About 500 bytes a model: thousands of adapters."""
MOST = 10**15
"""Larger is neither a time nor a length, and no number that every JSON reader takes."""
JITTER = 0.1
"""Share of the interval: replicas that were added together are not probed in one burst for ever."""


class Probes:
    def __init__(
        self,
        replicas: Replicas,
        observe: Callable[[Fact], None],
        client: ReplicaClient,
        *,
        interval_seconds: float,
        timeout_seconds: float,
        random: Random,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._replicas = replicas
        self._observe = observe
        self._client = client
        self._interval_seconds = interval_seconds
        self._timeout_seconds = timeout_seconds
        self._random = random
        self._clock = clock
        self._sleep = sleep

    async def run(self) -> None:
        await watch_each(self._replicas, self._watch)

    async def _watch(self, replica: ReplicaId) -> None:
        listing_due = self._clock()
        listing_failed = paused = False
        pausable = True
        while True:
            began = self._clock()
            try:
                problem = await self._health_problem(replica)
            except Hindered:
                await self._rest(began)
                continue
            if problem is not None:
                listing_due, pausable = self._clock(), True
            elif self._clock() >= listing_due:
                listed = await self._list_models(replica, log_failure=not listing_failed)
                listing_failed = not listed
                if listed:
                    listing_due = self._clock() + MODELS_INTERVAL_SECONDS
            if problem is None and pausable:
                pausable, paused = await self._pause(replica, paused)
            self._observe(ProbeAnswered(replica, problem is None, problem or ""))
            await self._rest(began)

    async def _rest(self, began: float) -> None:
        pause = self._interval_seconds * self._random.uniform(1 - JITTER, 1 + JITTER)
        await self._sleep(max(0.0, pause - (self._clock() - began)))

    async def _health_problem(self, replica: ReplicaId) -> str | None:
        """Raises `Hindered`."""
        try:
            await self._fetch(f"{replica}/health", HEALTH_MAX_BYTES)
        except Hindered:
            raise
        except FetchFailed as error:
            return str(error)
        return None

    async def _pause(self, replica: ReplicaId, was_paused: bool) -> tuple[bool, bool]:
        """Whether it can be paused, and whether it is, which is reported when it changes."""
        pausable = True
        try:
            answer = msgspec.json.decode(await self._fetch(f"{replica}/is_paused", HEALTH_MAX_BYTES))
            paused = isinstance(answer, dict) and answer.get("is_paused") is True
        except FetchFailed as error:
            pausable = not str(error).startswith("HTTP ")  # no such page, or not for us; else it may just be late
            paused = was_paused and pausable
        except (msgspec.DecodeError, RecursionError):
            pausable = paused = False
        if paused != was_paused:
            self._observe(PauseReported(replica, paused))
        return pausable, paused

    async def _list_models(self, replica: ReplicaId, *, log_failure: bool) -> bool:
        try:
            models = await list_models(self._client, replica, timeout_seconds=self._timeout_seconds)
        except FetchFailed as error:
            if log_failure:
                log.warning("%s/v1/models is not usable: %s", replica, error)
            return False
        self._observe(ModelsListed(replica, models))
        return True

    async def _fetch(self, url: str, max_bytes: int) -> bytes:
        return await fetch(self._client, url, timeout_seconds=self._timeout_seconds, max_bytes=max_bytes)


async def list_models(client: ReplicaClient, replica: ReplicaId, *, timeout_seconds: float) -> tuple[ModelCard, ...]:
    """What a replica serves. Raises `FetchFailed`, also when the answer is no list of models."""
    page = await fetch(client, f"{replica}/v1/models", timeout_seconds=timeout_seconds, max_bytes=MODELS_MAX_BYTES)
    try:
        return read_models(page)
    except msgspec.DecodeError as error:
        raise FetchFailed(str(error)) from error


def read_models(body: bytes) -> tuple[ModelCard, ...]:
    """Entries of a `/v1/models` answer. An entry without a name is left out; a field of another type counts as absent.

    Raises `msgspec.DecodeError` when the answer is not a list of models at all.
    """
    try:
        answer = msgspec.json.decode(body)
    except RecursionError as error:
        raise msgspec.DecodeError("nested too deeply") from error
    entries = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(entries, list):
        raise msgspec.DecodeError("no list of models")
    return tuple(_card(entry) for entry in entries if isinstance(entry, dict) and isinstance(entry.get("id"), str))


def _card(entry: dict[str, Any]) -> ModelCard:
    created, max_model_len = entry.get("created"), entry.get("max_model_len")
    owned_by, root, parent = entry.get("owned_by"), entry.get("root"), entry.get("parent")
    return ModelCard(
        id=entry["id"],
        created=int(created) if isinstance(created, int | float) and abs(created) < MOST else 0,
        owned_by=owned_by if isinstance(owned_by, str) else "vllm",
        root=root if isinstance(root, str) else None,
        parent=parent if isinstance(parent, str) else None,
        max_model_len=max_model_len if type(max_model_len) is int and 0 < max_model_len < MOST else None,
    )
