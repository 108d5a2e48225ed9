"""What the scripted replica answers to clients: one tool call, then a text, in each of the three APIs.

A turn needs no memory. A request that offers a tool of `ARGUMENTS` and holds no result of it yet is answered by a call
of that tool; every other one by a text. The model name says what goes wrong (`FAULTS`). All ids and times are fixed,
so a client that is led twice through the same conversation must tell it in the same words.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tests.clients import chat_api, messages_api, responses_api
from tests.clients.answer import Api, Call, Text
from tests.proxy.scripted import Exchange

APIS: dict[str, Api] = {
    "/v1/chat/completions": chat_api,
    "/v1/messages": messages_api,
    "/v1/responses": responses_api,
}

COMMAND = "echo warm lane"
"""What agents are told to run: harmless, and its output is known."""

ARGUMENTS: dict[str, dict[str, Any]] = {
    "weather": {"city": "Oslo"},
    "Bash": {"command": COMMAND, "description": "Say two words"},
    "bash": {"command": COMMAND, "description": "Say two words"},
    "exec_command": {"cmd": COMMAND},
    "shell_command": {"command": COMMAND},
    "shell": {"command": ["sh", "-c", COMMAND]},
}
"""Arguments for the tools that the replica calls: that of the SDK drivers, and how each agent names its shell."""

TEXT = "It rains in Oslo."
READING_SECONDS = 0.2
"""Between what came and the end of a broken answer, as between tokens: what ends in the moment in which it came may be
lost before a client has looked at it."""
EDIT = "greeting.txt\n```\nwarm lane\n```\n"
"""A whole new file as aider reads it: name, fence, contents."""


async def refuse(exchange: Exchange, api: Api, answer: Text | Call) -> None:
    await exchange.answer(api.error("temperature must not be negative", 400), status="400 Bad Request")


async def be_busy(exchange: Exchange, api: Api, answer: Text | Call, again: bytes = b"retry-after: 7\r\n") -> None:
    await exchange.answer(api.error("too many requests", 429), status="429 Too Many Requests", headers=again)


async def break_off(exchange: Exchange, api: Api, answer: Text | Call) -> None:
    """Half of the answer, then the end of the connection."""
    if wants_stream(exchange):
        await exchange.start_stream()
        events = api.events(json.loads(exchange.body), answer)
        for event in events[: len(events) // 2]:
            await exchange.chunk(event)
    else:
        whole = api.whole(json.loads(exchange.body), answer)
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(whole)
        await exchange.send(head + whole[: len(whole) // 2])
    await asyncio.sleep(READING_SECONDS)
    exchange.writer.close()


async def fail_inside(exchange: Exchange, api: Api, answer: Text | Call) -> None:
    """An error inside a 200, as vLLM reports the death of its engine."""
    await exchange.start_stream()
    events = api.events(json.loads(exchange.body), answer)
    for event in events[: len(events) // 2]:
        await exchange.chunk(event)
    await exchange.chunk(api.error_event("EngineCore encountered an issue.", 500))
    await exchange.end_stream()


FAULTS: dict[str, Callable[[Exchange, Api, Text | Call], Awaitable[None]]] = {
    "refuses": refuse,
    "busy": be_busy,
    "hurried": partial(be_busy, again=b"retry-after-ms: 20\r\n"),
    "breaks": break_off,
    "fails": fail_inside,
}
MODELS = ("m", "edits", *FAULTS)


@dataclass(frozen=True, order=True)
class Seen:
    """One request as the replica saw it, less what two runs of one program may differ in."""

    path: str
    model: str
    stream: bool
    turns: tuple[str, ...]
    """Roles, or types of items, of the conversation."""
    results: tuple[str, ...]
    """The last line of what each tool gave back: some agents put times above it."""


async def answer_turn(exchange: Exchange) -> None:
    """The script for `ScriptedReplica`."""
    path = path_of(exchange)
    if path == "/v1/messages/count_tokens":
        await exchange.answer(b'{"input_tokens":9}')
        return
    if path not in APIS:
        await exchange.answer(
            b'{"error":{"message":"Not Found","type":"NotFoundError","code":404}}', status="404 Not Found"
        )
        return
    api, body = APIS[path], json.loads(exchange.body)
    if body["model"] not in MODELS:
        message = f"The model `{body['model']}` does not exist."
        await exchange.answer(api.error(message, 404), status="404 Not Found")
        return
    answer = next_answer(api, body)
    fault = FAULTS.get(body["model"])
    if fault is not None:
        await fault(exchange, api, answer)
    elif wants_stream(exchange):
        await exchange.start_stream()
        for event in api.events(body, answer):
            await exchange.chunk(event)
        await exchange.end_stream()
    else:
        await exchange.answer(api.whole(body, answer))


def next_answer(api: Api, body: dict[str, Any]) -> Text | Call:
    tools = [name for name in api.tools(body) if name in ARGUMENTS]
    if tools and not api.results(body):
        return Call(tools[0], json.dumps(ARGUMENTS[tools[0]]))
    return Text(EDIT if body["model"] == "edits" else TEXT)


def seen(exchanges: list[Exchange]) -> list[Seen]:
    """The inference requests among them, sorted: some agents send two at once."""
    found = []
    for exchange in exchanges:
        path = path_of(exchange)
        if path in APIS:
            api, body = APIS[path], json.loads(exchange.body)
            turns, results = tuple(api.turns(body)), tuple(last_line(result) for result in api.results(body))
            found.append(Seen(path, body["model"], body.get("stream") is True, turns, results))
    return sorted(found)


def last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


def path_of(exchange: Exchange) -> str:
    return exchange.request_line.split(b" ")[1].partition(b"?")[0].decode()


def wants_stream(exchange: Exchange) -> bool:
    return json.loads(exchange.body).get("stream") is True
