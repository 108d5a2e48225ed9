"""One workload on one fleet, simulated under some policy: figures to hold against a target.

Nobody is shed in a trial, so that all policies serve the same requests. The default policy is compared with others as
they come, with itself without late binding, and with simple ones that hold requests in the gateway as it does: much of
what that gains is order, not knowledge of caches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Protocol

from gateway.core.router import Router
from gateway.core.settings import RoutingSettings
from loadtests import report, traces
from loadtests.fleet import Fleet
from loadtests.report import Plan, Yardstick
from loadtests.simulator import Simulator
from loadtests.traces import BLOCK_TOKENS, Source, Trace
from loadtests.virtual_gateway import Trip

Figures = dict[str, float]
"""By name: those of a row of the report, and some of its own."""

OWN = "cache-cost"
NOT_HOLDING = "cache-cost, not holding"
SIMPLE = ("least-work", "least-requests", "session-hash")
HOLDING = ", holding"
"""Added to the name of a simple policy."""
LATE_SECONDS = 600.0
"""From here on hits count as `late_hit_pct`: what was wrong at the start had time to be found out."""


class Workload(Protocol):
    """Where a trace comes from."""

    def trace(self, seed: int) -> Trace: ...
    def __hash__(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Trial:
    workload: Workload
    fleet: Fleet
    load: float | None = None
    """`None`: as fast as the workload itself."""
    speed: float = 1.0
    """Times that."""

    def changed(self, **fleet: object) -> Trial:
        return replace(self, fleet=replace(self.fleet, **fleet))  # type: ignore[arg-type]

    @property
    def plan(self) -> Plan:
        return Plan(fleet=self.fleet, load=self.load, speed=self.speed, sheds=False)


@dataclass(frozen=True, slots=True)
class Measured:
    """One seed of one row."""

    own: Figures
    others: dict[str, Figures] = field(default_factory=dict)
    bound: Figures = field(default_factory=dict)
    """Least work on one endless cache."""

    def best_other(self, figure: str, at_least: bool) -> tuple[str, float] | None:
        """Who did best by that figure."""
        known = [(name, figures[figure]) for name, figures in self.others.items() if figure in figures]
        if not known:
            return None
        return (max if at_least else min)(known, key=lambda pair: pair[1])


MakeRouter = Callable[[RoutingSettings, int], Router]


@dataclass(frozen=True, slots=True)
class Bench:
    """Where the files are, and how much is run."""

    directory: Path
    limit: int | None = None
    """So many requests of each trace."""
    with_others: bool = True
    """Also run what the default policy is compared with, where the target itself does not need it."""

    # ---- one run ---------------------------------------------------------------------------------------------------

    def exact(self, trial: Trial, seed: int) -> Trace:
        """The trace at its own speed."""
        workload = trial.workload
        if isinstance(workload, Recorded):
            workload = replace(workload, path=str(self.directory / workload.path))
        return exact_trace(workload, self.limit, seed)

    def trips(
        self, trial: Trial, seed: int, policy: str = OWN, hold: bool | None = None, make_router: MakeRouter = Router
    ) -> list[Trip]:
        settings = replace(trial.plan.routing(policy), hold=hold)
        requests = trial.plan.timed(self.exact(trial, seed)).requests
        return Simulator(requests, trial.fleet, settings, seed, make_router=make_router).run()

    def run(
        self, trial: Trial, seed: int, policy: str = OWN, hold: bool | None = None, make_router: MakeRouter = Router
    ) -> Figures:
        trips = self.trips(trial, seed, policy, hold, make_router)
        return figures_of(trips, trial, yardstick_of(self, trial, seed))

    def bound(self, trial: Trial, seed: int) -> Figures:
        timed = trial.plan.timed(self.exact(trial, seed))
        row = report.bound_of(timed, trial.plan, yardstick_of(self, trial, seed), seed, lambda arrived: None)
        return numbers_of(row)

    # ---- what a row of the table measures --------------------------------------------------------------------------

    def measure(self, trial: Trial, seed: int) -> Measured:
        """The default policy as it is, beside the others and the bound."""
        own = self.run(trial, seed)
        if not self.with_others:
            return Measured(own)
        return Measured(own, self.others(trial, seed), self.bound(trial, seed))

    def others(self, trial: Trial, seed: int) -> dict[str, Figures]:
        found = self.simple(trial, seed)
        return {
            **found,
            f"least-work{HOLDING}": self.run(trial, seed, "least-work", hold=True),
            NOT_HOLDING: self.run(trial, seed, hold=False),
        }

    def simple(self, trial: Trial, seed: int) -> dict[str, Figures]:
        return {policy: self.run(trial, seed, policy) for policy in SIMPLE}

    def relative(self, trial: Trial, to: Mapping[str, Trial], figure: str, seed: int) -> Measured:
        """`ratio`: the figure, by its best under the same policy in other circumstances."""
        own, others = self.run(trial, seed), {name: self.run(other, seed) for name, other in to.items()}
        return as_ratio(own, others, figure)

    def against_simple(self, trial: Trial, seed: int) -> Measured:
        """`ratio`: mean time to first token by that of the best simple policy; `same_order`: of the best that holds
        requests too."""
        found = as_ratio(self.run(trial, seed), self.simple(trial, seed), "ttft_mean_s")
        holding = {policy + HOLDING: self.run(trial, seed, policy, hold=True) for policy in SIMPLE}
        as_ratio(found.own, holding, "ttft_mean_s", "same_order")
        return replace(found, others={**found.others, **holding})


@dataclass(frozen=True, slots=True)
class Recorded:
    """A file in the directory of traces."""

    path: str

    def trace(self, seed: int) -> Trace:
        return opened(Path(self.path))(seed)


@cache
def opened(path: Path) -> Source:
    return traces.open_trace(path)


@lru_cache(maxsize=2)
def exact_trace(workload: Workload, limit: int | None, seed: int) -> Trace:
    """All runs of a row and seed ask for it."""
    return traces.spread(workload.trace(seed).first(limit), seed)


@lru_cache(maxsize=2)
def yardstick_of(bench: Bench, trial: Trial, seed: int) -> Yardstick:
    """The same for all policies."""
    return Yardstick.of(bench.exact(trial, seed), trial.fleet)


# ---- figures -------------------------------------------------------------------------------------------------------


def numbers_of(row: report.Row) -> Figures:
    return {name: value for name, value in asdict(row).items() if isinstance(value, float)}


def figures_of(trips: Sequence[Trip], trial: Trial, yardstick: Yardstick) -> Figures:
    row = report.row_of("", trips, trial.fleet, yardstick)
    late = [trip for trip in trips if trip.first_token_at is not None and trip.arrived_at >= LATE_SECONDS]
    late_tokens = sum(trip.request.input_tokens for trip in late)
    return {
        **numbers_of(row),
        "ceiling_share_pct": report.percent(row.hit_pct, row.ceiling_pct),
        "late_hit_pct": report.percent(sum(trip.cached_tokens for trip in late), late_tokens),
        "false_credit_tokens": false_credit_tokens(trips, trial.fleet),
    }


def as_ratio(own: Figures, others: dict[str, Figures], figure: str, name: str = "ratio") -> Measured:
    """Everybody's figure by the best of the others."""
    best = min(figures[figure] for figures in others.values())
    for figures in (own, *others.values()):
        figures[name] = figures[figure] / best if best else 1.0
    return Measured(own, others)


def false_credit_tokens(trips: Sequence[Trip], fleet: Fleet) -> float:
    """Cached tokens predicted for the restarted replica that it was never sent since: 1 s after its return was seen.

    A scrape sees it, at the latest one interval after it is back. What it was sent and pushed out again is another
    matter: that happens without a restart too.
    """
    restart = fleet.restart
    if restart is None:
        return 0.0
    known_at = restart.back_at + (fleet.scrape_seconds or fleet.probe_seconds) + 1.0
    there = [t for t in trips if t.place == restart.replica and t.sent_at is not None and t.sent_at >= restart.back_at]
    sent: set[int] = set()
    false_blocks = 0
    for trip in sorted(there, key=lambda trip: trip.sent_at or 0.0):
        blocks = trip.request.blocks
        if trip.sent_at is not None and trip.sent_at >= known_at:
            predicted = blocks[: int(trip.predicted_tokens / BLOCK_TOKENS)]
            false_blocks += sum(block not in sent for block in predicted)
        sent.update(blocks)
    return float(false_blocks * BLOCK_TOKENS)
