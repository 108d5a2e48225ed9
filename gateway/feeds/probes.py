"""Probes: is each replica alive, and which models does it serve. One task each, so that a hung replica delays no other.

Models are listed before a replica is first reported healthy: nobody routes to a replica whose models are unknown.
Where its engine answers for its health follows from which engine it is, so that is found out first (`engines.py`).
A vLLM in developer mode can be paused, which its health does not show; one that knows no pause is asked once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from random import Random
from typing import Any

import msgspec

from gateway.core.model import CacheSized, Fact, ModelCard, ModelsListed, PauseReported, ProbeAnswered, ReplicaId
from gateway.feeds.dialects import read_size
from gateway.feeds.engines import Engines
from gateway.feeds.fetch import FetchFailed, Hindered, ReplicaClient, fetch
from gateway.feeds.replicas import Replicas, watch_each

log = logging.getLogger(__name__)

MODELS_INTERVAL_SECONDS = 10.0
"""Adapters come and go by hand, not by the second; a restart is noticed at once anyway, by the failed probe."""
HEALTH_MAX_BYTES = 64 * 1024
"""vLLM answers with an empty body."""
SIZE_MAX_BYTES = 256 * 1024
"""llama.cpp's `/props` repeats the chat template, of some 20 kB."""
MAX_ALIASES = 16
"""Other names of one model: typed by hand on a command line."""
NOT_THERE = "HTTP 404"
MODELS_PATH = "/v1/models"
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
        engines: Engines | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._replicas = replicas
        self._observe = observe
        self._client = client
        self._interval_seconds = interval_seconds
        self._timeout_seconds = timeout_seconds
        self._random = random
        self._engines = engines or Engines()
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
                cards = None if self._engines.is_met(replica) else await self._meet(replica)
                problem = await self._health_problem(replica)
            except Hindered:
                await self._rest(began)
                continue
            if problem is not None:
                self._engines.doubt(replica)
                listing_due, pausable = self._clock(), True
            elif cards is not None or self._clock() >= listing_due:
                listed = await self._list_models(replica, cards, log_failure=not listing_failed)
                listing_failed = not listed
                if listed:
                    listing_due = self._clock() + MODELS_INTERVAL_SECONDS
                    await self._tell_size(replica)
            if problem is None and pausable:
                pausable, paused = await self._pause(replica, paused)
            self._observe(ProbeAnswered(replica, problem is None, problem or ""))
            await self._rest(began)

    async def _rest(self, began: float) -> None:
        pause = self._interval_seconds * self._random.uniform(1 - JITTER, 1 + JITTER)
        await self._sleep(max(0.0, pause - (self._clock() - began)))

    async def _meet(self, replica: ReplicaId) -> tuple[ModelCard, ...] | None:
        """Find out which engine it is. What it listed for that, if it did. Raises `Hindered`."""
        try:
            cards = await self._ask_models(replica)
        except Hindered:
            raise
        except FetchFailed:  # asked again, and logged, once it is healthy
            return None
        if not self._engines.is_met(replica):
            try:
                self._engines.hear_greeting(replica, await self._fetch(f"{replica}/", HEALTH_MAX_BYTES))
            except Hindered:
                raise
            except FetchFailed:
                pass
            self._engines.give_up(replica, [card.owned_by for card in cards])
        return cards

    async def _health_problem(self, replica: ReplicaId) -> str | None:
        """Raises `Hindered`."""
        problem = None
        for path in self._engines.dialect(replica).health:
            try:
                await self._fetch(f"{replica}{path}", HEALTH_MAX_BYTES if path != MODELS_PATH else MODELS_MAX_BYTES)
            except Hindered:
                raise
            except FetchFailed as error:
                problem = str(error)
                if problem != NOT_THERE:
                    return problem
            else:
                return None
        self._engines.forget(replica)  # no engine of this kind answers there any more
        return problem

    async def _pause(self, replica: ReplicaId, was_paused: bool) -> tuple[bool, bool]:
        """Whether it can be paused, and whether it is, which is reported when it changes."""
        pausable = self._engines.dialect(replica).can_pause
        if not pausable:
            return False, False
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

    async def _list_models(self, replica: ReplicaId, cards: tuple[ModelCard, ...] | None, *, log_failure: bool) -> bool:
        """Report its models: those that are known already, or it is asked."""
        try:
            cards = await self._ask_models(replica) if cards is None else cards
        except FetchFailed as error:
            if log_failure:
                log.warning("%s/v1/models is not usable: %s", replica, error)
            return False
        tag = self._engines.dialect(replica).implied_tag
        self._observe(ModelsListed(replica, with_short_names(cards, tag) if tag else cards))
        return True

    async def _ask_models(self, replica: ReplicaId) -> tuple[ModelCard, ...]:
        """Raises `FetchFailed`."""
        cards = await list_models(self._client, replica, timeout_seconds=self._timeout_seconds)
        self._engines.hear_owners(replica, [card.owned_by for card in cards])
        return cards

    async def _tell_size(self, replica: ReplicaId) -> None:
        """Of its cache, as far as it is told elsewhere than in the metrics."""
        size, dialect = self._engines.cache_tokens(replica), self._engines.dialect(replica)
        if size is None and dialect.size is not None:
            try:
                size = read_size(dialect, await self._fetch(f"{replica}{dialect.size}", SIZE_MAX_BYTES))
            except FetchFailed:  # it will be guessed
                return
        if size is not None:
            self._observe(CacheSized(replica, size))

    async def _fetch(self, url: str, max_bytes: int) -> bytes:
        return await fetch(self._client, url, timeout_seconds=self._timeout_seconds, max_bytes=max_bytes)


