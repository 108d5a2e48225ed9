"""Anthropic's `/v1/messages` and its `count_tokens`: a message becomes a chat, and the chat's answer a message."""

from __future__ import annotations

from typing import Any

import msgspec

from workers.sim import bodies, chat, fields
from workers.sim.answers import Answer
from workers.sim.chat import ChatJob
from workers.sim.errors import Fault, InvalidBody
from workers.sim.exchange import Exchange
from workers.sim.generation import Counts, Generator, request_id
from workers.sim.service import Run

COUNT_KINDS: dict[str, fields.Kind] = {
    "model": fields.STRING,
    "messages": fields.LIST,
    "system": fields.ANYTHING,
    "tools": fields.LIST,
    "tool_choice": fields.OBJECT,
}
KINDS: dict[str, fields.Kind] = {
    **COUNT_KINDS,
    "max_tokens": fields.INTEGER,
    "stop_sequences": fields.STRINGS,
    "stream": fields.BOOLEAN,
    "temperature": fields.NUMBER,
    "top_p": fields.NUMBER,
    "cache_salt": fields.STRING,
    "output_config": fields.OBJECT,
}
PASSED = ("model", "stream", "temperature", "top_p", "cache_salt")
"""Fields that mean the same in a chat."""
ROLES = ("user", "assistant", "system")
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


async def serve(generator: Generator, exchange: Exchange) -> None:
    body = await exchange.read_json()
    values = fields.check(body, KINDS, ("model", "messages", "max_tokens"))
    if values["max_tokens"] <= 0:
        fault = "max_tokens must be positive"
        context = {"error": ValueError(fault)}
        raise InvalidBody(
            Fault("value_error", "body.max_tokens", f"Value error, {fault}", values["max_tokens"], context)
        )
    job = chat.prepare(generator, _chat_body(body, values))
    identity = {"id": request_id(exchange, "chatcmpl-"), "type": "message", "role": "assistant"}
    size = generator.settings.engine.block_size
    async with generator.run(exchange, (job.prompt,), job.sampling, job.wish) as run:
        if job.sampling.stream:
            await exchange.open_stream()
            await _stream(exchange, job, run, identity, generator.settings.model, size)
        else:
            await run.wait_end()
            answer = run.answers[0]
            reason, stop_sequence = _stop_reason(answer)
            message = {
                **identity,
                "content": _content(answer),
                "model": generator.settings.model,
                "stop_reason": reason,
            }
            if stop_sequence is not None:
                message["stop_sequence"] = stop_sequence
            await exchange.answer_json({**message, "usage": _usage(run, job, size)})


async def count_tokens(generator: Generator, exchange: Exchange) -> None:
    body = await exchange.read_json()
    values = fields.check(body, COUNT_KINDS, ("model", "messages"))
    prompt = chat.prepare(generator, _chat_body(body, values)).prompt
    count = len(prompt.tokens)
    await exchange.answer_json({"input_tokens": count, "context_management": {"original_input_tokens": count}})


# ---- a message as a chat ---------------------------------------------------------------------------------------------


def _chat_body(body: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    _check_turns(values["messages"])
    bodies.check(body, bodies.Messages)
    body = {name: values[name] for name in PASSED if name in values}
    if "max_tokens" in values:
        body["max_completion_tokens"] = values["max_tokens"]
    body["messages"] = _chat_messages(values)
    if "stop_sequences" in values:
        body["stop"] = list(values["stop_sequences"])
    if values.get("tools"):
        body["tools"] = [_chat_tool(tool) for tool in values["tools"]]
    choice = values.get("tool_choice")
    if choice is not None:
        named = {"type": "function", "function": {"name": choice.get("name")}}
        body["tool_choice"] = CHOICES.get(choice.get("type", "auto"), named)
    form = (values.get("output_config") or {}).get("format") or {}
    if form.get("schema"):
        body["response_format"] = {"type": "json_schema", "json_schema": {"schema": form["schema"]}}
    return body


def _chat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema") or {"type": "object"},
    }
    return {"type": "function", "function": function}


def _check_turns(turns: list[Any]) -> None:
    for position, turn in enumerate(turns):
        where = f"body.messages.{position}"
        if not isinstance(turn, dict):
            raise InvalidBody(Fault("model_attributes_type", where, "Input should be a valid dictionary", turn))
        if turn.get("role") not in ROLES:
            context = {"expected": "'user', 'assistant' or 'system'"}
            message = f"Input should be {context['expected']}"
            raise InvalidBody(Fault("literal_error", f"{where}.role", message, turn.get("role"), context))
        if "content" not in turn:
            raise InvalidBody(Fault("missing", f"{where}.content", "Field required", turn))


