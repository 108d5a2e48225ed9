"""The command line is exact; a worker starts, tells, stops, and leaves nothing behind, whoever dies first."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from workers import presets, starts
from workers.command_line import EVENTS_FLAG, GATEWAY_FLAGS, base_url, command_line
from workers.engine_version import LaunchError
from workers.gpus import Device
from workers.launch import Request, fit_to_keep, prepare, run_replica
from workers.placement import Machine
from workers.presets.versions import Version
from workers.worker import HEARD_CHARACTERS, LINES_AT_ONCE, STOP_GRACE_SECONDS, Worker, WorkerFailed

FAKE_VLLM = str(Path(__file__).with_name("fake_vllm.py"))
WARMLANE = [sys.executable, "-c", "from gateway.cli import main; main()"]
DEADLINE_SECONDS = 20.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_running(pid: int) -> bool:
    """A zombie has ended, whether or not somebody has collected it."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.02)


def announced(output: str) -> list[int]:
    """Ids of the processes that the stand-in said it has."""
    match = re.search(r"pids (\d+) (\d+)", output)
    return [int(pid) for pid in match.groups()] if match else []


class Replica:
    """A worker that runs the stand-in, and what it wrote."""

    def __init__(self, model: str, **environment: str) -> None:
        self.output = io.StringIO()
        port = free_port()
        argv = [sys.executable, FAKE_VLLM, "serve", model, "--host", "127.0.0.1", "--port", str(port)]
        self.worker = Worker(argv, environment, base_url("127.0.0.1", port), name="r1", output=self.output)

    def pids(self) -> list[int]:
        return announced(self.output.getvalue())

    async def wait_pids(self) -> list[int]:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not self.pids():
            assert time.monotonic() < deadline, "no process ids were announced"
            await asyncio.sleep(0.02)
        return self.pids()


@pytest.fixture
def foreground() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start `warmlane replica` with the stand-in; whatever is left at the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(model: str, *arguments: str) -> subprocess.Popen[str]:
        command = [*WARMLANE, "replica", "--preset", "cpu-tiny", "--vllm", FAKE_VLLM]
        command += ["--model", model, "--port", str(free_port()), *arguments]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """Lines of stderr up to the one that has `text`; blocks in between, ends with the process."""
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if text in line:
            return "".join(lines)
    raise AssertionError(f"no {text!r} in:\n{''.join(lines)}")


# ---- the command line ----------------------------------------------------------------------------------------------


def test_spec_profile_is_the_specifications_command_and_an_address() -> None:
    preset = presets.load("gpt-oss-120b-h100-80-x2")
    command = command_line(preset, "spec", host="0.0.0.0", port=8000)
    assert str(command) == (
        "vllm serve openai/gpt-oss-120b --tensor-parallel-size 2 --max-model-len 65536 --max-num-seqs 32 "
        "--max-num-batched-tokens 8192 --host 0.0.0.0 --port 8000"
    )
    assert command.environment == {}


def test_every_other_profile_has_the_flags_that_the_gateway_relies_on() -> None:
    for name, preset in presets.load_all().items():
        for profile in set(preset.profiles) - {"spec"}:
            argv = command_line(preset, profile, host="0.0.0.0").argv
            relied_on = {f"--{flag}" for flag in [*GATEWAY_FLAGS, EVENTS_FLAG]}
            assert relied_on <= set(argv) or preset.program == "embedded", name


def test_kv_events_stay_off_where_a_version_pays_for_them_with_half_its_cache() -> None:
    preset = presets.load("gpt-oss-120b-h100-80-x2")
    old, new = (command_line(preset, version=Version(0, minor)) for minor in (19, 20))
    assert f"--{EVENTS_FLAG}" not in old.argv
    assert "in vLLM 0.19.0 they switch its hybrid KV cache off" in old.notes[0]
    assert f"--{EVENTS_FLAG}" in new.argv
    assert new.notes == ()
    without_windows = command_line(presets.load("qwen3-8b-l40s-48-x1"), version=Version(0, 18))
    assert f"--{EVENTS_FLAG}" in without_windows.argv
    spec = command_line(preset, "spec", version=Version(0, 19))
    assert spec.notes == ()


