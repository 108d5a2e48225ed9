"""What a simulation runs on: the replicas, the way to them, and how much the gateway is told about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.core.model import ReplicaId
from loadtests.traces import BLOCK_TOKENS, Request
from workers.engine_model import EngineModel, EngineSettings

if TYPE_CHECKING:
    from loadtests.virtual_gateway import Trip

INFINITY = float("inf")


@dataclass(frozen=True, slots=True)
class Restart:
    """One replica dies and comes back with an empty cache."""

    replica: int
    at: float
    down_seconds: float = 30.0

    @property
    def back_at(self) -> float:
        return self.at + self.down_seconds


@dataclass(frozen=True, slots=True)
class GatewayRestart:
    """One gateway gets no more requests, ends with those that it has, and another takes its place, knowing nothing."""

    gateway: int
    at: float
    down_seconds: float = 2.0

    @property
    def back_at(self) -> float:
        return self.at + self.down_seconds


@dataclass(frozen=True, slots=True)
class Sharing:
    """Several gateways tell each other what they do, as live ones do through Redis."""

    delay_seconds: float = 0.0
    """From telling to hearing, beside the rounds."""
    loss: float = 0.0
    """Share of what is told that nobody ever hears."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Replicas and the way to them. The defaults are one generic large GPU, eight times."""

    replicas: int = 8
    urls: tuple[str, ...] = ()
    """Of the replicas, where ties must be broken as they are elsewhere: who is drawn depends on them."""
    cache_tokens: int = 1_500_000
    """KV cache of each replica."""
    reported_cache_tokens: int | None = None
    """What it reports, where that is not the truth."""
    block_tokens: int = BLOCK_TOKENS
    """Of a cache block, and of a block of the traffic."""
    text_bytes_per_token: float | None = None
    """Prompts are text with so many key bytes for each token, which a gateway has to learn, cut into its own prefix
    blocks; `None`: token ids, in blocks of the traffic."""
    prefill_rate: float = 20_000.0
    """Uncached prompt tokens per second."""
    attention_tokens: float | None = None
    """A token with so many before it takes twice as long to prefill as the first. `None`: all take the same."""
    decode_rate: float = 60.0
    """Tokens per second of each request."""
    max_num_seqs: int = 64
    first_token_floor_seconds: float = 0.03
    """Least time from leaving the engine's queue to the first token. It delays the token, not the next prefill."""
    decode_slowdown: float = 0.0
    """Share by which each further decoding request lengthens a step."""
    step_tokens: int | None = None
    """Tokens of a step that prefill and decode share, each slowing the other; `None`: they do not."""
    preempts: bool = False
    """An answer takes KV cache as it is generated, and may lose it again; otherwise all of it is reserved at first."""
    cache_answers: bool = False
    """Generated tokens fill prefix blocks, with the ids that the session's next prompt has in their place. True of
    chats that repeat every answer word for word."""
    shared_processor: bool = False
    """All replicas run on one machine: each gets an equal share of its speed while several are busy."""
    full_speed_replicas: float = 1.0
    """So many of them may be busy before they slow each other down; with `shared_processor`. Below 1 they lose time by
    taking turns: together they do less than one alone."""
    speeds: tuple[float, ...] = ()
    """How many times faster each replica is than that, first replica first; 1 where none is given."""
    network_delay_seconds: float = 0.0
    """Between gateway and replica, each way."""
    scrape_seconds: float | None = 0.5
    """As in the gateway's configuration; `None`: capacity is told once, load never."""
    probe_seconds: float = 1.0
    """As in the gateway's configuration. Without a restart every probe would be answered, and none is sent."""
    scrape_delay_seconds: float = 0.0
    """Age of a load snapshot when the gateway gets it."""
    scrape_fails_at: float = INFINITY
    """From then on no scrape is answered; 0: nothing is ever told, capacity included."""
    told_prefill_rates: tuple[float | None, ...] = ()
    """What the gateway is told about the prefill of each replica, as presets would; it learns in any case. Where none
    is given the first counts for all."""
    restart: Restart | None = None
    gateways: int = 1
    """Requests are dealt to them in turn."""
    shared_state: bool = False
    """Several gateways know the same at once, so they decide as one. Otherwise each knows its own sends, and what the
    replicas say; and with `sharing` what the others tell."""
    sharing: Sharing | None = None
    gateway_restarts: tuple[GatewayRestart, ...] = ()

    def url(self, place: int) -> ReplicaId:
        return ReplicaId(self.urls[place] if place < len(self.urls) else f"http://replica-{place}:8000")

    def speed(self, place: int) -> float:
        return self.speeds[place] if place < len(self.speeds) else 1.0

    def told_prefill_rate(self, place: int) -> float | None:
        told = self.told_prefill_rates
        return (told[place] if place < len(told) else told[0]) if told else None

    def share_of_each(self, busy: int) -> float:
        """Share of its full speed that each replica has while so many are busy."""
        return min(1.0, self.full_speed_replicas / busy) if self.shared_processor and busy > 1 else 1.0

    @property
    def total_prefill_rate(self) -> float:
        if self.shared_processor:
            return self.prefill_rate * min(self.replicas, self.full_speed_replicas)
        return self.prefill_rate * sum(self.speed(place) for place in range(self.replicas))

    @property
    def deciders(self) -> int:
        """Gateways that know different things."""
        return 1 if self.shared_state else self.gateways

    def engine(self, place: int) -> EngineModel:
        settings = EngineSettings(
            cache_tokens=self.cache_tokens,
            block_size=self.block_tokens,
            prefill_rate=self.prefill_rate * self.speed(place),
            attention_tokens=self.attention_tokens,
            decode_rate=self.decode_rate * self.speed(place),
            max_num_seqs=self.max_num_seqs,
            first_token_floor_seconds=self.first_token_floor_seconds,
            decode_slowdown=self.decode_slowdown,
            step_tokens=self.step_tokens,
            preempts=self.preempts,
        )
        return EngineModel(settings)


class Station:
    """One replica: its engine while it is up, and who is there."""

    __slots__ = ("engine", "id", "lost_preemptions", "started_at", "trips")

    def __init__(self, id: ReplicaId, engine: EngineModel) -> None:
        self.id = id
        self.engine: EngineModel | None = engine
        self.trips: dict[Trip, None] = {}
        self.started_at = 0.0
        self.lost_preemptions = 0
        """Of engines that are gone."""

    @property
    def is_busy(self) -> bool:
        return self.engine is not None and self.engine.running > 0

    def preemptions(self, now: float) -> int:
        return self.lost_preemptions + (self.engine.statistics(now).preemptions if self.engine is not None else 0)

    def die(self, now: float) -> dict[Trip, None]:
        """Its engine is gone. Returns who was there."""
        self.lost_preemptions = self.preemptions(now)
        lost, self.trips, self.engine = self.trips, {}, None
        return lost


def answers_of(requests: Sequence[Request], block_tokens: int) -> list[tuple[int, ...]]:
    """Ids of the blocks that each request's answer completes, read from the session's next prompt if that continues
    this one."""
    answers: list[tuple[int, ...]] = [()] * len(requests)
    last_of: dict[str, int] = {}
    for number, request in enumerate(requests):
        if request.session is None:
            continue
        before = last_of.get(request.session)
        last_of[request.session] = number
        if before is not None:
            last = requests[before]
            end, size = last.input_tokens + last.output_tokens, len(last.blocks)
            if request.input_tokens >= end and request.blocks[:size] == last.blocks:
                answers[before] = request.blocks[size : end // block_tokens]
    return answers
