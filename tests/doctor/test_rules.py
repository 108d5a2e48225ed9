"""Each rule of the doctor on recorded pages: what it sees where it should, and nothing a little beside that."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import pytest

from gateway.doctor.findings import Finding, Severity
from gateway.doctor.rules import RULES, examine
from gateway.doctor.window import Gateway, Look, Replica, Window
from gateway.operate import Address, Registration
from tests.doctor.recordings import Edit, labelled, recording, setting
from workers.keeper import State

A, B, G = "http://a:8000", "http://b:8000", "http://gateway:8000"
THERE = "http://127.0.0.1:8472"
"""The replica of the gateway's recording."""
CONFIG = "vllm:cache_config_info"


def replica(name: str, *edits: Edit, url: str = A, version: str | None = None) -> Replica:
    return recording(name).replica(url, *edits, version=version)


def silent(problem: str = "refused", url: str = A, looks: int = 2) -> Replica:
    failed = tuple(Look(float(number), None, problem) for number in range(looks))
    return Replica(url, failed, health_problem=problem)


def changed(one: Replica, **fields: object) -> Replica:
    return dataclasses.replace(one, **fields)


def models(one: Replica, **fields: object) -> Replica:
    """Its model with something else about it."""
    assert one.models is not None
    return changed(one, models=tuple(dataclasses.replace(card, **fields) for card in one.models))


def fleet(*replicas: Replica) -> Window:
    return Window(2.0, replicas)


def gateway(*edits: Edit, last_failure: str = "", registrations: list[Registration] | None = None) -> Gateway:
    one = recording("past_gateway").gateway(G, *edits)
    assert one.fleet is not None
    one.fleet.replicas[0].last_failure = last_failure
    one.fleet.registrations = registrations or []
    return one


def behind(one: Gateway, *edits: Edit) -> Window:
    """The gateway and its replica as they were recorded, while others asked the replica."""
    return Window(2.0, (replica("past_replica", *edits, url=THERE),), (one,))


def state(name: str) -> tuple[Edit, Edit]:
    return (
        setting("warmlane_replica_state", [0.0] * 3, state="up"),
        setting("warmlane_replica_state", [1.0] * 3, state=name),
    )


def cached(predicted: list[float], reported: list[float]) -> Edit:
    """Series that the recorded replica had none of, since it reported nothing."""

    def edit(number: int, text: str) -> str:
        family = f'warmlane_replica_cached_tokens_total{{replica="{THERE}",kind='
        return f'{text}{family}"predicted"}} {predicted[number]}\n{family}"reported"}} {reported[number]}\n'

    return edit


def workers(ready: int, given_up: int) -> Edit:
    """Of a gateway that runs replicas itself."""
    page = f'warmlane_workers{{state="ready"}} {ready}\nwarmlane_workers{{state="{State.GIVEN_UP.value}"}} {given_up}\n'
    return lambda _, text: text + page


def hybrid(version: str) -> Window:
    return fleet(models(replica("idle", version=version), root="openai/gpt-oss-120b"))


def without_http(_: int, text: str) -> str:
    return "".join(f"{line}\n" for line in text.splitlines() if not line.startswith("http_requests"))


STARTS = [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]
REJECTED = Registration("http://10.0.0.9:8000", "", [Address("http://10.0.0.9:8000", "serves another model")])
REDUNDANT = Registration(THERE, "", [Address(THERE, "is configured already")])
HALF_FULL = setting("vllm:kv_cache_usage_perc", [0.5] * 6)
WAITED = setting("vllm:num_requests_waiting", [2.0, 3.0, 3.0, 2.0])
NO_QUEUE = setting("vllm:num_requests_waiting", [0.0] * 6)
SLOW = setting("vllm:inter_token_latency_seconds_sum", [82.0, 100.0, 200.0, 500.0, 900.0, 1300.0])
FEW = setting("vllm:generation_tokens_total", [25809.0, 25900.0, 26000.0, 26100.0, 26200.0, 26300.0])


