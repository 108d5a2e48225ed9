"""The table of targets: what the default policy, with one set of settings for all rows, should reach.

All seconds are those of the simulator's engines (20,000 uncached tokens a second each). Where a row compares, its
figure is a `ratio`, and what it is compared with stands beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random

from gateway.core.model import Cost, Decision, ReplicaId, ReplicaView, RouteRequest
from gateway.core.policy import CacheCost, Policy
from gateway.core.router import Router
from gateway.core.settings import RoutingSettings
from loadtests.fleet import Fleet, Restart
from loadtests.traces import BLOCK_TOKENS, Rag, Request, Synthetic, Trace
from loadtests.trials import SIMPLE, Bench, Figures, Measured, Recorded, Trial, Workload, as_ratio

CONVERSATION = Recorded("mooncake/conversation_trace.jsonl.gz")
AGENTS = Recorded("claude_code/agentic_120s.jsonl.gz")
LARGE, SMALL = 1_500_000, 370_000
"""KV cache of a replica in tokens."""

BUSY = Trial(CONVERSATION, Fleet(cache_tokens=LARGE), load=0.8)
CHATS = Trial(AGENTS, Fleet(cache_tokens=SMALL))


@dataclass(frozen=True, slots=True)
class Promise:
    """One figure and its limit."""

    figure: str
    limit: float
    at_least: bool = False
    stretch: float | None = None
    counts: bool = True
    """A row is met without the others: they say what more there may be."""


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    workload: str
    load: str
    promises: tuple[Promise, ...]
    measure: Callable[[Bench, int], Measured]
    needs: tuple[Recorded, ...] = ()
    any_is_enough: bool = False
    """One promise kept is enough."""


def at_most(figure: str, limit: float, stretch: float | None = None) -> Promise:
    return Promise(figure, limit, stretch=stretch)


def at_least(figure: str, limit: float) -> Promise:
    return Promise(figure, limit, at_least=True)


def plain(trial: Trial) -> Callable[[Bench, int], Measured]:
    return lambda bench, seed: bench.measure(trial, seed)


def relative(trial: Trial, figure: str, to: Trial, name: str) -> Callable[[Bench, int], Measured]:
    return lambda bench, seed: bench.relative(trial, {name: to}, figure, seed)


# ---- samples of one prompt -----------------------------------------------------------------------------------------

SAMPLES, PROMPT_TOKENS, GROUPS, GROUP_SECONDS = 16, 16_400, 10, 20.0
"""So many requests with one prompt at the same moment, so often: each group is over before the next one comes."""
FIRST_OWN_BLOCK = 1 << 40
"""Ids of the samples' blocks, above all in a trace."""


@dataclass(frozen=True, slots=True)
class SampleGroups:
    """Groups of samples, alone or in other traffic."""

    among: Trial | None = None

    def trace(self, bench: Bench, seed: int) -> Trace:
        made: list[Request] = []
        if self.among is not None:
            made += self.among.plan.timed(bench.exact(self.among, seed)).requests
        blocks = PROMPT_TOKENS // BLOCK_TOKENS
        for group in range(GROUPS):
            first = FIRST_OWN_BLOCK + group * blocks
            arrival = (group + 1) * GROUP_SECONDS
            made += [Request(arrival, PROMPT_TOKENS, 100, tuple(range(first, first + blocks)))] * SAMPLES
        return Trace(tuple(sorted(made, key=lambda request: request.arrival)))


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """A trace that is there already."""

    made: Trace

    def trace(self, seed: int) -> Trace:
        return self.made


def measure_samples(groups: SampleGroups, replicas: int, bench: Bench, seed: int) -> Measured:
    """`prefills`: what a group computed, in prompts. `waits`: the longest wait of a sample, in prefills of one."""
    fleet = Fleet(replicas=replicas, cache_tokens=LARGE)
    trial = Trial(Made(groups.trace(bench, seed)), fleet)
    unlimited = replace(bench, limit=None)

    def run(policy: str) -> Figures:
        trips = [trip for trip in unlimited.trips(trial, seed, policy) if trip.request.blocks[:1] >= (FIRST_OWN_BLOCK,)]
        computed = sum(trip.request.input_tokens - trip.cached_tokens for trip in trips)
        longest = max(trip.ttft_seconds or 0.0 for trip in trips)
        return {
            "prefills": computed / PROMPT_TOKENS / GROUPS,
            "waits": longest * fleet.prefill_rate / PROMPT_TOKENS,
        }

    others = {policy: run(policy) for policy in SIMPLE} if bench.with_others else {}
    return Measured(run("cache-cost"), others)


def samples(replicas: int, busy: bool) -> Row:
    traffic = Trial(CONVERSATION, Fleet(replicas=replicas, cache_tokens=LARGE), load=0.3) if busy else None
    return Row(
        name=f"samples-{replicas}{'-busy' if busy else ''}",
        workload=f"{SAMPLES} samples of one 16k prompt at once, {replicas} replicas",
        load="0.3 beside them" if busy else "idle",
        promises=(at_most("prefills", 1.3), at_most("waits", 2.0)),
        measure=partial(measure_samples, SampleGroups(traffic), replicas),
        needs=(CONVERSATION,) if busy else (),
    )


