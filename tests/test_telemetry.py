"""Counts that add up, label sets that stay bounded, and a log that can neither be forged nor stop the gateway."""

from __future__ import annotations

import io
import json
import os
import re
import threading
from contextlib import suppress
from random import Random

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.core.model import (
    Cost,
    Decision,
    HealthState,
    LoadSnapshot,
    ModelCard,
    Outcome,
    Reason,
    ReplicaId,
    ReplicaStatistics,
    ReplicaView,
    RouteRequest,
    RouterStatistics,
)
from gateway.families import FAMILIES
from gateway.request_log import MAX_UNWRITTEN_BYTES, RequestLog
from gateway.series import Histogram
from gateway.telemetry import MAX_MODELS, MAX_TENANTS, RequestRecord, Telemetry

ONE, TWO = ReplicaId("http://10.0.0.1:8000"), ReplicaId("http://10.0.0.2:8000")
CAUSES = ("absent", "spilled", "moved")


def replica_statistics(replica: ReplicaId, *models: str, load: LoadSnapshot | None = None) -> ReplicaStatistics:
    return ReplicaStatistics(
        replica=replica,
        health=HealthState.UP,
        draining=False,
        available=True,
        models=tuple(ModelCard(model) for model in models),
        in_flight=3,
        in_flight_tokens=3000.0,
        pending_tokens=500.0,
        prefill_rate=9000.0,
        cache_tokens=400_000.0,
        cache_tokens_known=False,
        index_blocks=7,
        load=load,
        load_age=None if load is None else 0.5,
        last_failure="",
    )


class Router:
    """The one call that telemetry needs."""

    def __init__(self, *replicas: ReplicaStatistics) -> None:
        self.replicas = replicas
        self.asked = 0
        self.waiting_by: dict[str, int] = {}

    def statistics(self, now: float) -> RouterStatistics:
        self.asked += 1
        return RouterStatistics(
            replicas=self.replicas,
            in_flight=sum(one.in_flight for one in self.replicas),
            waiting=2,
            index_blocks=7,
            index_capacity_blocks=1000,
            started=9,
            waiting_by=self.waiting_by,
        )


def ended(model: str = "tiny", **values: object) -> RequestRecord:
    record = RequestRecord("id-1", "/v1/chat/completions", model=model, status=200, outcome="completed", replica=ONE)
    for name, value in {"policy": "cache-cost", "reason": "warm", "duration_seconds": 1.0, **values}.items():
        setattr(record, name, value)
    return record


