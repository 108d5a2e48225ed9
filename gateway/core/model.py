"""The nouns that the core, the data path and the feeds share: small frozen values, no behaviour.

Sizes of prompts are counted in *key bytes*: the bytes of the routing key that `gateway.prompt` builds from a body (text
as the model will see it, or four bytes a token id). How many tokens a byte makes is learned (`core.rates`), so tokens
appear here only where a replica reported them. Times are seconds of one monotonic clock that the caller chooses; rates
are per second. `None` means unknown, never zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple, NewType

ReplicaId = NewType("ReplicaId", str)
"""Base URL of a replica without a trailing slash, e.g. `http://127.0.0.1:8101`."""

BlockHash = NewType("BlockHash", int)
"""Chained 64-bit hash: equal hashes mean equal whole prefixes (model, adapter, salt and kind of prompt included)."""


class Space(Enum):
    """The two disjoint key spaces of prompts. A text never matches a list of token ids."""

    TEXT = "text"
    TOKENS = "tokens"


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """What the core knows about one request. Made once by `gateway.prompt`; retries reuse it."""

    model: str | None = None
    """Requested model or LoRA adapter name; `None` when the body names none (every replica qualifies)."""
    blocks: Sequence[BlockHash] = ()
    """One chained hash for each full prefix block, first block first."""
    length: int = 0
    """Length of the routing key in key bytes, the last partial block included."""
    space: Space = Space.TEXT
    session: str | None = None
    """Key for `session-hash`; `None` when the client sent none (the first two blocks take over)."""
    tenant: str = ""
    priority: int = 0
    """Larger goes first, as the client's own `priority` header or key class says; 0 is normal."""
    max_output_tokens: int | None = None
    samples: int = 1
    """Completions asked for one prompt (`n`)."""
    streams: bool = True
    """The answer comes token by token, so the end of its prefill will be seen."""
    pinned: ReplicaId | None = None
    """The one replica that can serve it (it owns a stored response); no other is ever tried."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One entry of a replica's `/v1/models`."""

    id: str
    created: int = 0
    owned_by: str = ""
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None

    def merged(self, other: ModelCard) -> ModelCard:
        """The same model on two replicas: promise the smaller context, show the earlier creation."""
        lengths = [card.max_model_len for card in (self, other) if card.max_model_len is not None]
        return replace(self, created=min(self.created, other.created), max_model_len=min(lengths, default=None))


@dataclass(frozen=True, slots=True)
class LoadSnapshot:
    """What a replica said about itself in one scrape of `/metrics`, engines of one replica summed."""

    taken_at: float
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    """`vllm:kv_cache_usage_perc`, 0..1: blocks held by running requests. 0 does not mean an empty prefix cache."""
    prefix_queries: int | None = None
    """Prompt tokens looked up in the prefix cache since the replica started (counter)."""
    prefix_hits: int | None = None
    """Prompt tokens found there (counter)."""
    cache_tokens: int | None = None
    """Size of the KV cache in tokens, from `vllm:cache_config_info`."""
    started_at: float | None = None
    """`process_start_time_seconds` (Unix time): a change means a restart, hence an empty cache."""
    asleep: bool | None = None
    """`vllm:engine_sleep_state`: an engine that sleeps answers /health and hangs requests."""


# ---- facts: what feeds report through `Router.observe` -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReplicaAdded:
    replica: ReplicaId
    prefill_rate: float | None = None
    """Seed in uncached tokens per second, from the preset; corrected by what is observed."""


@dataclass(frozen=True, slots=True)
class ReplicaRemoved:
    replica: ReplicaId
    returns: bool = False
    """It is expected back soon: restarted, or moved."""


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """An operator wants the replica to get no new requests (`draining`), or to get them again."""

    replica: ReplicaId
    draining: bool = True


@dataclass(frozen=True, slots=True)
class ModelsListed:
    replica: ReplicaId
    models: tuple[ModelCard, ...]


@dataclass(frozen=True, slots=True)
class LoadReported:
    replica: ReplicaId
    snapshot: LoadSnapshot


@dataclass(frozen=True, slots=True)
class ProbeAnswered:
    """One health probe: `ok`, or why not (one short line, for people)."""

    replica: ReplicaId
    ok: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """The replica restarted or dropped its prefix cache: forget what it held."""

    replica: ReplicaId


