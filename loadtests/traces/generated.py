"""Traces made up from a few numbers. Each class is one kind of traffic, and its fields are what can be varied.

hot-prompt   few long system prompts, some hot, and private questions
samples      the same prompt several times at once
bursty       requests in waves
rag          passages from a pool, popular ones often, in changing order: only equal beginnings can be reused
chats        users in groups with long chats, who wait for an answer and think before the next question
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from heapq import nlargest
from random import Random
from typing import Any, Protocol

from loadtests.traces.model import BLOCK_TOKENS, Request, Trace

ANSWER_TOKENS_PER_SECOND = 60.0
"""Of an answer when nobody simulates one; the simulator's default."""


class Generator(Protocol):
    """Settings of one kind of traffic."""

    def trace(self, seed: int) -> Trace: ...


def synthetic(settings: Generator, seed: int) -> Trace:
    """A trace made up as `settings` say."""
    return settings.trace(seed)


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Prompts that open with one of a few shared system prompts, sampled several times each, in bursts."""

    requests: int = 2_000
    rate: float = 20.0
    """Requests per second."""
    groups: int = 8
    """Different system prompts; the k-th is used 1/k as often as the first."""
    system_tokens: int = 8_192
    private_tokens: int = 2_048
    """Mean of an exponential distribution."""
    output_tokens: int = 200
    """The same."""
    samples: int = 1
    """Requests with the same prompt at the same moment."""
    burstiness: float = 1.0
    """Squared coefficient of variation of the gaps between arrivals: 1 is Poisson, 10 comes in waves."""

    def trace(self, seed: int) -> Trace:
        random = Random(seed)
        system_blocks = self.system_tokens // BLOCK_TOKENS
        weights = [1 / rank for rank in range(1, self.groups + 1)]
        gap_shape = 1 / self.burstiness
        gap_scale = self.samples / self.rate / gap_shape
        fresh = self.groups * system_blocks  # ids below belong to the system prompts
        now = 0.0
        made: list[Request] = []
        while len(made) < self.requests:
            group = random.choices(range(self.groups), weights)[0]
            tokens = self.system_tokens + 1 + int(random.expovariate(1 / self.private_tokens))
            own = tokens // BLOCK_TOKENS - system_blocks
            blocks = (*range(group * system_blocks, (group + 1) * system_blocks), *range(fresh, fresh + own))
            fresh += own
            for _ in range(min(self.samples, self.requests - len(made))):
                output = 1 + int(random.expovariate(1 / self.output_tokens))
                made.append(Request(now, tokens, output, blocks))
            now += random.gammavariate(gap_shape, gap_scale)
        return Trace(tuple(made))


Piece = tuple[Hashable, int]
"""What a part of a prompt says, and its tokens: equal first values mean equal text."""


class Prompts:
    """Ids of the full blocks of prompts made of pieces: the same as long as two prompts begin with the same tokens."""

    def __init__(self, block_tokens: int = BLOCK_TOKENS) -> None:
        self._block_tokens = block_tokens
        self._ids: dict[tuple[int, tuple[tuple[Hashable, int, int], ...]], int] = {}

    def blocks(self, pieces: Sequence[Piece]) -> tuple[int, ...]:
        found: list[int] = []
        parent, inside, room = -1, [], self._block_tokens
        for text, tokens in pieces:
            begin = 0
            while begin < tokens:
                taken = min(room, tokens - begin)
                inside.append((text, begin, taken))
                begin, room = begin + taken, room - taken
                if not room:
                    parent = self._ids.setdefault((parent, tuple(inside)), len(self._ids))
                    found.append(parent)
                    inside, room = [], self._block_tokens
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Rag:
    """Retrieval: a short system prompt, passages of a pool in changing order, a question of one's own."""

    requests: int = 2_000
    rate: float = 20.0
    """Requests per second, Poisson."""
    system_tokens: int = 256
    pool: int = 1_000
    """Passages; the k-th is drawn with weight k ** -skew."""
    skew: float = 1.0
    passages: int = 6
    """In each prompt, all different, in any order."""
    passage_tokens: int = 768
    question_tokens: int = 64
    """Mean of an exponential distribution."""
    output_tokens: int = 200
    """The same."""

    def trace(self, seed: int) -> Trace:
        random, prompts = Random(seed), Prompts()
        weights = [rank**-self.skew for rank in range(1, self.pool + 1)]
        now = 0.0
        made: list[Request] = []
        for number in range(self.requests):
            drawn = self.draw(random, weights)
            question = 1 + int(random.expovariate(1 / self.question_tokens))
            pieces: list[Piece] = [("system", self.system_tokens)]
            pieces += [(passage, self.passage_tokens) for passage in drawn]
            pieces.append((("question", number), question))
            output = 1 + int(random.expovariate(1 / self.output_tokens))
            made.append(Request(now, sum(tokens for _, tokens in pieces), output, prompts.blocks(pieces)))
            now += random.expovariate(self.rate)
        return Trace(tuple(made))

    def draw(self, random: Random, weights: Sequence[float]) -> list[int]:
        """Different passages, popular ones more often, shuffled."""
        keys = ((math.log(1 - random.random()) / weight, passage) for passage, weight in enumerate(weights))
        drawn = [passage for _, passage in nlargest(self.passages, keys)]
        random.shuffle(drawn)
        return drawn


