"""`/v1/chat/completions`, plain and streamed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from secrets import token_hex
from time import time
from typing import Any

from workers.sim import bodies, fields, logprobs, sampling, templates, tokenizer
from workers.sim.answers import Answer, Wish
from workers.sim.errors import Fault, InvalidBody, parameter_error
from workers.sim.exchange import Exchange
from workers.sim.generation import FINGERPRINT, Counts, Generator, request_id, wish_of
from workers.sim.sampling import Sampling
from workers.sim.service import Prompt, Run

KINDS: dict[str, fields.Kind] = {
    "messages": fields.LIST,
    **sampling.KINDS,
    "logprobs": fields.BOOLEAN,
    "top_logprobs": fields.INTEGER,
    "tools": fields.LIST,
    "tool_choice": fields.ANYTHING,
    "response_format": fields.OBJECT,
}
ROLES_WITHOUT_CONTENT = ("assistant", "tool", "function")


@dataclass(frozen=True, slots=True)
class ChatJob:
    """A checked chat request, from whichever API it came."""

    prompt: Prompt
    sampling: Sampling
    wish: Wish
    forced_by_name: bool
    """`tool_choice` names one tool: its call ends with `stop`, a required one's with `tool_calls`."""

    def finish_reason(self, answer: Answer) -> str:
        called = answer.call is not None and not self.forced_by_name
        return "tool_calls" if called and answer.finish_reason == "stop" else answer.finish_reason


def prepare(generator: Generator, body: dict[str, Any]) -> ChatJob:
    """Check a chat body and render its prompt. Raises ApiError."""
    values = fields.check(body, KINDS, ("messages",))
    _check_messages(values["messages"])
    bodies.check(body, bodies.Chat)
    tool, named = _forced_tool(values)
    generator.require_model(values.get("model"))
    wanted = sampling.read(values, generator.settings.context_tokens)
    if values.get("logprobs"):
        wanted = replace(wanted, logprobs=sampling.require_logprobs(values.get("top_logprobs", 0)))
    elif values.get("top_logprobs"):
        raise parameter_error("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
    text = templates.render(values["messages"], values.get("tools"), generator.settings.model)
    prompt = generator.prompt(tokenizer.encode(text), wanted)
    if tool is not None:
        function = tool.get("function") or {}
        wish = wish_of(
            wanted, call=str(function.get("name", "")), schema=function.get("parameters") or {"type": "object"}
        )
    else:
        wish = wish_of(wanted, schema=_answer_schema(values.get("response_format")))
    return ChatJob(prompt, wanted, wish, named)


def _check_messages(messages: list[Any]) -> None:
    for position, message in enumerate(messages):
        where = f"body.messages.{position}"
        if not isinstance(message, dict):
            raise InvalidBody(Fault("dict_type", where, "Input should be a valid dictionary", message))
        if not isinstance(message.get("role"), str):
            raise InvalidBody(Fault("missing", f"{where}.role", "Field required", message))
        content = message.get("content", "")
        if content is None and message["role"] in ROLES_WITHOUT_CONTENT:
            continue
        if not isinstance(content, str | list):
            raise InvalidBody(Fault("string_type", f"{where}.content", "Input should be a valid string", content))


def _forced_tool(values: dict[str, Any]) -> tuple[dict[str, Any] | None, bool]:
    """The tool that the answer must call, and whether it was named."""
    choice, tools = values.get("tool_choice"), values.get("tools") or []
    if choice in (None, "none", "auto"):
        return None, False
    if not tools:
        raise parameter_error("When using `tool_choice`, `tools` must be set.", "tool_choice")
    if choice == "required":
        return tools[0], False
    name = (choice.get("function") or {}).get("name") if isinstance(choice, dict) else None
    for tool in tools:
        if (tool.get("function") or {}).get("name") == name:
            return tool, True
    message = "The tool specified in `tool_choice` does not match any of the specified `tools`"
    raise parameter_error(message, "tool_choice")


def _answer_schema(response_format: dict[str, Any] | None) -> dict[str, Any] | None:
    if not response_format or response_format.get("type") not in ("json_object", "json_schema"):
        return None
    return (response_format.get("json_schema") or {}).get("schema") or {"type": "object"}


async def serve(generator: Generator, exchange: Exchange) -> None:
    job = prepare(generator, await exchange.read_json())
    identity = {
        "id": request_id(exchange, "chatcmpl-"),
        "object": "chat.completion.chunk" if job.sampling.stream else "chat.completion",
        "created": int(time()),
        "model": generator.settings.model,
    }
    async with generator.run(exchange, (job.prompt,), job.sampling, job.wish) as run:
        if job.sampling.stream:
            await exchange.open_stream()
            await _stream(exchange, job, run, identity, _Usage(run, job, generator))
        else:
            await run.wait_end()
            await exchange.answer_json(_whole(job, run, identity, _Usage(run, job, generator)))


class _Usage:
    """Usage objects of one chat, in the forms of a whole answer and of a stream."""

    def __init__(self, run: Run, job: ChatJob, generator: Generator) -> None:
        self._run, self._prompts = run, (job.prompt,)
        self._size = generator.settings.engine.block_size

    def total(self, **more: Any) -> dict[str, Any]:
        counts = Counts(self._run, self._prompts, self._size)
        return counts.usage({"cached_tokens": counts.cached, "created_cache_tokens": counts.created, **more})

    def running(self, completion_tokens: int) -> dict[str, Any]:
        prompt = len(self._prompts[0].tokens)
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion_tokens,
            "completion_tokens": completion_tokens,
            "completion_tokens_details": None,
        }