@dataclass(frozen=True, slots=True)
class CacheSized:
    """Size of a replica's KV cache, from elsewhere than its metrics."""

    replica: ReplicaId
    cache_tokens: int


@dataclass(frozen=True, slots=True)
class PromptCounted:
    """A replica has counted the tokens of a prompt whose key has `length` bytes."""

    replica: ReplicaId
    model: str | None
    space: Space
    length: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class PauseReported:
    """The engine was told to pause, or to go on: as asleep it answers probes and hangs requests."""

    replica: ReplicaId
    paused: bool


@dataclass(frozen=True, slots=True)
class PeerSent:
    """Another gateway sent a prompt with these blocks there."""

    replica: ReplicaId
    blocks: Sequence[BlockHash]


@dataclass(frozen=True, slots=True)
class PeerReported:
    """What the gateway `peer` has booked there now, and whether it holds the replica ejected."""

    replica: ReplicaId
    peer: str
    in_flight: int
    pending_tokens: float
    """Uncached tokens of its requests that had no first token yet, all of them: how far the replica has come with them
    depends on everybody's."""
    running_tokens: float
    """KV cache that its requests in flight hold."""
    ejected: bool = False
    head_tokens: float = 0.0
    """Of the pending request that it sent first."""
    head_seconds: float = 0.0
    """Since it sent that one."""
    first_token_seconds: float | None = None
    """Since it last saw a first token from there, if that is news."""


@dataclass(frozen=True, slots=True)
class PeerStored:
    """Another gateway has seen the replica store a response under `id`."""

    replica: ReplicaId
    id: str
    tenant: str = ""


PeerFact = PeerSent | PeerReported | PeerStored
Fact = (
    ReplicaAdded
    | ReplicaRemoved
    | DrainRequested
    | ModelsListed
    | LoadReported
    | ProbeAnswered
    | CacheCleared
    | CacheSized
    | PromptCounted
    | PauseReported
    | PeerSent
    | PeerReported
    | PeerStored
)


# ---- decisions -----------------------------------------------------------------------------------------------------


class HealthState(Enum):
    UNKNOWN = "unknown"
    """Added, not yet heard of. Gets requests only when nothing better is there."""
    UP = "up"
    EJECTED = "ejected"
    """Failing; back after its time-out by a probe or one trial request."""
    ASLEEP = "asleep"
    """Asleep or paused: it would hang requests."""


class ReplicaView(NamedTuple):
    """One candidate replica as a row of values, for one request at one time."""

    replica: ReplicaId
    prompt_tokens: float
    """Estimated tokens of this request's prompt."""
    cached_tokens: float
    """Estimated tokens of it that this replica holds (predicted)."""
    pending_tokens: float
    """Uncached prompt tokens booked here whose first token is not out yet, less the progress already made."""
    in_flight: int
    """Requests now at this replica that are ours, or that other gateways reported."""
    in_flight_tokens: float
    """KV cache that those requests hold, shared prefixes once, without what this prompt shares with them."""
    foreign_requests: float
    """Requests there that we did not send, by the last load snapshot, faded with its age."""
    kv_usage: float | None
    """Last scraped, `None` when missing or too old."""
    cache_tokens: float
    """Capacity of the KV cache in tokens (scraped, else the default)."""
    prefill_rate: float
    """Learned uncached prompt tokens per second."""
    eviction_loss: float
    """Expected tokens of later prefill that this request would cause by what it pushes out (`core.prefix_index`)."""
    deserved_tokens: float
    """Uncached tokens inside a prefix that many prompts share and that deserves a copy here (`core.prefix_index`)."""
    started: int
    """Sequence number of the last request sent there (round-robin order)."""
    residence_seconds: float = 5.0
    """Mean duration of a request there: how fast KV cache becomes free."""
    thrift: float = 0.0
    """How dear room in the fleet's caches is, 0..1: 0 where no prompt goes on with another, 1 from where half of them
    do. The same in all views of a request."""
    waiting: float = 0.0
    """Requests waiting in the gateway, for each replica. The same in all views of a request."""