@dataclass(frozen=True)
class Case:
    sick: Callable[[], Window]
    evidence: str
    well: Callable[[], Window]
    """As like as may be without the finding."""
    subject: str = A


CASES: dict[str, Case] = {
    "unreachable": Case(
        lambda: fleet(silent("Connection refused")),
        "none of 2 looks was answered: Connection refused",
        lambda: fleet(replica("died")),
    ),
    "died": Case(
        lambda: fleet(replica("died")),
        "answered until 1.1 s, then: All connection attempts failed; before: 3 running, 30 waiting, KV cache 88% full",
        lambda: fleet(replica("memory")),
    ),
    "no-metrics": Case(
        lambda: fleet(changed(silent("HTTP 404"), health_problem="")),
        "it answers, its metrics do not: HTTP 404",
        lambda: fleet(silent("HTTP 404")),
    ),
    "ejected": Case(
        lambda: behind(gateway(*state("ejected"), last_failure="connection refused")),
        f"{G} has it as ejected: connection refused",
        lambda: behind(gateway()),
        THERE,
    ),
    "no-replica": Case(
        lambda: behind(dataclasses.replace(gateway(*state("ejected")), ready_problem="HTTP 503")),
        f"/ready: HTTP 503; 1 replica; {THERE} is ejected",
        lambda: behind(gateway()),
        G,
    ),
    "worker-given-up": Case(
        lambda: behind(gateway(workers(1, 2))),
        "it gave up 2 of the 3 replicas that it runs",
        lambda: behind(gateway(workers(3, 0))),
        G,
    ),
    "asleep": Case(
        lambda: fleet(replica("asleep")),
        'vllm:engine_sleep_state{sleep_state="awake"} is 0, while /health answers',
        lambda: fleet(replica("idle")),
    ),
    "paused": Case(
        lambda: fleet(replica("paused")),
        "/is_paused says true, while /health answers",
        lambda: fleet(replica("asleep")),
    ),
    "stuck": Case(
        lambda: fleet(replica("memory", setting("vllm:iteration_tokens_total_count", [12259.0] * 6))),
        "2 requests running, no engine step in 8.0 s",
        lambda: fleet(replica("memory")),
    ),
    "engine-errors": Case(
        lambda: fleet(
            replica("memory", setting("vllm:request_success_total", [0, 0, 1, 1, 4, 4], finished_reason="error"))
        ),
        "4 requests ended with an error of the engine in 8.0 s",
        lambda: fleet(replica("memory")),
    ),
    "memory-bound": Case(
        lambda: fleet(replica("memory")),
        "waiting 2 -> 24 requests in 8.0 s, 2 running, KV cache 88% full (median)",
        lambda: fleet(replica("memory", HALF_FULL)),
    ),
    "queue-grows": Case(
        lambda: fleet(replica("memory", HALF_FULL)),
        "waiting 2 -> 24 requests in 8.0 s, 2 running, KV cache 50% full (median)",
        lambda: fleet(replica("memory", HALF_FULL, NO_QUEUE)),
    ),
    "kv-pressure": Case(
        lambda: fleet(replica("memory", NO_QUEUE)),
        "KV cache 88% full (median of 6 looks), no growing queue",
        lambda: fleet(replica("memory")),
    ),
    "preemptions": Case(
        lambda: fleet(replica("memory")), "12 preemptions in 8.0 s, 1.5 a second", lambda: fleet(replica("cold"))
    ),
    "slow-tokens": Case(
        lambda: fleet(replica("memory", HALF_FULL, SLOW, FEW)),
        "191 ms between tokens (mean of 6379), 61 tokens/s in all",
        lambda: fleet(replica("memory", HALF_FULL, SLOW)),  # many streams, each slow
    ),
    "rejections": Case(
        lambda: fleet(
            replica(
                "memory", setting("vllm:admission_rejections_total", [0, 1, 2, 3, 4, 5], reason="max_num_queued_reqs")
            )
        ),
        "5 requests refused for a limit of its queue in 8.0 s",
        lambda: fleet(replica("memory")),
    ),
    "gateway-queue-grows": Case(
        lambda: behind(
            gateway(setting("warmlane_waiting_requests", [1.0, 6.0, 12.0])),
            setting("vllm:kv_cache_usage_perc", [0.9, 0.95, 0.99]),
        ),
        f"waiting in the gateway 1 -> 12 requests in 2.0 s; KV cache full at {THERE}",
        lambda: behind(gateway(setting("warmlane_waiting_requests", [3.0, 2.0, 3.0]))),
        G,
    ),
    "sheds": Case(
        lambda: behind(gateway(setting("warmlane_shed_total", [0.0, 2.0, 7.0], reason="full"))),
        "7 requests refused with 429 in 2.0 s",
        lambda: behind(gateway(setting("warmlane_shed_total", [7.0, 7.0, 7.0], reason="full"))),
        G,
    ),
    "prefix-cache-off": Case(
        lambda: fleet(replica("past_replica")),
        'vllm:cache_config_info says enable_prefix_caching="False"',
        lambda: fleet(replica("idle")),
    ),
    "weak-hybrid-cache": Case(
        lambda: hybrid("0.18.0"),
        "vLLM 0.18.0 with openai/gpt-oss-120b, a model with layers of different attention",
        lambda: hybrid("0.29.0"),
    ),
    "hit-rate-collapsed": Case(
        lambda: fleet(replica("cold")),
        "0% of 19500 prompt tokens found in the prefix cache in 3.0 s, 25% of 17600 before",
        lambda: fleet(replica("cold", setting("vllm:prefix_cache_hits_total", [4320, 9000, 9000, 9000]))),
    ),
    "wrong-predictions": Case(
        lambda: behind(gateway(cached([0, 4000, 9000], [0, 100, 200]))),
        f"{G} predicted 9000 cached tokens in 2.0 s, 200 were",
        lambda: behind(gateway(cached([0, 4000, 9000], [0, 4000, 8500]))),
        THERE,
    ),
    "no-cached-tokens": Case(
        lambda: behind(gateway()),
        f"23 answers through {G}, none with cached_tokens in its usage",
        lambda: behind(gateway(cached([0, 0, 0], [0, 0, 0]))),
        THERE,
    ),
    "kv-events-off": Case(
        lambda: fleet(replica("past_replica")),
        "/kv_event_sources names none that is enabled",
        lambda: fleet(replica("idle")),
    ),
    "different-block-size": Case(
        lambda: fleet(replica("idle"), replica("past_replica", url=B)),
        f"block size: 32 at {A}; 64 at {B}",
        lambda: fleet(replica("idle"), replica("memory", url=B)),
        "2 replicas of tiny",
    ),
    "different-hash": Case(
        lambda: fleet(replica("idle"), replica("past_replica", url=B)),
        f"hash algorithm: sha256_cbor at {A}; sha256 at {B}",
        lambda: fleet(replica("idle"), replica("memory", url=B)),
        "2 replicas of tiny",
    ),
    "different-models": Case(
        lambda: fleet(
            replica("idle"),
            changed(two := replica("idle", url=B), models=(*two.models, dataclasses.replace(two.models[0], id="more"))),
        ),
        f"models: tiny at {A}; more, tiny at {B}",
        lambda: fleet(replica("idle"), models(replica("idle", url=B), id="another")),  # no model in common
        "2 replicas of tiny",
    ),
    "different-weights": Case(
        lambda: fleet(replica("idle"), models(replica("idle", url=B), root="/models/finetuned")),
        f"loaded from: /models/tiny at {A}; /models/finetuned at {B}",
        lambda: fleet(replica("idle"), replica("idle", url=B)),
        "2 replicas of tiny",
    ),
    "different-context": Case(
        lambda: fleet(replica("idle"), replica("past_replica", url=B)),
        f"longest request in tokens: 2048 at {A}; 1024 at {B}",
        lambda: fleet(replica("idle"), replica("memory", url=B)),
        "2 replicas of tiny",
    ),
    "different-version": Case(
        lambda: fleet(replica("idle"), replica("idle", url=B, version="0.31.0")),
        f"vLLM: 0.32.0 at {A}; 0.31.0 at {B}",
        lambda: fleet(replica("idle"), changed(replica("idle", url=B), version=None)),
        "2 replicas of tiny",
    ),
    "unequal-caches": Case(
        lambda: fleet(replica("idle"), replica("past_replica", url=B)),
        f"KV cache: 2240 tokens at {A}; 65536 tokens at {B}",
        lambda: fleet(replica("idle"), replica("idle", labelled(CONFIG, "kv_cache_size_tokens", "2100"), url=B)),
        "2 replicas of tiny",
    ),
    "work-imbalance": Case(
        lambda: fleet(replica("cold", WAITED), replica("idle", url=B)),
        f"{A} computed 19500 of 19500 uncached prompt tokens in 2.0 s, 2.0 times the mean",
        lambda: fleet(replica("cold", WAITED), replica("cold", url=B)),
        "2 replicas of tiny",
    ),
    "bypassed": Case(
        lambda: behind(gateway()),
        f"23 requests ended there in 2.0 s, 4 of them through {G}",
        lambda: behind(gateway(setting("warmlane_upstream_attempts_total", [19.0, 30.0, 40.0]))),
        THERE,
    ),
    "stale-load": Case(
        lambda: behind(gateway(setting("warmlane_replica_load_age_seconds", [6.0, 7.0, 8.0]))),
        f"{G} last read its load 8.0 s ago",
        lambda: behind(gateway()),
        THERE,
    ),
    "stale-metrics": Case(
        lambda: fleet(
            changed(replica("idle"), looks=(Look(0.0, None, "no whole answer in 2 s"), *replica("idle").looks))
        ),
        "1 of 3 looks at /metrics failed: no whole answer in 2 s",
        lambda: fleet(replica("died")),
    ),
    "draining": Case(
        lambda: behind(gateway(setting("warmlane_replica_draining", [1.0] * 3))),
        f"{G} gives it no new requests",
        lambda: behind(gateway()),
        THERE,
    ),
    "registered-but-out": Case(
        lambda: behind(gateway(registrations=[REJECTED])),
        f"registered at {G} and out: http://10.0.0.9:8000: serves another model",
        lambda: behind(gateway(registrations=[REDUNDANT])),
        "http://10.0.0.9:8000",
    ),
    "out-of-sight": Case(
        lambda: fleet(changed(silent("Connection refused"), up_for=G)),
        f"{G} reports it up; from here: Connection refused",
        lambda: fleet(silent()),
    ),
    "not-vllm": Case(
        lambda: fleet(changed(replica("idle"), engine="sglang")),
        "it runs sglang",
        lambda: fleet(replica("idle")),
    ),
    "models-hidden": Case(
        lambda: fleet(changed(replica("idle"), models=None, models_problem="HTTP 401")),
        "/v1/models is not readable: HTTP 401",
        lambda: fleet(silent()),
    ),
    "replicas-hidden": Case(
        lambda: behind(dataclasses.replace(gateway(), fleet=None, fleet_problem="HTTP 403")),
        "/warmlane/replicas: HTTP 403",
        lambda: behind(gateway()),
        G,
    ),
}


