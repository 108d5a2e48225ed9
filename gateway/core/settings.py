"""Settings of the core: plain values with their reasons; the file's `[routing]` table fills them."""

from __future__ import annotations

from dataclasses import dataclass

POLICY_NAMES = (
    "round-robin",
    "random",
    "least-requests",
    "least-work",
    "session-hash",
    "prefix-only",
    "cache-cost",
)


@dataclass(frozen=True, slots=True)
class RoutingSettings:
    policy: str = "cache-cost"
    block_bytes: int = 512
    """Key bytes in one prefix block, about 125 tokens of English, 200 of code, 300 of random numbers. Twice the size
    halves the work of hashing and of the index; but simulated chats with 1.7 bytes a token, on caches too small for
    them, then waited 7 % longer (4 % where they just fitted), and found 33 % cached instead of 37."""
    index_memory_mib: int = 256
    """Cap of the prefix index over all replicas, entries counted at their measured size."""
    default_cache_tokens: int = 400_000
    """KV cache of a replica until it reports its own. Between one H100 (0.2 M) and one H200 (1.4 M) with
    gpt-oss-120b."""
    default_prefill_rate: float = 10_000.0
    """Uncached prompt tokens per second until learned. Guessed low: too low cost nothing in simulation, too high
    did."""
    hold: bool | None = None
    """Late binding: a request waits in the gateway while the replica of its choice could not begin with it. `None`: as
    the policy has it."""
    max_in_flight: int = 4_096
    """Requests at all replicas together; more wait in the gateway."""
    max_waiting: int = 1_024
    """Requests that may wait in the gateway; more are shed with 429."""
    max_wait_seconds: float = 60.0
    """A request that waited this long is shed with 429."""
