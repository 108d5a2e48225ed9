"""What an engine writes while it starts: how far it is, and what it measured. Fed line by line; reads nothing itself.

The wording is vLLM's, of 0.18 to 0.32; `FACTS` and `STAGES` say where it changed. A replica on several cards has a
process for each, and each may write: weights are those of the fullest card, the cache is that of the emptiest.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from workers.figures import REAL, WHOLE, real, whole


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What was not written is `None`."""

    version: str | None = None
    weights_gib: float | None = None
    """On one card."""
    load_seconds: float | None = None
    kv_cache_gib: float | None = None
    """On one card."""
    kv_tokens: int | None = None
    """As vLLM reports it; see `workers.planner.kv_cache`."""
    context: int | None = None
    concurrency: float | None = None
    """Requests of `context` tokens at once, with two decimals."""
    blocks: int | None = None
    """Only where a flag sets them."""
    graphs_gib: float | None = None
    engine_seconds: float | None = None
    """From loaded weights to a warm engine."""


@dataclass(frozen=True, slots=True)
class Fact:
    """A line of the log, and the fields that its groups fill."""

    pattern: re.Pattern[str]
    kinds: dict[str, Callable[[str], Any]]
    merge: Callable[[Any, Any], Any] = max
    """Of what another process wrote before, and this."""


FACTS = (
    Fact(re.compile(r"Initializing a V1 LLM engine \(v([^)]{1,100})\)"), {"version": str}),
    # "15.0 GiB and 2.02 seconds" from the second model runner, "64.38 GiB memory and 14.38 seconds" from the first.
    Fact(
        re.compile(rf"Model loading took {REAL} GiB(?: memory)? and {REAL} seconds"),
        {"weights_gib": real, "load_seconds": real},
    ),
    Fact(re.compile(rf"Available KV cache memory: {REAL} GiB"), {"kv_cache_gib": real}, min),
    Fact(re.compile(rf"reserved {REAL} GiB memory for KV Cache as specified"), {"kv_cache_gib": real}, min),
    # On the CPU: "Explicitly set (1.0/23.54) GiB for KV cache on node 0", or "Auto set".
    Fact(
        re.compile(rf"(?:Explicitly|Auto) set \({REAL}/[\d.]{{1,40}}\) GiB for KV cache"), {"kv_cache_gib": real}, min
    ),
    Fact(re.compile(rf"Overriding num_gpu_blocks=\d{{1,18}} with num_gpu_blocks_override={WHOLE}"), {"blocks": whole}),
    # "GPU KV cache size: N tokens"; in 0.32 "CPU KV cache size" where that is meant.
    Fact(re.compile(rf"KV cache size: {WHOLE} tokens"), {"kv_tokens": whole}, min),
    # On a line of its own, in 0.32 behind the size.
    Fact(
        re.compile(rf"Maximum concurrency for {WHOLE} tokens per request: {REAL}x"),
        {"context": whole, "concurrency": real},
        min,
    ),
    Fact(re.compile(rf"Graph capturing finished in \d{{1,18}} secs, took {REAL} GiB"), {"graphs_gib": real}),
    Fact(
        re.compile(rf"init engine \(profile, create kv cache, warmup model\) took {REAL} s"),
        {"engine_seconds": real},
    ),
)

STAGES = (
    (re.compile(r"Starting to load model|Loading model from scratch"), "loading weights"),
    # Bars of the loaders: safetensors, pt, several threads, streamers.
    (
        re.compile(r"(?:Loading|Multi-thread loading) .{0,80}?(?:shards|Streamer|loader)[^:]{0,40}:\s{1,9}(\d{1,3})%"),
        "loading weights",
    ),
    (re.compile(r"Model loading took"), "measuring memory"),
    (re.compile(r"Dynamo bytecode transform|Compiling a graph|Cache the graph"), "compiling"),
    (re.compile(r"KV cache size:"), "preparing the engine"),
    (re.compile(r"Capturing CUDA graphs.{0,200}?\s(\d{1,3})%[^%]*$"), "capturing CUDA graphs"),
    (re.compile(r"init engine \("), "opening its port"),
)
"""In the order of a start; the first group is a percentage."""


class EngineLog:
    """Hears the lines of one start."""

    def __init__(self) -> None:
        self.facts = EngineFacts()
        self.progress: str | None = None
        """What it is at, e.g. `loading weights, 56 %`; `None` before it said anything of it."""

    def __repr__(self) -> str:
        return f"EngineLog({self.progress!r}, {self.facts})"

    def hear(self, line: str) -> None:
        for fact in FACTS:
            if match := fact.pattern.search(line):
                self._take(fact, match)
        for pattern, words in STAGES:
            if match := pattern.search(line):
                percent = match.group(1) if pattern.groups else None
                self.progress = f"{words}, {percent} %" if percent else words

    def _take(self, fact: Fact, match: re.Match[str]) -> None:
        found: dict[str, Any] = {}
        for (name, kind), text in zip(fact.kinds.items(), match.groups(), strict=True):
            before, now = getattr(self.facts, name), kind(text)
            found[name] = now if before is None else fact.merge(before, now)
        self.facts = replace(self.facts, **found)
