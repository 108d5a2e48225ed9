"""The items of `/v1/responses`: input items as turns of a chat, and an answer as output items with their events."""

from __future__ import annotations

from secrets import token_hex
from typing import Any

from workers.sim import chat
from workers.sim.answers import Answer

Event = dict[str, Any]


# ---- a response as a chat --------------------------------------------------------------------------------------------


def chat_message(item: dict[str, Any]) -> dict[str, Any]:
    match item.get("type", "message"):
        case "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments", "")}
            return {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}
        case "function_call_output":
            return {"role": "tool", "content": item.get("output")}
        case _:
            return {"role": item.get("role", "user"), "content": item.get("content", "")}


def chat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = {name: tool.get(name) for name in ("name", "description", "parameters")}
    return {"type": "function", "function": function}


def chat_choice(choice: Any) -> Any:
    if isinstance(choice, dict):
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def echoed_tool(tool: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": tool.get("name"),
        "parameters": tool.get("parameters"),
        "strict": tool.get("strict"),
        "type": tool.get("type", "function"),
        "allowed_callers": None,
        "async": None,
        "defer_loading": None,
        "description": tool.get("description"),
        "output_schema": None,
    }


# ---- an answer as output items ---------------------------------------------------------------------------------------


class TextParts:
    """Events and item of a text answer."""

    def __init__(self, answer: Answer) -> None:
        self._text = answer.text
        self._id = f"msg_{token_hex(8)}"
        self._place = {"content_index": 0, "item_id": self._id, "output_index": 0}

    def item(self, status: str) -> dict[str, Any]:
        content = [self._part(self._text, None)] if status == "completed" else []
        return {
            "id": self._id,
            "content": content,
            "role": "assistant",
            "status": status,
            "type": "message",
            "phase": None,
        }

    def _part(self, text: str, logprobs: list[Any] | None) -> dict[str, Any]:
        return {"annotations": [], "text": text, "type": "output_text", "logprobs": logprobs}

    def opening(self) -> list[Event]:
        item = self.item("in_progress")
        return [
            {"item": item, "output_index": 0, "type": "response.output_item.added"},
            {**self._place, "part": self._part("", []), "type": "response.content_part.added"},
        ]

    def delta(self, text: str) -> Event:
        return {**self._place, "delta": text, "logprobs": [], "type": "response.output_text.delta"}

    def closing(self) -> list[Event]:
        return [
            {**self._place, "logprobs": [], "text": self._text, "type": "response.output_text.done"},
            {**self._place, "part": self._part(self._text, None), "type": "response.content_part.done"},
            {"item": self.item("completed"), "output_index": 0, "type": "response.output_item.done"},
        ]


class CallParts:
    """Events and item of a tool call."""

    def __init__(self, answer: Answer) -> None:
        self._name, self._arguments = answer.call, answer.text
        self._id, self._call_id = f"fc_{token_hex(8)}", chat.call_id()

    def item(self, status: str) -> dict[str, Any]:
        return {
            "arguments": self._arguments if status == "completed" else "",
            "call_id": self._call_id,
            "name": self._name,
            "type": "function_call",
            "id": self._id,
            "async": None,
            "caller": None,
            "namespace": None,
            "status": status,
        }

    def opening(self) -> list[Event]:
        return [{"item": self.item("in_progress"), "output_index": 0, "type": "response.output_item.added"}]

    def delta(self, text: str) -> Event:
        kind = "response.function_call_arguments.delta"
        return {"delta": text, "item_id": self._id, "output_index": 0, "type": kind}

    def closing(self) -> list[Event]:
        done = {
            "arguments": self._arguments,
            "item_id": self._id,
            "output_index": 0,
            "type": "response.function_call_arguments.done",
            "name": self._name,
        }
        return [done, {"item": self.item("completed"), "output_index": 0, "type": "response.output_item.done"}]
