"""The core under prompts that share nothing: `python -m tests.chaos.distinct_prefixes --help`.

Prints one JSON object. Times are CPU time of this thread, so that the machine's other work is no pause of ours. One
prompt in ten comes from a small hot set; how often those find their prefix tells whether the flood washes it out.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
from array import array
from pathlib import Path
from random import Random
from time import thread_time

from gateway.core.model import BlockHash, Outcome, ProbeAnswered, ReplicaAdded, ReplicaId, RouteRequest
from gateway.core.router import Router
from gateway.core.settings import RoutingSettings
from gateway.memory import tune_memory

BLOCKS = 4
"""Of a prompt: 4 KB."""
HOT_SHARE = 0.1
REPLICAS = 2
ENDLESS_TOKENS = 1 << 40
"""KV cache of a replica: only memory bounds the index."""
SECONDS_APART = 0.02


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def prompt(random: Random) -> RouteRequest:
    blocks = [BlockHash(random.getrandbits(64)) for _ in range(BLOCKS)]
    return RouteRequest(blocks=blocks, length=1024 * BLOCKS)


def percentile(values: array[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


class Pauses:
    """The longest run of the garbage collector, by generation."""

    def __init__(self) -> None:
        self.longest = [0.0, 0.0, 0.0]
        self._began = 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = thread_time()
        else:
            generation = info["generation"]
            self.longest[generation] = max(self.longest[generation], thread_time() - self._began)


def run(prompts: int, memory_mib: int, hot_prompts: int) -> dict[str, object]:
    random = Random(26)
    router = Router(RoutingSettings(index_memory_mib=memory_mib, default_cache_tokens=ENDLESS_TOKENS))
    for at in range(REPLICAS):
        replica = ReplicaId(f"http://10.0.0.{at}:8000")
        router.observe(ReplicaAdded(replica), 0.0)
        router.observe(ProbeAnswered(replica, ok=True), 0.0)
    hot = [prompt(random) for _ in range(hot_prompts)]
    tune_memory()
    pauses = Pauses()
    gc.callbacks.append(pauses)
    seconds, before = array("d"), resident_bytes()
    hits = asked = 0
    for number in range(prompts):
        now = number * SECONDS_APART
        is_hot = random.random() < HOT_SHARE
        request = random.choice(hot) if is_hot else prompt(random)
        began = thread_time()
        decision = router.decide(request, now)
        flight = router.start(decision, now)
        seconds.append(thread_time() - began)
        flight.first_token(now + 0.01)
        flight.finish(Outcome.COMPLETED, now + 0.015, None)
        if is_hot and number > prompts // 10:
            asked += 1
            hits += decision.cached_tokens > 0
    return {
        "growth_mib": (resident_bytes() - before - len(seconds) * seconds.itemsize) / 2**20,
        "p50_us": percentile(seconds, 0.5) * 1e6,
        "p99_us": percentile(seconds, 0.99) * 1e6,
        "longest_ms": max(seconds) * 1e3,
        "collector_ms": [longest * 1e3 for longest in pauses.longest],
        "hot_hits": hits / asked,
        "index_blocks": router.statistics(now).index_blocks,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, required=True)
    parser.add_argument("--memory-mib", type=int, required=True)
    parser.add_argument("--hot", type=int, required=True, help="prompts that come again and again")
    given = parser.parse_args()
    print(json.dumps(run(given.prompts, given.memory_mib, given.hot)))


if __name__ == "__main__":
    main()
