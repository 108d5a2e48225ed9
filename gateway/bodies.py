"""Shapes of request bodies, as far as routing reads them: one typed decode finds the slices, and copies nothing.

Fields that the key is made of are `Raw`: slices of the body. Fields whose wrong type must not spoil the rest are
`object`. Everything not named here is skipped. These classes stay interpreted when the rest is compiled (see
setup.py): msgspec builds its decoders from them.
"""

from __future__ import annotations

import msgspec
from msgspec import Raw, Struct

EMPTY = Raw(b"")
"""Value of a field that the body does not have."""


class Named(Struct):
    model: object = None


class Common(Struct, kw_only=True):
    """Fields that every generating endpoint shares. `object` where a wrong type must not spoil the rest."""

    model: object = None
    stream: object = None
    tools: Raw = EMPTY
    cache_salt: object = None
    prompt_cache_key: object = None
    user: object = None
    n: object = None
    max_tokens: object = None
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
    max_completion_tokens: object = None


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


class Responses(Common):
    input: Raw = EMPTY
    instructions: Raw = EMPTY
    reasoning: Raw = EMPTY
    previous_response_id: object = None
    max_output_tokens: object = None


class Messages(Common):
    messages: list[Message] = []
    system: Raw = EMPTY
    thinking: Raw = EMPTY


class ContentPart(Struct):
    """A part of a message. Text and tool traffic count as themselves, everything else as a digest of its source."""

    type: object = None
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
decode_responses = msgspec.json.Decoder(Responses).decode
decode_messages = msgspec.json.Decoder(Messages).decode
decode_items = msgspec.json.Decoder(list[Item]).decode
decode_parts = msgspec.json.Decoder(list[ContentPart]).decode
decode_ids = msgspec.json.Decoder(list[int]).decode
decode_any = msgspec.json.Decoder(list[Raw]).decode
