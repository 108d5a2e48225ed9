"""Responses whose work goes on behind their answer (`background`): the limits of their key count them to their end.

The answer to such a request comes at once, and says nothing of what it will use. So its place within the limits of its
key is kept, and the replica that works on it is asked (`GET /v1/responses/{id}`) until it is over; then what it used is
charged like any other. A client that looks itself makes it be asked at once. Where no end can be seen (the replica
forgot it, is gone, or says `queued` for an hour) it ends with a guess, and so does the oldest where there are too many.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import quote

import msgspec

from gateway.core.model import ReplicaId
from gateway.feeds.fetch import FetchFailed, Hindered, ReplicaClient, fetch
from gateway.limits import TOKENS_A_SECOND, Stay

TICK_SECONDS = 0.25
FIRST_LOOK_SECONDS = 1.0
LOOKS_A_LIFE = 8
"""The next look comes after this share of its age: the place of a long one is kept an eighth longer at most."""
LONGEST_PAUSE_SECONDS = 30.0
FOLLOWED_SECONDS = 3_600.0
"""360,000 tokens at 100 a second: an engine that still says `queued` then has lost it (vLLM does when it fails)."""
FAILURES = 3
"""Looks in a row that fail, from when on it counts as gone: a second apart, so a busy engine is no gone one."""
AT_ONCE = 8
MAX_FOLLOWED = 1_024
TIMEOUT_SECONDS = 2.0
MAX_ANSWER_BYTES = 16 * 1024 * 1024
"""The response is shown whole, with its instructions, tools and output."""
PENDING = ("queued", "in_progress")

Amount = Annotated[int, msgspec.Meta(ge=0, le=10**12)]


class Used(msgspec.Struct):
    input_tokens: Amount
    output_tokens: Amount


class Stored(msgspec.Struct):
    """What matters of a stored response."""

    status: str
    usage: Used | None = None


@dataclass(slots=True)
class Followed:
    stay: Stay
    tenant: str
    replica: ReplicaId
    id: str
    since: float
    due: float
    failures: int = 0


class Background:
    """`follow` what goes on, `look` when its client does; `run` asks. `charged` hears of a tenant's tokens, prompt and
    answer."""

    def __init__(self, clock: Callable[[], float], charged: Callable[[str, int, int], None]) -> None:
        self._clock = clock
        self._charged = charged
        self._followed: dict[Stay, Followed] = {}

    def __len__(self) -> int:
        return len(self._followed)

    def __repr__(self) -> str:
        return f"<Background {len(self)} followed>"

    def follow(self, stay: Stay, tenant: str, replica: ReplicaId, id: str) -> None:
        """The stay's request was answered, and its work goes on."""
        now = self._clock()
        self._followed[stay] = Followed(stay, tenant, replica, id, now, now + FIRST_LOOK_SECONDS)
        if len(self._followed) > MAX_FOLLOWED:
            self._give_up(next(iter(self._followed.values())), now)

    def look(self, id: str) -> None:
        """Its client has just looked, or cancelled it."""
        for one in self._followed.values():
            if one.id == id:
                one.due = 0.0

    async def run(self, client: ReplicaClient) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            if self._followed:
                now = self._clock()
                due = [one for one in self._followed.values() if one.due <= now]
                first = heapq.nsmallest(AT_ONCE, due, key=lambda one: one.due)
                await asyncio.gather(*(self._ask(client, one) for one in first))

    async def _ask(self, client: ReplicaClient, one: Followed) -> None:
        now = self._clock()
        one.due = now + min(max(FIRST_LOOK_SECONDS, (now - one.since) / LOOKS_A_LIFE), LONGEST_PAUSE_SECONDS)
        try:
            stored = await look_up(client, one.replica, one.id)
        except Hindered:
            return
        except FetchFailed:
            one.failures += 1
            one.due = min(one.due, now + FIRST_LOOK_SECONDS)
            if one.failures >= FAILURES:
                self._give_up(one, now)
            return
        one.failures = 0
        if stored.status not in PENDING:
            self._end(one, stored, now)
        elif now - one.since > FOLLOWED_SECONDS:
            self._give_up(one, now)

    def _end(self, one: Followed, stored: Stored, now: float) -> None:
        usage = stored.usage
        if usage is not None:
            self._charged(one.tenant, usage.input_tokens, usage.output_tokens)
            self._leave(one, usage.input_tokens + usage.output_tokens, now)
        elif stored.status == "failed":
            self._leave(one, 0, now)
        else:
            self._give_up(one, now)

    def _give_up(self, one: Followed, now: float) -> None:
        """What it used is not known: its prompt as estimated, and what an answer can have grown to by now."""
        guess = int((now - one.since) * TOKENS_A_SECOND)
        if one.stay.most_tokens is not None:
            guess = min(guess, one.stay.most_tokens)
        self._leave(one, one.stay.reserved + guess, now)

    def _leave(self, one: Followed, used_tokens: int, now: float) -> None:
        if self._followed.pop(one.stay, None) is not None:
            one.stay.leave(used_tokens, now)


async def look_up(client: ReplicaClient, replica: ReplicaId, id: str) -> Stored:
    """Raises `FetchFailed`."""
    url = f"{replica}/v1/responses/{quote(id, safe='')}"
    answer = await fetch(client, url, timeout_seconds=TIMEOUT_SECONDS, max_bytes=MAX_ANSWER_BYTES)
    try:
        return msgspec.json.decode(answer, type=Stored)
    except (msgspec.DecodeError, RecursionError) as error:
        raise FetchFailed("not a stored response") from error
