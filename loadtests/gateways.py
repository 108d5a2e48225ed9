"""Several gateways against one, in simulation: `python -m loadtests.gateways` measures each target and prints a table.

What real processes with a real Redis do, `python -m tests.chaos.several_gateways` measures.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from loadtests.fleet import GatewayRestart, Sharing
from loadtests.target_rows import BUSY, CHATS, HOT
from loadtests.targets import DEFAULT_TRACES, mean
from loadtests.trials import Bench, Figures, Trial
from loadtests.virtual_gateway import Trip

GATEWAYS = 4
MOST_POINTS = 2.0
MOST_TTFT = 1.1
MOST_RESTART_POINTS = 1.0
RESTART_REQUESTS = 600
MOST_IMBALANCE, MOST_IMBALANCE_CUT_OFF = 1.5, 2.0
TRIALS = {"conversation, load 0.8": BUSY, "agents, as recorded": CHATS}
WAYS: dict[str, Sharing | None] = {
    "shared": Sharing(),
    "shared, 0.5 s late": Sharing(delay_seconds=0.5),
    "shared, 2 s late": Sharing(delay_seconds=2.0),
    "shared, a tenth lost": Sharing(loss=0.1),
    "cut off": Sharing(loss=1.0),
    "not shared": None,
}
PROMISED = "shared"
"""The others say what is lost where something is wrong."""


@dataclass(frozen=True)
class Line:
    """One figure beside its target; no target where it only explains."""

    what: str
    measured: str
    target: str = ""
    met: bool | None = None


def table(lines: Sequence[Line]) -> str:
    words = {True: "met", False: "**missed**", None: ""}
    rows = [f"| {line.what} | {line.measured} | {line.target} | {words[line.met]} |" for line in lines]
    return "\n".join(["| what | measured | target | |", "|---|---|---|---|", *rows])


def against_one(bench: Bench, name: str, trial: Trial, seeds: int) -> Iterator[Line]:
    """Hit rate and time to first token, several gateways by one."""

    def measure(changed: Trial) -> Figures:
        runs = [bench.run(changed, seed) for seed in range(seeds)]
        return {figure: mean([run[figure] for run in runs]) for figure in ("hit_pct", "ttft_p90_s")}

    one = measure(trial)
    for way, sharing in WAYS.items():
        several = measure(trial.changed(gateways=GATEWAYS, sharing=sharing))
        points, ratio = several["hit_pct"] - one["hit_pct"], several["ttft_p90_s"] / one["ttft_p90_s"]
        what, measured = f"{name}: {way}", f"hits {points:+.1f} points, TTFT p90 {ratio:.2f}x"
        if way == PROMISED:
            met = points >= -MOST_POINTS and ratio <= MOST_TTFT
            yield Line(what, measured, f">= -{MOST_POINTS:g} points, <= {MOST_TTFT}x", met)
        else:
            yield Line(what, measured)


def hits_after(trips: Sequence[Trip], first: int) -> float:
    """Per cent of the input tokens of the next requests."""
    after = trips[first : first + RESTART_REQUESTS]
    return 100.0 * sum(trip.cached_tokens for trip in after) / sum(trip.request.input_tokens for trip in after)


def restart(bench: Bench, name: str, trial: Trial, seeds: int) -> Line:
    lost = []
    for seed in range(seeds):
        calm = trial.changed(gateways=GATEWAYS, sharing=Sharing())
        trips = bench.trips(calm, seed)
        first = len(trips) // 2
        at = trips[first].arrived_at
        restarted = bench.trips(calm.changed(gateway_restarts=(GatewayRestart(0, at - 2.0),)), seed)
        lost.append(hits_after(trips, first) - hits_after(restarted, first))
    measured = f"{mean(lost):.2f} points [{min(lost):.2f}, {max(lost):.2f}]"
    what = f"{name}: hits lost in {RESTART_REQUESTS} requests after one of {GATEWAYS} restarted"
    return Line(what, measured, f"< {MOST_RESTART_POINTS:g} point", mean(lost) < MOST_RESTART_POINTS)


def hot_prefix(bench: Bench, cut_off: bool, seeds: int) -> Line:
    trial = HOT.changed(gateways=2, sharing=Sharing(loss=1.0 if cut_off else 0.0))
    found = mean([bench.run(trial, seed)["request_imbalance"] for seed in range(seeds)])
    most = MOST_IMBALANCE_CUT_OFF if cut_off else MOST_IMBALANCE
    what = f"one hot prefix, two gateways{', cut off' if cut_off else ''}: busiest replica by the mean"
    return Line(what, f"{found:.2f}", f"<= {most:g}", found <= most)


def measured(bench: Bench, seeds: int) -> Iterator[Line]:
    for name, trial in TRIALS.items():
        yield from against_one(bench, name, trial, seeds)
        yield restart(bench, name, trial, seeds)
    for cut_off in (False, True):
        yield hot_prefix(bench, cut_off, seeds)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtests.gateways", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=2, help="runs of each (2)")
    parser.add_argument("--traces", type=Path, default=DEFAULT_TRACES, help="directory of the recorded traces")
    parser.add_argument("--requests", type=int, help="only the first so many of each trace: a rehearsal")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add a line for each figure there")
    given = parser.parse_args(arguments)
    lines = []
    for line in measured(Bench(given.traces, given.requests, False), given.seeds):
        lines.append(line)
        print(f"{line.what}: {line.measured}", file=sys.stderr, flush=True)
        if given.json is not None:
            with given.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"by": "simulator", **asdict(line)}) + "\n")
    print(table(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
