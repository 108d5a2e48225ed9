"""The metric families as a table: what `/metrics` and `docs/metrics.md` show, and how counts become samples of one.

Nothing counts here (`gateway.telemetry` does), and nothing runs before the page is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from gateway.core.model import ReplicaStatistics
from gateway.series import (
    DECIDE_BOUNDS,
    DURATION_BOUNDS,
    ERROR_BOUNDS,
    INTER_TOKEN_BOUNDS,
    LAG_BOUNDS,
    OVERHEAD_BOUNDS,
    REGRET_BOUNDS,
    TTFT_BOUNDS,
    WAIT_BOUNDS,
    Histogram,
)

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Family:
    """One metric as `/metrics` and `docs/metrics.md` name it."""

    kind: Kind
    name: str
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()

    def gauge(self, samples: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
        metric = GaugeMetricFamily(self.name, self.help, labels=self.labels)
        for labels, value in samples:
            metric.add_metric(labels, value)
        return metric

    def counter(self, values: Mapping[Any, int]) -> Metric:
        metric = CounterMetricFamily(self.name, self.help, labels=self.labels)
        for labels, value in values.items():
            metric.add_metric(labels, value)
        return metric

    def histogram(self, histograms: dict[tuple[str, ...], Histogram]) -> Metric:
        metric = HistogramMetricFamily(self.name, self.help, labels=self.labels)
        for labels, one in histograms.items():
            metric.add_metric(labels, buckets=one.buckets(), sum_value=one.total)
        return metric


REQUESTS = Family("counter", "warmlane_requests_total", "Requests that ended.", ("route", "model", "outcome", "status"))
REQUEST_SECONDS = Family(
    "histogram", "warmlane_request_seconds", "From request to end of answer.", ("model", "outcome"), DURATION_BOUNDS
)
TTFT_SECONDS = Family(
    "histogram", "warmlane_time_to_first_token_seconds", "From request to first token.", ("model",), TTFT_BOUNDS
)
INTER_TOKEN_SECONDS = Family(
    "histogram",
    "warmlane_inter_token_seconds",
    "Mean time for a further token, by request.",
    ("model",),
    INTER_TOKEN_BOUNDS,
)
DECIDE_SECONDS = Family("histogram", "warmlane_decide_seconds", "Decisions made at once.", (), DECIDE_BOUNDS)
LOST_HITS = Family(
    "counter", "warmlane_lost_cached_tokens_total", "Cached prompt tokens that were not made use of.", ("cause",)
)
TENANT_WAITING = Family("gauge", "warmlane_tenant_waiting_requests", "Requests now waiting at the gate.", ("tenant",))
CONNECTIONS = Family("gauge", "warmlane_upstream_connections", "Open connections to replicas.", ("replica", "state"))
INDEX_BYTES = Family("gauge", "warmlane_index_bytes", "Memory that the prefix index takes, estimated.")
OVERHEAD_SECONDS = Family(
    "histogram", "warmlane_overhead_seconds", "The gateway's own time until dispatch.", (), OVERHEAD_BOUNDS
)
WAIT_SECONDS = Family("histogram", "warmlane_wait_seconds", "Waits at the gate, of requests sent.", (), WAIT_BOUNDS)
DECISIONS = Family("counter", "warmlane_decisions_total", "Routing decisions acted on.", ("policy", "reason"))
CACHED_TOKENS = Family("counter", "warmlane_cached_tokens_total", "Prompt tokens in a prefix cache.", ("kind",))
PREDICTION_ERROR = Family(
    "histogram",
    "warmlane_prediction_error_ratio",
    "Predicted less reported cached tokens, by prompt.",
    (),
    ERROR_BOUNDS,
)
REPLICA_CACHED_TOKENS = Family(
    "counter", "warmlane_replica_cached_tokens_total", "Prompt tokens in its prefix cache.", ("replica", "kind")
)
SHADOW_DECISIONS = Family(
    "counter",
    "warmlane_shadow_decisions_total",
    "Decisions that a shadow policy was asked about.",
    ("policy", "choice"),
)
SHADOW_REGRET_SECONDS = Family(
    "histogram",
    "warmlane_shadow_regret_seconds",
    "Live policy's cost of another choice, less that of its own.",
    ("policy",),
    REGRET_BOUNDS,
)
SHADOW_CACHED_TOKENS = Family(
    "counter", "warmlane_shadow_cached_tokens_total", "Predicted cached tokens of both choices.", ("policy", "kind")
)
SHADOW_FAILURES = Family("counter", "warmlane_shadow_failures_total", "Shadow policies that raised.", ("policy",))
PROMPT_TOKENS = Family("counter", "warmlane_prompt_tokens_total", "Prompt tokens that replicas reported.", ("model",))
COMPLETION_TOKENS = Family(
    "counter", "warmlane_completion_tokens_total", "Completion tokens that replicas reported.", ("model",)
)
ATTEMPTS = Family("counter", "warmlane_upstream_attempts_total", "Flights to replicas.", ("replica", "result"))
REPLAYS = Family("counter", "warmlane_replays_total", "Requests sent to a replica once more.", ("cause",))
REPLAYS_REFUSED = Family(
    "counter", "warmlane_replays_refused_total", "Lost requests not sent again: too many were at that moment."
)
ADMITTED = Family("counter", "warmlane_admitted_total", "Requests that were let in and sent.", ("tenant",))
SHED = Family(
    "counter", "warmlane_shed_total", "Requests that the gateway itself refused with 429.", ("tenant", "reason")
)
KEY_REFUSALS = Family(
    "counter", "warmlane_key_refusals_total", "Requests that their key ruled out.", ("tenant", "reason")
)
TENANT_TOKENS = Family("counter", "warmlane_tenant_tokens_total", "Tokens that replicas reported.", ("tenant", "kind"))
REQUEST_BYTES = Family("counter", "warmlane_request_bytes_total", "Bytes of request bodies.")
RESPONSE_BYTES = Family("counter", "warmlane_response_bytes_total", "Bytes of answers relayed.")
LOG_RECORDS_LOST = Family("counter", "warmlane_log_records_lost_total", "Log records that nobody read in time.")
DECISION_RECORDS_LOST = Family(
    "counter", "warmlane_decision_records_lost_total", "Records of the decision log that could not be written."
)
LOOP_LAG_SECONDS = Family(
    "histogram", "warmlane_loop_lag_seconds", "How late the event loop was, looked at regularly.", (), LAG_BOUNDS
)
HELD_BYTES = Family("gauge", "warmlane_held_body_bytes", "Bytes of request bodies now in memory.")
TASKS = Family("gauge", "warmlane_tasks", "Tasks of the event loop.")
BUILD = Family("gauge", "warmlane_build_info", "Always 1.", ("version",))
IN_FLIGHT = Family("gauge", "warmlane_in_flight_requests", "Requests now at replicas.")
WAITING = Family("gauge", "warmlane_waiting_requests", "Requests now waiting at the gate.")
INDEX_BLOCKS = Family("gauge", "warmlane_index_blocks", "Prefix blocks in the index, all replicas together.")
INDEX_CAPACITY = Family("gauge", "warmlane_index_capacity_blocks", "Prefix blocks that fit into the index.")
CACHE_SHARE = Family("gauge", "warmlane_cache_share_ratio", "Learned part of reported KV caches that holds prefixes.")
PROCESSES = Family("gauge", "warmlane_processes", "Worker processes that serve.")
PROCESS_STARTS = Family("counter", "warmlane_process_starts_total", "Starts of worker processes.")
PEERS = Family("gauge", "warmlane_peers", "Other gateways heard of in the last seconds.")
PEERS_CONNECTED = Family("gauge", "warmlane_peers_connected", "1 while the view is shared through Redis.")
PEER_ENTRIES = Family("counter", "warmlane_peer_entries_total", "Entries of the shared stream.", ("direction",))
PEER_ENTRIES_REFUSED = Family(
    "counter", "warmlane_peer_entries_refused_total", "Entries that no gateway of ours made so.", ("reason",)
)
PEER_FAILURES = Family("counter", "warmlane_peer_failures_total", "Rounds with Redis that failed.")
ANNOUNCEMENTS_CONNECTED = Family(
    "gauge", "warmlane_announcements_connected", "1 while announcements of replicas can be read."
)
ANNOUNCEMENTS_REFUSED = Family(
    "counter", "warmlane_announcements_refused_total", "Announcements that no replica of ours made so.", ("reason",)
)
TRACES = Family("counter", "warmlane_traces_total", "Sampled requests, by what became of their spans.", ("result",))
REPLICA_STATE = Family("gauge", "warmlane_replica_state", "1 for the state it is in.", ("replica", "state"))
WORKERS = Family("gauge", "warmlane_workers", "Replicas that this process runs itself.", ("state",))
WORKER_STARTS = Family("counter", "warmlane_worker_starts_total", "Starts of each of them.", ("replica",))

Reading = Callable[[ReplicaStatistics], float | None]
"""`None`: not known, so there is no sample."""


def _of_each(name: str, help: str, reading: Reading) -> tuple[Family, Reading]:
    return Family("gauge", f"warmlane_replica_{name}", help, ("replica",)), reading


REPLICA_GAUGES = (
    _of_each("available", "1 while it gets new requests.", lambda one: float(one.available)),
    _of_each("draining", "1 while an operator drains it.", lambda one: float(one.draining)),
    _of_each("in_flight_requests", "This gateway's requests there.", lambda one: one.in_flight),
    _of_each("pending_tokens", "Uncached prompt tokens there, first token due.", lambda one: one.pending_tokens),
    _of_each("prefill_tokens_per_second", "Learned speed of uncached prompt tokens.", lambda one: one.prefill_rate),
    _of_each("index_blocks", "Prefix blocks that the index credits it with.", lambda one: one.index_blocks),
    _of_each("cache_tokens", "Size of its KV cache, as assumed or reported.", lambda one: one.cache_tokens),
    _of_each("load_age_seconds", "Age of its last load snapshot.", lambda one: one.load_age),
    _of_each("probe_age_seconds", "Age of its last probe.", lambda one: one.probe_age),
    _of_each("running_requests", "Running, by its load snapshot.", lambda one: one.load.running if one.load else None),
    _of_each("waiting_requests", "Waiting, by its load snapshot.", lambda one: one.load.waiting if one.load else None),
    _of_each(
        "kv_usage_ratio", "KV cache that running requests hold.", lambda one: one.load.kv_usage if one.load else None
    ),
)

FAMILIES: tuple[Family, ...] = (
    REQUESTS,
    REQUEST_SECONDS,
    TTFT_SECONDS,
    INTER_TOKEN_SECONDS,
    DECIDE_SECONDS,
    LOST_HITS,
    TENANT_WAITING,
    CONNECTIONS,
    INDEX_BYTES,
    OVERHEAD_SECONDS,
    WAIT_SECONDS,
    DECISIONS,
    CACHED_TOKENS,
    PREDICTION_ERROR,
    REPLICA_CACHED_TOKENS,
    SHADOW_DECISIONS,
    SHADOW_REGRET_SECONDS,
    SHADOW_CACHED_TOKENS,
    SHADOW_FAILURES,
    PROMPT_TOKENS,
    COMPLETION_TOKENS,
    ATTEMPTS,
    REPLAYS,
    REPLAYS_REFUSED,
    ADMITTED,
    SHED,
    KEY_REFUSALS,
    TENANT_TOKENS,
    REQUEST_BYTES,
    RESPONSE_BYTES,
    LOG_RECORDS_LOST,
    DECISION_RECORDS_LOST,
    LOOP_LAG_SECONDS,
    HELD_BYTES,
    TASKS,
    BUILD,
    IN_FLIGHT,
    WAITING,
    INDEX_BLOCKS,
    INDEX_CAPACITY,
    CACHE_SHARE,
    PROCESSES,
    PROCESS_STARTS,
    PEERS,
    PEERS_CONNECTED,
    PEER_ENTRIES,
    PEER_ENTRIES_REFUSED,
    PEER_FAILURES,
    ANNOUNCEMENTS_CONNECTED,
    ANNOUNCEMENTS_REFUSED,
    TRACES,
    REPLICA_STATE,
    WORKERS,
    WORKER_STARTS,
    *(family for family, _ in REPLICA_GAUGES),
)
