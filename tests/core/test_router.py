"""Stories of the whole core: who gets which request, what is booked, what is learned, what is forgotten."""

from __future__ import annotations

from collections import Counter, deque
from random import Random

import pytest

from gateway.core.admission import Admitted, Shed, Waiting
from gateway.core.departed import EXPECTED_SECONDS
from gateway.core.flight import Flight
from gateway.core.model import (
    CacheCleared,
    CacheSized,
    DrainRequested,
    Fact,
    HealthState,
    LoadReported,
    LoadSnapshot,
    ModelCard,
    ModelsListed,
    NoReplica,
    Outcome,
    OwnerGone,
    PauseReported,
    ProbeAnswered,
    PromptCounted,
    Reason,
    ReplicaAdded,
    ReplicaId,
    ReplicaRemoved,
    RouteRequest,
    Space,
    UnknownModel,
    Usage,
)
from gateway.core.router import Router
from gateway.core.settings import POLICY_NAMES, RoutingSettings
from tests.core.fleet import BLOCK_TOKENS, Fleet, ask, text


class TestCacheCost:
    def test_the_same_long_prefix_goes_to_the_same_replica(self) -> None:
        random, fleet = Random(1), Fleet(4)
        prefixes = [text(random, 64) for _ in range(10)]
        homes = [fleet.serve(ask(prefix + text(random, 4))) for prefix in prefixes]
        for _ in range(5):
            for prefix, home in zip(prefixes, homes, strict=True):
                assert fleet.serve(ask(prefix + text(random, 4))) == home

    def test_a_conversation_stays_where_it_began(self) -> None:
        random, fleet = Random(2), Fleet(3)
        history, home = text(random, 10), None
        for _ in range(15):
            replica = fleet.serve(ask(history))
            assert home in (None, replica)
            home, history = replica, history + text(random, 3)

    def test_different_prompts_spread_evenly_over_cold_idle_equal_replicas(self) -> None:
        random, fleet = Random(3), Fleet(2)
        for _ in range(200):
            fleet.serve(ask(text(random, 20)))
        assert fleet.imbalance <= 1.05

    def test_different_prompts_spread_evenly_though_their_times_vary(self) -> None:
        random, fleet = Random(4), Fleet(4)
        for _ in range(400):
            flight = fleet.send(ask(text(random, random.randint(4, 60))))
            seconds = flight.request.length / 4 / 25_000 * random.uniform(0.85, 1.15) + 0.02
            fleet.complete(flight, seconds=seconds)
        assert fleet.imbalance <= 1.2

    def test_leaves_the_prefix_when_its_queue_costs_more(self) -> None:
        random, fleet = Random(5), Fleet(2)
        prefix = text(random, 32)
        home = fleet.serve(ask(prefix))
        decision = fleet.decide(ask(prefix + text(random, 8)))
        assert (decision.replica, decision.reason) == (home, Reason.WARM)
        fleet.send_to(home, ask(text(random, 400)))
        decision = fleet.decide(ask(prefix + text(random, 8)))
        assert decision.replica != home
        assert decision.reason is Reason.SPILLED

    @pytest.mark.parametrize(("private_blocks", "limit"), [(0, 2.5), (1, 1.5), (16, 1.5)])
    def test_a_burst_with_one_shared_prefix_does_not_herd(self, private_blocks: int, limit: float) -> None:
        """O-11: 64 long requests at once that share 8k tokens, four replicas. Samples of one prompt may stay closer
        together: only crowding speaks against it."""
        random, fleet = Random(6), Fleet(4)
        shared = text(random, 64)
        for _ in range(64):
            fleet.send(ask(shared + text(random, private_blocks)))
        assert fleet.imbalance <= limit

    def test_a_slow_stream_of_requests_with_one_shared_prefix_does_not_herd_either(self) -> None:
        random, fleet = Random(7), Fleet(4)
        shared, flights = text(random, 64), []
        for _ in range(64):
            flight = fleet.send(ask(shared + text(random, 8)))
            fleet.now += 0.3
            flight.first_token(fleet.now)
            flights.append(flight)
        assert fleet.imbalance <= 1.5

    def test_two_gateways_that_see_each_other_only_in_the_replicas_metrics_do_not_herd(self) -> None:
        """O-11: 64 requests that share 8k tokens and run for long, half of them through each gateway."""
        random, gateways = Random(8), [Fleet(4, seed=1), Fleet(4, seed=2)]
        shared, running = text(random, 64), Counter[ReplicaId]()
        for number in range(64):
            fleet = gateways[number % 2]
            running[fleet.send(ask(shared + text(random, 8))).replica] += 1
            if number % 4 == 3:  # half a second of eight requests a second
                for one in gateways:
                    one.now += 0.5
                    for replica in one.replicas:
                        one.reports(replica, running=running[replica], waiting=0)
        assert max(running.values()) * 4 / 64 <= 1.5

    def test_at_low_load_nearly_all_go_where_their_prefix_is(self) -> None:
        """O-11, the other side of it."""
        random, fleet = Random(9), Fleet(4)
        shared = text(random, 64)
        home = fleet.serve(ask(shared + text(random, 8)))
        went = [fleet.serve(ask(shared + text(random, 8))) for _ in range(50)]
        assert went.count(home) >= 40

    def test_a_prefix_that_everybody_holds_carries_no_information(self) -> None:
        random, fleet = Random(8), Fleet(4)
        shared = text(random, 64)
        for replica in fleet.replicas:
            fleet.complete(fleet.send_to(replica, ask(shared)))
        fleet.sent.clear()
        for _ in range(80):
            fleet.send(ask(shared + text(random, 4)))
        assert fleet.imbalance <= 1.1

    def test_requests_without_routable_text_have_no_affinity(self) -> None:
        fleet = Fleet(4)
        for _ in range(200):
            fleet.complete(fleet.send(RouteRequest()), seconds=0.01)
        assert fleet.imbalance <= 1.2
        fleet.sent.clear()
        for _ in range(200):
            fleet.send(RouteRequest())
        assert fleet.imbalance <= 1.2

    def test_spares_the_replica_whose_cache_is_full_of_live_prompts(self) -> None:
        random, fleet = Random(9), Fleet(2, default_cache_tokens=100 * BLOCK_TOKENS)
        full, empty = fleet.replicas
        for _ in range(5):
            fleet.complete(fleet.send_to(full, ask(text(random, 20))))
        assert fleet.statistics(full).index_blocks == 100
        for _ in range(2):
            assert fleet.serve(ask(text(random, 20))) == empty
        ranking = fleet.decide(ask(text(random, 20))).ranking
        evicted = {view.replica: dict(cost.parts)["evicted"] for view, cost in ranking}
        assert evicted[full] > evicted[empty] == 0.0


