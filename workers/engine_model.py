"""A replica without I/O: the prefix cache and the time cost of one vLLM engine, in whatever time its caller lives in.

A request waits first come, first served, until a sequence slot and its KV blocks are free. It then leaves the queue and
is prefilled, at a fixed rate for the tokens that the prefix cache does not hold: alone, or with `step_tokens` in steps
(`workers.prefill_step`) that several prompts and all who decode share. From its first token on it decodes together with
all others. Everything between two events is linear in time, so nothing happens per token: one
*decode clock* counts the tokens that every decoding request has made, and a request ends when that clock reaches its
target. That keeps batch-size effects and shared prefill steps as cheap as a constant rate.

Time is an argument and only moves forward. A simulator asks `next_event`, a server sets a timer to it; both then call
`advance`, which returns what happened, in order.

KV blocks for the whole answer are reserved when a request leaves the queue (an answer's length is known here), so
nothing is preempted. With `preempts` it is as in vLLM: a block is taken when a token needs it, and when none is free
the request that left the queue last gives back all of its own. It goes to the head of the queue, and from there its
prompt and what it had generated are prefilled again, less what is still cached.

What is simpler than in vLLM: a prompt's last block that must be recomputed is not stored twice.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import count
from typing import NamedTuple

from workers.prefill_step import Prefill, PrefillStep
from workers.prefix_cache import PrefixCache


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Speed and size of one engine. The defaults feel like a small GPU."""

    cache_tokens: int = 100_000
    """KV cache in tokens; whole blocks of it are used."""
    block_size: int = 16
    """Tokens in one KV block; vLLM's default on GPUs."""
    prefill_rate: float = 20_000.0
    """Uncached prompt tokens per second."""
    attention_tokens: float | None = None
    """Attention: a token with so many before it takes twice as long as the first. `None`: all take the same."""
    decode_rate: float = 60.0
    """Tokens per second of one request that decodes alone."""
    max_num_seqs: int = 64
    """Requests that may run at once; the rest waits."""
    first_token_floor_seconds: float = 0.02
    """Shortest time from leaving the queue to the first token: what a fully cached prompt takes."""
    decode_slowdown: float = 0.0
    """Share by which each further decoding request lengthens a step; gpt-oss-120b on one H200 measured 0.065."""
    step_tokens: int | None = None
    """Tokens of one step (vLLM's `max_num_batched_tokens`): one for each who decodes, the rest are prompts, in order,
    and those that it completes have their first token at its end. `None`: one prompt at a time, whole, and answers and
    prompts do not slow each other."""
    cache_generated: bool = True
    """Generated tokens fill prefix blocks too, as in vLLM."""
    preempts: bool = False
    """Blocks are taken as tokens are generated, and running requests preempted when none is free; otherwise a request
    has room for its whole answer from the start."""

    @property
    def cache_blocks(self) -> int:
        return self.cache_tokens // self.block_size


class Phase(Enum):
    NEW = "new"
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    """First token made, or (below the floor) about to be."""
    FINISHED = "finished"
    ABORTED = "aborted"


