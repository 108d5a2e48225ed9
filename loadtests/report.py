"""A trace under several policies side by side, beside what no policy can beat.

Two yardsticks. The *ceiling* is the hit rate of one LRU cache as large as all replicas' together: what a fleet could
hold if nothing were stored twice. The *bound* serves the trace from one endless cache shared by all replicas, each
request going where the least work waits: a time to first token that no cache of any size improves.

What a policy missed is split by cause, in per cent of the input tokens; hits and these four make 100:

lost_new         seen for the first time: no cache of any size has it
lost_spilled     another replica was believed to have it, but the policy chose otherwise
lost_belief      the router believed it there, and it was not
lost_evicted     nobody was believed to have it (any more)

Several seeds are averaged figure by figure. Waiting in the gateway counts in every time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from math import ceil

import msgspec

from gateway.core.settings import POLICY_NAMES, RoutingSettings
from loadtests import traces
from loadtests.simulator import Fleet, Simulator, Trip
from loadtests.traces import Source, Trace

BOUND = "bound"
BOUND_POLICY = "least-work"
ENDLESS_TOKENS = 1_000_000_000
"""KV cache of a replica in the bound: never full."""
NEVER = 1_000_000_000
"""More requests, or seconds, than any trace has."""

Progress = Callable[[str, int, int], None]
"""What is running, of how many requests, and how many of them have arrived; a last call when the run is over."""


@dataclass(frozen=True, slots=True)
class Row:
    """One policy at one load. Seconds; per cent of input tokens (hits, losses) or of requests (shed, failed)."""

    policy: str
    load: float
    """Offered input tokens by what the fleet can prefill; in a closed loop a result of the policy."""
    hit_pct: float
    ceiling_pct: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    request_imbalance: float
    """Requests of the busiest replica by the mean."""
    work_imbalance: float
    """The same for seconds of prefill."""
    shed_pct: float
    failed_pct: float
    throughput_rps: float
    """Completed requests by the time from the first arrival to the last end."""
    lost_new_pct: float
    lost_spilled_pct: float
    lost_belief_pct: float
    lost_evicted_pct: float


@dataclass(frozen=True, slots=True)
class Report:
    """One load."""

    rows: tuple[Row, ...]
    bound: Row
    requests: int
    seeds: int
    closed_loop: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """What to replay, and how."""

    fleet: Fleet
    load: float | None = 1.0
    """`None`: at the trace's own rate."""
    speed: float = 1.0
    """Times the trace's own rate; with `load` None."""
    policies: tuple[str, ...] = POLICY_NAMES
    seeds: int = 1
    sheds: bool = True
    """Whether the gateway's default limits hold, or everybody waits as long as it takes."""
    hold: bool | None = None
    """Whether requests wait in the gateway until their replica can begin; `None`: the gateway's default."""
    limit: int | None = None
    """So many requests of the trace."""
    closed_loop: bool = False
    """Whether a session's next request waits for the answer before it, or comes as recorded."""

    def timed(self, exact: Trace) -> Trace:
        """The trace as it arrives under this plan."""
        if self.load is None:
            return traces.sped_up(exact, self.speed)
        return traces.sped_up(exact, traces.speed_for_load(exact, self.load, self.fleet.total_prefill_rate))

    def routing(self, policy: str) -> RoutingSettings:
        settings = RoutingSettings(policy=policy)
        if self.hold is not None:
            settings = replace(settings, hold=self.hold)
        if self.sheds:
            return settings
        return replace(settings, max_in_flight=NEVER, max_waiting=NEVER, max_wait_seconds=float(NEVER))

    def name(self, policy: str, seed: int) -> str:
        """Of one run, for people."""
        load = "" if self.load is None else f", load {self.load:g}"
        return f"{policy}{load}{f', seed {seed}' if self.seeds > 1 else ''}"


def replay(trace: Trace | Source, plan: Plan, on_progress: Progress = lambda name, of, done: None) -> Report:
    """Every policy of the plan with every seed."""
    return compare(trace, [plan], on_progress)[0]


def compare(
    trace: Trace | Source, plans: Sequence[Plan], on_progress: Progress = lambda name, of, done: None
) -> list[Report]:
    """A report for each plan; plans for one fleet and as many seeds, that differ in their load."""
    requests = 0
    runs: list[list[list[Row]]] = [[] for _ in plans]  # by plan, seed, row; the bound is the last row
    for seed in range(plans[0].seeds):
        whole = trace(seed) if callable(trace) else trace
        exact = traces.spread(whole.first(plans[0].limit), seed)
        yardstick = Yardstick.of(exact, plans[0].fleet)
        requests = len(exact.requests)
        for plan, rows in zip(plans, runs, strict=True):
            rows.append(rows_of(plan, plan.timed(exact), yardstick, seed, on_progress))
    reports = []
    for rows in runs:
        *means, bound = [mean_of(row) for row in zip(*rows, strict=True)]
        reports.append(Report(tuple(means), bound, requests, plans[0].seeds, plans[0].closed_loop))
    return reports


