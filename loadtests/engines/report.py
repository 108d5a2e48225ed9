"""One JSON line for each run, and tables over the repeats of all runs in a file.

python -m loadtests.engines.report FILE

A figure in a table is the mean over repeats, the lowest and highest of them in brackets. Routers are compared repeat by
repeat, since each repeat has chats of its own.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import msgspec

from loadtests.bench.report import ABSENT, NOISE_CORES, number, table
from loadtests.engines.client import Answer, Load
from loadtests.engines.workload import Workload

OURS = "cache-cost"
"""Compared with the best of the others: Warmlane as it is unless told otherwise."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one run. Times in seconds, of the requests that were answered in full."""

    requests: int
    """Answered in full."""
    failed: int
    unsent: int
    """Not answered when time was up."""
    ttft_mean: float | None
    ttft_p50: float | None
    ttft_p90: float | None
    ttft_p99: float | None
    later_ttft_mean: float | None
    """Of all turns but the first of each chat."""
    requests_per_second: float
    cached_share: float | None
    """Of the prompt tokens."""
    prompt_tokens: int
    output_tokens: int
    wall_seconds: float
    first_failure: str = ""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One router, one regime, one repeat: a line of the results file."""

    started_at: str
    router: str
    regime: str
    repeat: int
    seed: int
    figures: Figures
    replica_requests: list[int]
    router_cpu_seconds: float
    foreign_cores: float
    """What other processes of the machine used meanwhile."""
    cache_tokens: int
    """Of one replica."""
    workload: Workload
    versions: dict[str, str]
    machine: str

    @property
    def imbalance(self) -> float:
        """Requests of the busiest replica by the mean."""
        total = sum(self.replica_requests)
        return max(self.replica_requests) * len(self.replica_requests) / total if total else 1.0


def figures_of(load: Load) -> Figures:
    good = [answer for answer in load.answers if not answer.failure]
    failures = [answer.failure for answer in load.answers if answer.failure]
    first = first_seconds(good)
    prompt_tokens = sum(answer.prompt_tokens for answer in good)
    return Figures(
        requests=len(good),
        failed=len(failures),
        unsent=load.unsent,
        ttft_mean=mean(first),
        ttft_p50=percentile(first, 0.5),
        ttft_p90=percentile(first, 0.9),
        ttft_p99=percentile(first, 0.99),
        later_ttft_mean=mean(first_seconds(answer for answer in good if answer.turn > 1)),
        requests_per_second=round(len(good) / load.wall_seconds, 3),
        cached_share=round(sum(answer.cached_tokens for answer in good) / prompt_tokens, 4) if prompt_tokens else None,
        prompt_tokens=prompt_tokens,
        output_tokens=sum(answer.completion_tokens for answer in good),
        wall_seconds=round(load.wall_seconds, 2),
        first_failure=failures[0] if failures else "",
    )


def first_seconds(answers: Iterable[Answer]) -> list[float]:
    return [answer.first_seconds for answer in answers if answer.first_seconds is not None]


def mean(values: Sequence[float]) -> float | None:
    return round(fmean(values), 4) if values else None


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least `share` of all do not exceed."""
    return round(sorted(values)[max(0, math.ceil(share * len(values)) - 1)], 4) if values else None


def percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    value: Callable[[Run], float | None]
    digits: int = 2
    spread: bool = False
    """With the lowest and the highest repeat."""


COLUMNS = (
    Column("TTFT mean s", lambda run: run.figures.ttft_mean, 3, spread=True),
    Column("p50", lambda run: run.figures.ttft_p50, 3),
    Column("p90", lambda run: run.figures.ttft_p90),
    Column("p99", lambda run: run.figures.ttft_p99, spread=True),
    Column("cached %", lambda run: percent(run.figures.cached_share), 1, spread=True),
    Column("requests/s", lambda run: run.figures.requests_per_second),
    Column("busiest replica / mean", lambda run: run.imbalance),
    Column("failed + unsent", lambda run: run.figures.failed + run.figures.unsent, 1),
)


@dataclass(frozen=True, slots=True)
class Contest:
    """A figure in which one router is compared with the best of the others."""

    text: str
    value: Callable[[Run], float | None]
    best: Callable[..., str]
    """`min` or `max`."""


CONTESTS = (
    Contest("TTFT mean", lambda run: run.figures.ttft_mean, min),
    Contest("TTFT p99", lambda run: run.figures.ttft_p99, min),
    Contest("cached share", lambda run: run.figures.cached_share, max),
)


