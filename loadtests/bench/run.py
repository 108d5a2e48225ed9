"""Measure gateways side by side: `python -m loadtests.bench.run` (or `make bench`), see README.md beside it.

Rounds are the outer loop and gateways the inner one, so that whatever drifts on the machine hits all alike; every other
round goes backwards. Each phase appends one line to a results file, and a failed one does too: the rest still runs, but
the table shows it and the exit status is 1.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec

from loadtests.bench.bodies import write_bodies
from loadtests.bench.gateways import DIRECT, GATEWAYS, WARMLANE, Gateway, gateway_from_command
from loadtests.bench.phases import FULL, MEMORY, PHASES, QUICK, Phase, Plan
from loadtests.bench.processes import BenchmarkFailure
from loadtests.bench.report import Record, Results, RunHeader, write_report
from loadtests.bench.stand import Stand, Workshop, direct_stand, gateway_stand

SOURCES = Path(__file__).parent
DECIDE = "decide"
"""Micro-benchmark of the core alone, in a module of its own."""
KINDS = (*dict.fromkeys(phase.kind for phase in PHASES), MEMORY.kind, DECIDE)


@dataclass(frozen=True, slots=True)
class Options:
    plan: Plan
    kinds: tuple[str, ...]
    names: tuple[str, ...] | None
    """`None`: all that can be had here."""
    extra: tuple[Gateway, ...]
    folder: Path


def read_options(arguments: Sequence[str]) -> Options:
    parser = argparse.ArgumentParser(prog="bench", description="Gateways side by side in front of mock replicas.")
    parser.add_argument("--quick", action="store_true", help="two minutes, one round: to see that all works")
    parser.add_argument("--rounds", type=int, help="rounds over all gateways; figures are medians over them")
    parser.add_argument("--only", default=",".join(KINDS), help=f"comma-separated, of {', '.join(KINDS)}")
    parser.add_argument("--names", help="comma-separated gateways; 'direct' is always measured")
    parser.add_argument("--prompts", type=int, help="distinct prompts in the memory phase")
    parser.add_argument(
        "--gateway",
        action="append",
        default=[],
        metavar="NAME=COMMAND",
        help="one more gateway; {port}, {replica1}, {replica2} are filled in",
    )
    parser.add_argument("--folder", type=Path, default=Path(".bench"), help="programs, bodies, peers, logs, results")
    given = parser.parse_args(arguments)
    kinds = tuple(given.only.split(","))
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"--only: unknown {', '.join(sorted(unknown))}")
    plan = QUICK if given.quick else FULL
    plan = replace(plan, rounds=given.rounds or plan.rounds, memory_prompts=given.prompts or plan.memory_prompts)
    names = tuple(given.names.split(",")) if given.names else None
    extra = tuple(gateway_from_command(text) for text in given.gateway)
    return Options(plan, kinds, names, extra, given.folder.resolve())


def prepare(options: Options) -> Workshop:
    """Build the C programs, write the bodies, choose the cores."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise BenchmarkFailure("needs two cores: one for the gateway, one for replicas and load")
    if not shutil.which("gcc"):
        raise BenchmarkFailure("needs gcc (Debian: apt-get install gcc libc6-dev)")
    workshop = Workshop(options.folder, gateway_core=cores[0], load_core=cores[1])
    workshop.folder.mkdir(parents=True, exist_ok=True)
    for name in ("loadgen", "mock"):
        source = SOURCES / f"{name}.c"
        build = ["gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-o", workshop.program(name), str(source)]
        if subprocess.run(build).returncode != 0:
            raise BenchmarkFailure(f"could not build {source}")
    write_bodies(workshop.folder / "bodies")
    return workshop