class Cost(NamedTuple):
    """Cost of one view for one request in seconds of predicted wait, lower is better. The parts add up to the total."""

    total: float
    parts: tuple[tuple[str, float], ...]


class Reason(Enum):
    """Why the chosen replica was chosen; a metric label, so a closed set."""

    PINNED = "pinned"
    ONLY = "only"
    """No other candidate."""
    WARM = "warm"
    """It holds the longest match."""
    SPILLED = "spilled"
    """Another holds a longer match, but waiting for it costs more."""
    COLD = "cold"
    """Nobody holds anything of it: the policy's order alone."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Answer of `Router.decide`: candidates in order of preference, best first. Nothing is booked yet."""

    request: RouteRequest
    policy: str
    reason: Reason
    ranking: tuple[tuple[ReplicaView, Cost], ...]
    """At least one candidate."""

    @property
    def replica(self) -> ReplicaId:
        return self.ranking[0][0].replica

    @property
    def view(self) -> ReplicaView:
        return self.ranking[0][0]

    @property
    def cached_tokens(self) -> int:
        """Predicted tokens of the prompt in the chosen replica's prefix cache."""
        return int(self.ranking[0][0].cached_tokens)


class Outcome(Enum):
    """How a flight ended. Health and telemetry read the same value."""

    COMPLETED = "completed"
    CLIENT_LEFT = "client_left"
    REFUSED = "refused"
    """429 or 503 of the replica: back-pressure, not a fault."""
    REJECTED = "rejected"
    """Any other 4xx: the client's fault."""
    FAILED = "failed"
    """Transport fault, time-out, or another 5xx: the replica's fault."""
    UNREACHABLE = "unreachable"
    """No connection could be made: the replica's fault, and nothing was sent."""
    DRAINING = "draining"
    """The replica answered that its engine shuts down, and did nothing."""
    EMPTY = "empty"
    """A stream of choices that ended without one: so some engines that shut down answer."""
    OVERDUE = "overdue"
    """The request's own deadline passed: nobody's fault."""
    STOPPED = "stopped"
    """The gateway itself was stopped before it ended."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts as the replica reported them; `None` where it did not."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None


# ---- errors --------------------------------------------------------------------------------------------------------


class RoutingError(Exception):
    """Base of what `decide` may raise. Whose fault it is decides the status that the proxy answers."""


class NoReplica(RoutingError):
    """No replica can serve this request now (ours to fix: 503). `retry_after` in seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class UnknownModel(RoutingError):
    """No replica lists the model (the client's fault: 404)."""

    def __init__(self, model: str) -> None:
        super().__init__(f"The model `{model}` does not exist.")
        self.model = model


class OwnerGone(RoutingError):
    """The replica that owns the stored response cannot be reached; no other can stand in (503)."""

    def __init__(self, replica: ReplicaId) -> None:
        super().__init__("The replica that holds this response is not available.")
        self.replica = replica


# ---- statistics ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReplicaStatistics:
    """One replica for metrics, dashboards and the dry run."""

    replica: ReplicaId
    health: HealthState
    draining: bool
    available: bool
    """Gets new requests at the moment."""
    models: tuple[ModelCard, ...]
    in_flight: int
    in_flight_tokens: float
    pending_tokens: float
    prefill_rate: float
    cache_tokens: float
    cache_tokens_known: bool
    index_blocks: int
    load: LoadSnapshot | None
    load_age: float | None
    """Seconds since the snapshot was taken."""
    last_failure: str
    in_flight_elsewhere: int = 0
    """Requests there that other gateways report."""
    probe_age: float | None = None
    """Seconds since its last probe ended, well or not."""


@dataclass(frozen=True, slots=True)
class RouterStatistics:
    replicas: tuple[ReplicaStatistics, ...]
    in_flight: int
    waiting: int
    index_blocks: int
    index_capacity_blocks: int
    started: int
    cache_share: float = 1.0
    """Learned share of the reported KV caches that holds prefixes (`core.belief`)."""
    bytes_per_token: dict[str, float] = field(default_factory=dict)
    """Learned key bytes per token, by model."""
    index_bytes: int = 0
    """Estimate of the memory that the index takes."""
    waiting_by: dict[str, int] = field(default_factory=dict)
    """Requests waiting at the gate, by tenant."""
