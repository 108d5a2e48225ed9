"""Who is compared: Warmlane's policies, as they ship, and the two peers that route by prefix.

The peers start as in the data-path benchmark (`loadtests/bench/gateways.py`), policy `cache_aware`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from random import Random

from loadtests.bench.gateways import SGLANG_ROUTER, VLLM_ROUTER, Gateway, Place, warmlane_command
from loadtests.bench.processes import BenchmarkFailure, free_port
from loadtests.engines.client import ask, new_client
from loadtests.engines.fleet import HOST, MODEL_NAME, ROUTER_START_SECONDS, Fleet, log_files, running
from loadtests.engines.workload import Turn, message, words, write_body
from workers.launch import base_url
from workers.worker import Worker

POLICIES = ("round-robin", "least-requests", "session-hash", "cache-cost")
PROBE_TOKENS = 30
"""Of a probe's prompt: less than one block, so that no cache keeps it."""
PROBE_ROUNDS = 50


def policy_command(policy: str, place: Place) -> list[str]:
    return [*warmlane_command(place), "--policy", policy]  # of two the last one counts


def warmlane_version(_peers: Path) -> str:
    return version("warmlane")


def policy_router(policy: str) -> Gateway:
    command: Callable[[Place], list[str]] = partial(policy_command, policy)
    return Gateway(policy, command, warmlane_version)


ROUTERS = {
    router.name: router
    for router in (
        *map(policy_router, POLICIES),
        Gateway("vllm-router", VLLM_ROUTER.command, VLLM_ROUTER.version, verbatim=False),
        Gateway("sglang-router", SGLANG_ROUTER.command, SGLANG_ROUTER.version, verbatim=False),
    )
}


@asynccontextmanager
async def router_in_front(router: Gateway, fleet: Fleet, folder: Path, peers: Path) -> AsyncIterator[Worker]:
    """The router, started afresh, once every replica of the fleet has had a request through it."""
    own = folder / router.name
    own.mkdir(parents=True, exist_ok=True)
    place = Place(free_port(), fleet.urls, own, peers)
    with log_files(folder, [router.name]) as logs:
        worker = Worker(
            router.command(place), {}, base_url(HOST, place.port), name=router.name, output=logs[router.name]
        )
        async with running([worker], ROUTER_START_SECONDS):
            await wait_serving(worker.url, fleet)
            yield worker


async def wait_serving(url: str, fleet: Fleet) -> None:
    """Bursts of short, distinct requests until all replicas have served one: the router knows them all."""
    before = await fleet.counters()
    random = Random(url)
    async with new_client() as client:
        for at in range(PROBE_ROUNDS):
            probes = [probe(random, f"probe-{at}-{one}") for one in range(2 * len(fleet.urls))]
            await asyncio.gather(*(ask(client, url, turn, max_tokens=1) for turn in probes))
            now = await fleet.counters()
            if all(new.requests > old.requests for old, new in zip(before, now, strict=True)):
                return
            await asyncio.sleep(0.2)
    raise BenchmarkFailure(f"after {PROBE_ROUNDS} bursts of requests some replica has had none")


def probe(random: Random, session: str) -> Turn:
    body = write_body(MODEL_NAME, [message("user", words(random, PROBE_TOKENS))], 1)
    return Turn(session, 1, 0.0, body)