def found(window: Window, code: str) -> list[Finding]:
    return [one for one in examine(window) if one.code == code]


def test_every_rule_has_a_case_and_codes_are_unique() -> None:
    assert list(CASES) == [rule.code for rule in RULES]


@pytest.mark.parametrize("code", CASES)
def test_the_finding_is_made_with_its_evidence(code: str) -> None:
    case = CASES[code]
    (finding,) = found(case.sick(), code)
    assert (finding.subject, finding.evidence) == (case.subject, case.evidence)
    assert finding.change
    for flag in finding.flags:
        assert flag.startswith("--")


@pytest.mark.parametrize("code", CASES)
def test_the_finding_is_not_made_a_little_beside(code: str) -> None:
    assert found(CASES[code].well(), code) == []


def test_nothing_is_found_at_a_healthy_replica_without_work() -> None:
    assert examine(fleet(replica("idle"), replica("idle", url=B))) == []


def test_the_worst_comes_first() -> None:
    levels = [one.severity for one in examine(behind(gateway()))]
    assert levels == sorted(levels, key=list(Severity).index)
    assert len(set(levels)) == 3


# -- what a change says, where it depends


def test_remedies_come_in_the_documented_order() -> None:
    (memory,) = found(fleet(replica("memory")), "memory-bound")
    assert memory.flags == ("--max-model-len", "--max-num-seqs")
    (dead,) = found(fleet(replica("died")), "died")
    assert dead.flags == ("--max-num-seqs", "--max-model-len", "--gpu-memory-utilization")
    (slow,) = found(CASES["slow-tokens"].sick(), "slow-tokens")
    assert slow.flags == ("--max-num-batched-tokens", "--max-num-seqs")
    for finding in (memory, dead, slow):
        places = [finding.change.index(flag) for flag in finding.flags]
        assert places == sorted(places)


