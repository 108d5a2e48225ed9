"""Late binding: a request is sent only when its replica can begin with it, and waits in the gateway until then.

A queue inside an engine is first come, first served and final. A queue here is neither: short requests may overtake
long ones, a replica that turns out faster takes more, a client that leaves has cost nobody anything, and a dead replica
has little to lose. So a replica gets no more prefill than keeps it busy until the next word from it arrives, and no
prompt that its KV cache has no room for. Who is held still counts: in the same planning his replica is promised to him,
in work and in KV cache, so that others look elsewhere first.

How fast a replica is, is learned, and at first a guess. While it is, more is sent ahead: to hold back too much costs
idle engines, to hold back too little costs only the order.
"""

from __future__ import annotations

from gateway.core.model import ReplicaId, ReplicaView
from gateway.core.replica import Replica
from gateway.core.scorers import OUTPUT_RESERVE_TOKENS

SLOT_SECONDS = 0.05
"""Prefill sent ahead: covers the way there and back and what the engine adds to a step. In simulation, without what
follows, 0.03 did as well, and 0.1 waited 1 to 2 % longer in the mean."""
STEP_TOKENS = 4_096.0
"""... but no less than this, which is more for replicas below 82,000 tokens a second: an engine prefills several
prompts in one step, up to its `--max-num-batched-tokens` (by default 2,048 to 8,192), and all have their first token
at its end. Whoever is held until then misses the step: on four replicas sharing an H200 warm requests waited 0.36 s
instead of 0.30. Simulated engines, which prefill one by one, wait 1 to 3 % longer than with 2,048."""
STEP_CACHE_SHARE = 1 / 16
"""... and no more than this share of the KV cache: a request that is sent takes its room at once, from prefixes that
those who wait could have used. Simulated with caches of 16,384 tokens, 4,096 sent ahead waited 6 % longer than 1,024,
and found 50.3 % cached instead of 51.9 %."""
GUESS_SECONDS = 1.0
"""Sent ahead in addition as long as nothing was learned of the replica's rate; halved by each lesson."""
PATIENCE = 4.0
MINIMUM_PATIENCE_SECONDS = 2.0
"""Somebody may be overtaken until he waited so many times as long as serving all who wait would take, in any order.
Without an end to it, chats that fell out of the caches of an overloaded fleet were passed by warm ones until they were
shed after a minute. Simulated with twice the prefixes that the caches hold: mean and 99th percentile 12.8 and 18 s
first come, first served; 12.3 and 17 with 2; 10.6 and 22 with 4; 9.3 and 29 with 6; 6.8 and 49 without an end; requests
a second 2.84, 2.89, 3.15, 3.38, 3.68."""
PATIENCE_SHARE = 0.5
"""... and that end comes at half the time after which he is shed: his own prefill is part of that backlog, and a prompt
of more than a quarter of that time was passed by small ones until then."""
PLAN_REQUESTS = 16
"""Waiting requests of each lane that are looked at in one planning, and one more for each replica. 48 changed nothing.
A lane is a model, or the replica that a request is pinned to: those who wait for one model's busy replicas must not
hide those whose replica is idle."""

TICK_SECONDS = 0.001
"""Least time until a planning is worth repeating: what is due sooner than this is due by a rounding error."""


class Promises:
    """Prefill and KV cache that replicas owe to those who wait for them; made anew for each planning."""

    __slots__ = ("_prompt_tokens", "_uncached_tokens")

    def __init__(self) -> None:
        self._uncached_tokens: dict[ReplicaId, float] = {}
        self._prompt_tokens: dict[ReplicaId, float] = {}

    def __bool__(self) -> bool:
        return bool(self._prompt_tokens)

    def promise(self, view: ReplicaView) -> None:
        """The request whose view this is waits for that replica."""
        id = view.replica
        uncached = view.prompt_tokens - view.cached_tokens
        self._uncached_tokens[id] = self._uncached_tokens.get(id, 0.0) + uncached
        self._prompt_tokens[id] = self._prompt_tokens.get(id, 0.0) + view.prompt_tokens

    def seen(self, view: ReplicaView) -> ReplicaView:
        """The view with what is promised there counted as if it were sent."""
        promised = self._prompt_tokens.get(view.replica)
        if promised is None:
            return view
        return view._replace(
            pending_tokens=view.pending_tokens + self._uncached_tokens[view.replica],
            in_flight_tokens=view.in_flight_tokens + promised,
        )


def slot_tokens(replica: Replica) -> float:
    """Prefill that may be pending at a replica when the next request is sent there."""
    seconds = SLOT_SECONDS + GUESS_SECONDS * 0.5**replica.rate.lessons
    return max(seconds * replica.rate.value, min(STEP_TOKENS, STEP_CACHE_SHARE * replica.cache_tokens))


def is_free(replica: Replica, now: float) -> bool:
    """It could begin with something now."""
    rate = replica.rate.value
    return replica.load.pending_tokens(now, rate) <= slot_tokens(replica)


def has_room(view: ReplicaView) -> bool:
    """The prompt fits beside those in flight (and promised) there; alone it always does."""
    if not view.in_flight:
        return True
    return view.in_flight_tokens + view.prompt_tokens + OUTPUT_RESERVE_TOKENS <= view.cache_tokens


def free_in(replica: Replica, now: float) -> float | None:
    """Seconds until it is free if nothing is heard from it before; `None`: it will not be."""
    return replica.load.seconds_until(slot_tokens(replica), now, replica.rate.value)
