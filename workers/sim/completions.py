"""`/v1/completions`: text, a list of texts, token ids, or a list of lists of token ids; plain and streamed."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from time import time
from typing import Any

from workers.sim import fields, logprobs, sampling, tokenizer
from workers.sim.answers import Answer
from workers.sim.errors import ApiError, Fault, InvalidBody, parameter_error
from workers.sim.exchange import Exchange
from workers.sim.generation import FINGERPRINT, Counts, Generator, request_id, wish_of
from workers.sim.sampling import Sampling
from workers.sim.service import Prompt, Run

KINDS: dict[str, fields.Kind] = {**sampling.KINDS, "logprobs": fields.INTEGER, "echo": fields.BOOLEAN}
DEFAULT_MAX_TOKENS = 16
"""vLLM's, and OpenAI's, for completions alone."""


@dataclass(frozen=True, slots=True)
class CompletionJob:
    prompts: tuple[Prompt, ...]
    sampling: Sampling
    echo: bool

    def prompt_of(self, place: int) -> Prompt:
        return self.prompts[place // self.sampling.samples]


def prepare(generator: Generator, body: dict[str, Any]) -> CompletionJob:
    values = fields.check(body, KINDS)
    raw = raw_prompts(body.get("prompt"))
    generator.require_model(values.get("model"))
    wanted = sampling.read(values, generator.settings.context_tokens, DEFAULT_MAX_TOKENS)
    if "logprobs" in values:
        wanted = replace(wanted, logprobs=sampling.require_logprobs(values["logprobs"]))
    prompts = []
    for item in raw:
        exact = not isinstance(item, str)
        tokens = tokenizer.encode(item) if isinstance(item, str) else token_ids(item)
        prompts.append(generator.prompt(tokens, wanted, exact))
    return CompletionJob(tuple(prompts), wanted, values.get("echo", False))


def raw_prompts(prompt: Any) -> list[str | list[int]]:
    """The prompts of whichever of the four forms."""
    if prompt is None or prompt == "":
        raise parameter_error("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        faults = [_wrong(kind, "body.prompt", prompt) for kind in ("list", "list", "string", "list")]
        raise InvalidBody(*faults)
    if not prompt:
        raise ApiError(400, "You must pass at least one prompt")
    if all(isinstance(item, int) and item >= 0 for item in prompt):
        return [prompt]
    if all(isinstance(item, str) for item in prompt):
        return prompt
    if all(isinstance(item, list) and all(isinstance(token, int) for token in item) for item in prompt):
        return prompt
    raise InvalidBody(*_faults_of_items(prompt))


def _faults_of_items(prompt: list[Any]) -> list[Fault]:
    """Why a list is none of the four forms, in the order in which pydantic tries them."""
    where, first = "body.prompt.0", prompt[0]
    faults = [Fault("int_type", where, "Input should be a valid integer", first)]
    if isinstance(first, list):
        message = "Input should be a valid integer, unable to parse string as an integer"
        faults.append(Fault("int_parsing", f"{where}.0", message, first[0] if first else None))
    else:
        faults.append(_wrong("list", where, first))
    return [*faults, _wrong("string", "body.prompt", prompt), _wrong("string", where, first)]


def _wrong(kind: str, where: str, value: Any) -> Fault:
    return Fault(f"{kind}_type", where, f"Input should be a valid {kind}", value)


def token_ids(ids: list[int]) -> array[int]:
    worst = max(ids, default=0)
    if worst >= tokenizer.VOCABULARY_SIZE:
        raise ApiError(400, f"Token id {worst} is out of vocabulary")
    return array("q", ids)


async def serve(generator: Generator, exchange: Exchange) -> None:
    job = prepare(generator, await exchange.read_json())
    identity = {
        "id": request_id(exchange, "cmpl-"),
        "object": "text_completion",
        "created": int(time()),
        "model": generator.settings.model,
    }
    size = generator.settings.engine.block_size
    async with generator.run(exchange, job.prompts, job.sampling, wish_of(job.sampling)) as run:
        if job.sampling.stream:
            await exchange.open_stream()
            await _stream(exchange, job, run, identity, size)
        else:
            await run.wait_end()
            await exchange.answer_json(_whole(job, run, identity, size))


def _whole(job: CompletionJob, run: Run, identity: dict[str, Any], block_size: int) -> dict[str, Any]:
    wanted, counts = job.sampling, Counts(run, job.prompts, block_size)
    choices = []
    for place, answer in enumerate(run.answers):
        prompt, count = job.prompt_of(place).tokens, len(answer.tokens)
        probabilities = None if wanted.logprobs is None else logprobs.completion(answer, 0, count, wanted.logprobs)
        choices.append(
            {
                "index": place,
                "text": (tokenizer.decode(prompt) if job.echo else "") + answer.text,
                "logprobs": probabilities,
                "finish_reason": answer.finish_reason,
                "stop_reason": answer.stop_reason,
                "token_ids": list(answer.tokens) if wanted.return_token_ids else None,
                "prompt_logprobs": None,
                "prompt_token_ids": list(prompt) if wanted.return_token_ids else None,
                "routed_experts": None,
            }
        )
    details = {"cached_tokens": counts.cached, "created_cache_tokens": None, "multimodal_tokens": None}
    return {
        **identity,
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": FINGERPRINT,
        "usage": {**counts.usage(details), "completion_tokens_details": None},
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }


async def _stream(exchange: Exchange, job: CompletionJob, run: Run, identity: dict[str, Any], block_size: int) -> None:
    sent = [0] * len(run.answers)
    while any(count < len(answer.tokens) for count, answer in zip(sent, run.answers, strict=True)):
        news = False
        for place, answer in enumerate(run.answers):
            made = run.made(place)
            if made > sent[place]:
                news = True
                await exchange.emit(_part(job, answer, place, sent[place], made, identity))
                sent[place] = made
        if not news:
            await run.wait_news()
    await run.wait_end()
    if job.sampling.include_usage:
        counts = Counts(run, job.prompts, block_size)
        usage = counts.usage({"cached_tokens": counts.cached})
        await exchange.emit({**identity, "choices": [], "usage": usage, "system_fingerprint": FINGERPRINT})
    await exchange.close_stream(b"data: [DONE]\n\n")


def _part(
    job: CompletionJob, answer: Answer, place: int, start: int, end: int, identity: dict[str, Any]
) -> dict[str, Any]:
    wanted, prompt = job.sampling, job.prompt_of(place).tokens
    ended = end == len(answer.tokens)
    probabilities = None if wanted.logprobs is None else logprobs.completion(answer, start, end, wanted.logprobs)
    choice = {
        "index": place,
        "text": (tokenizer.decode(prompt) if job.echo and start == 0 else "") + answer.piece(start, end),
        "logprobs": probabilities,
        "finish_reason": answer.finish_reason if ended else None,
        "stop_reason": answer.stop_reason if ended else None,
        "prompt_token_ids": list(prompt) if wanted.return_token_ids and start == 0 else None,
        "token_ids": list(answer.tokens[start:end]) if wanted.return_token_ids else None,
    }
    part: dict[str, Any] = {**identity, "choices": [choice]}
    if wanted.continuous_usage:
        part["usage"] = {
            "prompt_tokens": len(prompt),
            "total_tokens": len(prompt) + end,
            "completion_tokens": end,
            "completion_tokens_details": None,
        }
    if ended and not wanted.include_usage:
        part["system_fingerprint"] = FINGERPRINT
    return part
