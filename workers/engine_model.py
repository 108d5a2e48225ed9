"""A replica without I/O: the prefix cache and the time cost of one vLLM engine, in whatever time its caller lives in.

A request waits first come, first served, until a sequence slot and its KV blocks are free. It then leaves the queue and
is prefilled alone, at a fixed rate for the tokens that the prefix cache does not hold. From its first token on it
decodes together with all others. Everything between two events is linear in time, so nothing happens per token: one
*decode clock* counts the tokens that every decoding request has made, and a request ends when that clock reaches its
target. That keeps batch-size effects and shared prefill steps as cheap as a constant rate.

Time is an argument and only moves forward. A simulator asks `next_event`, a server sets a timer to it; both then call
`advance`, which returns what happened, in order.

What is simpler than in vLLM: KV blocks for the whole answer are reserved when a request leaves the queue (an answer's
length is known here), so nothing is ever preempted; a prompt's last block that must be recomputed is not stored twice.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import count
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Speed and size of one engine. The defaults feel like a small GPU."""

    cache_tokens: int = 100_000
    """KV cache in tokens; whole blocks of it are used."""
    block_size: int = 16
    """Tokens in one KV block; vLLM's default on GPUs."""
    prefill_rate: float = 20_000.0
    """Uncached prompt tokens per second."""
    decode_rate: float = 60.0
    """Tokens per second of one request that decodes alone."""
    max_num_seqs: int = 64
    """Requests that may run at once; the rest waits."""
    first_token_floor_seconds: float = 0.02
    """Shortest time from leaving the queue to the first token: what a fully cached prompt takes."""
    decode_slowdown: float = 0.0
    """Share by which each further decoding request lengthens a step; gpt-oss-120b on one H200 measured 0.065."""
    step_tokens: int | None = None
    """Tokens of one step that prefill and decode share (vLLM's `max_num_batched_tokens`). `None`: no interference."""
    cache_generated: bool = True
    """Generated tokens fill prefix blocks too, as in vLLM."""

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
    private_blocks: int = 0
    """Blocks without an id that it holds: a partial last block and room for the answer."""
    decode_origin: float = 0.0
    """Decode clock at its first token."""

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


