"""Shapes of request bodies, as far as routing reads them: one typed decode finds the slices, and copies nothing.

Every field is `Raw`, a slice of the body: the wrong type in one does not spoil the rest, and whatever it holds, nothing
is built of it. Only lists of messages, items and parts become objects, one for each element, so a body may be read only
where these are few (`prompt.py`). Everything not named here is skipped. These classes stay interpreted when the rest is
compiled (see setup.py): msgspec builds its decoders from them.
"""

from __future__ import annotations

import msgspec
from msgspec import Raw, Struct

EMPTY = Raw(b"")
"""Value of a field that the body does not have."""


class Named(Struct):
    model: Raw = EMPTY


class Common(Struct, kw_only=True):
    """Fields that every generating endpoint shares."""

    model: Raw = EMPTY
    stream: Raw = EMPTY
    tools: Raw = EMPTY
    cache_salt: Raw = EMPTY
    prompt_cache_key: Raw = EMPTY
    user: Raw = EMPTY
    n: Raw = EMPTY
    max_tokens: Raw = EMPTY
    reasoning_effort: Raw = EMPTY
    chat_template: Raw = EMPTY
    chat_template_kwargs: Raw = EMPTY
    documents: Raw = EMPTY


class Message(Struct):
    role: Raw = EMPTY
    content: Raw = EMPTY
    name: Raw = EMPTY
    reasoning: Raw = EMPTY
    reasoning_content: Raw = EMPTY
    tool_calls: Raw = EMPTY
    tool_call_id: Raw = EMPTY
    function_call: Raw = EMPTY


class Chat(Common):
    messages: list[Message] = []
    max_completion_tokens: Raw = EMPTY


class Completion(Common):
    prompt: Raw = EMPTY


class Item(Struct):
    """One entry of a Responses `input` list: a message, a tool call or its output."""

    type: Raw = EMPTY
    role: Raw = EMPTY
    content: Raw = EMPTY
    name: Raw = EMPTY
    arguments: Raw = EMPTY
    output: Raw = EMPTY
    summary: Raw = EMPTY


class StoredFields(Struct):
    """What a Responses body says of stored responses: the one that it continues, what its own is to be called, and
    whether that is made behind the answer."""

    previous_response_id: Raw = EMPTY
    request_id: Raw = EMPTY
    background: Raw = EMPTY


class Responses(Common):
    input: Raw = EMPTY
    instructions: Raw = EMPTY
    reasoning: Raw = EMPTY
    max_output_tokens: Raw = EMPTY


class Messages(Common):
    messages: list[Message] = []
    system: Raw = EMPTY
    thinking: Raw = EMPTY


class ContentPart(Struct):
    """A part of a message. Text and tool traffic count as themselves, everything else as a digest of its source."""

    type: Raw = EMPTY
    text: Raw = EMPTY
    thinking: Raw = EMPTY
    name: Raw = EMPTY
    input: Raw = EMPTY
    content: Raw = EMPTY
    tool_use_id: Raw = EMPTY
    image_url: Raw = EMPTY
    source: Raw = EMPTY
    input_audio: Raw = EMPTY
    video_url: Raw = EMPTY
    audio_url: Raw = EMPTY
    file: Raw = EMPTY


decode_named = msgspec.json.Decoder(Named).decode
decode_chat = msgspec.json.Decoder(Chat).decode
decode_completion = msgspec.json.Decoder(Completion).decode
decode_stored = msgspec.json.Decoder(StoredFields).decode
decode_responses = msgspec.json.Decoder(Responses).decode
decode_messages = msgspec.json.Decoder(Messages).decode
decode_items = msgspec.json.Decoder(list[Item]).decode
decode_parts = msgspec.json.Decoder(list[ContentPart]).decode
decode_ids = msgspec.json.Decoder(list[int]).decode
decode_id_lists = msgspec.json.Decoder(list[list[int]]).decode
decode_any = msgspec.json.Decoder(list[Raw]).decode
decode_text = msgspec.json.Decoder(str).decode
