"""The figures of the thirty fault tests as one table: `python -m tests.chaos.report` writes `RESULTS.md` beside it."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
FIGURES = HERE.parents[1] / ".bench" / "chaos" / "figures.jsonl"
RESULTS = HERE / "RESULTS.md"

TESTS: dict[int, str] = {
    1: "One of three replicas killed",
    2: "Streams on the killed replica",
    3: "One replica frozen",
    4: "Return of a replica",
    5: "All down; health in doubt",
    6: "Brown-out",
    7: "Retry storm",
    8: "Flapping",
    9: "Disconnects",
    10: "Keep-alive race",
    11: "Change of address",
    12: "Drain",
    13: "Redis absent, killed, frozen, slow",
    14: "Two gateways, one hot prefix",
    15: "Request identity",
    16: "Stream identity",
    17: "Header contract",
    18: "Framing corpus",
    19: "Client matrix",
    20: "Sizes",
    21: "Slow readers",
    22: "Slow senders",
    23: "Idle connections",
    24: "Overload",
    25: "Many streams",
    26: "A million prefixes",
    27: "Soak",
    28: "Metrics",
    29: "Security sweep",
    30: "Time limits",
}

REASONS: dict[int, str] = {}
"""Why a test has no figure, or one that misses its target."""

PREAMBLE = """\
# Fault tests: figures

Written by `make chaos` (`python -m tests.chaos.report`): do not edit. The reference rig is one gateway process, three
scripted replicas and an open-loop load of 200 requests/s, half of them streams of 60 tokens at 20 ms, on one machine
(two cores, shared by load, gateway and replicas), unless a row says otherwise. Of several runs of a test the last
counts, so rows may be of different days. Rows marked (short) come from the short form (`CHAOS_SHORT=1`).

| # | test | measured | target | |
|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Figure:
    number: int
    title: str
    measured: str
    target: str
    met: bool
    short: bool = False


def read(path: Path) -> dict[int, list[Figure]]:
    """By number, in order of their titles' first appearance; of several with one title the last counts."""
    latest: dict[tuple[int, str], Figure] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        figure = Figure(**json.loads(line))
        latest[figure.number, figure.title] = figure
    found: dict[int, list[Figure]] = defaultdict(list)
    for figure in latest.values():
        found[figure.number].append(figure)
    return found


def table(figures: dict[int, list[Figure]]) -> str:
    rows = []
    for number, name in TESTS.items():
        if not figures.get(number):
            rows.append(f"| {number} | {name} | not run | | |")
        for one in figures.get(number, ()):
            title = f"{name}: {one.title}" if one.title != name else name
            verdict = "met" if one.met else "**not met**"
            measured = f"{one.measured} (short)" if one.short else one.measured
            rows.append(f"| {number} | {cell(title)} | {cell(measured)} | {cell(one.target)} | {verdict} |")
    reasons = [f"- {number}: {reason}" for number, reason in REASONS.items() if needs_reason(figures.get(number, []))]
    tail = ["", "## Why not", "", *reasons] if reasons else []
    return PREAMBLE + "\n".join([*rows, *tail]) + "\n"


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def needs_reason(figures: list[Figure]) -> bool:
    return not figures or any(not one.met for one in figures)


def main() -> None:
    figures = read(FIGURES)
    RESULTS.write_text(table(figures), encoding="utf-8")
    met = sum(all(one.met for one in found) for found in figures.values())
    print(f"{RESULTS}: {len(figures)} of {len(TESTS)} tests have figures, {met} meet all their targets")


if __name__ == "__main__":
    main()
