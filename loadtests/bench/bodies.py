"""Request bodies for the load generator: agent-like chats, the same on every machine.

A file is a run of records: the length as 8 digits, then the body. Bodies belong to groups; within one the first half
(system prompt and first turns) is the same, later turns differ. So a router finds long prefixes that it knows, as with
real agents. The load generator replaces `NONCE` by a fresh number for each request.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

NONCE = "NONCE00000000000"
MODEL = "mock-model"
BODIES = 64
GROUPS = 8
TURN_BYTES = 1500
"""A turn of an agent's conversation: a tool result or an answer of some 400 tokens."""
ENVELOPE_BYTES = 350
"""Room for everything of a body but its text."""
TEXT = (
    "the of and to in that is was for it with as his on be at by had not are but from or have an they which "
    "one you were all her she there would their we him been has when who will no more if out so up said what "
    "its about than into them can only other time new some could these two may first then do any like my now "
    "over such our man me even most made after also did many off before must well back through years much "
    "where your way down should because long each just those people too little state good very make world "
    "still see own work men day get here old life both between being"
)
WORDS = TEXT.split()


@dataclass(frozen=True, slots=True)
class BodyFile:
    name: str
    bytes_each: int
    stream: bool = False
    distinct: bool = False
    """The nonce opens the prompt, so that no two requests share a prefix; otherwise it closes the last turn."""


FILES = (
    BodyFile("chat_1k", 1024),
    BodyFile("chat_32k", 32 * 1024),
    BodyFile("chat_256k", 256 * 1024),
    BodyFile("stream_1k", 1024, stream=True),
    BodyFile("distinct_4k", 4096, distinct=True),
)


def write_bodies(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file in FILES:
        with (folder / f"{file.name}.bin").open("wb") as out:
            for at in range(BODIES):
                body = make_body(file, group=at % GROUPS, member=at // GROUPS)
                out.write(b"%08d" % len(body) + body)


def make_body(file: BodyFile, group: int, member: int) -> bytes:
    shared = random.Random(f"group {group}")
    own = random.Random(f"group {group} member {member}")
    room = file.bytes_each - ENVELOPE_BYTES
    system = make_text(shared, max(100, room // 4))
    if file.distinct:
        system = f"{NONCE} {system}"
    messages = [{"role": "system", "content": system}]
    add_turns(messages, shared, room // 2)
    add_turns(messages, own, room - TURN_BYTES // 4)
    last = make_text(own, max(50, room - text_bytes(messages)))
    messages.append({"role": "user", "content": last if file.distinct else f"{last} {NONCE}"})
    body = {"model": MODEL, "messages": messages, "max_tokens": 200, "temperature": 0.7, "stream": file.stream}
    return json.dumps(body, separators=(",", ":")).encode()


def add_turns(messages: list[dict[str, str]], source: random.Random, limit_bytes: int) -> None:
    while text_bytes(messages) + TURN_BYTES < limit_bytes:
        role = "assistant" if messages[-1]["role"] == "user" else "user"
        messages.append({"role": role, "content": make_text(source, TURN_BYTES)})


def text_bytes(messages: list[dict[str, str]]) -> int:
    framing = len('{"role":"assistant","content":""},')
    return sum(len(message["content"]) + framing for message in messages)


def make_text(source: random.Random, length: int) -> str:
    return " ".join(source.choices(WORDS, k=length // 2 + 1))[:length]