def read_runs(file: Path) -> list[Run]:
    return [msgspec.json.decode(line, type=Run) for line in file.read_bytes().splitlines() if line.strip()]


def write_report(runs: Sequence[Run], ours: str = OURS) -> str:
    """Tables of all regimes; `ours` is the router that is compared with the best of the others."""
    parts = [heading(runs[-1])]
    for regime in dict.fromkeys(run.regime for run in runs):
        here = [run for run in runs if run.regime == regime]
        parts += [describe(regime, here), figures_table(here), contest_table(here, ours)]
    return "\n\n".join([*(part for part in parts if part), *doubts(runs)]) + "\n"


def heading(run: Run) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    fleet = f"{len(run.replica_requests)} replicas, each with a KV cache of {run.cache_tokens:,} tokens"
    return f"{run.started_at}, {run.machine}. {versions}. {fleet}."


def describe(regime: str, runs: Sequence[Run]) -> str:
    workload, caches = runs[0].workload, len(runs[0].replica_requests) * runs[0].cache_tokens
    return (
        f"**{regime}**: {workload.users} users in {workload.groups} groups, {workload.requests} requests a run, "
        f"working set {workload.working_set_tokens / caches:.1f} of all caches"
    )


def by_router(runs: Sequence[Run]) -> dict[str, list[Run]]:
    routers = dict.fromkeys(run.router for run in runs)
    return {router: [run for run in runs if run.router == router] for router in routers}


def figures_table(runs: Sequence[Run]) -> str:
    rows = []
    for router, own in by_router(runs).items():
        rows.append([router, *(cell(own, column) for column in COLUMNS), str(len(own))])
    return table(["router", *(column.title for column in COLUMNS), "repeats"], rows)


def cell(runs: Sequence[Run], column: Column) -> str:
    values = known(column.value(run) for run in runs)
    if not values:
        return ABSENT
    text = number(fmean(values), column.digits)
    if column.spread and len(values) > 1:
        text += f" ({number(min(values), column.digits)}–{number(max(values), column.digits)})"
    return text


def known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def contest_table(runs: Sequence[Run], ours: str) -> str:
    rows = [row for contest in CONTESTS if (row := contest_row(runs, ours, contest))]
    return table([f"{ours} by the best of the others", "best", "mean over repeats", "lowest", "highest"], rows)


def contest_row(runs: Sequence[Run], ours: str, contest: Contest) -> list[str]:
    """Empty when there is nothing to compare. The best is the one with the best mean, the same in all repeats."""
    means = {
        router: fmean(values)
        for router, own in by_router(runs).items()
        if (values := known(contest.value(run) for run in own))
    }
    if ours not in means or len(means) < 2:
        return []
    best = contest.best((router for router in means if router != ours), key=means.__getitem__)
    ratios = list(ratios_by_repeat(runs, ours, best, contest))
    if not ratios:
        return []
    return [contest.text, best, number(fmean(ratios), 2), number(min(ratios), 2), number(max(ratios), 2)]


def ratios_by_repeat(runs: Sequence[Run], ours: str, other: str, contest: Contest) -> Iterable[float]:
    theirs = {run.repeat: contest.value(run) for run in runs if run.router == other}
    for run in runs:
        mine, its = contest.value(run), theirs.get(run.repeat)
        if run.router == ours and mine is not None and its:
            yield mine / its


def doubts(runs: Sequence[Run]) -> Iterator[str]:
    """What makes the figures worth less than they look."""
    for run in runs:
        figures = run.figures
        if figures.failed or figures.unsent:
            yield (
                f"**INCOMPLETE** {run.router}, {run.regime}, repeat {run.repeat}: {figures.unsent} unsent, "
                f"{figures.failed} failed {figures.first_failure}"
            )
    loud = [run for run in runs if run.foreign_cores > NOISE_CORES]
    if loud:
        worst = max(loud, key=lambda run: run.foreign_cores)
        yield (
            f"**NOISY**: in {len(loud)} of {len(runs)} runs other processes used more than {NOISE_CORES:g} cores "
            f"(worst {worst.foreign_cores:.2f}: {worst.router}, {worst.regime}, repeat {worst.repeat})."
        )


if __name__ == "__main__":
    print(write_report(read_runs(Path(sys.argv[1]))))