@dataclass(frozen=True, slots=True)
class Chats:
    """Users in groups with a common system prompt. Each has one chat after the other; every turn sends all of it again
    with the last answer and a new question. In a closed loop a user asks when the answer is there and was thought
    about. In an open one all arrivals are those of a fleet where only answers take time, at 60 tokens a second.
    """

    users: int = 36
    groups: int = 4
    system_tokens: int = 4_800
    context_tokens: int = 8_000
    """Opening question of each chat, its user's own."""
    turn_tokens: int = 800
    """Each further question."""
    max_tokens: int = 96
    """Each answer."""
    think_seconds: float = 1.0
    """Mean of an exponential distribution."""
    turns: int = 8
    chats: int = 3
    """Of each user."""
    start_seconds: float = 3.0
    """Users come one by one, uniformly in this time."""
    block_tokens: int = BLOCK_TOKENS
    """Of the blocks that prompts are cut into; the simulated fleet needs the same."""

    def trace(self, seed: int) -> Trace:
        prompts = Prompts(self.block_tokens)
        made = [request for user in range(self.users) for request in self.requests_of(user, seed, prompts)]
        made.sort(key=lambda request: request.arrival)
        return Trace(tuple(replace(request, arrival=request.arrival - made[0].arrival) for request in made))

    def requests_of(self, user: int, seed: int, prompts: Prompts) -> list[Request]:
        random = Random(f"{seed} {user}")
        now, think = random.uniform(0, self.start_seconds), None
        made: list[Request] = []
        for chat in range(self.chats):
            pieces: list[Piece] = [(("system", user % self.groups), self.system_tokens)]
            pieces.append(((user, chat, "context"), self.context_tokens))
            for turn in range(self.turns):
                tokens = sum(size for _, size in pieces)
                made.append(Request(now, tokens, self.max_tokens, prompts.blocks(pieces), f"user-{user}", think))
                pieces += [
                    ((user, chat, turn, "answer"), self.max_tokens),
                    ((user, chat, turn, "question"), self.turn_tokens),
                ]
                think = random.expovariate(1 / self.think_seconds) if self.think_seconds else 0.0
                now += self.max_tokens / ANSWER_TOKENS_PER_SECOND + think
        return made


# ---- by name -------------------------------------------------------------------------------------------------------

GENERATORS: Mapping[str, Generator] = {
    "hot-prompt": Synthetic(),
    "samples": Synthetic(samples=8),
    "bursty": Synthetic(burstiness=10.0),
    "rag": Rag(),
    "chats": Chats(),
}
MAY_BE_ZERO = frozenset({"system_tokens", "context_tokens", "turn_tokens", "think_seconds", "start_seconds", "skew"})
"""All other numbers must be above 0."""


def generator_named(text: str) -> Generator:
    """`NAME` or `NAME,key=value,...`. Raises ValueError with one line that says what there is."""
    name, *settings = text.split(",")
    found: Any = GENERATORS.get(name)
    if found is None:
        raise ValueError(f"unknown name {name!r}; one of {', '.join(GENERATORS)}")
    defaults = {field.name: getattr(found, field.name) for field in fields(found)}
    changed = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if key not in defaults or not equals:
            raise ValueError(f"{name}: {setting!r} is none of its settings; they are {', '.join(defaults)}")
        changed[key] = number(key, value, type(defaults[key]))
    made: Generator = replace(found, **changed)
    return made


def number(key: str, text: str, kind: type[int] | type[float]) -> float:
    try:
        value = kind(text)
    except ValueError:
        raise ValueError(f"{key}: {text!r} is no {'whole ' if kind is int else ''}number") from None
    if not math.isfinite(value) or value < 0 or (value == 0 and key not in MAY_BE_ZERO):
        raise ValueError(f"{key}: must be {'0 or more' if key in MAY_BE_ZERO else 'above 0'}")
    return value
