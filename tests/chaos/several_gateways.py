"""Three gateways on a real Redis, as processes: `python -m tests.chaos.several_gateways` measures each target.

Chats over embedded replicas for what caches are worth, scripted replicas for a rolling restart, mock replicas for what
sharing costs. Half of the figures are of times, so nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
from redis.asyncio import Redis

from loadtests.bench.bodies import FILES, GROUPS, make_body
from loadtests.bench.processes import cpu_seconds
from loadtests.gateways import MOST_POINTS, MOST_RESTART_POINTS, MOST_TTFT, RESTART_REQUESTS, Line, table
from tests.chaos.bench import Bench, built
from tests.chaos.openloop import Load, Traffic, ends, percentile
from tests.chaos.rig import GatewayProcess, Rig, standing
from tests.redis_server import RedisServer, redis_server

GATEWAYS = 3
EMBEDDED = ("--cache-tokens", "60000", "--prefill-rate", "20000", "--max-num-seqs", "64")
REPLICAS = 4
CHATS, TURNS, CHAT_GROUPS = 60, 14, 6
CHAT_RATE = 15.0
"""Requests a second: three gateways, four replicas, Redis and the clients share two cores."""
RESTART_AT = 200
"""Number of the request before which a gateway is restarted."""
ROLLING_RATE = 200.0
COST_RATE, COST_SECONDS, COST_ROUNDS = 500.0, 5.0, 3
MOST_CPU_PERCENT = 5.0
MEMORY_MIB = 1


def new(folder: Path) -> Path:
    folder.mkdir()
    return folder


# ---- chats ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """One turn as its client saw it."""

    prompt_tokens: int
    cached_tokens: int
    ttft_seconds: float


def text_of(seed: str, size: int) -> str:
    return random.Random(seed).randbytes(size // 2).hex()


def chat_turns() -> list[list[dict[str, str]]]:
    """All turns of all chats, mixed: each repeats its chat and adds to it. The same each time."""
    mixed = [chat for chat in range(CHATS) for _ in range(TURNS)]
    random.Random(1).shuffle(mixed)
    messages: dict[int, list[dict[str, str]]] = {}
    turns = []
    for chat in mixed:
        system = {"role": "system", "content": text_of(f"group {chat % CHAT_GROUPS}", 4_000)}
        history = messages.setdefault(chat, [system])
        history.append({"role": "user", "content": text_of(f"chat {chat} turn {len(history)}", 600)})
        turns.append(list(history))
        history.append({"role": "assistant", "content": "Yes."})
    return turns


class Balancer:
    """Deals requests in turn to the gateways that say they are ready, as load balancers do."""

    def __init__(self, gateways: Sequence[GatewayProcess]) -> None:
        self._gateways = gateways
        self._ready = {gateway.name for gateway in gateways}
        self._turn = 0

    def choose(self) -> str:
        self._turn += 1
        open_ = [gateway for gateway in self._gateways if gateway.name in self._ready]
        return open_[self._turn % len(open_)].url

    @contextlib.asynccontextmanager
    async def looking(self) -> AsyncIterator[Balancer]:
        task = asyncio.create_task(self._look())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _look(self) -> None:
        while True:
            for gateway in self._gateways:
                try:
                    is_ready = gateway.running and (await gateway.get("/ready")).status_code == 200
                except httpx.HTTPError:
                    is_ready = False
                (self._ready.add if is_ready else self._ready.discard)(gateway.name)
            await asyncio.sleep(0.1)


async def ask(client: httpx.AsyncClient, url: str, messages: list[dict[str, str]]) -> Answer:
    body = {"model": "m", "messages": messages, "max_tokens": 8, "stream": True}
    body["stream_options"] = {"include_usage": True}
    began, first, usage = time.monotonic(), 0.0, {}
    async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
        assert response.status_code == 200, (await response.aread())[:500]
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if not first and event.get("choices") and event["choices"][0]["delta"].get("content"):
                first = time.monotonic()
            usage = event.get("usage") or usage
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Answer(usage["prompt_tokens"], cached, first - began)


async def restarted(gateway: GatewayProcess, rig: Rig) -> None:
    """SIGTERM, its end, and another start at the same port; ready once it has found the replicas."""
    port = gateway.port
    await gateway.stop()
    text = gateway.config_path.read_text()
    gateway.config_path.write_text(text.replace("port = 0", f"port = {port}", 1))
    await gateway.start()
    for replica in rig.all_replicas:
        await gateway.wait_state(replica, "up")


async def chats(folder: Path, gateways: int, redis: RedisServer | None, restart: bool = False) -> list[Answer]:
    """All chats through so many gateways; with `restart` the first of them restarts midway."""
    config = {} if redis is None else {"redis": {"url": redis.url}}
    async with (
        standing(
            folder, replicas=0, embedded=REPLICAS, embedded_options=EMBEDDED, gateways=gateways, config=config
        ) as rig,
        Balancer(rig.gateways).looking() as balancer,
        httpx.AsyncClient(trust_env=False, timeout=60.0, limits=httpx.Limits(max_connections=None)) as client,
    ):
        began, asked, restarting = time.monotonic(), [], None
        for number, messages in enumerate(chat_turns()):
            if restart and number == RESTART_AT:
                restarting = asyncio.create_task(restarted(rig.gateway, rig))
            await asyncio.sleep(max(0.0, began + number / CHAT_RATE - time.monotonic()))
            asked.append(asyncio.create_task(ask(client, balancer.choose(), messages)))
        if restarting is not None:
            await restarting
        return list(await asyncio.gather(*asked))


def hit_percent(answers: Sequence[Answer]) -> float:
    return 100.0 * sum(one.cached_tokens for one in answers) / sum(one.prompt_tokens for one in answers)


def p90(answers: Sequence[Answer]) -> float:
    return percentile([one.ttft_seconds for one in answers], 0.9)


async def measure_chats(folder: Path) -> list[Line]:
    one = await chats(new(folder / "one"), 1, None)
    alone = await chats(new(folder / "alone"), GATEWAYS, None)
    with redis_server(folder) as redis:
        shared = await chats(new(folder / "shared"), GATEWAYS, redis)
    with redis_server(folder) as redis:
        restart = await chats(new(folder / "restart"), GATEWAYS, redis, restart=True)
    points, ratio = hit_percent(shared) - hit_percent(one), p90(shared) / p90(one)
    after = slice(RESTART_AT, RESTART_AT + RESTART_REQUESTS)
    lost = hit_percent(shared[after]) - hit_percent(restart[after])
    what = f"{GATEWAYS} gateways, {REPLICAS} embedded replicas, {len(one)} turns of {CHATS} chats"
    measured = f"hits {hit_percent(shared):.1f} % by {hit_percent(one):.1f} % of one, TTFT p90 {p90(shared) * 1e3:.0f}"
    measured += f" by {p90(one) * 1e3:.0f} ms"
    met = points >= -MOST_POINTS and ratio <= MOST_TTFT
    cut = f"hits {hit_percent(alone):.1f} %, TTFT p90 {p90(alone) * 1e3:.0f} ms"
    return [
        Line(what, measured, f">= -{MOST_POINTS:g} points, <= {MOST_TTFT}x", met),
        Line("the same without Redis", cut),
        Line(
            f"hits lost in {RESTART_REQUESTS} requests after one of {GATEWAYS} restarted",
            f"{lost:.2f} points",
            f"< {MOST_RESTART_POINTS:g} point",
            lost < MOST_RESTART_POINTS,
        ),
    ]


# ---- a rolling restart ---------------------------------------------------------------------------------------------


async def measure_rolling_restart(folder: Path) -> list[Line]:
    with redis_server(folder) as redis:
        config = {"redis": {"url": redis.url}}
        async with (
            standing(folder, gateways=GATEWAYS, config=config) as rig,
            Balancer(rig.gateways).looking() as balancer,
        ):
            load = Load(balancer.choose, Traffic(rate=ROLLING_RATE))
            async with load.running():
                await asyncio.sleep(2.0)
                for gateway in rig.gateways:
                    await restarted(gateway, rig)
                    await asyncio.sleep(1.0)
    failed = [one for one in load.results if not one.ok]
    streams = sum(one.stream for one in load.results)
    return [
        Line(
            f"rolling restart of {GATEWAYS} gateways at {ROLLING_RATE:g} requests/s, balanced by `/ready`",
            f"{len(failed)} of {len(load.results)} failed ({streams} streams){': ' + ends(failed) if failed else ''}",
            "0 errors, 0 cut streams",
            not failed,
        )
    ]


# ---- what it costs -------------------------------------------------------------------------------------------------


def write_distinct_bodies(folder: Path) -> Path:
    """Prompts of 4 KB that share nothing: each is told whole."""
    file = next(one for one in FILES if one.name == "distinct_4k")
    bodies = [make_body(file, group=at % GROUPS, member=at // GROUPS) for at in range(8 * GROUPS)]
    path = folder / "distinct.bin"
    path.write_bytes(b"".join(b"%08d%b" % (len(body), body) for body in bodies))
    return path


async def loaded(folder: Path, bodies: Path, port: int, seconds: float) -> None:
    command = [str(folder / "loadgen"), "-p", str(port), "-f", str(bodies), "-c", "32"]
    command += ["-t", str(seconds), "-r", str(COST_RATE)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
    assert await process.wait() == 0


async def cpu_percent(folder: Path, bodies: Path, watched: GatewayProcess, *others: GatewayProcess) -> float:
    """Of a core, that it takes while it and the others get their requests."""
    before, began = cpu_seconds([watched.pid]), time.monotonic()
    await asyncio.gather(*(loaded(folder, bodies, one.port, COST_SECONDS) for one in (watched, *others)))
    return 100.0 * (cpu_seconds([watched.pid]) - before) / (time.monotonic() - began)


@contextlib.asynccontextmanager
async def gateways_with_mocks(folder: Path, redis: RedisServer) -> AsyncIterator[list[GatewayProcess]]:
    """Those that share, and one that does not."""
    bench = Bench(folder, 0, 1)
    quiet = {"log": "off"}
    async with contextlib.AsyncExitStack() as stack:
        mocks = await stack.enter_async_context(bench.mocks(2))
        found = []
        for number in range(GATEWAYS + 1):
            own = new(folder / f"cost-{number}")
            config: dict[str, dict[str, object]] = {"server": quiet}
            if number < GATEWAYS:
                config["redis"] = {"url": redis.url, "memory_mib": MEMORY_MIB}
            found.append(await stack.enter_async_context(bench.gateway(own, mocks, config)))
        yield found


async def measure_cost(folder: Path) -> list[Line]:
    """The same load through a gateway that shares and through one that does not, in turn."""
    built(folder)
    bodies = write_distinct_bodies(folder)
    with redis_server(folder) as redis:
        async with gateways_with_mocks(folder, redis) as (*sharing, alone):
            for gateway in (*sharing, alone):  # what is built on first use
                await cpu_percent(folder, bodies, gateway)
            rounds = [
                (
                    await cpu_percent(folder, bodies, alone),
                    await cpu_percent(folder, bodies, sharing[0]),
                    await cpu_percent(folder, bodies, *sharing),
                )
                for _ in range(COST_ROUNDS)
            ]
            async with Redis.from_url(redis.url) as client:
                streams = [key async for key in client.scan_iter("*:view:*")]
                kept = sum([await client.memory_usage(key, samples=0) or 0 for key in streams])
    bare, one, three = (statistics.median(values) for values in zip(*rounds, strict=True))
    what = f"CPU of a gateway at {COST_RATE:g} requests/s with distinct prompts of 4 KB"
    return [
        Line(
            f"{what}: what sharing adds, the others idle",
            f"{one - bare:+.1f} % of a core ({one:.1f} by {bare:.1f}, medians of {COST_ROUNDS} in turn)",
            f"<= {MOST_CPU_PERCENT:g} %",
            one - bare <= MOST_CPU_PERCENT,
        ),
        Line(
            f"{what}: the same with two others that get as many each",
            f"{three - bare:+.1f} % of a core ({three:.1f} by {bare:.1f})",
        ),
        Line(
            f"memory of the stream in Redis with `memory_mib = {MEMORY_MIB}` after that",
            f"{kept / 2**20:.2f} MiB",
            f"<= {MEMORY_MIB * 1.25:g} MiB",
            0 < kept <= MEMORY_MIB * 1.25 * 2**20,
        ),
    ]


PARTS: dict[str, Callable[[Path], Awaitable[list[Line]]]] = {
    "chats": measure_chats,
    "rolling": measure_rolling_restart,
    "cost": measure_cost,
}


async def measured(parts: Sequence[str], json_path: Path | None) -> list[Line]:
    lines: list[Line] = []
    for part in parts:
        with tempfile.TemporaryDirectory() as folder:
            found = await PARTS[part](Path(folder))
        for line in found:
            print(f"{line.what}: {line.measured}", file=sys.stderr, flush=True)
            if json_path is not None:
                with json_path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"by": "processes", **asdict(line)}) + "\n")
        lines += found
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    about = (__doc__ or "").split("\n\n")[0]
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.several_gateways", description=about)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="all when absent")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add a line for each figure there")
    given = parser.parse_args(arguments)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    print(table(asyncio.run(measured(given.parts, given.json))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
