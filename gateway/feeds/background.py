"""Responses whose work goes on behind their answer (`background`): the limits of their key count them to their end.

The answer to such a request comes at once, and says nothing of what it will use. So its place within the limits of its
key is kept, and the replica that works on it is asked (`GET /v1/responses/{id}`) until it is over; then what it used is
charged like any other. A client that looks itself makes it be asked at once. Where no end can be seen (the replica
forgot it, is gone, or says `queued` for an hour, or its id could not be read) it ends with a guess, and so does the
oldest where there are too many. An id stands for one response at a time (`claim`), or one's end would be another's.
Unless the replica cannot be reached, that is not before the work could be done: an answer that tells nothing is none.

Each replica has a few looks at a time of its own, and one that is too late with an answer rests as a whole: who gets
its looks to hang holds up nobody elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import quote

import msgspec

from gateway.core.model import ReplicaId
from gateway.feeds.fetch import FetchFailed, Hindered, ReplicaClient, TimedOut, Unreachable, fetch
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
UNKNOWN_LENGTH_SECONDS = 60.0
"""What no answer tells the end of counts as long as its `max_output_tokens` take; so long without: 6,000 tokens."""
AT_ONCE = 8
"""Looks at one replica; one while it is late."""
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
    id: str | None
    since: float
    due: float
    failures: int = 0
    is_asked: bool = False

    @property
    def least_seconds(self) -> float:
        """So long its work may take, whatever its replica fails to say."""
        most = self.stay.most_tokens
        return UNKNOWN_LENGTH_SECONDS if most is None else min(most / TOKENS_A_SECOND, FOLLOWED_SECONDS)


@dataclass(slots=True)
class Line:
    """The looks at one replica."""

    asked: int = 0
    late: int = 0
    """How often in a row it was."""
    rests_until: float = 0.0

    def has_room(self, now: float) -> bool:
        return self.asked < (1 if self.late else AT_ONCE) and now >= self.rests_until

    def be_late(self, now: float) -> None:
        self.late += 1
        self.rests_until = now + min(TIMEOUT_SECONDS * 2.0**self.late, LONGEST_PAUSE_SECONDS)


class Background:
    """`follow` what goes on, `look` when its client does; `run` asks. `charged` hears of a tenant's tokens, prompt and
    answer."""

    def __init__(self, clock: Callable[[], float], charged: Callable[[str, int, int], None]) -> None:
        self._clock = clock
        self._charged = charged
        self._followed: dict[Stay, Followed] = {}
        self._claimed: set[str] = set()
        self._lines: dict[ReplicaId, Line] = {}

    def __len__(self) -> int:
        return len(self._followed)

    def __repr__(self) -> str:
        return f"<Background {len(self)} followed>"

    def claim(self, id: str) -> bool:
        """A request that asks for this id begins. Whether it may: an engine keeps one response for an id, so the end of
        another one, followed or not, would be taken for its own."""
        if id in self._claimed or any(one.id == id for one in self._followed.values()):
            return False
        self._claimed.add(id)
        return True

    def release(self, id: str) -> None:
        """The request that claimed it has ended. If it is followed, that goes on."""
        self._claimed.discard(id)

    def follow(self, stay: Stay, tenant: str, replica: ReplicaId, id: str | None) -> None:
        """The stay's request was answered, and its work goes on. Nobody can be asked for one whose id could not be
        seen: it ends when its work must be done."""
        now = self._clock()
        one = self._followed[stay] = Followed(stay, tenant, replica, id, now, now + FIRST_LOOK_SECONDS)
        if id is None:
            one.due = now + one.least_seconds
        if len(self._followed) > MAX_FOLLOWED:
            self._give_up(next(iter(self._followed.values())), now)

    def look(self, id: str) -> None:
        """Its client has just looked, or cancelled it."""
        for one in self._followed.values():
            if one.id == id:
                one.due = 0.0

    async def run(self, client: ReplicaClient) -> None:
        async with asyncio.TaskGroup() as looks:
            while True:
                await asyncio.sleep(TICK_SECONDS)
                for one, id, line in self._next(self._clock()):
                    looks.create_task(self._ask(client, one, id, line))

    def _next(self, now: float) -> list[tuple[Followed, str, Line]]:
        """Who is asked for now: those due for longest, as far as their replicas have room. They count as asked."""
        chosen: list[tuple[Followed, str, Line]] = []
        concerned = {one.replica for one in self._followed.values()}
        self._lines = {replica: line for replica, line in self._lines.items() if line.asked or replica in concerned}
        due = (one for one in self._followed.values() if one.due <= now and not one.is_asked)
        for one in sorted(due, key=lambda one: one.due):
            if one.id is None:
                self._give_up(one, now)
                continue
            line = self._lines.setdefault(one.replica, Line())
            if line.has_room(now):
                line.asked += 1
                one.is_asked = True
                chosen.append((one, one.id, line))
        return chosen

    async def _ask(self, client: ReplicaClient, one: Followed, id: str, line: Line) -> None:
        now = self._clock()
        one.due = now + min(max(FIRST_LOOK_SECONDS, (now - one.since) / LOOKS_A_LIFE), LONGEST_PAUSE_SECONDS)
        try:
            stored = await look_up(client, one.replica, id)
        except Hindered:
            return
        except TimedOut:
            self._late(one, line)
            return
        except FetchFailed as error:
            self._failed(one, now, gone=isinstance(error, Unreachable))
            return
        finally:
            one.is_asked = False
            line.asked -= 1
        line.late = one.failures = 0
        if stored.status not in PENDING:
            self._end(one, stored, now)
        elif now - one.since > FOLLOWED_SECONDS:
            self._give_up(one, now)

    def _late(self, one: Followed, line: Line) -> None:
        """Its replica was. Of those asked together the first says so, and for all that would be asked next, too."""
        now = self._clock()
        self._failed(one, now)
        if now < line.rests_until:
            return
        line.be_late(now)
        waiting = [it for it in self._followed.values() if it.replica == one.replica and it.due <= now]
        for other in waiting:
            if not other.is_asked:
                self._failed(other, now)

    def _failed(self, one: Followed, now: float, *, gone: bool = False) -> None:
        """A look told nothing."""
        one.failures += 1
        age = now - one.since
        if one.failures < FAILURES:
            one.due = min(one.due, now + FIRST_LOOK_SECONDS)
        elif gone or age >= one.least_seconds:
            self._give_up(one, now)
        else:
            one.due = min(one.due, one.since + one.least_seconds)

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
