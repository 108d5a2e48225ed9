"""The engine in real time: one timer drives it, and wakes whoever waits for tokens.

`EngineModel` says when its next event is; while somebody streams, the timer also fires once a decode step. A *run* is
all engine requests of one HTTP request (samples of each prompt): whoever serves it sleeps until the run has news.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic

import xxhash

from workers.engine_model import EngineModel, EngineRequest, EngineStatistics, Milestone
from workers.sim import tokenizer
from workers.sim.answers import Answer
from workers.sim.errors import queue_full
from workers.sim.recorder import Recorder
from workers.sim.settings import ReplicaSettings

SHORTEST_TICK_SECONDS = 0.002
"""Faster decode steps than 500 a second reach streams several tokens at a time."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenised prompt with its chained prefix blocks."""

    tokens: array[int]
    blocks: Sequence[int]
    origin: int
    """What its blocks are chained to: adapter, salt."""

    @property
    def fingerprint(self) -> int:
        return xxhash.xxh3_64_intdigest(self.tokens.tobytes(), seed=self.origin)


class RunAborted(Exception):
    """The run was aborted: its client left, or its response was cancelled."""


class Run:
    """The engine requests of one HTTP request, in the order prompt 0 sample 0, prompt 0 sample 1, .."""

    def __init__(self, service: EngineService, requests: list[EngineRequest], answers: list[Answer]) -> None:
        self.requests = requests
        self.answers = answers
        self.streamed = False
        self.aborted = False
        self.left = len(requests)
        self._service = service
        self._news: asyncio.Future[None] | None = None

    @property
    def ended(self) -> bool:
        return self.left == 0

    def made(self, position: int) -> int:
        """Tokens that one of the requests has made."""
        return self._service.made(self.requests[position])

    async def wait_news(self) -> None:
        """Sleep until something happened, at least every decode step while streaming. Raises RunAborted."""
        if not self.aborted:
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        if self.aborted:
            raise RunAborted

    async def wait_end(self) -> None:
        while not self.ended or self.aborted:
            await self.wait_news()

    def wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def abort(self) -> None:
        """Stop what still runs. Harmless after the end."""
        if not self.ended:
            self.aborted = True
            self._service.abort(self)
            self.wake()


class EngineService:
    """Owns the engine of one replica and its timer."""

    def __init__(self, settings: ReplicaSettings) -> None:
        self.settings = settings
        self.engine = EngineModel(settings.engine)
        self.recorder = Recorder()
        self.rejected = 0
        self._streaming: set[Run] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self.asleep = False
        self.paused = False
        self._open = asyncio.Event()
        self._open.set()

    # ---- prompts -----------------------------------------------------------------------------------------------------

    def prompt(self, tokens: array[int], salt: str | None) -> Prompt:
        origin = xxhash.xxh3_64_intdigest(salt.encode("utf-8", "surrogatepass")) if salt else 0
        return Prompt(tokens, tokenizer.chain(tokens, self.settings.engine.block_size, origin), origin)

    # ---- runs --------------------------------------------------------------------------------------------------------

    async def start(self, prompts: Sequence[Prompt], answers: list[Answer], stream: bool) -> Run:
        """Submit a run; `answers` holds the same number of samples for each prompt. A sleeping engine holds it up."""
        await self._open.wait()
        limit = self.settings.max_num_queued_reqs
        if limit is not None and self.engine.waiting >= limit:
            self.rejected += 1
            raise queue_full()
        samples = len(answers) // len(prompts)
        requests = [self._request(prompts[place // samples], answer) for place, answer in enumerate(answers)]
        run = Run(self, requests, answers)
        run.streamed = stream
        if stream:
            self._streaming.add(run)
        now = monotonic()
        for request in requests:
            request.key = run
            self.engine.submit(request, now)
        self._tick()
        return run

    def _request(self, prompt: Prompt, answer: Answer) -> EngineRequest:
        size = self.settings.engine.block_size
        tail = prompt.tokens[len(prompt.blocks) * size :] + answer.tokens[:-1]
        origin = prompt.blocks[-1] if prompt.blocks else prompt.origin
        return EngineRequest(len(prompt.tokens), len(answer.tokens), prompt.blocks, tokenizer.chain(tail, size, origin))

    def made(self, request: EngineRequest) -> int:
        return self.engine.generated(request, monotonic() if request.ended_at is None else 0.0)

    def abort(self, run: Run) -> None:
        now = monotonic()
        for request in run.requests:
            self.engine.abort(request, now)
        self._tick()

    # ---- control -----------------------------------------------------------------------------------------------------

    def hold(self, *, asleep: bool | None = None, paused: bool | None = None) -> None:
        """Sleep, pause, or not any more. New requests hang meanwhile, as in vLLM."""
        self.asleep = self.asleep if asleep is None else asleep
        self.paused = self.paused if paused is None else paused
        if self.asleep or self.paused:
            self._open.clear()
        else:
            self._open.set()

    def clear_cache(self) -> None:
        self.engine.clear_cache(monotonic())
        self._tick()

    def statistics(self) -> EngineStatistics:
        statistics = self.engine.statistics(monotonic())
        self._tick()
        return statistics

    # ---- the timer ---------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        now = monotonic()
        for step in self.engine.advance(now):
            run = step.request.key
            assert isinstance(run, Run)
            if step.milestone is Milestone.ENDED:
                run.left -= 1
                self.recorder.record(step.request, run.answers[run.requests.index(step.request)])
                if run.ended:
                    self._streaming.discard(run)
                    run.wake()
            elif run.streamed:
                run.wake()
        for run in self._streaming:
            run.wake()
        self._set_timer(now)

    def _set_timer(self, now: float) -> None:
        at = self.engine.next_event()
        if at is None:
            return
        if self._streaming:
            at = min(at, now + max(SHORTEST_TICK_SECONDS, 1.0 / self.settings.engine.decode_rate))
        if self._timer is not None:
            if now < self._timer_at <= at:
                return
            self._timer.cancel()
        self._timer_at = at
        self._timer = asyncio.get_running_loop().call_later(max(0.0, at - now), self._fire)

    def _fire(self) -> None:
        self._timer = None
        self._tick()
