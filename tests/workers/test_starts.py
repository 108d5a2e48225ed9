"""What a start measured is said beside the plan, and kept; a broken or busy file loses nothing."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from gateway.cli import main
from workers import presets
from workers.command_line import command_line
from workers.planner.start import plan_start
from workers.presets import Preset
from workers.presets.versions import Version
from workers.start_report import Identity, StartReport
from workers.starts import KEPT, Planned, Start, add, file_for, read

LOGS = Path(__file__).with_name("data") / "engine_logs"
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
    "max_position_embeddings": 32_768,
}
H200_START = """
(APIServer pid=1) INFO 11-30 12:00:00 [api_utils.py:273] non-default args: {{'model_tag': 'm'}}
(EngineCore pid=9) INFO 11-30 12:00:00 [core.py:114] Initializing a V1 LLM engine (v0.24.0) with config: model='m'
(EngineCore pid=9) INFO 11-30 12:00:30 [model_runner.py:302] Model loading took 64.67 GiB and 20.5 seconds
(EngineCore pid=9) INFO 11-30 12:01:00 [gpu_worker.py:429] Available KV cache memory: {gib} GiB
(EngineCore pid=9) INFO 11-30 12:01:00 [kv_cache_utils.py:2146] GPU KV cache size: {tokens} tokens
(EngineCore pid=9) INFO 11-30 12:01:00 [kv_cache_utils.py:2147] Maximum concurrency for 40,000 tokens per request: {x}x
(EngineCore pid=9) INFO 11-30 12:03:27 [core.py:337] init engine (profile, create kv cache, warmup model) took 150.0 s
(APIServer pid=1) INFO 11-30 12:03:27 [api_server.py:581] Starting vLLM server on http://127.0.0.1:8101
(APIServer pid=1) INFO:     Application startup complete.
"""
"""The figures of the start that was measured, in the wording of its version."""


def start(**changes: object) -> Start:
    values = {
        "time": "2026-11-30T12:00:00+00:00",
        "preset": "gpt-oss-120b-h200-141-x1",
        "profile": "recommended",
        "model": "openai/gpt-oss-120b",
        "vllm": "0.24.0",
        "hardware": "1 x NVIDIA H200",
        "flags": "--max-model-len 40000",
        "kv_tokens": 1,
        "context": 40_000,
        "concurrency": 34.58,
    }
    return msgspec.convert({**values, **changes}, Start)


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def report_on(tmp_path: Path, told: list[str]) -> Callable[..., StartReport]:
    """A report of one start, 207 seconds after it began, by a clock that is passed in."""

    def make(preset_name: str, preset: Preset, extra: str, version: Version, memory_gib: float | None) -> StartReport:
        command = command_line(preset, version=version, extra=extra.split())
        plan = plan_start(preset, command.flags, command.environment, version, memory_gib=memory_gib)
        identity = Identity(
            "replica-1", preset_name, "recommended", preset.model, "1 x NVIDIA H200", extra, str(version)
        )
        times = iter((1_000.0, 1_207.0))
        return StartReport(
            identity,
            plan,
            tmp_path / "state" / "starts.jsonl",
            told.append,
            clock=lambda: next(times),
            now=lambda: datetime(2026, 11, 30, 12, tzinfo=UTC),
        )

    return make


@pytest.fixture
def h200(report_on: Callable[..., StartReport]) -> StartReport:
    name = "gpt-oss-120b-h200-141-x1"
    flags = "--max-model-len 40000 --load-format dummy"
    return report_on(name, presets.load(name), flags, Version(0, 24), 139.8)


def hear(report: StartReport, text: str) -> None:
    for line in text.splitlines():
        report.hear(line)


# -- the report


def test_a_start_is_held_against_its_plan_in_two_lines(h200: StartReport, told: list[str]) -> None:
    hear(h200, H200_START.format(gib=57.39, tokens="1,383,290", x=34.58))
    assert told == [
        "replica-1: started in 207 s: weights 64.67 GiB, KV cache 57.39 GiB, 1,383,290 tokens, "
        "34.58 requests of 40,000 tokens",
        "replica-1: planned: weights 64.67 GiB, KV cache 57.39 GiB, 1,383,316 tokens, "
        "34.58 requests (the same to 0.1 %)",
    ]
    (kept,) = read(h200.file)
    assert kept == Start(
        time="2026-11-30T12:00:00+00:00",
        preset="gpt-oss-120b-h200-141-x1",
        profile="recommended",
        model="openai/gpt-oss-120b",
        vllm="0.24.0",
        hardware="1 x NVIDIA H200",
        flags="--max-model-len 40000 --load-format dummy",
        kv_tokens=1_383_290,
        context=40_000,
        concurrency=34.58,
        weights_gib=64.67,
        overhead_gib=3.76,
        kv_cache_gib=57.39,
        start_seconds=207.0,
        load_seconds=20.5,
        engine_seconds=150.0,
        planned=Planned(kv_tokens=1_383_316, concurrency=34.58, weights_gib=64.67, kv_cache_gib=57.39),
    )


def test_far_from_the_plan_is_said_with_what_to_tell_the_planner(h200: StartReport, told: list[str]) -> None:
    hear(h200, H200_START.format(gib=40.0, tokens="964,000", x=24.1))
    assert told[-1] == (
        "replica-1: far from the plan: `warmlane plan` with --weights 64.67 --overhead 21.15 counts with this start"
    )


def test_progress_is_there_before_the_start_is_over(h200: StartReport) -> None:
    assert h200.progress() is None
    h200.hear("Loading safetensors checkpoint shards:  56% Completed | 5/9 [00:13<00:11,  2.87s/it]")
    assert h200.progress() == "loading weights, 56 %"


def test_a_replica_that_is_started_again_is_reported_again(h200: StartReport, told: list[str]) -> None:
    text = H200_START.format(gib=57.39, tokens="1,383,290", x=34.58)
    hear(h200, text)
    hear(h200, "INFO a request came\nMaximum concurrency for 1 tokens per request: 9.00x\n")
    hear(h200, text)
    assert [line.split(" ")[1:3] for line in told[::2]] == [["started", "in"], ["started", "again:"]]
    assert [one.start_seconds for one in read(h200.file)] == [207.0, None]


def test_what_a_failed_start_wrote_is_not_the_next_ones(h200: StartReport, told: list[str]) -> None:
    """A supervisor starts it again with less; the first had loaded more than the second needs."""
    failed = (
        "] non-default args: {}\nModel loading took 99.0 GiB and 9.0 seconds\nAvailable KV cache memory: -2.14 GiB\n"
    )
    hear(h200, failed + H200_START.format(gib=57.39, tokens="1,383,290", x=34.58))
    (kept,) = read(h200.file)
    assert (kept.weights_gib, kept.kv_cache_gib, kept.start_seconds) == (64.67, 57.39, None)
    assert told[0].startswith("replica-1: started again: weights 64.67 GiB")


def test_a_quoted_log_is_no_start(h200: StartReport, told: list[str]) -> None:
    text = H200_START.format(gib=57.39, tokens="1,383,290", x=34.58)
    hear(h200, text)
    for line in text.splitlines():
        h200.hear(f"INFO [logger.py:39] Received request cmpl-1: prompt: '{line}'")
    assert len(told) == 2


def test_a_cache_set_by_a_flag_is_measured_but_not_planned(report_on: Callable[..., StartReport]) -> None:
    name = "gpt-oss-120b-h200-141-x1"
    report = report_on(
        name, presets.load(name), "--max-model-len 40000 --kv-cache-memory-bytes 12G", Version(0, 24), 139.8
    )
    hear(report, H200_START.format(gib=12.0, tokens="289,241", x=7.23))
    (kept,) = read(report.file)
    assert (kept.kv_tokens, kept.overhead_gib, kept.planned) == (289_241, None, None)


def test_a_start_with_other_flags_is_not_held_against_the_plan(h200: StartReport, told: list[str]) -> None:
    text = H200_START.format(gib=57.39, tokens="1,383,290", x=34.58)
    hear(h200, text.replace("40,000 tokens per", "20,000 tokens per"))
    assert len(told) == 1
    assert [one.planned for one in read(h200.file)] == [None]


def test_an_engine_that_says_nothing_of_its_cache_is_not_reported(h200: StartReport, told: list[str]) -> None:
    hear(h200, "pids 1 2\nStarting vLLM server on http://127.0.0.1:1\n")
    assert told == []
    assert not h200.file.exists()


def test_the_cpu_engine_is_planned_exactly(
    report_on: Callable[..., StartReport], told: list[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    tiny = msgspec.structs.replace(presets.load("cpu-tiny"), model=str(tmp_path))
    report = report_on("cpu-tiny", tiny, "", Version(0, 32), None)
    hear(report, (LOGS / "0.32-cpu.log").read_text(encoding="utf-8"))
    assert told == [
        "replica-1: started in 207 s: KV cache 1.00 GiB, 32,768 tokens, 2.00 requests of 16,384 tokens",
        "replica-1: planned: KV cache 1.00 GiB, 32,768 tokens, 2.00 requests (exactly that)",
    ]


def test_what_the_planner_does_not_cover_is_measured_all_the_same(
    report_on: Callable[..., StartReport], told: list[str]
) -> None:
    unknown = msgspec.structs.replace(presets.load("cpu-tiny"), model="some/other-model")
    report = report_on("cpu-tiny", unknown, "", Version(0, 32), None)
    hear(report, (LOGS / "0.32-cpu.log").read_text(encoding="utf-8"))
    assert len(told) == 1
    assert [one.planned for one in read(report.file)] == [None]


def test_a_file_that_cannot_be_written_is_one_more_line(h200: StartReport, told: list[str]) -> None:
    h200.file = Path("/proc/no/starts.jsonl")
    hear(h200, H200_START.format(gib=57.39, tokens="1,383,290", x=34.58))
    assert told[-1].startswith("what it measured is not kept: /proc/no/starts.jsonl: ")


# -- the file


def test_the_file_belongs_to_the_users_state() -> None:
    assert file_for({"XDG_STATE_HOME": "/state"}) == Path("/state/warmlane/starts.jsonl")
    for environment in ({}, {"XDG_STATE_HOME": ""}, {"XDG_STATE_HOME": "relative"}):
        assert file_for(environment) == Path.home() / ".local/state/warmlane/starts.jsonl"
    assert read(None) == []


def test_starts_are_kept_in_order_and_old_ones_go(tmp_path: Path) -> None:
    file = tmp_path / "a" / "starts.jsonl"
    assert read(file) == []
    for number in range(KEPT + 3):
        add(file, start(kv_tokens=number))
    assert [one.kv_tokens for one in read(file)] == list(range(3, KEPT + 3))
    assert sorted(os.listdir(file.parent)) == ["starts.jsonl", "starts.lock"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_lines_of_another_version_are_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "starts.jsonl"
    known, newer = msgspec.json.encode(start()), msgspec.json.encode({**msgspec.to_builtins(start()), "more": 1})
    file.write_bytes(b"\n".join([known, b"not JSON", b'{"preset": 1}', newer, b""]))
    assert read(file) == [start(), start()]


def test_writers_take_turns(tmp_path: Path) -> None:
    file = tmp_path / "starts.jsonl"

    def write(writer: int) -> None:
        for number in range(10):
            add(file, start(kv_tokens=100 * writer + number), patience_seconds=60.0)

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(one.kv_tokens for one in read(file)) == [100 * w + n for w in range(4) for n in range(10)]


def test_a_lock_that_is_never_let_go_is_one_more_line(h200: StartReport, told: list[str]) -> None:
    assert h200.file is not None
    add(h200.file, start())
    with h200.file.with_suffix(".lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        hear(h200, H200_START.format(gib=57.39, tokens="1,383,290", x=34.58))
    assert told[-1] == f"what it measured is not kept: {h200.file}: another process holds its lock"
    assert read(h200.file) == [start()]


def test_a_line_nested_without_end_is_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "starts.jsonl"
    file.write_bytes(b'{"x":' + b"[" * 200_000 + b"\n" + msgspec.json.encode(start()) + b"\n")
    assert read(file) == [start()]


# -- the command


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["presets", "--measured", *arguments])
    assert not ended.value.code
    return capsys.readouterr().out


def test_measured_presets_stand_beside_their_plans(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    plan = Planned(kv_tokens=1_383_317, concurrency=34.58, weights_gib=64.67)
    for tokens in (1_000_000, 1_383_290):
        add(file_for(os.environ), start(kv_tokens=tokens, weights_gib=64.7, start_seconds=99.4, planned=plan))
    add(file_for(os.environ), start(preset="gone"))
    rows = json.loads(shown(capsys, "--json"))
    ours = [row for row in rows if row["source"] == "here"]
    assert [row["kv_tokens"] for row in ours] == [1_000_000, 1_383_290]
    assert ours[1]["planned"] == {"kv_tokens": 1_383_317, "concurrency": 34.58, "weights_gib": 64.67}
    (shipped,) = [row for row in rows if row["source"] == "shipped" and row["preset"] == ours[0]["preset"]]
    assert shipped["kv_tokens"] == 1_383_290
    assert shipped["planned"]["kv_tokens"] == pytest.approx(1_383_290, rel=0.15)
    lines = shown(capsys).splitlines()
    (at,) = [index for index, line in enumerate(lines) if "1 x NVIDIA H200" in line]
    assert lines[at : at + 3] == [
        "gpt-oss-120b-h200-141-x1 recommended, vLLM 0.24.0, 1 x NVIDIA H200 (here, 2026-11-30 12:00)",
        f"    with {ours[1]['flags']}",
        "    weights 64.70 GiB (plan: 64.67), KV tokens 1,383,290 (plan: 1,383,317), started in 99 s",
    ]
    other = "--gpu-memory-utilization 0.9 --max-model-len 40000 --load-format dummy"
    assert f"    with the profile's flags, but {other}" in lines
    with pytest.raises(SystemExit):
        main(["presets"])
    assert f"measured: one H200 141 GB (with {other})" in capsys.readouterr().out