def samples(telemetry: Telemetry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample on the page, read by an independent parser; a sample that occurs twice is an error."""
    found: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for family in text_string_to_metric_families(telemetry.render().decode()):
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            assert key not in found
            found[key] = sample.value
    return found


def value(telemetry: Telemetry, name: str, **labels: str) -> float | None:
    return samples(telemetry).get((name, tuple(sorted(labels.items()))))


@pytest.fixture
def router() -> Router:
    return Router(replica_statistics(ONE, "tiny"))


@pytest.fixture
def telemetry(router: Router) -> Telemetry:
    return Telemetry(router=router, log=None)


def test_a_request_is_counted_once_with_its_route_model_outcome_and_status(telemetry):
    telemetry.request_ended(ended())
    telemetry.request_ended(ended(status=503, outcome="refused"))
    telemetry.request_ended(ended(status=0, outcome="client_left"))
    labels = {"route": "/v1/chat/completions", "model": "tiny"}
    assert value(telemetry, "warmlane_requests_total", outcome="completed", status="2xx", **labels) == 1
    assert value(telemetry, "warmlane_requests_total", outcome="refused", status="5xx", **labels) == 1
    assert value(telemetry, "warmlane_requests_total", outcome="client_left", status="none", **labels) == 1


def test_durations_fall_into_cumulative_buckets(telemetry):
    for seconds in (0.04, 0.05, 0.051, 1000.0):
        telemetry.request_ended(ended(duration_seconds=seconds))
    assert value(telemetry, "warmlane_request_seconds_bucket", model="tiny", outcome="completed", le="0.05") == 2
    assert value(telemetry, "warmlane_request_seconds_bucket", model="tiny", outcome="completed", le="0.1") == 3
    assert value(telemetry, "warmlane_request_seconds_bucket", model="tiny", outcome="completed", le="+Inf") == 4
    assert value(telemetry, "warmlane_request_seconds_count", model="tiny", outcome="completed") == 4
    assert value(telemetry, "warmlane_request_seconds_sum", model="tiny", outcome="completed") == pytest.approx(
        1000.141
    )


def test_what_failed_at_once_does_not_make_answers_look_quick(telemetry):
    telemetry.request_ended(ended(duration_seconds=20.0))
    telemetry.request_ended(ended(duration_seconds=0.001, outcome="refused", status=429))
    assert value(telemetry, "warmlane_request_seconds_count", model="tiny", outcome="completed") == 1
    assert value(telemetry, "warmlane_request_seconds_sum", model="tiny", outcome="completed") == 20.0
    assert value(telemetry, "warmlane_request_seconds_count", model="tiny", outcome="other") == 1


def test_the_time_for_a_token_is_that_of_the_tokens_after_the_first(telemetry):
    telemetry.request_ended(ended(duration_seconds=5.0, ttft_seconds=1.0, completion_tokens=101))
    telemetry.request_ended(ended(duration_seconds=5.0, ttft_seconds=1.0, completion_tokens=1))
    telemetry.request_ended(ended(duration_seconds=5.0, ttft_seconds=1.0))
    telemetry.request_ended(ended(duration_seconds=5.0, completion_tokens=101))
    assert value(telemetry, "warmlane_inter_token_seconds_count", model="tiny") == 1
    assert value(telemetry, "warmlane_inter_token_seconds_sum", model="tiny") == pytest.approx(0.04)


def test_lost_hits_by_their_cause(telemetry):
    telemetry.request_ended(ended(cached_tokens_predicted=1000, cached_tokens=400, prompt_tokens=2000))
    telemetry.request_ended(ended(cached_tokens_predicted=100, cached_tokens=400, prompt_tokens=2000))
    telemetry.hits_lost("spilled", 50)
    telemetry.hits_lost("moved", -10)
    lost = {cause: value(telemetry, "warmlane_lost_cached_tokens_total", cause=cause) for cause in CAUSES}
    assert lost == {"absent": 600, "spilled": 50, "moved": 0}


def test_who_waits_by_tenant_is_bounded_too(router):
    telemetry = Telemetry(router=router, log=None)
    router.waiting_by = {"": 2, **{f"tenant-{number}": 1 for number in range(3 * MAX_TENANTS)}}
    waiting = {labels: count for (name, labels), count in samples(telemetry).items() if "tenant_waiting" in name}
    assert len(waiting) == MAX_TENANTS + 2
    assert sum(waiting.values()) == 3 * MAX_TENANTS + 2


def test_connections_of_replicas_that_are_gone_have_no_series(router):
    rows = [(ONE, 2, 3), (TWO, 1, 0)]
    telemetry = Telemetry(router=router, log=None, connections=lambda: rows)
    assert value(telemetry, "warmlane_upstream_connections", replica=ONE, state="busy") == 2
    assert value(telemetry, "warmlane_upstream_connections", replica=ONE, state="idle") == 3
    assert value(telemetry, "warmlane_upstream_connections", replica=TWO, state="busy") is None


def test_a_histogram_counts_what_a_plain_loop_counts():
    random = Random(7)
    values = [random.expovariate(1.0) for _ in range(1000)]
    histogram = Histogram((0.1, 0.5, 2.0))
    for one in values:
        histogram.observe(one)
    expected = [sum(one <= bound for one in values) for bound in (0.1, 0.5, 2.0, float("inf"))]
    assert [count for _, count in histogram.buckets()] == expected


def test_predicted_and_reported_cached_tokens_are_compared_over_the_same_requests(telemetry):
    telemetry.request_ended(ended(cached_tokens_predicted=100, cached_tokens=96, prompt_tokens=120))
    telemetry.request_ended(ended(cached_tokens_predicted=50, cached_tokens=None))
    kinds = {
        kind: value(telemetry, "warmlane_cached_tokens_total", kind=kind)
        for kind in ("predicted", "reported", "unconfirmed")
    }
    assert kinds == {"predicted": 100, "reported": 96, "unconfirmed": 50}
    assert value(telemetry, "warmlane_prompt_tokens_total", model="tiny") == 120


def test_predicted_and_reported_cached_tokens_show_by_replica_and_as_an_error(router):
    router.replicas = (replica_statistics(ONE), replica_statistics(TWO))
    telemetry = Telemetry(router=router, log=None)
    for predicted, reported in ((900, 896), (900, 400), (0, 100), (5000, 0)):
        telemetry.request_ended(
            ended(cached_tokens_predicted=predicted, cached_tokens=reported, prompt_tokens=1000, replica=ONE)
        )
    telemetry.request_ended(ended(cached_tokens_predicted=700, cached_tokens=None, replica=TWO))
    telemetry.request_ended(
        ended(cached_tokens_predicted=60, cached_tokens=50, prompt_tokens_estimated=100, replica=TWO)
    )
    name = "warmlane_replica_cached_tokens_total"
    assert value(telemetry, name, replica=ONE, kind="predicted") == 6800
    assert value(telemetry, name, replica=ONE, kind="reported") == 1396
    assert value(telemetry, name, replica=TWO, kind="predicted") == 60
    assert value(telemetry, name, replica=TWO, kind="reported") == 50
    below = {
        bound: value(telemetry, "warmlane_prediction_error_ratio_bucket", le=bound)
        for bound in ("-0.2", "-0.1", "-0.02", "0.02", "0.1", "0.2", "0.5", "1.0", "+Inf")
    }
    assert list(below.values()) == [0, 1, 1, 2, 3, 3, 4, 5, 5]  # the last says more than the whole prompt
    router.replicas = (replica_statistics(TWO),)
    assert value(telemetry, name, replica=ONE, kind="predicted") is None
    assert value(telemetry, name, replica=TWO, kind="predicted") == 60


def test_the_answers_of_a_shadow_policy_are_counted(telemetry):
    def decision(replica: ReplicaId, cached: float) -> Decision:
        view = ReplicaView(replica, 120.4, cached, 0.0, 0, 0.0, 0.0, None, 4e5, 1e4, 0.0, 0.0, 0)
        return Decision(RouteRequest(), "p", Reason.WARM, ((view, Cost(0.1, ())),))

    series = telemetry.shadow("least-work")
    labels = {"policy": "least-work"}
    assert value(telemetry, "warmlane_shadow_decisions_total", choice="same", **labels) == 0
    series.agreed(decision(ONE, 100.0))
    series.differed(decision(ONE, 100.0), decision(TWO, 30.0), 0.3)
    series.differed(decision(ONE, 0.0), decision(TWO, 0.0), 0.0)
    series.failed()
    assert value(telemetry, "warmlane_shadow_decisions_total", choice="same", **labels) == 1
    assert value(telemetry, "warmlane_shadow_decisions_total", choice="other", **labels) == 2
    assert value(telemetry, "warmlane_shadow_regret_seconds_sum", **labels) == 0.3
    assert value(telemetry, "warmlane_shadow_regret_seconds_count", **labels) == 2
    assert value(telemetry, "warmlane_shadow_regret_seconds_bucket", le="0.25", **labels) == 1
    assert value(telemetry, "warmlane_shadow_cached_tokens_total", kind="live", **labels) == 200
    assert value(telemetry, "warmlane_shadow_cached_tokens_total", kind="shadow", **labels) == 130
    assert value(telemetry, "warmlane_shadow_failures_total", **labels) == 1


def test_a_request_that_no_replica_got_is_no_decision(telemetry):
    telemetry.request_ended(ended(replica="", policy="", reason="", status=429, outcome="refused", shed="full"))
    telemetry.request_ended(ended(replica="", policy="", reason="", status=503, outcome="refused"))
    assert value(telemetry, "warmlane_shed_total", tenant="none", reason="full") == 1
    assert value(telemetry, "warmlane_admitted_total", tenant="none") == 0
    assert not [name for name, _ in samples(telemetry) if name == "warmlane_decisions_total"]
    assert value(telemetry, "warmlane_overhead_seconds_count") == 0


def test_a_429_of_a_replica_is_not_shed_by_the_gateway(telemetry):
    telemetry.request_ended(ended(status=429, outcome="refused"))
    assert [count for (name, _), count in samples(telemetry).items() if name == "warmlane_shed_total"] == [0, 0, 0]
    assert value(telemetry, "warmlane_admitted_total", tenant="none") == 1


def test_what_each_tenant_lost_can_be_told(telemetry):
    for tenant, shed in (("a", ""), ("a", "full"), ("a", "displaced"), ("a", "full"), ("b", ""), ("b", "overdue")):
        telemetry.request_ended(ended(tenant=tenant, shed=shed, replica="" if shed else ONE))
    shed = {key: count for key, count in telemetry_by_tenant(telemetry, "warmlane_shed_total").items() if count}
    assert shed == {("a", "full"): 2, ("a", "displaced"): 1, ("b", "overdue"): 1}
    assert telemetry_by_tenant(telemetry, "warmlane_admitted_total") == {("none",): 0, ("a",): 1, ("b",): 1}


def telemetry_by_tenant(telemetry, name: str) -> dict[tuple[str, ...], float]:
    found = ((dict(labels), count) for (one, labels), count in samples(telemetry).items() if one == name)
    return {tuple(labels[label] for label in ("tenant", "reason") if label in labels): count for labels, count in found}


def test_tenants_have_a_ceiling(telemetry):
    for number in range(10 * MAX_TENANTS):
        telemetry.request_ended(ended(tenant=f"tenant-{number}"))
    admitted = telemetry_by_tenant(telemetry, "warmlane_admitted_total")
    assert len(admitted) == MAX_TENANTS + 2
    assert admitted["other",] == 9 * MAX_TENANTS


def test_a_tenant_named_like_a_fold_does_not_break_the_page(telemetry):
    for tenant in ("none", "", "other"):
        telemetry.request_ended(ended(tenant=tenant))
    assert telemetry_by_tenant(telemetry, "warmlane_admitted_total") == {("none",): 2, ("other",): 1}


def test_how_late_the_loop_was(telemetry):
    for seconds in (-0.0001, 0.0004, 0.0004, 0.03):
        telemetry.loop_was_late(seconds)
    assert value(telemetry, "warmlane_loop_lag_seconds_bucket", le="0.001") == 3
    assert value(telemetry, "warmlane_loop_lag_seconds_bucket", le="0.05") == 4
    assert value(telemetry, "warmlane_loop_lag_seconds_sum") == pytest.approx(0.0308)


def test_made_up_model_names_share_one_series_and_rarely_ask_the_router(router):
    """O-25."""
    now = 0.0
    telemetry = Telemetry(router=router, log=None, clock=lambda: now)
    telemetry.request_ended(ended(model="tiny"))
    before = len(samples(telemetry))
    asked = router.asked
    for number in range(10_000):
        telemetry.request_ended(ended(model=f"made-up-{number}" + "x" * 200))
    assert router.asked == asked
    found = samples(telemetry)
    assert len(found) < 2000
    assert len(found) < 3 * before
    assert value(telemetry, "warmlane_request_seconds_count", model="other", outcome="completed") == 10_000
    now = 10.0
    router.replicas = (replica_statistics(ONE, "tiny", "late"),)
    telemetry.request_ended(ended(model="late"))
    assert value(telemetry, "warmlane_request_seconds_count", model="late", outcome="completed") == 1


def test_listed_models_have_a_ceiling_too(router):
    router.replicas = (replica_statistics(ONE, *(f"adapter-{number}" for number in range(10 * MAX_MODELS))),)
    telemetry = Telemetry(router=router, log=None)
    for number in range(10 * MAX_MODELS):
        telemetry.request_ended(ended(model=f"adapter-{number}"))
    names = {dict(labels)["model"] for name, labels in samples(telemetry) if name == "warmlane_request_seconds_count"}
    assert len(names) == MAX_MODELS + 1
    assert value(telemetry, "warmlane_request_seconds_count", model="other", outcome="completed") == 9 * MAX_MODELS


def test_a_model_named_like_a_fold_does_not_break_the_page(router):
    router.replicas = (replica_statistics(ONE, "other", "none", 'odd"\n\\name'),)
    telemetry = Telemetry(router=router, log=None)
    for model in ("other", "none", "", "unlisted", 'odd"\n\\name'):
        telemetry.request_ended(ended(model=model))
    assert value(telemetry, "warmlane_request_seconds_count", model="other", outcome="completed") == 3
    assert value(telemetry, "warmlane_request_seconds_count", model="none", outcome="completed") == 1
    assert value(telemetry, "warmlane_request_seconds_count", model='odd"\n\\name', outcome="completed") == 1


def test_the_series_of_a_removed_replica_vanish(router):
    router.replicas = (replica_statistics(ONE), replica_statistics(TWO))
    telemetry = Telemetry(router=router, log=None)
    for replica in (ONE, TWO):
        telemetry.attempt_ended(replica, Outcome.COMPLETED)
    assert value(telemetry, "warmlane_upstream_attempts_total", replica=TWO, result="completed") == 1
    router.replicas = (replica_statistics(ONE),)
    assert value(telemetry, "warmlane_upstream_attempts_total", replica=ONE, result="completed") == 1
    assert not [labels for _, labels in samples(telemetry) if ("replica", TWO) in labels]


def test_what_a_replica_did_not_report_has_no_series(router):
    router.replicas = (
        replica_statistics(ONE, load=LoadSnapshot(taken_at=0.0, running=0, kv_usage=0.25)),
        replica_statistics(TWO),
    )
    telemetry = Telemetry(router=router, log=None)
    assert value(telemetry, "warmlane_replica_running_requests", replica=ONE) == 0
    assert value(telemetry, "warmlane_replica_kv_usage_ratio", replica=ONE) == 0.25
    assert value(telemetry, "warmlane_replica_waiting_requests", replica=ONE) is None
    assert value(telemetry, "warmlane_replica_running_requests", replica=TWO) is None
    assert value(telemetry, "warmlane_replica_load_age_seconds", replica=TWO) is None
    assert value(telemetry, "warmlane_replica_state", replica=TWO, state="up") == 1
    assert value(telemetry, "warmlane_replica_state", replica=TWO, state="ejected") == 0


def test_the_page_has_every_documented_family_and_no_other(telemetry):
    page = telemetry.render().decode()
    types = dict(re.findall(r"^# TYPE (warmlane_\w+) (\w+)$", page, re.MULTILINE))
    assert types == {family.name: family.kind for family in FAMILIES}
    helps = dict(re.findall(r"^# HELP (warmlane_\w+) (.*)$", page, re.MULTILINE))
    assert helps == {family.name: family.help for family in FAMILIES}


def test_a_decision_and_a_retry_are_noted_in_the_record():
    def decision(replica: ReplicaId, cached: float, reason: Reason) -> Decision:
        view = ReplicaView(replica, 120.4, cached, 0.0, 0, 0.0, 0.0, None, 4e5, 1e4, 0.0, 0.0, 0)
        return Decision(RouteRequest(), "cache-cost", reason, ((view, Cost(0.1, ())),))

    record = RequestRecord("id", "/v1/completions")
    record.started(decision(ONE, 96.7, Reason.WARM))
    record.started(decision(TWO, 0.0, Reason.COLD))
    assert (record.attempts, record.replica, record.reason, record.policy) == (2, TWO, "cold", "cache-cost")
    assert (record.prompt_tokens_estimated, record.cached_tokens_predicted) == (120, 0)


# -- the log


class Lines(io.BytesIO):
    def records(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.getvalue().splitlines()]


def test_each_request_is_one_json_line(router):
    lines = Lines()
    telemetry = Telemetry(router=router, log=lines, wall_clock=lambda: 1796037532.25)
    telemetry.request_ended(ended(ttft_seconds=0.125))
    telemetry.request_ended(ended(model="", request_id="id-2"))
    telemetry.flush()
    telemetry.close()
    first, second = lines.records()
    assert first["time"] == 1796037532.25
    assert (first["request_id"], first["model"], first["ttft_seconds"]) == ("id-1", "tiny", 0.125)
    assert (second["request_id"], second["model"], second["ttft_seconds"]) == ("id-2", "", None)
    asked_for = {"prefix", "decisions", "trace_id"}
    assert set(first) == set(RequestRecord.__struct_fields__) - asked_for


@pytest.mark.parametrize("forged", ['a\n{"status":200}', "a\r\nb", "a\x00b", "a\x1b[2Jb", "a\u2028b", "a\x85b"])
def test_an_id_or_model_name_cannot_forge_a_line(router, forged):
    lines = Lines()
    telemetry = Telemetry(router=router, log=lines)
    telemetry.request_ended(ended(model=forged, request_id=forged))
    telemetry.close()
    assert len(lines.getvalue().decode().splitlines()) == 1
    (record,) = lines.records()
    assert record["request_id"].isprintable()
    assert record["model"] == record["request_id"]


def test_an_endless_model_name_is_cut(router):
    lines = Lines()
    telemetry = Telemetry(router=router, log=lines)
    telemetry.request_ended(ended(model="m" * 1_000_000))
    telemetry.close()
    assert len(lines.getvalue()) < 2000


def test_a_log_that_is_off_writes_nothing_and_needs_no_thread(router):
    threads = threading.active_count()
    telemetry = Telemetry(router=router, log=None)
    telemetry.request_ended(ended())
    telemetry.flush()
    telemetry.close()
    assert threading.active_count() == threads


def test_a_reader_that_stalls_never_stops_the_gateway_and_what_it_missed_is_counted():
    """A pipe that nobody reads: flush returns all the same, and memory stays bounded."""
    read_end, write_end = os.pipe()
    record, batch = ended(model="m" * 200), 2_000
    with os.fdopen(write_end, "wb") as stream:
        log = RequestLog(stream)
        for _ in range(40):
            for _ in range(batch):
                log.add(record)
            log.flush()
        assert log.lost >= batch
        assert log.lost % batch == 0
        written, kept = 0, 40 * batch - log.lost
        while written < kept:
            written += os.read(read_end, 1 << 20).count(b"\n")
        assert written == kept
        assert kept * 200 <= MAX_UNWRITTEN_BYTES
        log.close()
    os.close(read_end)


def test_a_reader_that_is_gone_costs_records_not_requests():
    read_end, write_end = os.pipe()
    os.close(read_end)
    with suppress(BrokenPipeError), os.fdopen(write_end, "wb") as stream:
        log = RequestLog(stream)
        for _ in range(3):
            log.add(ended())
        log.flush()
        log.close()
        assert log.lost == 3
