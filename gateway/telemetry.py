"""Telemetry: what was decided and how it ended becomes metrics and a log record.

Every request passes here, so counting is plain arithmetic on Python objects (2.5 µs with its log record); metric
families (`gateway.families`) are made of them only when `/metrics` is read. Label sets are bounded: routes come from
the table of endpoints, a model name counts by itself once a replica listed it (all others are `other`), and the series
of a replica go with it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import version
from typing import Protocol

import msgspec
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from gateway import families
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
    ERROR_BOUNDS,
    LAG_BOUNDS,
    OVERHEAD_BOUNDS,
    WAIT_BOUNDS,
    AnnouncementSeries,
    CachedTokens,
    Histogram,
    ModelSeries,
    PeerSeries,
    ShadowSeries,
)

__all__ = ["RequestRecord", "Telemetry"]

MAX_MODELS = 50
"""Model names with series of their own. Each has some 60; adapters that come and go must not add up for ever."""
MODELS_REFRESH_SECONDS = 1.0
"""Least time between two looks at the replicas' lists, however many unknown names are asked for."""
MAX_TENANTS = 100
"""Tenants with series of their own; more are `other`. Names come from the operator's key file, so few have more."""
OTHER, UNNAMED = "other", "none"
COMPLETED = Outcome.COMPLETED.value
STATUS_CLASSES = {2: "2xx", 3: "3xx", 4: "4xx", 5: "5xx"}


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
        yield families.PROCESSES.gauge(())  # where there are several, their parent knows (`gateway.several`)
        yield families.PROCESS_STARTS.counter({})
        yield from _peer_families(self._peers, self._clock())
        announced = self._announcements  # without them: no samples
        yield families.ANNOUNCEMENTS_CONNECTED.gauge([] if announced is None else [((), float(not announced.failing))])
        yield families.ANNOUNCEMENTS_REFUSED.counter({} if announced is None else announced.refused)
        yield from self._place_families(statistics)
        yield from _router_families(statistics)
        yield from _replica_families(statistics.replicas)
        states, starts = (self.workers.states(), self.workers.starts()) if self.workers is not None else ({}, {})
        yield families.WORKERS.gauge([((state,), count) for state, count in states.items()])
        traces = self.traces
        yield families.TRACES.counter({} if traces is None else {("sent",): traces.sent, ("lost",): traces.lost})
        yield families.WORKER_STARTS.counter({(url,): count for url, count in starts.items()})

    def _request_families(self) -> Iterator[Metric]:
        used = [series for series in self._all_series() if series.is_used]
        yield families.REQUESTS.counter(self._requests)
        seconds: dict[tuple[str, ...], Histogram] = {(series.label, COMPLETED): series.seconds for series in used}
        seconds |= {(series.label, OTHER): series.other_seconds for series in used}
        yield families.REQUEST_SECONDS.histogram(seconds)
        yield families.TTFT_SECONDS.histogram({(series.label,): series.ttft for series in used})
        yield families.INTER_TOKEN_SECONDS.histogram({(series.label,): series.inter_token for series in used})
        yield families.PROMPT_TOKENS.counter({(series.label,): series.prompt_tokens for series in used})
        yield families.COMPLETION_TOKENS.counter({(series.label,): series.completion_tokens for series in used})
        yield families.OVERHEAD_SECONDS.histogram({(): self._overhead})
        yield families.WAIT_SECONDS.histogram({(): self._wait})
        yield families.DECIDE_SECONDS.histogram({(): self._decide})

    def _counter_families(self) -> Iterator[Metric]:
        yield families.DECISIONS.counter(self._decisions)
        yield families.CACHED_TOKENS.counter(self._cached)
        yield families.LOST_HITS.counter(self._lost_hits)
        yield families.ATTEMPTS.counter(self._attempts)
        yield families.REPLAYS.counter(self._replays)
        yield families.REPLAYS_REFUSED.counter({(): self._replays_refused})
        yield families.ADMITTED.counter(self._admitted)
        yield families.SHED.counter(self._shed)
        yield families.KEY_REFUSALS.counter(self._key_refusals)
        yield families.TENANT_TOKENS.counter(self._tenant_tokens)
        yield families.REQUEST_BYTES.counter({(): self._request_bytes})
        yield families.RESPONSE_BYTES.counter({(): self._response_bytes})
        yield families.LOG_RECORDS_LOST.counter({(): self._log.lost if self._log is not None else 0})
        decision_log = self._decision_log
        yield families.DECISION_RECORDS_LOST.counter({(): decision_log.lost if decision_log is not None else 0})
        yield families.LOOP_LAG_SECONDS.histogram({(): self._loop_lag})
        yield families.HELD_BYTES.gauge([((), self._held_bytes())])
        yield families.TASKS.gauge([((), self._tasks())])

    def _place_families(self, statistics: RouterStatistics) -> Iterator[Metric]:
        waiting: dict[tuple[str, ...], int] = {}
        for tenant, count in statistics.waiting_by.items():
            label = (self._tenant_label(tenant),)
            waiting[label] = waiting.get(label, 0) + count
        yield families.TENANT_WAITING.gauge(waiting.items())
        present = frozenset(one.replica for one in statistics.replicas)
        rows = [row for row in self._connections() if row[0] in present]
        busy = [((replica, "busy"), float(busy)) for replica, busy, _ in rows]
        yield families.CONNECTIONS.gauge(busy + [((replica, "idle"), float(idle)) for replica, _, idle in rows])

    def _prediction_families(self) -> Iterator[Metric]:
        both: dict[tuple[str, str], int] = {}
        for replica, cached in self._cached_by.items():
            both[replica, "predicted"] = cached.predicted
            both[replica, "reported"] = cached.reported
        yield families.REPLICA_CACHED_TOKENS.counter(both)
        yield families.PREDICTION_ERROR.histogram({(): self._prediction_error})

    def _shadow_families(self) -> Iterator[Metric]:
        choices: dict[tuple[str, str], int] = {}
        cached: dict[tuple[str, str], int] = {}
        for one in self._shadows:
            choices[one.policy, "same"], choices[one.policy, "other"] = one.same, one.other
            cached[one.policy, "live"], cached[one.policy, "shadow"] = one.cached_live, one.cached_shadow
        yield families.SHADOW_DECISIONS.counter(choices)
        yield families.SHADOW_REGRET_SECONDS.histogram({(one.policy,): one.regret for one in self._shadows})
        yield families.SHADOW_CACHED_TOKENS.counter(cached)
        yield families.SHADOW_FAILURES.counter({(one.policy,): one.failures for one in self._shadows})


