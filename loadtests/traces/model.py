"""What a trace is: when requests came and which prefixes they share, without any text.

A block id stands for a whole prefix: two requests with the same id at the same place share everything up to there. Only
ids of full blocks are kept, since an engine caches no others.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from itertools import groupby
from random import Random

BLOCK_TOKENS = 512
"""Tokens in one block of a trace, as in Mooncake's."""


class TraceError(Exception):
    """The file is no trace; the message says where."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace."""

    arrival: float
    """Seconds from the start of the trace."""
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    """Ids of its full 512-token blocks, first block first."""
    session: str | None = None
    """Requests of one session follow each other: those of one chat, or of one user."""
    think_seconds: float | None = None
    """From the end of the session's request before to this one; `None` for the first, or when it is not known. A closed
    loop waits so long, an open loop arrives as recorded."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival."""

    requests: tuple[Request, ...]
    quantum_seconds: float = 0.0
    """Arrivals were rounded down to multiples of this; 0: they are exact."""

    @property
    def seconds(self) -> float:
        """How long it lasts; a trace of one moment lasts no time."""
        return self.requests[-1].arrival - self.requests[0].arrival + self.quantum_seconds if self.requests else 0.0

    @property
    def input_tokens(self) -> int:
        return sum(request.input_tokens for request in self.requests)

    def first(self, requests: int | None) -> Trace:
        """Its first requests; all of them when `None`."""
        return self if requests is None else replace(self, requests=self.requests[:requests])


# ---- time ----------------------------------------------------------------------------------------------------------


def spread(trace: Trace, seed: int) -> Trace:
    """Rounded arrivals, at random places inside their quantum, in the order of the trace: rounding lost the times, not
    the order. Exact ones stay."""
    if not trace.quantum_seconds:
        return trace
    random = Random(seed)
    moved: list[Request] = []
    for _, group in groupby(trace.requests, key=lambda request: request.arrival):
        together = list(group)
        delays = sorted(random.random() * trace.quantum_seconds for _ in together)
        moved += [replace(r, arrival=r.arrival + delay) for r, delay in zip(together, delays, strict=True)]
    moved.sort(key=lambda request: request.arrival)  # quanta may overlap by milliseconds
    return Trace(tuple(moved))


def sped_up(trace: Trace, speed: float) -> Trace:
    """The same requests `speed` times as fast, and users who think as much faster."""

    def faster(request: Request) -> Request:
        think = request.think_seconds
        return replace(request, arrival=request.arrival / speed, think_seconds=None if think is None else think / speed)

    return Trace(tuple(map(faster, trace.requests)), trace.quantum_seconds / speed)


def speed_for_load(trace: Trace, load: float, fleet_rate: float) -> float:
    """How much faster the trace must run to offer `load` times the input tokens a second that the fleet can prefill
    when nothing is cached (`fleet_rate`)."""
    return load * fleet_rate * trace.seconds / trace.input_tokens if trace.seconds else 1.0


# ---- ceilings ------------------------------------------------------------------------------------------------------


def cached_tokens(trace: Trace, capacity_tokens: int | None) -> list[int]:
    """Prompt tokens of each request that one LRU cache for everybody would hold, requests served as they arrive.

    `None`: a cache without end. Of a prompt of whole blocks the last is never used: one token must be computed.
    """
    held: OrderedDict[int, None] = OrderedDict()
    capacity = None if capacity_tokens is None else capacity_tokens // BLOCK_TOKENS
    found: list[int] = []
    for request in trace.requests:
        blocks = request.blocks
        known = next((place for place, block in enumerate(blocks) if block not in held), len(blocks))
        found.append(min(known, (request.input_tokens - 1) // BLOCK_TOKENS) * BLOCK_TOKENS)
        for block in reversed(blocks):  # the tail is the first to be evicted
            held.pop(block, None)
            held[block] = None
        while capacity is not None and len(held) > capacity:
            held.popitem(last=False)
    return found
