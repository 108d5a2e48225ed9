"""Telemetry: what was decided and how it ended becomes metrics and a log record. The only module that knows Prometheus.

Every request passes here, so counting is plain arithmetic on Python objects (2.5 µs with its log record); metric
families are made of them only when `/metrics` is read. Label sets are bounded: routes come from the table of endpoints,
a model name counts by itself once a replica listed it (all others are `other`), and the series of a replica go with it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal, Protocol

import msgspec
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.core.admission import ShedReason
from gateway.core.model import (
    Decision,
    HealthState,
    Outcome,
    ReplicaId,
    ReplicaStatistics,
    RouteRequest,
    RouterStatistics,
)
from gateway.core.sharing import REPORT_SECONDS
from gateway.prefix_log import PrefixLog
from gateway.rankings import decision_row
from gateway.request_log import Lines, RequestLog, RequestRecord
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
    AnnouncementSeries,
    CachedTokens,
    Histogram,
    ModelSeries,
    PeerSeries,
    ShadowSeries,
)

__all__ = ["FAMILIES", "RequestRecord", "Telemetry"]

MAX_MODELS = 50
"""Model names with series of their own. Each has some 60; adapters that come and go must not add up for ever."""
MODELS_REFRESH_SECONDS = 1.0
"""Least time between two looks at the replicas' lists, however many unknown names are asked for."""
MAX_TENANTS = 100
"""Tenants with series of their own; more are `other`. Names come from the operator's key file, so few have more."""
OTHER, UNNAMED = "other", "none"
COMPLETED = Outcome.COMPLETED.value
STATUS_CLASSES = {2: "2xx", 3: "3xx", 4: "4xx", 5: "5xx"}

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Family:
    """One metric as `/metrics` and `docs/metrics.md` name it."""

    kind: Kind
    name: str
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()


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


def _gauge(name: str, help: str, reading: Reading) -> tuple[Family, Reading]:
    return Family("gauge", f"warmlane_replica_{name}", help, ("replica",)), reading


