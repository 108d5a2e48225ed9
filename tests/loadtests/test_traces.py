"""Traces: reading and writing them, moving them in time, what caches of any size could hold, making them up."""

from __future__ import annotations

import gzip
from itertools import pairwise
from pathlib import Path

import pytest

from loadtests.traces import (
    Request,
    Synthetic,
    Trace,
    TraceError,
    cached_tokens,
    read,
    sped_up,
    speed_for_load,
    spread,
    synthetic,
    write,
)

LINES = b"""{"timestamp": 9000, "input_length": 1100, "output_length": 3, "hash_ids": [0, 7, 8]}

{"timestamp": 3000, "input_length": 512, "output_length": 0, "hash_ids": [0], "session": 12, "other": 1}
"""


def coarse(path: Path, stamps: list[float]) -> Trace:
    write(path, [Request(stamp / 1000, 10, 1) for stamp in stamps])
    return read(path)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_reads_mooncake_lines_in_order_of_time(tmp_path: Path, pack):
    path = tmp_path / "trace"
    path.write_bytes(pack(LINES))
    assert read(path).requests == (
        Request(0.0, 512, 1, (0,), "12"),
        Request(6.0, 1100, 3, (0, 7)),  # the third block is not full
    )


def test_reads_what_it_writes(tmp_path: Path):
    trace = synthetic(Synthetic(requests=50), 1)
    write(tmp_path / "trace", trace.requests)
    again = read(tmp_path / "trace").requests
    assert [request.arrival for request in again] == pytest.approx([request.arrival for request in trace.requests])
    assert [request.blocks for request in again] == [request.blocks for request in trace.requests]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no requests"),
        (b'{"timestamp": 1}\n', "line 1: .*input_length"),
        (b'{"timestamp": 1, "input_length": 0, "output_length": 1}', "line 1: .*at least 1"),
        (LINES + b"nonsense", "line 4: "),
        (b"\x1f\x8b broken", "trace"),
        (gzip.compress(LINES)[:20], "trace"),
        (gzip.compress(LINES)[:12] + b"\xff" * 40, "trace"),
    ],
)
def test_says_what_is_wrong_and_where(tmp_path: Path, content: bytes, message: str):
    path = tmp_path / "trace"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=message):
        read(path)


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(TraceError, match="No such file"):
        read(tmp_path / "missing")


def test_rounded_arrivals_are_spread_inside_their_quantum(tmp_path: Path):
    trace = coarse(tmp_path / "trace", [0] * 40 + [3000] * 40 + [6000] * 40)
    assert (trace.quantum_seconds, trace.seconds) == (3.0, 9.0)
    moved = spread(trace, seed=1)
    arrivals = [request.arrival for request in moved.requests]
    assert arrivals == sorted(arrivals)
    assert [sum(3 * i <= arrival < 3 * i + 3 for arrival in arrivals) for i in range(3)] == [40, 40, 40]
    assert len(set(arrivals)) == 120
    assert moved == spread(trace, seed=1) != spread(trace, seed=2)


@pytest.mark.parametrize("stamps", [[0, 1000, 2000], [0, 0, 0, 1500.5, 1500.5], [0, 0, 20, 20, 500, 500]])
def test_exact_arrivals_stay(tmp_path: Path, stamps: list[float]):
    trace = coarse(tmp_path / "trace", stamps)
    assert trace.quantum_seconds == 0
    assert spread(trace, seed=1) == trace


def test_load_one_offers_what_the_fleet_can_prefill():
    trace = Trace(tuple(Request(float(i), 1000, 1) for i in range(11)))  # 11,000 tokens in 10 s
    fast = sped_up(trace, speed_for_load(trace, 1.0, fleet_rate=2200.0))
    assert fast.seconds == pytest.approx(5.0)
    assert fast.input_tokens / fast.seconds == pytest.approx(2200.0)
    assert sped_up(trace, speed_for_load(trace, 0.5, 2200.0)).seconds == pytest.approx(10.0)


def test_a_trace_of_one_moment_cannot_be_scaled():
    assert speed_for_load(Trace((Request(0.0, 10, 1),)), 1.0, 100.0) == 1.0


def test_an_endless_cache_hits_all_but_the_last_block_of_a_repeated_prompt():
    trace = Trace((Request(0, 1100, 1, (1, 2)), Request(1, 1024, 1, (1, 2)), Request(2, 2000, 1, (1, 5, 6))))
    assert cached_tokens(trace, None) == [0, 512, 512]


def test_an_lru_cache_evicts_the_oldest_prompt_from_its_tail():
    first, second = Request(0, 1600, 1, (1, 2, 3)), Request(1, 600, 1, (9,))
    trace = Trace((first, second, first))
    assert cached_tokens(trace, 4 * 512) == [0, 0, 1536]
    assert cached_tokens(trace, 3 * 512) == [0, 0, 1024]


def test_synthetic_traces_follow_their_settings():
    settings = Synthetic(requests=3000, rate=10.0, groups=4, system_tokens=2048, private_tokens=1000, samples=3)
    trace = synthetic(settings, 7)
    assert trace == synthetic(settings, 7) != synthetic(settings, 8)
    assert len(trace.requests) == 3000
    assert len(trace.requests) / trace.seconds == pytest.approx(10.0, rel=0.1)
    openings = [request.blocks[:4] for request in trace.requests]
    counts = sorted((openings.count(opening) for opening in set(openings)), reverse=True)
    assert len(counts) == 4
    assert counts[0] > 3 * counts[3]
    assert trace.requests[0].blocks == trace.requests[2].blocks
    assert trace.requests[0].arrival == trace.requests[2].arrival < trace.requests[3].arrival
    assert all(len(request.blocks) == request.input_tokens // 512 for request in trace.requests)


def test_bursts_leave_the_rate_and_widen_the_gaps():
    def gaps(burstiness: float) -> list[float]:
        arrivals = [r.arrival for r in synthetic(Synthetic(requests=4000, burstiness=burstiness), 3).requests]
        return [after - before for before, after in pairwise(arrivals)]

    calm, wild = gaps(1.0), gaps(10.0)
    assert sum(wild) == pytest.approx(sum(calm), rel=0.2)
    assert max(wild) > 2 * max(calm)
