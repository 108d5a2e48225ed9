"""The engine model: times of requests, what the prefix cache keeps, and that aborts leave nothing behind."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.engine_model import EngineModel, EngineRequest, EngineSettings, Milestone, Phase
from workers.prefix_cache import PrefixCache

SIZE = 10
RATE = 1_000.0
DECODE = 50.0
FAR = 1e6


def engine(**changes: object) -> EngineModel:
    plain = {
        "cache_tokens": 10_000,
        "block_size": SIZE,
        "prefill_rate": RATE,
        "decode_rate": DECODE,
        "max_num_seqs": 8,
        "first_token_floor_seconds": 0.0,
    }
    return EngineModel(EngineSettings(**{**plain, **changes}))  # type: ignore[arg-type]


def request(prompt: int, output: int = 1, chain: int = 0, shared: int = 0, more: int = 0) -> EngineRequest:
    """A request whose blocks are ids of `chain`, the first `shared` of them those of chain 0."""
    ids = [place if place < shared else chain * 1_000 + place for place in range(prompt // SIZE + more)]
    return EngineRequest(prompt, output, ids[: prompt // SIZE], ids[prompt // SIZE :])


def finish(model: EngineModel, *requests: EngineRequest, at: float = 0.0) -> None:
    for each in requests:
        model.submit(each, at)
    model.advance(FAR)


def times(each: EngineRequest) -> tuple[float | None, ...]:
    return each.started_at, each.first_token_at, each.ended_at


# ---- time ------------------------------------------------------------------------------------------------------------


def test_prefill_then_decode() -> None:
    alone = request(500, output=101)
    finish(engine(), alone)
    assert times(alone) == pytest.approx((0.0, 0.5, 0.5 + 100 / DECODE))


def test_a_single_token_ends_with_the_prefill() -> None:
    alone = request(500)
    finish(engine(), alone)
    assert times(alone) == pytest.approx((0.0, 0.5, 0.5))


def test_prefills_are_serial_and_first_come_first_served() -> None:
    first, second, third = request(500, 50, chain=1), request(300, 50, chain=2), request(100, 50, chain=3)
    finish(engine(), first, second, third)
    assert [each.started_at for each in (first, second, third)] == pytest.approx([0.0, 0.5, 0.8])
    assert third.first_token_at == pytest.approx(0.9)
    assert third.ended_at == pytest.approx(0.9 + 49 / DECODE)


def test_the_floor_delays_the_first_token_but_not_the_next_prefill() -> None:
    first, second = request(10, chain=1), request(10, chain=2)
    finish(engine(first_token_floor_seconds=0.2), first, second)
    assert first.first_token_at == pytest.approx(0.2)
    assert second.started_at == pytest.approx(0.01)
    assert second.first_token_at == pytest.approx(0.21)


def test_no_more_run_than_there_are_slots() -> None:
    model = engine(max_num_seqs=2)
    requests = [request(10, output=51, chain=chain) for chain in range(1, 4)]
    for each in requests:
        model.submit(each, 0.0)
    model.advance(0.5)
    assert (model.running, model.waiting) == (2, 1)
    model.advance(FAR)
    assert requests[2].started_at == pytest.approx(requests[0].ended_at)


def test_the_head_of_the_queue_waits_for_kv_blocks_and_nobody_passes_it() -> None:
    model = engine(cache_tokens=100)
    big, next_big, small = request(60, output=21, chain=1), request(60, output=21, chain=2), request(10, chain=3)
    finish(model, big, next_big, small)
    assert next_big.started_at == pytest.approx(big.ended_at)
    assert small.started_at is not None
    assert next_big.started_at is not None
    assert small.started_at > next_big.started_at


def test_more_decoding_requests_make_each_slower_if_told_so() -> None:
    model = engine(decode_slowdown=0.5)
    first, second = request(10, output=101, chain=1), request(10, output=101, chain=2)
    finish(model, first, second)
    # Alone for 10 ms, then together at 50 / 1.5 tokens a second.
    together = (100 - 0.01 * DECODE) / (DECODE / 1.5)
    assert first.ended_at == pytest.approx(0.02 + together)


def test_shared_steps_slow_both_the_prefill_and_the_decoding() -> None:
    model = engine(step_tokens=101)
    decoding, prefilling = request(10, output=1_001, chain=1), request(1_000, chain=2)
    model.submit(decoding, 0.0)
    model.advance(1.0)
    before = model.generated(decoding, 1.0)
    model.submit(prefilling, 1.0)
    model.advance(FAR)
    # A step carries one decode token and 100 prefill tokens: 1/50 + 100/1000 seconds. The prompt needs ten of them.
    assert prefilling.first_token_at == pytest.approx(1.0 + 10 * 0.12)
    assert decoding.ended_at == pytest.approx(1.0 + 10 * 0.12 + (1_001 - before - 10) / DECODE, abs=1 / DECODE)


def test_with_attention_late_tokens_of_a_prompt_take_longer_and_a_cached_head_saves_the_fast_ones() -> None:
    model = engine(attention_tokens=1_000)
    cold, warm = request(1_000, chain=1, shared=50), request(1_000, chain=2, shared=50)
    model.submit(cold, 0.0)
    model.advance(2.0)
    assert cold.first_token_at == pytest.approx(1.5)  # the mean token takes half as long again as the first
    finish(model, warm, at=2.0)
    assert warm.cached_tokens == 500
    assert warm.first_token_at == pytest.approx(2.0 + 1.5 - 0.625)


def test_with_attention_an_abort_keeps_the_blocks_that_were_computed() -> None:
    model = engine(attention_tokens=1_000)
    aborted, again = request(1_000, chain=1), request(1_000, chain=1)
    model.submit(aborted, 0.0)
    model.abort(aborted, 0.625)  # 500 tokens
    finish(model, again, at=1.0)
    assert again.cached_tokens == 500


def test_generated_counts_the_tokens_that_are_out() -> None:
    model, alone = engine(), request(500, output=11)
    model.submit(alone, 0.0)
    model.advance(0.499)
    assert model.generated(alone, 0.499) == 0
    model.advance(0.5)
    assert [model.generated(alone, 0.5 + step / DECODE) for step in range(4)] == [1, 2, 3, 4]
    model.advance(FAR)
    assert model.generated(alone, FAR) == 11


def test_says_when_it_will_move_next() -> None:
    model, alone = engine(), request(500, output=51)
    assert model.next_event() is None
    model.submit(alone, 3.0)
    assert model.next_event() == 3.0
    assert [step.milestone for step in model.advance(3.0)] == [Milestone.STARTED]
    assert model.next_event() == pytest.approx(3.5)
    assert [step.milestone for step in model.advance(3.5)] == [Milestone.FIRST_TOKEN]
    assert model.next_event() == pytest.approx(4.5)
    assert [(step.milestone, step.request) for step in model.advance(4.5)] == [(Milestone.ENDED, alone)]
    assert model.next_event() is None


def test_refuses_what_can_never_be() -> None:
    model = engine(cache_tokens=100)
    with pytest.raises(ValueError, match="never fit"):
        model.submit(request(90, output=21), 0.0)
    with pytest.raises(ValueError, match="at least one"):
        model.submit(EngineRequest(0, 1), 0.0)
    with pytest.raises(ValueError, match="do not fit into 5 prompt tokens"):
        model.submit(EngineRequest(5, 1, [1, 2]), 0.0)
    alone = request(50)
    model.submit(alone, 1.0)
    with pytest.raises(ValueError, match="once"):
        model.submit(alone, 1.0)
    with pytest.raises(ValueError, match="backwards"):
        model.advance(0.5)


# ---- the prefix cache ------------------------------------------------------------------------------------------------


def test_finds_the_prompt_of_an_earlier_request() -> None:
    model = engine()
    first, same, longer = request(55), request(55), request(99, shared=5, chain=1)
    finish(model, first, same, longer)
    assert [each.cached_tokens for each in (first, same, longer)] == [0, 50, 50]
    statistics = model.statistics(FAR)
    assert (statistics.prefix_queries, statistics.prefix_hits) == (55 + 55 + 99, 100)


def test_always_computes_the_last_token() -> None:
    model = engine()
    first, same = request(50), request(50)
    finish(model, first, same)
    assert same.cached_tokens == 40


def test_generated_tokens_become_blocks_but_the_last_token_is_not_computed() -> None:
    for output, expected in ((15, 60), (16, 70), (25, 70), (26, 80)):
        model, turn = engine(), request(55, output=output, more=4)
        finish(model, turn)
        again = request(95)
        finish(model, again, at=FAR)
        assert again.cached_tokens == expected


def test_forgets_generated_tokens_if_told_so() -> None:
    model = engine(cache_generated=False)
    finish(model, request(55, output=26, more=4))
    again = request(95)
    finish(model, again, at=FAR)
    assert again.cached_tokens == 50


def test_evicts_the_tail_of_the_least_recently_used_prefix() -> None:
    model = engine(cache_tokens=200)
    old, new = request(100), request(100, chain=1)
    finish(model, old)
    finish(model, new, at=FAR)
    third = request(30, chain=2)
    model.submit(third, FAR)
    model.advance(2 * FAR)
    assert model.statistics(2 * FAR).evicted_blocks == 3
    assert model.cache.match(old.blocks) == 7
    assert model.cache.match(new.blocks) == 10


def test_a_running_request_keeps_its_blocks() -> None:
    model = engine(cache_tokens=200)
    running = request(100, output=1_00, chain=1)
    model.submit(running, 0.0)
    model.advance(0.5)
    assert running.phase is Phase.DECODE
    for chain in range(2, 9):
        short = request(9, chain=chain)
        model.submit(short, 0.5)
    model.advance(0.6)
    assert model.cache.match(running.blocks) == 10


def test_usage_counts_what_running_requests_hold_and_not_the_cache() -> None:
    model = engine(cache_tokens=1_000)
    alone = request(500, output=101)
    model.submit(alone, 0.0)
    assert model.statistics(0.5).kv_usage == pytest.approx(0.5)
    model.advance(1.5)
    assert model.statistics(1.5).kv_usage == pytest.approx(0.55)
    after = model.statistics(FAR)
    assert (after.kv_usage, after.cached_blocks, after.running) == (0.0, 50, 0)


def test_two_requests_share_the_blocks_of_a_common_prefix() -> None:
    model = engine(cache_tokens=200)
    first, second = request(100, output=50), request(105, output=45)
    finish(model, first)
    again, also = request(100, output=50), request(105, output=45)
    model.submit(again, FAR)
    model.submit(also, FAR)
    model.advance(FAR + 0.05)
    assert model.running == 2  # 15 blocks each, ten of them common
    assert second.phase is Phase.NEW


def test_a_cleared_cache_keeps_only_what_is_held() -> None:
    model = engine()
    finish(model, request(100))
    running = request(100, output=1_000, chain=1)
    model.submit(running, FAR)
    model.advance(FAR + 1)
    model.clear_cache(FAR + 1)
    assert model.cache.match(request(100).blocks) == 0
    assert model.cache.match(running.blocks) == 10


# ---- preemption ------------------------------------------------------------------------------------------------------


def test_who_left_the_queue_last_is_preempted_when_no_block_is_free() -> None:
    """Ten blocks. Both prompts fill four, both answers need four more. At 0.24 s the first wants its sixth, and nobody
    has one: the second, which has made nine tokens, gives back its five. The first ends at 0.84 s; by then it has
    pushed out the tail of the second's prompt, so 49 tokens less two blocks are prefilled again, and 31 more made."""
    model = engine(cache_tokens=100, preempts=True)
    first, second = request(40, output=41, chain=1), request(40, output=41, chain=2)
    for each in (first, second):
        model.submit(each, 0.0)
    model.advance(0.23)
    assert (model.running, model.waiting) == (2, 0)
    model.advance(0.25)
    assert (model.running, model.waiting) == (1, 1)
    assert model.generated(second, 0.25) == 9
    assert model.statistics(0.25).kv_usage == pytest.approx(0.6)
    steps = model.advance(FAR)
    assert times(first) == pytest.approx((0.0, 0.04, 0.84))
    assert times(second) == pytest.approx((0.04, 0.08, 0.84 + 0.029 + 31 / DECODE))
    assert [step.milestone for step in steps if step.request is second] == [Milestone.ENDED]
    assert (first.preemptions, second.preemptions, second.cached_tokens) == (0, 1, 0)
    statistics = model.statistics(FAR)
    assert (statistics.preemptions, statistics.generation_tokens, statistics.prompt_tokens) == (1, 82, 80)
    assert (statistics.prefix_queries, model.cache.held) == (80, 0)


