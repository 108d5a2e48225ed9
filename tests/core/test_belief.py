"""A wrong size of the cache is learned from hits and misses; a right one is left alone."""

from __future__ import annotations

from random import Random

import pytest

from gateway.core.belief import GREATEST_SHARE, LEAST_SHARE, CacheShare, differs
from gateway.core.blocks import block_hashes
from gateway.core.model import BlockHash, ReplicaAdded, ReplicaId, RouteRequest, Usage
from gateway.core.prefix_index import PrefixIndex
from gateway.core.replica import SETTLED_FLIGHTS
from tests.core.fleet import BLOCK_BYTES, BLOCK_TOKENS, Fleet, ask, text

ENGINE_BLOCKS = 400
"""What the engine of these stories really holds."""


class Engine:
    """A true LRU cache of blocks, least recently used first, tail before head."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.blocks: dict[BlockHash, None] = {}

    def serve(self, request: RouteRequest) -> int:
        """Tokens found in the cache; afterwards it holds the whole prompt."""
        found = 0
        while found < len(request.blocks) and request.blocks[found] in self.blocks:
            found += 1
        for block in reversed(request.blocks):
            self.blocks.pop(block, None)
            self.blocks[block] = None
        while len(self.blocks) > self.capacity:
            del self.blocks[next(iter(self.blocks))]
        return found * BLOCK_TOKENS


def talk(fleet: Fleet, engines: dict[ReplicaId, Engine], random: Random, turns: int) -> float:
    """Chats with one system prompt, each as likely to go on as the others, in the second half of the turns counted:
    predicted over found tokens."""
    system = text(random, 4)
    chats = [system + text(random, 8) for _ in range(60)]
    predicted = found = 0.0
    for turn in range(turns):
        place = random.randrange(len(chats))
        chats[place] = chats[place] + text(random, 2) if len(chats[place]) < 40 * BLOCK_BYTES else system
        request = ask(chats[place])
        flight = fleet.send(request)
        cached = engines[flight.replica].serve(request)
        fleet.complete(flight, Usage(len(request.blocks) * BLOCK_TOKENS, cached, 10), seconds=0.1)
        if turn >= turns // 2:
            predicted += flight.cached_tokens
            found += cached
    return predicted / found


def share_of(fleet: Fleet, replica: ReplicaId, reported_blocks: int) -> float:
    return fleet.router._index._replicas[replica].capacity / reported_blocks


@pytest.mark.parametrize("factor", [0.25, 0.5, 0.8, 1.0, 1.3, 2.0, 4.0])
def test_the_index_becomes_as_large_as_the_cache_is(factor):
    fleet, reported = Fleet(2), int(factor * ENGINE_BLOCKS)
    for replica in fleet.replicas:
        fleet.reports(replica, cache_tokens=reported * BLOCK_TOKENS)
    engines = {replica: Engine(ENGINE_BLOCKS) for replica in fleet.replicas}
    ratio = talk(fleet, engines, Random(1), 4_000)
    for replica in fleet.replicas:
        assert share_of(fleet, replica, reported) * factor == pytest.approx(1.0, abs=0.1)
        assert fleet.statistics(replica).cache_tokens == reported * BLOCK_TOKENS  # what it says is kept as it is
    assert fleet.router.statistics(fleet.now).cache_share * factor == pytest.approx(1.0, abs=0.1)
    assert ratio == pytest.approx(1.0, abs=0.06)


def test_a_replica_that_says_the_truth_is_believed():
    fleet = Fleet(2)
    for replica in fleet.replicas:
        fleet.reports(replica, cache_tokens=ENGINE_BLOCKS * BLOCK_TOKENS)
    talk(fleet, {replica: Engine(ENGINE_BLOCKS) for replica in fleet.replicas}, Random(2), 2_000)
    assert fleet.router._cache_share.lessons == 0


def test_a_replica_that_joins_profits_from_what_the_others_taught():
    fleet = Fleet(1)
    fleet.reports(fleet.replicas[0], cache_tokens=2 * ENGINE_BLOCKS * BLOCK_TOKENS)
    talk(fleet, {fleet.replicas[0]: Engine(ENGINE_BLOCKS)}, Random(3), 3_000)
    late = ReplicaId("http://late:8000")
    fleet.router.observe(ReplicaAdded(late), fleet.now)
    fleet.reports(late, cache_tokens=2 * ENGINE_BLOCKS * BLOCK_TOKENS)
    assert share_of(fleet, late, 2 * ENGINE_BLOCKS) == pytest.approx(0.5, abs=0.06)


def test_a_cache_that_was_emptied_is_no_smaller_cache():
    """Everything predicted, nothing found: a restart, which clears the index and teaches nothing about the size."""
    fleet, random = Fleet(1), Random(4)
    keys = [text(random, 20) for _ in range(8)]
    for key in keys:
        fleet.complete(fleet.send(ask(key)), Usage(20 * BLOCK_TOKENS, 0, 1), seconds=0.1)
    for key in keys[:5]:
        flight = fleet.send(ask(key))
        assert flight.cached_tokens == 20 * BLOCK_TOKENS
        fleet.complete(flight, Usage(20 * BLOCK_TOKENS, 0, 1), seconds=0.1)
    assert fleet.router.statistics(fleet.now).cache_share == 1.0
    assert fleet.statistics(fleet.replicas[0]).index_blocks == 0


def test_answers_in_the_cache_are_no_larger_cache():
    """What generated tokens add to a hit was never evicted from the index."""
    fleet, key = Fleet(1), text(Random(5), 20)
    fleet.complete(fleet.send(ask(key)), Usage(20 * BLOCK_TOKENS, 0, 1), seconds=0.1)
    for turn in range(1, 8):
        longer = key + text(Random(turn), 10)
        fleet.complete(fleet.send(ask(longer)), Usage(30 * BLOCK_TOKENS, 28 * BLOCK_TOKENS, 1), seconds=0.1)
    assert fleet.router._cache_share.lessons == 0


# -- the parts


def test_a_share_moves_a_little_with_each_number_and_less_with_each_lesson():
    share = CacheShare()
    steps = []
    for _ in range(100):
        before = share.value
        share.learn(1e-9)
        steps.append(before / share.value)
    assert steps[0] == pytest.approx(2**0.25)
    assert steps == sorted(steps, reverse=True)
    assert steps[60] == pytest.approx(2**0.02)


def test_a_share_is_bounded():
    low, high = CacheShare(), CacheShare()
    for _ in range(1_000):
        low.learn(0.5)
        high.learn(2.0)
    assert (low.value, high.value) == (LEAST_SHARE, GREATEST_SHARE)


@pytest.mark.parametrize(
    ("predicted", "cached", "answer"),
    [
        (0.0, 0, False),
        (512.0, 0, False),
        (513.0 / 0.95, 0, True),
        (0.0, 600, True),
        (100_000.0, 95_000, False),
        (100_000.0, 94_000, True),
        (94_000.0, 100_000, True),
    ],
)
def test_a_rounding_is_no_lesson(predicted, cached, answer):
    assert differs(predicted, cached) is answer


def test_depth_is_what_a_true_lru_says():
    index, random = PrefixIndex(1 << 30), Random(6)
    replica = index.add(ReplicaId("http://a"), 10_000)
    engine = Engine(10_000)
    times: dict[BlockHash, float] = {}
    for now in range(300):
        chain = block_hashes(bytes(random.choices(b"ab", k=random.randrange(1, 12))), 1, 1, 100)
        replica.touch(chain, float(now))
        engine.serve(RouteRequest(blocks=chain))
        times |= dict.fromkeys(chain, float(now))
        oldest = random.choice(list(times.values()))
        assert replica.depth(oldest) == sum(1 for at in times.values() if at > oldest)


def test_a_prompt_that_comes_again_knows_what_was_evicted_since():
    """Chains without common blocks: capacity plus what went since is the depth that a true LRU would have needed."""
    index, random = PrefixIndex(1 << 30), Random(7)
    replica = index.add(ReplicaId("http://a"), 50)
    chains = [block_hashes(text(random, 5), 1, BLOCK_BYTES, 100) for _ in range(14)]
    for now, chain in enumerate(chains):
        replica.touch(chain, float(now))
    matched, record = replica.touch(chains[0], 20.0)  # four chains, 20 blocks, were evicted
    assert (matched, record.evicted_at, record.matched_at) == (0, 0, None)
    assert replica.capacity + 20 - record.evicted_at == 70
    matched, record = replica.touch(chains[9], 21.0)
    assert (matched, record.evicted_at, record.matched_at) == (5, None, 9.0)


def test_what_is_remembered_of_evictions_is_bounded_by_what_is_held():
    index, random = PrefixIndex(1 << 30), Random(8)
    replica = index.add(ReplicaId("http://a"), 50)
    for now in range(2_000):
        replica.touch(block_hashes(text(random, random.randrange(1, 8)), 1, BLOCK_BYTES, 100), float(now))
        assert len(replica._evictions) <= len(replica.records) + 1
    replica.clear()
    assert not replica._evictions


def test_the_size_of_caches_is_not_judged_by_flights_that_teach_bytes_per_token() -> None:
    """Hits that nobody predicted, of text with half the bytes a token: the first twenty say nothing of the cache."""
    fleet = Fleet(1, default_cache_tokens=20 * BLOCK_TOKENS)
    random = Random(4)
    prompts = [ask(text(random, 12)) for _ in range(3)]
    shares = []
    for turn in range(40):
        request = prompts[turn % 3]
        flight = fleet.send(request)
        usage = Usage(prompt_tokens=12 * BLOCK_TOKENS, cached_tokens=11 * BLOCK_TOKENS)
        fleet.complete(flight, usage, seconds=0.1)
        shares.append(fleet.router.statistics(fleet.now).cache_share)
    assert shares[SETTLED_FLIGHTS - 2] == 1.0
    assert shares[-1] > 1.1
