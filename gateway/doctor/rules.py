"""All rules, in one table: code, how bad it is, what looks for it, what to change, and which flags of vLLM that means.

A rule is a pure function over a window, so each has a test on recorded pages. `examine` asks them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gateway.doctor import fleet_rules as fleet
from gateway.doctor import gateway_rules as gateways
from gateway.doctor import replica_rules as replicas
from gateway.doctor.findings import Finding, Rule, Severity, Symptom, each_replica
from gateway.doctor.window import Server, Window

ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE


def each_server(look: Callable[[Server], Symptom | None]) -> Callable[[Window], Iterator[Symptom]]:
    def symptoms(window: Window) -> Iterator[Symptom]:
        for server in (*window.gateways, *window.replicas):
            symptom = look(server)
            if symptom is not None:
                yield symptom

    return symptoms


SEQUENCES, CONTEXT = "--max-num-seqs", "--max-model-len"
BATCH, MEMORY = "--max-num-batched-tokens", "--gpu-memory-utilization"
GIVEN_UP = (
    "look in the gateway's output for why it does not start, then warmlane restart; GET /warmlane/workers of the admin "
    "listener names it"
)
SAME = "start all replicas of a model with the same"

RULES: tuple[Rule, ...] = (
    # Does it answer?
    Rule(
        "unreachable",
        ERROR,
        each_server(replicas.unreachable),
        "start it, or correct its address. If it ran out of memory at its start: lower --gpu-memory-utilization",
        (MEMORY,),
    ),
    Rule(
        "died",
        ERROR,
        each_server(replicas.died),
        "read its last log lines. CUDA out of memory under load: lower --max-num-seqs, then --max-model-len; at its "
        "start: lower --gpu-memory-utilization",
        (SEQUENCES, CONTEXT, MEMORY),
    ),
    Rule(
        "no-metrics",
        ERROR,
        each_replica(replicas.no_metrics),
        "let GET /metrics through: the gateway is blind without it",
    ),
    Rule("ejected", ERROR, gateways.ejected, "make it answer the gateway's requests and /health; it returns by itself"),
    Rule(
        "no-replica",
        ERROR,
        gateways.no_replica,
        "look at what is said of each; a replica returns by itself when it answers",
    ),
    Rule("worker-given-up", ERROR, gateways.given_up_workers, GIVEN_UP),
    # Does it work?
    Rule("asleep", ERROR, each_replica(replicas.asleep), "requests sent past a gateway hang: POST /wake_up to it"),
    Rule("paused", ERROR, each_replica(replicas.paused), "requests sent past a gateway hang: POST /resume to it"),
    Rule("stuck", ERROR, each_replica(replicas.stuck), "restart it; keep its log"),
    Rule("engine-errors", ERROR, each_replica(replicas.engine_errors), "read its log; the cause is named there"),
    # Is something short?
    Rule(
        "memory-bound",
        ERROR,
        gateways.memory_bound,
        "KV cache is what is short: lower --max-model-len, then --max-num-seqs, then add replicas",
        (CONTEXT, SEQUENCES),
    ),
    Rule(
        "queue-grows",
        WARNING,
        each_replica(replicas.queue_grows),
        "memory is not what is short: raise --max-num-seqs if it runs that many, else add replicas",
        (SEQUENCES,),
    ),
    Rule(
        "kv-pressure",
        WARNING,
        gateways.kv_pressure,
        "more load makes it preempt: lower --max-model-len or --max-num-seqs, or add replicas, before it does",
        (CONTEXT, SEQUENCES),
    ),
    Rule(
        "preemptions",
        WARNING,
        each_replica(replicas.preemptions),
        "requests are thrown out half done and computed again: lower --max-num-seqs, or raise "
        "--gpu-memory-utilization, or add replicas",
        (SEQUENCES, MEMORY),
    ),
    Rule(
        "slow-tokens",
        WARNING,
        each_replica(replicas.slow_tokens),
        "raise --max-num-batched-tokens, then --max-num-seqs, and look again after each",
        (BATCH, SEQUENCES),
    ),
    Rule(
        "rejections",
        WARNING,
        each_replica(replicas.rejections),
        "raise --max-num-queued-reqs, or add replicas",
        ("--max-num-queued-reqs",),
    ),
    Rule("gateway-queue-grows", WARNING, gateways.gateway_queue_grows, "the fleet is too small for this load"),
    Rule(
        "sheds",
        WARNING,
        gateways.sheds,
        "add replicas, or let more wait: [routing] max_waiting and max_wait_seconds of the gateway",
    ),
    # Does the cache do what routing needs?
    Rule(
        "prefix-cache-off",
        ERROR,
        each_replica(replicas.prefix_cache_off),
        "start it with --enable-prefix-caching: routing has nothing to gain without",
        ("--enable-prefix-caching",),
    ),
    Rule(
        "weak-hybrid-cache",
        WARNING,
        each_replica(replicas.weak_hybrid_cache),
        "take vLLM 0.29 or newer",
    ),
    Rule(
        "hit-rate-collapsed",
        WARNING,
        each_replica(replicas.hit_rate_collapsed),
        "look for what changed: a restart, another text at the beginning of prompts, more conversations than the "
        "caches hold (add replicas or --kv-offloading-size), traffic past the gateway",
        ("--kv-offloading-size",),
    ),
    Rule(
        "wrong-predictions",
        WARNING,
        gateways.wrong_predictions,
        "it holds less than the gateway believes: look for traffic past the gateway, a cache that was reset, unequal "
        "flags; on gpt-oss for an old version",
    ),
    Rule(
        "no-cached-tokens",
        WARNING,
        gateways.no_cached_tokens,
        "start it with --enable-prompt-tokens-details, so that the gateway can check its predictions",
        ("--enable-prompt-tokens-details",),
    ),
    Rule(
        "kv-events-off",
        NOTE,
        each_replica(replicas.kv_events_off),
        "start it with --kv-events-config if somebody reads events; this gateway predicts without them",
        ("--kv-events-config",),
    ),
    # Are they alike?
    Rule(
        "different-block-size",
        WARNING,
        fleet.differing("block size", fleet.block_size),
        f"{SAME} --block-size",
        ("--block-size",),
    ),
    Rule(
        "different-hash",
        WARNING,
        fleet.differing("hash algorithm", fleet.hash_algorithm),
        f"{SAME} --prefix-caching-hash-algo",
        ("--prefix-caching-hash-algo",),
    ),
    Rule(
        "different-models",
        WARNING,
        fleet.differing("models", fleet.models),
        "serve the same names everywhere, adapters too, or know that a name has fewer replicas",
        ("--served-model-name", "--lora-modules"),
    ),
    Rule(
        "different-weights",
        NOTE,
        fleet.differing("loaded from", fleet.weights),
        "make sure that the same name means the same weights everywhere",
    ),
    Rule(
        "different-context",
        WARNING,
        fleet.differing("longest request in tokens", fleet.context),
        f"{SAME} --max-model-len: any replica may get any request",
        (CONTEXT,),
    ),
    Rule("different-version", WARNING, fleet.differing("vLLM", fleet.version), "bring all replicas to one version"),
    Rule(
        "unequal-caches",
        WARNING,
        fleet.unequal_caches,
        "use the same GPUs and flags, or a policy that weighs them (cache-cost does)",
        (MEMORY,),
    ),
    Rule(
        "work-imbalance",
        WARNING,
        fleet.work_imbalance,
        "with policy cache-cost look for traffic past the gateway; prefix-only and session-hash do this by nature",
    ),
    # What the gateway sees, and what it does not.
    Rule(
        "bypassed",
        WARNING,
        gateways.bypassed,
        "let all traffic come through the gateway. Are there several? Give all their URLs",
    ),
    Rule("stale-load", WARNING, gateways.stale_load, "look at why its /metrics is slow or refused from the gateway"),
    Rule(
        "stale-metrics",
        WARNING,
        each_server(replicas.stale_metrics),
        "look at the machine and the network in between: a page that comes late is late for the gateway, too",
    ),
    Rule("draining", NOTE, gateways.draining, "warmlane undrain, when it may have requests again"),
    Rule("registered-but-out", WARNING, gateways.registrations_out, "correct what it names"),
    Rule("out-of-sight", NOTE, each_replica(replicas.out_of_sight), "run the doctor where the gateway runs"),
    Rule(
        "not-vllm",
        NOTE,
        each_replica(replicas.not_vllm),
        "look at docs/engines.md for what it tells; rules about what only vLLM tells are silent",
    ),
    Rule(
        "models-hidden",
        NOTE,
        each_replica(replicas.hidden_models),
        "name the variable with its key, --key-env, so that models and lengths can be compared",
    ),
    Rule(
        "replicas-hidden",
        NOTE,
        gateways.unlisted_replicas,
        "name the variable with its admin key, --admin-key-env, for reasons and registrations",
    ),
)
"""Within a severity in the order of urgency."""


def examine(window: Window) -> list[Finding]:
    """Worst first."""
    foreign = {one.url: one.engine for one in window.replicas if one.engine not in (None, "vllm")}
    found = [
        Finding(
            code=rule.code,
            severity=rule.severity,
            subject=symptom.subject,
            evidence=symptom.evidence,
            figures=symptom.figures,
            change=change_of(rule, symptom, foreign.get(symptom.subject)),
            flags=() if symptom.subject in foreign else flags_of(rule, symptom),
        )
        for rule in RULES
        for symptom in rule.symptoms(window)
    ]
    return sorted(found, key=lambda one: list(Severity).index(one.severity))


def flags_of(rule: Rule, symptom: Symptom) -> tuple[str, ...]:
    """Of a change that depends on what was seen: those that it names."""
    return tuple(flag for flag in rule.flags if not symptom.change or flag in symptom.change)


def change_of(rule: Rule, symptom: Symptom, foreign: str | None) -> str:
    change = symptom.change or rule.change
    return f"{change} (these flags are vLLM's; {foreign} has its own)" if foreign and rule.flags else change