def test_a_preempted_answer_is_found_in_the_cache() -> None:
    """40 blocks, 30 of them prompts. At 0.8 s the second wants the 41st, and the third gives way with 26 tokens made.
    At 0.84 s the first ends: the third finds its prompt and two blocks of its answer, and computes six tokens."""
    model = engine(cache_tokens=400, preempts=True)
    first, second = request(100, output=38, chain=1), request(100, output=60, chain=2)
    third = request(100, output=101, chain=3, more=10)
    for each in (first, second, third):
        model.submit(each, 0.0)
    model.advance(0.79)
    assert third.preemptions == 0
    model.advance(0.81)
    assert (third.preemptions, third.resumed_tokens) == (1, 26)
    model.advance(FAR)
    assert second.ended_at == pytest.approx(0.2 + 59 / DECODE)
    assert third.ended_at == pytest.approx(0.84 + 0.006 + 74 / DECODE)
    assert model.cache.match([*third.blocks, *third.output_blocks]) == 20


def test_a_preempted_request_may_be_aborted() -> None:
    model = engine(cache_tokens=100, preempts=True)
    first, second = request(40, output=41, chain=1), request(40, output=41, chain=2)
    for each in (first, second):
        model.submit(each, 0.0)
    model.advance(0.25)
    model.abort(second, 0.3)
    model.advance(FAR)
    assert (second.phase, second.generated_tokens, model.waiting) == (Phase.ABORTED, 9, 0)
    assert model.statistics(FAR).generation_tokens == 41 + 9


