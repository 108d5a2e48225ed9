"""The documented order of remedies, one step at a time."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from workers.causes import Cause, Kind
from workers.remedies import AT_START, Change, next_change, value

COMMAND = (
    *("vllm", "serve", "m", "--gpu-memory-utilization", "0.95"),
    *("--max-model-len", "32768", "--max-num-seqs", "16"),
)


def steps(
    kind: Kind, *, at_start: bool, command: tuple[str, ...] = COMMAND, most: int = 40, **figures: float
) -> list[str]:
    """All that would be done, failure after failure."""
    made: list[Change] = []
    while len(made) < most:
        now = (*command, *(word for change in made for word in change.words))
        change = next_change(Cause(kind, "", **figures), now, at_start=at_start, made=made)  # type: ignore[arg-type]
        if change is None:
            break
        assert change.before == value(now, change.flag)
        made.append(change)
    return [" ".join(change.words) for change in made]


def test_out_of_memory_under_load_lowers_sequences_then_length_and_around_again() -> None:
    assert steps(Kind.OUT_OF_MEMORY, at_start=False) == [
        "--max-num-seqs 8",
        "--max-model-len 16384",
        "--max-num-seqs 4",
        "--max-model-len 8192",
        "--max-num-seqs 2",
        "--max-model-len 4096",
        "--max-num-seqs 1",
        "--max-model-len 2048",
    ]


def test_out_of_memory_at_the_start_lowers_utilisation_first() -> None:
    found = steps(Kind.OUT_OF_MEMORY, at_start=True)
    assert found[:4] == [
        "--gpu-memory-utilization 0.9",
        "--max-num-seqs 8",
        "--max-model-len 16384",
        "--gpu-memory-utilization 0.85",
    ]
    assert found[-1] == "--gpu-memory-utilization 0.5"


def test_no_room_for_the_cache_raises_utilisation_up_to_an_end() -> None:
    assert steps(Kind.NO_CACHE, at_start=True, command=("vllm", "serve", "m", "--max-num-seqs", "4")) == [
        "--gpu-memory-utilization 0.93",
        "--max-num-seqs 2",
        "--gpu-memory-utilization 0.95",
        "--max-num-seqs 1",
    ]


def test_a_cache_too_small_takes_the_length_that_the_engine_names() -> None:
    assert steps(Kind.CACHE_TOO_SMALL, at_start=True, longest_tokens=7_344, most=1) == ["--max-model-len 7168"]
    assert steps(Kind.CACHE_TOO_SMALL, at_start=True, longest_tokens=100, most=1) == ["--max-model-len 100"]
    assert steps(Kind.CACHE_TOO_SMALL, at_start=True, most=1) == ["--max-model-len 16384"]


def test_memory_that_others_have_is_left_to_them() -> None:
    assert steps(Kind.MEMORY_TAKEN, at_start=True, free_share=0.777, most=1) == ["--gpu-memory-utilization 0.76"]
    assert steps(Kind.MEMORY_TAKEN, at_start=True, free_share=0.2) == []


def test_defaults_stand_in_for_what_the_command_does_not_say() -> None:
    bare = ("vllm", "serve", "m")
    assert steps(Kind.OUT_OF_MEMORY, at_start=True, command=bare, most=3) == [
        "--gpu-memory-utilization 0.85",
        "--max-num-seqs 128",
        "--max-model-len 32768",
    ]
    said = next_change(Cause(Kind.OUT_OF_MEMORY, ""), bare, at_start=False)
    assert str(said) == "--max-num-seqs 128 (not given so far)"


def test_a_step_never_undoes_an_earlier_one() -> None:
    lowered = Change("gpu-memory-utilization", "0.95", "0.9")
    command = (*COMMAND, *lowered.words)
    change = next_change(Cause(Kind.NO_CACHE, ""), command, at_start=True, made=[lowered])
    assert change == Change("max-num-seqs", "16", "8")


@pytest.mark.parametrize("kind", [Kind.NO_CACHE, Kind.CACHE_TOO_SMALL, Kind.MEMORY_TAKEN])
def test_what_an_engine_says_at_its_start_only_has_no_remedy_under_load(kind: Kind) -> None:
    assert steps(kind, at_start=False) == []


@pytest.mark.parametrize(
    ("command", "found"),
    [
        (("--max-num-seqs", "16", "--max-num-seqs", "8"), "8"),
        (("--max-num-seqs=16",), "16"),
        (("--max_num_seqs", "16"), "16"),
        (("--max-num-seqs",), ""),
        (("--max-num-seqs-else", "16"), ""),
    ],
)
def test_the_last_of_a_flag_counts_however_it_is_written(command: tuple[str, ...], found: str) -> None:
    assert value(command, "max-num-seqs") == found


def test_the_documented_order_is_the_one_that_is_taken() -> None:
    page = (Path(__file__).parents[2] / "docs" / "operate.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if re.match(r"\| (out of memory|no memory|KV|less)", line)]
    documented = [[re.findall(r"--[a-z-]+", cell)[0] for cell in row if "--" in cell] for row in rows]
    figures: dict[str, float] = {"free_share": 0.7}
    usual = tuple(word.replace("0.95", "0.9") for word in COMMAND)
    taken = [steps(kind, at_start=True, command=usual, most=len(AT_START[kind]), **figures) for kind in AT_START]
    taken.insert(1, steps(Kind.OUT_OF_MEMORY, at_start=False, most=2))
    assert documented == [[step.split()[0] for step in row] for row in taken]