async def list_models(client: ReplicaClient, replica: ReplicaId, *, timeout_seconds: float) -> tuple[ModelCard, ...]:
    """What a replica serves. Raises `FetchFailed`, also when the answer is no list of models."""
    page = await fetch(client, f"{replica}{MODELS_PATH}", timeout_seconds=timeout_seconds, max_bytes=MODELS_MAX_BYTES)
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
    named = [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("id"), str)]
    return tuple(card for entry in named for card in _cards(entry))


def with_short_names(cards: tuple[ModelCard, ...], tag: str) -> tuple[ModelCard, ...]:
    """The same, and the models whose name ends with the tag without it too: the engine understands both."""
    taken = {card.id for card in cards}
    short = (replace(card, id=card.id.removesuffix(tag), root=card.root or card.id) for card in cards)
    return cards + tuple(card for card in short if card.id not in taken)


def _cards(entry: dict[str, Any]) -> list[ModelCard]:
    """Under its name, and under the other names that llama.cpp lists with it."""
    card, aliases = _card(entry), entry.get("aliases")
    others = aliases[:MAX_ALIASES] if isinstance(aliases, list) else []
    names = dict.fromkeys(name for name in others if isinstance(name, str) and name != card.id)
    return [card, *(replace(card, id=name, root=card.id) for name in names)]


def _card(entry: dict[str, Any]) -> ModelCard:
    created, max_model_len = entry.get("created"), entry.get("max_model_len")
    owned_by, root, parent = entry.get("owned_by"), entry.get("root"), entry.get("parent")
    if max_model_len is None and isinstance(meta := entry.get("meta"), dict):
        max_model_len = meta.get("n_ctx")  # llama.cpp
    return ModelCard(
        id=entry["id"],
        created=int(created) if isinstance(created, int | float) and abs(created) < MOST else 0,
        owned_by=owned_by if isinstance(owned_by, str) else "",
        root=root if isinstance(root, str) else None,
        parent=parent if isinstance(parent, str) else None,
        max_model_len=max_model_len if type(max_model_len) is int and 0 < max_model_len < MOST else None,
    )
