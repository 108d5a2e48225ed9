"""The simulator, against schedules that can be worked out by hand, and against itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from gateway.core.model import LoadReported
from gateway.core.settings import POLICY_NAMES, RoutingSettings
from loadtests.fleet import answers_of
from loadtests.simulator import Fleet, GatewayRestart, Restart, Sharing, Simulator, Trip
from loadtests.traces import Chats, Request, Synthetic, synthetic

NEVER_SHED = RoutingSettings(max_waiting=1_000_000, max_wait_seconds=1e9)
SYNTHETIC = Synthetic(requests=400, rate=40.0, groups=3, system_tokens=4096, samples=2, burstiness=4.0)


def run(
    requests: Sequence[Request], fleet: Fleet, policy: str = "cache-cost", seed: int = 0, **routing: float
) -> list[Trip]:
    return Simulator(requests, fleet, RoutingSettings(policy=policy, **routing), seed).run()  # type: ignore[arg-type]


def ttfts(trips: Sequence[Trip]) -> list[float | None]:
    return [None if trip.ttft_seconds is None else round(trip.ttft_seconds, 9) for trip in trips]


def figures(trips: Sequence[Trip]) -> list[tuple[object, ...]]:
    return [(trip.place, trip.cached_tokens, trip.first_token_at, trip.ended_at, trip.shed) for trip in trips]


def test_three_requests_on_one_replica_queue_and_hit_as_computed_by_hand() -> None:
    """2,000 tokens take 0.1 s at 20,000/s. The second waits for the first, finds two blocks, and has 976 tokens left.
    The third finds all its three blocks, computes the last one again (512 tokens), and meets the floor of 30 ms."""
    requests = [
        Request(0.0, 2000, 1, (1, 2, 3)),
        Request(0.05, 2000, 1, (1, 2, 9)),
        Request(1.0, 1536, 1, (1, 2, 3)),
    ]
    trips = run(requests, Fleet(replicas=1))
    assert [trip.cached_tokens for trip in trips] == [0, 1024, 1024]
    assert ttfts(trips) == [0.1, round(0.05 + 976 / 20_000, 9), 0.03]


def test_an_answer_takes_one_step_for_each_further_token() -> None:
    (trip,) = run([Request(2.0, 2000, 61)], Fleet(replicas=1))
    assert trip.first_token_at == pytest.approx(2.1)
    assert trip.ended_at == pytest.approx(3.1)


def test_the_network_is_crossed_twice() -> None:
    (trip,) = run([Request(0.0, 2000, 61)], Fleet(replicas=1, network_delay_seconds=0.02))
    assert trip.ttft_seconds == pytest.approx(0.14)
    assert trip.ended_at == pytest.approx(1.14)


def test_waiting_in_the_gateway_counts() -> None:
    """One at a time: the second is let in when the first has ended, at 0.1 s."""
    trips = run([Request(0.0, 2000, 1), Request(0.0, 4000, 1)], Fleet(replicas=2), max_in_flight=1)
    assert ttfts(trips) == [0.1, 0.3]


def test_who_waited_too_long_is_shed() -> None:
    trips = run([Request(0.1, 200_000, 1)] + [Request(0.2, 2000, 1)] * 3, Fleet(1), max_in_flight=1, max_wait_seconds=1)
    assert [trip.shed for trip in trips] == [False, True, True, True]
    assert ttfts(trips) == [10.0, None, None, None]


def test_a_deadline_that_rounds_down_is_met_all_the_same() -> None:
    """0.13 + 1 - 0.13 is below 1: asked at the very moment that it named, the router must shed."""
    trips = run([Request(0.0, 200_000, 1), Request(0.13, 2000, 1)], Fleet(1), max_in_flight=1, max_wait_seconds=1)
    assert 0.13 + 1 - 0.13 < 1
    assert [trip.shed for trip in trips] == [False, True]


def test_a_full_waiting_room_sheds_at_once() -> None:
    trips = run([Request(0.0, 20_000, 1)] * 3, Fleet(1), max_in_flight=1, max_waiting=1)
    assert [trip.shed for trip in trips] == [False, False, True]


def test_a_faster_replica_prefills_faster() -> None:
    fleet = Fleet(replicas=2, speeds=(1.0, 4.0))
    trips = run([Request(0.0, 20_000, 1), Request(0.0, 20_000, 1)], fleet, "round-robin")
    assert sorted(ttfts(trips), key=str) == [0.25, 1.0]
    assert fleet.total_prefill_rate == 100_000


def test_a_small_cache_evicts_and_a_large_one_does_not() -> None:
    requests = [Request(float(i), 2048, 1, tuple(range(100 * (i % 2), 100 * (i % 2) + 4))) for i in range(6)]
    small, large = (run(requests, Fleet(replicas=1, cache_tokens=tokens)) for tokens in (3072, 8192))
    assert [trip.cached_tokens for trip in large] == [0, 0, 1536, 1536, 1536, 1536]
    assert sum(trip.cached_tokens for trip in small) < sum(trip.cached_tokens for trip in large)


def test_a_prompt_longer_than_the_cache_fails_alone() -> None:
    trips = run([Request(0.0, 5000, 1), Request(0.0, 500, 1)], Fleet(replicas=2, cache_tokens=4096))
    assert [trip.failed for trip in trips] == [True, False]


def test_requests_of_a_dead_replica_go_elsewhere_unless_they_had_begun_to_answer() -> None:
    requests = [Request(0.0, 2000, 600), Request(1.0, 20_000, 1), Request(5.0, 2000, 1), Request(5.0, 2000, 1)]
    fleet = Fleet(replicas=2, restart=Restart(replica=0, at=1.5, down_seconds=60.0))
    trips = run(requests, fleet, "round-robin")
    lost = [trip for trip in trips if trip.failed]
    moved = [trip for trip in trips if trip.retries]
    assert len(lost) + len(moved) >= 1
    assert all(trip.first_token_at is not None for trip in lost)
    assert all(trip.place == 1 and trip.ended_at is not None for trip in moved)
    assert all(trip.failed or trip.ended_at is not None for trip in trips)


def test_a_replica_comes_back_with_an_empty_cache() -> None:
    requests = [Request(float(at), 2048, 1, (1, 2, 3, 4)) for at in (0, 1, 10, 11)]
    trips = run(requests, Fleet(replicas=1, restart=Restart(0, at=5.0, down_seconds=2.0)))
    assert [trip.cached_tokens for trip in trips] == [0, 1536, 0, 1536]
    assert [trip.predicted_tokens for trip in trips] == [0.0, 2048.0, 0.0, 2048.0]


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_seed_gives_one_run(policy: str) -> None:
    requests = synthetic(SYNTHETIC, 1).requests
    fleet = Fleet(replicas=3, cache_tokens=50_000, network_delay_seconds=0.005)
    first, again = (figures(run(requests, fleet, policy, seed=5)) for _ in range(2))
    assert first == again


def test_another_seed_breaks_ties_otherwise() -> None:
    requests = synthetic(SYNTHETIC, 1).requests
    assert len({str(figures(run(requests, Fleet(replicas=3), "random", seed))) for seed in range(3)}) == 3


@pytest.mark.parametrize("scrape_seconds", [None, 0.1, 2.0])
def test_nobody_is_left_behind(scrape_seconds: float | None) -> None:
    requests = synthetic(SYNTHETIC, 2).requests
    fleet = Fleet(replicas=3, cache_tokens=50_000, scrape_seconds=scrape_seconds, restart=Restart(1, 2.0, 3.0))
    simulator = Simulator(requests, fleet, seed=1)
    trips = simulator.run()
    assert len(trips) == len(requests)
    assert all((trip.ended_at is not None) != trip.failed for trip in trips)
    statistics = simulator.router.statistics(simulator.seconds)
    assert (statistics.in_flight, statistics.waiting) == (0, 0)
    assert all(replica.in_flight == 0 and replica.pending_tokens == 0 for replica in statistics.replicas)


def test_the_router_learns_the_prefill_rate() -> None:
    simulator = Simulator(synthetic(SYNTHETIC, 1).requests, Fleet(replicas=2))
    simulator.run()
    for replica in simulator.router.statistics(simulator.seconds).replicas:
        assert replica.prefill_rate == pytest.approx(20_000, rel=0.25)
        assert replica.cache_tokens == 1_500_000


# ---- closed loop ---------------------------------------------------------------------------------------------------


def chat(*thinks: float | None, tokens: int = 2000, output: int = 61) -> list[Request]:
    """Turns of one session, recorded a tenth of a second apart."""
    return [Request(0.1 * turn, tokens, output, session="s", think_seconds=think) for turn, think in enumerate(thinks)]


def test_the_next_turn_comes_when_the_answer_before_was_thought_about() -> None:
    """Each takes 0.1 s of prefill and one second of decoding."""
    trips = Simulator(chat(None, 0.5, 2.0), Fleet(replicas=1), closed_loop=True).run()
    assert [trip.arrived_at for trip in trips] == pytest.approx([0.0, 1.6, 4.7])
    assert [trip.ended_at for trip in trips] == pytest.approx([1.1, 2.7, 5.8])
    assert ttfts(trips) == [0.1, 0.1, 0.1]


def test_an_unknown_time_of_thinking_is_no_reason_to_come_before_it_was_recorded() -> None:
    early, late = Request(0.05, 2000, 1, session="s"), Request(7.0, 2000, 1, session="s")
    trips = Simulator([chat(None)[0], early, late], Fleet(replicas=1), closed_loop=True).run()
    assert [trip.arrived_at for trip in trips] == pytest.approx([0.0, 1.1, 7.0])


def test_an_open_loop_does_not_wait_for_answers() -> None:
    trips = Simulator(chat(None, 0.5, 2.0), Fleet(replicas=1)).run()
    assert [trip.arrived_at for trip in trips] == [0.0, 0.1, 0.2]


def test_who_is_turned_away_thinks_as_long_and_comes_again() -> None:
    """A stranger keeps the only replica busy for ten seconds; after one in the waiting room the first turn is shed."""
    requests = [Request(0.0, 200_000, 1), *chat(None, 12.0)]
    routing = RoutingSettings(max_in_flight=1, max_wait_seconds=1.0)
    trips = Simulator(requests, Fleet(1), routing, closed_loop=True).run()
    assert [trip.shed for trip in trips] == [False, True, False]
    assert trips[2].arrived_at == pytest.approx(13.0)


def test_who_lost_the_answer_comes_again_when_that_is_known() -> None:
    fleet = Fleet(replicas=1, network_delay_seconds=0.02, restart=Restart(0, at=0.5, down_seconds=0.1))
    trips = Simulator(chat(None, 5.0), fleet, closed_loop=True).run()
    assert [trip.failed for trip in trips] == [True, False]
    assert trips[1].arrived_at == pytest.approx(5.52)


def test_trips_are_those_of_the_trace_in_its_order() -> None:
    requests = synthetic(Chats(users=5, turns=3, chats=2, start_seconds=0.5), 1).requests
    trips = Simulator(requests, Fleet(replicas=2), closed_loop=True).run()
    assert [trip.request for trip in trips] == list(requests)
    assert sorted(trips, key=lambda trip: trip.arrived_at) != trips


# ---- engines -------------------------------------------------------------------------------------------------------


def test_replicas_on_one_machine_share_its_speed() -> None:
    """A second of prefill each, two at once: two seconds. Decoding alone afterwards is as fast as ever."""
    requests = [Request(0.0, 20_000, 1), Request(0.0, 20_000, 61)]
    shared, apart = (run(requests, Fleet(2, shared_processor=shared), "round-robin") for shared in (True, False))
    assert ttfts(apart) == [1.0, 1.0]
    assert ttfts(shared) == [2.0, 2.0]
    assert shared[1].ended_at == pytest.approx(3.0)
    assert Fleet(2, shared_processor=True).total_prefill_rate == 20_000


def test_who_joins_on_a_shared_machine_slows_the_others_from_then_on() -> None:
    requests = [Request(0.0, 20_000, 1), Request(0.5, 5_000, 1)]
    assert ttfts(run(requests, Fleet(2, shared_processor=True), "round-robin")) == [1.25, 0.5]


def test_prefill_and_decode_slow_each_other_when_they_share_steps() -> None:
    """One decode token and 199 prefill tokens a step of 1/60 + 199/20,000 s."""
    requests = [Request(0.0, 2000, 601), Request(1.0, 1990, 1)]
    step_seconds = 1 / 60 + 199 / 20_000
    trips = run(requests, Fleet(1, step_tokens=200), hold=False)
    assert trips[1].ttft_seconds == pytest.approx(10 * step_seconds)
    assert trips[0].ended_at == pytest.approx(10.1 + 10 * (step_seconds - 1 / 60))


def test_more_at_once_decode_more_slowly() -> None:
    trips = run([Request(0.0, 2000, 61)] * 2, Fleet(2, decode_slowdown=1.0), "round-robin")
    assert [trip.ended_at for trip in trips] == pytest.approx([1.1, 1.1])
    trips = run([Request(0.0, 2000, 61)] * 2, Fleet(1, decode_slowdown=1.0), "round-robin")
    assert trips[0].ended_at == pytest.approx(2.0, abs=0.11)


def test_a_full_replica_preempts_instead_of_reserving() -> None:
    """Both prompts and answers need three blocks of 512 tokens; there are four."""
    requests = [Request(0.0, 1000, 400), Request(0.0, 1000, 400)]
    reserving, preempting = (
        Simulator(requests, Fleet(1, cache_tokens=2048, preempts=preempts), RoutingSettings(hold=False))
        for preempts in (False, True)
    )
    assert [max(ttfts(simulator.run()), key=str) for simulator in (reserving, preempting)] == [
        pytest.approx(0.1 + 399 / 60),
        0.1,
    ]
    assert (reserving.preemptions, preempting.preemptions) == (0, 1)


def test_answers_fill_blocks_where_the_next_turn_repeats_them() -> None:
    """A prompt of two blocks and 100 tokens, an answer of 500 (the third block and 88 more), the next turn."""
    first = Request(0.0, 1124, 500, (1, 2), session="s")
    next_turn = Request(20.0, 1700, 1, (1, 2, 3), session="s")
    other = Request(30.0, 1700, 1, (1, 2, 4), session="t")
    assert answers_of([first, next_turn, other], 512) == [(3,), (), ()]
    cached = [
        [trip.cached_tokens for trip in run([first, next_turn, other], Fleet(1, cache_answers=answers))]
        for answers in (False, True)
    ]
    assert cached == [[0, 1024, 1024], [0, 1536, 1024]]


def test_an_answer_that_the_next_turn_does_not_repeat_is_not_known() -> None:
    first = Request(0.0, 1124, 500, (1, 2), session="s")
    assert answers_of([first, Request(1.0, 1700, 1, (1, 5, 6), session="s")], 512) == [(), ()]
    assert answers_of([first, Request(1.0, 1600, 1, (1, 2, 3), session="s")], 512) == [(), ()]


# ---- what is known -------------------------------------------------------------------------------------------------


def test_a_scrape_that_fails_from_the_start_tells_nothing() -> None:
    simulator = Simulator(synthetic(SYNTHETIC, 1).requests, Fleet(replicas=2, scrape_fails_at=0.0))
    simulator.run()
    for replica in simulator.router.statistics(simulator.seconds).replicas:
        assert replica.load is None
        assert not replica.cache_tokens_known


def test_a_scrape_that_fails_later_leaves_what_it_told() -> None:
    simulator = Simulator(synthetic(SYNTHETIC, 1).requests, Fleet(replicas=2, scrape_fails_at=3.0))
    simulator.run()
    assert simulator.seconds > 5
    for replica in simulator.router.statistics(simulator.seconds).replicas:
        assert replica.load is not None
        assert replica.load.taken_at == 2.5


def test_load_snapshots_may_be_old_when_they_come() -> None:
    requests = [Request(float(second), 2000, 1) for second in range(5)]
    simulator = Simulator(requests, Fleet(1, scrape_seconds=1.0, scrape_delay_seconds=0.7, network_delay_seconds=0.1))
    told: list[tuple[float, float]] = []
    router = simulator.router
    observe = router.observe

    def listen(fact: object, now: float) -> None:
        if isinstance(fact, LoadReported):
            told.append((now, fact.snapshot.taken_at))
        observe(fact, now)  # type: ignore[arg-type]

    router.observe = listen  # type: ignore[method-assign]
    simulator.run()
    assert [now - taken for now, taken in told] == pytest.approx([0.8] * len(told))
    assert len(told) >= 5


def test_gateways_that_share_nothing_know_only_their_own_sends() -> None:
    requests = [Request(float(at), 2048, 1, (1, 2, 3, 4)) for at in range(3)]
    predicted = [
        [trip.predicted_tokens for trip in run(requests, Fleet(1, gateways=2, shared_state=shared))]
        for shared in (True, False)
    ]
    assert predicted == [[0.0, 2048.0, 2048.0], [0.0, 0.0, 2048.0]]


def test_several_gateways_leave_nobody_behind() -> None:
    requests = synthetic(SYNTHETIC, 2).requests
    fleet = Fleet(replicas=3, cache_tokens=50_000, gateways=4, network_delay_seconds=0.01, restart=Restart(1, 2.0, 3.0))
    simulator = Simulator(requests, fleet, NEVER_SHED, seed=1)
    trips = simulator.run()
    assert all((trip.ended_at is not None) != trip.failed for trip in trips)
    assert len(simulator.gateways) == 4
    for gateway in simulator.gateways:
        statistics = gateway.router.statistics(simulator.seconds)
        assert (statistics.in_flight, statistics.waiting) == (0, 0)
        assert statistics.started >= 100


@pytest.mark.parametrize(
    ("sharing", "predicted"),
    [
        (None, [0.0, 0.0, 2048.0, 2048.0]),
        (Sharing(), [0.0, 2048.0, 2048.0, 2048.0]),
        (Sharing(delay_seconds=0.8), [0.0, 2048.0, 2048.0, 2048.0]),
        (Sharing(delay_seconds=1.0), [0.0, 0.0, 2048.0, 2048.0]),
        (Sharing(loss=1.0), [0.0, 0.0, 2048.0, 2048.0]),
    ],
)
def test_what_gateways_tell_each_other_is_known_after_a_round_and_the_delay(
    sharing: Sharing | None, predicted: list[float]
) -> None:
    requests = [Request(float(at), 2048, 1, (1, 2, 3, 4)) for at in range(4)]
    trips = run(requests, Fleet(1, gateways=2, sharing=sharing))
    assert [trip.predicted_tokens for trip in trips] == predicted


def test_gateways_that_share_know_what_the_others_keep_busy() -> None:
    """Three prompts of ten seconds for three replicas, each through another gateway."""
    requests = [Request(float(at), 200_000, 1, ()) for at in range(3)]
    trips = run(requests, Fleet(3, gateways=3, sharing=Sharing(), scrape_seconds=None), hold=False)
    assert sorted(trip.place for trip in trips) == [0, 1, 2]


@pytest.mark.parametrize(("sharing", "known"), [(None, 0.0), (Sharing(), 2048.0)])
def test_a_gateway_that_starts_again_knows_what_the_others_were_told(sharing: Sharing | None, known: float) -> None:
    """The first prompt came to the gateway that is gone, and is in the stream."""
    blocks = (1, 2, 3, 4)
    requests = [Request(0.0, 2048, 1, blocks), Request(1.0, 2048, 1), Request(9.0, 2048, 1, blocks)]
    restart = GatewayRestart(0, at=2.0, down_seconds=5.0)
    trips = run(requests, Fleet(1, gateways=2, sharing=sharing, gateway_restarts=(restart,)))
    assert trips[2].gateway is not trips[0].gateway
    assert trips[2].gateway is not trips[1].gateway
    assert trips[2].predicted_tokens == known


def test_while_a_gateway_is_away_the_others_get_its_requests_and_it_ends_with_its_own() -> None:
    requests = [Request(0.4 * number, 2048, 300) for number in range(10)]
    simulator = Simulator(requests, Fleet(gateways=2, gateway_restarts=(GatewayRestart(0, 1.0, 2.0),)), NEVER_SHED)
    first, second = simulator.gateways
    trips = simulator.run()
    assert all(trip.ended_at is not None for trip in trips)
    assert {trip.gateway for trip in trips if 1.0 < trip.arrived_at < 3.0} == {second}
    assert {trip.gateway for trip in trips if trip.arrived_at > 3.0} == {second, simulator.gateways[0]}
    assert first.is_idle
    assert max(trip.ended_at or 0.0 for trip in trips if trip.gateway is first) > 3.0


def test_with_every_gateway_away_nobody_can_be_connected_to() -> None:
    requests = [Request(float(at), 2048, 1) for at in range(3)]
    trips = run(requests, Fleet(gateway_restarts=(GatewayRestart(0, 0.5, 1.0),)))
    assert [trip.failed for trip in trips] == [False, True, False]


def test_gateways_that_share_and_restart_leave_nobody_behind_and_repeat_themselves() -> None:
    requests = synthetic(SYNTHETIC, 2).requests
    restarts = tuple(GatewayRestart(place, 1.0 + 2.0 * place) for place in range(4))
    fleet = Fleet(3, gateways=4, network_delay_seconds=0.01, sharing=Sharing(0.3, 0.1), gateway_restarts=restarts)
    simulators = [Simulator(requests, fleet, NEVER_SHED, seed=1) for _ in range(2)]
    first, second = (figures(simulator.run()) for simulator in simulators)
    assert first == second
    assert all(ended is not None for _, _, _, ended, _ in first)
    for gateway in simulators[0].gateways:
        assert gateway.is_idle
        assert gateway.router.statistics(simulators[0].seconds).started


def test_each_replica_may_be_told_another_rate() -> None:
    fleet = Fleet(2, speeds=(1.0, 0.25), told_prefill_rates=(20_000, 5_000))
    rates = [replica.prefill_rate for replica in Simulator([], fleet).router.statistics(0.0).replicas]
    assert rates == []
    simulator = Simulator([], fleet)
    simulator.run()
    rates = [replica.prefill_rate for replica in simulator.router.statistics(0.0).replicas]
    assert rates == [20_000, 5_000]


# ---- late binding, when things go wrong ----------------------------------------------------------------------------


@pytest.mark.parametrize("delay", [0.0, 0.02])
def test_a_held_request_whose_replica_dies_goes_elsewhere(delay: float) -> None:
    """Replica 0 alone holds a prefix of 40,000 tokens and is busy for five seconds when two more prompts with it come:
    they wait for it. It dies. Nothing was lost with it but the one that it worked on: they are refused at its door, or
    hear of its death before, and are with the other one a tenth of a second later."""
    blocks = tuple(range(78))
    requests = [
        Request(0.0, 40_000, 1, blocks),
        Request(3.0, 140_000, 1, (*blocks, *range(1000, 1195))),
        Request(3.1, 40_200, 1, blocks),
        Request(3.2, 40_300, 1, blocks),
    ]
    fleet = Fleet(2, network_delay_seconds=delay, restart=Restart(0, at=4.0, down_seconds=60.0), probe_seconds=0.1)
    first = run(requests[:1], fleet)[0].place
    fleet = replace(fleet, restart=Restart(first, at=4.0, down_seconds=60.0))
    trips = run(requests, fleet)
    assert [trip.place for trip in trips] == [first, 1 - first, 1 - first, 1 - first]
    assert all(trip.retries <= 1 for trip in trips)
    assert all(trip.sent_at is not None and 4.0 <= trip.sent_at <= 4.2 for trip in trips[1:])
    assert all(trip.ended_at is not None for trip in trips)


def test_a_lost_request_is_not_sent_again_where_it_was_lost() -> None:
    requests = [Request(0.1 * number, 20_000, 1) for number in range(12)]
    trips = run(requests, Fleet(3, restart=Restart(0, at=1.0, down_seconds=0.2)), hold=False)
    lost = [trip for trip in trips if trip.tried]
    assert lost
    assert all(f"replica-{trip.place}:" not in str(trip.tried) for trip in lost)
    assert all(trip.ended_at is not None for trip in trips)


def test_the_length_of_text_is_learned_from_the_first_prompt_that_was_counted() -> None:
    """Two prompts of 10,240 tokens, 1.7 bytes each. The first is taken for 4,352; it is counted before the second."""
    prompts = [Request(at, 10_240, 1, tuple(range(20 * number, 20 * number + 20))) for number, at in enumerate((0, 1))]
    fleet = Fleet(replicas=1, text_bytes_per_token=1.7)
    simulator = Simulator(prompts, fleet, RoutingSettings(block_bytes=512), 0)
    first, second = simulator.run()
    assert (first.flight is not None, second.flight is not None) == (True, True)
    assert first.flight.decision.view.prompt_tokens == pytest.approx(4_352)
    assert second.flight.decision.view.prompt_tokens == pytest.approx(10_240, rel=0.01)


@pytest.mark.parametrize(("block_bytes", "predicted_tokens"), [(512, 1_536), (1_024, 1_536), (2_048, 1_024)])
def test_text_is_matched_in_whole_prefix_blocks(block_bytes: int, predicted_tokens: int) -> None:
    """Two prompts share 1,536 tokens of two bytes each, six blocks of the engine."""
    prompts = [Request(0.0, 4096, 1, tuple(range(16))), Request(9.0, 4096, 1, (*range(6), *range(20, 30)))]
    fleet = Fleet(replicas=1, block_tokens=256, text_bytes_per_token=2.0)
    trips = Simulator(prompts, fleet, RoutingSettings(block_bytes=block_bytes), 0).run()
    assert trips[1].cached_tokens == 1_536
    assert trips[1].predicted_tokens == pytest.approx(predicted_tokens)
