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


def echoed_choice(choice: Any) -> Any:
    return {"name": choice.get("name"), "type": "function"} if isinstance(choice, dict) else choice


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


def event(kind: str, **fields: Any) -> Event:
    """One event, its keys in vLLM's order; whoever sends it sets the number."""
    return dict(sorted({**fields, "sequence_number": 0, "type": f"response.{kind}"}.items()))


class TextParts:
    """Events and item of a text answer."""

    def __init__(self, answer: Answer) -> None:
        self._text = answer.text
        self._id = f"msg_{token_hex(8)}"

    def item(self, status: str) -> dict[str, Any]:
        content = [_text_part(self._text, None)] if status == "completed" else []
        identity = {"id": self._id, "content": content, "role": "assistant", "status": status}
        return {**identity, "type": "message", "phase": None}

    def _event(self, kind: str, **fields: Any) -> Event:
        return event(kind, content_index=0, item_id=self._id, output_index=0, **fields)

    def opening(self) -> list[Event]:
        return [
            _item_event("added", self.item("in_progress")),
            self._event("content_part.added", part=_text_part("", [])),
        ]

    def delta(self, text: str) -> Event:
        return self._event("output_text.delta", delta=text, logprobs=[])

    def closing(self) -> list[Event]:
        return [
            self._event("output_text.done", logprobs=[], text=self._text),
            self._event("content_part.done", part=_text_part(self._text, None)),
            _item_event("done", self.item("completed")),
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
        return [_item_event("added", self.item("in_progress"))]

    def delta(self, text: str) -> Event:
        return event("function_call_arguments.delta", delta=text, item_id=self._id, output_index=0)

    def closing(self) -> list[Event]:
        done = event("function_call_arguments.done", arguments=self._arguments, item_id=self._id, output_index=0)
        return [{**done, "name": self._name}, _item_event("done", self.item("completed"))]


def _text_part(text: str, logprobs: list[Any] | None) -> dict[str, Any]:
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": logprobs}


def _item_event(kind: str, item: dict[str, Any]) -> Event:
    return event(f"output_item.{kind}", item=item, output_index=0)
