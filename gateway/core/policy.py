"""Policies: what each thinks of the candidates. One small frozen class each; its fields are its constants.

A policy gets all candidates as views and gives each a cost; the lowest is chosen (`pickers`). To add one: a class with
`name` and `costs` here, and its line in `POLICIES`. Only `cache-cost` is meant for production; the others are baselines
that each leave something out, kept so that its worth can be measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from xxhash import xxh3_64_intdigest

from gateway.core import scorers
from gateway.core.model import Cost, ReplicaView, RouteRequest


class Policy(Protocol):
    """The plug-in point. All of it is pure."""

    @property
    def name(self) -> str: ...
    @property
    def reads_cache(self) -> bool:
        """Whether it reads `eviction_loss` and `deserved_tokens`; they are 0 otherwise (they take time to find)."""
        ...

    @property
    def holds(self) -> bool:
        """Whether requests are bound late (`core.holding`) unless the settings say otherwise."""
        ...

    def costs(self, request: RouteRequest, views: Sequence[ReplicaView], draw: int) -> list[Cost]:
        """One cost for each view, in the same order. `draw` counts requests started: the only source of chance."""
        ...


def single(name: str, value: float) -> Cost:
    return Cost(value, ((name, value),))


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """Whoever got its last request longest ago."""

    name: str = "round-robin"
    reads_cache: bool = False
    holds: bool = False

    def costs(self, request: RouteRequest, views: Sequence[ReplicaView], draw: int) -> list[Cost]:
        return [single("started", float(view.started)) for view in views]


@dataclass(frozen=True, slots=True)
class Random:
    """Anybody. Each request draws anew, so counts differ as chance has it."""

    name: str = "random"
    reads_cache: bool = False
    holds: bool = False

    def costs(self, request: RouteRequest, views: Sequence[ReplicaView], draw: int) -> list[Cost]:
        return [single("draw", xxh3_64_intdigest(view.replica.encode(), draw) / 2**64) for view in views]


@dataclass(frozen=True, slots=True)
class LeastRequests:
    """Fewest requests there, ours and others'."""

    name: str = "least-requests"
    reads_cache: bool = False
    holds: bool = False

    def costs(self, request: RouteRequest, views: Sequence[ReplicaView], draw: int) -> list[Cost]:
        return [single("requests", view.in_flight + view.foreign_requests) for view in views]


@dataclass(frozen=True, slots=True)
class LeastWork:
    """Shortest wait for prefill, blind to who holds the prefix: the honest baseline for what the cache adds."""

    name: str = "least-work"
    reads_cache: bool = False
    holds: bool = False

    def costs(self, request: RouteRequest, views: Sequence[ReplicaView], draw: int) -> list[Cost]:
        return [single("queue", scorers.queue_seconds(view)) for view in views]


@dataclass(frozen=True, slots=True)
class SessionHash:
    """A session stays with its replica (rendezvous hashing), unless that one is crowded; then it goes to its next."""

    name: str = "session-hash"
    reads_cache: bool = False
    holds: bool = False

    bound: float = 1.25
    """A replica with more than this many times the mean of requests takes no further session: the usual bounded
    load."""
    slack: float = 1.0
    """Requests above that which are still fine: with few in flight the mean is a fraction."""

    def costs(self, request: RouteRequest, views: Sequence[ReplicaView], draw: int) -> list[Cost]:
        key = self.key(request)
        if key is None:
            return [single("requests", view.in_flight + view.foreign_requests) for view in views]
        limit = scorers.crowd_requests(views, self.bound, self.slack)
        costs = []
        for view in views:
            place = xxh3_64_intdigest(key + view.replica.encode()) / 2**64
            excess = max(0.0, view.in_flight + view.foreign_requests - limit)
            crowd = 1.0 + excess if excess else 0.0  # behind all that are not crowded, the least crowded first
            costs.append(Cost(place + crowd, (("hash", place), ("crowd", crowd))))
        return costs

    @staticmethod
    def key(request: RouteRequest) -> bytes | None:
        if request.session is not None:
            return b"s" + request.session.encode("utf-8", "surrogatepass") + b"\0"
        if request.blocks:
            return b"b%d " % request.blocks[min(1, len(request.blocks) - 1)]  # chained: stands for both
        return None


@dataclass(frozen=True, slots=True)
class PrefixOnly:
    """Longest match, whatever its queue. Known to send everybody to one replica; ties go to the least work."""

    name: str = "prefix-only"
    reads_cache: bool = False
    holds: bool = False

    wait_weight: float = 1e-6
    """Tokens of match that a second of wait is worth: nothing, but enough to break ties."""

    def costs(self, request: RouteRequest, views: Sequence[ReplicaView], draw: int) -> list[Cost]:
        costs = []
        for view in views:
            missing = view.prompt_tokens - view.cached_tokens
            tie = self.wait_weight * scorers.queue_seconds(view)
            costs.append(Cost(missing + tie, (("missing", missing), ("queue", tie))))
        return costs


