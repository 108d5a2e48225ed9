"""Chats of coding agents: JSON lines sorted by chat, each one request with its time from the start of its chat.

    session, turn     which chat, which request of it
    t, think, api     seconds: since the chat began; between the answer before and this request; until its answer ended
    input_length, output_length, sys       tokens; `sys` are those of tools and system prompt
    hash_rle          [[first id, count], ...]: runs of ids of 512-token blocks, shared only inside one chat

The chats were recorded one by one, so a fleet's traffic is made of them: each starts at a random time, nobody is away
for longer than two minutes, and the first three quarters of every system prompt are the same for all (one tool, one
version; what follows names a project). What falls into one hour is the trace. Chats may have begun up to half an hour
before it, so that it opens with chats under way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from random import Random

import msgspec

from loadtests.traces.lines import Lines, Source, at_least
from loadtests.traces.model import BLOCK_TOKENS, Request, Trace

WINDOW_SECONDS = 3_600.0
BEGUN_SECONDS = 1_800.0
"""Before the window: longer than half of the chats last once their pauses are cut."""
LONGEST_PAUSE_SECONDS = 120.0
"""Recorded pauses reach days; a prefix cache forgets in minutes."""
COMMON_SHARE = 0.75
"""Of the tokens of tools and system prompt, shared by all chats."""


class Turn(msgspec.Struct):
    """One line of the file."""

    session: str | int
    t: float
    think: float
    input_length: int
    output_length: int
    sys: int
    hash_rle: tuple[tuple[int, int], ...]
    turn: int = 0
    api: float = 0.0


Chat = list[Turn]


def parse(lines: Lines, count: int | None) -> Source:
    """A seeded sample of `count` chats that have requests in the window; all of them when `None`."""
    decoder = msgspec.json.Decoder(Turn)

    def checked(text: bytes) -> Turn:
        turn = decoder.decode(text)
        at_least(1, input_length=turn.input_length)
        at_least(0, output_length=turn.output_length, t=turn.t, sys=turn.sys)
        if any(first < 0 or length < 1 for first, length in turn.hash_rle):
            raise ValueError("`hash_rle` holds pairs of a first id and a count of at least 1")
        return turn

    chats: dict[str | int, Chat] = {}
    for turn in lines.each(checked):
        chats.setdefault(turn.session, []).append(turn)
    for chat in chats.values():
        chat.sort(key=lambda turn: (turn.t, turn.turn))
    blocks = BlockIds(chats.values())
    return lambda seed: fleet_traffic(list(chats.values()), count, seed, blocks)


class BlockIds:
    """Ids of each turn's blocks. Equal numbers are one object: millions of them would not fit otherwise."""

    def __init__(self, chats: Iterable[Chat]) -> None:
        own = [first + length for chat in chats for turn in chat for first, length in turn.hash_rle]
        self._fresh = max(own, default=0)
        self._numbers: dict[int, int] = {}

    def of(self, turn: Turn) -> tuple[int, ...]:
        full = turn.input_length // BLOCK_TOKENS
        runs = chain.from_iterable(range(first, first + length) for first, length in turn.hash_rle)
        own = islice(runs, full)
        common = min(int(COMMON_SHARE * turn.sys) // BLOCK_TOKENS, full)
        number = self._numbers.setdefault
        ids = (self._fresh + place if place < common else id for place, id in enumerate(own))
        return tuple(number(id, id) for id in ids)


def fleet_traffic(chats: list[Chat], count: int | None, seed: int, blocks: BlockIds) -> Trace:
    random = Random(seed)
    under_way: list[list[tuple[float, Turn, float | None]]] = []
    while not under_way:  # few short chats may all lie before the window
        under_way = [timed for chat in chats if (timed := list(in_window(chat, random)))]
    if count is not None and count < len(under_way):
        under_way = random.sample(under_way, count)
    found = [
        Request(arrival, turn.input_length, max(1, turn.output_length), blocks.of(turn), str(turn.session), think)
        for chat in under_way
        for arrival, turn, think in chat
    ]
    found.sort(key=lambda request: request.arrival)
    return Trace(tuple(found))


def in_window(chat: Chat, random: Random) -> Iterator[tuple[float, Turn, float | None]]:
    """Arrival, turn and time of thinking of what falls into the window, once a start was drawn."""
    now = random.uniform(-BEGUN_SECONDS, WINDOW_SECONDS)
    before: Turn | None = None
    waits = False  # for an answer in the window
    for turn in chat:
        if before is not None:
            now += min(turn.t - before.t, LONGEST_PAUSE_SECONDS)
        before = turn
        if 0 <= now < WINDOW_SECONDS:
            yield now, turn, min(max(0.0, turn.think), LONGEST_PAUSE_SECONDS) if waits else None
            waits = True