def rows_of(plan: Plan, timed: Trace, yardstick: Yardstick, seed: int, on_progress: Progress) -> list[Row]:
    """One seed: a row for each policy, and the bound."""
    of = len(timed.requests)
    rows = []
    for policy in plan.policies:
        name = plan.name(policy, seed)
        on_progress(name, of, 0)
        simulator = Simulator(timed.requests, plan.fleet, plan.routing(policy), seed, closed_loop=plan.closed_loop)
        trips = simulator.run(partial(on_progress, name, of))
        on_progress(name, of, of)
        rows.append(row_of(policy, trips, plan.fleet, yardstick))
    on_progress(BOUND, of, 0)
    rows.append(bound_of(timed, plan, yardstick, seed, partial(on_progress, BOUND, of)))
    on_progress(BOUND, of, of)
    return rows


@dataclass(frozen=True, slots=True)
class Yardstick:
    """What the trace itself says, whatever the policy and however fast it comes."""

    input_tokens: tuple[int, ...]
    """Of each request."""
    pooled_pct: float
    """Hits of one LRU of all replicas' size."""
    endless: tuple[int, ...]
    """Cached tokens of each request in a cache without end."""

    @classmethod
    def of(cls, trace: Trace, fleet: Fleet) -> Yardstick:
        pooled = sum(traces.cached_tokens(trace, fleet.replicas * fleet.cache_tokens))
        tokens = tuple(request.input_tokens for request in trace.requests)
        return cls(tokens, percent(pooled, sum(tokens)), tuple(traces.cached_tokens(trace, None)))


def bound_of(trace: Trace, plan: Plan, yardstick: Yardstick, seed: int, on_progress: Callable[[int], None]) -> Row:
    """Least work over replicas that share one endless cache: only what it lacks is left to do."""
    requests = [
        replace(request, input_tokens=request.input_tokens - cached, blocks=())
        for request, cached in zip(trace.requests, yardstick.endless, strict=True)
    ]
    fleet = replace(plan.fleet, cache_tokens=ENDLESS_TOKENS, restart=None, gateways=1)
    routing = replace(plan, sheds=False).routing(BOUND_POLICY)
    trips = Simulator(requests, fleet, routing, seed, closed_loop=plan.closed_loop).run(on_progress)
    row = row_of(BOUND, trips, fleet, yardstick)
    hits = percent(sum(yardstick.endless), trace.input_tokens)
    none = 0.0
    return replace(
        row,
        hit_pct=hits,
        lost_new_pct=100.0 - hits,
        lost_spilled_pct=none,
        lost_belief_pct=none,
        lost_evicted_pct=none,
    )


def row_of(policy: str, trips: Sequence[Trip], fleet: Fleet, yardstick: Yardstick) -> Row:
    done = [trip for trip in trips if trip.ended_at is not None]
    arrivals = [trip.arrived_at for trip in trips]
    arriving = max(arrivals) - min(arrivals) if trips else 0.0
    offered = sum(yardstick.input_tokens) / arriving if arriving else 0.0
    times = sorted([ttft for trip in trips if (ttft := trip.ttft_seconds) is not None])
    requests, work = [0.0] * fleet.replicas, [0.0] * fleet.replicas
    for trip in done:
        requests[trip.place] += 1
        work[trip.place] += (trip.request.input_tokens - trip.cached_tokens) / fleet.speed(trip.place)
    ended_at = max([trip.ended_at for trip in trips if trip.ended_at is not None], default=0.0)
    seconds = ended_at - min(arrivals) if done else 0.0
    hit, new, spilled, belief, evicted = hits_and_losses(trips, yardstick.endless)
    return Row(
        policy=policy,
        load=offered / fleet.total_prefill_rate,
        hit_pct=hit,
        ceiling_pct=yardstick.pooled_pct,
        ttft_mean_s=sum(times) / len(times) if times else 0.0,
        ttft_p50_s=quantile(times, 0.5),
        ttft_p90_s=quantile(times, 0.9),
        ttft_p99_s=quantile(times, 0.99),
        request_imbalance=imbalance(requests),
        work_imbalance=imbalance(work),
        shed_pct=percent(sum(trip.shed for trip in trips), len(trips)),
        failed_pct=percent(sum(trip.failed for trip in trips), len(trips)),
        throughput_rps=len(done) / seconds if seconds else 0.0,
        lost_new_pct=new,
        lost_spilled_pct=spilled,
        lost_belief_pct=belief,
        lost_evicted_pct=evicted,
    )