class TestDecide:
    @pytest.mark.parametrize("policy", POLICY_NAMES)
    def test_is_a_question_that_changes_nothing(self, policy: str) -> None:
        random, fleet = Random(1), Fleet(3, policy)
        for _ in range(10):
            fleet.serve(ask(text(random, 20)))
        request = ask(text(random, 20))
        before = fleet.router.statistics(fleet.now)
        decisions = [fleet.decide(request) for _ in range(5)]
        for other in POLICY_NAMES:
            fleet.decide(ask(text(random, 5)), policy=other)
        assert all(decision == decisions[0] for decision in decisions)
        assert fleet.router.statistics(fleet.now) == before
        assert fleet.decide(request) == decisions[0]

    def test_ranks_every_candidate_but_the_excluded(self) -> None:
        fleet = Fleet(3)
        first = fleet.decide(RouteRequest()).replica
        ranking = fleet.decide(RouteRequest(), exclude={first}).ranking
        assert {view.replica for view, _ in ranking} == set(fleet.replicas) - {first}

    def test_the_last_candidate_is_the_only_one_and_then_there_is_none(self) -> None:
        fleet = Fleet(2)
        one, other = fleet.replicas
        assert fleet.decide(RouteRequest(), exclude=[one]).reason is Reason.ONLY
        with pytest.raises(NoReplica):
            fleet.decide(RouteRequest(), exclude=[one, other])
        with pytest.raises(NoReplica):
            Router(RoutingSettings()).decide(RouteRequest(), 0.0)

    def test_the_same_seed_decides_the_same_and_another_breaks_ties_otherwise(self) -> None:
        def homes(seed: int) -> list[ReplicaId]:
            random, fleet = Random(1), Fleet(4, seed=seed)
            return [fleet.serve(ask(text(random, 20))) for _ in range(40)]

        assert homes(1) == homes(1)
        assert homes(1) != homes(2)

    def test_is_deterministic_for_every_policy(self) -> None:
        for policy in POLICY_NAMES:
            first, second = (self.walk(policy) for _ in range(2))
            assert first == second

    def walk(self, policy: str) -> list[ReplicaId]:
        random, fleet = Random(1), Fleet(4, policy)
        return [fleet.serve(ask(text(random, random.choice((0, 3, 30))))) for _ in range(60)]

    def test_predicts_cached_tokens(self) -> None:
        random, fleet = Random(1), Fleet(2)
        prompt = text(random, 10)
        assert fleet.decide(ask(prompt)).reason is Reason.COLD
        fleet.serve(ask(prompt))
        assert fleet.decide(ask(prompt + b"more")).cached_tokens == 10 * BLOCK_TOKENS


class TestBaselines:
    def test_round_robin_goes_round(self) -> None:
        fleet = Fleet(3, "round-robin")
        sent = [fleet.send(RouteRequest()).replica for _ in range(9)]
        assert sent[:3] == sent[3:6] == sent[6:]
        assert set(sent) == set(fleet.replicas)

    def test_least_requests_and_least_work_balance(self) -> None:
        for policy in ("least-requests", "least-work"):
            random, fleet = Random(1), Fleet(4, policy)
            for _ in range(80):
                fleet.send(ask(text(random, 20)))
            assert fleet.imbalance <= 1.05

    def test_prefix_only_herds(self) -> None:
        random, fleet = Random(1), Fleet(4, "prefix-only")
        shared = text(random, 2)
        for _ in range(50):
            fleet.send(ask(shared + text(random, 20)))
        assert fleet.imbalance == 4.0

    def test_session_hash_follows_the_session(self) -> None:
        random, fleet = Random(1), Fleet(4, "session-hash")
        homes = {session: fleet.serve(ask(text(random, 5), session=session)) for session in "abcdefgh"}
        for session, home in homes.items():
            assert fleet.serve(ask(text(random, 5), session=session)) == home
        assert len(set(homes.values())) > 1