# ---- one slow replica ----------------------------------------------------------------------------------------------

SLOW = replace(BUSY, fleet=Fleet(cache_tokens=LARGE, speeds=(1 / 3,)))
STATIC_WEIGHTS = (1.0, 0.5, 1 / 3, 0.25, 0.15)
"""Of the slow replica, as an operator would write them down."""


@dataclass(frozen=True, slots=True)
class Weighted:
    """A policy that believes in fixed speeds."""

    rates: dict[ReplicaId, float]
    inner: Policy
    name: str = "weighted"
    reads_cache: bool = True
    holds: bool = True

    def costs(self, request: RouteRequest, views: Sequence[ReplicaView], draw: int) -> list[Cost]:
        return self.inner.costs(request, [view._replace(prefill_rate=self.rates[view.replica]) for view in views], draw)


def weighted_router(rates: Sequence[float], settings: RoutingSettings, seed: int) -> Router:
    policy = Weighted({Fleet().url(n): rate for n, rate in enumerate(rates)}, CacheCost())

    class WeightedRouter(Router):
        def decide(self, *given: object, **named: object) -> Decision:
            return super().decide(*given, **{"policy": policy, **named})  # type: ignore[arg-type]

    return WeightedRouter(settings, seed)


def measure_slow(bench: Bench, seed: int) -> Measured:
    """`ratio`: p99 by that of the best hand-tuned way: told the speeds at the start, or fixed weights."""
    fleet = SLOW.fleet
    rates = [fleet.prefill_rate * fleet.speed(place) for place in range(fleet.replicas)]
    others = {"told all speeds": bench.run(SLOW.changed(told_prefill_rates=tuple(rates)), seed)}
    for weight in STATIC_WEIGHTS:
        fixed = [fleet.prefill_rate * weight, *rates[1:]]
        others[f"weight {weight:.2f}"] = bench.run(SLOW, seed, make_router=partial(weighted_router, fixed))
    if bench.with_others:
        others |= {policy: bench.run(SLOW, seed, policy) for policy in SIMPLE}
    return as_ratio(bench.run(SLOW, seed), others, "ttft_p99_s")