def hits_and_losses(trips: Sequence[Trip], endless: Sequence[int]) -> tuple[float, ...]:
    """Hits, and losses that are new, spilled, wrong beliefs, evicted; per cent of the served input tokens.

    A cause takes no more than what is left to explain. What an engine finds and an endless cache would not yet have
    (two first prompts in another order) counts as a hit all the same.
    """
    tokens = hit = new = spilled = belief = 0.0
    for trip in trips:
        if trip.first_token_at is None:
            continue
        findable, cached = endless[trip.number], float(trip.cached_tokens)
        left = max(0.0, findable - cached)
        tokens += trip.request.input_tokens
        hit += cached
        new += trip.request.input_tokens - cached - left
        spilled += (missed := min(left, trip.longest_tokens - trip.predicted_tokens))
        belief += min(left - missed, max(0.0, trip.predicted_tokens - cached))
    parts = (hit, new, spilled, belief, tokens - hit - new - spilled - belief)
    return tuple(percent(part, tokens) for part in parts)


def percent(part: float, whole: float) -> float:
    return 100.0 * part / whole if whole else 0.0


def quantile(ordered: Sequence[float], share: float) -> float:
    """Nearest rank."""
    return ordered[max(0, ceil(share * len(ordered)) - 1)] if ordered else 0.0


def imbalance(values: Sequence[float]) -> float:
    """Largest by mean; 1 is even."""
    total = sum(values)
    return max(values) * len(values) / total if total else 1.0


def mean_of(rows: Sequence[Row]) -> Row:
    """One row from those of several seeds."""
    means = {
        field.name: sum(getattr(row, field.name) for row in rows) / len(rows)
        for field in fields(Row)
        if field.name != "policy"
    }
    return Row(policy=rows[0].policy, **means)


# ---- what is printed -----------------------------------------------------------------------------------------------


def as_json(reports: Sequence[Report]) -> str:
    """Figures rounded to what the simulation can mean. `bound` is that of the first load, `bounds` has all."""
    bounds = [rounded_row(report.bound) for report in reports]
    rounded = {
        "rows": [rounded_row(row) for report in reports for row in report.rows],
        "bound": bounds[0],
        "bounds": bounds,
        "requests": reports[0].requests,
        "seeds": reports[0].seeds,
        "closed_loop": reports[0].closed_loop,
    }
    return msgspec.json.format(msgspec.json.encode(rounded), indent=2).decode()


def rounded_row(row: Row) -> dict[str, str | float]:
    return {name: value if isinstance(value, str) else round(value, 4) for name, value in asdict(row).items()}


COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("policy", lambda row: row.policy),
    ("hit %", lambda row: f"{row.hit_pct:.1f}"),
    ("of ceiling", lambda row: f"{percent(row.hit_pct, row.ceiling_pct):.0f} %"),
    ("TTFT mean", lambda row: seconds(row.ttft_mean_s)),
    ("p50", lambda row: seconds(row.ttft_p50_s)),
    ("p90", lambda row: seconds(row.ttft_p90_s)),
    ("p99", lambda row: seconds(row.ttft_p99_s)),
    ("requests/s", lambda row: f"{row.throughput_rps:.1f}"),
    ("imbalance", lambda row: f"{row.request_imbalance:.2f}"),
    ("of work", lambda row: f"{row.work_imbalance:.2f}"),
    ("shed %", lambda row: f"{row.shed_pct:.1f}"),
    ("failed %", lambda row: f"{row.failed_pct:.1f}"),
    ("lost: new", lambda row: f"{row.lost_new_pct:.1f}"),
    ("spilled", lambda row: f"{row.lost_spilled_pct:.1f}"),
    ("belief", lambda row: f"{row.lost_belief_pct:.1f}"),
    ("evicted", lambda row: f"{row.lost_evicted_pct:.1f}"),
)


def seconds(value: float) -> str:
    """Three digits are all that a simulation can mean."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def as_tables(reports: Sequence[Report]) -> str:
    return "\n\n".join(map(as_table, reports))


def as_table(report: Report) -> str:
    lines = [[name for name, _ in COLUMNS]]
    lines += [[shown(row) for _, shown in COLUMNS] for row in (*report.rows, report.bound)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = [
        "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
        )
        for line in lines
    ]
    ceiling, bound = report.rows[0].ceiling_pct, report.bound
    seeds = f", mean of {report.seeds} seeds" if report.seeds > 1 else ""
    return "\n".join(
        [
            f"{report.requests} requests {'in a closed loop, bound ' if report.closed_loop else ''}"
            f"at load {bound.load:.2f}{seeds}; TTFT in seconds, from arrival at the gateway",
            f"ceiling: one LRU cache of all replicas' size hits {ceiling:.1f} % of the input tokens, "
            f"an endless one {bound.hit_pct:.1f} %",
            *(
                ["bound: no bound here, since faster answers bring the next requests sooner"]
                if report.closed_loop
                else []
            ),
            "",
            *table,
        ]
    )
