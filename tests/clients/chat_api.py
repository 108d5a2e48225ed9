"""`/v1/chat/completions` as vLLM answers it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.clients.answer import ANSWER_TOKENS, CREATED, PROMPT_TOKENS, Call, Text, compact, plain

USAGE = {
    "prompt_tokens": PROMPT_TOKENS,
    "total_tokens": PROMPT_TOKENS + ANSWER_TOKENS,
    "completion_tokens": ANSWER_TOKENS,
    "prompt_tokens_details": None,
}
TYPES = {400: "BadRequestError", 404: "NotFoundError", 429: "RateLimitError", 500: "InternalServerError"}


def call_id(answer: Call) -> str:
    return f"chatcmpl-tool-{answer.name}"


def whole(body: dict[str, Any], answer: Text | Call) -> bytes:
    message: dict[str, Any] = {"role": "assistant", "content": None, "reasoning": None, "tool_calls": []}
    if isinstance(answer, Call):
        function = {"name": answer.name, "arguments": answer.arguments}
        message["tool_calls"] = [{"id": call_id(answer), "type": "function", "function": function}]
    else:
        message["content"] = answer.text
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason(answer)}
    # `kv_transfer_params` and its kin are vLLM's own: clients must get fields that no SDK knows.
    return compact({**frame(body, "chat.completion"), "choices": [choice], "usage": USAGE, "kv_transfer_params": None})


def events(body: dict[str, Any], answer: Text | Call) -> list[bytes]:
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if isinstance(answer, Call):
        function = {"name": answer.name, "arguments": ""}
        deltas.append({"tool_calls": [{"index": 0, "id": call_id(answer), "type": "function", "function": function}]})
        deltas += [{"tool_calls": [{"index": 0, "function": {"arguments": piece}}]} for piece in answer.pieces]
    else:
        deltas += [{"content": piece} for piece in answer.pieces]
    choices = [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "logprobs": None, "finish_reason": finish_reason(answer)})
    frames = [{**frame(body, "chat.completion.chunk"), "choices": [choice]} for choice in choices]
    if (body.get("stream_options") or {}).get("include_usage"):
        frames.append({**frame(body, "chat.completion.chunk"), "choices": [], "usage": USAGE})
    return [b"data: " + compact(one) + b"\n\n" for one in frames] + [b"data: [DONE]\n\n"]


def frame(body: dict[str, Any], kind: str) -> dict[str, Any]:
    return {"id": "chatcmpl-1", "object": kind, "created": CREATED, "model": body["model"]}


def finish_reason(answer: Text | Call) -> str:
    return "tool_calls" if isinstance(answer, Call) else "stop"


def error(message: str, status: int) -> bytes:
    return compact({"error": {"message": message, "type": TYPES[status], "param": None, "code": status}})


def error_event(message: str, status: int) -> bytes:
    return b"data: " + error(message, status) + b"\n\ndata: [DONE]\n\n"


def tools(body: dict[str, Any]) -> Iterable[str]:
    return [tool["function"]["name"] for tool in body.get("tools") or [] if "function" in tool]


def turns(body: dict[str, Any]) -> Iterable[str]:
    return [message["role"] for message in body["messages"]]


def results(body: dict[str, Any]) -> list[str]:
    return [plain(message["content"]) for message in body["messages"] if message["role"] == "tool"]