class TestFlight:
    def test_books_at_once_and_gives_back_what_it_booked(self) -> None:
        random, fleet = Random(1), Fleet(1)
        replica = fleet.replicas[0]
        flight = fleet.send(ask(text(random, 10)))
        booked = fleet.statistics(replica)
        assert (booked.in_flight, booked.in_flight_tokens, booked.pending_tokens) == (1, 1_280, 1_280)
        assert booked.index_blocks == 10
        flight.first_token(0.1)
        flight.first_token(0.2)
        assert fleet.statistics(replica).pending_tokens == 0
        flight.finish(Outcome.COMPLETED, 0.3)
        after = fleet.statistics(replica)
        assert (after.in_flight, after.in_flight_tokens, after.index_blocks) == (0, 0, 10)

    def test_finishing_twice_is_reported_and_changes_nothing(self) -> None:
        fleet = Fleet(1)
        flight = fleet.send(ask(b"x" * 5_120))
        flight.finish(Outcome.COMPLETED, 1.0)
        before = fleet.router.statistics(1.0)
        with pytest.raises(AssertionError, match="finished twice"):
            flight.finish(Outcome.FAILED, 1.0)
        flight.first_token(2.0)
        assert fleet.router.statistics(1.0) == before

    @pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.REFUSED, Outcome.REJECTED])
    def test_one_that_never_ran_takes_its_blocks_back(self, outcome: Outcome) -> None:
        random, fleet = Random(1), Fleet(1)
        shared = text(random, 5)
        fleet.serve(ask(shared))
        fleet.send(ask(shared + text(random, 7))).finish(outcome, fleet.now)
        assert fleet.statistics(fleet.replicas[0]).index_blocks == 5
        ran = fleet.send(ask(shared + text(random, 7)))
        ran.first_token(fleet.now)
        ran.finish(outcome, fleet.now)
        assert fleet.statistics(fleet.replicas[0]).index_blocks == 12

    def test_one_that_failed_leaves_the_blocks_that_another_uses(self) -> None:
        random, fleet = Random(1), Fleet(1)
        prompt = text(random, 6)
        first = fleet.send(ask(prompt + text(random, 3)))
        fleet.send(ask(prompt))
        first.finish(Outcome.FAILED, fleet.now)
        assert fleet.view(fleet.replicas[0], ask(prompt)).cached_tokens == 6 * BLOCK_TOKENS

    def test_to_a_replica_that_was_removed_ends_in_peace(self) -> None:
        random, fleet = Random(1), Fleet(2)
        gone = fleet.replicas[0]
        flight = fleet.send_to(gone, ask(text(random, 10)))
        decision = fleet.decide(RouteRequest(), exclude=[fleet.replicas[1]])
        fleet.router.observe(ReplicaRemoved(gone), 0.0)
        with pytest.raises(NoReplica):
            fleet.router.start(decision, 0.0)
        fleet.router.observe(ReplicaAdded(gone), 0.0)
        flight.first_token(1.0)
        flight.finish(Outcome.COMPLETED, 1.0, Usage(prompt_tokens=1_300, cached_tokens=0))
        again = fleet.statistics(gone)
        assert (again.in_flight, again.index_blocks, again.health) == (0, 0, HealthState.UNKNOWN)
        assert fleet.router.statistics(1.0).in_flight == 0


