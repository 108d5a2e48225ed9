"""Blocks are counted as vLLM counts them. `tests/vllm/test_planner.py` holds the same against vLLM itself."""

from __future__ import annotations

from random import Random

import pytest

from workers.planner.kv_cache import Group, block_bytes, capacity, groups_of, longest_context, stages_of
from workers.planner.models import Layer, load

FULL, WINDOW = Layer("full"), Layer("sliding", 128)
H200_BLOCKS = 104_475
"""57.39 GiB in blocks of gpt-oss-120b."""


def test_the_measured_h200_row() -> None:
    """One H200, vLLM 0.24.0: 57.39 GiB of KV cache were reported as 1,383,290 tokens for requests of 40,000."""
    model = load("gpt-oss-120b")
    groups = groups_of(model.layers)
    size = block_bytes(groups, range(36), model.token_bytes(1, 2), 16)
    assert size == 589_824
    assert int(57.39 * 2**30 // size) == pytest.approx(H200_BLOCKS, abs=1)
    found = capacity(groups, H200_BLOCKS, 16, 40_000, 8_192)
    assert found.request_blocks == 3_021
    assert found.raw_tokens == 1_671_600
    assert found.concurrency == pytest.approx(34.58, abs=0.005)
    assert found.reported_tokens == pytest.approx(1_383_290, rel=0.0001)


def test_a_model_without_windows_counts_its_tokens() -> None:
    groups = groups_of([FULL] * 36)
    found = capacity(groups, 1_024, 32, 16_384, 8_192)
    assert (found.concurrency, found.reported_tokens, found.raw_tokens) == (2.0, 32_768, 32_768)
    assert found.window_blocks == 0


def test_layers_are_grouped_by_the_smaller_kind() -> None:
    groups = groups_of([WINDOW] * 5 + [FULL] + [WINDOW] * 5 + [FULL])
    assert [len(group.members) for group in groups] == [2] * 6
    assert sum(group.layer == FULL for group in groups) == 1


def test_a_draft_pads_the_windows_instead_of_splitting_what_is_full() -> None:
    """18 windows beside 19 full layers: two groups of 19, not one of 18 and two of 10."""
    groups = groups_of((*load("gpt-oss-120b").layers, FULL))
    assert [len(group.members) for group in groups] == [18, 19]
    assert block_bytes(groups, range(37), 2_048, 16) == 19 * 2_048 * 16


def test_without_the_hybrid_manager_everything_is_kept() -> None:
    layers = load("gpt-oss-120b").layers
    (group,) = groups_of(layers, has_hybrid_manager=False)
    assert len(group.members) == 36
    assert block_bytes([group], range(36), 2_048, 16) == 73_728 * 16


def test_windows_take_what_is_in_flight_but_no_more_than_the_request() -> None:
    window, local = Group(WINDOW, (0,)), Group(Layer("local", 8_192), (0,))
    assert window.blocks(40_000, 16, 8_192) == -(-(127 + 8_192) // 16) + 1
    assert window.blocks(1_000, 16, 8_192) == 63 + 1
    assert local.blocks(40_000, 16, 4_096) == (8_192 + 4_096) // 16
    assert Group(FULL, (0,)).blocks(40_001, 16, 8_192) == 2_501


@pytest.mark.parametrize(
    ("layers", "stages", "counts"),
    [(36, 2, [18, 18]), (61, 4, [15, 15, 16, 15]), (62, 4, [15, 16, 16, 15]), (5, 5, [1] * 5)],
)
def test_what_does_not_divide_goes_to_the_middle_stages(layers: int, stages: int, counts: list[int]) -> None:
    ranges = stages_of(layers, stages)
    assert [len(stage) for stage in ranges] == counts
    assert [index for stage in ranges for index in stage] == list(range(layers))


def test_one_block_is_never_handed_out() -> None:
    groups = groups_of([FULL])
    assert not capacity(groups, 64, 16, 1_024, 512).holds_one_request
    assert capacity(groups, 65, 16, 1_024, 512).holds_one_request


def test_the_longest_context_is_the_last_that_fits() -> None:
    random = Random(1)
    for _ in range(200):
        groups = groups_of([random.choice([FULL, WINDOW]) for _ in range(random.randint(1, 40))])
        blocks, in_flight = random.randint(1, 5_000), random.choice([512, 2_048, 8_192])
        found = longest_context(groups, blocks, 16, in_flight, 131_072)
        if found:
            assert capacity(groups, blocks, 16, found, in_flight).holds_one_request
        if found < 131_072:
            assert not capacity(groups, blocks, 16, found + 1, in_flight).holds_one_request
