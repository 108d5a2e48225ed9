"""What whoever runs the replicas hears of them from a real router, and does to it."""

from __future__ import annotations

from random import Random

import pytest

from gateway.core.model import Fact, ModelCard, ModelsListed, NoReplica, Outcome, ProbeAnswered, ReplicaId, RouteRequest
from gateway.core.router import Router
from gateway.core.settings import RoutingSettings
from gateway.feeds.addresses import Allowlist
from gateway.feeds.discovery import Discovery
from gateway.feeds.registry import Registry
from gateway.feeds.replicas import Replicas
from gateway.own_replicas import OwnReplicas
from tests.core.fleet import BLOCK_BYTES, ask, text

ONE, TWO = ReplicaId("http://127.0.0.1:8101"), ReplicaId("http://127.0.0.1:8102")


class Setting:
    def __init__(self) -> None:
        self.now = 0.0
        self.router = Router(RoutingSettings(block_bytes=BLOCK_BYTES, default_prefill_rate=128.0))
        self.discovery = Discovery(Replicas(), self.observe, static={})
        self.registry = Registry(Allowlist([]), self.discovery.note_registered, self.discovery.is_configured, None)
        self.own = OwnReplicas(self.router, self.discovery, self.registry, lambda: self.now)

    def observe(self, fact: Fact) -> None:
        self.router.observe(fact, self.now)

    def up(self, replica: ReplicaId, *models: str) -> None:
        self.own.join(replica, 128.0)
        self.observe(ModelsListed(replica, tuple(ModelCard(model) for model in models or ("m",))))
        self.observe(ProbeAnswered(replica, True))

    def send(self, request: RouteRequest):
        return self.router.start(self.router.decide(request, self.now), self.now)


@pytest.fixture
def setting() -> Setting:
    return Setting()


def test_one_that_joined_is_tried_when_the_probes_have_found_it(setting):
    setting.own.join(ONE, None)
    assert not setting.own.is_up(ONE)
    setting.up(ONE)
    assert setting.own.is_up(ONE)
    assert setting.own.serves(ONE)
    setting.own.leave(ONE)
    assert not setting.own.is_up(ONE)
    assert setting.own.requests(ONE) == 0
    assert setting.own.cached_seconds(ONE) == 0.0


def test_what_only_it_serves_is_unavailable_while_it_is_away(setting):
    setting.up(ONE, "m")
    setting.up(TWO, "other")
    setting.own.leave(ONE)
    with pytest.raises(NoReplica):
        setting.send(RouteRequest(model="m"))
    setting.up(ONE, "m")
    assert setting.send(RouteRequest(model="m")).replica == ONE


def test_requests_there_are_counted_until_they_end(setting):
    setting.up(ONE)
    flight = setting.send(ask(text(Random(1), 4), model="m"))
    assert setting.own.requests(ONE) == 1
    flight.finish(Outcome.COMPLETED, setting.now)
    assert setting.own.requests(ONE) == 0


def test_a_stand_in_serves_all_that_it_serves_and_is_not_drained(setting):
    setting.up(ONE, "m", "adapter")
    assert not setting.own.has_stand_in(ONE)
    setting.up(TWO, "m")
    assert not setting.own.has_stand_in(ONE)
    assert setting.own.has_stand_in(TWO)
    setting.own.drain(ONE, True)
    assert not setting.own.has_stand_in(TWO)
    assert not setting.own.serves(ONE)
    assert setting.own.is_up(ONE)


def test_other_gateways_hear_who_is_there(setting):
    """Also that a restart is about to take one out, so that they send it nothing more."""
    heard: list[tuple[object, ...]] = []

    class Announcer:
        def announce(self, url: str, prefill_rate: float | None) -> None:
            heard.append((url, prefill_rate))

        def withdraw(self, url: str) -> None:
            heard.append((url, "gone"))

    setting.own = OwnReplicas(setting.router, setting.discovery, setting.registry, lambda: setting.now, Announcer())
    setting.up(ONE)
    setting.own.drain(ONE, True)
    setting.own.drain(ONE, False)
    setting.own.leave(ONE)
    assert heard == [(ONE, 128.0), (ONE, "gone"), (ONE, 128.0), (ONE, "gone")]


def test_worth_is_the_prefill_of_what_nobody_else_holds(setting):
    setting.up(ONE)
    setting.up(TWO)
    first = setting.send(ask(text(Random(1), 4), model="m"))  # four blocks of 128 tokens, at 128 tokens a second
    assert setting.own.cached_seconds(first.replica) == pytest.approx(4.0)
    other = TWO if first.replica == ONE else ONE
    assert setting.own.cached_seconds(other) == 0.0
    assert sum(setting.router.cached_seconds(setting.now).values()) == pytest.approx(4.0)


def test_a_restart_ends_its_own_drain_but_not_an_operators(setting):
    setting.up(ONE)
    setting.up(TWO)
    setting.own.drain(ONE, True)
    setting.discovery.drain(TWO, True)
    setting.own.drain(TWO, True)
    for replica in (ONE, TWO):
        setting.own.leave(replica)
        setting.up(replica)
    assert setting.own.serves(ONE)
    assert setting.own.is_up(TWO)
    assert not setting.own.serves(TWO)
    setting.discovery.drain(TWO, False)
    assert setting.own.serves(TWO)
