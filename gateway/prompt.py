"""From a request body to a `RouteRequest`: what the routing key is made of.

The key is the concatenation, in the order of the chat template (tools, system, turns), of what the model will see.
Strings enter as their JSON source, quotes included: clients send the next turn with the same encoder, so equal text
is equal bytes, and nothing is decoded or copied twice. What the model does not see (`cache_control` marks, sampling
settings) stays out; what changes the rendered beginning (`reasoning_effort`, template arguments) goes in first.
Pictures and sounds enter as a digest. One typed decode finds the slices; the body itself is never changed.

A body that is JSON but not of the expected shape is no error here: it gets no affinity, and the replica judges it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from enum import Enum
from typing import Any

import msgspec
import xxhash
from msgspec import Raw

from gateway.bodies import (
    EMPTY,
    Common,
    Message,
    decode_any,
    decode_chat,
    decode_completion,
    decode_ids,
    decode_items,
    decode_messages,
    decode_named,
    decode_parts,
    decode_responses,
)
from gateway.core import blocks
from gateway.core.model import ReplicaId, RouteRequest, Space

Part = bytes | Raw
TURN = b"\x1e"
FIELD = b"\x1f"
OPEN_BRACKET, QUOTE = b'["'

MAX_BLOCKS = 8_192
"""Blocks hashed of one prompt: 4 MiB of text, some million tokens. Beyond it a longer match changes no decision."""
MEDIA_KEY_BYTES = 4_000
"""Key bytes that one picture or sound weighs: about 1,000 tokens, what vision models make of a picture."""


class Shape(Enum):
    """How a body is read."""

    CHAT = "chat"
    COMPLETION = "completion"
    RESPONSES = "responses"
    MESSAGES = "messages"
    PLAIN = "plain"
    """JSON with a `model`; its work has no prefix to reuse."""
    FORM = "form"
    """multipart/form-data with a `model` field."""
    NONE = "none"


class NotJson(Exception):
    """The body is not JSON (RFC 8259: no BOM, no NaN, UTF-8, sane nesting)."""


class Key:
    """A routing key under construction: its pieces, and bytes that count but are not hashed (media)."""

    __slots__ = ("extra", "pieces", "space")

    def __init__(self) -> None:
        self.pieces: list[Part] = []
        self.extra = 0
        self.space = Space.TEXT


def parse(
    body: bytes, shape: Shape, *, block_bytes: int, session: str | None = None, pinned: ReplicaId | None = None
) -> RouteRequest:
    """Read a body for routing. `session` is the client's `x-session-id`. Raises `NotJson`."""
    if shape is Shape.NONE:
        return RouteRequest(streams=False, pinned=pinned)
    if shape is Shape.FORM:
        return RouteRequest(model=form_model(body), length=len(body), session=session, streams=False)
    read = READERS.get(shape)
    try:
        if read is not None:
            return read(body, block_bytes, session, pinned)
    except msgspec.ValidationError:
        pass  # JSON, but not as we know it
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise NotJson(reason(error)) from error
    return unshaped(body, session, pinned)


def unshaped(body: bytes, session: str | None, pinned: ReplicaId | None) -> RouteRequest:
    """Only the model is known: no affinity."""
    try:
        model = decode_named(body).model
    except msgspec.ValidationError:
        model = None  # a list, a string, null: the replica will say what is wrong
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise NotJson(reason(error)) from error
    return RouteRequest(model=text(model), length=len(body), session=session, streams=False, pinned=pinned)


def reason(error: Exception) -> str:
    if isinstance(error, msgspec.DecodeError):
        return f"The request body is not valid JSON: {error}."
    if isinstance(error, RecursionError):
        return "The request body is nested too deeply."
    return "The request body is not valid UTF-8."


def read_chat(body: bytes, block_bytes: int, session: str | None, pinned: ReplicaId | None) -> RouteRequest:
    chat = decode_chat(body)
    key = Key()
    begin(key, chat)
    add_turns(key, chat.messages)
    return finished(key, chat, chat.max_completion_tokens or chat.max_tokens, block_bytes, session, pinned)


def read_messages(body: bytes, block_bytes: int, session: str | None, pinned: ReplicaId | None) -> RouteRequest:
    chat = decode_messages(body)
    key = Key()
    begin(key, chat, chat.thinking)
    add_content(key, chat.system)
    add_turns(key, chat.messages)
    return finished(key, chat, chat.max_tokens, block_bytes, session, pinned)


def read_responses(body: bytes, block_bytes: int, session: str | None, pinned: ReplicaId | None) -> RouteRequest:
    call = decode_responses(body)
    key = Key()
    begin(key, call, call.reasoning)
    add_content(key, call.instructions)
    if is_list(call.input):
        for item in decode_items(call.input):
            key.pieces += (TURN, item.type, item.role, FIELD)
            add_content(key, item.content)
            key.pieces += (item.name, item.arguments, item.output, item.summary)
    else:
        key.pieces.append(call.input)
    return finished(key, call, call.max_output_tokens, block_bytes, session, pinned)


