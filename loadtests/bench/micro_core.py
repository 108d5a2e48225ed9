"""What the core costs: decide on a large fleet with a long prompt, and the whole cycle of a request on a small one.

Run: `python loadtests/bench/micro_core.py`. Prints microseconds; CPU time of one thread, so that neighbours do not
count.
"""

from __future__ import annotations

from random import Random
from time import perf_counter

from gateway.core.blocks import block_hashes, seed_of
from gateway.core.model import (
    LoadReported,
    LoadSnapshot,
    Outcome,
    ProbeAnswered,
    ReplicaAdded,
    ReplicaId,
    RouteRequest,
    Space,
    Usage,
)
from gateway.core.router import Router
from gateway.core.settings import RoutingSettings

BLOCK_BYTES = 512
SYSTEM_BLOCKS = 16


def prompt(random: Random, blocks: int, shared: bytes) -> RouteRequest:
    key = shared[: blocks * BLOCK_BYTES] + random.randbytes(max(0, blocks * BLOCK_BYTES - len(shared)))
    hashes = block_hashes(key, seed_of("m", None, None, Space.TEXT), BLOCK_BYTES, 1 << 30)
    return RouteRequest(model=None, blocks=hashes, length=len(key))


def fleet(count: int, cache_tokens: int) -> tuple[Router, list[ReplicaId]]:
    router = Router(RoutingSettings(default_cache_tokens=cache_tokens))
    replicas = [ReplicaId(f"http://10.0.0.{i}:8000") for i in range(count)]
    for replica in replicas:
        router.observe(ReplicaAdded(replica), 0.0)
        router.observe(ProbeAnswered(replica, ok=True), 0.0)
        router.observe(LoadReported(replica, LoadSnapshot(0.0, running=3, waiting=0, kv_usage=0.2)), 0.0)
    return router, replicas


def run(router: Router, request: RouteRequest, now: float) -> None:
    flight = router.start(router.decide(request, now), now)
    flight.first_token(now + 0.1)
    flight.finish(Outcome.COMPLETED, now + 0.2, Usage(prompt_tokens=request.length // 4, cached_tokens=128))


def timed(router: Router, request: RouteRequest, now: float, policy: str) -> float:
    begin = perf_counter()
    router.decide(request, now, policy=policy)
    return perf_counter() - begin


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] * 1e6


def measure_large_fleet() -> None:
    """64 replicas whose caches are full, prompts of 256 blocks (32k tokens) that share 16, some of them known."""
    random = Random(1)
    router, _ = fleet(64, cache_tokens=60_000)
    shared = random.randbytes(SYSTEM_BLOCKS * BLOCK_BYTES)
    now, known = 0.0, [prompt(random, 256, shared) for _ in range(200)]
    for request in known:
        now += 0.01
        run(router, request, now)
    held = []  # every replica decodes something and has prefill pending
    for _ in range(128):
        request = prompt(random, 40, shared)
        held.append(router.start(router.decide(request, now), now))
    for name in ("cache-cost", "least-work", "round-robin"):
        times = []
        for i in range(2_000):
            request = known[i % 200] if i % 2 else prompt(random, 256, shared)
            times.append(min(timed(router, request, now, name) for _ in range(3)))
        full = sum(1 for r in router.statistics(now).replicas if r.index_blocks > 440)
        print(f"decide, 64 replicas ({full} full), 256 blocks, {name:12}  ", end="")
        print(f"p50 {percentile(times, 0.5):6.1f} us   p99 {percentile(times, 0.99):6.1f} us")


def measure_cycle(blocks: int) -> None:
    random = Random(2)
    router, _ = fleet(2, cache_tokens=400_000)
    shared = random.randbytes(SYSTEM_BLOCKS * BLOCK_BYTES)
    known = [prompt(random, blocks, b"") for _ in range(20)]
    requests = [
        known[i % 20] if i % 2 else prompt(random, blocks, shared if blocks > SYSTEM_BLOCKS else b"")
        for i in range(3_000)
    ]
    times = []
    for first in range(0, len(requests), 100):
        begin = perf_counter()
        for i in range(first, first + 100):
            run(router, requests[i], 0.3 * i)
        times.append((perf_counter() - begin) / 100)
    print(f"decide + start + first_token + finish, 2 replicas, {blocks:3} blocks   ", end="")
    print(f"p50 {percentile(times, 0.5):6.1f} us   least {percentile(times, 0.0):6.1f} us   (means of 100)")


def measure_hashes() -> None:
    key, times = Random(3).randbytes(256 * 1024), []
    for _ in range(500):
        begin = perf_counter()
        block_hashes(key, 1, BLOCK_BYTES, 1 << 30)
        times.append(perf_counter() - begin)
    print(f"block_hashes, 256 KB in blocks of 512 bytes   p50 {percentile(times, 0.5):6.1f} us")


if __name__ == "__main__":
    measure_hashes()
    for size in (2, 64, 512):
        measure_cycle(size)
    measure_large_fleet()
