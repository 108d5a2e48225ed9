"""One replica as the router sees it: what it says of itself and what its flights show, put together.

The index of its cache is a belief. It ends when the replica restarted, slept, or came back from an ejection without
proof that it is the same process; and when it says several times in a row that nothing was cached where much was
predicted. Whether the index is as large as the cache, hits and misses tell as well (`core.belief`).
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.core.belief import CacheShare, differs
from gateway.core.health import Health
from gateway.core.load import Load
from gateway.core.model import BlockHash, HealthState, LoadSnapshot, ModelCard, Outcome, PeerReported, ReplicaId
from gateway.core.prefix_index import Record, ReplicaIndex
from gateway.core.rates import BYTES_PER_TOKEN, PrefillRate
from gateway.core.scorers import OUTPUT_RESERVE_TOKENS
from gateway.core.sharing import PeerLoads

ANSWER_TOKENS = OUTPUT_RESERVE_TOKENS / 2
"""KV cache that the answer of a request in flight takes: half of what it will in the end."""
MISSES_TO_CLEAR = 5
"""So many answers in a row without any cached token, where many were predicted, mean that the cache was emptied."""
MISS_TOKENS = 512
"""Predicted cached tokens below which a miss proves nothing: less than that, the engine's block alignment may eat
it."""
MIX_STEP = 0.05
"""Bytes per token of a replica: moving mean over its last twenty flights, of whatever models and kinds of prompt. The
first ones weigh more, the later of them most, for the ratio of the model is itself being learned then: on a GPU, with
text of 1.7 bytes a token, a capacity that stayed too large for forty flights made every prediction of hits wrong."""
SETTLED_FLIGHTS = 20
"""Before so many, what was not predicted says that bytes per token are still a guess, and nothing of the cache's size.
Taken for its size, on real engines with text of 6.8 bytes a token, it left predicted hits half as high again as the
real ones until the end of a run of 50 s."""
SETTLING_SECONDS = 10.0
"""After a return: about twice a mean request, so that those sent since have begun to end."""
MINIMUM_CACHE_TOKENS = 512
"""No engine serves with less; who reports it reports nonsense, and would get one request at a time."""
RESIZE_SHARE = 0.01
"""Capacity in blocks follows the learned bytes per token in steps of 1 %, so that the index is not resized all the
time."""


class Replica:
    """One replica: health, load, speed, models, and what its cache is believed to hold."""

    __slots__ = (
        "_asleep",
        "_block_bytes",
        "_bytes_per_token",
        "_misses",
        "_mixed",
        "_paused",
        "_proven_at",
        "_share",
        "cache_tokens",
        "cache_tokens_known",
        "draining",
        "health",
        "id",
        "index",
        "load",
        "model_ids",
        "models",
        "probed_at",
        "rate",
        "settling_until",
        "started",
    )

    def __init__(
        self,
        id: ReplicaId,
        index: ReplicaIndex,
        rate: PrefillRate,
        cache_tokens: float,
        block_bytes: int,
        share: CacheShare,
    ) -> None:
        self.id = id
        self.index = index
        self.rate = rate
        self.load = Load()
        self.health = Health(id)
        self.draining = False
        self.settling_until = float("-inf")
        """It came back a moment ago (`core.settling`)."""
        self._asleep = self._paused = False
        self.models: tuple[ModelCard, ...] | None = None
        """`None` until it listed them."""
        self.model_ids: frozenset[str] = frozenset()
        self.started = 0
        """Sequence number of the last request sent there."""
        self.cache_tokens = cache_tokens
        self.cache_tokens_known = False
        self._block_bytes = block_bytes
        self._share = share
        self._bytes_per_token = BYTES_PER_TOKEN
        self._mixed = 0
        self._misses = 0
        self.probed_at: float | None = None
        self._proven_at: float | None = None
        """When a scrape last showed that it is still the same process."""
        self._fit_index()

    def __repr__(self) -> str:
        return f"<Replica {self.id} {self.health.state.value}, {self.load!r}, {self.index!r}>"

    def serves(self, model: str) -> bool:
        return model in self.model_ids

    # ---- what it says of itself ------------------------------------------------------------------------------------

    def probed(self, ok: bool, reason: str, now: float) -> None:
        self.probed_at = now
        was_ejected = self.health.state is HealthState.EJECTED
        if self.health.probe(ok, reason, now) and was_ejected:
            self._returned(now)

    def list_models(self, models: tuple[ModelCard, ...], now: float) -> None:
        self.models = models
        self.model_ids = frozenset(card.id for card in models)
        self.health.heard(now)

    def report(self, snapshot: LoadSnapshot, now: float) -> None:
        """Take a load snapshot, unless it is older than the last."""
        last = self.load.snapshot
        if last is not None and snapshot.taken_at < last.taken_at:
            return
        if last is not None and is_restart(last, snapshot):
            self.clear()
            self._proven_at = None
        elif last is not None and last.started_at is not None and last.started_at == snapshot.started_at:
            self._proven_at = now
        self.load.report(snapshot)
        if self.models is not None:  # a page that came before the first list says nothing of what it serves
            self.health.heard(now)
        if snapshot.asleep is not None:
            self._asleep = snapshot.asleep
            self._rest(now)
        if snapshot.cache_tokens is not None:
            self._size_cache(snapshot.cache_tokens)

    def cache_sized(self, cache_tokens: int) -> None:
        """Said elsewhere than in its metrics, which know better."""
        last = self.load.snapshot
        if last is None or last.cache_tokens is None:
            self._size_cache(cache_tokens)

    def _size_cache(self, cache_tokens: int) -> None:
        if cache_tokens >= MINIMUM_CACHE_TOKENS:
            self.cache_tokens = float(cache_tokens)
            self.cache_tokens_known = True
            self._fit_index()

    def pause(self, paused: bool, now: float) -> None:
        self._paused = paused
        self._rest(now)

    def _rest(self, now: float) -> None:
        if self.health.sleep(self._asleep or self._paused, now):
            self.clear()  # sleep discards the KV cache

    # ---- what other gateways say of it ------------------------------------------------------------------------------

    def sent_by_peer(self, blocks: Sequence[BlockHash], now: float) -> None:
        """Another gateway sent a prompt here. What it holds of the cache while it runs comes with that one's report."""
        _, record = self.index.touch(blocks, now)
        if record is not None:
            self.index.ended(record)

    def reported_by_peer(self, fact: PeerReported, now: float) -> None:
        if self.load.peers is None:
            self.load.peers = PeerLoads()
        if self.load.peers.report(fact, now):
            self.health.doubted()

    def report_to_peers(self, name: str, now: float) -> PeerReported:
        """Our own part of its load alone."""
        block_tokens = self._block_bytes / self._bytes_per_token
        tokens, head_tokens, head_seconds, first_token_seconds = self.load.pending(now, self.rate.value)
        return PeerReported(
            self.id,
            name,
            self.load.in_flight,
            tokens,
            self.index.live * block_tokens + ANSWER_TOKENS * self.load.in_flight,
            self.health.state is HealthState.EJECTED,
            head_tokens,
            head_seconds,
            first_token_seconds,
        )

    def running_tokens(self, block_tokens: float, now: float) -> float:
        """KV cache that requests in flight hold: their prompts, shared prefixes once, and half of their answers."""
        own = self.index.live * block_tokens + ANSWER_TOKENS * self.load.in_flight
        return own if self.load.peers is None else own + self.load.peers.running_tokens(now)

    # ---- what its flights show -------------------------------------------------------------------------------------

    def flight_ended(self, outcome: Outcome, started_at: float, now: float, *, known: bool = False) -> bool:
        """Returns whether the state of its health changed. `known`: it had answered what the prompt begins with."""
        match outcome:
            case Outcome.COMPLETED:
                self.load.accepted()
                was_ejected = self.health.state is HealthState.EJECTED
                changed = self.health.flight_completed(started_at, now, known=known)
                if changed and was_ejected:
                    self._returned(now)
                return changed
            case Outcome.FAILED:
                return self.health.flight_failed(started_at, now)
            case Outcome.UNREACHABLE:
                return self.health.flight_failed(started_at, now, reached=False)
            case Outcome.DRAINING:
                return self.health.flight_drained(now)
            case Outcome.EMPTY:
                return self.health.flight_empty(now)
            case Outcome.REFUSED:
                self.load.refused(now)
        self.health.flight_ended()
        return False

    def mix_bytes_per_token(self, ratio: float) -> None:
        """A flight's prompt had so many key bytes for each token."""
        self._mixed += 1
        self._bytes_per_token += max(MIX_STEP, 2.0 / (self._mixed + 1)) * (ratio - self._bytes_per_token)
        self._fit_index()

    def check_belief(self, record: Record | None, predicted_tokens: float, cached_tokens: int) -> bool:
        """Compare what was predicted to be cached with what was; a cache that shows nothing at all was emptied.

        Returns whether the fleet's share of cache that holds prefixes has changed.
        """
        if predicted_tokens >= MISS_TOKENS:
            self._misses = 0 if cached_tokens else self._misses + 1
            if self._misses >= MISSES_TO_CLEAR:
                self.clear()
        if record is None or not cached_tokens or self._mixed < SETTLED_FLIGHTS:
            return False
        if not differs(predicted_tokens, cached_tokens):
            return False
        depth = self._shown_depth(record, missed=cached_tokens < predicted_tokens)
        if depth is None:
            return False
        self._share.learn(depth / self.index.capacity)
        return True

    def _shown_depth(self, record: Record, missed: bool) -> int | None:
        """Depth at which a wrong prediction shows that its cache ends before (`missed`), or goes on."""
        index = self.index
        if not missed:
            return None if record.evicted_at is None else index.capacity + index.evicted - record.evicted_at
        depth = 0 if record.matched_at is None else index.depth(record.matched_at)
        return depth if 0 < depth < index.capacity else None

    def prefill_seconds(self, blocks: float) -> float:
        """Its prefill of so many blocks that are not cached."""
        return blocks * self._block_bytes / self._bytes_per_token / self.rate.value

    def clear(self) -> None:
        """Its cache is empty now."""
        self.index.clear()
        self._misses = 0

    def _returned(self, now: float) -> None:
        """Back from ejection: cold, unless a scrape since then showed that it is the same process."""
        self.settling_until = now + SETTLING_SECONDS
        if self._proven_at is None or self._proven_at < self.health.ejected_at:
            self.clear()

    def resize_index(self) -> bool:
        """The index holds as many blocks as the KV cache, as far as that holds prefixes. Returns whether that changed
        its capacity: then memory has to be shared anew."""
        blocks = max(1, int(self._share.value * self.cache_tokens * self._bytes_per_token / self._block_bytes))
        if abs(blocks - self.index.capacity) <= RESIZE_SHARE * self.index.capacity:
            return False
        self.index.capacity = blocks
        return True

    def _fit_index(self) -> None:
        if self.resize_index():
            self.index.fit(self.index.capacity)


def is_restart(last: LoadSnapshot, new: LoadSnapshot) -> bool:
    """Another start time, or a counter that runs backwards."""
    if last.started_at is not None and new.started_at is not None and last.started_at != new.started_at:
        return True
    pairs = ((last.prefix_queries, new.prefix_queries), (last.prefix_hits, new.prefix_hits))
    return any(before is not None and after is not None and after < before for before, after in pairs)