def choose_gateways(options: Options, peers: Path) -> dict[Gateway, str]:
    """The gateways to measure with their versions; peers are installed on the way."""
    known = {gateway.name: gateway for gateway in (*GATEWAYS, *options.extra)}
    wanted = options.names or tuple(known)
    if unknown := set(wanted) - {*known, DIRECT}:
        raise BenchmarkFailure(f"unknown gateway: {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    chosen = {}
    for gateway in (known[name] for name in wanted if name != DIRECT):
        version = gateway.version(peers)
        if version:
            chosen[gateway] = version
        elif options.names:
            raise BenchmarkFailure(f"{gateway.name} is not installed")
        else:
            say(f"{gateway.name} is not installed, left out")
    return chosen


def measure_all(options: Options, workshop: Workshop, gateways: Sequence[Gateway]) -> Iterator[Record]:
    phases = [phase for phase in PHASES if phase.kind in options.kinds]
    plan = options.plan
    names: list[Gateway | None] = [None, *gateways]
    for at in range(1, plan.rounds + 1) if phases else ():
        for gateway in names if at % 2 else reversed(names):
            stand = (
                gateway_stand(gateway, workshop, plan.settings) if gateway else direct_stand(workshop, plan.settings)
            )
            yield from measure_phases(stand, phases, plan, at, gateway.name if gateway else DIRECT)
    if MEMORY.kind in options.kinds:
        for gateway in gateways:
            if gateway.name == WARMLANE:
                stand = gateway_stand(gateway, workshop, plan.memory_settings, plan.index_memory_mib)
                yield from measure_phases(stand, [MEMORY], plan, 1, gateway.name)


def measure_phases(
    stand_context: AbstractContextManager[Stand], phases: Sequence[Phase], plan: Plan, at: int, name: str
) -> Iterator[Record]:
    """One record for each phase; none after the first failure, since that gateway may be in any state."""
    phase = "start"
    try:
        with stand_context as stand:
            for one in phases:
                phase = one.name
                yield Record(at, name, phase, one.measure(stand, plan))
    except BenchmarkFailure as failure:
        yield Record(at, name, phase, failure=str(failure))


def measure_decide() -> str:
    """Output of the micro-benchmark of the core."""
    done = subprocess.run([sys.executable, "-m", "loadtests.bench.micro_core"], capture_output=True, text=True)
    if done.returncode != 0:
        raise BenchmarkFailure(f"micro_core: {done.stderr}")
    return done.stdout


def describe_machine() -> str:
    model = "unknown CPU"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return f"{model} ({os.cpu_count()} cores), Linux {platform.release()}, Python {platform.python_version()}"


def run(options: Options) -> int:
    workshop = prepare(options)
    gateways = choose_gateways(options, workshop.peers)
    os.sched_setaffinity(0, {workshop.load_core})  # this process, too, keeps off the gateway's core
    header = RunHeader(
        started_at=time.strftime("%Y-%m-%d %H:%M"),
        machine=describe_machine(),
        versions={gateway.name: version for gateway, version in gateways.items()},
        plan=asdict(options.plan),
    )
    results = Results(header)
    file = workshop.folder / "results" / f"{time.strftime('%Y%m%d-%H%M%S')}.jsonl"
    file.parent.mkdir(exist_ok=True)
    with file.open("wb") as lines:
        lines.write(msgspec.json.encode(header) + b"\n")
        for record in measure_all(options, workshop, list(gateways)):
            lines.write(msgspec.json.encode(record) + b"\n")
            lines.flush()
            results.records.append(record)
            say(describe(record))
    print(write_report(results))
    if DECIDE in options.kinds and (SOURCES / "micro_core.py").exists():
        print(measure_decide())
    say(f"results: {file}")
    return 1 if results.failures() else 0


def describe(record: Record) -> str:
    figures = ", ".join(f"{name} {value:,.2f}" for name, value in record.figures.items())
    return f"round {record.round} {record.gateway} {record.phase}: {record.failure or figures}"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    try:
        sys.exit(run(read_options(sys.argv[1:])))
    except BenchmarkFailure as failure:
        sys.exit(f"bench: {failure}")


if __name__ == "__main__":
    main()