def test_a_version_with_the_variable_is_told_of_it() -> None:
    (finding,) = found(hybrid("0.24.0"), "weak-hybrid-cache")
    assert "VLLM_PREFIX_CACHE_RETENTION_INTERVAL=0" in finding.change
    (finding,) = found(hybrid("0.22.1"), "weak-hybrid-cache")
    assert "VLLM_PREFIX_CACHE_RETENTION_INTERVAL" not in finding.change


def test_what_a_replica_calls_its_model_is_never_opened() -> None:
    assert found(fleet(models(replica("idle", version="0.18.0"), root="/dev/zero")), "weak-hybrid-cache") == []
    assert found(fleet(models(replica("idle", version="0.18.0"), root="/srv/gpt-oss-20b")), "weak-hybrid-cache")


def test_flags_of_vllm_are_not_meant_for_another_engine() -> None:
    (finding,) = found(fleet(changed(replica("memory"), engine="sglang")), "memory-bound")
    assert finding.flags == ()
    assert finding.change.endswith("(these flags are vLLM's; sglang has its own)")


def test_an_engine_without_metrics_is_known_by_its_health() -> None:
    ollama = Replica(A, (), engine="ollama")
    assert [one.code for one in examine(fleet(ollama))] == ["not-vllm"]
    (finding, *_) = examine(fleet(changed(ollama, health_problem="refused")))
    assert (finding.code, finding.evidence) == ("unreachable", "its health: refused")