# ---- untuned others ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths as in Azure's public traces, and nothing shared: log-normal with the published medians."""

    median_input_tokens: int
    median_output_tokens: int
    requests: int = 6_000
    sigma: float = 1.0
    longest_tokens: int = 8_000

    def trace(self, seed: int) -> Trace:
        random = Random(seed)
        made, now = [], 0.0
        for number in range(self.requests):
            tokens, output = (
                max(1, min(self.longest_tokens, int(median * random.lognormvariate(0.0, self.sigma))))
                for median in (self.median_input_tokens, self.median_output_tokens)
            )
            first = number * self.longest_tokens
            made.append(Request(now, tokens, output, tuple(range(first, first + tokens // BLOCK_TOKENS))))
            now += random.expovariate(20.0)
        return Trace(tuple(made))


OTHERS: tuple[tuple[str, str, Workload, tuple[float, ...]], ...] = (
    ("groups", "8 hot system prompts of 8k, mean 2k private", Synthetic(requests=6_000), (0.7, 1.5, 3.0)),
    ("rag", "retrieval, six passages of a pool in changing order", Rag(requests=6_000), (0.5, 0.9, 1.1)),
    ("samples-of-8", "8 samples of each prompt, in hot groups", Synthetic(requests=6_000, samples=8), (0.7, 1.5, 3.0)),
    ("bursty", "hot groups in waves", Synthetic(requests=6_000, burstiness=10.0), (0.7, 1.5, 3.0)),
    ("azure-chat", "lengths of Azure's chats, nothing shared", Lengths(1_020, 129), (0.5, 0.9)),
    ("azure-code", "lengths of Azure's code completion, nothing shared", Lengths(1_500, 13), (0.5, 0.9)),
)
"""Loads above 1: most of these prompts is cached."""


def untuned() -> list[Row]:
    return [
        Row(
            name=f"{name}-{load:g}",
            workload=f"{text}, 8 replicas, 370k",
            load=f"{load:g}",
            promises=(at_most("ratio", 1.05), Promise("same_order", 1.05, counts=False)),
            measure=partial(against_simple, Trial(workload, Fleet(cache_tokens=SMALL), load)),
        )
        for name, text, workload, loads in OTHERS
        for load in loads
    ]


def against_simple(trial: Trial, bench: Bench, seed: int) -> Measured:
    return bench.against_simple(trial, seed)


# ---- the table -----------------------------------------------------------------------------------------------------


def conversation(name: str, load: float, *promises: Promise, tokens: int = LARGE, any_is_enough: bool = False) -> Row:
    return Row(
        name=name,
        workload=f"Mooncake conversation, 8 replicas, {'1.5M' if tokens == LARGE else '370k'} tokens",
        load=f"{load:g}",
        promises=promises,
        measure=plain(Trial(CONVERSATION, Fleet(cache_tokens=tokens), load)),
        needs=(CONVERSATION,),
        any_is_enough=any_is_enough,
    )


def busy(
    name: str, workload: str, promise: Promise, measure: Callable[[Bench, int], Measured], load: str = "0.8"
) -> Row:
    return Row(name, workload, load, (promise,), measure, (CONVERSATION,))


def scrape(name: str, text: str, **fleet: object) -> Row:
    own, fresh = BUSY.changed(**fleet), BUSY.changed(scrape_seconds=0.1)
    return busy(name, text, at_most("ratio", 1.1), relative(own, "ttft_p90_s", fresh, "every 0.1 s"))


def wrong_capacity(share: float) -> list[Row]:
    agents = CHATS.changed(reported_cache_tokens=int(share * SMALL))
    talk = replace(BUSY, load=1.0)
    wrong = talk.changed(reported_cache_tokens=int(share * LARGE))
    return [
        Row(
            name=f"capacity-{share:g}",
            workload=f"Claude Code chats, replicas report {share:g} of their KV cache",
            load="recorded",
            promises=(at_least("late_hit_pct", 92.0),),
            measure=lambda bench, seed: Measured(bench.run(agents, seed)),
            needs=(AGENTS,),
        ),
        busy(
            f"capacity-{share:g}-conversation",
            f"Mooncake conversation, replicas report {share:g} of their KV cache",
            at_most("ratio", 1.0),
            relative(wrong, "ttft_mean_s", talk, "told the truth"),
            load="1",
        ),
    ]


HOT = Trial(Synthetic(requests=4_000, groups=1), Fleet(replicas=4, cache_tokens=SMALL), 0.7)
RESTARTED = BUSY.changed(restart=Restart(replica=3, at=400.0, down_seconds=30.0))
BACK_AT_ONCE = BUSY.changed(restart=Restart(replica=3, at=400.0, down_seconds=0.2))
"""Between two probes: only another start time tells."""
FAR = replace(BUSY, load=1.2)

ROWS: tuple[Row, ...] = (
    Row(
        name="hot-prompt",
        workload="one 8k system prompt for all, mean 2k private, 4 replicas",
        load="0.7",
        promises=(at_most("request_imbalance", 1.1), at_most("ttft_mean_s", 0.13)),
        measure=plain(HOT),
    ),
    *(samples(replicas, busy) for busy in (False, True) for replicas in (4, 8)),
    *untuned(),
    conversation("conversation-0.5", 0.5, at_most("ttft_mean_s", 0.49), at_least("ceiling_share_pct", 95.0),
                 any_is_enough=True),
    conversation("conversation-1", 1.0, at_most("ttft_mean_s", 0.58, 0.55), at_most("ttft_p99_s", 4.3)),
    conversation("conversation-1.2", 1.2, at_most("ttft_mean_s", 0.72), at_most("ttft_p99_s", 4.9)),
    conversation("conversation-370k-1", 1.0, at_most("ttft_mean_s", 0.85), at_most("ttft_p99_s", 5.4), tokens=SMALL),
    conversation("conversation-370k-1.2", 1.2, at_most("ttft_mean_s", 4.5), tokens=SMALL),
    Row(
        name="agents",
        workload="Claude Code chats, 8 replicas, 370k tokens",
        load="recorded",
        promises=(at_least("hit_pct", 92.5), at_most("ttft_mean_s", 0.38, 0.34)),
        measure=plain(CHATS),
        needs=(AGENTS,),
    ),
    Row(
        name="agents-2x",
        workload="Claude Code chats, 8 replicas, 370k tokens",
        load="twice the recorded",
        promises=(at_most("ttft_mean_s", 1.1),),
        measure=plain(replace(CHATS, speed=2.0)),
        needs=(AGENTS,),
    ),
    busy("slow-replica", "conversation, one of 8 replicas three times slower, untold", at_most("ratio", 1.2),
         measure_slow),
    scrape("scrape-15s", "conversation, scraped every 15 s", scrape_seconds=15.0),
    scrape("scrape-once", "conversation, scraped once, at the start", scrape_seconds=None),
    scrape("scrape-lost", "conversation, no scrape answered after a minute", scrape_fails_at=60.0),
    scrape("scrape-dead", "conversation, no scrape ever answered, capacity unknown", scrape_fails_at=0.0),
    busy("restart", "conversation, a replica restarts with an empty cache", at_most("false_credit_tokens", 0.0),
         lambda bench, seed: Measured(bench.run(RESTARTED, seed))),
    busy("restart-quick", "conversation, a replica is back before a probe notices", at_most("false_credit_tokens", 0.0),
         lambda bench, seed: Measured(bench.run(BACK_AT_ONCE, seed))),
    busy("network", "conversation, 20 ms between gateway and replicas", at_most("ratio", 1.05),
         relative(FAR.changed(network_delay_seconds=0.02), "ttft_mean_s", FAR, "no delay"), load="1.2"),
    *wrong_capacity(0.8),
    *wrong_capacity(1.3),
)  # fmt: skip
"""Quick ones first."""