def test_data_parallel_ranks_publish_kv_events_on_tcp_or_not_at_all() -> None:
    """With a socket file vLLM's second rank ends with `ValueError: Invalid endpoint`."""
    preset = presets.load("gpt-oss-120b-h100-80-x4")
    near, far = (command_line(preset, "throughput", host=host) for host in ("127.0.0.1", "0.0.0.0"))
    assert f"--{EVENTS_FLAG}" not in near.argv
    assert "on TCP only" in near.notes[0]
    assert "tcp://*:18101" in far.argv[far.argv.index(f"--{EVENTS_FLAG}") + 1]


def test_embedded_replica_runs_with_this_python() -> None:
    command = command_line(presets.load("embedded"), port=9001)
    assert command.argv[:5] == (sys.executable, "-m", "workers.sim_replica", "--model", "embedded")
    assert command.argv[-4:] == ("--host", "127.0.0.1", "--port", "9001")


def test_events_leave_the_machine_only_when_http_does() -> None:
    preset = presets.load("gpt-oss-120b-h200-141-x1")

    def endpoints(host: str, port: int) -> list[str]:
        argv = command_line(preset, host=host, port=port).argv
        events = json.loads(argv[argv.index("--kv-events-config") + 1])
        return [events["endpoint"], events["replay_endpoint"]]

    for host in ("127.0.0.1", "localhost", "::1"):
        assert endpoints(host, 8101) == [
            f"ipc:///tmp/warmlane-{os.getuid()}-kv-{kind}-8101" for kind in ("events", "replay")
        ]
    assert endpoints("0.0.0.0", 8000) == ["tcp://*:18000", "tcp://*:28000"]
    assert endpoints("10.0.0.7", 60_000) == ["tcp://*:50000", "tcp://*:40000"]


def test_flags_of_the_user_come_last() -> None:
    command = command_line(presets.load("cpu-tiny"), extra=["--max-num-seqs", "2"])
    assert command.argv[-2:] == ("--max-num-seqs", "2")


@pytest.mark.parametrize(
    ("host", "url"),
    [("0.0.0.0", "http://127.0.0.1:1"), ("::1", "http://[::1]:1"), ("::", "http://[::1]:1"), ("a.b", "http://a.b:1")],
)
def test_base_url_is_one_that_can_be_connected_to(host: str, url: str) -> None:
    assert base_url(host, 1) == url


