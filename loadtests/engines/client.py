"""Users in a closed loop: they ask, read the answer as it streams, think, ask again; every answer becomes one row."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from loadtests.engines.workload import WARM_UP, Turn, Workload, write_turns

ANSWER_SECONDS = 120.0
"""An answer that stalls for so long has failed. The longest honest queue seen was a fifth of this."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One request as its client saw it, times from when it was sent."""

    turn: int
    seconds: float
    first_seconds: float | None = None
    """Until the first text of the answer; `None` when there was none."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    failure: str = ""
    """Empty when it was answered in full."""


@dataclass(slots=True)
class Load:
    """What came of a workload. `answers` grows while it runs."""

    planned: int
    answers: list[Answer] = field(default_factory=list)
    wall_seconds: float = 0.0

    @property
    def unsent(self) -> int:
        """Requests that had no answer when time was up."""
        return self.planned - len(self.answers)


async def run_workload(workload: Workload, seed: int, url: str, model: str, seconds: float) -> Load:
    """All requests of the workload to one address; whatever is not answered after `seconds` is left out."""
    load = Load(workload.requests)
    users = [list(write_turns(workload, seed, user, model)) for user in range(workload.users)]
    began = time.perf_counter()
    async with new_client() as client:
        try:
            async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
                for turns in users:
                    group.create_task(hold_chats(client, url, turns, workload.max_tokens, load))
        except TimeoutError:
            pass  # counted as `unsent`
    load.wall_seconds = time.perf_counter() - began
    return load


async def warm_up(urls: Sequence[str], model: str) -> None:
    """Every replica serves a few chats at once: the first prompts after a start are several times slower."""
    async with asyncio.TaskGroup() as group:
        for url in urls:
            group.create_task(run_workload(WARM_UP, 0, url, model, ANSWER_SECONDS))


def new_client() -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(timeout=ANSWER_SECONDS, limits=limits, trust_env=False)


async def hold_chats(client: httpx.AsyncClient, url: str, turns: Sequence[Turn], max_tokens: int, load: Load) -> None:
    for turn in turns:
        await asyncio.sleep(turn.pause_seconds)
        load.answers.append(await ask(client, url, turn, max_tokens))


async def ask(client: httpx.AsyncClient, url: str, turn: Turn, max_tokens: int) -> Answer:
    headers = {"content-type": "application/json", "x-session-id": turn.session}
    began = time.perf_counter()
    first: float | None = None
    usage: dict[str, Any] = {}
    failure = ""
    try:
        async with client.stream("POST", f"{url}/v1/chat/completions", content=turn.body, headers=headers) as response:
            if response.status_code != httpx.codes.OK:
                failure = f"status {response.status_code}: {(await response.aread())[:200]!r}"
            async for line in lines_of(response):
                event = msgspec.json.decode(line)
                if first is None and has_text(event):
                    first = time.perf_counter() - began
                usage = event.get("usage") or usage
                failure = failure or str(event.get("error") or "")
    except (httpx.HTTPError, msgspec.DecodeError) as error:
        failure = repr(error)
    seconds = time.perf_counter() - began
    completion = usage.get("completion_tokens", 0)
    if not failure and (first is None or completion != max_tokens):
        failure = f"{completion} tokens instead of {max_tokens}"
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Answer(turn.number, seconds, first, usage.get("prompt_tokens", 0), cached, completion, failure)


async def lines_of(response: httpx.Response) -> Any:
    """Data of each server-sent event, the end marker left out."""
    if response.status_code == httpx.codes.OK:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                yield line[len("data: ") :]


def has_text(event: dict[str, Any]) -> bool:
    return any((choice.get("delta") or {}).get("content") for choice in event.get("choices") or ())
