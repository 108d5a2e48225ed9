"""Why a replica failed, as far as its output tells.

An engine writes the cause deep inside a traceback, and some hundred lines later its last line says only that something
above went wrong. So each line is looked at as it comes. Only forms that an error takes are looked for, not the bare
words, for a log may also quote a prompt; and a cause counts only where the process ended soon after it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from workers.figures import DIGITS, real, whole

KEPT_CHARACTERS = 300
"""Of a line, for people. Allocator messages go on about fragmentation."""


class Kind(Enum):
    """Values are what is said of the replica: it ..."""

    OUT_OF_MEMORY = "ran out of GPU memory"
    NO_CACHE = "had no memory left for its KV cache"
    CACHE_TOO_SMALL = "has a KV cache too small for one request of full length"
    MEMORY_TAKEN = "found less free GPU memory than it is to take"


@dataclass(frozen=True, slots=True)
class Cause:
    kind: Kind
    line: str
    longest_tokens: int | None = None
    """Of `CACHE_TOO_SMALL`: the longest request that would fit, where the engine says it."""
    free_share: float | None = None
    """Of `MEMORY_TAKEN`: free by all memory."""


FORMS: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    (Kind.OUT_OF_MEMORY, re.compile(r"OutOfMemoryError[:(]")),
    # Without torch's allocator: a library's own call, or torch.cuda in the midst of a graph capture.
    (Kind.OUT_OF_MEMORY, re.compile(r"Error: (?:CUDA|HIP) (?:error: )?out of memory", re.IGNORECASE)),
    (Kind.OUT_OF_MEMORY, re.compile(r"Error: .{0,300}?(?:CUBLAS|HIPBLAS|ROCBLAS)_STATUS_ALLOC_FAILED")),
    (Kind.NO_CACHE, re.compile(r"ValueError: No available memory for the cache blocks")),
    (
        Kind.CACHE_TOO_SMALL,  # up to 0.8; its figure is what fits
        re.compile(
            r"max seq len \(\d{1,18}\) is larger than the maximum number of tokens .{0,200}? KV cache "
            rf"\((?P<longest>{DIGITS})\)"
        ),
    ),
    (
        Kind.CACHE_TOO_SMALL,
        re.compile(
            r"KV cache is needed, which is larger than the available KV cache memory"
            rf"(?:.{{0,400}}?estimated maximum model length is (?P<longest>{DIGITS})(?!\d))?"
        ),
    ),
    (
        Kind.MEMORY_TAKEN,
        re.compile(
            r"Free memory on device .{0,100}?"
            rf"\((?P<free>{DIGITS}(?:\.\d{{1,20}})?)/(?P<total>{DIGITS}(?:\.\d{{1,20}})?) GiB\) "
            r"on startup is less than (?:desired GPU memory utilization|the engine's budget)"
        ),
    ),
)


def read_line(line: str) -> Cause | None:
    for kind, form in FORMS:
        if found := form.search(line):
            figures = found.groupdict()
            longest, free, total = figures.get("longest"), figures.get("free"), figures.get("total")
            return Cause(
                kind,
                line[:KEPT_CHARACTERS],
                longest_tokens=whole(longest) if longest else None,
                free_share=real(free) / real(total) if free and total and real(total) else None,
            )
    return None


class Causes:
    """The last cause that a replica's output named, and when."""

    FRESH_SECONDS = 60.0
    """An engine that fails is gone within seconds; with many GPUs its workers are waited for."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: Cause | None = None
        self._at = 0.0

    def note(self, line: str) -> None:
        cause = read_line(line)
        if cause is not None:
            self._last, self._at = cause, self._clock()

    def forget(self) -> None:
        """It came up: what went wrong before did not matter."""
        self._last = None

    @property
    def last(self) -> Cause | None:
        """`None` when that is too long ago to be the cause of an end that comes now."""
        return self._last if self._clock() - self._at < self.FRESH_SECONDS else None
