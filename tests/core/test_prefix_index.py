"""The index is an LRU without holes, within its capacity and its memory, whatever happens to it."""

from __future__ import annotations

import tracemalloc
from math import exp
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.blocks import block_hashes
from gateway.core.model import BlockHash, ReplicaId
from gateway.core.prefix_index import (
    BLOCK_BYTES,
    DEFAULT_TAU_SECONDS,
    RECORD_BYTES,
    PrefixIndex,
    ReplicaIndex,
)

A, B, C = ReplicaId("http://a"), ReplicaId("http://b"), ReplicaId("http://c")


def chain(text: str) -> list[BlockHash]:
    """One block for each letter: prompts that begin with the same letters share blocks."""
    return block_hashes(text.encode(), 1, 1, 1_000)


def index_of(capacity: int, memory_bytes: int = 1 << 30) -> tuple[PrefixIndex, ReplicaIndex]:
    index = PrefixIndex(memory_bytes)
    return index, index.add(A, capacity)


class PlainLru:
    """The same, block by block, slowly: the reference."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.blocks: list[BlockHash] = []  # least recently used first

    def touch(self, blocks: list[BlockHash]) -> None:
        for block in reversed(blocks[: self.capacity]):  # tail first, so that the head is the most recent
            if block in self.blocks:
                self.blocks.remove(block)
            self.blocks.append(block)
        self.shrink()

    def shrink(self) -> None:
        del self.blocks[: max(0, len(self.blocks) - self.capacity)]


prompts = st.text("ab", min_size=1, max_size=8)
steps = st.lists(
    st.one_of(
        prompts.map(lambda text: ("touch", text)),
        st.integers(1, 12).map(lambda capacity: ("resize", capacity)),
        prompts.map(lambda text: ("fail", text)),
        st.just(("clear", "")),
    ),
    max_size=40,
)


@settings(max_examples=300)
@given(st.integers(1, 12), steps)
def test_behaves_like_a_plain_lru_and_never_has_a_hole(capacity: int, walk: list[tuple[str, str | int]]) -> None:
    index, replica = index_of(capacity)
    plain = PlainLru(capacity)
    for now, (step, value) in enumerate(walk):
        match step, value:
            case "touch", str(text):
                replica.touch(chain(text), float(now))
                plain.touch(chain(text))
            case "resize", int(size):
                replica.fit(size)
                plain.capacity = size
                plain.shrink()
            case "clear", _:
                replica.clear()
                plain.blocks.clear()
            case "fail", str(text):
                new = [block for block in chain(text)[: plain.capacity] if block not in plain.blocks]
                matched, record = replica.touch(chain(text), float(now))
                plain.touch(chain(text))
                assert record is not None
                replica.take_back(record, matched)
                plain.blocks = [block for block in plain.blocks if block not in new]
        assert list(eviction_order(replica)) == plain.blocks
        assert not index.extra_copies
        check_records(replica)
        for text in ("aaaaaaaa", "abababab", "bbbbbbbb", *[str(value) for _, value in walk if isinstance(value, str)]):
            held = [block in plain.blocks for block in chain(text)]
            assert held == sorted(held, reverse=True), "a hole"
            assert replica.match(chain(text)) == sum(held)


def eviction_order(replica: ReplicaIndex):  # type: ignore[no-untyped-def]
    for record in replica.records.values():
        yield from reversed(record.run)


def check_records(replica: ReplicaIndex) -> None:
    """No record is empty or mostly dead weight, and all are found by their heads alone."""
    for record in replica.records.values():
        assert record.run
        assert 2 * (record.begin - record.offset) <= len(record.blocks)
    assert replica._heads == {record.run[0]: record for record in replica.records.values()}
    assert sum(len(record.run) for record in replica.records.values()) == len(replica)


@given(st.integers(1, 70), st.integers(0, 70), st.integers(0, 5))
def test_finds_by_halving_where_a_prompt_leaves_another(common: int, own: int, more: int) -> None:
    _, replica = index_of(1_000)
    replica.touch(chain("s" * common + "a" * own), 1.0)
    assert replica.match(chain("s" * common + "b" * more)) == common


def test_finds_its_way_over_many_runs() -> None:
    """Each prompt shares one block more with the last one, so its blocks lie in as many records as it has."""
    _, replica = index_of(1_000)
    long = chain("a" * 50)
    for end in range(50, 0, -1):
        replica.touch(long[:end], 1.0)
    assert len(replica.records) == 50
    assert [replica.match(long[:end]) for end in range(51)] == list(range(51))
    assert replica.match([*long[:30], BlockHash(1)]) == 30
    replica.touch(long, 2.0)
    assert len(replica.records) == 1
    assert replica.match(long) == 50


@settings(max_examples=300)
@given(st.integers(1, 8), st.lists(st.lists(st.sampled_from((1, 2, 3)), min_size=1, max_size=6), max_size=20))
def test_blocks_that_collide_break_nothing(capacity: int, prompts: list[list[int]]) -> None:
    """A hash that is not cryptographic can be made to: then matches may be wrong, but sums are right and all ends."""
    index, replica = index_of(capacity)
    other = index.add(B, capacity)
    for now, prompt in enumerate(prompts):
        matched, record = replica.touch([BlockHash(block) for block in prompt], float(now))
        assert record is not None
        if now % 3 == 0:
            replica.take_back(record, matched)
        other.touch([BlockHash(block) for block in prompt], float(now))
        for one in (replica, other):
            assert len(one) == sum(len(record.run) for record in one.records.values()) <= capacity
            assert all(record.run for record in one.records.values())
    index.remove(A)
    assert len(other) == len(index)
    other.clear()
    assert (len(other), other._heads) == (0, {})


def test_evicts_the_oldest_prompt_from_its_tail() -> None:
    _, replica = index_of(6)
    replica.touch(chain("abcd"), 1.0)
    replica.touch(chain("xyz"), 2.0)
    assert replica.match(chain("abcd")) == 3
    assert replica.match(chain("xyz")) == 3


def test_a_shared_head_outlives_old_tails() -> None:
    _, replica = index_of(6)
    for now, tail in enumerate("12345678"):
        replica.touch(chain("sys" + tail), float(now))
    assert replica.match(chain("sys")) == 3
    assert [replica.match(chain("sys" + tail)) for tail in "45678"] == [3, 3, 4, 4, 4]


def test_a_prompt_longer_than_the_cache_keeps_its_head() -> None:
    _, replica = index_of(4)
    replica.touch(chain("abcdefgh"), 1.0)
    assert replica.match(chain("abcdefgh")) == 4


def test_counts_copies_over_replicas_and_forgets_a_removed_one() -> None:
    index, a = index_of(10)
    b = index.add(B, 10)
    a.touch(chain("abc"), 1.0)
    b.touch(chain("abd"), 1.0)
    assert [index.extra_copies[block] for block in chain("abc")] == [1, 1, 0]
    assert index.match_anywhere(chain("abdx")) == 3
    c = index.add(C, 10)
    c.touch(chain("abdx"), 2.0)
    assert [index.extra_copies[block] for block in chain("abdx")] == [2, 2, 1, 0]
    index.remove(C)
    index.remove(B)
    assert index.match_anywhere(chain("abdx")) == 2
    assert not index.extra_copies


class TestEvictionLoss:
    def test_is_nothing_while_there_is_room(self) -> None:
        _, replica = index_of(10)
        replica.touch(chain("abcde"), 0.0)
        assert replica.eviction_loss(5, 1.0, 10.0) == 0.0

    def test_values_what_goes_by_its_age(self) -> None:
        _, replica = index_of(8)
        replica.touch(chain("abcd"), 0.0)
        replica.touch(chain("wxyz"), 5.0)
        assert replica.eviction_loss(3, 10.0, 10.0) == pytest.approx(3 * exp(-1.0))
        assert replica.eviction_loss(6, 10.0, 10.0) == pytest.approx(4 * exp(-1.0) + 2 * exp(-0.5))

    def test_a_block_that_another_replica_has_too_is_worth_half(self) -> None:
        index, replica = index_of(4)
        index.add(B, 10).touch(chain("abcd"), 0.0)
        replica.touch(chain("abcd"), 0.0)
        assert replica.eviction_loss(2, 0.0, 10.0) == pytest.approx(1.0)

    def test_of_a_long_eviction_is_estimated_from_its_beginning(self) -> None:
        _, replica = index_of(100)
        for i in range(100):
            replica.touch([BlockHash(i)], 0.0)
        assert replica.eviction_loss(100, 10.0, 10.0) == pytest.approx(100 * exp(-1.0))


def test_what_only_one_replica_holds_counts_by_its_age() -> None:
    index, a = index_of(10)
    b, _ = index.add(B, 10), index.add(C, 10)
    assert index.sole_blocks(5.0) == {A: 0.0, B: 0.0, C: 0.0}
    a.touch(chain("abcd"), 0.0)
    a.touch(chain("xyz"), 10.0)
    b.touch(chain("abq"), 10.0)
    found = index.sole_blocks(10.0)
    assert found == {A: pytest.approx(2 * exp(-1.0) + 3.0), B: pytest.approx(1.0), C: 0.0}
    b.clear()
    assert index.sole_blocks(10.0)[A] == pytest.approx(4 * exp(-1.0) + 3.0)
    a.touch(chain("abcd"), 10.0)
    assert index.sole_blocks(10.0)[A] == pytest.approx(7.0)


def test_tau_is_the_mean_age_of_the_tails_of_full_replicas() -> None:
    index, a = index_of(2)
    b, c = index.add(B, 2), index.add(C, 100)
    assert index.tau(50.0) == DEFAULT_TAU_SECONDS
    a.touch(chain("ab"), 10.0)
    c.touch(chain("xy"), 1.0)
    assert index.tau(50.0) == pytest.approx(40.0)
    b.touch(chain("cd"), 30.0)
    assert index.tau(50.0) == pytest.approx(30.0)
    a.clear()
    assert index.tau(50.0) == pytest.approx(20.0)
    index.remove(B)
    assert index.tau(50.0) == DEFAULT_TAU_SECONDS


class TestCopies:
    """Which prefixes deserve more copies than there are."""

    @staticmethod
    def fleet(count: int, capacity: int = 10_000) -> tuple[PrefixIndex, list[ReplicaIndex]]:
        index = PrefixIndex(10**9)
        return index, [index.add(ReplicaId(f"http://r{i}:1"), capacity) for i in range(count)]

    def test_what_all_prompts_open_with_is_worth_a_copy_everywhere(self) -> None:
        index, replicas = self.fleet(4)
        for i in range(40):
            replicas[0].touch(chain(f"system{chr(65 + i)}tail"), 1.0)
        assert index.deserving_depth(chain("systemXtail"), 1.0) == 6
        for place in (1, 2, 3):
            assert index.deserving_depth(chain("systemXtail"), 1.0) == 6
            replicas[place].touch(chain(f"system-{place}"), 1.0)
        assert index.deserving_depth(chain("systemXtail"), 1.0) == 0

    def test_where_chats_go_on_one_of_four_groups_is_worth_one_copy_on_four_replicas(self) -> None:
        index, replicas = self.fleet(4)
        for user in range(40):
            place = user % 4
            text = f"group {place}"
            for turn in range(4):
                text += f"<{user}.{turn}>"
                replicas[place].touch(chain(text), float(turn))
        assert index.thrift(4.0) == 1.0
        assert index.deserving_depth(chain("group 1<"), 4.0) == 0
        # ... but what most of the prompts share is worth a second one
        for user in range(100, 160):
            replicas[1].touch(chain(f"group 1<{user}>"), 4.0)
            replicas[1].touch(chain(f"group 1<{user}> goes on"), 4.0)
        assert index.deserving_depth(chain("group 1<"), 4.0) == 8

    def test_where_no_prompt_goes_on_every_group_is_worth_a_copy_everywhere(self) -> None:
        index, replicas = self.fleet(4)
        for user in range(400):
            replicas[user % 4].touch(chain(f"group {user % 4}<{user}>"), 1.0)
        assert index.thrift(1.0) < 0.2
        assert index.deserving_depth(chain("group 1<"), 1.0) == 8

    def test_few_prompts_deserve_nothing_yet(self) -> None:
        index, replicas = self.fleet(4)
        for i in range(3):
            replicas[0].touch(chain(f"system{i}"), 1.0)
        assert index.deserving_depth(chain("systemX"), 1.0) == 0

    def test_branches_below_count_for_what_is_above(self) -> None:
        index, replicas = self.fleet(4)
        for group in "abcd":
            for j in range(3):
                replicas[0].touch(chain(f"root{group}sub{j}"), 0.0)
        assert index.deserving_depth(chain("rootasub"), 0.0) == 4

    def test_a_prompt_that_goes_to_another_replica_counts_for_the_prefix_that_it_shares(self) -> None:
        index, replicas = self.fleet(2)
        for i in range(6):
            replicas[0].touch(chain(f"system{i}tail"), 0.0)
        before = index._branches[chain("system")[-1]].count
        replicas[1].touch(chain("systemYtail"), 0.0)
        assert index._branches[chain("system")[-1]].count == before + 1

    def test_a_conversation_that_goes_on_is_not_a_branch(self) -> None:
        index, replicas = self.fleet(2)
        text = "s"
        for turn in range(30):
            text += f"{turn}"
            replicas[turn % 2].touch(chain(text), float(turn))  # wherever it goes on
        assert not index._branches
        assert index.thrift(30.0) == 1.0

    def test_samples_of_one_prompt_make_nothing_hot(self) -> None:
        index, replicas = self.fleet(4)
        for _ in range(16):
            replicas[0].touch(chain("one prompt"), 0.0)
        assert not index._branches

    def test_cools_when_no_new_prompts_come(self) -> None:
        index, replicas = self.fleet(4)
        for i in range(8):
            replicas[0].touch(chain(f"system{i}"), 0.0)
        assert index.deserving_depth(chain("systemX"), 0.0) == 6
        assert index.deserving_depth(chain("systemX"), 3_600.0) == 0

    def test_is_forgotten_with_its_last_copy(self) -> None:
        index, replicas = self.fleet(4)
        for i in range(8):
            replicas[0].touch(chain(f"system{i}"), 0.0)
        replicas[0].clear()
        replicas[0].touch(chain("system"), 0.0)
        assert index.deserving_depth(chain("systemX"), 0.0) == 0


class TestMemory:
    def test_is_shared_by_need(self) -> None:
        index = PrefixIndex(1_000_000)
        small, large, larger = index.add(A, 10), index.add(B, 1_000_000), index.add(C, 2_000_000)
        assert small.max_bytes == 10 * (BLOCK_BYTES + RECORD_BYTES)
        assert large.max_bytes == pytest.approx((1_000_000 - small.max_bytes) / 2, abs=2)
        assert larger.max_bytes == pytest.approx(large.max_bytes, abs=2)
        index.remove(C)
        assert large.max_bytes == 1_000_000 - small.max_bytes

    @pytest.mark.parametrize(
        ("prompt_blocks", "shared_blocks", "copies"),
        [(1, 0, 1), (8, 0, 1), (8, 4, 1), (200, 0, 1), (8, 0, 2), (64, 0, 2)],
    )
    def test_stays_within_a_tenth_of_the_cap(self, prompt_blocks: int, shared_blocks: int, copies: int) -> None:
        """O-10: real memory, by the allocator, for prompts that never come again once each replica had its copy."""
        random, cap = Random(1), 4 << 20
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            index = PrefixIndex(cap)
            replicas = [index.add(ReplicaId(f"http://r{i}"), 1_000_000) for i in range(2)]
            shared = [BlockHash(random.getrandbits(64)) for _ in range(shared_blocks)]
            peak = 0
            for i in range(min(20_000, 40_000 // prompt_blocks)):
                own = [BlockHash(random.getrandbits(64)) for _ in range(prompt_blocks - shared_blocks)]
                for copy in range(2 * copies if copies > 1 else 1):  # twice each, from separate requests
                    prompt = [BlockHash(block + 1) for block in shared + own]
                    replicas[(i + copy) % 2].touch(prompt, float(i))
                if i % 50 == 0:
                    peak = max(peak, tracemalloc.get_traced_memory()[0] - before)
        finally:
            tracemalloc.stop()
        assert peak <= 1.1 * cap
        assert index.memory_bytes <= cap
        assert peak >= 0.35 * cap, "the estimate wastes most of what was granted"

    def test_the_hot_set_survives_a_flood(self) -> None:
        """O-10."""
        random = Random(2)
        index, replica = index_of(1_000_000, memory_bytes=1 << 20)
        hot = [[BlockHash(random.getrandbits(64)) for _ in range(8)] for _ in range(20)]
        for i in range(20_000):
            replica.touch([BlockHash(random.getrandbits(64)) for _ in range(8)], float(i))
            replica.touch(hot[i % 20], float(i))
        assert all(replica.match(prompt) == 8 for prompt in hot)
        assert index.memory_bytes <= 1 << 20


def test_the_discriminating_block_comes_after_what_many_share_and_is_the_same_for_all_turns() -> None:
    """Two gateways saw different chats behind one system prompt of five blocks."""
    system = [BlockHash(block) for block in range(1, 6)]

    def chat(number: int, turns: int) -> list[BlockHash]:
        return [*system, *(BlockHash(1_000 * number + block) for block in range(turns))]

    one, two = PrefixIndex(10**9), PrefixIndex(10**9)
    for index, numbers in ((one, range(1, 9)), (two, range(11, 19))):
        replicas = [index.add(ReplicaId(name), 1_000) for name in "abcd"]
        assert index.discriminating(chat(99, 3), 0.0) == system[0]
        for number in numbers:
            replicas[number % 2].touch(chat(number, 4), 0.0)
    for index in (one, two):
        assert index.discriminating(chat(99, 3), 0.0) == 99_000
        assert index.discriminating(chat(1, 9), 0.0) == 1_000
        assert index.discriminating(system, 0.0) is None
        assert index.discriminating([], 0.0) is None