def _whole(job: ChatJob, run: Run, identity: dict[str, Any], usage: _Usage) -> dict[str, Any]:
    wanted = job.sampling
    choices = []
    for index, answer in enumerate(run.answers):
        count = len(answer.tokens)
        choices.append(
            {
                "index": index,
                "message": message_of(answer),
                "logprobs": None if wanted.logprobs is None else logprobs.chat(answer, 0, count, wanted.logprobs),
                "finish_reason": job.finish_reason(answer),
                "stop_reason": answer.stop_reason,
                "token_ids": list(answer.tokens) if wanted.return_token_ids else None,
                "routed_experts": None,
            }
        )
    return {
        **identity,
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": FINGERPRINT,
        "usage": {**usage.total(multimodal_tokens=None), "completion_tokens_details": None},
        "prompt_logprobs": None,
        "prompt_token_ids": list(job.prompt.tokens) if wanted.return_token_ids else None,
        "prompt_text": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }


def call_id() -> str:
    return f"chatcmpl-tool-{token_hex(8)}"


def unparsed_text(answer: Answer) -> str:
    """What the model wrote, as vLLM shows it when there is no call, or one that was cut short and cannot be parsed."""
    return answer.text if answer.call is None else templates.call_opening(answer.call) + answer.text


def message_of(answer: Answer) -> dict[str, Any]:
    called = answer.call is not None and answer.finish_reason == "stop"
    function = {"name": answer.call, "arguments": answer.text}
    calls = {"tool_calls": [{"id": call_id(), "type": "function", "function": function}]} if called else {}
    return {
        "role": "assistant",
        "content": "" if called else unparsed_text(answer),
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        **calls,
        "reasoning": None,
    }


async def _stream(exchange: Exchange, job: ChatJob, run: Run, identity: dict[str, Any], usage: _Usage) -> None:
    wanted = job.sampling
    sent = [0] * len(run.answers)
    opened = False
    while not opened or any(count < len(answer.tokens) for count, answer in zip(sent, run.answers, strict=True)):
        made = [run.made(index) for index in range(len(sent))]
        if not any(made):
            await run.wait_news()
            continue
        if not opened:
            opened = True
            for index in range(len(sent)):
                await exchange.emit(_opening(index, job, identity, usage))
        news = False
        for index, answer in enumerate(run.answers):
            if made[index] > sent[index]:
                news = True
                for delta in _deltas(job, answer, index, sent[index], made[index]):
                    await exchange.emit(_part(identity, delta, job, usage, made[index]))
                sent[index] = made[index]
        if not news:
            await run.wait_news()
    await run.wait_end()
    if wanted.include_usage:
        last = {**identity, "choices": [], "usage": usage.total(), "system_fingerprint": FINGERPRINT}
        await exchange.emit(last)
    await exchange.close_stream(b"data: [DONE]\n\n")


def _opening(index: int, job: ChatJob, identity: dict[str, Any], usage: _Usage) -> dict[str, Any]:
    delta = {"role": "assistant", "content": ""}
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
    part: dict[str, Any] = {**identity, "choices": [choice]}
    if job.sampling.continuous_usage:
        part["usage"] = usage.running(0)
    part["prompt_token_ids"] = list(job.prompt.tokens) if job.sampling.return_token_ids else None
    part["prompt_text"] = None
    return part


def _part(identity: dict[str, Any], choice: dict[str, Any], job: ChatJob, usage: _Usage, made: int) -> dict[str, Any]:
    part: dict[str, Any] = {**identity, "choices": [choice]}
    if job.sampling.continuous_usage:
        part["usage"] = usage.running(made)
    # Where a usage event follows, the fingerprint comes with that.
    if choice["finish_reason"] is not None and not job.sampling.include_usage:
        part["system_fingerprint"] = FINGERPRINT
    return part


def _deltas(job: ChatJob, answer: Answer, index: int, start: int, end: int) -> Sequence[dict[str, Any]]:
    """Choices that carry the tokens from `start` to before `end`: one, or two where a tool call opens."""
    wanted, text = job.sampling, answer.piece(start, end)
    deltas: list[dict[str, Any]] = []
    if answer.call is None:
        deltas.append({"content": text})
    else:
        if start == 0:
            call = {"id": call_id(), "type": "function", "index": 0, "function": {"name": answer.call}}
            deltas.append({"content": None, "tool_calls": [call]})
        if text or end == len(answer.tokens):
            deltas.append({"content": None, "tool_calls": [{"index": 0, "function": {"arguments": text}}]})
    choices = []
    for place, delta in enumerate(deltas):
        last = place == len(deltas) - 1
        choice: dict[str, Any] = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs.chat(answer, start, end, wanted.logprobs)
            if wanted.logprobs is not None and last
            else None,
            "finish_reason": None,
        }
        if last and end == len(answer.tokens):
            choice["finish_reason"] = job.finish_reason(answer)
            choice["stop_reason"] = answer.stop_reason
        choice["token_ids"] = list(answer.tokens[start:end]) if wanted.return_token_ids and last else None
        choices.append(choice)
    return choices
