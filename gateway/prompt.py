"""From a request body to a `RouteRequest`: what the routing key is made of.

The key is the concatenation, in the order of the chat template (tools, system, turns), of what the model will see.
Strings enter as their JSON source, quotes included: clients send the next turn with the same encoder, so equal text
is equal bytes, and nothing is decoded or copied twice. What the model does not see (`cache_control` marks, sampling
settings) stays out; what changes the rendered beginning (`reasoning_effort`, template arguments) goes in first.
Pictures and sounds enter as a digest. One typed decode finds the slices; the body itself is never changed.

A body that is JSON but not of the expected shape is no error here: it gets no affinity, and the replica judges it. So
does one that consists of very many tiny elements (`skeleton.py` counts them): each would become an object a hundred
times its size.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

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
    decode_id_lists,
    decode_ids,
    decode_items,
    decode_messages,
    decode_named,
    decode_parts,
    decode_responses,
    decode_stored,
    decode_text,
)
from gateway.core import blocks
from gateway.core.model import ReplicaId, RouteRequest, Space
from gateway.skeleton import skeleton

Part = bytes | Raw
TURN = b"\x1e"
FIELD = b"\x1f"
OPEN_BRACKET, CLOSE_BRACKET, QUOTE, MINUS, ZERO, NINE = b'[]"-09'
FIRST_ELEMENT = re.compile(rb"\[[ \t\r\n]*([^ \t\r\n])")

MAX_BLOCKS = 8_192
"""Blocks hashed of one prompt: 4 MiB of text, some million tokens. Beyond it a longer match changes no decision."""
MAX_ELEMENTS = 65_536
"""Messages, parts and prompts that are looked into, some 30 MB and 30 ms at most. No conversation has as many; what
texts hold does not count."""
MANY_BYTES = 3 * MAX_ELEMENTS
"""A shorter body cannot hold more: `{},` is the shortest element."""
MAX_TEXTS = 8 * MAX_ELEMENTS
"""Names and values of so many elements."""
MAX_COUNTED_BYTES = 16 * 1024 * 1024
"""Of a larger body what texts hold counts as well: 60 ms are enough, and its texts would be a window of millions."""
MAX_IDS = 1_048_576
"""Token ids, 36 bytes each while they are read: as many as `MAX_BLOCKS` hold."""
MAX_NESTED = 4
"""Depth of content in content; Anthropic's tool results need 2. Each level reads what is inside it once more."""
MAX_DIGITS = 18
"""Of a number that counts something."""
NOT_SET = (b"false", b"null")
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


class TooMany(Exception):
    """More elements than are looked into."""


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
    except (msgspec.ValidationError, TooMany):
        pass  # JSON, but not as we know it
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise NotJson(reason(error)) from error
    return unshaped(body, session, pinned)


def unshaped(body: bytes, session: str | None, pinned: ReplicaId | None) -> RouteRequest:
    """Only the model is known: no affinity."""
    model = None
    try:
        model = text(decode_named(body).model)
    except msgspec.ValidationError:
        pass  # a list, a string, null: the replica will say what is wrong
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise NotJson(reason(error)) from error
    return RouteRequest(model=model, length=len(body), session=session, streams=False, pinned=pinned)


def reason(error: Exception) -> str:
    if isinstance(error, msgspec.DecodeError):
        return f"The request body is not valid JSON: {error}."
    if isinstance(error, RecursionError):
        return "The request body is nested too deeply."
    return "The request body is not valid UTF-8."


def bound_elements(body: bytes) -> None:
    """Raises `TooMany`. Objects only: an element of another kind is not of the expected shape, and ends the reading."""
    if len(body) > MANY_BYTES and body.count(b"{") > MAX_ELEMENTS:
        found = skeleton(body, MAX_TEXTS) if len(body) <= MAX_COUNTED_BYTES else None
        if found is None or found.count(b"{") > MAX_ELEMENTS:
            raise TooMany


def read_chat(body: bytes, block_bytes: int, session: str | None, pinned: ReplicaId | None) -> RouteRequest:
    bound_elements(body)
    chat = decode_chat(body)
    key = Key()
    begin(key, chat)
    add_turns(key, chat.messages)
    most = count(chat.max_completion_tokens) or count(chat.max_tokens)
    return finished(key, chat, most, block_bytes, session, pinned)


def read_messages(body: bytes, block_bytes: int, session: str | None, pinned: ReplicaId | None) -> RouteRequest:
    bound_elements(body)
    chat = decode_messages(body)
    key = Key()
    begin(key, chat, chat.thinking)
    add_content(key, chat.system)
    add_turns(key, chat.messages)
    return finished(key, chat, count(chat.max_tokens), block_bytes, session, pinned)


