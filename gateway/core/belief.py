"""How much of its KV cache a replica's prefix index may count on: learned for the fleet from hits and misses.

A replica says how large its KV cache is, and it may be wrong about what that means for prefixes: answers take their
part of it, bytes per token are an estimate, another tier keeps what was evicted. An index that is too large predicts
hits that are not there, one that is too small sends prompts away from where they are.

In an LRU cache each block has a *depth*: the blocks used since. It is held as long as its depth is less than what the
cache holds. So both kinds of wrong belief come with a number:

- predicted, but not found: the cache holds less than the depth of the oldest block that was matched,
- not predicted but found, of a prompt that the index had evicted: it holds more than the index did, by as much as the
  index has evicted since.

Each moves the believed share a little towards its number. The numbers are noisy (the engine's order is by when requests
end, ours by when they begin), hence small steps. A miss of everything is none: a restarted replica looks like that.
Nor is a miss used beyond its number: to forget all that is older than the missing block made matters worse.

What makes a size wrong is the same for all replicas of a fleet, so they learn one share together. Learned one by one on
eight replicas it took longer and scattered by a tenth.
"""

from __future__ import annotations

from math import exp, log

LEAST_SHARE, GREATEST_SHARE = 0.125, 8.0
"""Beyond that it is not the size of the cache that is wrong."""
LARGEST_ERROR = log(2.0)
"""A depth below half or above twice the believed capacity counts as that much."""
FIRST_STEP = 0.25
LEAST_STEP = 0.02
"""Share of an error that is believed: a quarter at first, a fiftieth from the 46th lesson on. Larger last steps cost
half a point of hits where the size was right."""
TOLERATED_TOKENS = 512
"""Fewer tokens more or less than predicted say nothing: the engine always computes a prompt's last block."""
TOLERATED_SHARE = 0.05
"""The same for longer prompts: tokens are estimated from bytes."""


class CacheShare:
    """The fleet's share: held blocks by blocks of the reported size."""

    __slots__ = ("lessons", "value")

    def __init__(self) -> None:
        self.value = 1.0
        self.lessons = 0

    def __repr__(self) -> str:
        return f"<CacheShare {self.value:.3f} from {self.lessons}>"

    def learn(self, ratio: float) -> None:
        """What a cache holds turned out to be less, or more, than `ratio` (positive) of the believed capacity."""
        error = min(LARGEST_ERROR, max(-LARGEST_ERROR, log(ratio)))
        step = max(LEAST_STEP, FIRST_STEP / (1.0 + FIRST_STEP * self.lessons))
        self.value = min(GREATEST_SHARE, max(LEAST_SHARE, self.value * exp(step * error)))
        self.lessons += 1


def differs(predicted_tokens: float, cached_tokens: int) -> bool:
    """Whether what was found is more than a rounding away from what was predicted."""
    tolerated = TOLERATED_TOKENS + TOLERATED_SHARE * max(predicted_tokens, float(cached_tokens))
    return abs(predicted_tokens - cached_tokens) > tolerated