def _peer_families(peers: PeerSeries | None, now: float) -> Iterator[Metric]:
    if peers is None:  # nothing is shared: no samples
        yield from (one.gauge(()) for one in (families.PEERS, families.PEERS_CONNECTED))
        counters = families.PEER_ENTRIES, families.PEER_ENTRIES_REFUSED, families.PEER_FAILURES
        yield from (one.counter({}) for one in counters)
        return
    fresh = [last for last in peers.heard.values() if now - last <= REPORT_SECONDS]
    yield families.PEERS.gauge([((), len(fresh))])
    yield families.PEERS_CONNECTED.gauge([((), float(peers.connected))])
    yield families.PEER_ENTRIES.counter({("sent",): peers.sent, ("received",): peers.received})
    yield families.PEER_ENTRIES_REFUSED.counter(peers.refused)
    yield families.PEER_FAILURES.counter({(): peers.failures})


def _router_families(statistics: RouterStatistics) -> Iterator[Metric]:
    yield families.BUILD.gauge([((version("warmlane"),), 1.0)])
    yield families.IN_FLIGHT.gauge([((), statistics.in_flight)])
    yield families.WAITING.gauge([((), statistics.waiting)])
    yield families.INDEX_BLOCKS.gauge([((), statistics.index_blocks)])
    yield families.INDEX_CAPACITY.gauge([((), statistics.index_capacity_blocks)])
    yield families.INDEX_BYTES.gauge([((), statistics.index_bytes)])
    yield families.CACHE_SHARE.gauge([((), statistics.cache_share)])


def _replica_families(replicas: tuple[ReplicaStatistics, ...]) -> Iterator[Metric]:
    for family, reading in families.REPLICA_GAUGES:
        readings = [((one.replica,), reading(one)) for one in replicas]
        yield family.gauge([(labels, value) for labels, value in readings if value is not None])
    states = [((one.replica, state.value), float(one.health is state)) for one in replicas for state in HealthState]
    yield families.REPLICA_STATE.gauge(states)
