"""From prompts to a run, and from a run to numbers: the part that all generating routes share."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from secrets import token_hex
from typing import Any

import xxhash

from workers.sim import answers, sampling
from workers.sim.answers import Answer, Wish
from workers.sim.errors import ApiError, prompt_too_long, unknown_model
from workers.sim.exchange import Exchange
from workers.sim.sampling import Sampling
from workers.sim.service import EngineService, Prompt, Run
from workers.sim.settings import ReplicaSettings

FINGERPRINT = "vllm-0.32.0-embedded"


class Generator:
    """Answers prompts on the engine of one replica."""

    def __init__(self, settings: ReplicaSettings, service: EngineService) -> None:
        self.settings = settings
        self.service = service

    def require_model(self, name: str | None) -> None:
        if name is not None and name != self.settings.model:
            raise unknown_model(name, self.settings.model)

    def prompt(self, tokens: array[int], wanted: Sampling, exact: bool = False) -> Prompt:
        """Raises ApiError when the context has no room for it and one token more."""
        if not tokens:
            raise ApiError(400, "The decoder prompt cannot be empty")
        room = self.settings.context_tokens - len(tokens)
        if room < 0:
            raise prompt_too_long(self.settings.context_tokens, len(tokens), exact)
        sampling.require_tokens(room)
        return self.service.prompt(tokens, wanted.cache_salt)

    @asynccontextmanager
    async def run(
        self, exchange: Exchange | None, prompts: Sequence[Prompt], wanted: Sampling, wish: Wish
    ) -> AsyncIterator[Run]:
        """A run of `wanted.samples` answers to each prompt. It is aborted when the client leaves, or the block does."""
        texts = [self._answer(prompt, sample, wanted, wish) for prompt in prompts for sample in range(wanted.samples)]
        run = await self.service.start(prompts, texts, wanted.stream)
        watch = None if exchange is None else asyncio.ensure_future(exchange.wait_disconnect())
        if watch is not None:
            watch.add_done_callback(lambda task: None if task.cancelled() else run.abort())
        try:
            yield run
        finally:
            if watch is not None:
                watch.cancel()
            run.abort()

    def _answer(self, prompt: Prompt, sample: int, wanted: Sampling, wish: Wish) -> Answer:
        room = self.settings.context_tokens - len(prompt.tokens)
        limit = room if wanted.max_tokens is None else min(room, wanted.max_tokens)
        sources = (self.settings.seed, wanted.seed, sample, prompt.fingerprint)
        return answers.compose(replace(wish, max_tokens=limit), xxhash.xxh3_64_intdigest(repr(sources).encode()))


def wish_of(wanted: Sampling, **more: Any) -> Wish:
    """What the sampling asks of each answer; the run sets the token limit for its prompt."""
    return Wish(
        max_tokens=1,
        min_tokens=wanted.min_tokens,
        ignore_eos=wanted.ignore_eos,
        stop=wanted.stop,
        keep_stop=wanted.keep_stop,
        **more,
    )


def request_id(exchange: Exchange, prefix: str) -> str:
    given = exchange.headers.get(b"x-request-id")
    return prefix + (given.decode("latin-1") if given else token_hex(8))


class Counts:
    """Token counts of a run, for every form of usage. Prompts count once, however many samples they have."""

    def __init__(self, run: Run, prompts: Sequence[Prompt], block_size: int) -> None:
        samples = len(run.requests) // len(prompts)
        first_samples = run.requests[::samples]
        self.prompt = sum(len(prompt.tokens) for prompt in prompts)
        self.completion = sum(map(run.made, range(len(run.requests))))
        self.cached = sum(request.cached_tokens for request in first_samples)
        self.created = sum(len(request.blocks) * block_size - request.cached_tokens for request in first_samples)

    def usage(self, details: dict[str, Any] | None) -> dict[str, Any]:
        """OpenAI's usage object; `details` of the prompt tokens differ by route."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt,
            "total_tokens": self.prompt + self.completion,
            "completion_tokens": self.completion,
        }
        if details is not None:
            usage["prompt_tokens_details"] = details
        return usage
