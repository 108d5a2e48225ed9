"""Traces: reading and writing them, moving them in time, what caches of any size could hold, making them up."""

from __future__ import annotations

import gzip
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from loadtests.traces import (
    GENERATORS,
    Chats,
    Rag,
    Request,
    Synthetic,
    Trace,
    TraceError,
    cached_tokens,
    generator_named,
    open_trace,
    read,
    sped_up,
    speed_for_load,
    spread,
    synthetic,
    write,
)

DATA = Path(__file__).parent / "data"
LINES = b"""{"timestamp": 9000, "input_length": 1100, "output_length": 3, "hash_ids": [0, 7, 8]}

{"timestamp": 3000, "input_length": 512, "output_length": 0, "hash_ids": [0], "session": 12, "other": 1}
"""


def coarse(path: Path, stamps: list[float]) -> Trace:
    write(path, [Request(stamp / 1000, 10 + place, 1) for place, stamp in enumerate(stamps)])
    return read(path)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_reads_mooncake_lines_in_order_of_time(tmp_path: Path, pack):
    path = tmp_path / "trace"
    path.write_bytes(pack(LINES))
    assert read(path).requests == (
        Request(0.0, 512, 1, (0,), "12"),
        Request(6.0, 1100, 3, (0, 7)),  # the third block is not full
    )


def test_thinking_is_guessed_from_the_gap_less_the_answer(tmp_path: Path):
    """120 tokens take 2 s at 60 a second; the third came before the second can have ended."""
    path = tmp_path / "trace"
    write(
        path,
        [
            Request(0.0, 10, 120, (), "a"),
            Request(1.0, 10, 60, (), "b"),
            Request(7.0, 10, 60, (), "a"),
            Request(7.5, 10, 1, (), "a"),
            Request(9.0, 10, 1),
        ],
    )
    assert [request.think_seconds for request in read(path).requests] == [None, None, 5.0, 0.0, None]


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
        (b"nonsense\n" + LINES, "line 1: not a trace; known are Mooncake"),
        (b"time,tokens\n1,2\n", "line 1: not a trace"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n\n2023-11-16 18:17:03,1\n", "line 3: 2 columns instead of 3"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,1\n", "line 2: Invalid isoformat string"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,many,1\n", "line 2: .*'many'"),
        (
            b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,-1,1\n",
            "line 2: .*ContextTokens.* at least 0",
        ),
        (b'{"hash_rle": [[0, 1]]}\n', "line 1: .*session"),
        ((DATA / "chats.jsonl").read_bytes() + b'{"session":"a"}', "line 5: .*missing"),
        ((DATA / "chats.jsonl").read_bytes().replace(b"[20,1]", b"[20,0]"), "line 2: .*count of at least 1"),
        ((DATA / "chats.jsonl").read_bytes().replace(b'"t":30.0', b'"t":-1'), "line 2: `t` must be at least 0"),
        (b'{"request_id": "a", "time": "now", "duration_seconds": 1}', "line 1: .*time"),
        (b'{"request_id": "a", "time": 5, "duration_seconds": 1}', "no request that a replica got"),
        (
            (DATA / "requests.jsonl").read_bytes().replace(b'"shared":3', b'"shared":9'),
            "line 3: `prefix` shares blocks",
        ),
        (b"\x1f\x8b broken", "trace"),
        (gzip.compress(LINES, mtime=0)[:20], "trace"),
        (gzip.compress(LINES, mtime=0)[:12] + b"\xff" * 40, "trace"),
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


# ---- Claude Code chats ---------------------------------------------------------------------------------------------


def test_chats_start_at_random_and_their_pauses_are_cut():
    """Chat a has gaps of 30 and 470 s, the second cut to 120; 1,050 of its 1,400 system tokens, hence 2 blocks, are
    common. 5 blocks and 40 tokens make the 2,600 of its first turn."""
    source = open_trace(DATA / "chats.jsonl")
    whole = [trace for seed in range(20) if len((trace := source(seed)).requests) == 4]
    assert whole, "most starts leave both chats in the window"
    for trace in whole:
        assert all(0 <= request.arrival < 3600 for request in trace.requests)
        first, second, third = [request for request in trace.requests if request.session == "a"]
        (other,) = [request for request in trace.requests if request.session == "b"]
        assert [second.arrival - first.arrival, third.arrival - second.arrival] == pytest.approx([30, 120])
        assert [first.think_seconds, second.think_seconds, third.think_seconds] == [None, 25.0, 120.0]
        assert [first.output_tokens, second.output_tokens, third.output_tokens] == [40, 1, 60]
        common = first.blocks[:2]
        assert first.blocks == (*common, 12, 13, 14)
        assert second.blocks == (*common, 12, 13, 14, 20)
        assert third.blocks == (*common, 12, 25, 26)
        assert other.blocks == (*common, 32, 33)
        assert not set(common) & {10, 11, 30, 31}
    assert source(1) == source(1) != source(2)


def test_a_chat_under_way_has_nobody_to_wait_for():
    source = open_trace(DATA / "chats.jsonl")
    cut = [[r for r in source(seed).requests if r.session == "a"] for seed in range(100)]
    cut = [requests for requests in cut if requests and requests[0].input_tokens != 2600]
    assert cut, "some of a hundred starts lie before the window"
    assert all(requests[0].think_seconds is None for requests in cut)
    assert all(request.think_seconds is not None for requests in cut for request in requests[1:])


def test_a_sample_of_chats_depends_on_the_seed():
    source = open_trace(DATA / "chats.jsonl", 1)
    chosen = [{request.session for request in source(seed).requests} for seed in range(20)]
    assert all(len(sessions) == 1 for sessions in chosen)
    assert {"a"} in chosen
    assert {"b"} in chosen
    with pytest.raises(TraceError, match="holds no chats"):
        open_trace(DATA / "azure_2023.csv", 1)


# ---- Azure, and our own log ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("azure_2023.csv", [(0.0, 4808, 10), (0.02, 110, 1), (0.052, 3180, 8)]),
        ("azure_2024.csv", [(0.0, 2162, 5), (0.5, 2399, 6), (1.0, 76, 15)]),
    ],
)
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "byte order mark"])
def test_azure_has_lengths_and_times(tmp_path: Path, name: str, expected: list[tuple[float, int, int]], mark: bytes):
    path = tmp_path / name
    path.write_bytes(mark + (DATA / name).read_bytes())
    requests = read(path).requests
    assert [request.arrival for request in requests] == pytest.approx([at for at, _, _ in expected], abs=1e-5)
    assert [(request.input_tokens, request.output_tokens) for request in requests] == [row[1:] for row in expected]
    assert all(request.blocks == () and request.think_seconds is None for request in requests)