@dataclass(frozen=True, slots=True)
class CacheCost:
    """The wait that this request would have, and would cause, at each replica; in seconds, part by part.

    queue     prefill booked there before it, or the wait for KV cache where that is longer (`kv`)
    prefill   a times its own uncached tokens: prefill saved here also serves all who come behind
    evicted   a times the live blocks that it would push out: they are prefill to be done later
    shared    less (a - 0.5) for what many prompts share and deserves a copy here: that is an investment
    pressure  scraped KV usage close to full
    requests  decode of those in flight slows the prefill a little; strangers may still have prefill to do
    crowd     far more requests than the others: decode suffers there, which no prefill saved makes up for
    """

    name: str = "cache-cost"
    reads_cache: bool = True
    holds: bool = True

    copy_weight: float = 0.5
    """Weight of uncached tokens of a prefix that deserves a copy: it is repaid by the next prompts that come. Simulated
    with eight hot system prompts on eight replicas, 1 waited 3 % longer than cache-blind least work, 0.5 and 0.25 1
    to 2 % less, and 0 copied too much; chats and agents did not notice."""
    a: float = 2.0
    a_thrift: float = 4.0
    a_waiting: float = 3.0
    waiting_slack: float = 2.0
    """Weight of own uncached tokens, and how much it grows with the thrift of the fleet (`core.prefix_index`). 1 fills
    idle replicas, much sticks to what is warm. Without prompts that go on 2 to 4 did equally well in simulation; chats
    in a closed loop that just fitted the caches waited 0.65 s with 3, 0.56 with 6, 0.51 with 8, and chats in an open
    loop 3 % longer with 8 than with 6. Where requests wait, prefill saved serves all of them: the growth is up to four
    times as large, in full from two waiting requests a replica on. Simulated overload waited 11 to 19 % less with that
    (conversation and agents), agents in a calm fleet 4 % longer."""
    kv_weight: float = 0.5
    """Share of the predicted wait for KV cache that counts. Stronger made overload worse without holding requests."""
    kv_threshold: float = 0.85
    kv_full_seconds: float = 1.0
    """Scraped KV usage costs from 0.85 on, where preemption begins, up to one second at 1.0."""
    in_flight_tokens: float = 100.0
    """Each of our requests there counts as so many tokens of prefill, for decode slows it down. Simulated engines,
    where it does not, are better off with 0 (short prompts with nothing shared wait 4 % less); 200 cost 5 % more."""
    foreign_tokens: float = 500.0
    """The same for strangers', whose prefill we cannot see."""
    crowd_factor: float = 1.5
    crowd_slack: float = 4.0
    crowd_tokens: float = 2_000.0
    """Each request beyond 1.5 times the mean plus 4 counts as 2,000 tokens: 64 identical prompts do not stay on one."""

    def costs(self, request: RouteRequest, views: Sequence[ReplicaView], draw: int) -> list[Cost]:
        a, in_flight_tokens, foreign_tokens = self.a, self.in_flight_tokens, self.foreign_tokens
        a += self.a_thrift * views[0].thrift * (1.0 + self.a_waiting * min(1.0, views[0].waiting / self.waiting_slack))
        crowd_limit = scorers.crowd_requests(views, self.crowd_factor, self.crowd_slack)
        usages = scorers.known_kv_usage(views)
        costs = []
        for view, usage in zip(views, usages, strict=True):
            rate, in_flight, foreign = view.prefill_rate, view.in_flight, view.foreign_requests
            queue = view.pending_tokens / rate
            prefill = a * (view.prompt_tokens - view.cached_tokens) / rate
            requests = (in_flight_tokens * in_flight + foreign_tokens * foreign) / rate
            total = queue + prefill + requests
            # Most parts are nothing most of the time: then the pair is a constant, and no function is called.
            evicted, shared, kv, pressure, crowd = NOT_EVICTED, NOT_SHARED, NO_KV, NO_PRESSURE, NO_CROWD
            if view.eviction_loss:
                total += (seconds := a * view.eviction_loss / rate)
                evicted = ("evicted", seconds)
            if view.deserved_tokens:
                total += (seconds := (self.copy_weight - a) * view.deserved_tokens / rate)
                shared = ("shared", seconds)
            if (overflow := scorers.kv_overflow_tokens(view)) > 0:
                seconds = self.kv_weight * scorers.kv_wait_seconds(view, overflow)
                if seconds > queue:
                    total += seconds - queue
                    kv = ("kv", seconds - queue)
            if usage > self.kv_threshold:
                total += (seconds := self.kv_full_seconds * (usage - self.kv_threshold) / (1.0 - self.kv_threshold))
                pressure = ("pressure", seconds)
            if in_flight + foreign > crowd_limit:
                total += (seconds := self.crowd_tokens * (in_flight + foreign - crowd_limit) / rate)
                crowd = ("crowd", seconds)
            parts = (
                ("queue", queue),
                ("prefill", prefill),
                evicted,
                shared,
                kv,
                pressure,
                ("requests", requests),
                crowd,
            )
            costs.append(Cost(total, parts))
        return costs


NOT_EVICTED = ("evicted", 0.0)
NOT_SHARED = ("shared", 0.0)
NO_KV = ("kv", 0.0)
NO_PRESSURE = ("pressure", 0.0)
NO_CROWD = ("crowd", 0.0)


POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        RoundRobin(),
        Random(),
        LeastRequests(),
        LeastWork(),
        SessionHash(),
        PrefixOnly(),
        CacheCost(),
    )
}


def policy_named(name: str) -> Policy:
    """Raises `ValueError` for a name that no policy has."""
    try:
        return POLICIES[name]
    except KeyError:
        raise ValueError(f"unknown policy {name!r}; one of {', '.join(POLICIES)}") from None
