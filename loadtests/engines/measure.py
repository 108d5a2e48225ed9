"""What one replica can do here, as the simulator asks for it: `python -m loadtests.engines.measure [--output FILE]`.

Prefill is measured from the client's side, cold prompt against time to first token, on one replica alone; then what all
of them get done together when none is ever idle, for they share the cores of this machine. Decoding is what an answer
of 64 tokens takes longer than one of a single token, with 1 to 8 streams on one replica; not the time between tokens,
which arrive in bursts when cores are short. One JSON object is written; every figure but the sustained one comes from
medians.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from random import Random
from statistics import fmean, median

import httpx
import msgspec

from loadtests.bench.processes import BenchmarkFailure
from loadtests.bench.run import describe_machine
from loadtests.engines.client import Answer, ask, new_client, warm_up
from loadtests.engines.fleet import BENCH, MODEL_NAME, MODEL_SIZE, Fleet, replica_fleet
from loadtests.engines.report import first_seconds
from loadtests.engines.workload import Turn, message, words, write_body
from workers.worker import WorkerFailed

PROMPT_TOKENS = (1_000, 2_000, 4_000, 6_000)
BUSY_TOKENS = 4_000
"""The longest prompts of the workload."""
BUSY_PROMPTS = 12
"""For each replica, two at a time: some ten seconds."""
BUSY_ANSWER_TOKENS = 24
"""As in the workload: what the servers do for each token beside the engines takes cores from them as well."""
STREAMS = (1, 2, 4, 8)
"""The preset runs up to 8 requests at once."""
DECODE_TOKENS = 64
SHORT_TOKENS = 16
"""A prompt with next to nothing to prefill: its time to first token is the floor."""
REPEATS = 3


class Prefill(msgspec.Struct, frozen=True):
    prompt_tokens: int
    cold_seconds: float
    warm_seconds: float
    """The same prompt again."""
    tokens_per_second: float
    """Uncached tokens by the time that they add: cold less warm."""


class Sustained(msgspec.Struct, frozen=True):
    """All replicas at work all the time, with cold prompts only."""

    prompt_tokens: int
    answer_tokens: int
    prompts: int
    """On each replica."""
    seconds: float
    """Until the mean replica was done with all of its prompts."""


class Decode(msgspec.Struct, frozen=True):
    streams: int
    tokens_per_second: float
    """Of one stream."""


class Facts(msgspec.Struct, frozen=True):
    machine: str
    vllm: str
    model: str
    replicas: int
    cache_tokens: int
    """Of one replica."""
    floor_seconds: float
    """Time to first token of a prompt with almost nothing to compute."""
    prefill_alone: list[Prefill]
    sustained: Sustained
    decode_alone: list[Decode]
    decode_all_busy: list[Decode]


async def measure(fleet: Fleet) -> Facts:
    async with new_client() as client:
        random, first = Random(0), fleet.urls[:1]
        return Facts(
            machine=describe_machine(),
            vllm=await fleet.version(),
            model=" ".join(MODEL_SIZE),
            replicas=len(fleet.urls),
            cache_tokens=fleet.cache_tokens,
            floor_seconds=await measure_floor(client, first[0], random),
            prefill_alone=[await measure_prefill(client, first, tokens, random) for tokens in PROMPT_TOKENS],
            sustained=await measure_sustained(client, fleet.urls, random),
            decode_alone=[await measure_decode(client, first, streams, random) for streams in STREAMS],
            decode_all_busy=[await measure_decode(client, fleet.urls, streams, random) for streams in STREAMS],
        )


async def measure_floor(client: httpx.AsyncClient, url: str, random: Random) -> float:
    answers = [await send(client, url, words(random, SHORT_TOKENS), 2) for _ in range(REPEATS * REPEATS)]
    return round(median(first_seconds(answers)), 4)


async def measure_prefill(client: httpx.AsyncClient, urls: Sequence[str], tokens: int, random: Random) -> Prefill:
    """One prompt at each replica at a time; a fresh one, then the same again."""
    cold: list[Answer] = []
    warm: list[Answer] = []
    for _ in range(REPEATS):
        prompts = [words(random, tokens) for _ in urls]
        for answers in (cold, warm):
            answers += await asyncio.gather(
                *(send(client, url, prompt, 2) for url, prompt in zip(urls, prompts, strict=True))
            )
    cold_seconds, warm_seconds = median(first_seconds(cold)), median(first_seconds(warm))
    uncached = median(answer.prompt_tokens for answer in cold)
    rate = uncached / max(cold_seconds - warm_seconds, 1e-3)
    return Prefill(int(uncached), round(cold_seconds, 4), round(warm_seconds, 4), round(rate))


async def measure_sustained(client: httpx.AsyncClient, urls: Sequence[str], random: Random) -> Sustained:
    async def keep_busy(url: str, prompts: list[str]) -> tuple[int, float]:
        async def one_by_one() -> list[int]:
            tokens = []
            while prompts:
                tokens.append((await send(client, url, prompts.pop(), BUSY_ANSWER_TOKENS)).prompt_tokens)
            return tokens

        began = time.perf_counter()
        done = await asyncio.gather(one_by_one(), one_by_one())
        return max(chain.from_iterable(done)), time.perf_counter() - began

    prompts = [[words(random, BUSY_TOKENS) for _ in range(BUSY_PROMPTS)] for _ in urls]
    ends = await asyncio.gather(*map(keep_busy, urls, prompts))
    tokens, seconds = max(tokens for tokens, _ in ends), fmean(seconds for _, seconds in ends)
    return Sustained(tokens, BUSY_ANSWER_TOKENS, BUSY_PROMPTS, round(seconds, 3))


async def measure_decode(client: httpx.AsyncClient, urls: Sequence[str], streams: int, random: Random) -> Decode:
    """`streams` at once on each replica."""
    seconds: dict[int, list[float]] = {1: [], DECODE_TOKENS: []}
    for _ in range(REPEATS):
        for tokens, times in seconds.items():
            answers = await asyncio.gather(
                *(send(client, url, words(random, SHORT_TOKENS), tokens) for url in urls for _ in range(streams))
            )
            times += [answer.seconds for answer in answers]
    added = median(seconds[DECODE_TOKENS]) - median(seconds[1])
    return Decode(streams, round((DECODE_TOKENS - 1) / max(added, 1e-3), 1))


async def send(client: httpx.AsyncClient, url: str, prompt: str, max_tokens: int) -> Answer:
    body = write_body(MODEL_NAME, [message("user", prompt)], max_tokens)
    answer = await ask(client, url, Turn("measure", 1, 0.0, body), max_tokens)
    if answer.failure:
        raise BenchmarkFailure(f"{url}: {answer.failure}")
    return answer


async def run(replicas: int) -> Facts:
    async with replica_fleet(replicas, BENCH / "engines") as fleet:
        await warm_up(fleet.urls, MODEL_NAME)
        await fleet.clear_caches()
        return await measure(fleet)


def main() -> None:
    parser = argparse.ArgumentParser(prog="measure", description="What one vLLM replica can do on this machine.")
    parser.add_argument("--replicas", type=int, default=3)
    default = BENCH / "results" / f"{time.strftime('%Y-%m-%d')}-engines-facts.json"
    parser.add_argument("--output", type=Path, default=default)
    given = parser.parse_args()
    try:
        facts = asyncio.run(run(given.replicas))
    except (BenchmarkFailure, WorkerFailed) as failure:
        sys.exit(f"measure: {failure}")
    text = msgspec.json.format(msgspec.json.encode(facts), indent=1)
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.write_bytes(text + b"\n")
    print(text.decode())


if __name__ == "__main__":
    main()
