"""Traces: requests with their times, lengths and shared prefixes; read from files or made up.

    model       what a trace is, moved in time, and what caches of any size could hold of it
    files       any file -> a trace; one module for each format (mooncake, chats, azure, request_log)
    generated   traces made up from a few numbers, each for one property of traffic

What is random (arrivals inside a coarse timestamp, when chats start, a generated trace) depends on the seed alone. A
`Source` gives the trace for a seed.
"""

from loadtests.traces.files import open_trace, read, write
from loadtests.traces.generated import GENERATORS, Chats, Rag, Synthetic, generator_named, synthetic
from loadtests.traces.lines import Source
from loadtests.traces.model import (
    BLOCK_TOKENS,
    Request,
    Trace,
    TraceError,
    cached_tokens,
    sped_up,
    speed_for_load,
    spread,
)

__all__ = [
    "BLOCK_TOKENS",
    "GENERATORS",
    "Chats",
    "Rag",
    "Request",
    "Source",
    "Synthetic",
    "Trace",
    "TraceError",
    "cached_tokens",
    "generator_named",
    "open_trace",
    "read",
    "sped_up",
    "speed_for_load",
    "spread",
    "synthetic",
    "write",
]