class PrefixCache:
    """Blocks of one engine: *held* by running requests (counted references), or *idle*, least recently used first.

    A request holds its chain from the root and gives it back tail first, so a block is never evicted before the blocks
    that follow it: the cached part of any chain is a leading run. `private` blocks belong to one request and have no id
    (its partial last block, the room for its answer).
    """

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self.private = 0
        self.evicted = 0
        self._held: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def shared(self) -> int:
        """Blocks with an id that running requests hold."""
        return len(self._held)

    @property
    def held(self) -> int:
        return len(self._held) + self.private

    @property
    def cached(self) -> int:
        return len(self._held) + len(self._idle)

    def match(self, blocks: Sequence[int]) -> int:
        """Length of the leading run of `blocks` that is cached."""
        held, idle = self._held, self._idle
        for place, block in enumerate(blocks):
            if block not in held and block not in idle:
                return place
        return len(blocks)

    def acquire(self, blocks: Sequence[int], private: int) -> bool:
        """Hold `blocks` and `private` more, evicting what must go; or change nothing and say no."""
        held, idle = self._held, self._idle
        known = sum(map(held.__contains__, blocks))
        if self.held + len(blocks) - known + private > self.capacity_blocks:
            return False
        for block in blocks:
            if block in held:
                held[block] += 1
            else:
                idle.pop(block, None)
                held[block] = 1
        self.private += private
        for _ in range(self.held + len(idle) - self.capacity_blocks):
            idle.popitem(last=False)
            self.evicted += 1
        return True

    def release(self, blocks: Sequence[int], private: int, valid: int, generated: Sequence[int] = ()) -> None:
        """Give back, tail first. The first `valid` of `blocks` hold computed tokens and stay cached; so does
        `generated`, the ids of private blocks that generated tokens filled."""
        held, idle = self._held, self._idle
        self.private -= private
        for block in reversed(generated):
            if block not in held:
                idle[block] = None
                idle.move_to_end(block)
        for position in range(len(blocks) - 1, -1, -1):
            block = blocks[position]
            references = held[block] - 1
            if references:
                held[block] = references
                continue
            del held[block]
            if position < valid:
                idle[block] = None

    def clear(self) -> None:
        """Forget what no running request holds."""
        self._idle.clear()


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
        self._running: set[EngineRequest] = set()
        self._prefilling: EngineRequest | None = None
        self._prefill_left = 0.0
        self._starting: list[tuple[float, int, EngineRequest]] = []  # heap by time of the first token
        self._decoding: list[tuple[float, int, EngineRequest]] = []  # heap by the decode clock at the last token
        self._batch = 0  # live entries of `_decoding`
        self._decoded = 0.0  # the decode clock
        self._prefill_speed, self._decode_speed = self._speeds()
        self._queries = self._hits = self._prompt_tokens = self._generation_tokens = 0
        self._finished = self._aborted = 0

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
        request.private_blocks = total - len(request.blocks)
        request.phase, request.arrived_at = Phase.WAITING, now
        self._waiting.append(request)
        self._start_next()

    def abort(self, request: EngineRequest, now: float) -> None:
        """Drop it wherever it is; what it computed so far stays cached. One that has ended already is left alone."""
        self._run_until(now)
        if request.phase is Phase.WAITING:
            self._withdrawn += 1
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
        if request.first_token_at is None:
            return 0
        clock = self._decoded + (now - self._now) * self._decode_speed
        # Rounding in the clock must not hide a token that is due exactly now.
        return min(request.output_tokens, 1 + int(clock - request.decode_origin + 1e-6))

    def clear_cache(self, now: float) -> None:
        """Forget every block that no running request holds, as vLLM's `/reset_prefix_cache` does."""
        self._run_until(now)
        self.cache.clear()

    def statistics(self, now: float) -> EngineStatistics:
        self._run_until(now)
        size, used, generation = self.settings.block_size, self.cache.shared, self._generation_tokens
        for request in self._running:
            made = self.generated(request, now)
            generation += made
            used += -(-(request.prompt_tokens + max(0, made - 1)) // size) - len(request.blocks)
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
            preemptions=0,
            finished=self._finished,
            aborted=self._aborted,
            evicted_blocks=self.cache.evicted,
        )

    # ---- how it moves ------------------------------------------------------------------------------------------------

    def _speeds(self) -> tuple[float, float]:
        """Tokens per second of the running prefill, and of each decoding request, until the next event."""
        settings, batch = self.settings, self._batch
        step_seconds = (1.0 + settings.decode_slowdown * max(0, batch - 1)) / settings.decode_rate
        if settings.step_tokens is None or self._prefilling is None or batch == 0:
            return settings.prefill_rate, 1.0 / step_seconds
        # Steps that carry both: one token for each decoding request, the rest of the budget for the prefill.
        prefill_tokens = max(1, settings.step_tokens - batch)
        step_seconds += prefill_tokens / settings.prefill_rate
        return prefill_tokens / step_seconds, 1.0 / step_seconds

    def _next(self) -> tuple[float | None, Callable[[], None]]:
        """Time of the next event, and what it does."""
        at: float | None = None
        fire = self._finish_prefill
        if self._prefilling is not None:
            at = self._now + self._prefill_left / self._prefill_speed
        for heap in (self._starting, self._decoding):
            while heap and heap[0][2].phase is Phase.ABORTED:
                heapq.heappop(heap)
        if self._starting and (at is None or self._starting[0][0] < at):
            at, fire = self._starting[0][0], self._make_first_token
        if self._decoding:
            end = self._now + (self._decoding[0][0] - self._decoded) / self._decode_speed
            if at is None or end < at:
                at, fire = end, self._finish_decode
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
        if self._prefilling is not None:
            self._prefill_left -= (to - self._now) * self._prefill_speed
        if self._batch:
            self._decoded += (to - self._now) * self._decode_speed
        self._now = to

    def _start_next(self) -> None:
        while self._waiting and self._waiting[0].phase is Phase.ABORTED:
            self._waiting.popleft()
            self._withdrawn -= 1
        if self._waiting and self._prefilling is None and len(self._running) < self.settings.max_num_seqs:
            request, size = self._waiting[0], self.settings.block_size
            request.known_blocks = self.cache.match(request.blocks)
            if self.cache.acquire(request.blocks, request.private_blocks):
                self._waiting.popleft()
                # At least the last token is computed, so a prompt of whole blocks never uses its last block.
                self._start(request, min(request.known_blocks, (request.prompt_tokens - 1) // size) * size)
        self._prefill_speed, self._decode_speed = self._speeds()

    def _start(self, request: EngineRequest, cached_tokens: int) -> None:
        request.phase, request.started_at, request.cached_tokens = Phase.PREFILL, self._now, cached_tokens
        self._running.add(request)
        self._prefilling, self._prefill_left = request, float(request.prompt_tokens - cached_tokens)
        self._queries += request.prompt_tokens
        self._hits += cached_tokens
        self._steps.append(Step(self._now, Milestone.STARTED, request))

    def _finish_prefill(self) -> None:
        request = self._prefilling
        assert request is not None
        assert request.started_at is not None
        self._prefilling, request.phase = None, Phase.DECODE
        first = max(self._now, request.started_at + self.settings.first_token_floor_seconds)
        heapq.heappush(self._starting, (first, next(self._order), request))
        self._start_next()

    def _make_first_token(self) -> None:
        request = heapq.heappop(self._starting)[2]
        request.first_token_at, request.decode_origin = self._now, self._decoded
        self._prompt_tokens += request.prompt_tokens
        self._steps.append(Step(self._now, Milestone.FIRST_TOKEN, request))
        self._batch += 1
        heapq.heappush(self._decoding, (self._decoded + request.output_tokens - 1, next(self._order), request))
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
        valid, generated = len(request.blocks), request.output_blocks[:0]
        if request is self._prefilling:
            computed = request.prompt_tokens - math.ceil(self._prefill_left)
            valid = max(request.known_blocks, computed // size)
            self._prefilling = None
        elif made:
            self._batch -= 1
            if self.settings.cache_generated:
                full = (request.prompt_tokens + made - 1) // size
                generated = request.output_blocks[: full - len(request.blocks)]
        self._running.remove(request)
        request.generated_tokens = made
        self._generation_tokens += made
        self.cache.release(request.blocks, request.private_blocks, valid, generated)
        if not self._batch:
            self._decoded = 0.0  # nobody reads it now; small numbers keep it exact

    def _end(self, request: EngineRequest) -> None:
        request.ended_at = self._now
        self._steps.append(Step(self._now, Milestone.ENDED, request))
        self._start_next()