class TestBelief:
    """What the router believes about a replica's cache, and when it stops."""

    def warm(self, fleet: Fleet, blocks: int = 40) -> tuple[ReplicaId, RouteRequest]:
        request = ask(text(Random(1), blocks))
        return fleet.serve(request), request

    def test_ends_when_told_so(self) -> None:
        fleet = Fleet(2)
        home, request = self.warm(fleet)
        fleet.router.observe(CacheCleared(home), fleet.now)
        assert fleet.decide(request).reason is Reason.COLD

    @pytest.mark.parametrize(
        ("before", "after"),
        [
            ({"started_at": 1_000.0}, {"started_at": 1_060.0}),
            ({"prefix_queries": 500}, {"prefix_queries": 20}),
            ({"prefix_queries": 500, "prefix_hits": 30}, {"prefix_queries": 600, "prefix_hits": 29}),
        ],
    )
    def test_ends_with_a_restart(self, before: dict[str, float], after: dict[str, float]) -> None:
        """O-09."""
        fleet = Fleet(2)
        home, request = self.warm(fleet)
        fleet.reports(home, **before)
        assert fleet.decide(request).reason is Reason.WARM
        fleet.now += 1.0
        fleet.reports(home, **after)
        assert fleet.decide(request).reason is Reason.COLD

    def test_survives_ordinary_and_partial_reports(self) -> None:
        fleet = Fleet(2)
        home, request = self.warm(fleet)
        for values in ({"started_at": 7.0, "prefix_queries": 5}, {}, {"prefix_queries": 5}, {"started_at": 7.0}):
            fleet.now += 1.0
            fleet.reports(home, **values)
        assert fleet.decide(request).reason is Reason.WARM

    def test_ends_with_sleep(self) -> None:
        fleet = Fleet(2)
        home, request = self.warm(fleet)
        fleet.reports(home, asleep=False)
        fleet.now += 1.0
        fleet.reports(home, asleep=True)
        assert {view.replica for view, _ in fleet.decide(request).ranking} == set(fleet.replicas) - {home}
        fleet.now += 1.0
        fleet.reports(home, asleep=False)
        assert len(fleet.decide(request).ranking) == 2
        assert fleet.decide(request).reason is Reason.COLD

    def test_ends_after_five_answers_in_a_row_without_a_cached_token(self) -> None:
        fleet = Fleet(1)
        _, request = self.warm(fleet)
        tokens = request.length // 4
        for cached in (0, 0, 0, 0, 5_000, 0, 0, 0, 0):
            fleet.complete(fleet.send(request), Usage(prompt_tokens=tokens, cached_tokens=cached))
        assert fleet.statistics(fleet.replicas[0]).index_blocks == 40
        fleet.complete(fleet.send(request), Usage(prompt_tokens=tokens, cached_tokens=0))
        assert fleet.statistics(fleet.replicas[0]).index_blocks == 0

    def test_an_answer_without_counts_proves_nothing(self) -> None:
        fleet = Fleet(1)
        _, request = self.warm(fleet)
        for usage in [None, Usage(), Usage(prompt_tokens=5_120)] * 5:
            fleet.complete(fleet.send(request), usage)
        assert fleet.statistics(fleet.replicas[0]).index_blocks == 40

    def test_of_one_that_comes_back_from_ejection_ends_unless_a_scrape_proves_it_lived_on(self) -> None:
        for proven in (True, False):
            fleet = Fleet(2)
            home, request = self.warm(fleet)
            fleet.reports(home, started_at=5.0)
            for _ in range(3):
                fleet.probe(home, ok=False)
            fleet.now += 1.5
            if proven:
                fleet.reports(home, started_at=5.0)
            fleet.probe(home)
            assert fleet.statistics(home).health is HealthState.UP
            assert fleet.decide(request).reason is (Reason.WARM if proven else Reason.COLD)

    def test_capacity_is_what_the_replica_says(self) -> None:
        fleet = Fleet(1)
        replica = fleet.replicas[0]
        assert not fleet.statistics(replica).cache_tokens_known
        self.warm(fleet, blocks=40)
        fleet.reports(replica, cache_tokens=20 * BLOCK_TOKENS)
        said = fleet.statistics(replica)
        assert (said.cache_tokens_known, said.cache_tokens, said.index_blocks) == (True, 2_560, 20)

    def test_capacity_in_blocks_follows_the_bytes_of_a_token(self) -> None:
        random, fleet = Random(1), Fleet(1)
        fleet.reports(fleet.replicas[0], cache_tokens=100_000)
        before = fleet.router.statistics(fleet.now).index_capacity_blocks
        for _ in range(200):
            fleet.complete(fleet.send(ask(text(random, 20))), Usage(prompt_tokens=20 * 512 // 2))
        after = fleet.router.statistics(fleet.now).index_capacity_blocks
        assert after == pytest.approx(before / 2, rel=0.03)

    def test_capacity_is_about_right_after_a_dozen_flights(self) -> None:
        """Text of 1.7 bytes a token: a burst of agents waits for that many answers at most before it goes on."""
        random, fleet = Random(1), Fleet(1)
        fleet.reports(fleet.replicas[0], cache_tokens=98_303)
        for _ in range(16):
            fleet.complete(fleet.send(ask(text(random, 40))), Usage(prompt_tokens=int(40 * 512 / 1.7)))
        capacity = fleet.router.statistics(fleet.now).index_capacity_blocks
        assert capacity == pytest.approx(98_303 * 1.7 / 512, rel=0.15)

    def test_one_counted_prompt_tells_all_replicas_what_fits(self) -> None:
        random, fleet = Random(1), Fleet(3)
        for replica in fleet.replicas:
            fleet.reports(replica, cache_tokens=98_303)
        request = ask(text(random, 40), model="m")
        counted = PromptCounted(fleet.replicas[1], "m", request.space, request.length, int(request.length / 1.7))
        fleet.router.observe(counted, fleet.now)
        assert fleet.view(fleet.replicas[0], request).prompt_tokens == pytest.approx(request.length / 1.7, rel=0.02)
        capacity = fleet.router.statistics(fleet.now).index_capacity_blocks
        assert capacity == pytest.approx(3 * 98_303 * 1.7 / 512, rel=0.02)


class TestLearning:
    def test_of_bytes_per_token_corrects_what_is_predicted(self) -> None:
        random, fleet = Random(1), Fleet(1)
        for _ in range(40):
            request = ask(text(random, 20), model="m")
            fleet.complete(fleet.send(request), Usage(prompt_tokens=request.length // 2, cached_tokens=0))
        request = ask(text(random, 20), model="m")
        assert fleet.view(fleet.replicas[0], request).prompt_tokens == pytest.approx(request.length / 2, rel=0.02)
        ids = RouteRequest(model="m", space=Space.TOKENS, length=4_000)
        assert fleet.view(fleet.replicas[0], ids).prompt_tokens == 1_000

    def test_of_speed_uses_the_replicas_own_counts(self) -> None:
        """A gateway that restarted predicts nothing cached; the replica knows better, and is not thought faster."""
        random, fleet = Random(1), Fleet(1)
        for _ in range(30):
            request = ask(text(random, 40))
            usage = Usage(prompt_tokens=5_120, cached_tokens=4_096)
            fleet.complete(fleet.send(request), usage, seconds=1_024 / 10_000 + 0.015)
        assert fleet.statistics(fleet.replicas[0]).prefill_rate == pytest.approx(10_000, rel=0.1)

    def test_of_speed_in_a_queue(self) -> None:
        random, fleet = Random(1), Fleet(1)
        for _ in range(20):
            flights = [fleet.send(ask(text(random, 40))) for _ in range(4)]
            for flight in flights:
                fleet.now += 5_120 / 30_000
                flight.first_token(fleet.now)
            for flight in flights:
                flight.finish(Outcome.COMPLETED, fleet.now)
        assert fleet.statistics(fleet.replicas[0]).prefill_rate == pytest.approx(30_000, rel=0.15)


class TestHealth:
    def test_a_failing_replica_is_left_alone_and_comes_back(self) -> None:
        fleet = Fleet(3)
        bad = fleet.replicas[0]
        for _ in range(3):
            fleet.send_to(bad, RouteRequest()).finish(Outcome.FAILED, fleet.now)
        assert bad not in {fleet.send(RouteRequest()).replica for _ in range(30)}
        fleet.now += 1.2
        fleet.probe(bad)
        assert bad in {fleet.send(RouteRequest()).replica for _ in range(30)}

    @pytest.mark.parametrize("outcome", [Outcome.REJECTED, Outcome.CLIENT_LEFT, Outcome.REFUSED])
    def test_what_is_not_the_replicas_fault_never_ejects_it(self, outcome: Outcome) -> None:
        """O-13."""
        fleet = Fleet(2)
        for _ in range(30):
            fleet.send_to(fleet.replicas[0], RouteRequest()).finish(outcome, fleet.now)
        assert fleet.statistics(fleet.replicas[0]).health is HealthState.UP

    def test_a_replica_that_refuses_gets_less_for_a_while(self) -> None:
        random, fleet = Random(1), Fleet(2)
        busy = fleet.replicas[0]
        fleet.send_to(busy, RouteRequest()).finish(Outcome.REFUSED, fleet.now)
        assert {fleet.decide(ask(text(random, 4))).replica for _ in range(10)} == {fleet.replicas[1]}
        fleet.now += 1.0
        for _ in range(10):
            fleet.send(ask(text(random, 4)))
        assert fleet.sent[busy] >= 4

    def test_failing_requests_count_less_the_more_often_it_was_ejected(self) -> None:
        """Half of its answers are errors: its share falls below a tenth within ten seconds."""
        random, fleet = Random(1), Fleet(3, "round-robin")
        bad = fleet.replicas[0]
        for step in range(4_000):
            fleet.now = step * 0.005
            if step % 200 == 0:
                fleet.probe(bad)
            if step == 2_000:
                fleet.sent.clear()
            flight = fleet.send(RouteRequest())
            failed = flight.replica == bad and random.random() < 0.5
            flight.finish(Outcome.FAILED if failed else Outcome.COMPLETED, fleet.now)
        assert fleet.sent[bad] / sum(fleet.sent.values()) <= 0.1

    def test_all_failing_their_probes_still_serve(self) -> None:
        """O-07 (c)."""
        fleet = Fleet(3)
        for replica in fleet.replicas:
            for _ in range(5):
                fleet.probe(replica, ok=False)
        assert len(fleet.decide(RouteRequest()).ranking) == 3
        fleet.complete(fleet.send(RouteRequest()))
        assert sum(one.health is HealthState.UP for one in fleet.router.statistics(fleet.now).replicas) == 1

    @pytest.mark.parametrize("policy", ["least-requests", "cache-cost"])
    def test_one_that_comes_back_gets_its_share_and_no_more(self, policy: str) -> None:
        """It has nothing in flight, which must not draw everything to it."""
        random, fleet = Random(1), Fleet(3, policy)
        bad = fleet.replicas[0]
        for _ in range(3):
            fleet.send_to(bad, RouteRequest()).finish(Outcome.FAILED, fleet.now)
        running: deque[Flight] = deque()

        def requests_for(seconds: float) -> float:
            """Fifty a second, each of which takes 1.6 s; the share that the one that came back got."""
            fleet.sent.clear()
            for _ in range(round(seconds * 50)):
                running.append(fleet.send(ask(text(random, 2))))
                running[-1].first_token(fleet.now)
                fleet.now += 0.02
                if len(running) > 80:
                    fleet.complete(running.popleft())
            return fleet.sent[bad] / sum(fleet.sent.values())

        requests_for(2.0)
        fleet.probe(bad)
        shares = [requests_for(2.0) for _ in range(6)]
        assert 0.0 < shares[0] < shares[2], shares
        assert max(shares) <= 0.4
        assert shares[-1] >= 0.3

    def test_a_paused_engine_gets_nothing_though_it_says_that_it_is_awake(self) -> None:
        fleet = Fleet(2)
        paused = fleet.replicas[0]
        fleet.router.observe(PauseReported(paused, True), fleet.now)
        fleet.reports(paused, asleep=False)
        fleet.probe(paused)
        assert {fleet.send(RouteRequest()).replica for _ in range(10)} == {fleet.replicas[1]}
        fleet.router.observe(PauseReported(paused, False), fleet.now)
        assert fleet.statistics(paused).health is HealthState.UP

    def test_an_engine_that_shut_down_is_back_once_it_was_gone(self) -> None:
        fleet = Fleet(3)
        leaving = fleet.replicas[0]
        fleet.send_to(leaving, RouteRequest()).finish(Outcome.DRAINING, fleet.now)
        fleet.probe(leaving)
        assert leaving not in {fleet.send(RouteRequest()).replica for _ in range(10)}
        fleet.now += 0.9
        fleet.probe(leaving, ok=False)
        fleet.now += 0.5
        fleet.probe(leaving)
        assert fleet.statistics(leaving).health is HealthState.UP

    def test_nobody_that_can_be_connected_to_is_no_replica(self) -> None:
        fleet = Fleet(2)
        for replica in fleet.replicas:
            for _ in range(3):
                fleet.send_to(replica, RouteRequest()).finish(Outcome.UNREACHABLE, fleet.now)
        with pytest.raises(NoReplica):
            fleet.decide(RouteRequest())
        fleet.probe(fleet.replicas[1])
        assert fleet.decide(RouteRequest()).replica == fleet.replicas[1]

    def test_without_probes_one_trial_request_brings_it_back(self) -> None:
        fleet = Fleet(3)
        bad = fleet.replicas[0]
        for _ in range(3):
            fleet.send_to(bad, RouteRequest()).finish(Outcome.FAILED, fleet.now)
        fleet.now += 1.2
        trial = fleet.send_to(bad, RouteRequest())
        assert bad not in {view.replica for view, _ in fleet.decide(RouteRequest()).ranking}
        fleet.complete(trial)
        assert fleet.statistics(bad).health is HealthState.UP

    def test_an_unknown_replica_waits_until_it_says_what_it_serves(self) -> None:
        fleet = Fleet(2)
        new = ReplicaId("http://new:8000")
        fleet.router.observe(ReplicaAdded(new), fleet.now)
        assert new not in {view.replica for view, _ in fleet.decide(RouteRequest()).ranking}
        fleet.router.observe(LoadReported(new, LoadSnapshot(fleet.now)), fleet.now)
        assert new not in {view.replica for view, _ in fleet.decide(RouteRequest()).ranking}, "what does it serve?"
        fleet.lists(new, "m")
        assert new in {view.replica for view, _ in fleet.decide(RouteRequest()).ranking}

    def test_unknown_replicas_serve_when_there_is_nobody_else(self) -> None:
        fleet = Fleet(3, up=False)
        assert len(fleet.decide(RouteRequest()).ranking) == 3

    def test_a_draining_replica_gets_nothing_new(self) -> None:
        fleet = Fleet(2)
        leaving, staying = fleet.replicas
        fleet.router.observe(DrainRequested(leaving), 0.0)
        assert {fleet.send(RouteRequest()).replica for _ in range(10)} == {staying}
        pinned = fleet.decide(RouteRequest(pinned=leaving))
        assert (pinned.replica, pinned.reason) == (leaving, Reason.PINNED)
        fleet.router.observe(DrainRequested(leaving, draining=False), 0.0)
        assert len(fleet.decide(RouteRequest()).ranking) == 2

    def test_adding_a_known_replica_again_changes_nothing(self) -> None:
        fleet = Fleet(1)
        fleet.serve(ask(text(Random(1), 10)))
        before = fleet.router.statistics(fleet.now)
        fleet.router.observe(ReplicaAdded(fleet.replicas[0], prefill_rate=1.0), fleet.now)
        assert fleet.router.statistics(fleet.now) == before

    def test_the_size_of_a_cache_is_learned_from_elsewhere_and_its_metrics_say_it_better(self) -> None:
        fleet = Fleet(1)
        (replica,) = fleet.replicas
        fleet.router.observe(CacheSized(replica, 8_192), fleet.now)
        assert fleet.router.statistics(fleet.now).replicas[0].cache_tokens == 8_192
        assert fleet.router.statistics(fleet.now).replicas[0].cache_tokens_known
        fleet.router.observe(CacheSized(replica, 7), fleet.now)
        assert fleet.router.statistics(fleet.now).replicas[0].cache_tokens == 8_192
        fleet.router.observe(LoadReported(replica, LoadSnapshot(fleet.now, cache_tokens=9_600)), fleet.now)
        fleet.router.observe(CacheSized(replica, 8_192), fleet.now)
        assert fleet.router.statistics(fleet.now).replicas[0].cache_tokens == 9_600

    def test_facts_about_strangers_are_ignored(self) -> None:
        fleet = Fleet(1)
        before = fleet.router.statistics(0.0)
        nobody = ReplicaId("http://nobody:1")
        facts: list[Fact] = [
            ReplicaRemoved(nobody),
            ProbeAnswered(nobody, True),
            CacheCleared(nobody),
            CacheSized(nobody, 5_000),
            DrainRequested(nobody),
            ModelsListed(nobody, ()),
            LoadReported(nobody, LoadSnapshot(0.0)),
        ]
        for fact in facts:
            fleet.router.observe(fact, 0.0)
        assert fleet.router.statistics(0.0) == before


class TestPinned:
    def test_goes_to_the_owner_and_nobody_else(self) -> None:
        fleet = Fleet(3)
        owner = fleet.replicas[1]
        fleet.router.own("resp_1", owner)
        assert fleet.router.owner("resp_1") == owner
        assert fleet.router.owner("resp_2") is None
        decision = fleet.decide(RouteRequest(pinned=owner))
        assert [view.replica for view, _ in decision.ranking] == [owner]

    def test_fails_clearly_when_the_owner_is_gone(self) -> None:
        fleet = Fleet(3)
        owner = fleet.replicas[1]
        with pytest.raises(OwnerGone):
            fleet.decide(RouteRequest(pinned=owner), exclude={owner})
        for _ in range(3):
            fleet.probe(owner, ok=False)
        with pytest.raises(OwnerGone):
            fleet.decide(RouteRequest(pinned=owner))
        fleet.router.observe(ReplicaRemoved(owner), 0.0)
        with pytest.raises(OwnerGone):
            fleet.decide(RouteRequest(pinned=owner))


class TestModels:
    def test_a_request_goes_to_those_that_list_its_model(self) -> None:
        fleet = Fleet(3)
        fleet.lists(fleet.replicas[0], "base")
        fleet.lists(fleet.replicas[1], "base", "lora")
        fleet.lists(fleet.replicas[2], "other")

        def holders(model: str | None) -> set[ReplicaId]:
            return {view.replica for view, _ in fleet.decide(RouteRequest(model=model)).ranking}

        assert holders("base") == set(fleet.replicas[:2])
        assert holders("lora") == {fleet.replicas[1]}
        assert holders(None) == set(fleet.replicas)
        with pytest.raises(UnknownModel):
            holders("nope")
        fleet.lists(fleet.replicas[1], "base")
        with pytest.raises(UnknownModel):
            holders("lora")

    def test_a_model_whose_replica_restarts_is_unavailable_not_unknown(self) -> None:
        fleet = Fleet(2)
        gone = fleet.replicas[0]
        fleet.lists(gone, "base", "lora")
        fleet.lists(fleet.replicas[1], "other")
        fleet.router.observe(ReplicaRemoved(gone, returns=True), fleet.now)
        with pytest.raises(NoReplica):
            fleet.decide(RouteRequest(model="base"))
        fleet.router.observe(ReplicaAdded(gone), fleet.now)
        fleet.probe(gone)
        fleet.lists(gone, "base")
        assert fleet.decide(RouteRequest(model="base")).replica == gone
        with pytest.raises(UnknownModel):
            fleet.decide(RouteRequest(model="lora"))  # it came back without
        fleet.router.observe(ReplicaRemoved(gone), fleet.now)
        with pytest.raises(UnknownModel):
            fleet.decide(RouteRequest(model="base"))

    def test_a_model_that_stays_away_is_unknown_in_the_end(self) -> None:
        fleet = Fleet(2)
        fleet.lists(fleet.replicas[0], "m")
        fleet.lists(fleet.replicas[1], "other")
        fleet.router.observe(ReplicaRemoved(fleet.replicas[0], returns=True), fleet.now)
        fleet.now += EXPECTED_SECONDS
        with pytest.raises(UnknownModel):
            fleet.decide(RouteRequest(model="m"))

    def test_a_model_whose_replicas_are_all_down_is_unavailable_not_unknown(self) -> None:
        fleet = Fleet(2)
        fleet.lists(fleet.replicas[0], "m")
        fleet.lists(fleet.replicas[1], "other")
        fleet.router.observe(DrainRequested(fleet.replicas[0]), 0.0)
        with pytest.raises(NoReplica):
            fleet.decide(RouteRequest(model="m"))

    def test_made_up_names_do_not_fill_the_memory(self) -> None:
        fleet = Fleet(2)
        for i in range(1_000):
            fleet.decide(RouteRequest(model=f"made-up-{i}"))
        for replica in fleet.replicas:
            fleet.router.observe(DrainRequested(replica), 0.0)
        for i in range(1_000):
            with pytest.raises(NoReplica):
                fleet.decide(RouteRequest(model=f"made-up-{i}"))
        assert len(fleet.router._all_up) <= 1

    def test_the_merged_list_is_stable_and_promises_the_least(self) -> None:
        fleet = Fleet(3)
        a, b, c = fleet.replicas
        cards = {
            b: (ModelCard("m", 20, max_model_len=8_000), ModelCard("z", 5)),
            a: (ModelCard("m", 10, max_model_len=16_000), ModelCard("a/b:c", 7, max_model_len=100)),
            c: (ModelCard("m", 1, max_model_len=1), ModelCard("only-c")),
        }
        for replica, listed in cards.items():
            fleet.router.observe(ModelsListed(replica, listed), 0.0)
        for _ in range(3):
            fleet.probe(c, ok=False)
        models = fleet.router.models()
        assert [(card.id, card.created, card.max_model_len) for card in models] == [
            ("a/b:c", 7, 100),
            ("m", 10, 8_000),
            ("z", 5, None),
        ]
        fleet.router.observe(ModelsListed(b, cards[b]), 0.0)
        assert fleet.router.models() == models


class TestDoor:
    def test_admits_makes_wait_and_sheds(self) -> None:
        fleet = Fleet(1, max_in_flight=1, max_waiting=1)
        answers = [fleet.router.admit(ask(b"x" * 5_000), 0.0) for _ in range(3)]
        assert [type(answer) for answer in answers] == [Admitted, Waiting, Shed]
        assert fleet.router.statistics(0.0).waiting == 1
        answers[0].leave(1.0)
        release = fleet.router.release(1.0)
        assert release.ready == [answers[1].ticket]
        for answer in answers:
            answer.leave(2.0)
        assert fleet.router.statistics(2.0).waiting == 0

    def test_a_warm_prompt_counts_as_short(self) -> None:
        random, fleet = Random(1), Fleet(1, max_in_flight=1)
        known = ask(text(random, 400))
        fleet.serve(known)
        door = fleet.router.admit(RouteRequest(), fleet.now)
        cold = fleet.router.admit(ask(text(random, 100)), fleet.now)
        warm = fleet.router.admit(known, fleet.now + 0.1)
        door.leave(fleet.now + 0.2)
        assert fleet.router.release(fleet.now + 0.2).ready == [warm.ticket]
        assert cold.ticket.prefill_seconds > warm.ticket.prefill_seconds


def test_load_reports_count_strangers_and_average_fills_in_for_silence() -> None:
    fleet = Fleet(3)
    a, b, c = fleet.replicas
    fleet.reports(a, running=8, waiting=2)
    fleet.reports(b, running=0, waiting=0)
    foreign = {view.replica: view.foreign_requests for view, _ in fleet.decide(RouteRequest()).ranking}
    assert foreign == {a: 10.0, b: 0.0, c: 5.0}
    fleet.now += 60.0
    assert {view.foreign_requests for view, _ in fleet.decide(RouteRequest()).ranking} == {0.0}


def test_a_scrape_that_stopped_does_not_make_a_replica_look_idle() -> None:
    """O-12."""
    fleet = Fleet(3)
    for step in range(20):
        fleet.now = 0.5 * step
        for replica in fleet.replicas if step < 5 else fleet.replicas[:2]:
            fleet.reports(replica, running=10, waiting=0)
    silent = Counter(fleet.send(RouteRequest()).replica for _ in range(30))[fleet.replicas[2]]
    assert 8 <= silent <= 12


def test_everything_tells_what_it_is() -> None:
    fleet = Fleet(1, max_in_flight=1)
    flight = fleet.send(ask(text(Random(1), 3)))
    assert "cache-cost" in repr(fleet.router)
    assert "in prefill" in repr(flight)
    flight.first_token(0.1)
    assert "decoding" in repr(flight)
    assert "admitted" in repr(fleet.router.admit(RouteRequest(), 0.0).ticket)


def test_a_replica_that_joins_gets_the_new_chats_and_the_old_ones_stay_where_they_are_warm() -> None:
    random, fleet = Random(11), Fleet(3, default_cache_tokens=200 * BLOCK_TOKENS)
    chats = [text(random, 30) for _ in range(18)]  # about what the three caches hold
    homes = {}
    for turn in range(3):
        for number, chat in enumerate(chats):
            chats[number] = chat + text(random, 1 + turn)
            homes[number] = fleet.serve(ask(chats[number]))
    joined = ReplicaId("http://r3:8000")
    fleet.router.observe(ReplicaAdded(joined), fleet.now)
    fleet.probe(joined)
    stayed = sum(fleet.serve(ask(chat + text(random, 1))) == homes[number] for number, chat in enumerate(chats))
    assert stayed == len(chats)
    fleet.sent.clear()
    for _ in range(6):
        fleet.serve(ask(text(random, 30)))
    assert fleet.sent[joined] >= 4
    assert fleet.statistics(joined).prefill_rate == pytest.approx(fleet.statistics(fleet.replicas[0]).prefill_rate)