@dataclass(slots=True, eq=False)
class EngineRequest:
    """One request and its times in the engine. Blocks are chained ids: equal id, equal whole prefix."""

    prompt_tokens: int
    output_tokens: int
    """Tokens that it will generate, at least 1."""
    blocks: Sequence[int] = ()
    """Ids of the prompt's full blocks, first block first. Tokens beyond them are never cached."""
    output_blocks: Sequence[int] = ()
    """Ids of the blocks that its generated tokens complete; they follow `blocks`."""
    key: object = None
    """For the caller's own use."""

    phase: Phase = Phase.NEW
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache when it left the queue."""
    generated_tokens: int = 0
    """Tokens made, once it ended."""
    arrived_at: float | None = None
    started_at: float | None = None
    """When it left the queue."""
    first_token_at: float | None = None
    ended_at: float | None = None
    """Last token, or abort."""
    known_blocks: int = 0
    """Blocks found in the prefix cache; one more than it may use, perhaps."""
    held_blocks: Sequence[int] = ()
    """Blocks with an id that it holds: those of its prompt, and after a preemption those of its answer so far."""
    private_blocks: int = 0
    """Blocks without an id that it holds: a partial last block and room for the answer."""
    decode_origin: float | None = None
    """Decode clock at the first token since its (last) prefill; `None` before."""
    preemptions: int = 0
    resumed_tokens: int = 0
    """Tokens that it had generated when it was last preempted: they are prefilled like its prompt."""

    @property
    def running(self) -> bool:
        return self.phase is Phase.PREFILL or self.phase is Phase.DECODE


class Milestone(Enum):
    STARTED = "started"
    FIRST_TOKEN = "first_token"
    ENDED = "ended"


class Step(NamedTuple):
    """Something that happened inside the engine."""

    time: float
    milestone: Milestone
    request: EngineRequest


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """What vLLM's metrics say of the same thing; counters run since the engine was made."""

    running: int
    waiting: int
    kv_usage: float
    """Share of the blocks that running requests hold, 0..1. A full but idle prefix cache counts as free."""
    cached_blocks: int
    cache_blocks: int
    prefix_queries: int
    """Prompt tokens looked up."""
    prefix_hits: int
    """Prompt tokens found."""
    prompt_tokens: int
    generation_tokens: int
    preemptions: int
    finished: int
    aborted: int
    evicted_blocks: int


