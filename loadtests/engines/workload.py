"""The chats that every router has to serve: the same seed gives the same requests, byte for byte.

Users belong to groups that share a system prompt. Each user holds a number of chats, one after the other; each turn
sends the whole chat so far and a new question, after the answer to the last one and some time to think. What the
replica answers is timed and thrown away: the next turn carries an answer that was written beforehand. So all routers
get the same work, and the price is small: the few generated tokens are never found in a cache.

Sizes are tokens of the benchmark's model, near enough: one word is one token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import msgspec

START_SPREAD_SECONDS = 3.0
"""Users come one by one within this time, not as one burst of cold prompts."""

# Each is one token with the space before it, in a vocabulary trained on Python's standard library.
VOCABULARY = """
about above absolute access action actual address after again allow already also always argument assert available back
base because been before begin below better between binary block body both boundary break buffer build call change
character check child class clean clear close code command comment common compare compile complete compute condition
contain content context continue convert copy correct could count create current cycle data date debug decimal default
depth different digest digit direct directory display does done each effect either element else empty encode enough
entry environment equal error escape even event every exact example except exist expected explicit extension extra
factory fail failed false feature field file filename final find first fixed flag float follow force form format found
frame from full function
"""
WORDS = tuple(VOCABULARY.split())


class Workload(msgspec.Struct, frozen=True):
    """How many chats of what size. The names are those of the simulator's generator of chats."""

    users: int
    groups: int
    system_tokens: int
    """Shared by all chats of a group."""
    context_tokens: int
    """Of the first question of each chat."""
    turn_tokens: int
    """Of each later question."""
    max_tokens: int
    """Of each answer, exactly."""
    think_seconds: float
    """Mean time between an answer and the next question, exponential."""
    turns: int
    chats: int
    """Of each user, one after the other."""

    @property
    def requests(self) -> int:
        return self.users * self.chats * self.turns

    @property
    def chat_tokens(self) -> int:
        """Of one chat at its last turn, without the system prompt."""
        return self.context_tokens + (self.turns - 1) * (self.max_tokens + self.turn_tokens)

    @property
    def working_set_tokens(self) -> int:
        """What fleet-wide caches would have to hold for all users' last turns, with one copy of each system prompt."""
        return self.users * self.chat_tokens + min(self.groups, self.users) * self.system_tokens


SIZES = {"groups": 4, "system_tokens": 1_000, "context_tokens": 2_000, "turn_tokens": 250, "max_tokens": 24}
"""Prompts of 3,000 to 4,100 tokens, a third to a quarter of them shared by the group."""
REGIMES = {
    "fits": Workload(users=9, think_seconds=1.0, turns=5, chats=4, **SIZES),
    "exceeds": Workload(users=31, think_seconds=5.0, turns=5, chats=1, **SIZES),
}
"""Working sets of 0.6 and of 2 times the caches of three replicas; as many requests as a run of some 45 s serves."""
WARM_UP = Workload(users=2, think_seconds=0.1, turns=2, chats=1, **SIZES)


@dataclass(frozen=True, slots=True)
class Turn:
    session: str
    number: int
    """From 1."""
    pause_seconds: float
    """Before it is sent, from the end of the turn before."""
    body: bytes


def write_turns(workload: Workload, seed: int, user: int, model: str) -> Iterator[Turn]:
    """All requests of one user, in order."""
    group = user % workload.groups
    system = words(Random(f"{seed} system {group}"), workload.system_tokens)
    random = Random(f"{seed} user {user}")
    for chat in range(workload.chats):
        messages = [message("system", system)]
        for number in range(1, workload.turns + 1):
            if number > 1:
                messages.append(message("assistant", words(random, workload.max_tokens)))
            messages.append(
                message("user", words(random, workload.turn_tokens if number > 1 else workload.context_tokens))
            )
            first = chat == 0 and number == 1
            pause = random.uniform(0, START_SPREAD_SECONDS) if first else random.expovariate(1 / workload.think_seconds)
            yield Turn(f"{seed}-{user}-{chat}", number, pause, write_body(model, messages, workload.max_tokens))


def write_body(model: str, messages: list[dict[str, str]], max_tokens: int) -> bytes:
    """A streamed chat request whose answer has exactly `max_tokens` tokens and says what it cost."""
    return msgspec.json.encode(
        {
            "model": model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def words(random: Random, count: int) -> str:
    return " ".join(random.choices(WORDS, k=count))