def test_without_reserving_more_requests_run_at_once() -> None:
    running = []
    for preempts in (False, True):
        model = engine(cache_tokens=120, preempts=preempts)
        for chain in range(1, 5):
            model.submit(request(20, output=60, chain=chain), 0.0)
        model.advance(0.1)
        running.append(model.running)
    assert running == [1, 4]


# ---- a shared processor ----------------------------------------------------------------------------------------------


def test_a_share_of_the_processor_slows_all_that_it_computes() -> None:
    model, alone = engine(), request(500, output=101)
    model.submit(alone, 0.0)
    model.share_processor(0.5, 0.25)
    model.share_processor(1.0, 0.35)
    assert model.next_event() is not None
    model.advance(1.0)
    model.share_processor(0.25, 1.0)
    model.advance(FAR)
    # A quarter of a second at full speed, a tenth at half: 200 tokens are left. Decoding: 22.5 tokens until 1.0.
    assert alone.first_token_at == pytest.approx(0.55)
    assert alone.ended_at == pytest.approx(1.0 + (100 - 0.45 * DECODE) / (DECODE / 4))


# ---- abort -----------------------------------------------------------------------------------------------------------


def test_abort_while_waiting_lets_the_next_one_start() -> None:
    model = engine()
    first, second, third = request(500, chain=1), request(500, chain=2), request(500, chain=3)
    for each in (first, second, third):
        model.submit(each, 0.0)
    model.abort(second, 0.1)
    assert model.waiting == 1
    model.advance(FAR)
    assert second.phase is Phase.ABORTED
    assert third.started_at == pytest.approx(0.5)


