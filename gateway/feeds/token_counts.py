"""How long a model's prompts really are: the first few are counted by the replica that got them.

The gateway estimates tokens by bytes, and how many bytes a token has differs threefold between texts and tokenizers.
Usage tells, but only when the first answers end, and by then the chats of a cold fleet are placed. On four replicas
with text of 1.7 bytes a token, simulated, users who came together waited a quarter longer for that. So until a model
has some lessons, its prompts go to the replica's `/tokenize` as well, beside the request and not before it. An engine
that cannot do it costs nothing but the question, and one that is known for it is not asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import msgspec

from gateway.core.model import Fact, PromptCounted, ReplicaId, RouteRequest
from gateway.feeds.engines import Engines
from gateway.feeds.fetch import FetchFailed, ReplicaClient, fetch

PROMPTS_OF_MODEL = 3
"""The first settles it where prompts are alike; three show whether they are."""
MAX_MODELS = 256
"""Names come from clients: later models are learned from usage alone."""
MAX_WAITING = 8
"""Prompts kept until they are counted; what comes while so many wait is not."""
MAX_PROMPT_BYTES = 256 * 1024
MEDIA = (b'"image_url"', b'"video_url"', b'"audio_url"', b'"input_audio"', b'"file"')
"""Prompts with any of these are not counted: the engine would fetch and decode it once more."""
TIMEOUT_SECONDS = 5.0
MAX_ANSWER_BYTES = 4 * 1024 * 1024
"""All token ids are listed: some seven bytes for each of 65,000 tokens and more."""


@dataclass(frozen=True, slots=True)
class Sample:
    replica: ReplicaId
    request: RouteRequest
    body: bytes


class Counted(msgspec.Struct):
    """What matters of the answer."""

    count: Annotated[int, msgspec.Meta(ge=1, le=1_000_000_000)]


class TokenCounts:
    """Hears of every request (`note`), has a few of them counted (`run`)."""

    def __init__(self, observe: Callable[[Fact], None], engines: Engines | None = None) -> None:
        self._observe = observe
        self._engines = engines or Engines()
        self._asked: dict[str | None, int] = {}
        self._waiting: asyncio.Queue[Sample] = asyncio.Queue(MAX_WAITING)

    def note(self, replica: ReplicaId, request: RouteRequest, body: bytes) -> None:
        """A request was sent to `replica`. It can be counted if its body is one that `/tokenize` takes as it is."""
        asked = self._asked.get(request.model, 0)
        if asked >= PROMPTS_OF_MODEL or self._waiting.full() or len(body) > MAX_PROMPT_BYTES or not request.blocks:
            return
        if any(medium in body for medium in MEDIA) or not self._engines.dialect(replica).counts_tokens:
            return
        if asked or len(self._asked) < MAX_MODELS:
            self._asked[request.model] = asked + 1
            self._waiting.put_nowait(Sample(replica, request, body))

    async def run(self, client: ReplicaClient) -> None:
        while True:
            sample = await self._waiting.get()
            try:
                counted = await self._count(client, sample)
            except FetchFailed:  # no such endpoint, or busy: usage will tell
                continue
            request = sample.request
            self._observe(PromptCounted(sample.replica, request.model, request.space, request.length, counted))

    async def _count(self, client: ReplicaClient, sample: Sample) -> int:
        """Raises `FetchFailed`."""
        url = f"{sample.replica}/tokenize"
        answer = await fetch(
            client, url, timeout_seconds=TIMEOUT_SECONDS, max_bytes=MAX_ANSWER_BYTES, posting=sample.body
        )
        try:
            return msgspec.json.decode(answer, type=Counted).count
        except (msgspec.DecodeError, RecursionError) as error:
            raise FetchFailed(f"not a token count: {error}") from error
