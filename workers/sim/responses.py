"""`/v1/responses`, with a store in memory: retrieve, continue (`previous_response_id`), background, cancel.

A response is a chat in other words. Its events are one stream, made by `_events`: a streaming client reads them as they
come, a plain one gets the last, and a background response keeps them for whoever asks later.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from secrets import token_hex
from time import time
from typing import Any
from urllib.parse import parse_qs

from workers.sim import bodies, chat, fields
from workers.sim.chat import ChatJob
from workers.sim.errors import ApiError, Fault, InvalidBody, parameter_error
from workers.sim.exchange import Exchange
from workers.sim.generation import Counts, Generator
from workers.sim.response_items import (
    CallParts,
    Event,
    TextParts,
    chat_choice,
    chat_message,
    chat_tool,
    echoed_choice,
    echoed_tool,
    event,
)
from workers.sim.service import Run, RunAborted

KINDS: dict[str, fields.Kind] = {
    "model": fields.STRING,
    "input": fields.ANYTHING,
    "instructions": fields.STRING,
    "max_output_tokens": fields.INTEGER,
    "stream": fields.BOOLEAN,
    "store": fields.BOOLEAN,
    "background": fields.BOOLEAN,
    "previous_response_id": fields.STRING,
    "temperature": fields.NUMBER,
    "top_p": fields.NUMBER,
    "tools": fields.LIST,
    "tool_choice": fields.ANYTHING,
    "text": fields.OBJECT,
    "cache_salt": fields.STRING,
    "seed": fields.INTEGER,
    "ignore_eos": fields.BOOLEAN,
}
PASSED = ("model", "temperature", "top_p", "cache_salt", "seed", "ignore_eos")
"""Fields that mean the same in a chat."""
BLANK: dict[str, Any] = {
    "id": "",
    "created_at": 0,
    "incomplete_details": None,
    "instructions": None,
    "metadata": None,
    "model": "",
    "object": "response",
    "output": [],
    "parallel_tool_calls": True,
    "temperature": 1.0,
    "tool_choice": "none",
    "tools": [],
    "top_p": 1.0,
    "background": False,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "previous_response_id": None,
    "prompt": None,
    "reasoning": None,
    "service_tier": "auto",
    "status": "in_progress",
    "text": None,
    "top_logprobs": None,
    "truncation": "disabled",
    "usage": None,
    "user": None,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "kv_transfer_params": None,
    "ec_transfer_params": None,
    "input_messages": None,
    "output_messages": None,
}
"""A response before its first token, in vLLM's order."""
ECHOED = (
    *("instructions", "metadata", "parallel_tool_calls", "temperature", "top_p", "background", "max_output_tokens"),
    *("max_tool_calls", "previous_response_id", "prompt", "reasoning", "service_tier", "text", "top_logprobs"),
    *("truncation", "user", "presence_penalty", "frequency_penalty"),
)
"""Fields that repeat the request's."""
MAX_STORED = 10_000  # vLLM never forgets one; a replica that lives through load tests should


@dataclass(eq=False)
class StoredResponse:
    response: dict[str, Any]
    messages: list[dict[str, Any]]
    """The conversation with this answer, in chat form."""
    events: list[Event] = field(default_factory=list)
    """Of a background response, as they came."""
    grown: asyncio.Condition = field(default_factory=asyncio.Condition)
    task: asyncio.Task[None] | None = None

    @property
    def ended(self) -> bool:
        return self.response["status"] not in ("queued", "in_progress")


@dataclass(frozen=True, slots=True)
class ResponseJob:
    values: dict[str, Any]
    chat: ChatJob
    messages: list[dict[str, Any]]
    response: dict[str, Any]
    """As it is before the first token."""


