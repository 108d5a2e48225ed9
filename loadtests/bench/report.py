"""Tables of a run: every figure as the median over rounds, ratios to the peers, and a verdict for each target.

python -m loadtests.bench.report .bench/results/RUN.jsonl
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import msgspec

from loadtests.bench.gateways import DIRECT, WARMLANE

NOISE_CORES = 0.1
"""Other processes that use more of the machine than this make the figures of a phase doubtful."""
ABSENT = "–"
SIZES = ("1k", "32k", "256k")


class RunHeader(msgspec.Struct, frozen=True, tag="run"):
    """First line of a results file."""

    started_at: str
    machine: str
    versions: dict[str, str]
    plan: dict[str, float]


class Record(msgspec.Struct, frozen=True, tag="record"):
    """One phase of one gateway in one round."""

    round: int
    gateway: str
    phase: str
    figures: dict[str, float] = {}
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class Figure:
    phase: str
    name: str
    added: bool = False
    """Less the same figure of `direct` in the same round."""


@dataclass(frozen=True, slots=True)
class Results:
    header: RunHeader
    records: list[Record] = field(default_factory=list)

    def gateways(self) -> list[str]:
        """In the order of the first round."""
        return list(dict.fromkeys(record.gateway for record in self.records))

    def value(self, gateway: str, figure: Figure) -> float | None:
        """Median over the rounds in which it was taken."""
        values = self.by_round(gateway, figure)
        if figure.added:
            direct = self.by_round(DIRECT, figure)
            values = {at: values[at] - direct[at] for at in values.keys() & direct.keys()}
        return median(values.values()) if values else None

    def by_round(self, gateway: str, figure: Figure) -> dict[int, float]:
        return {
            record.round: record.figures[figure.name]
            for record in self.records
            if record.gateway == gateway and record.phase == figure.phase and figure.name in record.figures
        }

    def loud(self) -> list[Record]:
        """Phases during which the machine was not quiet."""
        return [record for record in self.records if record.figures.get("foreign_cores", 0.0) > NOISE_CORES]

    def failures(self) -> list[Record]:
        return [record for record in self.records if record.failure]


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    figures: tuple[Figure, ...]
    digits: int = 0


COLUMNS = (
    Column("requests/s 1/32/256 KB", tuple(Figure(f"saturation-{size}", "requests_per_second") for size in SIZES)),
    Column("CPU µs/request 1/32/256 KB", tuple(Figure(f"saturation-{size}", "cpu_us") for size in SIZES)),
    Column("CPU µs/event", (Figure("stream", "cpu_us"),), 1),
    Column(
        "added ms p50/p99, 32 KB",
        (Figure("latency-32k", "latency_p50_ms", added=True), Figure("latency-32k", "latency_p99_ms", added=True)),
        2,
    ),
    Column("event delay p99 ms", (Figure("stream", "event_delay_p99_ms"),), 2),
    Column("added first event p50 ms", (Figure("stream", "first_event_p50_ms", added=True),), 2),
)
MEMORY_COLUMNS = (
    Column("distinct prompts", (Figure("memory", "prompts"),)),
    Column("RSS MiB idle/half/end", tuple(Figure("memory", f"{when}_mib") for when in ("idle", "half", "end")), 1),
    Column("cap of the index, MiB", (Figure("memory", "cap_mib"),)),
    Column("(end - idle) / cap", (Figure("memory", "growth_of_cap"),), 2),
    Column("(end - half) / cap", (Figure("memory", "late_growth_of_cap"),), 3),
)


@dataclass(frozen=True, slots=True)
class Target:
    text: str
    figure: Figure
    limit: float
    peer: str | None = None
    """The figure is divided by this gateway's."""
    stretch: float | None = None
    binding: bool = True


def cpu_targets() -> Iterator[Target]:
    for peer, limit, binding in (("vllm-router", 0.4, True), ("sglang-router", 0.6, True), ("nginx", 2.5, False)):
        for size in SIZES:
            text = f"CPU per request at {size[:-1]} KB, of {peer}'s"
            yield Target(text, Figure(f"saturation-{size}", "cpu_us"), limit, peer, binding=binding)