def test_metrics_that_are_off_are_switched_on_with_the_engines_own_flag() -> None:
    (finding,) = found(fleet(changed(silent("HTTP 404"), health_problem="", engine="llama.cpp")), "no-metrics")
    assert "start llama-server with --metrics" in finding.change


def without_replica(_: int, text: str) -> str:
    return "".join(f"{line}\n" for line in text.splitlines() if not line.startswith("warmlane_replica_"))


DRAINED = setting("warmlane_replica_draining", [1.0] * 3)


def test_a_gateway_with_no_replica_at_all_is_an_error() -> None:
    one = dataclasses.replace(recording("past_gateway").gateway(G, without_replica), fleet=None)
    (finding,) = found(Window(2.0, (), (dataclasses.replace(one, ready_problem="HTTP 503"),)), "no-replica")
    assert (finding.severity, finding.evidence) == (Severity.ERROR, "/ready: HTTP 503; 0 replicas")
    assert "--replica" in finding.change


def test_a_fleet_that_is_drained_as_a_whole_is_an_error() -> None:
    window = behind(dataclasses.replace(gateway(DRAINED), ready_problem="HTTP 503"))
    (finding,) = found(window, "no-replica")
    assert (finding.subject, finding.severity) == (G, Severity.ERROR)
    assert finding.evidence == f"/ready: HTTP 503; 1 replica; {THERE} is up, drained"
    assert finding.change.startswith("warmlane undrain")


