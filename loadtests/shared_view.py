"""How several gateways hear of each other in virtual time: the rounds of live gateways, without Redis.

What is told, when, and what is believed of it comes from `gateway.core.sharing`, as in the live feed. Here it is only
carried: later by the delay, or not at all, and kept as the bounded stream that a gateway reads when it starts.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from random import Random

from gateway.core.model import PeerFact, PeerSent
from gateway.core.sharing import ROUND_SECONDS, Journal, Outbox, credible
from loadtests.fleet import Sharing
from loadtests.virtual_gateway import Gateway, Timers

STREAM_BYTES = 64 * 2**20
"""As in the gateway's configuration (`memory_mib`)."""
HASH_BYTES = 8
BUNDLE_BYTES = 256
"""Of a bundle without its hashes: seal, reports of some replicas, what Redis adds."""


@dataclass(frozen=True, slots=True, eq=False)
class Told:
    """One bundle in the stream."""

    by: Gateway
    at: float
    facts: list[PeerFact]
    bytes: int


class SharedView:
    """What goes between the gateways that have joined."""

    def __init__(self, sharing: Sharing, timers: Timers, seed: int, hashes_of_block: float = 1.0) -> None:
        """`hashes_of_block`: prefix blocks of a live gateway in one block of the trace."""
        self._sharing = sharing
        self._timers = timers
        self._random = Random(seed)
        self._block_bytes = HASH_BYTES * hashes_of_block
        self._outboxes: dict[Gateway, Outbox] = {}
        self._stream: deque[Told] = deque()
        self._bytes = 0.0
        self._joined = 0

    @property
    def members(self) -> list[Gateway]:
        return list(self._outboxes)

    def join(self, gateway: Gateway, now: float) -> None:
        """Reads what the stream still has, and takes part from now on."""
        self._joined += 1
        journal = gateway.router.journal = Journal()
        self._outboxes[gateway] = Outbox(journal, partial(gateway.router.report_to_peers, f"gateway-{self._joined}"))
        gateway.router.cut_off = self._sharing.loss >= 1.0
        for told in self._stream:
            if self._arrival(told) <= now:
                self._hear(gateway, told, now, age=now - told.at)

    def leave(self, gateway: Gateway) -> None:
        del self._outboxes[gateway]

    def round(self, now: float) -> None:
        """Everybody says what is new."""
        for gateway, outbox in self._outboxes.items():
            for facts in outbox.bundles(now):
                if self._random.random() >= self._sharing.loss:
                    self._tell(Told(gateway, now, facts, self._size(facts)))

    def _tell(self, told: Told) -> None:
        self._stream.append(told)
        self._bytes += told.bytes
        while self._bytes > STREAM_BYTES:
            self._bytes -= self._stream.popleft().bytes
        self._timers.at(self._arrival(told), partial(self._arrived, told))

    def _arrival(self, told: Told) -> float:
        """The others hear it when they ask next."""
        return told.at + ROUND_SECONDS + self._sharing.delay_seconds

    def _arrived(self, told: Told, now: float) -> None:
        for gateway in self._outboxes:
            self._hear(gateway, told, now, age=0.0)

    def _hear(self, gateway: Gateway, told: Told, now: float, age: float) -> None:
        """`age`: as the live feed knows it. What is merely late looks new there."""
        if gateway is not told.by:
            gateway.observe(credible(told.facts, age), now - age)

    def _size(self, facts: list[PeerFact]) -> int:
        blocks = sum(len(fact.blocks) for fact in facts if isinstance(fact, PeerSent))
        return BUNDLE_BYTES + int(blocks * self._block_bytes)
