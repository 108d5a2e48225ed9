"""For each alert a fleet in which it fires, and fleets that come close: one table, written out as promtool's tests.

Every case starts from a fleet that is well, two replicas behind a gateway, and changes some series at minute `TROUBLE`.
What must fire is the whole of what fires, so each case also says of all other alerts that they do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

TROUBLE = 80
"""Minutes of calm: more than the hour without which nothing is compared with its past."""
MINUTES = 125
"""Trouble included: the longest alert waits for 15 minutes, after windows of ten."""

NEVER = f"_x{MINUTES - 1}"

Series = dict[str, str]


def gauge(before: float, after: float | None = None, *, minutes: int = MINUTES - TROUBLE) -> str:
    """`after` for so many minutes, then `before` again."""
    after = before if after is None else after
    rest = MINUTES - TROUBLE - minutes
    return f"{before}x{TROUBLE - 1} {after}x{minutes - 1}" + (f" {before}x{rest - 1}" if rest > 0 else "")


def ramp(before: float, each_minute: float) -> str:
    return f"{before}x{TROUBLE - 1} {before}+{each_minute}x{MINUTES - TROUBLE}"


def counter(before: float, after: float | None = None, *, calm: int = TROUBLE) -> str:
    """What is added each minute, from `calm` minutes before the trouble on."""
    after = before if after is None else after
    missing = f"_x{TROUBLE - calm} " if calm < TROUBLE else ""
    return f"{missing}0+{before}x{calm - 1} {before * calm}+{after}x{MINUTES - TROUBLE - 1}"


def vanishes(before: float) -> str:
    return f"{before}x{TROUBLE - 1} stale"


def histogram(
    name: str,
    labels: str,
    before: Mapping[str, float],
    after: Mapping[str, float] | None = None,
    *,
    calm: int = TROUBLE,
) -> Series:
    """`before`, `after`: what each bucket, cumulative, gains in a minute."""
    after = after or before
    return {f'{name}_bucket{{{labels},le="{le}"}}': counter(before[le], after[le], calm=calm) for le in before}


REPLICAS = ("a:8000", "b:8000")


def of_gateway(name: str, **labels: str) -> str:
    return (
        name + "{" + ",".join(f'{key}="{value}"' for key, value in {"instance": "gateway:8000", **labels}.items()) + "}"
    )


def of_replica(name: str, replica: str = "a:8000") -> str:
    """As the gateway tells of it."""
    return of_gateway(name, replica=f"http://{replica}")


def of_vllm(name: str, replica: str = "a:8000") -> str:
    return f'{name}{{instance="{replica}",model_name="m",engine="0"}}'


def first_tokens(p99: float, waited: float) -> Series:
    """600 a minute: 2 % of them as late as `p99`, and a mean of 1 s of which `waited` seconds are waiting."""
    late = {
        "1.0": 588.0,
        "2.5": 600.0 if p99 <= 2.5 else 588.0,
        "5.0": 600.0 if p99 <= 5 else 588.0,
        "10.0": 600.0,
        "+Inf": 600.0,
    }
    soon = dict.fromkeys(late, 600.0)
    changed = histogram("warmlane_time_to_first_token_seconds", 'instance="gateway:8000",model="m"', soon, late)
    return changed | {of_gateway("warmlane_wait_seconds_sum"): counter(60, 600 * waited)}


def token_times(replica: str, slow: float = 0.025, *, calm: int = TROUBLE) -> Series:
    """p95 of 24 ms, then of some 95 % of `slow` seconds."""
    bounds = ("0.025", "0.04", "0.1", "+Inf")
    fast = dict.fromkeys(bounds, 600.0)
    after = {le: 600.0 if float(le) >= slow else 0.0 for le in bounds}
    labels = f'instance="{replica}",model_name="m",engine="0"'
    return histogram("vllm:request_time_per_output_token_seconds", labels, fast, after, calm=calm)


def healthy() -> Series:
    series: Series = {
        'up{job="gateway",instance="gateway:8000"}': gauge(1),
        of_gateway("warmlane_build_info", version="1"): gauge(1),
        of_gateway("warmlane_waiting_requests"): gauge(0),
        of_gateway("warmlane_in_flight_requests"): gauge(40),
        of_gateway("warmlane_admitted_total", tenant="none"): counter(1000),
        of_gateway("warmlane_shed_total", tenant="none", reason="full"): counter(0),
        of_gateway("warmlane_replays_refused_total"): counter(0),
        of_gateway("warmlane_key_refusals_total", tenant="none", reason="wrong_key"): counter(0),
        of_gateway("warmlane_prompt_tokens_total", model="m"): counter(60_000),
        of_gateway("warmlane_cached_tokens_total", kind="predicted"): counter(48_000),
        of_gateway("warmlane_cached_tokens_total", kind="reported"): counter(48_000),
        of_gateway("warmlane_wait_seconds_sum"): counter(60),
        of_gateway("warmlane_wait_seconds_count"): counter(600),
        of_gateway("warmlane_time_to_first_token_seconds_sum", model="m"): counter(600),
        of_gateway("warmlane_time_to_first_token_seconds_count", model="m"): counter(600),
        requests("completed", "2xx"): counter(1000),
        GIVEN_UP: gauge(0),
        PROCESSES: gauge(2),
        PROCESS_STARTS: gauge(2),
        PEERS_CONNECTED: gauge(1),
        ANNOUNCEMENTS_CONNECTED: gauge(1),
        entries_refused("forged"): counter(0),
        announcements_refused("forged"): counter(0),
        LOG_LOST: counter(0),
        DECISIONS_LOST: counter(0),
        traces("sent"): counter(600),
        traces("lost"): counter(0),
        **histogram(
            "warmlane_loop_lag_seconds", 'instance="gateway:8000"', {"0.005": 1200, "0.25": 1200, "+Inf": 1200}
        ),
        **first_tokens(0.5, 0.1),
    }
    for replica in REPLICAS:
        series |= {
            f'up{{job="replicas",instance="{replica}"}}': gauge(1),
            of_replica("warmlane_replica_available", replica): gauge(1),
            ejected(replica): gauge(0),
            of_replica("warmlane_replica_load_age_seconds", replica): gauge(0.2),
            of_replica("warmlane_replica_running_requests", replica): gauge(20),
            of_replica("warmlane_replica_waiting_requests", replica): gauge(0),
            of_replica("warmlane_replica_kv_usage_ratio", replica): gauge(0.5),
            of_vllm("vllm:num_requests_running", replica): gauge(20),
            of_vllm("vllm:num_requests_waiting", replica): gauge(0),
            of_vllm("vllm:kv_cache_usage_perc", replica): gauge(0.5),
            of_vllm("vllm:num_preemptions_total", replica): counter(0),
            of_vllm("vllm:generation_tokens_total", replica): counter(60_000),
            of_vllm("vllm:prefix_cache_queries_total", replica): counter(30_000),
            of_vllm("vllm:prefix_cache_hits_total", replica): counter(24_000),
            of_vllm("vllm:request_queue_time_seconds_sum", replica): counter(1),
            of_vllm("vllm:request_queue_time_seconds_count", replica): counter(300),
            **token_times(replica),
        }
    return series


def requests(outcome: str, status: str) -> str:
    return of_gateway(
        "warmlane_requests_total", route="/v1/chat/completions", model="m", outcome=outcome, status=status
    )


def ejected(replica: str) -> str:
    return of_gateway("warmlane_replica_state", replica=f"http://{replica}", state="ejected")


def key_refusals(reason: str) -> str:
    return of_gateway("warmlane_key_refusals_total", tenant="none", reason=reason)


def entries_refused(reason: str) -> str:
    return of_gateway("warmlane_peer_entries_refused_total", reason=reason)


def announcements_refused(reason: str) -> str:
    return of_gateway("warmlane_announcements_refused_total", reason=reason)


def traces(result: str) -> str:
    return of_gateway("warmlane_traces_total", result=result)


def both(name: str, value: str) -> Series:
    return {of_vllm(name, replica): value for replica in REPLICAS}


WAITING = of_gateway("warmlane_waiting_requests")
SHED = of_gateway("warmlane_shed_total", tenant="none", reason="full")
GIVEN_UP = of_gateway("warmlane_workers", state="given up")
PROCESSES = of_gateway("warmlane_processes")
PROCESS_STARTS = of_gateway("warmlane_process_starts_total")
PEERS_CONNECTED = of_gateway("warmlane_peers_connected")
ANNOUNCEMENTS_CONNECTED = of_gateway("warmlane_announcements_connected")
LOG_LOST = of_gateway("warmlane_log_records_lost_total")
DECISIONS_LOST = of_gateway("warmlane_decision_records_lost_total")
REPORTED = of_gateway("warmlane_cached_tokens_total", kind="reported")
UP_A = f'up{{job="replicas",instance="{REPLICAS[0]}"}}'
UNEVEN = {
    of_vllm("vllm:num_requests_running"): gauge(20, 34),
    of_vllm("vllm:num_requests_running", "b:8000"): gauge(20, 6),
}
SLOW = token_times("a:8000", 0.1)
YOUNG = token_times("a:8000", 0.1, calm=30) | token_times("b:8000", calm=30)
"""The same after half an hour of calm."""


@dataclass(frozen=True)
class Case:
    """`changes` make the alert fire within `within` minutes; none of the fleets of `close` makes any fire."""

    alert: str
    severity: str
    within: int
    changes: Series
    close: tuple[Series, ...]
    quiet: int = 0
    """So many minutes after the trouble began nothing fires yet."""
    also: tuple[tuple[str, str], ...] = field(default=())
    """What fires with it by its nature."""


CASES = (
    Case(
        "WarmlaneGatewayGone",
        "page",
        3,
        {'up{job="gateway",instance="gateway:8000"}': gauge(1, 0)},
        ({'up{job="gateway",instance="gateway:8000"}': gauge(1, 0, minutes=1)},),
    ),
    Case("WarmlaneGatewayGone", "page", 3, {'up{job="gateway",instance="gateway:8000"}': vanishes(1)}, ()),
    Case(
        "WarmlaneNoReplica",
        "page",
        3,
        {of_replica("warmlane_replica_available", replica): gauge(1, 0) for replica in REPLICAS},
        ({of_replica("warmlane_replica_available"): gauge(1, 0)},),
    ),
    Case(
        "WarmlaneNoReplica",
        "page",
        3,
        {of_replica("warmlane_replica_available", replica): vanishes(1) for replica in REPLICAS},
        (),
    ),
    Case("WarmlaneReplicaGone", "page", 3, {UP_A: gauge(1, 0)}, ({UP_A: gauge(1, 0, minutes=1)},)),
    Case(
        "WarmlaneReplicaGone",
        "page",
        3,
        {ejected("b:8000"): gauge(0, 1)},
        ({ejected("b:8000"): gauge(0, 1, minutes=1)},),
    ),
    Case(
        "WarmlaneReplicaStuck",
        "page",
        5,
        {of_vllm("vllm:generation_tokens_total"): counter(60_000, 0)},
        (both("vllm:generation_tokens_total", counter(60_000, 0)) | both("vllm:num_requests_running", gauge(20, 0)),),
    ),
    Case(
        "WarmlaneFleetShrank",
        "warn",
        4,
        {of_replica("warmlane_replica_available"): vanishes(1)},
        ({of_replica("warmlane_replica_available"): gauge(1, 0)},),
    ),
    Case(
        "WarmlaneGivenUp",
        "warn",
        3,
        {GIVEN_UP: gauge(0, 1)},
        ({GIVEN_UP: gauge(0, 1, minutes=1)}, {of_gateway("warmlane_workers", state="paused"): gauge(0, 2)}),
    ),
    Case(
        "WarmlaneProcessesEnd",
        "warn",
        15,
        {PROCESS_STARTS: ramp(2, 1)},
        (
            {PROCESS_STARTS: gauge(9, 2)},  # the gateway was restarted
            {PROCESS_STARTS: gauge(2, 5)},
            {PROCESS_STARTS: gauge(2, 18), PROCESSES: gauge(16)},  # each was told to end, once
        ),
        quiet=4,
    ),
    Case("WarmlaneRedisLost", "warn", 4, {PEERS_CONNECTED: gauge(1, 0)}, ({PEERS_CONNECTED: gauge(1, 0, minutes=2)},)),
    Case(
        "WarmlaneRedisLost",
        "warn",
        4,
        {ANNOUNCEMENTS_CONNECTED: gauge(1, 0)},
        ({ANNOUNCEMENTS_CONNECTED: gauge(1, 0, minutes=2)},),
    ),
    Case(
        "WarmlaneEntriesRefused",
        "warn",
        14,
        {entries_refused("forged"): counter(0, 60)},
        ({entries_refused("forged"): gauge(0, 500)}, {entries_refused("repeated"): counter(0, 60)}),
        quiet=9,
    ),
    Case(
        "WarmlaneEntriesRefused",
        "warn",
        14,
        {announcements_refused("forged"): counter(0, 20)},
        ({announcements_refused("forged"): gauge(0, 20)}, {announcements_refused("repeated"): counter(0, 20)}),
        quiet=9,
    ),
    *(
        Case("WarmlaneRecordsLost", "warn", 14, {lost: counter(0, 30)}, ({lost: gauge(0, 300)},), quiet=9)
        for lost in (LOG_LOST, DECISIONS_LOST, traces("lost"))
    ),
    Case(
        "WarmlaneKvPressure",
        "warn",
        15,
        {of_replica("warmlane_replica_kv_usage_ratio"): gauge(0.5, 0.9)},
        (
            {of_replica("warmlane_replica_kv_usage_ratio"): gauge(0.5, 0.84)},
            {of_replica("warmlane_replica_kv_usage_ratio"): gauge(0.5, 1.0, minutes=9)},
        ),
        quiet=10,
    ),
    Case(
        "WarmlaneKvPressure",
        "page",
        15,
        {
            of_replica("warmlane_replica_kv_usage_ratio"): gauge(0.5, 0.98),
            of_vllm("vllm:kv_cache_usage_perc"): gauge(0.5, 0.98),
            of_vllm("vllm:num_preemptions_total"): counter(0, 3),
        },
        (
            {of_vllm("vllm:kv_cache_usage_perc"): gauge(0.5, 0.98)},
            {of_vllm("vllm:num_preemptions_total"): counter(0, 3)},
        ),
        quiet=5,
        also=(("WarmlaneKvPressure", "warn"),),
    ),
    Case(
        "WarmlaneQueueGrowth",
        "warn",
        20,
        {WAITING: ramp(0, 0.5)},
        ({WAITING: gauge(0, 3)}, {WAITING: gauge(0, 30, minutes=6)}),
        quiet=10,
    ),
    Case(
        "WarmlaneQueueGrowth",
        "page",
        20,
        {of_replica("warmlane_replica_waiting_requests", replica): gauge(0, 30) for replica in REPLICAS},
        ({WAITING: gauge(0, 35)},),
        quiet=10,
    ),
    Case("WarmlaneShed", "warn", 10, {SHED: counter(0, 30)}, ({SHED: counter(0, 5)},), quiet=4),
    Case("WarmlaneShed", "page", 12, {SHED: counter(0, 300)}, (), quiet=4, also=(("WarmlaneShed", "warn"),)),
    Case(
        "WarmlaneShed",
        "page",
        12,
        {SHED: counter(0, 300), of_gateway("warmlane_admitted_total", tenant="none"): NEVER},
        (),
        quiet=4,
        also=(("WarmlaneShed", "warn"),),
    ),
    Case(
        "WarmlaneHotSpot",
        "warn",
        15,
        {**UNEVEN, WAITING: gauge(0, 2)},
        (
            UNEVEN,
            {WAITING: gauge(0, 2), of_vllm("vllm:num_requests_running"): gauge(20, 40)},
        ),
        quiet=5,
    ),
    Case("WarmlaneSlowFirstToken", "warn", 20, first_tokens(8, 0.8), (first_tokens(4, 0.8),), quiet=9),
    Case("WarmlaneSlowFirstToken", "warn", 20, first_tokens(8, 0.2), (first_tokens(4, 0.2),), quiet=9),
    Case("WarmlaneSlowDecode", "warn", 18, SLOW, (token_times("a:8000", 0.04), YOUNG), quiet=9),
    Case(
        "WarmlaneLoopLate",
        "warn",
        18,
        histogram(
            "warmlane_loop_lag_seconds",
            'instance="gateway:8000"',
            {"0.005": 1200, "0.25": 1200, "+Inf": 1200},
            {"0.005": 1100, "0.25": 1200, "+Inf": 1200},
        ),
        (
            histogram(
                "warmlane_loop_lag_seconds",
                'instance="gateway:8000"',
                {"0.005": 1200, "0.25": 1200, "+Inf": 1200},
                {"0.005": 1195, "0.25": 1200, "+Inf": 1200},
            ),
        ),
        quiet=9,
    ),
    Case(
        "WarmlaneAffinityLost",
        "warn",
        25,
        both("vllm:prefix_cache_hits_total", counter(24_000, 12_000)),
        (both("vllm:prefix_cache_hits_total", counter(24_000, 18_000)),),
        quiet=15,
    ),
    Case(
        "WarmlaneAffinityLost",
        "warn",
        20,
        both("vllm:prefix_cache_hits_total", counter(0)),
        (both("vllm:prefix_cache_hits_total", counter(0)) | both("vllm:prefix_cache_queries_total", counter(100)),),
        quiet=-TROUBLE + 5,
    ),
    Case(
        "WarmlaneIndexWrong",
        "warn",
        18,
        {REPORTED: counter(48_000, 30_000)},
        ({REPORTED: counter(48_000, 40_000)}, {REPORTED: counter(48_000, 60_000)}),
        quiet=10,
    ),
    Case(
        "WarmlaneStaleLoad",
        "warn",
        3,
        {of_replica("warmlane_replica_load_age_seconds"): gauge(0.2, 8)},
        (
            {of_replica("warmlane_replica_load_age_seconds"): gauge(0.2, 4)},
            {
                of_replica("warmlane_replica_load_age_seconds"): ramp(0.2, 60),
                of_replica("warmlane_replica_available"): gauge(1, 0),
            },
        ),
    ),
    Case(
        "WarmlaneErrors",
        "warn",
        12,
        {requests("failed", "2xx"): counter(0, 30)},
        (
            {requests("failed", "2xx"): counter(0, 5)},
            {requests("rejected", "4xx"): counter(0, 1000), requests("client_left", "none"): counter(0, 1000)},
        ),
        quiet=5,
    ),
    Case(
        "WarmlaneErrors",
        "page",
        12,
        {requests("refused", "5xx"): counter(0, 100), requests("failed", "5xx"): counter(0, 10)},
        (),
        quiet=5,
        also=(("WarmlaneErrors", "warn"),),
    ),
    Case(
        "WarmlaneReplaysRefused",
        "warn",
        2,
        {of_gateway("warmlane_replays_refused_total"): counter(0, 2)},
        ({of_gateway("warmlane_replays_total", cause="lost"): counter(0, 20)},),
    ),
    Case(
        "WarmlaneKeyRefusals",
        "warn",
        5,
        {key_refusals("wrong_key"): counter(0, 60)},
        ({key_refusals("wrong_key"): counter(0, 15)}, {key_refusals("requests_per_minute"): counter(0, 600)}),
    ),
)


def promtool_tests(rule_files: list[str]) -> dict[str, Any]:
    return {"rule_files": rule_files, "evaluation_interval": "1m", "tests": list(_tests())}


def _tests() -> Iterator[dict[str, Any]]:
    well = healthy()
    yield _test("all is well", well, {5: set(), TROUBLE: set(), MINUTES - 5: set()})
    for case in CASES:
        fires = {(case.alert, case.severity), *case.also}
        name = f"{case.alert} {case.severity}"
        yield _test(name, well | case.changes, {TROUBLE + case.quiet: set(), TROUBLE + case.within: fires})
        for number, changes in enumerate(case.close, 1):
            later = range(TROUBLE, MINUTES, 5)
            yield _test(f"{name}: close, {number}", well | changes, {minute: set() for minute in later})


def _test(name: str, series: Series, at: Mapping[int, set[tuple[str, str]]]) -> dict[str, Any]:
    return {
        "name": name,
        "interval": "1m",
        "input_series": [{"series": key, "values": values} for key, values in series.items()],
        "promql_expr_test": [
            {
                "expr": 'group by (alertname, severity) (ALERTS{alertstate="firing"})',
                "eval_time": f"{minute}m",
                "exp_samples": [
                    {"labels": f'{{alertname="{alert}",severity="{severity}"}}', "value": 1}
                    for alert, severity in sorted(fires)
                ],
            }
            for minute, fires in at.items()
        ],
    }