def _chat_messages(values: dict[str, Any]) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": _texts(values["system"])}] if values.get("system") else []
    for turn in values["messages"]:
        role, content = turn["role"], turn["content"]
        messages += [{"role": role, "content": content}] if isinstance(content, str) else _chat_turns(role, content)
    return messages


def _chat_turns(role: str, blocks: list[Any]) -> list[dict[str, Any]]:
    """The blocks of one message: results of tools become turns of their own, before what else the message says."""
    turns: list[dict[str, Any]] = []
    texts: list[dict[str, Any]] = []
    calls = []
    for block in blocks:
        match block.get("type"):
            case "tool_use":
                arguments = msgspec.json.encode(block.get("input") or {}).decode()
                calls.append({"id": block.get("id"), "function": {"name": block.get("name"), "arguments": arguments}})
            case "tool_result":
                result = _texts(block.get("content"))
                turns.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result})
            case "thinking" | "redacted_thinking":
                pass  # templates drop the reasoning of past turns
            case _:
                texts.append(block)
    if texts or calls:
        turns.append({"role": role, "content": texts, "tool_calls": calls})
    return turns


def _texts(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(str(block.get("text") or "") for block in content if isinstance(block, dict))
    return str(content or "")


# ---- an answer as a message ------------------------------------------------------------------------------------------


def _stop_reason(answer: Answer) -> tuple[str, str | None]:
    if answer.finish_reason == "length":
        return "max_tokens", None
    if answer.call is not None:
        return "tool_use", None
    return ("end_turn", None) if answer.stop_reason is None else ("stop_sequence", answer.stop_reason)


def _content(answer: Answer) -> list[dict[str, Any]]:
    message = chat.message_of(answer)
    calls = message.get("tool_calls")
    if not calls:
        return [{"type": "text", "text": message["content"]}]
    arguments = msgspec.json.decode(answer.text)
    return [{"type": "tool_use", "id": calls[0]["id"], "name": answer.call, "input": arguments}]


def _usage(run: Run, job: ChatJob, block_size: int) -> dict[str, int]:
    counts = Counts(run, (job.prompt,), block_size)
    return {
        "input_tokens": counts.prompt - counts.cached - counts.created,
        "output_tokens": counts.completion,
        "cache_creation_input_tokens": counts.created,
        "cache_read_input_tokens": counts.cached,
    }


async def _stream(
    exchange: Exchange, job: ChatJob, run: Run, identity: dict[str, Any], model: str, block_size: int
) -> None:
    answer, sent = run.answers[0], 0
    while not run.made(0):
        await run.wait_news()
    usage = {"input_tokens": len(job.prompt.tokens), "output_tokens": 0}
    message = {**identity, "content": [], "model": model, "stop_reason": None, "stop_sequence": None, "usage": usage}
    await _emit(exchange, {"type": "message_start", "message": message})
    if answer.call is None:
        block: dict[str, Any] = {"type": "text", "text": ""}
    else:
        block = {"type": "tool_use", "id": chat.call_id(), "name": answer.call, "input": {}}
    await _emit(exchange, {"type": "content_block_start", "content_block": block, "index": 0})
    while sent < len(answer.tokens):
        made = run.made(0)
        if made == sent:
            await run.wait_news()
            continue
        text, sent = answer.piece(sent, made), made
        if text:
            delta = {"type": "text_delta", "text": text}
            if answer.call is not None:
                delta = {"type": "input_json_delta", "partial_json": text}
            await _emit(exchange, {"type": "content_block_delta", "delta": delta, "index": 0})
    await run.wait_end()
    await _emit(exchange, {"type": "content_block_stop", "index": 0})
    reason, stop_sequence = _stop_reason(answer)
    delta_end = {"stop_reason": reason, "stop_sequence": stop_sequence}
    await _emit(exchange, {"type": "message_delta", "delta": delta_end, "usage": _usage(run, job, block_size)})
    await _emit(exchange, {"type": "message_stop"})
    await exchange.close_stream()


async def _emit(exchange: Exchange, event: dict[str, Any]) -> None:
    await exchange.emit(event, event["type"])