@pytest.mark.parametrize("is_open", [True, False])
def test_a_model_whose_replicas_are_drained_is_an_error(is_open: bool) -> None:
    """Whether the doctor sees the gateway's own view, or only its page and the replicas."""

    def second(_: int, text: str) -> str:
        lines = [line for line in text.splitlines() if line.startswith("warmlane_replica_")]
        return text + "".join(line.replace(THERE, B) + "\n" for line in lines)

    one = gateway(second, setting("warmlane_replica_draining", [1.0] * 3, replica=THERE))
    assert one.fleet is not None
    one.fleet.replicas.append(msgspec.structs.replace(one.fleet.replicas[0], replica=B, models=["other"]))
    if not is_open:
        one = dataclasses.replace(one, fleet=None)
    replicas = (replica("past_replica", url=THERE), models(replica("past_replica", url=B), id="other"))
    (finding,) = found(Window(2.0, replicas, (one,)), "no-replica")
    assert (finding.subject, finding.severity) == (f"tiny at {G}", Severity.ERROR)
    assert finding.evidence == f"no replica: {THERE} is up, drained"
    assert finding.change.startswith("warmlane undrain")


@pytest.mark.parametrize(
    ("problem", "change"),
    [
        ("[Errno 111] Connect call failed ('10.0.0.9', 8000)", "start it, or correct its address"),
        ("its TLS certificate was not accepted: unable to get local issuer certificate", "SSL_CERT_FILE"),
        ("[SSL: WRONG_VERSION_NUMBER] wrong version number (_ssl.c:1000)", "http:// instead of https://"),
        ("the answer is not HTTP", "https://"),
        ("HTTP 404", "neither an engine nor a gateway"),
        ("HTTP 401", "let /health and /metrics through"),
        ("HTTP 500", "read its log"),
        ("no whole answer in 2 s", "restart it"),
        ("no connection in 2 s", "firewall"),
        ("[Errno -2] Name or service not known", "its name is not known here"),
    ],
)
def test_each_cause_of_silence_has_its_own_advice(problem: str, change: str) -> None:
    (finding,) = found(fleet(silent(problem)), "unreachable")
    assert change in finding.change
    assert ("--gpu-memory-utilization" in finding.flags) == ("start it, or" in change)


def test_an_admin_listener_is_told_from_a_gateway_with_keys() -> None:
    """A gateway tells everybody whether it is ready."""
    listener = Gateway(G, (Look(0.0, None, "HTTP 401"),), ready_problem="HTTP 401")
    (finding,) = found(Window(2.0, (), (listener,)), "unreachable")
    assert "an admin listener" in finding.change
    assert "--admin-key-env" in finding.change
    assert "--gateway-key-env" not in finding.change


def test_a_page_that_asks_for_a_key_says_which_option() -> None:
    (finding,) = found(Window(2.0, (), (Gateway(G, (Look(0.0, None, "HTTP 401"),)),)), "unreachable")
    assert "--gateway-key-env" in finding.change


def test_a_gateway_that_ends_is_not_told_of_flags_of_vllm() -> None:
    one = gateway()
    gone = dataclasses.replace(one, looks=(one.looks[0], Look(1.0, None, "refused"), Look(2.0, None, "refused")))
    (finding,) = found(Window(2.0, (), (gone,)), "died")
    assert (finding.subject, "--max" in finding.change) == (G, False)


def test_a_queue_in_the_gateway_counts_for_the_replicas_that_it_is_held_back_from() -> None:
    full = setting("vllm:kv_cache_usage_perc", [0.9, 0.95, 0.99])
    queue = setting("warmlane_waiting_requests", [1.0, 6.0, 12.0])
    (finding,) = found(behind(gateway(queue), full), "memory-bound")
    assert finding.evidence == f"KV cache 95% full (median), waiting in {G} 1 -> 12 requests in 2.0 s"
    assert found(behind(gateway(queue), full), "kv-pressure") == []
    assert found(behind(gateway(), full), "kv-pressure")


