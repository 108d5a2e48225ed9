"""The supervisor with real vLLM: engines that die, a cache too small to start, a rolling restart, and no orphans."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.test_up import Load, Up, restart, wait_gone
from tests.vllm.conftest import HOST, LOGS, ROOT, START_SECONDS, free_port
from tests.workers.test_launch import is_running
from tests.workers.test_supervisor import Books
from workers import presets
from workers.keeper import KeeperSettings, State
from workers.launch import base_url, command_line, find_vllm
from workers.supervisor import Supervisor, SupervisorSettings
from workers.worker import Worker

pytestmark = pytest.mark.vllm

ENGINE_CORE = "VLLM::EngineCor"
"""Name of its process, as the kernel cuts it."""


@pytest.fixture(scope="module")
def vllm() -> str:
    return find_vllm(str(ROOT / os.environ.get("VLLM_VENV", ".venv-vllm") / "bin" / "vllm"))


@pytest.fixture(scope="module")
def model() -> Path:
    found = (ROOT / presets.load("cpu-tiny").model).resolve()
    assert found.is_dir(), "`make test-vllm` prepares all that these tests need"
    return found


def family(leader: int) -> dict[int, str]:
    """Living processes of the session that `leader` leads, with their names."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, _, rest = entry.read_text().partition(" (")
        except OSError:
            continue  # it ended meanwhile
        name, _, fields = rest.rpartition(") ")
        if int(fields.split()[3]) == leader and is_running(int(pid)):
            found[int(pid)] = name
    return found


def kill_engine_core(leader: int) -> None:
    (core,) = [pid for pid, name in family(leader).items() if name == ENGINE_CORE]
    os.kill(core, signal.SIGKILL)


async def until(condition: Callable[[], object], what: str) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + START_SECONDS
    while not condition():
        assert loop.time() < deadline, f"waited {START_SECONDS:.0f} s in vain until {what}"
        await asyncio.sleep(0.1)


async def test_a_cache_too_small_is_healed_and_a_dead_engine_found_behind_its_server(vllm: str, model: Path) -> None:
    port = free_port()
    small = ("--num-gpu-blocks-override", "100")  # of 32 tokens, for requests of up to 16,384
    command = command_line(presets.load("cpu-tiny"), host=HOST, port=port, vllm=vllm, model=str(model), extra=small)
    environment = {**command.environment, "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "1"}
    LOGS.mkdir(parents=True, exist_ok=True)
    with (LOGS / "supervised.log").open("w", encoding="utf-8") as output:
        worker = Worker(command.argv, environment, base_url(HOST, port), name="supervised", output=output)
        keeper_settings = KeeperSettings(takes_remedies=True, ready_seconds=START_SECONDS)
        supervisor = Supervisor([worker], SupervisorSettings(keeper_settings))
        supervisor.start(Books())
        (keeper,) = supervisor._keepers
        try:
            await until(lambda: keeper.state is State.READY, "it starts with another length")
            assert [change.words for change in keeper.changes] == [("--max-model-len", "3072")]
            assert keeper.lives == 2

            first = keeper.pid
            assert first is not None
            kill_engine_core(first)
            await until(lambda: keeper.lives == 3, "it is lost")
            assert keeper.last_end == "supervised answers HTTP 503 on /health: its engine is dead"
            assert not family(first)
            await until(lambda: keeper.state is State.READY, "it is back")
            last = keeper.pid
            assert last is not None
        finally:
            await supervisor.stop(asyncio.Event())
        assert not family(last)


def test_a_fleet_survives_its_engines_is_renewed_under_load_and_leaves_nothing(
    tmp_path: Path, vllm: str, model: Path
) -> None:
    up = Up(tmp_path, "--preset", "cpu-tiny", "--replicas", "2", "--vllm", vllm, model=model)
    try:
        up.wait_greeted(START_SECONDS)
        victim = up.workers()["replica-1"]["pid"]
        kill_engine_core(victim)
        up.wait_for(lambda: up.workers()["replica-1"]["lives"] == 2, START_SECONDS)
        assert "ended by itself: " in up.workers()["replica-1"]["last_end"]
        up.wait_for(lambda: "up" in health(up, "replica-1"), START_SECONDS)
        assert not family(victim)

        load = Load(up.url, 4, model="tiny")
        try:
            up.wait_for(lambda: load.answers > 10 or load.failures, START_SECONDS)
            ended = restart(up, "--all", seconds=3 * START_SECONDS)
            answered = load.answers
            up.wait_for(lambda: load.answers > answered + 10 or load.failures, START_SECONDS)
        finally:
            load.stop()
        assert (ended.returncode, ended.stderr) == (0, "")
        assert [one["lives"] for one in up.workers().values()] == [3, 2]
        print(f"rolling restart of two: {load.answers} answers, {len(load.failures)} failed")
        assert load.failures == []

        leaders = [one["pid"] for one in up.workers().values()]
        pids = [pid for leader in leaders for pid in family(leader)]
        assert len(pids) >= 6  # API server, engine core and worker of each
        up.process.kill()
        up.process.wait()
        wait_gone(pids)
        assert not any(map(family, leaders))
    finally:
        if up.process.poll() is None:
            up.stop()


def health(up: Up, name: str) -> set[str]:
    url = up.workers()[name]["replica"]
    replicas = up.ask("GET", "/warmlane/replicas").json()["replicas"]
    return {one["health"] for one in replicas if one["replica"] == url}