class Responses:
    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()

    # ---- routes ------------------------------------------------------------------------------------------------------

    async def create(self, exchange: Exchange) -> None:
        job = self._prepare(await exchange.read_json())
        if job.values.get("background"):
            await self._serve_background(exchange, job)
            return
        stream = job.values.get("stream", False)
        async with self._run(exchange, job) as run:
            if stream:
                await exchange.open_stream()
            final = job.response
            async for part in self._events(job, run):
                final = part.get("response", final)
                if stream:
                    await exchange.emit(part, part["type"])
            self._store(job, final)
            if stream:
                await exchange.close_stream()
            else:
                await exchange.answer_json(final)

    async def retrieve(self, exchange: Exchange) -> None:
        stored = self._find(exchange.path.rsplit("/", 1)[-1])
        query = {name: values[0] for name, values in parse_qs(exchange.scope["query_string"].decode("latin-1")).items()}
        values = fields.check(query, {"stream": fields.BOOLEAN, "starting_after": fields.INTEGER})
        if values.get("stream"):
            await self._replay(exchange, stored, max(0, values.get("starting_after", -1) + 1))
        else:
            await exchange.answer_json(stored.response)

    async def cancel(self, exchange: Exchange) -> None:
        stored = self._find(exchange.path.split("/")[-2])
        if stored.ended or stored.task is None:
            message = "Cannot cancel a synchronous response."
            raise ApiError(400, message, "response_id", "invalid_request_error")
        stored.task.cancel()
        stored.response = {**stored.response, "status": "cancelled"}
        await exchange.answer_json(stored.response)

    # ---- what a body means -------------------------------------------------------------------------------------------

    def _prepare(self, body: dict[str, Any]) -> ResponseJob:
        values = fields.check(body, KINDS, ("input",))
        if not isinstance(values["input"], str | list):
            raise InvalidBody(Fault("string_type", "body.input", "Input should be a valid string", values["input"]))
        bodies.check(body, bodies.Response)
        if values.get("background") and not values.get("store", True):
            raise parameter_error("background can only be used when `store` is true", "background")
        if values.get("background") and not self._generator.settings.store_responses:
            message = (
                "This vLLM engine does not support `store=True` and therefore does not support the background mode. "
                "To enable these features, set the environment variable `VLLM_ENABLE_RESPONSES_API_STORE=1` "
                "when launching the vLLM server."
            )
            raise ApiError(400, message, "background", "invalid_request_error")
        self._generator.require_model(values.get("model"))
        messages = self._messages(values)
        chat_body = {name: values[name] for name in PASSED if name in values}
        chat_body |= {"messages": messages, "stream": values.get("stream", False) or values.get("background", False)}
        if "max_output_tokens" in values:
            chat_body["max_tokens"] = values["max_output_tokens"]
        if values.get("tools"):
            chat_body["tools"] = [chat_tool(tool) for tool in values["tools"]]
            chat_body["tool_choice"] = chat_choice(values.get("tool_choice", "auto"))
        form = (values.get("text") or {}).get("format") or {}
        if form.get("type") == "json_schema":
            chat_body["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}
        elif form.get("type") == "json_object":
            chat_body["response_format"] = form
        job = chat.prepare(self._generator, chat_body)
        return ResponseJob(values, job, messages, self._opening(body, values))

    def _messages(self, values: dict[str, Any]) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if values.get("instructions"):
            messages.append({"role": "system", "content": values["instructions"]})
        if "previous_response_id" in values:
            messages += self._find(values["previous_response_id"]).messages
        if isinstance(values["input"], str):
            return [*messages, {"role": "user", "content": values["input"]}]
        return messages + [chat_message(item) for item in values["input"] if item.get("type") != "reasoning"]

    def _opening(self, body: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
        tools = values.get("tools") or []
        own: dict[str, Any] = {
            "id": f"resp_{token_hex(8)}",
            "created_at": int(time()),
            "model": self._generator.settings.model,
            "tool_choice": echoed_choice(values.get("tool_choice", "auto")) if tools else "none",
            "tools": [echoed_tool(tool) for tool in tools],
        }
        echoed = {name: body[name] for name in ECHOED if body.get(name) is not None}
        return {**BLANK, **echoed, **own}

    # ---- running it --------------------------------------------------------------------------------------------------

    def _run(self, exchange: Exchange | None, job: ResponseJob) -> Any:
        return self._generator.run(exchange, (job.chat.prompt,), job.chat.sampling, job.chat.wish)

    async def _events(self, job: ResponseJob, run: Run) -> AsyncIterator[Event]:
        """Every event of the response; the last carries it whole."""
        number = 0
        async for part in self._unnumbered_events(job, run):
            yield {**part, "sequence_number": number}
            number += 1

    async def _unnumbered_events(self, job: ResponseJob, run: Run) -> AsyncIterator[Event]:
        answer = run.answers[0]
        yield event("created", response=job.response)
        yield event("in_progress", response=job.response)
        parts = CallParts(answer) if answer.call is not None else TextParts(answer)
        sent = 0
        while sent < len(answer.tokens):
            made = run.made(0)
            if made == sent:
                await run.wait_news()
                continue
            if sent == 0:
                for part in parts.opening():
                    yield part
            text, sent = answer.piece(sent, made), made
            if text:
                yield parts.delta(text)
        await run.wait_end()
        for part in parts.closing():
            yield part
        yield event("completed", response=self._final(job, run, parts.item("completed")))

    def _final(self, job: ResponseJob, run: Run, item: dict[str, Any]) -> dict[str, Any]:
        counts = Counts(run, (job.chat.prompt,), self._generator.settings.engine.block_size)
        cut = run.answers[0].finish_reason == "length"
        usage = {
            "input_tokens": counts.prompt,
            "input_tokens_details": {
                "cached_tokens": counts.cached,
                "cache_write_tokens": counts.created,
                "input_tokens_per_turn": [],
                "cached_tokens_per_turn": [],
            },
            "output_tokens": counts.completion,
            "output_tokens_details": {
                "reasoning_tokens": 0,
                "tool_output_tokens": 0,
                "output_tokens_per_turn": [],
                "tool_output_tokens_per_turn": [],
            },
            "total_tokens": counts.prompt + counts.completion,
        }
        return {
            **job.response,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [item],
            "status": "incomplete" if cut else "completed",
            "usage": usage,
        }

    async def _serve_background(self, exchange: Exchange, job: ResponseJob) -> None:
        stored = self._store(job, {**job.response, "status": "queued"})
        assert stored is not None
        stored.task = asyncio.create_task(self._run_background(job, stored))
        if job.values.get("stream"):
            await self._replay(exchange, stored, 0)
        else:
            await exchange.answer_json(stored.response)

    async def _run_background(self, job: ResponseJob, stored: StoredResponse) -> None:
        try:
            async with self._run(None, job) as run:
                async for part in self._events(job, run):
                    stored.events.append(part)
                    if part["type"] == "response.completed":
                        stored.response = part["response"]
                        stored.messages = [*job.messages, chat_message(part["response"]["output"][0])]
                    await _notify(stored)
        except (ApiError, RunAborted):
            stored.response = {**stored.response, "status": "failed"}
        finally:
            await _notify(stored)

    async def _replay(self, exchange: Exchange, stored: StoredResponse, start: int) -> None:
        """Stream the events of a background response, those to come included."""
        await exchange.open_stream()
        while True:
            while start < len(stored.events):
                part = stored.events[start]
                await exchange.emit(part, part["type"])
                start += 1
            if stored.ended:
                break
            async with stored.grown:
                await stored.grown.wait()
        await exchange.close_stream()

    # ---- the store ---------------------------------------------------------------------------------------------------

    def _store(self, job: ResponseJob, response: dict[str, Any]) -> StoredResponse | None:
        if not self._generator.settings.store_responses or not job.values.get("store", True):
            return None
        messages = [*job.messages, *map(chat_message, response["output"])]
        stored = self._stored[response["id"]] = StoredResponse(response, messages)
        if len(self._stored) > MAX_STORED:
            self._stored.popitem(last=False)
        return stored

    def _find(self, identifier: str) -> StoredResponse:
        stored = self._stored.get(identifier)
        if stored is None:
            message = f"Response with id '{identifier}' not found."
            raise ApiError(404, message, "response_id", "invalid_request_error")
        return stored


async def _notify(stored: StoredResponse) -> None:
    async with stored.grown:
        stored.grown.notify_all()