def test_the_gateways_own_log_as_a_trace():
    """3,500 tokens in 18.5 blocks of the log: the first 512 end in its third block, the next in its sixth. So a has
    two blocks; b and c share a's first three, hence one; where c's second would end its chain is over."""
    a, b, c = read(DATA / "requests.jsonl").requests
    assert a == Request(0.0, 1500, 20, (0, 1))
    assert b == Request(2.0, 900, 1, (0,), "5e")
    assert c == Request(6.0, 1100, 7, (0,), "5e", think_seconds=1.0)


# ---- time ----------------------------------------------------------------------------------------------------------


def test_rounded_arrivals_are_spread_inside_their_quantum(tmp_path: Path):
    trace = coarse(tmp_path / "trace", [0] * 40 + [3000] * 40 + [6000] * 40)
    assert (trace.quantum_seconds, trace.seconds) == (3.0, 9.0)
    moved = spread(trace, seed=1)
    arrivals = [request.arrival for request in moved.requests]
    assert arrivals == sorted(arrivals)
    assert [sum(3 * i <= arrival < 3 * i + 3 for arrival in arrivals) for i in range(3)] == [40, 40, 40]
    assert len(set(arrivals)) == 120
    assert moved == spread(trace, seed=1) != spread(trace, seed=2)
    before = [(request.input_tokens, request.blocks) for request in trace.requests]
    assert [(request.input_tokens, request.blocks) for request in moved.requests] == before


def test_rounding_is_recognised_though_some_stamps_are_off_by_a_millisecond(tmp_path: Path):
    trace = coarse(tmp_path / "trace", [0] * 5 + [3000] * 5 + [5999] * 5 + [9001] * 5 + [15000] * 5)
    assert trace.quantum_seconds == 3.0
    arrivals = [request.arrival for request in spread(trace, seed=1).requests]
    assert arrivals == sorted(arrivals)
    assert len(set(arrivals)) == 25


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


def test_a_faster_trace_has_faster_thinkers():
    trace = Trace((Request(0.0, 10, 1), Request(4.0, 10, 1, think_seconds=3.0)))
    first, second = sped_up(trace, 2.0).requests
    assert (first.think_seconds, second.arrival, second.think_seconds) == (None, 2.0, 1.5)


def test_the_first_requests_of_a_trace():
    trace = synthetic(Synthetic(requests=30), 1)
    assert trace.first(10).requests == trace.requests[:10]
    assert trace.first(None) == trace.first(100) == trace


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


