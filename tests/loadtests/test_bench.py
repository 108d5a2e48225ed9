"""The data-path benchmark: its accounts, its bodies and its tables. C programs and peers are `make bench`'s own."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from loadtests.bench.bodies import FILES, GROUPS, NONCE, BodyFile, make_body
from loadtests.bench.gateways import gateway_from_command
from loadtests.bench.processes import BenchmarkFailure
from loadtests.bench.report import Figure, Record, Results, RunHeader, read_results, write_report
from loadtests.bench.stand import Counts, LoadReport, MockSettings, Stand, Totals, Workshop, difference

HEADER = RunHeader("2030-01-01 00:00", "a machine", {"warmlane": "0"}, {})
CPU = Figure("saturation-1k", "cpu_us")


def make_stand(verbatim: bool = True) -> Stand:
    workshop = Workshop(Path("unused"), gateway_core=0, load_core=1)
    return Stand(workshop, MockSettings(20, 200, 1_000), port=1, gateway_pid=1, mocks={}, verbatim=verbatim)


SENT = Totals(sent=10, done=10, failed=0, events=402, request_bytes=1_000, request_sum=77, response_bytes=5_000)
COUNTED = Counts(requests=10, streams=2, events=402, request_bytes=1_000, request_sum=77, response_bytes=5_000)


def check(totals: Totals, counted: Counts, verbatim: bool = True) -> None:
    make_stand(verbatim).check(LoadReport(1.0, 0.1, 10, 402, totals, None, None, None), counted)


def test_accepts_a_load_on_which_both_sides_agree() -> None:
    check(SENT, COUNTED)


@pytest.mark.parametrize(
    ("totals", "counted"),
    [
        ({"done": 9, "failed": 1}, {}),
        ({}, {"requests": 11}),
        ({"events": 401}, {}),
        ({}, {"events": 401}),
        ({}, {"request_bytes": 999}),
        ({}, {"request_sum": 78}),
        ({"response_bytes": 4_999}, {}),
    ],
)
def test_refuses_figures_when_anything_was_lost_or_changed(totals: dict[str, int], counted: dict[str, int]) -> None:
    with pytest.raises(BenchmarkFailure, match="expected"):
        check(msgspec.structs.replace(SENT, **totals), msgspec.structs.replace(COUNTED, **counted))


def test_lets_routers_write_json_anew_but_not_drop_text() -> None:
    check(SENT, msgspec.structs.replace(COUNTED, request_bytes=1_070, request_sum=1), verbatim=False)
    with pytest.raises(BenchmarkFailure, match="arrived"):
        check(SENT, msgspec.structs.replace(COUNTED, request_bytes=500, request_sum=1), verbatim=False)


def test_counts_are_compared_as_differences_and_sums_wrap_around() -> None:
    before = Counts(requests=5, request_sum=2**64 - 1)
    after = Counts(requests=8, request_sum=4)
    assert difference(after, before) == Counts(requests=3, request_sum=5)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_bodies_are_chats_of_the_promised_size(file: BodyFile) -> None:
    body = make_body(file, group=1, member=2)
    assert body == make_body(file, group=1, member=2)
    assert body.count(NONCE.encode()) == 1
    assert abs(len(body) - file.bytes_each) < 0.25 * file.bytes_each
    assert json.loads(body)["stream"] is file.stream


def test_conversations_of_a_group_share_half_their_prompt_and_groups_share_none() -> None:
    file = next(file for file in FILES if file.name == "chat_32k")
    one, same, other = (make_body(file, group, member) for group, member in ((0, 0), (0, 1), (GROUPS - 1, 0)))
    assert 0.4 < shared_bytes(one, same) / len(one) < 0.6
    assert shared_bytes(one, other) < 100


def test_distinct_prompts_differ_from_their_first_block_on() -> None:
    file = next(file for file in FILES if file.distinct)
    assert make_body(file, group=0, member=0).index(NONCE.encode()) < 100


def shared_bytes(left: bytes, right: bytes) -> int:
    return next(at for at, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1])


def saturation(at: int, gateway: str, cpu_us: float) -> Record:
    return Record(at, gateway, "saturation-1k", {"cpu_us": cpu_us, "foreign_cores": 0.0})


def latency(at: int, gateway: str, p50_ms: float) -> Record:
    return Record(at, gateway, "latency-32k", {"latency_p50_ms": p50_ms})


def test_a_figure_is_the_median_over_rounds() -> None:
    results = Results(HEADER, [saturation(at, "warmlane", value) for at, value in ((1, 30.0), (2, 90.0), (3, 40.0))])
    assert results.value("warmlane", CPU) == 40.0
    assert results.value("nginx", CPU) is None


def test_added_latency_is_taken_round_by_round() -> None:
    rounds = [(1, 1.0, 1.5), (2, 9.0, 9.25), (3, 2.0, 2.25)]
    records = [latency(at, "direct", direct) for at, direct, _ in rounds]
    records += [latency(at, "warmlane", ours) for at, _, ours in rounds]
    assert Results(HEADER, records).value("warmlane", Figure("latency-32k", "latency_p50_ms", added=True)) == 0.25


def test_the_report_judges_targets_by_ratio_to_the_peer() -> None:
    records = [
        saturation(1, "warmlane", 30.0),
        saturation(1, "vllm-router", 100.0),
        saturation(1, "sglang-router", 40.0),
    ]
    report = write_report(Results(HEADER, records))
    assert "| CPU per request at 1 KB, of vllm-router's | ≤ 0.4 | 0.30 | met |" in report
    assert "| CPU per request at 1 KB, of sglang-router's | ≤ 0.6 | 0.75 | MISSED |" in report
    assert "| added latency p50 at 32 KB, ms | ≤ 0.8 | – | not measured |" in report


def test_the_report_shows_failures_and_noise() -> None:
    noisy = Record(1, "nginx", "saturation-1k", {"cpu_us": 1.0, "foreign_cores": 0.8})
    failed = Record(1, "warmlane", "stream", failure="events received: 1, expected 2")
    report = write_report(Results(HEADER, [noisy, failed]))
    assert "**NOISY**: in 1 of 2 phases" in report
    assert "**FAILED** warmlane, stream, round 1: events received: 1, expected 2" in report


def test_results_files_read_back(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    record = saturation(1, "nginx", 20.0)
    file.write_bytes(msgspec.json.encode(HEADER) + b"\n" + msgspec.json.encode(record) + b"\n")
    results = read_results(file)
    assert results.header == HEADER
    assert results.records == [record]


def test_another_gateway_needs_a_name_and_a_command() -> None:
    assert gateway_from_command("mine=serve --port {port}").name == "mine"
    with pytest.raises(BenchmarkFailure, match="NAME=COMMAND"):
        gateway_from_command("serve")