def test_abort_during_prefill_keeps_what_was_computed() -> None:
    model = engine()
    first, second = request(500, chain=1), request(100, chain=2)
    model.submit(first, 0.0)
    model.submit(second, 0.0)
    model.abort(first, 0.2)
    model.advance(FAR)
    assert second.started_at == pytest.approx(0.2)
    assert model.cache.match(first.blocks) in (19, 20)
    assert model.statistics(FAR).prompt_tokens == 100


def test_abort_while_decoding_keeps_the_tokens_made_so_far() -> None:
    model, alone = engine(), request(55, output=1_000, more=99)
    model.submit(alone, 0.0)
    model.abort(alone, 1.055)
    assert alone.generated_tokens == 51
    assert model.statistics(1.055).generation_tokens == 51
    assert model.cache.match([*alone.blocks, *alone.output_blocks]) == 10


def test_abort_after_the_end_changes_nothing() -> None:
    model, alone = engine(), request(55)
    finish(model, alone)
    model.abort(alone, FAR)
    assert alone.phase is Phase.FINISHED
    assert model.statistics(FAR).aborted == 0


# ---- against plain models of the same thing --------------------------------------------------------------------------


def plain_times(jobs: Sequence[tuple[float, int, int]], slots: int) -> list[tuple[float, float, float]]:
    """Start, first token and end of (arrival, prompt, output) with unlimited memory, computed one by one."""
    done: list[tuple[float, float, float]] = []
    free_at = 0.0
    for arrival, prompt, output in jobs:
        start = max(arrival, free_at)
        ends = sorted(end for _, _, end in done if end > start)
        if len(ends) >= slots:
            start = ends[len(ends) - slots]
        free_at = start + prompt / RATE
        done.append((start, free_at, free_at + (output - 1) / DECODE))
    return done


JOBS = st.lists(st.tuples(st.floats(0, 2), st.integers(1, 900), st.integers(1, 80)), min_size=1, max_size=25)