def test_a_queue_that_stays_longer_than_what_runs_is_one_too() -> None:
    standing = setting("vllm:num_requests_waiting", [30.0, 28.0, 31.0, 27.0, 29.0, 28.0])
    short = setting("vllm:num_requests_waiting", [3.0, 2.0, 3.0, 2.0, 3.0, 2.0])
    ending = setting("vllm:num_requests_waiting", [30.0, 26.0, 22.0, 17.0, 12.0, 8.0])
    assert found(fleet(replica("memory", standing)), "memory-bound")
    assert found(fleet(replica("memory", standing, HALF_FULL)), "queue-grows")
    assert found(fleet(replica("memory", short)), "memory-bound") == []
    assert found(fleet(replica("memory", ending)), "memory-bound") == []
    assert found(behind(gateway(setting("warmlane_waiting_requests", [140.0, 138.0, 139.0]))), "gateway-queue-grows")


def test_uneven_work_that_nobody_waits_for_is_none() -> None:
    assert found(fleet(replica("cold"), replica("idle", url=B)), "work-imbalance") == []


def test_one_late_look_is_no_death() -> None:
    late = changed(replica("idle"), looks=(*replica("idle").looks, Look(2.0, None, "no whole answer in 2 s")))
    assert [one.code for one in examine(fleet(late))] == ["stale-metrics"]


# -- counters


def test_a_restart_is_seen_and_its_counters_start_anew() -> None:
    restarted = replica(
        "memory",
        setting("process_start_time_seconds", STARTS),
        setting("vllm:num_preemptions_total", [51.0, 52.0, 54.0, 1.0, 1.0, 3.0]),
        setting("vllm:prefix_cache_queries_total", [38100, 38200, 38300, 50, 60, 70]),
    )
    (finding,) = found(fleet(restarted), "died")
    assert finding.evidence == (
        "its process began again within 8.0 s; before: 2 running, 11 waiting, KV cache 91% full"
    )
    assert restarted.increase("vllm:num_preemptions_total") == 3 + 1 + 2
    assert restarted.queries == 200 + 50 + 20


def test_a_series_that_appears_counts_from_zero() -> None:
    none_yet = recording("past_gateway").gateway(
        G, lambda number, page: "" if number == 0 else page.replace('result="completed"', f'result="r{number}"')
    )
    assert none_yet.increase("warmlane_upstream_attempts_total") == 23 + 23


def test_missing_is_not_zero() -> None:
    bare = replica("memory", lambda _, page: "vllm:num_requests_running 1.0\n")
    assert (bare.kv_usage, bare.queries, bare.increase("vllm:num_preemptions_total")) == (None, None, None)
    one_look = changed(replica("memory"), looks=replica("memory").looks[:1])
    assert one_look.increase("vllm:num_preemptions_total") is None
    assert examine(fleet(bare, changed(one_look, url=B))) == []


def test_requests_are_counted_by_the_engine_where_the_http_server_does_not() -> None:
    (finding,) = found(behind(gateway(), without_http), "bypassed")
    assert finding.figures == {"requests": 23.0, "through_gateways": 4.0}


def test_what_another_gateway_sent_is_no_bypass() -> None:
    first, second = gateway(), dataclasses.replace(gateway(), url="http://second:8000")
    assert found(behind(first), "bypassed")
    ours = setting("warmlane_upstream_attempts_total", [19.0, 28.0, 38.0])
    both = dataclasses.replace(recording("past_gateway").gateway("http://second:8000", ours))
    window = dataclasses.replace(behind(first), gateways=(first, both))
    assert found(window, "bypassed") == []
    assert found(dataclasses.replace(window, gateways=(first, second)), "bypassed")
