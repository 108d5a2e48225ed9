"""`/v1/responses` as vLLM answers it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.clients.answer import ANSWER_TOKENS, CREATED, PROMPT_TOKENS, Call, Text, compact, plain
from tests.clients.chat_api import error, error_event

__all__ = ["error", "error_event", "events", "results", "tools", "turns", "whole"]

USAGE = {
    "input_tokens": PROMPT_TOKENS,
    "input_tokens_details": {"cached_tokens": 0},
    "output_tokens": ANSWER_TOKENS,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": PROMPT_TOKENS + ANSWER_TOKENS,
}


def whole(body: dict[str, Any], answer: Text | Call) -> bytes:
    return compact(response(body, status="completed", output=[item(answer)], usage=USAGE))


def events(body: dict[str, Any], answer: Text | Call) -> list[bytes]:
    begun = response(body, status="in_progress", output=[], usage=None)
    ended = response(body, status="completed", output=[item(answer)], usage=USAGE)
    where: dict[str, Any] = {"output_index": 0, "item_id": item(answer)["id"]}
    told = [
        ("response.created", {"response": begun}),
        ("response.in_progress", {"response": begun}),
        ("response.output_item.added", {"output_index": 0, "item": item(answer, begun=True)}),
        *(call_events(answer, where) if isinstance(answer, Call) else text_events(answer, where)),
        ("response.output_item.done", {"output_index": 0, "item": item(answer)}),
        ("response.completed", {"response": ended}),
    ]
    return [
        b"event: "
        + kind.encode()
        + b"\ndata: "
        + compact({"type": kind, "sequence_number": number, **fields})
        + b"\n\n"
        for number, (kind, fields) in enumerate(told)
    ]


def call_events(answer: Call, where: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    done = {**where, "name": answer.name, "arguments": answer.arguments}
    return [
        *(("response.function_call_arguments.delta", {**where, "delta": piece}) for piece in answer.pieces),
        ("response.function_call_arguments.done", done),
    ]


def text_events(answer: Text, where: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    where = {**where, "content_index": 0}
    return [
        ("response.content_part.added", {**where, "part": part("")}),
        *(("response.output_text.delta", {**where, "delta": piece, "logprobs": []}) for piece in answer.pieces),
        ("response.output_text.done", {**where, "text": answer.text, "logprobs": []}),
        ("response.content_part.done", {**where, "part": part(answer.text)}),
    ]


def response(body: dict[str, Any], **fields: Any) -> dict[str, Any]:
    fixed = {"id": "resp_1", "object": "response", "created_at": CREATED, "model": body["model"], "error": None}
    asked = {"instructions": body.get("instructions"), "tools": body.get("tools") or [], "tool_choice": "auto"}
    return {**fixed, **asked, "parallel_tool_calls": True, "incomplete_details": None, "metadata": None, **fields}


def item(answer: Text | Call, *, begun: bool = False) -> dict[str, Any]:
    state = {"status": "in_progress" if begun else "completed"}
    if isinstance(answer, Call):
        named = {"id": f"fc_{answer.name}", "call_id": f"call_{answer.name}", "name": answer.name}
        return {"type": "function_call", **named, "arguments": "" if begun else answer.arguments, **state}
    content = [] if begun else [part(answer.text)]
    return {"type": "message", "id": "msg_1", "role": "assistant", "content": content, **state}


def part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def tools(body: dict[str, Any]) -> Iterable[str]:
    return [tool["name"] for tool in body.get("tools") or [] if tool["type"] == "function"]


def turns(body: dict[str, Any]) -> Iterable[str]:
    if isinstance(body["input"], str):
        return ["user"]
    return [one.get("role") or one["type"] for one in body["input"]]


def results(body: dict[str, Any]) -> list[str]:
    items = body["input"] if isinstance(body["input"], list) else []
    return [plain(one["output"]) for one in items if one.get("type") == "function_call_output"]