def test_dry_run_prints_environment_and_command_and_needs_no_vllm(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    assert run_replica(Request("cpu-tiny", must_run=False), port=8102) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("VLLM_TARGET_DEVICE=cpu ")
    assert " vllm serve .cache/tiny-model " in printed.out
    assert printed.out.count("\n") == 1
    assert printed.err == "warmlane: for vLLM 0.32.0 (assumed: vLLM was not found)\n"


# ---- wrong usage: exit code 2 and one line -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "profile", "vllm", "line"),
    [
        ("nope", "recommended", FAKE_VLLM, "unknown preset 'nope'"),
        ("cpu-tiny", "spec", FAKE_VLLM, "no profile 'spec'"),
        ("cpu-tiny", "recommended", "/does/not/exist", "--vllm /does/not/exist: not an executable file"),
        ("cpu-tiny", "recommended", None, "vLLM was not found: pip install"),
        ("cpu-tiny", "recommended", FAKE_VLLM, "the model directory .cache/tiny-model does not exist"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    preset: str,
    profile: str,
    vllm: str | None,
    line: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.chdir(tmp_path)
    assert run_replica(Request(preset, profile, vllm)) == 2
    stderr = capsys.readouterr().err
    assert line in stderr
    assert stderr.startswith("warmlane: ")
    assert stderr.count("\n") == 1


# ---- what is chosen and checked before anything starts -------------------------------------------------------------


H200S = tuple(Device("nvidia", index, "NVIDIA H200", 139.8, f"0000:0{index}:00.0") for index in range(2))
H200_PRESET = "gpt-oss-120b-h200-141-x1"


def dry(preset: str | None = None, **told: Any) -> Request:
    return Request(preset, must_run=False, vllm_version="0.32.0", **told)


def test_without_a_preset_the_cards_choose(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_replica(dry(), machine=Machine(H200S)) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("CUDA_VISIBLE_DEVICES=0 vllm serve openai/gpt-oss-120b ")
    assert printed.err.splitlines() == [
        f"warmlane: 2 x NVIDIA H200: {H200_PRESET}, 2 replicas of 1",
        "warmlane: for vLLM 0.32.0 (told)",
    ]


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        (Machine(), "no GPU found (no driver is installed)"),
        (Machine(H200S, {"CUDA_VISIBLE_DEVICES": ""}), "no GPU found (CUDA_VISIBLE_DEVICES='' leaves none)"),
        (Machine(troubles=("nvidia-smi is ill",)), "WARNING: no GPU found (nvidia-smi is ill)"),
    ],
)
def test_without_cards_it_is_the_embedded_replica_and_it_says_why(
    machine: Machine, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_replica(dry(), machine=machine) == 0
    printed = capsys.readouterr()
    assert " -m workers.sim_replica " in printed.out
    assert printed.err == f"warmlane: {reason}: embedded replicas, whose answers are made up\n"


def test_a_driver_that_fails_is_loud_also_where_a_preset_is_named() -> None:
    launch = prepare(dry(H200_PRESET), Machine(troubles=("nvidia-smi is ill",)))
    assert launch.notes == ("WARNING: a GPU driver is here and fails: nvidia-smi is ill",)


@pytest.mark.parametrize(
    ("extra", "line"),
    [
        (("foo",), "'foo' is not a flag: behind -- come flags of the engine"),
        (("--port", "9"), "--port behind --: the gateway would look elsewhere"),
        (("--seed", "1", "--host=a"), "--host behind --: the gateway would look elsewhere"),
        (("--no-such-flag", "3"), "--no-such-flag is not among the flags"),
    ],
)
def test_flags_that_cannot_be_meant_are_refused_as_written(
    extra: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_replica(dry(H200_PRESET, extra=extra), machine=Machine()) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"warmlane: {line}")
    assert printed.err.count("\n") == 1


def test_flags_that_cost_the_routing_are_warned_of() -> None:
    extra = ("--no_enable_prefix_caching", "--served-model-name", "a", "b", "--served-model-name=mine")
    launch = prepare(dry("cpu-tiny", extra=extra), Machine())
    assert launch.notes[0].startswith("--no_enable_prefix_caching: without a prefix cache")
    assert launch.notes[1].startswith("--served-model-name: it beats the preset's")
    assert launch.model_name == "mine"


@pytest.mark.parametrize(
    ("preset", "model", "name"),
    [
        ("cpu-tiny", None, "tiny"),
        ("cpu-tiny", "org/other", "tiny"),  # --served-model-name is the preset's
        (H200_PRESET, "org/other", "org/other"),
        ("embedded", "other", "other"),
    ],
)
def test_clients_write_the_name_that_is_served(preset: str, model: str | None, name: str) -> None:
    assert prepare(dry(preset, model=model), Machine()).model_name == name


def test_cards_without_a_preset_are_refused_or_left_alone() -> None:
    old = Machine((Device("nvidia", 0, "NVIDIA GeForce RTX 3060", 12.0, ""),))
    with pytest.raises(LaunchError, match="no preset is for 1 x NVIDIA GeForce RTX 3060: name one with --preset"):
        prepare(dry(), old)
    launch = prepare(dry(), old, may_embed=True)
    assert (launch.name, launch.engine) == ("embedded", None)
    assert launch.notes[0].startswith("no preset is for 1 x NVIDIA GeForce RTX 3060: embedded replicas")


def test_cards_without_vllm_get_embedded_replicas_and_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """`warmlane up` on a machine with cards works at once, too, and says what it could have been."""
    monkeypatch.setenv("PATH", "/nowhere")
    launch = prepare(Request(), Machine(H200S), may_embed=True)
    assert launch.name == "embedded"
    assert launch.notes[0].startswith(f"2 x NVIDIA H200: {H200_PRESET}, 2 replicas of 1; but vLLM was not found")
    with pytest.raises(LaunchError, match="vLLM was not found"):
        prepare(Request(), Machine(H200S))


def test_a_replica_of_each_card_is_prepared(tmp_path: Path) -> None:
    machine = Machine(H200S, {"XDG_STATE_HOME": str(tmp_path)})
    launch = prepare(Request(vllm=FAKE_VLLM, vllm_version="0.32.0"), machine, may_embed=True)
    assert (launch.name, launch.replicas) == (H200_PRESET, 2)
    workers = [launch.worker(f"r{index}", "127.0.0.1", 8101 + index, index, 2)[0] for index in (0, 1)]
    assert [worker.environment["CUDA_VISIBLE_DEVICES"] for worker in workers] == ["0", "1"]
    assert [worker.url for worker in workers] == ["http://127.0.0.1:8101", "http://127.0.0.1:8102"]
    with pytest.raises(LaunchError, match="3 replicas of 1 need 3"):
        launch.worker("r2", "127.0.0.1", 8103, 2, 3)
    template, _ = launch.worker("r1", "127.0.0.1", 8102, 1, 2, lambda: 8109)
    assert template.elsewhere is not None
    moved = template.elsewhere()
    assert (moved.url, moved.environment) == ("http://127.0.0.1:8109", template.environment)
    assert "8102" not in " ".join(moved.command)  # its socket files have the port in their names, too


def test_keys_and_addresses_are_not_kept_with_the_flags() -> None:
    words = ["--api-key", "one", "two", "--seed", "7", "--hf_token=three", "--kv-events-config", "{}", "-tp", "2"]
    assert fit_to_keep(words) == ["--api-key", "***", "***", "--seed", "7", "--hf_token=***", "-tp", "2"]


@pytest.mark.parametrize(
    ("preset", "words", "cards"),
    [
        ("any", "--tensor-parallel-size 2", ["0,1", "2,3"]),
        ("any", "-tp 2 -pp 2", ["0,1,2,3"]),
        ("any", "", ["0", "1", "2", "3"]),
        (H200_PRESET, "--tensor-parallel-size=2", ["0,1", "2,3"]),
        (H200_PRESET, "--tensor-parallel-size many", ["0", "1", "2", "3"]),  # vLLM says what is wrong with it
    ],
)
def test_a_replica_takes_the_cards_that_its_split_needs(
    preset: str, words: str, cards: list[str], tmp_path: Path
) -> None:
    devices = tuple(replace(H200S[0], index=index, bus_id=f"0000:0{index}:00.0") for index in range(4))
    machine = Machine(devices, {"XDG_STATE_HOME": str(tmp_path)})
    asked = Request(preset, vllm_version="0.32.0", model="m", extra=tuple(words.split()), must_run=False)
    launch = prepare(asked, machine)
    placed = [launch.place(index, len(cards)) for index in range(len(cards))]
    assert [",".join(one.gpus) for one in placed] == cards
    assert launch.preset.gpu is not None
    assert launch.preset.gpu.name == "h200-141"


def test_any_model_needs_a_name_and_takes_cards_that_nobody_listed(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"^preset any loads what --model names$"):
        prepare(Request("any", must_run=False), Machine(H200S))
    unknown = (replace(H200S[0], title="NVIDIA Rubin"),)
    machine = Machine(unknown, {"XDG_STATE_HOME": str(tmp_path)})
    launch = prepare(Request("any", vllm=FAKE_VLLM, vllm_version="0.32.0", model="m"), machine)
    worker, command = launch.worker("r1", "127.0.0.1", 8101)
    assert command.notes == ()
    assert "--model" not in worker.command
    assert launch.hardware(launch.place()) == "1 x NVIDIA Rubin"
    with pytest.raises(LaunchError, match="any model: --preset any --model NAME"):
        prepare(Request(must_run=False), machine)


def test_a_dry_run_needs_no_cards_either(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_replica(dry("gpt-oss-120b-h100-80-x4", profile="spec"), machine=Machine(H200S)) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("vllm serve openai/gpt-oss-120b --tensor-parallel-size 4 ")
    assert "2 x NVIDIA H200 are visible; 1 replica of 4 needs 4" in printed.err


def test_a_bound_replica_says_so_in_its_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    machine = Machine(H200S, numactl="/usr/bin/numactl", numa=lambda device: device.index)
    assert run_replica(dry(H200_PRESET), machine=machine) == 0
    printed = capsys.readouterr()
    bound = "CUDA_VISIBLE_DEVICES=0 /usr/bin/numactl --cpunodebind=0 --membind=0 vllm serve "
    assert printed.out.startswith(bound)
    assert "bound to memory node 0, where its cards are" in printed.err


@pytest.mark.parametrize(
    ("version", "code", "line"),
    [
        ("0.24.0", 2, "vLLM 0.24.0 does not know --prefix-cache-retention-interval (vLLM 0.29.0 and later)"),
        ("0.32.0", 0, "for vLLM 0.32.0 (told)"),
        ("0.33.0", 0, "vLLM 0.33.0 (told) is newer than 0.32.0"),
    ],
)
def test_a_flag_that_the_version_does_not_know_is_refused(
    version: str, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    extra = ("--prefix-cache-retention-interval", "0")
    request = Request("qwen3-8b-l40s-48-x1", must_run=False, vllm_version=version, extra=extra)
    assert run_replica(request, machine=Machine()) == code
    printed = capsys.readouterr()
    assert bool(printed.out) == (code == 0)
    assert line in printed.err


@pytest.mark.parametrize(
    ("model", "kept"),
    [
        (None, True),
        ("openai/gpt-oss-20b", True),
        ("Qwen/Qwen3-8B", False),
        ("/models/that-is-not-here", False),
    ],
)
def test_what_only_sliding_windows_need_is_left_out_for_other_models(model: str | None, kept: bool) -> None:
    """vLLM 0.24 on an H200 ended with "this model has no sliding-window or Mamba KV cache group, so retention has no
    effect. Unset it"."""
    command = command_line(presets.load(H200_PRESET), version=Version(0, 24, 0), model=model)
    assert ("VLLM_PREFIX_CACHE_RETENTION_INTERVAL" in command.environment) == kept


def test_the_version_that_was_found_decides_the_flags(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VERSION", "0.28.0")
    request = Request(H200_PRESET, vllm=FAKE_VLLM, must_run=False)
    assert run_replica(request, machine=Machine()) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(f"VLLM_PREFIX_CACHE_RETENTION_INTERVAL=0 {FAKE_VLLM} serve ")
    assert printed.err == f"warmlane: for vLLM 0.28.0 (found at {FAKE_VLLM})\n"


# ---- a worker ------------------------------------------------------------------------------------------------------


async def test_starts_waits_until_healthy_and_stops_every_process() -> None:
    replica = Replica("ok", COLOUR="blue")
    await replica.worker.start()
    await replica.worker.wait_ready(DEADLINE_SECONDS)
    pids = replica.pids()
    assert pids[0] == replica.worker.pid
    assert all(is_running(pid) for pid in pids)
    assert "r1 | pids" in replica.output.getvalue()
    assert "colour=blue" in replica.output.getvalue()
    await replica.worker.stop()
    assert replica.worker.exit_code == -signal.SIGTERM
    wait_until(lambda: not any(map(is_running, pids)), "both processes are gone")
    await replica.worker.stop()


async def test_two_workers_start_side_by_side() -> None:
    replicas = [Replica("ok"), Replica("ok")]
    await asyncio.gather(*(replica.worker.start() for replica in replicas))
    await asyncio.gather(*(replica.worker.wait_ready(DEADLINE_SECONDS) for replica in replicas))
    await asyncio.gather(*(replica.worker.stop() for replica in replicas))
    assert all(replica.worker.exit_code is not None for replica in replicas)


async def test_an_end_before_ready_shows_the_last_lines() -> None:
    replica = Replica("broken")
    await replica.worker.start()
    with pytest.raises(WorkerFailed, match=r"(?s)r1 .*ended before it was ready: exit code 3.*CUDA out of memory"):
        await replica.worker.wait_ready(DEADLINE_SECONDS)
    await replica.worker.stop()


async def test_not_ready_in_time_is_said_and_it_can_still_be_stopped() -> None:
    replica = Replica("silent")
    await replica.worker.start()
    pids = await replica.wait_pids()
    with pytest.raises(WorkerFailed, match="not ready after 0 s"):
        await replica.worker.wait_ready(0.3)
    assert is_running(pids[0])
    await replica.worker.stop()
    wait_until(lambda: not any(map(is_running, pids)), "both processes are gone")


async def test_while_it_waits_it_says_how_far_the_start_is() -> None:
    replica = Replica("silent")
    replica.worker.progress = lambda: "loading weights, 56 %"
    await replica.worker.start()
    with pytest.raises(WorkerFailed, match="not ready after 1 s"):
        await replica.worker.wait_ready(0.6, report_seconds=0.2)
    assert "r1 | not ready yet, 0 s of at most 1 s: loading weights, 56 %" in replica.output.getvalue()
    await replica.worker.stop()


async def test_what_cannot_be_executed_is_said() -> None:
    worker = Worker(["/does/not/exist"], {}, "http://127.0.0.1:1", name="r1")
    with pytest.raises(WorkerFailed, match="r1: cannot run /does/not/exist: No such file"):
        await worker.start()
    await worker.stop()


class WorkerWithoutWatchdog(Worker):
    """Somebody kills the watchdog, and sees it end, before it is told what to watch."""

    async def _start_watchdog(self) -> None:
        await super()._start_watchdog()
        assert self._watchdog is not None
        self._watchdog.kill()
        await self._watchdog.wait()


async def test_a_start_that_cannot_be_watched_leaves_nothing_behind(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    script = f"echo $$ > {told}.new && mv {told}.new {told}; sleep 300"
    worker = WorkerWithoutWatchdog(["/bin/sh", "-c", script], {}, "http://127.0.0.1:1", name="r", output=io.StringIO())
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(WorkerFailed, match="cannot run /bin/sh: Broken pipe"):
        await worker.start()
    assert worker.exit_code == -signal.SIGKILL
    assert worker.pid is not None
    assert not is_running(worker.pid)
    assert set(os.listdir("/proc/self/fd")) == before
    await worker.stop()


async def test_without_a_descriptor_for_its_output_the_watchdog_ends_too() -> None:
    """Just enough are left for the watchdog."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    worker = WorkerShortOfDescriptors(["true"], {}, "http://127.0.0.1:1", name="r", output=io.StringIO())
    try:
        with pytest.raises(WorkerFailed, match="cannot run true: Too many open files"):
            await worker.start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert worker.watchdog is not None
    assert worker.watchdog.returncode == 0


class WorkerShortOfDescriptors(Worker):
    watchdog: asyncio.subprocess.Process | None = None

    async def _start_watchdog(self) -> None:
        await super()._start_watchdog()
        self.watchdog = self._watchdog
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))


async def test_a_port_that_somebody_else_has_is_not_taken_for_ready() -> None:
    stranger = Replica("ok")
    await stranger.worker.start()
    await stranger.worker.wait_ready(DEADLINE_SECONDS)
    late = Worker(stranger.worker.command, {}, stranger.worker.url, name="r2")
    with pytest.raises(WorkerFailed, match="r2: something else listens on http://"):
        await late.start()
    await late.stop()
    await stranger.worker.stop()


async def test_one_that_ignores_sigterm_is_killed_after_its_grace_time() -> None:
    replica = Replica("stubborn")
    await replica.worker.start()
    await replica.worker.wait_ready(DEADLINE_SECONDS)
    await replica.worker.stop(grace_seconds=0.2)
    assert replica.worker.exit_code == -signal.SIGKILL


async def test_a_cancelled_stop_kills_at_once() -> None:
    replica = Replica("stubborn")
    await replica.worker.start()
    await replica.worker.wait_ready(DEADLINE_SECONDS)
    stopping = asyncio.create_task(replica.worker.stop(grace_seconds=3_600))
    await asyncio.sleep(0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert await replica.worker.wait() == -signal.SIGKILL


@pytest.mark.parametrize("model", ["ok", "wild"])
async def test_a_leader_that_dies_takes_its_processes_along(model: str) -> None:
    replica = Replica(model)
    await replica.worker.start()
    await replica.worker.wait_ready(DEADLINE_SECONDS)
    leader, engine = replica.pids()
    async with httpx.AsyncClient(trust_env=False) as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get(f"{replica.worker.url}/end")
    assert await replica.worker.wait() == 4
    wait_until(lambda: not is_running(engine), "the engine is gone too")
    assert not is_running(leader)


async def test_socket_files_of_the_command_are_removed_at_the_end(tmp_path: Path) -> None:
    left, other = tmp_path / "events", tmp_path / "other"
    left.touch()
    other.touch()
    endpoints = json.dumps({"endpoint": f"ipc://{left}", "replay_endpoint": f"ipc://{tmp_path}/never-made"})
    worker = Worker(["true", endpoints], {}, "http://127.0.0.1:1", output=io.StringIO())
    await worker.start()
    assert await worker.wait() == 0
    assert not left.exists()
    assert other.exists()


async def test_output_of_any_length_and_any_bytes_passes() -> None:
    replica = Replica("loud")
    await replica.worker.start()
    await replica.worker.wait_ready(DEADLINE_SECONDS)
    await replica.worker.stop()
    lines = replica.output.getvalue().splitlines()
    assert sum(line.count("x") for line in lines if set(line.removeprefix("r1 | ")) == {"x"}) == 200_000
    assert lines[-3:] == ["r1 | bar 10%", "r1 | bar 100%", "r1 | bad � byte"]


async def test_each_line_is_told_to_who_asked() -> None:
    lines: list[str] = []
    replica = Replica("broken")
    replica.worker.listeners.append(lines.append)
    await replica.worker.start()
    await replica.worker.wait()
    assert lines == [line.removeprefix("r1 | ") for line in replica.output.getvalue().splitlines()]
    assert lines[-1] == "CUDA out of memory, say"


async def test_no_listener_ends_the_copying_of_the_output(caplog: pytest.LogCaptureFixture) -> None:
    lines: list[str] = []

    def fail(line: str) -> None:
        raise ValueError(line)

    output = io.StringIO()
    script = "i=0; while [ $i -lt 50 ]; do echo line $i; sleep 0.01; i=$((i+1)); done"
    replica = Worker(["/bin/sh", "-c", script], {}, "http://127.0.0.1:1", name="r", output=output, on_line=fail)
    worker = replica.again(on_line=lines.append)
    await worker.start()
    assert await worker.wait() == 0
    assert lines == [f"line {number}" for number in range(50)]
    assert output.getvalue() == "".join(f"r | {line}\n" for line in lines)
    assert [record.getMessage() for record in caplog.records] == [
        "r: one that listens to its output failed, and hears no more of it"
    ]


async def test_a_long_line_is_passed_on_whole_and_its_beginning_is_heard() -> None:
    lines: list[str] = []
    output = io.StringIO()
    script = "import os\nfor _ in range(50_000): os.write(1, b'x')\nprint('\\nend')"
    worker = Worker([sys.executable, "-c", script], {}, "http://127.0.0.1:1", name="r", output=output)
    worker.listeners.append(lines.append)
    await worker.start()
    assert await worker.wait() == 0
    assert output.getvalue() == f"r | {'x' * 50_000}\nr | end\n"
    assert lines == ["x" * HEARD_CHARACTERS, "end"]


async def test_a_flood_of_lines_leaves_turns_for_everything_else() -> None:
    """Between two turns of the loop at most some hundred lines are passed on, of 20,000 that are there at once."""
    lines: list[str] = []
    worker = Worker(["/bin/sh", "-c", "yes | head -n 100000"], {}, "http://127.0.0.1:1", output=io.StringIO())
    worker.listeners.append(lines.append)
    await worker.start()
    ended = asyncio.ensure_future(worker.wait())
    turns = [0]
    while not ended.done():
        await asyncio.sleep(0)
        turns.append(len(lines))
    assert len(lines) == 100_000
    assert max(after - before for before, after in itertools.pairwise(turns)) <= 2 * LINES_AT_ONCE


async def test_the_embedded_preset_is_a_replica_that_answers() -> None:
    preset, port = presets.load("embedded"), free_port()
    command = command_line(preset, port=port)
    worker = Worker(
        command.argv, command.environment, base_url("127.0.0.1", port), name="embedded", output=io.StringIO()
    )
    await worker.start()
    try:
        await worker.wait_ready(DEADLINE_SECONDS)
        async with httpx.AsyncClient(trust_env=False) as client:
            models = (await client.get(f"{worker.url}/v1/models")).json()["data"]
        assert [model["id"] for model in models] == [preset.model_name]
    finally:
        await worker.stop()


# ---- the foreground command ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_all_and_is_success(
    foreground: Callable[..., subprocess.Popen[str]], number: signal.Signals
) -> None:
    process = foreground("ok")
    pids = announced(read_until(process, "is ready at http://127.0.0.1:"))
    process.send_signal(number)
    assert process.wait(DEADLINE_SECONDS) == 0
    wait_until(lambda: not any(map(is_running, pids)), "both processes are gone")


def test_a_second_signal_does_not_wait(foreground: Callable[..., subprocess.Popen[str]]) -> None:
    process = foreground("stubborn")
    pids = announced(read_until(process, "is ready at"))
    # Two different ones: equal signals that are pending at once are delivered as one.
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    assert process.wait(STOP_GRACE_SECONDS - 1) == 0
    wait_until(lambda: not any(map(is_running, pids)), "both processes are gone")


@pytest.mark.parametrize("model", ["stubborn", "wild"])
def test_sigkill_of_the_parent_leaves_no_orphan(foreground: Callable[..., subprocess.Popen[str]], model: str) -> None:
    process = foreground(model)
    pids = announced(read_until(process, "is ready at"))
    assert len(pids) == 2
    assert all(map(is_running, pids))
    os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: not any(map(is_running, pids)), "the watchdog ended the group")


def test_what_a_start_measured_is_said_and_kept(
    foreground: Callable[..., subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Through the command: version, log and file. The model is the stand-in's, so there is no plan for it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("ENGINE_LOG", str(Path(__file__).with_name("data") / "engine_logs" / "0.32-cpu.log"))
    process = foreground("ok")
    output = read_until(process, "is ready at")
    assert "warmlane: cpu-tiny: started in" in output
    assert "KV cache 1.00 GiB, 32,768 tokens, 2.00 requests of 16,384 tokens" in output
    (kept,) = starts.read(starts.file_for(os.environ))
    assert (kept.preset, kept.vllm, kept.kv_tokens, kept.planned) == ("cpu-tiny", "0.32.0", 32_768, None)


def test_a_replica_that_ends_by_itself_is_a_failure(foreground: Callable[..., subprocess.Popen[str]]) -> None:
    process = foreground("ok")
    output = read_until(process, "is ready at")
    url = output.split("is ready at ")[1].strip()
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(f"{url}/end", trust_env=False)
    assert process.wait(DEADLINE_SECONDS) == 1
    assert process.stderr is not None
    assert "cpu-tiny ended by itself: exit code 4" in process.stderr.read()


def test_a_replica_that_cannot_start_is_a_failure(foreground: Callable[..., subprocess.Popen[str]]) -> None:
    process = foreground("broken")
    assert process.wait(DEADLINE_SECONDS) == 1
    assert process.stderr is not None
    assert "before it was ready" in process.stderr.read()
