"""Replicas that register: nothing is believed, what is out says why, and nothing depends on having seen a change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from scripted_replica import wait_until

from gateway.core.model import (
    DrainRequested,
    ModelCard,
    ModelsListed,
    ReplicaAdded,
    ReplicaId,
    ReplicaRemoved,
)
from gateway.feeds.addresses import Allowlist
from gateway.feeds.discovery import Discovery
from gateway.feeds.fetch import FetchFailed
from gateway.feeds.registry import MAX_ASKED, MAX_REGISTRATIONS, MAX_REPLICAS, Refused, Registry
from gateway.feeds.replicas import Replicas

CONFIGURED = ReplicaId("http://10.0.0.1:8000")


class World:
    """What is outside: names with their addresses, servers with their models, and the time."""

    def __init__(self, facts: list) -> None:
        self.names: dict[str, set[str]] = {}
        self.models: dict[str, set[str]] = {}
        """By replica; one that is not here does not answer."""
        self.now = 100.0
        self.asked: list[str] = []
        self.at_once = self.most_at_once = 0
        self.facts = facts

    async def resolve(self, host: str, port: int) -> frozenset[str]:
        if host in self.names:
            return frozenset(self.names[host])
        if host.replace(".", "").isdigit() or ":" in host:
            return frozenset({host})
        raise OSError(-2, "Name or service not known")

    async def list_models(self, replica: ReplicaId) -> tuple[ModelCard, ...]:
        self.asked.append(replica)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0)
        self.at_once -= 1
        if replica not in self.models:
            raise FetchFailed("HTTP 302")
        return tuple(ModelCard(name) for name in sorted(self.models[replica]))


class Setting:
    """A registry that feeds a discovery, which reports facts; the probes' part is played by `list`."""

    def __init__(self, world: World, **options: bool) -> None:
        self.world = world
        self.replicas = Replicas()
        self.discovery = Discovery(self.replicas, self.observe, static={CONFIGURED: None})
        self.registry = Registry(
            Allowlist(["10.0.0.0/8"]),
            self.discovery.note_registered,
            self.discovery.is_configured,
            world.list_models,
            resolve=world.resolve,
            clock=lambda: world.now,
            **options,
        )
        self.discovery.note_registered({})  # as its first look does

    def observe(self, fact) -> None:
        self.registry.heard(fact)
        self.world.facts.append(fact)

    def list(self, replica: str, *models: str) -> None:
        """The probes have read this list."""
        self.observe(ModelsListed(ReplicaId(replica), tuple(ModelCard(name) for name in models)))

    async def register(self, url: str, **more: float) -> dict[str, str]:
        """Why each of its addresses is out; empty where it is in."""
        registration = await self.registry.register(ReplicaId(url), **more)
        return {replica: candidate.problem for replica, candidate in registration.candidates.items()}

    def problems(self) -> dict[str, str]:
        return {
            replica: candidate.problem
            for registration in self.registry
            for replica, candidate in registration.candidates.items()
        }


@pytest.fixture
def world(facts) -> World:
    return World(facts)


@pytest.fixture
def setting(world) -> Setting:
    found = Setting(world)
    found.list(CONFIGURED, "m")
    return found


async def test_a_registered_replica_comes_in_with_its_rate_and_goes_when_it_is_taken_back(setting, world, facts):
    world.models["http://10.0.0.7:8000"] = {"other"}
    assert await setting.register("http://10.0.0.7:8000", prefill_rate=5e4) == {"http://10.0.0.7:8000": ""}
    assert facts[-1] == ReplicaAdded("http://10.0.0.7:8000", 5e4)
    assert setting.discovery.source("http://10.0.0.7:8000") == "registered"
    assert setting.registry.unregister("http://10.0.0.7:8000")
    assert facts[-1] == ReplicaRemoved("http://10.0.0.7:8000")
    assert list(setting.replicas) == [CONFIGURED]
    assert not setting.registry.unregister("http://10.0.0.7:8000")


async def test_registering_again_changes_nothing_but_its_time(setting, world, facts):
    world.models["http://10.0.0.7:8000"] = {"other"}
    await setting.register("http://10.0.0.7:8000")
    before = len(facts)
    await setting.register("http://10.0.0.7:8000")
    assert len(facts) == before


async def test_without_an_allowlist_registration_is_off(world):
    registry = Registry(Allowlist([]), lambda _: None, lambda _: False, world.list_models, resolve=world.resolve)
    with pytest.raises(Refused) as refused:
        await registry.register(ReplicaId("http://10.0.0.7:8000"))
    assert refused.value.code == "registration_off"
    assert list(registry) == []


