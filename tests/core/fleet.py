"""A fleet for stories: a real router, replicas that are up, and a clock moved by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from random import Random

from gateway.core.blocks import block_hashes, seed_of
from gateway.core.flight import Flight
from gateway.core.model import (
    Decision,
    LoadReported,
    LoadSnapshot,
    ModelCard,
    ModelsListed,
    Outcome,
    ProbeAnswered,
    ReplicaAdded,
    ReplicaId,
    ReplicaStatistics,
    ReplicaView,
    RouteRequest,
    Space,
    Usage,
)
from gateway.core.router import Router
from gateway.core.settings import RoutingSettings

BLOCK_BYTES = 512
"""About 128 tokens of text: the stories count in blocks of this size."""
BLOCK_TOKENS = 128
"""At the four bytes a token that a router assumes until it knows better."""
ANYTHING = RouteRequest()
SEED = seed_of("tiny", None, None, Space.TEXT)


def text(random: Random, blocks: int) -> bytes:
    return random.randbytes(blocks * BLOCK_BYTES)


def ask(key: bytes, **more: object) -> RouteRequest:
    """A request whose routing key is `key`."""
    return RouteRequest(blocks=block_hashes(key, SEED, BLOCK_BYTES, 1 << 20), length=len(key), **more)  # type: ignore[arg-type]


class Fleet:
    def __init__(
        self, count: int, policy: str = "cache-cost", *, up: bool = True, seed: int = 0, **settings: int
    ) -> None:
        self.router = Router(RoutingSettings(policy=policy, block_bytes=BLOCK_BYTES, **settings), seed)
        self.now = 0.0
        self.replicas = [ReplicaId(f"http://r{i}:8000") for i in range(count)]
        self.sent: Counter[ReplicaId] = Counter()
        for replica in self.replicas:
            self.router.observe(ReplicaAdded(replica), self.now)
            if up:
                self.probe(replica)

    def probe(self, replica: ReplicaId, ok: bool = True) -> None:
        self.router.observe(ProbeAnswered(replica, ok), self.now)

    def lists(self, replica: ReplicaId, *models: str) -> None:
        self.router.observe(ModelsListed(replica, tuple(ModelCard(model) for model in models)), self.now)

    def reports(self, replica: ReplicaId, **values: object) -> None:
        snapshot = LoadSnapshot(taken_at=self.now, **values)  # type: ignore[arg-type]
        self.router.observe(LoadReported(replica, snapshot), self.now)

    def decide(self, request: RouteRequest, exclude: Collection[ReplicaId] = (), policy: str | None = None) -> Decision:
        return self.router.decide(request, self.now, exclude, policy)

    def send(self, request: RouteRequest, exclude: Collection[ReplicaId] = ()) -> Flight:
        flight = self.router.start(self.decide(request, exclude), self.now)
        self.sent[flight.replica] += 1
        return flight

    def complete(self, flight: Flight, usage: Usage | None = None, seconds: float = 0.0) -> None:
        """First token after `seconds`, then the end."""
        self.now += seconds
        flight.first_token(self.now)
        flight.finish(Outcome.COMPLETED, self.now, usage)

    def serve(self, request: RouteRequest) -> ReplicaId:
        """One request alone, from beginning to end, served as fast as the router expects, a second later the next."""
        decision = self.decide(request)
        flight = self.send(request)
        view = decision.view
        seconds = (view.prompt_tokens - view.cached_tokens) / view.prefill_rate + 0.015
        self.complete(flight, seconds=seconds)
        self.now += 1.0
        return flight.replica

    def send_to(self, replica: ReplicaId, request: RouteRequest) -> Flight:
        """Force it there, whatever the policy thinks."""
        return self.send(request, exclude=[other for other in self.replicas if other != replica])

    def view(self, replica: ReplicaId, request: RouteRequest = ANYTHING) -> ReplicaView:
        return next(view for view, _ in self.decide(request).ranking if view.replica == replica)

    def statistics(self, replica: ReplicaId) -> ReplicaStatistics:
        return next(one for one in self.router.statistics(self.now).replicas if one.replica == replica)

    @property
    def imbalance(self) -> float:
        """Busiest over mean, by requests sent."""
        return max(self.sent.values()) * len(self.replicas) / sum(self.sent.values())
