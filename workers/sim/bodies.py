"""The nested parts of request bodies, as far as a replica reads them; unknown fields pass.

`fields` checks the top level in vLLM's words. Below it vLLM's messages run to pages, so a wrong part gets the same
status and form, and one line that says where.
"""

from __future__ import annotations

from typing import Any, TypedDict

import msgspec

from workers.sim.errors import Fault, InvalidBody

Object = dict[str, Any]
Content = str | list[str | Object] | None


class Function(TypedDict, total=False):
    name: str | None
    parameters: Object | None


class Call(TypedDict, total=False):
    function: Function | None


class Turn(TypedDict, total=False):
    role: str
    content: Content
    tool_calls: list[Call] | None


class Tool(TypedDict, total=False):
    function: Function | None


class JsonSchema(TypedDict, total=False):
    schema: Object | None


class ResponseFormat(TypedDict, total=False):
    json_schema: JsonSchema | None


class Chat(TypedDict, total=False):
    """`/v1/chat/completions`, and `/tokenize` of messages."""

    messages: list[Turn] | None
    tools: list[Tool] | None
    tool_choice: str | Tool | None
    response_format: ResponseFormat | None


class Block(TypedDict, total=False):
    type: str
    name: str | None
    input: Object | None
    content: str | list[Object] | None


class MessageTurn(TypedDict, total=False):
    content: str | list[Block]


class MessageTool(TypedDict, total=False):
    name: str | None
    input_schema: Object | None


class MessageChoice(TypedDict, total=False):
    type: str
    name: str | None


class OutputConfig(TypedDict, total=False):
    format: JsonSchema | None


class Messages(TypedDict, total=False):
    """`/v1/messages` and its `count_tokens`."""

    messages: list[MessageTurn]
    system: str | list[Object] | None
    tools: list[MessageTool] | None
    tool_choice: MessageChoice | None
    output_config: OutputConfig | None


class Item(TypedDict, total=False):
    type: str
    role: str
    content: Content
    output: Content
    name: str | None


class FlatTool(TypedDict, total=False):
    name: str | None
    parameters: Object | None


class TextFormat(TypedDict, total=False):
    type: str
    schema: Object | None


class TextConfig(TypedDict, total=False):
    format: TextFormat | None


class Response(TypedDict, total=False):
    """`/v1/responses`."""

    input: str | list[Item]
    tools: list[FlatTool] | None
    tool_choice: str | FlatTool | None
    text: TextConfig | None


def check(body: Object, shape: type) -> None:
    """Raises InvalidBody when a nested part is of the wrong kind."""
    try:
        msgspec.convert(body, shape)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$.")
        raise InvalidBody(Fault("type_error", f"body.{where.rstrip('`')}", what, body)) from error