REPLICA_GAUGES = (
    _gauge("available", "1 while it gets new requests.", lambda one: float(one.available)),
    _gauge("draining", "1 while an operator drains it.", lambda one: float(one.draining)),
    _gauge("in_flight_requests", "This gateway's requests there.", lambda one: one.in_flight),
    _gauge("pending_tokens", "Uncached prompt tokens there, first token due.", lambda one: one.pending_tokens),
    _gauge("prefill_tokens_per_second", "Learned speed of uncached prompt tokens.", lambda one: one.prefill_rate),
    _gauge("index_blocks", "Prefix blocks that the index credits it with.", lambda one: one.index_blocks),
    _gauge("cache_tokens", "Size of its KV cache, as assumed or reported.", lambda one: one.cache_tokens),
    _gauge("load_age_seconds", "Age of its last load snapshot.", lambda one: one.load_age),
    _gauge("probe_age_seconds", "Age of its last probe.", lambda one: one.probe_age),
    _gauge("running_requests", "Running, by its load snapshot.", lambda one: one.load.running if one.load else None),
    _gauge("waiting_requests", "Waiting, by its load snapshot.", lambda one: one.load.waiting if one.load else None),
    _gauge(
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


class StatisticsSource(Protocol):
    """What telemetry needs of the router."""

    def statistics(self, now: float) -> RouterStatistics: ...


class WorkersSource(Protocol):
    """What telemetry needs of whoever runs replicas."""

    def states(self) -> Mapping[str, int]: ...

    def starts(self) -> Mapping[str, int]: ...


class TracesSource(Protocol):
    """What telemetry needs of whoever sends traces."""

    sent: int
    lost: int


class Telemetry(Collector):
    """`request_ended` and `attempt_ended` count, `render` shows. One event loop calls all of it."""

    def __init__(
        self,
        *,
        router: StatisticsSource,
        log: Lines | None,
        decision_log: Lines | None = None,
        log_blocks: bool = False,
        tasks: Callable[[], int] = lambda: 0,
        held_bytes: Callable[[], int] = lambda: 0,
        connections: Callable[[], Iterable[tuple[ReplicaId, int, int]]] = lambda: (),
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._router = router
        self.workers: WorkersSource | None = None
        self.traces: TracesSource | None = None
        self._log = RequestLog(log) if log is not None else None
        self._decision_log = RequestLog(decision_log) if decision_log is not None else None
        self._logs = [one for one in (self._log, self._decision_log) if one is not None]
        self._prefixes = PrefixLog() if self._logs and log_blocks else None
        self._tasks = tasks
        self._held_bytes = held_bytes
        self._connections = connections
        self._clock = clock
        self._wall_clock = wall_clock
        self._other = ModelSeries(OTHER)
        self._series: dict[str, ModelSeries] = {"": ModelSeries(UNNAMED)}
        """By model name as requests carry it."""
        self._models_due = clock()
        self._tenants: set[str] = set()
        self._requests: dict[tuple[str, str, str, str], int] = defaultdict(int)
        self._decisions: dict[tuple[str, str], int] = defaultdict(int)
        self._cached: dict[tuple[str], int] = {("predicted",): 0, ("reported",): 0, ("unconfirmed",): 0}
        self._cached_by: dict[str, CachedTokens] = {}
        self._prediction_error = Histogram(ERROR_BOUNDS)
        self._shadows: list[ShadowSeries] = []
        self._peers: PeerSeries | None = None
        self._announcements: AnnouncementSeries | None = None
        self._attempts: dict[tuple[ReplicaId, str], int] = defaultdict(int)
        self._replays: dict[tuple[str], int] = defaultdict(int)
        self._replays_refused = 0
        self._key_refusals: dict[tuple[str, str], int] = defaultdict(int)
        self._tenant_tokens: dict[tuple[str, str], int] = defaultdict(int)
        self._lost_hits: dict[tuple[str], int] = {("spilled",): 0, ("absent",): 0, ("moved",): 0}
        self._overhead = Histogram(OVERHEAD_BOUNDS)
        self._decide = Histogram(DECIDE_BOUNDS)
        self._wait = Histogram(WAIT_BOUNDS)
        self._loop_lag = Histogram(LAG_BOUNDS)
        self._admitted: dict[tuple[str], int] = {(UNNAMED,): 0}
        self._shed: dict[tuple[str, str], int] = {(UNNAMED, reason.value): 0 for reason in ShedReason}
        self._request_bytes = self._response_bytes = 0
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    # -- the hot path

    def request_read(self, record: RequestRecord, request: RouteRequest) -> None:
        """Note what its prompt shares with earlier ones, if that is to be logged."""
        if self._prefixes is not None and request.length:
            record.prefix = self._prefixes.note(request)

    def request_ended(self, record: RequestRecord) -> None:
        """Count one request and log it. Called exactly once for each."""
        series = self._series.get(record.model) or self._series_of(record.model)
        status = STATUS_CLASSES.get(record.status // 100, "none")
        self._requests[record.route, series.label, record.outcome, status] += 1
        self._request_bytes += record.request_bytes
        self._response_bytes += record.response_bytes
        (series.seconds if record.outcome == COMPLETED else series.other_seconds).observe(record.duration_seconds)
        if record.ttft_seconds is not None:
            series.ttft.observe(record.ttft_seconds)
            if record.completion_tokens is not None and record.completion_tokens > 1:
                rest = record.duration_seconds - record.ttft_seconds
                series.inter_token.observe(rest / (record.completion_tokens - 1))
        if record.replica:
            self._count_sent(record, series)
        elif record.shed:
            refusal = (self._tenant_label(record.tenant), record.shed)
            self._shed[refusal] = self._shed.get(refusal, 0) + 1
        if self._logs:
            self._write(record)

    def decided(self, record: RequestRecord, decision: Decision) -> None:
        """Note a flight's decision for the decision log."""
        if record.decisions is msgspec.UNSET:
            record.decisions = []
        record.decisions.append(decision_row(decision))

    def _write(self, record: RequestRecord) -> None:
        """To each log its own: decisions are many times as long as the rest."""
        record.time = self._wall_clock()
        decisions, record.decisions = record.decisions, msgspec.UNSET
        if self._log is not None:
            self._log.add(record)
        if self._decision_log is not None and decisions is not msgspec.UNSET:
            record.decisions = decisions
            self._decision_log.add(record)

    def key_refused(self, tenant: str, reason: str) -> None:
        """A request was ruled out by its key; `tenant` is empty when the key was not known."""
        self._key_refusals[self._tenant_label(tenant), reason] += 1

    def tokens_charged(self, tenant: str, prompt: int, completion: int) -> None:
        """Used by a response that went on after its request had ended."""
        label = self._tenant_label(tenant)
        self._tenant_tokens[label, "prompt"] += prompt
        self._tenant_tokens[label, "completion"] += completion

    def _count_sent(self, record: RequestRecord, series: ModelSeries) -> None:
        tenant = (self._tenant_label(record.tenant),)
        self._admitted[tenant] = self._admitted.get(tenant, 0) + 1
        self._decisions[record.policy, record.reason] += 1
        if record.overhead_seconds:
            self._overhead.observe(record.overhead_seconds)
        self._wait.observe(record.waited_seconds)
        if record.prompt_tokens is not None:
            series.prompt_tokens += record.prompt_tokens
            self._tenant_tokens[tenant[0], "prompt"] += record.prompt_tokens
        if record.completion_tokens is not None:
            series.completion_tokens += record.completion_tokens
            self._tenant_tokens[tenant[0], "completion"] += record.completion_tokens
        if record.cached_tokens is None:
            self._cached["unconfirmed",] += record.cached_tokens_predicted
        else:  # both sides of the comparison over the same requests
            self._cached["predicted",] += record.cached_tokens_predicted
            self._cached["reported",] += record.cached_tokens
            self._compare(record, record.cached_tokens)

    def _compare(self, record: RequestRecord, reported: int) -> None:
        """Predicted against reported: a wrong belief about a replica's cache shows here first."""
        predicted = record.cached_tokens_predicted
        by = self._cached_by.get(record.replica)
        if by is None:
            by = self._cached_by[record.replica] = CachedTokens()
        by.predicted += predicted
        by.reported += reported
        if predicted > reported:
            self._lost_hits["absent",] += predicted - reported
        if prompt_tokens := record.prompt_tokens or record.prompt_tokens_estimated:
            self._prediction_error.observe(min(1.0, max(-1.0, (predicted - reported) / prompt_tokens)))

    def hits_lost(self, cause: str, tokens: int) -> None:
        """So many tokens of a prompt are computed although a replica holds them. `cause`: one of a closed set."""
        if tokens > 0:
            self._lost_hits[cause,] += tokens

    def decided_in(self, seconds: float) -> None:
        self._decide.observe(seconds)

    def attempt_ended(self, replica: ReplicaId, outcome: Outcome) -> None:
        """One flight to one replica ended; a request has one or more."""
        self._attempts[replica, outcome.value] += 1

    def replayed(self, cause: str) -> None:
        """A request is sent once more. `cause`: one of a closed set."""
        self._replays[cause,] += 1

    def replay_refused(self) -> None:
        self._replays_refused += 1

    def loop_was_late(self, seconds: float) -> None:
        """One look at the event loop: something that was due ran so much later."""
        self._loop_lag.observe(max(0.0, seconds))

    def ttft_counts(self) -> list[int]:
        """First tokens of all models so far, by the buckets of `TTFT_BOUNDS`."""
        return [sum(counts) for counts in zip(*(one.ttft.counts for one in self._all_series()), strict=True)]

    def _all_series(self) -> list[ModelSeries]:
        return [*self._series.values(), self._other]

    def shadow(self, policy: str) -> ShadowSeries:
        """Where a shadow policy of this name is counted, from now on also on the page."""
        series = ShadowSeries(policy)
        self._shadows.append(series)
        return series

    def peers(self, refusals: Iterable[str]) -> PeerSeries:
        """Where it is counted what is shared with other gateways, from now on also on the page."""
        self._peers = PeerSeries(refusals)
        return self._peers

    def announcements(self, refusals: Iterable[str]) -> AnnouncementSeries:
        """The same of replicas that announce themselves."""
        self._announcements = AnnouncementSeries(refusals)
        return self._announcements

    def flush(self) -> None:
        """Pass the log records on. To be called several times a second."""
        for log in self._logs:
            log.flush()

    def close(self) -> None:
        """The end: pass the last log records on and wait a moment for them to be written."""
        for log in self._logs:
            log.close()

    # -- bounded labels

    def _series_of(self, model: str) -> ModelSeries:
        """Series of a name without any yet: its own if a replica lists it, else those of `other`."""
        now = self._clock()
        if now >= self._models_due:
            self._models_due = now + MODELS_REFRESH_SECONDS
            for replica in self._router.statistics(now).replicas:
                for card in replica.models:
                    known = card.id in self._series or card.id in (OTHER, UNNAMED)
                    if not known and len(self._series) <= MAX_MODELS:
                        self._series[card.id] = ModelSeries(card.id)
        return self._series.get(model, self._other)

    def model_label(self, model: str) -> str:
        """Its name if a replica lists it."""
        return (self._series.get(model) or self._series_of(model)).label

    def _tenant_label(self, tenant: str) -> str:
        """Its name as long as there are few."""
        if not tenant:
            return UNNAMED
        if tenant not in self._tenants:
            if len(self._tenants) >= MAX_TENANTS:
                return OTHER
            self._tenants.add(tenant)
        return tenant

    def _forget_replicas_except(self, present: Iterable[ReplicaId]) -> None:
        kept = frozenset(present)
        for key in [key for key in self._attempts if key[0] not in kept]:
            del self._attempts[key]
        for replica in [replica for replica in self._cached_by if replica not in kept]:
            del self._cached_by[replica]

    # -- the metrics page

    def render(self) -> bytes:
        """The `/metrics` page in the Prometheus text format."""
        return generate_latest(self._registry)

    def families(self) -> list[Metric]:
        """All that is on the page."""
        return list(self._registry.collect())

    def describe(self) -> Iterable[Metric]:
        return ()  # nothing is asked of the router before it has to answer

    def collect(self) -> Iterator[Metric]:
        """Called by the registry for each page."""
        statistics = self._router.statistics(self._clock())
        self._forget_replicas_except(one.replica for one in statistics.replicas)
        yield from self._request_families()
        yield from self._counter_families()
        yield from self._prediction_families()
        yield from self._shadow_families()
        yield _gauge_family(PROCESSES, ())  # where there are several, their parent knows (`gateway.several`)
        yield _counter(PROCESS_STARTS, {})
        yield from _peer_families(self._peers, self._clock())
        announced = self._announcements  # without them: no samples
        yield _gauge_family(ANNOUNCEMENTS_CONNECTED, [] if announced is None else [((), float(not announced.failing))])
        yield _counter(ANNOUNCEMENTS_REFUSED, {} if announced is None else announced.refused)
        yield from self._place_families(statistics)
        yield from _router_families(statistics)
        yield from _replica_families(statistics.replicas)
        states, starts = (self.workers.states(), self.workers.starts()) if self.workers is not None else ({}, {})
        yield _gauge_family(WORKERS, [((state,), count) for state, count in states.items()])
        traces = self.traces
        yield _counter(TRACES, {} if traces is None else {("sent",): traces.sent, ("lost",): traces.lost})
        yield _counter(WORKER_STARTS, {(url,): count for url, count in starts.items()})

    def _request_families(self) -> Iterator[Metric]:
        used = [series for series in self._all_series() if series.is_used]
        yield _counter(REQUESTS, self._requests)
        seconds: dict[tuple[str, ...], Histogram] = {(series.label, COMPLETED): series.seconds for series in used}
        seconds |= {(series.label, OTHER): series.other_seconds for series in used}
        yield _histogram(REQUEST_SECONDS, seconds)
        yield _histogram(TTFT_SECONDS, {(series.label,): series.ttft for series in used})
        yield _histogram(INTER_TOKEN_SECONDS, {(series.label,): series.inter_token for series in used})
        yield _counter(PROMPT_TOKENS, {(series.label,): series.prompt_tokens for series in used})
        yield _counter(COMPLETION_TOKENS, {(series.label,): series.completion_tokens for series in used})
        yield _histogram(OVERHEAD_SECONDS, {(): self._overhead})
        yield _histogram(WAIT_SECONDS, {(): self._wait})
        yield _histogram(DECIDE_SECONDS, {(): self._decide})

    def _counter_families(self) -> Iterator[Metric]:
        yield _counter(DECISIONS, self._decisions)
        yield _counter(CACHED_TOKENS, self._cached)
        yield _counter(LOST_HITS, self._lost_hits)
        yield _counter(ATTEMPTS, self._attempts)
        yield _counter(REPLAYS, self._replays)
        yield _counter(REPLAYS_REFUSED, {(): self._replays_refused})
        yield _counter(ADMITTED, self._admitted)
        yield _counter(SHED, self._shed)
        yield _counter(KEY_REFUSALS, self._key_refusals)
        yield _counter(TENANT_TOKENS, self._tenant_tokens)
        yield _counter(REQUEST_BYTES, {(): self._request_bytes})
        yield _counter(RESPONSE_BYTES, {(): self._response_bytes})
        yield _counter(LOG_RECORDS_LOST, {(): self._log.lost if self._log is not None else 0})
        decision_log = self._decision_log
        yield _counter(DECISION_RECORDS_LOST, {(): decision_log.lost if decision_log is not None else 0})
        yield _histogram(LOOP_LAG_SECONDS, {(): self._loop_lag})
        yield _gauge_family(HELD_BYTES, [((), self._held_bytes())])
        yield _gauge_family(TASKS, [((), self._tasks())])

    def _place_families(self, statistics: RouterStatistics) -> Iterator[Metric]:
        waiting: dict[tuple[str, ...], int] = {}
        for tenant, count in statistics.waiting_by.items():
            label = (self._tenant_label(tenant),)
            waiting[label] = waiting.get(label, 0) + count
        yield _gauge_family(TENANT_WAITING, waiting.items())
        present = frozenset(one.replica for one in statistics.replicas)
        rows = [row for row in self._connections() if row[0] in present]
        busy = [((replica, "busy"), float(busy)) for replica, busy, _ in rows]
        yield _gauge_family(CONNECTIONS, busy + [((replica, "idle"), float(idle)) for replica, _, idle in rows])

    def _prediction_families(self) -> Iterator[Metric]:
        both: dict[tuple[str, str], int] = {}
        for replica, cached in self._cached_by.items():
            both[replica, "predicted"] = cached.predicted
            both[replica, "reported"] = cached.reported
        yield _counter(REPLICA_CACHED_TOKENS, both)
        yield _histogram(PREDICTION_ERROR, {(): self._prediction_error})

    def _shadow_families(self) -> Iterator[Metric]:
        choices: dict[tuple[str, str], int] = {}
        cached: dict[tuple[str, str], int] = {}
        for one in self._shadows:
            choices[one.policy, "same"], choices[one.policy, "other"] = one.same, one.other
            cached[one.policy, "live"], cached[one.policy, "shadow"] = one.cached_live, one.cached_shadow
        yield _counter(SHADOW_DECISIONS, choices)
        yield _histogram(SHADOW_REGRET_SECONDS, {(one.policy,): one.regret for one in self._shadows})
        yield _counter(SHADOW_CACHED_TOKENS, cached)
        yield _counter(SHADOW_FAILURES, {(one.policy,): one.failures for one in self._shadows})


def _peer_families(peers: PeerSeries | None, now: float) -> Iterator[Metric]:
    if peers is None:  # nothing is shared: no samples
        yield from (_gauge_family(family, ()) for family in (PEERS, PEERS_CONNECTED))
        yield from (_counter(family, {}) for family in (PEER_ENTRIES, PEER_ENTRIES_REFUSED, PEER_FAILURES))
        return
    fresh = [last for last in peers.heard.values() if now - last <= REPORT_SECONDS]
    yield _gauge_family(PEERS, [((), len(fresh))])
    yield _gauge_family(PEERS_CONNECTED, [((), float(peers.connected))])
    yield _counter(PEER_ENTRIES, {("sent",): peers.sent, ("received",): peers.received})
    yield _counter(PEER_ENTRIES_REFUSED, peers.refused)
    yield _counter(PEER_FAILURES, {(): peers.failures})


def _router_families(statistics: RouterStatistics) -> Iterator[Metric]:
    yield _gauge_family(BUILD, [((version("warmlane"),), 1.0)])
    yield _gauge_family(IN_FLIGHT, [((), statistics.in_flight)])
    yield _gauge_family(WAITING, [((), statistics.waiting)])
    yield _gauge_family(INDEX_BLOCKS, [((), statistics.index_blocks)])
    yield _gauge_family(INDEX_CAPACITY, [((), statistics.index_capacity_blocks)])
    yield _gauge_family(INDEX_BYTES, [((), statistics.index_bytes)])
    yield _gauge_family(CACHE_SHARE, [((), statistics.cache_share)])


def _replica_families(replicas: tuple[ReplicaStatistics, ...]) -> Iterator[Metric]:
    for family, reading in REPLICA_GAUGES:
        readings = [((one.replica,), reading(one)) for one in replicas]
        yield _gauge_family(family, [(labels, value) for labels, value in readings if value is not None])
    states = [((one.replica, state.value), float(one.health is state)) for one in replicas for state in HealthState]
    yield _gauge_family(REPLICA_STATE, states)


def _gauge_family(family: Family, samples: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    metric = GaugeMetricFamily(family.name, family.help, labels=family.labels)
    for labels, value in samples:
        metric.add_metric(labels, value)
    return metric


def _counter(family: Family, values: Mapping[Any, int]) -> Metric:
    metric = CounterMetricFamily(family.name, family.help, labels=family.labels)
    for labels, value in values.items():
        metric.add_metric(labels, value)
    return metric


def _histogram(family: Family, histograms: dict[tuple[str, ...], Histogram]) -> Metric:
    metric = HistogramMetricFamily(family.name, family.help, labels=family.labels)
    for labels, one in histograms.items():
        metric.add_metric(labels, buckets=one.buckets(), sum_value=one.total)
    return metric