@pytest.mark.parametrize("name", GENERATORS)
def test_generated_traces_are_in_order_and_depend_on_the_seed_alone(name: str):
    settings = generator_named(name)
    trace = synthetic(settings, 3)
    assert trace == synthetic(settings, 3) != synthetic(settings, 4)
    arrivals = [request.arrival for request in trace.requests]
    assert arrivals == sorted(arrivals)
    assert arrivals[0] == 0.0
    assert all(len(request.blocks) == request.input_tokens // 512 for request in trace.requests)


def test_names_carry_settings():
    assert generator_named("samples") == Synthetic(samples=8)
    assert generator_named("bursty,rate=2.5,requests=7") == Synthetic(burstiness=10.0, rate=2.5, requests=7)


def test_samples_of_one_prompt_come_together():
    counts = Counter((request.arrival, request.blocks) for request in generator_named("samples").trace(1).requests)
    assert set(counts.values()) == {8}


def test_bursts_are_waves():
    """Variance of the requests in a second by their mean: 1 for Poisson, ten times that when the gaps say 10."""

    def dispersion(name: str) -> float:
        seconds = Counter(
            int(request.arrival) for request in generator_named(f"{name},requests=20000").trace(1).requests
        )
        counts = [seconds[second] for second in range(max(seconds))]
        mean = sum(counts) / len(counts)
        return sum((count - mean) ** 2 for count in counts) / len(counts) / mean

    assert dispersion("hot-prompt") == pytest.approx(1.0, rel=0.25)
    assert dispersion("bursty") > 5


def test_passages_are_reused_only_from_the_beginning():
    """256 tokens of system prompt and 768 of the first passage are exactly two blocks."""
    settings = Rag(requests=3000, pool=200, passages=3)
    requests = settings.trace(2).requests
    assert len({request.blocks[0] for request in requests}) == len({request.blocks[:2] for request in requests}) <= 200
    openings = Counter(request.blocks[:2] for request in requests)
    (_, most), (_, tenth) = openings.most_common()[0], openings.most_common()[9]
    assert most > 3 * tenth, "passages are not equally popular"
    # Another passage in second place: nothing behind it is the same, although the pool is small.
    followers: dict[int, set[int]] = {}
    for request in requests:
        for parent, child in pairwise(request.blocks):
            followers.setdefault(child, set()).add(parent)
    assert all(len(parents) == 1 for parents in followers.values()), "equal id, equal whole prefix"
    assert max(len({r.blocks[2] for r in requests if r.blocks[0] == opening[0]}) for opening in openings) > 20


def test_passages_of_a_prompt_are_different():
    trace = Rag(requests=50, pool=4, passages=4, skew=0.0, system_tokens=0, passage_tokens=512).trace(1)
    assert {len(set(request.blocks[:4])) for request in trace.requests} == {4}
    assert len({request.blocks[:4] for request in trace.requests}) > 10, "in changing order"


def test_chats_grow_by_answer_and_question():
    """Four users in two groups, two chats of three turns each. 1,024 + 2,048 tokens open a chat, 100 + 412 more come
    with each turn: one block."""
    settings = Chats(
        users=4, groups=2, system_tokens=1024, context_tokens=2048, turn_tokens=412, max_tokens=100, turns=3, chats=2
    )
    requests = settings.trace(5).requests
    assert len(requests) == 4 * 2 * 3
    users = {f"user-{number}": [r for r in requests if r.session == f"user-{number}"] for number in range(4)}
    for turns in users.values():
        assert [request.input_tokens for request in turns] == [3072, 3584, 4096] * 2
        assert turns[0].think_seconds is None
        assert all(request.think_seconds is not None for request in turns[1:])
        for before, after in pairwise(turns):
            gap = after.arrival - before.arrival
            assert gap == pytest.approx(100 / 60 + after.think_seconds)
        for chat in (turns[:3], turns[3:]):
            assert chat[1].blocks[:6] == chat[0].blocks
            assert chat[2].blocks[:7] == chat[1].blocks
        assert turns[3].blocks[:2] == turns[0].blocks[:2], "the system prompt stays"
        assert not set(turns[3].blocks[2:]) & set(turns[2].blocks), "the next chat is another one"
    assert users["user-0"][0].blocks[:2] == users["user-2"][0].blocks[:2] != users["user-1"][0].blocks[:2]
    assert not set(users["user-0"][0].blocks[2:]) & set(users["user-2"][0].blocks[2:])


def test_users_think_for_an_exponential_time():
    thinks = [r.think_seconds for r in Chats(think_seconds=2.0).trace(1).requests if r.think_seconds is not None]
    mean = sum(thinks) / len(thinks)
    assert mean == pytest.approx(2.0, rel=0.1)
    assert sum(think > mean for think in thinks) / len(thinks) == pytest.approx(0.368, abs=0.05)


# ---- what people do with the gateway's log -------------------------------------------------------------------------

GREETING = b"""
# Warmlane serves http://127.0.0.1:8000 in front of http://127.0.0.1:1. Ctrl-C stops all.

curl http://127.0.0.1:8000/v1/chat/completions -d '{"model": "embedded"}'
"""


def test_the_greeting_in_front_of_a_log_and_a_record_cut_off_are_left_out_and_counted(tmp_path: Path):
    path, told = tmp_path / "log.jsonl", list[str]()
    log = (DATA / "requests.jsonl").read_bytes()
    path.write_bytes(GREETING + log + log[:40])
    assert open_trace(path, tell=told.append)(0) == read(DATA / "requests.jsonl")
    assert told == [
        "lines of the log left out because they are not JSON objects: 3",
        "lines of the log left out because they are of requests without a prompt or a replica: 2",
    ]


def test_a_log_without_prefixes_says_what_to_set(tmp_path: Path):
    path, told = tmp_path / "log.jsonl", list[str]()
    path.write_bytes(b'{"request_id":"a","time":5,"duration_seconds":1,"replica":"http://a:1","prompt_tokens":2000}\n')
    assert len(open_trace(path, tell=told.append)(0).requests) == 1
    assert told == ["no prefixes in this log, so nothing can be cached: set [server] log_blocks = true"]