@pytest.mark.parametrize(
    ("url", "addresses"),
    [
        ("http://169.254.169.254:80", None),
        ("http://127.0.0.1:6379", None),
        ("http://[::1]:8000", None),
        ("http://[::ffff:169.254.169.254]:80", None),
        ("http://metadata.internal:80", {"169.254.169.254"}),
        ("http://localhost:8000", {"127.0.0.1"}),
        ("http://2130706433:80", {"127.0.0.1"}),  # the resolver takes it for 127.0.0.1
        ("http://half:8000", {"10.0.0.7", "169.254.169.254"}),  # one good address does not excuse the other
    ],
)
async def test_addresses_outside_are_refused_however_they_are_written(setting, world, facts, url, addresses):
    """O-23."""
    before = list(facts)
    if addresses is not None:
        world.names[url.split("/")[2].rsplit(":", 1)[0]] = addresses
    with pytest.raises(Refused) as refused:
        await setting.register(url)
    assert refused.value.code == "address_not_allowed"
    assert list(setting.registry) == []
    assert (world.asked, facts) == ([], before), "nothing was sent there"


async def test_a_name_that_does_not_resolve_is_refused(setting):
    with pytest.raises(Refused) as refused:
        await setting.register("http://nowhere:8000")
    assert refused.value.code == "unresolvable"


async def test_the_address_that_was_checked_is_the_replica(setting, world):
    """O-23: a name that resolves differently the next time is never connected to unchecked."""
    world.names["gpu"] = {"10.0.0.7", "10.0.0.8"}
    world.models |= {"http://10.0.0.7:8000": {"other"}, "http://10.0.0.8:8000": {"other"}}
    await setting.register("http://gpu:8000")
    assert set(setting.replicas) == {CONFIGURED, "http://10.0.0.7:8000", "http://10.0.0.8:8000"}
    assert set(world.asked) == {"http://10.0.0.7:8000", "http://10.0.0.8:8000"}


async def test_a_name_that_moves_is_followed(setting, world, facts):
    """O-08: full reconcile, no event needed."""
    world.names["gpu"] = {"10.0.0.7"}
    world.models |= {"http://10.0.0.7:8000": {"other"}, "http://10.0.0.9:8000": {"other"}}
    await setting.register("http://gpu:8000")
    world.names["gpu"] = {"10.0.0.9"}
    await setting.registry.reconcile()
    assert set(setting.replicas) == {CONFIGURED, "http://10.0.0.9:8000"}
    assert ReplicaRemoved("http://10.0.0.7:8000") in facts


async def test_a_name_that_moves_to_where_it_may_not_is_out_and_says_why(setting, world):
    """O-23: DNS rebinding."""
    world.names["gpu"] = {"10.0.0.7"}
    world.models["http://10.0.0.7:8000"] = {"other"}
    await setting.register("http://gpu:8000")
    world.names["gpu"] = {"169.254.169.254"}
    await setting.registry.reconcile()
    assert list(setting.replicas) == [CONFIGURED]
    (registration,) = setting.registry
    assert "169.254.169.254 is never allowed" in registration.problem
    assert "http://169.254.169.254:8000" not in world.asked


async def test_a_resolver_error_keeps_the_last_answer(setting, world):
    world.names["gpu"] = {"10.0.0.7"}
    world.models["http://10.0.0.7:8000"] = {"other"}
    await setting.register("http://gpu:8000")
    del world.names["gpu"]
    await setting.registry.reconcile()
    assert "http://10.0.0.7:8000" in setting.replicas


async def test_who_does_not_list_models_gets_no_request_until_it_does(setting, world):
    """O-23: no model server, or one that redirects the question."""
    problems = await setting.register("http://10.0.0.7:6379")
    assert problems == {"http://10.0.0.7:6379": "does not list its models: HTTP 302"}
    assert list(setting.replicas) == [CONFIGURED]
    world.models["http://10.0.0.7:6379"] = {"other"}
    await setting.registry.reconcile()
    assert "http://10.0.0.7:6379" in setting.replicas


async def test_a_model_that_others_serve_is_not_taken_over(setting, world):
    """O-23: a registration cannot claim an existing model silently."""
    world.models["http://10.0.0.7:8000"] = {"other", "m"}
    problems = await setting.register("http://10.0.0.7:8000")
    assert problems == {"http://10.0.0.7:8000": "lists models that others serve: 'm'"}
    assert list(setting.replicas) == [CONFIGURED]


