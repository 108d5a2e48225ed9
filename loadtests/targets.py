"""Is the default policy as good as it should be? `python -m loadtests.targets` measures every row of the table.

One line for each target: what was reached (mean of the seeds, and their spread), whether that meets it with 2 % of
tolerance, who of the others did best by the same figure, and what no policy can beat. The exit status is 0 whatever
comes out, unless something could not be run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path

from loadtests.target_rows import ROWS, Promise, Row
from loadtests.traces import TraceError
from loadtests.trials import Bench, Measured

TOLERANCE = 0.02
DEFAULT_TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One promise of one row, over all seeds."""

    row: Row
    promise: Promise
    seeds: tuple[float, ...]
    best_other: tuple[str, float] | None
    """Mean of the seeds."""
    bound: float | None

    @property
    def reached(self) -> float:
        return mean(self.seeds)

    @property
    def is_met(self) -> bool:
        return keeps(self.promise, self.reached, self.promise.limit)

    @property
    def is_stretch_met(self) -> bool:
        stretch = self.promise.stretch
        return stretch is not None and keeps(self.promise, self.reached, stretch)

    @property
    def word(self) -> str:
        if not self.promise.counts:
            return "yes" if self.is_met else "no"
        return "stretch" if self.is_stretch_met else "met" if self.is_met else "MISSED"


def keeps(promise: Promise, value: float, limit: float) -> bool:
    return value >= limit * (1 - TOLERANCE) if promise.at_least else value <= limit * (1 + TOLERANCE)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def verdicts(row: Row, seeds: Sequence[Measured]) -> list[Verdict]:
    found = []
    for promise in row.promises:
        figure = promise.figure
        bounds = [one.bound[figure] for one in seeds if figure in one.bound]
        names = [name for name, figures in seeds[0].others.items() if figure in figures]
        others = [(name, mean([one.others[name][figure] for one in seeds])) for name in names]
        best = (max if promise.at_least else min)(others, key=lambda pair: pair[1]) if others else None
        reached = tuple(one.own[figure] for one in seeds)
        found.append(Verdict(row, promise, reached, best, mean(bounds) if bounds else None))
    return found


def measure(name: str, bench: Bench, seed: int) -> Measured:
    """In a process of its own: rows are found by their name."""
    row = next(row for row in ROWS if row.name == name)
    return row.measure(bench, seed)


# ---- what is printed -----------------------------------------------------------------------------------------------


def digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def limit_of(promise: Promise) -> str:
    sign = ">=" if promise.at_least else "<="
    stretch = "" if promise.stretch is None else f" ({digits(promise.stretch)})"
    return f"{sign} {digits(promise.limit)}{stretch}"


def line_of(verdict: Verdict) -> str:
    reached, low, high = digits(verdict.reached), digits(min(verdict.seeds)), digits(max(verdict.seeds))
    spread = "" if len(verdict.seeds) == 1 else f" [{low}, {high}]"
    best = "" if verdict.best_other is None else f"   {verdict.best_other[0]}: {digits(verdict.best_other[1])}"
    bound = "" if verdict.bound is None else f"   bound: {digits(verdict.bound)}"
    figure = verdict.promise.figure
    return f"  {figure:<20}{limit_of(verdict.promise):<16}{reached + spread:<24}{verdict.word:<8}{best}{bound}"


def text_of(found: Sequence[Verdict]) -> str:
    """One row of the table."""
    row = found[0].row
    either = " (either is enough)" if row.any_is_enough else ""
    return "\n".join([f"{row.name}: {row.workload}; load {row.load}{either}", *map(line_of, found)])


def is_kept(found: Sequence[Verdict]) -> bool:
    kept = [verdict.is_met for verdict in found if verdict.promise.counts]
    return any(kept) if found[0].row.any_is_enough else all(kept)


def summary(found: Sequence[Verdict]) -> str:
    by_row = [list(group) for _, group in groupby(found, key=lambda verdict: verdict.row.name)]
    missed = [group[0].row.name for group in by_row if not is_kept(group)]
    names = f"; missed: {', '.join(missed)}" if missed else ""
    return f"{len(by_row) - len(missed)} of {len(by_row)} rows met{names}"


def as_json(found: Sequence[Verdict]) -> str:
    rows = [
        {
            "row": verdict.row.name,
            "workload": verdict.row.workload,
            "load": verdict.row.load,
            "figure": verdict.promise.figure,
            "at_least": verdict.promise.at_least,
            "target": verdict.promise.limit,
            "stretch": verdict.promise.stretch,
            "reached": verdict.reached,
            "seeds": verdict.seeds,
            "verdict": verdict.word.lower(),
            "best_other": None
            if verdict.best_other is None
            else {"name": verdict.best_other[0], "value": verdict.best_other[1]},
            "bound": verdict.bound,
        }
        for verdict in found
    ]
    return json.dumps({"rows": rows, "tolerance": TOLERANCE}, indent=2)


# ---- the command ---------------------------------------------------------------------------------------------------


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtests.targets", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rows", nargs="+", metavar="NAME", help="rows whose names begin so; all by default")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each row (5)")
    parser.add_argument("--traces", type=Path, default=DEFAULT_TRACES, help="directory of the recorded traces")
    parser.add_argument("--requests", type=int, help="only the first so many of each trace: a rehearsal")
    parser.add_argument("--alone", action="store_true", help="without the others and the bound where that is possible")
    parser.add_argument("--processes", type=int, choices=(1, 2), default=1, help="at once (1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--list", action="store_true", help="name the rows and stop")
    return parser


def rows_named(beginnings: Sequence[str] | None) -> list[Row]:
    return [row for row in ROWS if beginnings is None or row.name.startswith(tuple(beginnings))]


def without_missing(rows: Sequence[Row], directory: Path) -> tuple[list[Row], list[str]]:
    """Rows whose traces are there, and one line for each trace that is not."""
    paths = dict.fromkeys(needed.path for row in rows for needed in row.needs)
    missing = [path for path in paths if not (directory / path).is_file()]
    left = [row for row in rows if not any(needed.path in missing for needed in row.needs)]
    lines = []
    for path in missing:
        count = sum(any(needed.path == path for needed in row.needs) for row in rows)
        lines.append(f"{count} rows need {path}, which is not in {directory} (--traces)")
    return left, lines


def main(arguments: Sequence[str] | None = None) -> int:
    given = options().parse_args(arguments)
    rows = rows_named(given.rows)
    if given.list or not rows:
        print("\n".join(f"{row.name:<34}{row.workload}; load {row.load}" for row in rows or ROWS))
        return 0 if given.list else 2
    rows, missing = without_missing(rows, given.traces)
    for line in missing:
        print(line, file=sys.stderr)
    bench = Bench(given.traces, given.requests, not given.alone)
    found: list[Verdict] = []
    with ProcessPoolExecutor(given.processes, get_context("spawn")) as pool:
        waiting = [(row, [pool.submit(measure, row.name, bench, seed) for seed in range(given.seeds)]) for row in rows]
        for row, seeds in waiting:
            try:
                verdict = verdicts(row, [one.result() for one in seeds])
            except TraceError as error:
                print(f"{row.name}: {error}", file=sys.stderr)
                return 2
            found += verdict
            print(text_of(verdict), flush=True)
    print(summary(found))
    if given.json is not None:
        given.json.write_text(as_json(found) + "\n")
    return 2 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
