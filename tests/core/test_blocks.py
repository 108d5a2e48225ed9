"""Equal hashes mean equal whole prefixes, and nothing else does."""

from __future__ import annotations

from itertools import product
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.blocks import block_hashes, seed_of
from gateway.core.model import Space

PARTS = [None, "", "a", "b", "a\0b", "\0", "1:a", "-", "a-", "é", "\ud800"]


@given(st.binary(max_size=200), st.binary(max_size=60), st.binary(max_size=60), st.integers(1, 16))
def test_prompts_share_hashes_exactly_as_long_as_they_share_full_blocks(
    shared: bytes, one: bytes, other: bytes, block_bytes: int
) -> None:
    a = block_hashes(shared + one, 7, block_bytes, 1_000)
    b = block_hashes(shared + other, 7, block_bytes, 1_000)
    common = 0
    for x, y in zip(shared + one, shared + other, strict=False):
        if x != y:
            break
        common += 1
    full = min(common // block_bytes, len(a), len(b))
    assert a[:full] == b[:full]
    assert not set(a[full:]) & set(b[full:])


def test_counts_full_blocks_only_and_stops_at_the_limit() -> None:
    key = Random(1).randbytes(1_000)
    assert len(block_hashes(key, 0, 512, 10)) == 1
    assert len(block_hashes(key, 0, 100, 10)) == 10
    assert block_hashes(key, 0, 100, 3) == block_hashes(key, 0, 100, 10)[:3]
    assert block_hashes(key[:511], 0, 512, 10) == []
    assert block_hashes(b"", 0, 512, 10) == []


def test_a_block_repeated_hashes_differently_at_each_place() -> None:
    assert len(set(block_hashes(b"x" * 5_120, 0, 512, 10))) == 10


def test_no_two_combinations_of_model_adapter_and_salt_share_a_seed() -> None:
    seeds = {
        (model, adapter, salt, space): seed_of(model, adapter, salt, space)
        for model, adapter, salt in product(PARTS, repeat=3)
        for space in Space
    }
    assert len(set(seeds.values())) == len(seeds)