async def test_a_model_that_others_serve_may_be_served_where_that_is_allowed(world):
    setting = Setting(world, allow_existing_models=True)
    setting.list(CONFIGURED, "m")
    world.models["http://10.0.0.7:8000"] = {"m"}
    assert await setting.register("http://10.0.0.7:8000") == {"http://10.0.0.7:8000": ""}
    assert "http://10.0.0.7:8000" in setting.replicas


async def test_a_replica_that_lists_a_foreign_model_later_is_out_before_the_router_reads_the_list(
    setting, world, facts
):
    world.models["http://10.0.0.7:8000"] = {"other"}
    await setting.register("http://10.0.0.7:8000")
    setting.list("http://10.0.0.7:8000", "other", "m")
    assert facts[-2:] == [
        ReplicaRemoved("http://10.0.0.7:8000"),
        ModelsListed("http://10.0.0.7:8000", (ModelCard("other"), ModelCard("m"))),
    ], "the list comes when it is gone, and counts for nothing"
    assert setting.problems() == {"http://10.0.0.7:8000": "lists models that others serve: 'm'"}
    world.models["http://10.0.0.7:8000"] = {"other"}
    await setting.registry.reconcile()
    assert "http://10.0.0.7:8000" in setting.replicas


async def test_a_configured_replica_wins_whenever_it_appears(world):
    setting = Setting(world)
    world.models["http://10.0.0.7:8000"] = {"m"}
    await setting.register("http://10.0.0.7:8000")
    assert "http://10.0.0.7:8000" in setting.replicas
    setting.list(CONFIGURED, "m")
    assert list(setting.replicas) == [CONFIGURED]


async def test_among_registered_ones_the_first_wins(setting, world):
    world.models |= {"http://10.0.0.7:8000": {"other"}, "http://10.0.0.8:8000": {"other"}}
    await setting.register("http://10.0.0.7:8000")
    problems = await setting.register("http://10.0.0.8:8000")
    assert problems == {"http://10.0.0.8:8000": "lists models that others serve: 'other'"}
    setting.registry.unregister("http://10.0.0.7:8000")
    await setting.registry.reconcile()
    assert set(setting.replicas) == {CONFIGURED, "http://10.0.0.8:8000"}


async def test_registering_a_configured_replica_opens_no_door_to_its_models(setting, world):
    world.models |= {"http://10.0.0.7:8000": {"m"}, CONFIGURED: {"m"}}
    await setting.register("http://10.0.0.7:8000")
    assert await setting.register(CONFIGURED) == {CONFIGURED: "is configured already"}
    assert list(setting.replicas) == [CONFIGURED]
    assert setting.registry.unregister(CONFIGURED)
    assert list(setting.replicas) == [CONFIGURED]


async def test_a_registration_that_is_not_renewed_is_forgotten(setting, world):
    """O-08: no ghost outlives its lease."""
    world.models["http://10.0.0.7:8000"] = {"other"}
    await setting.register("http://10.0.0.7:8000", lease_seconds=30.0)
    world.now += 29.0
    await setting.register("http://10.0.0.7:8000", lease_seconds=30.0)
    world.now += 29.0
    await setting.registry.reconcile()
    assert "http://10.0.0.7:8000" in setting.replicas
    world.now += 1.0
    await setting.registry.reconcile()
    assert list(setting.replicas) == [CONFIGURED]
    assert list(setting.registry) == []


async def test_registrations_have_a_ceiling(setting, world):
    for number in range(MAX_REGISTRATIONS):
        await setting.register(f"http://10.0.{number}.7:8000")
    with pytest.raises(Refused) as refused:
        await setting.register("http://10.1.0.1:8000")
    assert refused.value.code == "too_many_registrations"
    await setting.register("http://10.0.0.7:8000")  # one that is there may be renewed


async def test_registered_replicas_have_a_ceiling_too_and_few_are_asked_at_once(setting, world):
    many = [f"10.1.{number // 250}.{number % 250}" for number in range(MAX_REPLICAS + 50)]
    for name, addresses in (("a", many[:200]), ("b", many[200:])):
        world.names[name] = set(addresses)
        world.models |= {f"http://{address}:8000": {name} for address in addresses}
    await setting.register("http://a:8000")
    problems = await setting.register("http://b:8000")
    assert len(setting.replicas) == 1 + MAX_REPLICAS
    assert sum("one too many" in problem for problem in problems.values()) == 50
    assert world.most_at_once == MAX_ASKED