TARGETS = (
    *cpu_targets(),
    Target("CPU per paced event, of sglang-router's", Figure("stream", "cpu_us"), 1.0, "sglang-router", stretch=0.8),
    Target("added latency p50 at 32 KB, ms", Figure("latency-32k", "latency_p50_ms", added=True), 0.8),
    Target("added latency p99 at 32 KB, ms", Figure("latency-32k", "latency_p99_ms", added=True), 2.0),
    Target("event delay p99, 512 paced streams, ms", Figure("stream", "event_delay_p99_ms"), 5.0),
    Target("added time to first event p50, ms", Figure("stream", "first_event_p50_ms", added=True), 2.0),
    Target("memory growth, of the index's cap", Figure("memory", "growth_of_cap"), 1.1),
    Target("memory growth in the second half, of the cap", Figure("memory", "late_growth_of_cap"), 0.05),
)


def read_results(file: Path) -> Results:
    decoder = msgspec.json.Decoder(RunHeader | Record)
    lines = [decoder.decode(line) for line in file.read_bytes().splitlines()]
    headers = [line for line in lines if isinstance(line, RunHeader)]
    return Results(headers[-1], [line for line in lines if isinstance(line, Record)])


def write_report(results: Results) -> str:
    parts = [
        f"{results.header.started_at}, {results.header.machine}. {versions(results)}",
        figures_table(results, COLUMNS),
        figures_table(results, MEMORY_COLUMNS),
        ratios_table(results),
        targets_table(results),
        *noise(results),
        *(f"**FAILED** {one.gateway}, {one.phase}, round {one.round}: {one.failure}" for one in results.failures()),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def versions(results: Results) -> str:
    return "Versions: " + ", ".join(f"{name} {version}" for name, version in results.header.versions.items()) + "."


def figures_table(results: Results, columns: Sequence[Column]) -> str:
    rows = []
    for gateway in results.gateways():
        cells = [cell(results, gateway, column) for column in columns]
        if any(set(text) - set(f"{ABSENT}/ ") for text in cells):
            rows.append([gateway, *cells])
    return table(["gateway", *(column.title for column in columns)], rows)


def cell(results: Results, gateway: str, column: Column) -> str:
    return " / ".join(number(results.value(gateway, figure), column.digits) for figure in column.figures)


def ratios_table(results: Results) -> str:
    """Warmlane's CPU time as a share of each other gateway's."""
    figures = [*(Figure(f"saturation-{size}", "cpu_us") for size in SIZES), Figure("stream", "cpu_us")]
    rows = []
    for peer in results.gateways():
        if peer in (DIRECT, WARMLANE):
            continue
        ratios = [ratio(results, figure, peer) for figure in figures]
        if any(value is not None for value in ratios):
            rows.append([peer, *(number(value, 2) for value in ratios)])
    return table([f"{WARMLANE}'s CPU as a share of", "request 1 KB", "32 KB", "256 KB", "event"], rows)


def ratio(results: Results, figure: Figure, peer: str) -> float | None:
    ours, theirs = results.value(WARMLANE, figure), results.value(peer, figure)
    return None if ours is None or not theirs else ours / theirs


def targets_table(results: Results) -> str:
    rows = []
    loud = {record.phase for record in results.loud()}
    for target in TARGETS:
        measured = ratio(results, target.figure, target.peer) if target.peer else results.value(WARMLANE, target.figure)
        goal = f"≤ {target.limit:g}" + (f" (stretch ≤ {target.stretch:g})" if target.stretch is not None else "")
        goal = goal if target.binding else f"stretch {goal}"
        doubt = " (noisy)" if measured is not None and target.figure.phase in loud else ""
        rows.append([target.text, goal, number(measured, 2), verdict(target, measured) + doubt])
    return table(["target", "goal", "measured", "verdict"], rows) if WARMLANE in results.gateways() else ""


def verdict(target: Target, measured: float | None) -> str:
    if measured is None:
        return "not measured"
    if measured > target.limit:
        return "MISSED" if target.binding else "stretch missed"
    if target.stretch is not None:
        return "met, stretch too" if measured <= target.stretch else "met, stretch missed"
    return "met"


def noise(results: Results) -> Iterator[str]:
    loud = results.loud()
    if loud:
        worst = max(loud, key=lambda record: record.figures["foreign_cores"])
        yield (
            f"**NOISY**: in {len(loud)} of {len(results.records)} phases other processes used more than "
            f"{NOISE_CORES:g} cores (worst {worst.figures['foreign_cores']:.2f}: {worst.gateway}, {worst.phase}, "
            f"round {worst.round}). Repeat on a quiet machine."
        )


def number(value: float | None, digits: int) -> str:
    return ABSENT if value is None else f"{value:,.{digits}f}"


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    print(write_report(read_results(Path(sys.argv[1]))))