def read_responses(body: bytes, block_bytes: int, session: str | None, pinned: ReplicaId | None) -> RouteRequest:
    bound_elements(body)
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
    return finished(key, call, count(call.max_output_tokens), block_bytes, session, pinned)


def read_completion(body: bytes, block_bytes: int, session: str | None, pinned: ReplicaId | None) -> RouteRequest:
    call = decode_completion(body)
    key = Key()
    if is_list(call.prompt):
        add_prompt_list(key, call.prompt)
    else:
        key.pieces.append(call.prompt)
    return finished(key, call, count(call.max_tokens), block_bytes, session, pinned)


def add_prompt_list(key: Key, prompt: Raw) -> None:
    """A list of token ids, or a batch: the first prompt is the key, the others count as work."""
    found = FIRST_ELEMENT.match(memoryview(prompt))
    assert found is not None  # it is JSON
    first = found[1][0]
    if first == QUOTE:
        bound_prompts(prompt, MAX_ELEMENTS)
        prompts = decode_any(prompt)
        key.pieces.append(prompts[0])
        key.extra += sum(memoryview(one).nbytes for one in prompts[1:])
        return
    if first == OPEN_BRACKET:
        bound_prompts(prompt, MAX_IDS)
        ids = decode_id_lists(prompt)
    elif first == MINUS or ZERO <= first <= NINE:
        bound_prompts(prompt, MAX_IDS)
        ids = [decode_ids(prompt)]
    elif first == CLOSE_BRACKET:
        return
    else:
        raise msgspec.ValidationError("neither ids nor texts")
    key.space = Space.TOKENS
    key.pieces.append(token_bytes(ids[0]))
    key.extra += sum(4 * len(one) for one in ids[1:])


def bound_prompts(prompt: Raw, most: int) -> None:
    """Raises `TooMany` for more texts or ids, or more lists of them than are looked into. Commas part them all."""
    source = bytes(prompt)
    if len(source) <= MANY_BYTES or (source.count(b",") <= most and source.count(b"[") <= MAX_ELEMENTS):
        return
    found = skeleton(source, MAX_TEXTS) if len(source) <= MAX_COUNTED_BYTES else None
    if found is None or found.count(b",") > most or found.count(b"[") > MAX_ELEMENTS:
        raise TooMany


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


def add_content(key: Key, content: Raw, depth: int = 1) -> None:
    """A string as it is, or a list of parts: one text part makes the same key as the plain string."""
    if not is_list(content) or depth > MAX_NESTED:
        key.pieces.append(content)
        return
    for part in decode_parts(content):
        key.pieces += (part.text, part.thinking, part.name, part.input, part.tool_use_id)
        if part.content is not EMPTY:
            add_content(key, part.content, depth + 1)
        for media in (part.image_url, part.source, part.input_audio, part.video_url, part.audio_url, part.file):
            if media is not EMPTY:
                key.pieces += (FIELD, xxhash.xxh3_128_digest(media))
                key.extra += MEDIA_KEY_BYTES


def finished(
    key: Key, body: Common, max_tokens: int | None, block_bytes: int, session: str | None, pinned: ReplicaId | None
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
        max_output_tokens=max_tokens,
        samples=count(body.n) or 1,
        streams=body.stream is not EMPTY and bytes(memoryview(body.stream)[:5]) == b"true",
        pinned=pinned,
    )


def is_list(value: Raw) -> bool:
    """Raw slices start at their first character, so one look tells a JSON list."""
    return value is not EMPTY and memoryview(value)[0] == OPEN_BRACKET


def text(value: Raw) -> str | None:
    """The string, if it is one."""
    return decode_text(value) if value is not EMPTY and memoryview(value)[0] == QUOTE else None


def count(value: Raw) -> int | None:
    """The number, if it is one that counts something."""
    if value is EMPTY:
        return None
    source = bytes(memoryview(value)[: MAX_DIGITS + 1])
    return int(source) or None if source.isdigit() and len(source) <= MAX_DIGITS else None


@dataclass(frozen=True, slots=True)
class Stored:
    """What a Responses body says of stored responses."""

    continues: str | None = None
    """Id of the response that it goes on from."""
    wanted: str | None = None
    """Id that its own is to have."""
    background: bool = False
    """Its answer comes before the work is done. Engines take other values than `true` for that, too."""


def stored(body: bytes) -> Stored:
    """Of a Responses body. Raises `NotJson`."""
    try:
        found = decode_stored(body)
        background = found.background is not EMPTY and bytes(memoryview(found.background)[:6]) not in NOT_SET
        return Stored(text(found.previous_response_id), text(found.request_id), background)
    except msgspec.ValidationError:
        return Stored()  # no object
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise NotJson(reason(error)) from error


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