@settings(deadline=None)
@given(jobs=JOBS, slots=st.integers(1, 4), hurry=st.floats(0.01, 0.3))
def test_times_equal_those_computed_by_hand_however_often_it_is_asked(
    jobs: list[tuple[float, int, int]], slots: int, hurry: float
) -> None:
    jobs.sort()
    model = engine(cache_tokens=10_000_000, max_num_seqs=slots)
    requests = []
    now = 0.0
    for arrival, prompt, output in jobs:
        while now + hurry < arrival:
            now += hurry
            model.advance(now)
        now = arrival
        requests.append(EngineRequest(prompt, output))
        model.submit(requests[-1], now)
    model.advance(FAR)
    for each, expected in zip(requests, plain_times(jobs, slots), strict=True):
        assert times(each) == pytest.approx(expected)


@settings(deadline=None)
@given(jobs=JOBS, slots=st.integers(1, 4))
def test_taking_blocks_one_by_one_changes_nothing_while_there_are_enough(
    jobs: list[tuple[float, int, int]], slots: int
) -> None:
    jobs.sort()
    model = engine(cache_tokens=10_000_000, max_num_seqs=slots, preempts=True)
    requests = [EngineRequest(prompt, output) for _, prompt, output in jobs]
    for each, (arrival, _, _) in zip(requests, jobs, strict=True):
        model.submit(each, arrival)
    model.advance(FAR)
    for each, expected in zip(requests, plain_times(jobs, slots), strict=True):
        assert times(each) == pytest.approx(expected)


@settings(deadline=None)
@given(seed=st.integers(0, 10_000))
def test_a_random_walk_leaves_nothing_behind(seed: int) -> None:
    """Requests of a few conversations come, finish and are aborted; blocks in use always fit, and end at none."""
    random = Random(seed)
    model = engine(
        cache_tokens=400,
        max_num_seqs=3,
        decode_slowdown=random.choice([0.0, 0.1]),
        step_tokens=random.choice([None, 64]),
        attention_tokens=random.choice([None, 100.0]),
        first_token_floor_seconds=random.choice([0.0, 0.05]),
        preempts=random.choice([False, True]),
    )
    living: list[EngineRequest] = []
    now, everyone, generated = 0.0, [], 0
    for _ in range(60):
        now += random.expovariate(4.0)
        if living and random.random() < 0.3:
            model.abort(living.pop(random.randrange(len(living))), now)
        else:
            chain = random.randrange(4)
            each = request(random.randint(1, 200), random.randint(1, 60), chain, shared=2 * chain, more=5)
            model.submit(each, now)
            living.append(each)
            everyone.append(each)
        if random.random() < 0.2:
            model.share_processor(random.choice([1.0, 0.5, 0.1]), now)
        model.advance(now)
        assert model.cache.held + len(model.cache._idle) <= model.cache.capacity_blocks
        statistics = model.statistics(now)
        assert 0.0 <= statistics.kv_usage <= 1.0
        assert statistics.generation_tokens >= generated
        generated = statistics.generation_tokens
        assert model.running <= 3
    steps = model.advance(now + FAR)
    assert [step.time for step in steps] == sorted(step.time for step in steps)
    statistics = model.statistics(now + FAR)
    assert (statistics.running, statistics.waiting, model.cache.held) == (0, 0, 0)
    assert statistics.finished + statistics.aborted == len(everyone)
    assert statistics.generation_tokens == sum(each.generated_tokens for each in everyone)
    assert model.next_event() is None


@settings(deadline=None)
@given(seed=st.integers(0, 10_000))
def test_the_cached_part_of_any_chain_is_a_leading_run(seed: int) -> None:
    """Nothing is evicted before what follows it, whatever is held and given back."""
    random, cache, serial = Random(seed), PrefixCache(30), count(1)
    chains = [[next(serial) for _ in range(8)]]
    for _ in range(6):
        stem = random.choice(chains)[: random.randrange(8)]
        chains.append(stem + [next(serial) for _ in range(8 - len(stem))])
    holders: list[tuple[list[int], int]] = []
    for _ in range(200):
        if holders and random.random() < 0.5:
            blocks, private = holders.pop(random.randrange(len(holders)))
            cache.release(blocks, private, len(blocks))
        else:
            blocks, private = random.choice(chains)[: random.randint(0, 8)], random.randrange(3)
            if cache.acquire(blocks, private):
                holders.append((blocks, private))
        for chain in chains:
            known = [block in cache._held or block in cache._idle for block in chain]
            assert known == sorted(known, reverse=True)
            assert cache.match(chain) == sum(known)
