"""What each policy prefers, told with views; and what every policy owes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, fields, is_dataclass
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.model import BlockHash, Cost, ReplicaId, ReplicaView, RouteRequest
from gateway.core.pickers import ranked
from gateway.core.policy import POLICIES, CacheCost, Policy, SessionHash, policy_named
from gateway.core.settings import POLICY_NAMES, RoutingSettings

REPLICAS = [ReplicaId(f"http://r{i}") for i in range(4)]
IDLE = ReplicaView(
    replica=REPLICAS[0],
    prompt_tokens=10_000.0,
    cached_tokens=0.0,
    pending_tokens=0.0,
    in_flight=0,
    in_flight_tokens=0.0,
    foreign_requests=0.0,
    kv_usage=0.1,
    cache_tokens=400_000.0,
    prefill_rate=10_000.0,
    eviction_loss=0.0,
    deserved_tokens=0.0,
    started=0,
)
PROMPT = RouteRequest(blocks=[BlockHash(1), BlockHash(2), BlockHash(3)], length=40_000)


def fleet(*changes: Mapping[str, object]) -> list[ReplicaView]:
    """One view for each; the first is replica 0."""
    return [IDLE._replace(replica=REPLICAS[i], **change) for i, change in enumerate(changes)]  # type: ignore[arg-type]


def order(policy: str | Policy, views: list[ReplicaView], request: RouteRequest = PROMPT, draw: int = 0) -> list[int]:
    chosen = policy_named(policy) if isinstance(policy, str) else policy
    ranking = ranked(views, chosen.costs(request, views, draw), draw)
    return [REPLICAS.index(view.replica) for view, _ in ranking]


def cost_of(view: ReplicaView, policy: Policy | None = None) -> dict[str, float]:
    return dict((policy or CacheCost()).costs(PROMPT, [view], 0)[0].parts)


amounts = st.floats(0, 1e6, allow_nan=False)
any_view = st.builds(
    ReplicaView,
    replica=st.sampled_from(REPLICAS),
    prompt_tokens=st.floats(10_000, 1e6),
    cached_tokens=st.floats(0, 10_000),
    pending_tokens=amounts,
    in_flight=st.integers(0, 500),
    in_flight_tokens=amounts,
    foreign_requests=st.floats(0, 500),
    kv_usage=st.none() | st.floats(0, 1),
    cache_tokens=st.floats(1_000, 1e7),
    prefill_rate=st.floats(10, 1e6),
    eviction_loss=amounts,
    deserved_tokens=st.floats(0, 5_000),
    started=st.integers(0, 1_000),
    residence_seconds=st.floats(0, 1_000),
    thrift=st.floats(0, 1),
    waiting=st.floats(0, 1_000),
)


class TestEveryPolicy:
    def test_is_in_the_settings_and_the_table_under_its_name(self) -> None:
        assert tuple(POLICIES) == POLICY_NAMES
        assert all(policy.name == name for name, policy in POLICIES.items())
        assert RoutingSettings().policy == "cache-cost"
        with pytest.raises(ValueError, match="unknown policy 'luck'"):
            policy_named("luck")

    @pytest.mark.parametrize("name", POLICY_NAMES)
    def test_is_a_frozen_value_whose_fields_are_its_constants(self, name: str) -> None:
        policy = POLICIES[name]
        assert is_dataclass(policy)
        assert type(policy)() == policy
        for field in fields(policy):
            with pytest.raises((FrozenInstanceError, TypeError)):
                setattr(policy, field.name, 1.0)

    @pytest.mark.parametrize("name", POLICY_NAMES)
    @given(views=st.lists(any_view, min_size=1, max_size=5), draw=st.integers(0, 1 << 64))
    def test_has_a_cost_for_each_view_whose_named_parts_add_up(
        self, name: str, views: list[ReplicaView], draw: int
    ) -> None:
        costs = POLICIES[name].costs(PROMPT, views, draw)
        assert costs == POLICIES[name].costs(PROMPT, views, draw)
        assert len(costs) == len(views)
        assert len({tuple(part for part, _ in cost.parts) for cost in costs}) == 1, "each view has the same parts"
        for cost in costs:
            assert isinstance(cost, Cost)
            assert cost.total == pytest.approx(sum(value for _, value in cost.parts), rel=1e-9, abs=1e-9)


def test_round_robin_takes_who_was_served_longest_ago() -> None:
    assert order("round-robin", fleet({"started": 7}, {"started": 3}, {"started": 9})) == [1, 0, 2]


def test_random_is_uniform_and_decided_by_the_draw_alone() -> None:
    views = fleet({}, {}, {}, {})
    firsts = Counter(order("random", views, draw=draw)[0] for draw in range(4_000))
    assert all(900 < count < 1_100 for count in firsts.values())
    assert order("random", views, draw=5) == order("random", views, draw=5)


def test_least_requests_counts_strangers_too() -> None:
    assert order("least-requests", fleet({"in_flight": 2}, {"foreign_requests": 3.0}, {"in_flight": 1})) == [2, 0, 1]


def test_least_work_is_blind_to_the_cache_but_not_to_speed() -> None:
    views = fleet(
        {"pending_tokens": 500.0, "cached_tokens": 9_000.0},
        {"pending_tokens": 400.0},
        {"pending_tokens": 600.0, "prefill_rate": 20_000.0},
    )
    assert order("least-work", views) == [2, 1, 0]


def test_prefix_only_takes_the_longest_match_whatever_its_queue() -> None:
    views = fleet({"cached_tokens": 5_000.0, "pending_tokens": 1e6}, {"cached_tokens": 4_900.0}, {})
    assert order("prefix-only", views) == [0, 1, 2]
    views = fleet({"cached_tokens": 5_000.0, "pending_tokens": 10.0}, {"cached_tokens": 5_000.0})
    assert order("prefix-only", views) == [1, 0]


class TestSessionHash:
    def test_a_session_stays_whatever_its_prompt(self) -> None:
        views = fleet({}, {}, {}, {})
        ask = [RouteRequest(blocks=[BlockHash(i)], session="s") for i in range(20)]
        assert len({order("session-hash", views, request)[0] for request in ask}) == 1

    def test_sessions_spread_and_only_those_of_a_lost_replica_move(self) -> None:
        views = fleet({}, {}, {}, {})
        home = {s: order("session-hash", views, RouteRequest(session=f"s{s}"))[0] for s in range(2_000)}
        assert all(400 < count < 600 for count in Counter(home.values()).values())
        for s, replica in home.items():
            now = order("session-hash", views[1:], RouteRequest(session=f"s{s}"))[0]
            assert now == replica or replica == 0

    def test_the_first_two_blocks_stand_in_for_a_missing_key(self) -> None:
        views = fleet({}, {}, {}, {})
        a, b = [BlockHash(1), BlockHash(2), BlockHash(3)], [BlockHash(1), BlockHash(2), BlockHash(4)]
        assert order("session-hash", views, RouteRequest(blocks=a)) == order(
            "session-hash", views, RouteRequest(blocks=b)
        )
        firsts = {order("session-hash", views, RouteRequest(blocks=[BlockHash(1), BlockHash(i)]))[0] for i in range(50)}
        assert firsts == {0, 1, 2, 3}

    def test_without_any_key_the_fewest_requests_count(self) -> None:
        assert order("session-hash", fleet({"in_flight": 1}, {"in_flight": 0}), RouteRequest()) == [1, 0]

    def test_one_hot_session_cannot_drown_a_replica(self) -> None:
        request, in_flight = RouteRequest(session="hot"), [0, 0, 0, 0]
        for _ in range(400):
            views = fleet(*[{"in_flight": count} for count in in_flight])
            in_flight[order("session-hash", views, request)[0]] += 1
        assert max(in_flight) <= SessionHash().bound * 100 + 3
        assert min(in_flight) >= 1


class TestCacheCost:
    @pytest.mark.parametrize(("thrift", "saved_tokens"), [(0.0, 16_000.0), (0.5, 32_000.0), (1.0, 48_000.0)])
    def test_prefers_the_warm_replica_until_its_queue_costs_more_than_the_match_saves(
        self, thrift: float, saved_tokens: float
    ) -> None:
        warm: dict[str, object] = {"cached_tokens": 8_000.0, "thrift": thrift}
        cold: dict[str, object] = {"thrift": thrift}
        assert order("cache-cost", fleet(warm, cold))[0] == 0
        assert order("cache-cost", fleet({**warm, "pending_tokens": saved_tokens - 500}, cold))[0] == 0
        assert order("cache-cost", fleet({**warm, "pending_tokens": saved_tokens + 500}, cold))[0] == 1

    @pytest.mark.parametrize(("waiting", "saved_tokens"), [(1.0, 96_000.0), (2.0, 144_000.0), (50.0, 144_000.0)])
    def test_where_requests_wait_a_match_saves_more_for_it_saves_their_time_as_well(
        self, waiting: float, saved_tokens: float
    ) -> None:
        warm: dict[str, object] = {"cached_tokens": 8_000.0, "thrift": 1.0, "waiting": waiting}
        cold: dict[str, object] = {"thrift": 1.0, "waiting": waiting}
        assert order("cache-cost", fleet({**warm, "pending_tokens": saved_tokens - 500}, cold))[0] == 0
        assert order("cache-cost", fleet({**warm, "pending_tokens": saved_tokens + 500}, cold))[0] == 1

    def test_a_prefix_that_all_hold_carries_no_information(self) -> None:
        views = fleet(*[{"cached_tokens": 8_000.0, "pending_tokens": tokens} for tokens in (300.0, 200.0, 400.0)])
        blind = fleet(*[{"pending_tokens": tokens} for tokens in (300.0, 200.0, 400.0)])
        assert order("cache-cost", views) == order("cache-cost", blind) == [1, 0, 2]

    def test_spares_live_blocks(self) -> None:
        assert order("cache-cost", fleet({"eviction_loss": 5_000.0}, {"pending_tokens": 5_000.0}))[0] == 1

    def test_copies_a_shared_prefix_as_soon_as_waiting_for_it_takes_longer_than_making_it(self) -> None:
        holder: dict[str, object] = {"cached_tokens": 8_000.0, "pending_tokens": 9_000.0}
        assert order("cache-cost", fleet(holder, {}))[0] == 0
        assert order("cache-cost", fleet(holder, {"deserved_tokens": 8_000.0}))[0] == 1

    def test_faster_replicas_get_more(self) -> None:
        assert order("cache-cost", fleet({}, {"prefill_rate": 15_000.0}))[0] == 1

    def test_prices_kv_cache_that_is_full_only_where_it_is_longer_than_the_queue(self) -> None:
        full = IDLE._replace(in_flight=40, in_flight_tokens=400_000.0, residence_seconds=10.0)
        kv = 0.5 * 10_300 * 10.0 / 400_000
        assert cost_of(full)["kv"] == pytest.approx(kv)
        assert cost_of(full._replace(pending_tokens=1_000.0))["kv"] == pytest.approx(kv - 0.1)
        assert cost_of(full._replace(pending_tokens=9_000.0))["kv"] == 0.0
        assert cost_of(IDLE._replace(prompt_tokens=500_000.0))["kv"] == 0.0, "an empty replica must take it"

    def test_prices_scraped_pressure_and_takes_the_unknown_for_average(self) -> None:
        assert cost_of(IDLE._replace(kv_usage=0.85))["pressure"] == 0.0
        assert cost_of(IDLE._replace(kv_usage=1.0))["pressure"] == pytest.approx(1.0)
        views = fleet({"kv_usage": 1.0}, {"kv_usage": None}, {"kv_usage": 0.94})
        parts = [dict(cost.parts)["pressure"] for cost in CacheCost().costs(PROMPT, views, 0)]
        assert parts[2] < parts[1] < parts[0]

    def test_strangers_cost_more_than_our_own(self) -> None:
        assert order("cache-cost", fleet({"foreign_requests": 4.0}, {"in_flight": 4}))[0] == 1

    def test_a_crowd_is_left_even_by_the_warm(self) -> None:
        busy: dict[str, object] = {"cached_tokens": 10_000.0, "in_flight": 40}
        assert order("cache-cost", fleet(busy, {}, {}, {}))[0] != 0
        assert order("cache-cost", fleet(busy, *[{"in_flight": 38}] * 3))[0] == 0

    def test_never_costs_less_than_nothing(self) -> None:
        random = Random(1)
        for _ in range(500):
            match = random.uniform(0, 10_000)
            view = IDLE._replace(cached_tokens=match, deserved_tokens=random.uniform(0, 10_000 - match))
            assert CacheCost().costs(PROMPT, [view], 0)[0].total >= -1e-9