def read_completion(body: bytes, block_bytes: int, session: str | None, pinned: ReplicaId | None) -> RouteRequest:
    call = decode_completion(body)
    key = Key()
    if is_list(call.prompt):
        add_prompt_list(key, call.prompt)
    else:
        key.pieces.append(call.prompt)
    return finished(key, call, call.max_tokens, block_bytes, session, pinned)


def add_prompt_list(key: Key, prompt: Raw) -> None:
    """A list of token ids, or a batch: the first prompt is the key, the others count as work."""
    prompts = decode_any(prompt)
    if not prompts:
        return
    if is_list(prompts[0]):
        ids = [decode_ids(one) for one in prompts]
        key.space = Space.TOKENS
        key.pieces.append(token_bytes(ids[0]))
        key.extra += sum(4 * len(one) for one in ids[1:])
    elif memoryview(prompts[0])[0] == QUOTE:
        key.pieces.append(prompts[0])
        key.extra += sum(memoryview(one).nbytes for one in prompts[1:])
    else:
        key.space = Space.TOKENS
        key.pieces.append(token_bytes(decode_ids(prompt)))


def token_bytes(ids: list[int]) -> bytes:
    """Four bytes a token id. An id that does not fit is no token of any model: it wraps, and the replica refuses it."""
    try:
        return array("I", ids).tobytes()
    except (OverflowError, ValueError):
        return array("I", [one & 0xFFFF_FFFF for one in ids]).tobytes()


def begin(key: Key, body: Common, *more: Raw) -> None:
    """What is rendered before the first turn: settings that change it, then the tools."""
    pieces = key.pieces
    for piece in (body.reasoning_effort, body.chat_template, body.chat_template_kwargs, body.documents, *more):
        if piece is not EMPTY:
            pieces += (FIELD, piece)
    if body.tools is not EMPTY:
        pieces += (TURN, body.tools)


def add_turns(key: Key, messages: Iterable[Message]) -> None:
    pieces = key.pieces
    for message in messages:
        pieces += (TURN, message.role, FIELD)
        content = message.content
        if is_list(content):
            add_content(key, content)
        else:
            pieces.append(content)
        for piece in (
            message.name,
            message.reasoning,
            message.reasoning_content,
            message.tool_calls,
            message.tool_call_id,
            message.function_call,
        ):
            if piece is not EMPTY:
                pieces += (FIELD, piece)


def add_content(key: Key, content: Raw) -> None:
    """A string as it is, or a list of parts: one text part makes the same key as the plain string."""
    if not is_list(content):
        key.pieces.append(content)
        return
    for part in decode_parts(content):
        key.pieces += (part.text, part.thinking, part.name, part.input, part.tool_use_id)
        if part.content is not EMPTY:
            add_content(key, part.content)
        for media in (part.image_url, part.source, part.input_audio, part.video_url, part.audio_url, part.file):
            if media is not EMPTY:
                key.pieces += (FIELD, xxhash.xxh3_128_digest(media))
                key.extra += MEDIA_KEY_BYTES


def finished(
    key: Key, body: Common, max_tokens: object, block_bytes: int, session: str | None, pinned: ReplicaId | None
) -> RouteRequest:
    joined = b"".join(key.pieces)
    model = text(body.model)
    seed = blocks.seed_of(model or "", "", text(body.cache_salt) or "", key.space)
    return RouteRequest(
        model=model,
        blocks=blocks.block_hashes(joined, seed, block_bytes, MAX_BLOCKS),
        length=len(joined) + key.extra,
        space=key.space,
        session=session or text(body.prompt_cache_key) or text(body.user),
        max_output_tokens=count(max_tokens),
        samples=count(body.n) or 1,
        streams=body.stream is True,
        pinned=pinned,
    )


def is_list(value: Raw) -> bool:
    """Raw slices start at their first character, so one look tells a JSON list."""
    return value is not EMPTY and memoryview(value)[0] == OPEN_BRACKET


def text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def count(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None


def previous_response(body: bytes) -> str | None:
    """`previous_response_id` of a Responses body, if it names one."""
    try:
        return text(decode_responses(body).previous_response_id)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None


def form_model(body: bytes) -> str | None:
    """The `model` field of a multipart form. Forms put it in a part of its own; only the part's head is searched."""
    at = body.find(b'name="model"')
    start = body.find(b"\r\n\r\n", at, at + 512) if at >= 0 else -1
    end = body.find(b"\r\n", start + 4, start + 516) if start >= 0 else -1
    return body[start + 4 : end].decode(errors="replace") if end >= 0 else None


READERS = {
    Shape.CHAT: read_chat,
    Shape.COMPLETION: read_completion,
    Shape.RESPONSES: read_responses,
    Shape.MESSAGES: read_messages,
}
