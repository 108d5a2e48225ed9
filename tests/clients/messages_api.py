"""`/v1/messages`, Anthropic's API, as vLLM answers it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from tests.clients.answer import ANSWER_TOKENS, PROMPT_TOKENS, Call, Text, compact, plain

TYPES = {400: "invalid_request_error", 404: "not_found_error", 429: "rate_limit_error", 500: "api_error"}
USAGE = {"input_tokens": PROMPT_TOKENS, "output_tokens": ANSWER_TOKENS}


def whole(body: dict[str, Any], answer: Text | Call) -> bytes:
    block = opened(answer)
    if isinstance(answer, Call):
        block["input"] = json.loads(answer.arguments)
    else:
        block["text"] = answer.text
    return compact(message(body, content=[block], stop_reason=stop_reason(answer), usage=USAGE))


def events(body: dict[str, Any], answer: Text | Call) -> list[bytes]:
    start = message(body, content=[], stop_reason=None, usage={"input_tokens": PROMPT_TOKENS, "output_tokens": 0})
    if isinstance(answer, Call):
        deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in answer.pieces]
    else:
        deltas = [{"type": "text_delta", "text": piece} for piece in answer.pieces]
    return [
        event("message_start", message=start),
        event("content_block_start", index=0, content_block=opened(answer)),
        *(event("content_block_delta", index=0, delta=delta) for delta in deltas),
        event("content_block_stop", index=0),
        event("message_delta", delta={"stop_reason": stop_reason(answer), "stop_sequence": None}, usage=USAGE),
        event("message_stop"),
    ]


def message(body: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": body["model"],
        "stop_sequence": None,
        **fields,
    }


def opened(answer: Text | Call) -> dict[str, Any]:
    """The content block as it begins."""
    if isinstance(answer, Call):
        return {"type": "tool_use", "id": f"toolu_{answer.name}", "name": answer.name, "input": {}}
    return {"type": "text", "text": ""}


def event(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + compact({"type": kind, **fields}) + b"\n\n"


def stop_reason(answer: Text | Call) -> str:
    return "tool_use" if isinstance(answer, Call) else "end_turn"


def error(text: str, status: int) -> bytes:
    return compact({"type": "error", "error": {"type": TYPES[status], "message": text}})


def error_event(text: str, status: int) -> bytes:
    return b"event: error\ndata: " + error(text, status) + b"\n\n"


def tools(body: dict[str, Any]) -> Iterable[str]:
    return [tool["name"] for tool in body.get("tools") or []]


def turns(body: dict[str, Any]) -> Iterable[str]:
    return [one["role"] for one in body["messages"]]


def results(body: dict[str, Any]) -> list[str]:
    parts = [part for one in body["messages"] if isinstance(one["content"], list) for part in one["content"]]
    return [plain(part.get("content")) for part in parts if part["type"] == "tool_result"]