async def test_names_in_a_message_neither_forge_nor_flood(setting, world, caplog):
    world.models["http://10.0.0.7:8000"] = {f"x\nwarmlane: all is well {number}" * 50 for number in range(100)}
    setting.list(CONFIGURED, *world.models["http://10.0.0.7:8000"])
    problems = await setting.register("http://10.0.0.7:8000")
    (problem,) = problems.values()
    assert "\n" not in problem
    assert len(problem) < 600
    assert all("\n" not in record.getMessage() for record in caplog.records)


async def test_what_an_operator_drained_stays_drained_through_a_move(facts, running):
    addresses = {"10.0.0.1"}
    rounds = asyncio.Semaphore(0)

    async def resolve(host: str, port: int) -> frozenset[str]:
        return frozenset(addresses)

    async def sleep(seconds: float) -> None:
        await rounds.acquire()

    discovery = Discovery(Replicas(), facts.append, static={"http://gpu:8000": None}, resolve=resolve, sleep=sleep)
    running(discovery.run())
    await until(lambda: ReplicaAdded("http://gpu:8000") in facts)
    await asyncio.sleep(0)
    assert discovery.drain(ReplicaId("http://gpu:8000"), True)
    assert not discovery.drain(ReplicaId("http://nobody:8000"), True)
    addresses.clear()
    addresses.add("10.0.0.2")
    rounds.release()
    await until(lambda: len(facts) == 5)
    assert facts[1:] == [
        DrainRequested("http://gpu:8000"),
        ReplicaRemoved("http://gpu:8000", returns=True),
        ReplicaAdded("http://gpu:8000"),
        DrainRequested("http://gpu:8000"),
    ]


async def until(condition: Callable[[], bool]) -> None:
    await wait_until(condition)


async def test_a_replica_of_our_own_is_in_unasked_and_goes_at_a_word(setting, world, facts):
    own = ReplicaId("http://127.0.0.1:8101")  # no network of the allowlist
    setting.registry.adopt(own, 5e4)
    assert facts[-1] == ReplicaAdded(own, 5e4)
    setting.list(own, "m")  # which a configured one serves, too
    assert own in setting.replicas
    assert world.asked == []
    assert setting.registry.own == {own}
    setting.registry.let_go(own)
    assert facts[-1] == ReplicaRemoved(own)
    setting.registry.let_go(own)
    assert list(setting.replicas) == [CONFIGURED]


async def test_nobody_takes_over_what_our_own_serve_also_while_they_start_again(setting, world):
    own, other = ReplicaId("http://127.0.0.1:8101"), "http://10.0.0.7:8000"
    setting.registry.adopt(own)
    setting.list(own, "ours")
    world.models[other] = {"ours"}
    out = {other: "lists models that others serve: 'ours'"}
    assert await setting.register(other) == out
    setting.registry.let_go(own)
    await setting.registry.reconcile()
    assert setting.problems() == out


async def test_our_own_registered_once_more_stay_out_as_such_and_do_not_count(setting, world):
    own = ReplicaId("http://10.0.0.9:8000")
    setting.registry.adopt(own)
    world.models[own] = {"ours"}
    assert await setting.register(own) == {own: "is configured already"}
    assert setting.registry.unregister(own)
    assert own in setting.replicas


async def test_what_another_process_has_taken_waits_for_the_resolver(setting, world):
    await setting.registry.take("http://later:8000")
    (registration,) = setting.registry
    assert "does not resolve" in registration.problem
    world.names["later"] = {"10.0.0.9"}
    world.models["http://10.0.0.9:8000"] = {"other"}
    await setting.registry.reconcile()
    assert "http://10.0.0.9:8000" in setting.registry.admitted


async def test_a_drain_ends_with_the_registration_and_is_told(setting, world):
    world.models["http://10.0.0.2:8000"] = {"other"}
    over: list[str] = []
    setting.discovery.drain_is_over = over.append
    await setting.registry.register("http://10.0.0.2:8000")
    setting.discovery.drain("http://10.0.0.2:8000", True)
    setting.registry.unregister("http://10.0.0.2:8000")
    assert over == ["http://10.0.0.2:8000"]
    await setting.registry.register("http://10.0.0.2:8000")
    assert not setting.discovery.is_drained("http://10.0.0.2:8000")
    setting.registry.unregister("http://10.0.0.2:8000")
    assert len(over) == 1
