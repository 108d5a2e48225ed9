"""The chat template: tools, then the turns in order, as text with role markers. Every API's prompt becomes this text.

An answer of the model continues the text exactly as the next turn will repeat it, so a conversation's generated tokens
are found in the prefix cache too.
"""

from __future__ import annotations

from typing import Any

import msgspec

from workers.sim.errors import ApiError

END = "<|end|>\n"
GENERATION_PROMPT = "<|assistant|>\n"


def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, model: str = "") -> str:
    """Prompt text of OpenAI-style messages. Raises ApiError for what the model cannot take."""
    if not messages:
        raise ApiError(400, "Cannot apply chat template to an empty conversation. Provide at least one message.")
    parts = [f"<|tools|>\n{msgspec.json.encode(tools).decode()}{END}"] if tools else []
    for message in messages:
        text = content_text(message.get("content"), model)
        calls = "".join(_render_call(call) for call in message.get("tool_calls") or ())
        parts.append(f"<|{message.get('role', 'user')}|>\n{text}{calls}{END}")
    parts.append(GENERATION_PROMPT)
    return "".join(parts)


def call_opening(name: str) -> str:
    """What the model writes before the arguments of a tool call."""
    return f"<|call|>{name}\n"


def content_text(content: Any, model: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and part.get("type") in (
            "text",
            "input_text",
            "output_text",
            "refusal",
            "thinking",
        ):
            texts.append(str(part.get("text") or ""))
        else:
            raise ApiError(400, f"{model} is not a multimodal model")
    return "\n".join(texts)


def _render_call(call: dict[str, Any]) -> str:
    function = call.get("function") or {}
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = msgspec.json.encode(arguments or {}).decode()
    return call_opening(str(function.get("name", ""))) + arguments