class EngineModel:
    """One engine; the module's text says how it moves."""

    def __init__(self, settings: EngineSettings | None = None) -> None:
        self.settings = settings or EngineSettings()
        self.cache = PrefixCache(self.settings.cache_blocks)
        self._now = float("-inf")
        self._steps: list[Step] = []
        self._order = count()
        self._waiting: deque[EngineRequest] = deque()
        self._withdrawn = 0  # aborted requests still in `_waiting`
        self._running: dict[EngineRequest, None] = {}  # who left the queue last is last
        self._prefills: list[Prefill[EngineRequest]] = []  # begun and not complete, in order
        self._step = PrefillStep[EngineRequest](self.settings.attention_tokens)
        self._starting: list[tuple[float, int, EngineRequest]] = []  # heap by time of the first token
        self._decoding: list[tuple[float, int, EngineRequest]] = []  # heap by the decode clock at the last token
        self._growing: list[tuple[float, int, EngineRequest]] = []  # heap by the decode clock when a block is needed
        self._batch = 0  # live entries of `_decoding`
        self._decoded = 0.0  # the decode clock
        self._share = 1.0
        self._prefill_speed, self._decode_speed = self._speeds()
        self._queries = self._hits = self._prompt_tokens = self._generation_tokens = 0
        self._finished = self._aborted = self._preemptions = 0

    def __repr__(self) -> str:
        return f"<EngineModel t={self._now:.3f} running={self.running} waiting={self.waiting}>"

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting) - self._withdrawn

    # ---- what a caller does ------------------------------------------------------------------------------------------

    def submit(self, request: EngineRequest, now: float) -> None:
        """Queue it. Raises ValueError for a request that can never run."""
        size = self.settings.block_size
        if request.phase is not Phase.NEW:
            raise ValueError("a request is submitted once")
        if request.prompt_tokens < 1 or request.output_tokens < 1:
            raise ValueError("a request has at least one prompt token and one output token")
        if len(request.blocks) > request.prompt_tokens // size:
            raise ValueError(f"{len(request.blocks)} blocks do not fit into {request.prompt_tokens} prompt tokens")
        # The last token is returned, but never fed back: it takes no room.
        total = -(-(request.prompt_tokens + request.output_tokens - 1) // size)
        if total > self.cache.capacity_blocks:
            raise ValueError(f"{request.prompt_tokens} + {request.output_tokens} tokens never fit into the KV cache")
        self._run_until(now)
        request.phase, request.arrived_at = Phase.WAITING, now
        self._waiting.append(request)
        self._start_next()

    def abort(self, request: EngineRequest, now: float) -> None:
        """Drop it wherever it is; what it computed so far stays cached. One that has ended already is left alone."""
        self._run_until(now)
        if request.phase is Phase.WAITING:
            self._withdrawn += 1
            request.generated_tokens = request.resumed_tokens
        elif request.running:
            self._leave(request)
        else:
            return
        request.phase = Phase.ABORTED
        self._aborted += 1
        self._end(request)

    def next_event(self) -> float | None:
        """When something will happen unless a request comes or goes first; `None` when nothing will."""
        return self._now if self._steps else self._next()[0]

    def advance(self, now: float) -> list[Step]:
        """Move to `now` and return what happened since the last call, in order of time."""
        self._run_until(now)
        steps, self._steps = self._steps, []
        return steps

    def generated(self, request: EngineRequest, now: float) -> int:
        """Tokens that it has made at `now`, a time not beyond the next event."""
        if request.ended_at is not None:
            return request.generated_tokens
        if request.decode_origin is None:
            return request.resumed_tokens
        clock = self._decoded + (now - self._now) * self._decode_speed
        # Rounding in the clock must not hide a token that is due exactly now.
        return min(request.output_tokens, request.resumed_tokens + 1 + int(clock - request.decode_origin + 1e-6))

    def share_processor(self, share: float, now: float) -> None:
        """From now on it computes at this share of its speeds."""
        self._run_until(now)
        self._share = share
        self._prefill_speed, self._decode_speed = self._speeds()

    def clear_cache(self, now: float) -> None:
        """Forget every block that no running request holds, as vLLM's `/reset_prefix_cache` does."""
        self._run_until(now)
        self.cache.clear()

    def statistics(self, now: float) -> EngineStatistics:
        self._run_until(now)
        size, used, generation = self.settings.block_size, self.cache.shared, self._generation_tokens
        for request in self._running:
            made = self.generated(request, now)
            generation += made - request.resumed_tokens
            if self.settings.preempts:  # what it holds is what it needs
                used += request.private_blocks
            else:
                used += -(-(request.prompt_tokens + max(0, made - 1)) // size) - len(request.held_blocks)
        capacity = self.cache.capacity_blocks
        return EngineStatistics(
            running=self.running,
            waiting=self.waiting,
            kv_usage=used / capacity if capacity else 0.0,
            cached_blocks=self.cache.cached,
            cache_blocks=capacity,
            prefix_queries=self._queries,
            prefix_hits=self._hits,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=generation,
            preemptions=self._preemptions,
            finished=self._finished,
            aborted=self._aborted,
            evicted_blocks=self.cache.evicted,
        )

    # ---- how it moves ------------------------------------------------------------------------------------------------

    def _speeds(self) -> tuple[float, float]:
        """Effort per second of the prefill under way, and tokens of each decoding request, until the next event."""
        settings, batch, share = self.settings, self._batch, self._share
        step_seconds = (1.0 + settings.decode_slowdown * max(0, batch - 1)) / settings.decode_rate
        if settings.step_tokens is None or not self._step or batch == 0:
            return share * settings.prefill_rate, share / step_seconds
        step_seconds += self._step.effort / settings.prefill_rate  # it makes one token of each answer
        return share * self._step.effort / step_seconds, share / step_seconds

    def _next(self) -> tuple[float | None, Callable[[], None]]:
        """Time of the next event, and what it does."""
        at: float | None = None
        fire = self._finish_step
        if self._step:
            at = self._now + self._step.left / self._prefill_speed
        for heap in (self._starting, self._decoding, self._growing):
            while heap and heap[0][2].ended_at is not None:
                heapq.heappop(heap)
        if self._starting and (at is None or self._starting[0][0] < at):
            at, fire = self._starting[0][0], self._make_first_token
        if self._decoding:
            end = self._now + (self._decoding[0][0] - self._decoded) / self._decode_speed
            if at is None or end < at:
                at, fire = end, self._finish_decode
        if self._growing:
            full = self._now + (self._growing[0][0] - self._decoded) / self._decode_speed
            if at is None or full < at:
                at, fire = full, self._grow
        # Rounding may put an event that is due now a hair before now.
        return (at if at is None else max(at, self._now)), fire

    def _run_until(self, now: float) -> None:
        if now < self._now:
            raise ValueError(f"time runs backwards: {now} after {self._now}")
        while True:
            at, fire = self._next()
            if at is None or at > now:
                break
            self._elapse(at)
            fire()
        self._elapse(now)

    def _elapse(self, to: float) -> None:
        if self._step:
            self._step.left -= (to - self._now) * self._prefill_speed
        if self._batch:
            self._decoded += (to - self._now) * self._decode_speed
        self._now = to

    def _start_next(self) -> None:
        """Begin a step if none is under way."""
        if not self._step:
            tokens = self.settings.step_tokens
            if tokens is None:
                if (alone := self._next_in_queue()) is not None:
                    self._step.take(alone, None)
            else:
                budget = max(1, tokens - self._batch)
                for prefill in self._prefills:
                    if budget:
                        budget -= self._step.take(prefill, budget)
                while budget and (new := self._next_in_queue()) is not None:
                    budget -= self._step.take(new, budget)
        self._prefill_speed, self._decode_speed = self._speeds()

    def _next_in_queue(self) -> Prefill[EngineRequest] | None:
        """Whoever is first leaves the queue, if there is a slot and room for it."""
        while self._waiting and self._waiting[0].phase is Phase.ABORTED:
            self._waiting.popleft()
            self._withdrawn -= 1
        if not self._waiting or len(self._running) >= self.settings.max_num_seqs:
            return None
        request, size = self._waiting[0], self.settings.block_size
        prefill_tokens = request.prompt_tokens + request.resumed_tokens
        held = self._blocks_of(request)
        # The last token of the answer is never fed back, and a first token needs no room beyond the prompt's.
        end = prefill_tokens if self.settings.preempts else request.prompt_tokens + request.output_tokens - 1
        private = -(-end // size) - len(held)
        request.known_blocks = self.cache.match(held)
        if not self.cache.acquire(held, private):
            return None
        self._waiting.popleft()
        request.held_blocks, request.private_blocks = held, private
        # At least the last token is computed, so a prompt of whole blocks never uses its last block.
        cached_tokens = min(request.known_blocks, (prefill_tokens - 1) // size) * size
        self._start(request, cached_tokens)
        prefill = Prefill(request, prefill_tokens, cached_tokens, self._now)
        self._prefills.append(prefill)
        return prefill

    def _blocks_of(self, request: EngineRequest) -> Sequence[int]:
        """Blocks with an id that its prefill fills."""
        if not request.resumed_tokens or not self.settings.cache_generated:
            return request.blocks
        full = (request.prompt_tokens + request.resumed_tokens) // self.settings.block_size
        return [*request.blocks, *request.output_blocks[: full - len(request.blocks)]]

    def _start(self, request: EngineRequest, cached_tokens: int) -> None:
        request.phase = Phase.PREFILL
        self._running[request] = None
        if request.preemptions:  # it was counted, and its caller knows
            return
        request.started_at, request.cached_tokens = self._now, cached_tokens
        self._queries += request.prompt_tokens
        self._hits += cached_tokens
        self._steps.append(Step(self._now, Milestone.STARTED, request))

    def _finish_step(self) -> None:
        for prefill in self._step.finish():
            if prefill.done == prefill.tokens:
                self._prefills.remove(prefill)
                prefill.request.phase = Phase.DECODE
                first = max(self._now, prefill.since + self.settings.first_token_floor_seconds)
                heapq.heappush(self._starting, (first, next(self._order), prefill.request))
        self._start_next()

    def _make_first_token(self) -> None:
        """The first one, or the first since a preemption."""
        request = heapq.heappop(self._starting)[2]
        request.decode_origin = self._decoded
        if request.first_token_at is None:
            request.first_token_at = self._now
            self._prompt_tokens += request.prompt_tokens
            self._steps.append(Step(self._now, Milestone.FIRST_TOKEN, request))
        self._batch += 1
        left = request.output_tokens - request.resumed_tokens - 1
        heapq.heappush(self._decoding, (self._decoded + left, next(self._order), request))
        self._plan_growth(request)
        self._prefill_speed, self._decode_speed = self._speeds()

    # ---- preemption --------------------------------------------------------------------------------------------------

    def _plan_growth(self, request: EngineRequest) -> None:
        """When its blocks are full and a further token must be fed back."""
        assert request.decode_origin is not None
        room = (len(request.held_blocks) + request.private_blocks) * self.settings.block_size - request.prompt_tokens
        if room < request.output_tokens - 1:
            at = request.decode_origin + room - request.resumed_tokens
            heapq.heappush(self._growing, (at, next(self._order), request))

    def _grow(self) -> None:
        request = heapq.heappop(self._growing)[2]
        while not self.cache.acquire((), 1):
            youngest = next(reversed(self._running))
            self._preempt(youngest)
            if youngest is request:
                return
        request.private_blocks += 1
        self._plan_growth(request)
        if self._prefills and not self._step:  # those that it carried had to go
            self._start_next()

    def _preempt(self, request: EngineRequest) -> None:
        """Back to the head of the queue, without blocks."""
        self._leave(request)
        # The last token is due now at the latest: it is made after the next prefill.
        request.resumed_tokens = min(request.generated_tokens, request.output_tokens - 1)
        self._generation_tokens -= request.generated_tokens - request.resumed_tokens
        for heap in (self._starting, self._decoding, self._growing):
            heap[:] = [entry for entry in heap if entry[2] is not request]
            heapq.heapify(heap)
        request.phase, request.decode_origin = Phase.WAITING, None
        request.preemptions += 1
        self._preemptions += 1
        self._waiting.appendleft(request)
        self._prefill_speed, self._decode_speed = self._speeds()

    def _finish_decode(self) -> None:
        request = heapq.heappop(self._decoding)[2]
        self._leave(request, finished=True)
        request.phase = Phase.FINISHED
        self._finished += 1
        self._end(request)

    def _leave(self, request: EngineRequest, finished: bool = False) -> None:
        """Take a running request out and give its blocks back."""
        size = self.settings.block_size
        made = request.output_tokens if finished else self.generated(request, self._now)
        valid, generated = len(request.held_blocks), request.output_blocks[:0]
        if request.phase is Phase.PREFILL:
            prefill = next(prefill for prefill in self._prefills if prefill.request is request)
            self._prefills.remove(prefill)
            valid = max(request.known_blocks, self._step.withdraw(prefill) // size)
        elif request.decode_origin is not None:
            self._batch -= 1
            if self.settings.cache_generated:
                full = (request.prompt_tokens + made - 1) // size - len(request.blocks)
                generated = request.output_blocks[len(request.held_blocks) - len(request.blocks) : full]
        del self._running[request]
        request.generated_tokens = made
        self._generation_tokens += made - request.resumed_tokens
        self.cache.release(request.held_blocks, request.private_blocks, valid, generated)
        if not self._batch:
            self._decoded = 0.0  # nobody reads it now; small numbers keep it exact

    def _end(self, request: EngineRequest) -> None:
        request.ended_at = self._now
        self._steps.append(Step(self._now, Milestone.ENDED, request))
        self._start_next()
