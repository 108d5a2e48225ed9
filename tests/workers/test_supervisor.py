"""Replicas as real processes that fail in every way: started again, healed, renewed one by one, and gone at the end."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.workers.test_launch import DEADLINE_SECONDS, announced, free_port, is_running
from workers import vitals
from workers.back_off import BackOffSettings
from workers.keeper import Keeper, KeeperSettings, State
from workers.launch import base_url
from workers.supervisor import RestartRefused, Supervisor, SupervisorSettings
from workers.worker import Worker

SCRIPTED = str(Path(__file__).with_name("scripted_vllm.py"))
QUICK = BackOffSettings(first_seconds=0.05, longest_seconds=0.2, max_failed_starts=3)
SMALL = ("--max-num-seqs", "16", "--max-model-len", "16384")


class Books:
    """Traffic as a gateway would keep it: `log` has what it was told, `running` what it says runs where."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.up: set[str] = set()
        self.drained: set[str] = set()
        self.running: dict[str, int] = {}
        self.worth: dict[str, float] = {}

    def join(self, url: str, prefill_rate: float | None) -> None:
        self.log.append(f"join {url}")
        self.up.add(url)

    def leave(self, url: str) -> None:
        if url in self.up:
            self.log.append(f"leave {url}")
        self.up.discard(url)
        self.drained.discard(url)

    def drain(self, url: str, draining: bool) -> None:
        self.log.append(f"drain {url}")
        self.drained.add(url)

    def requests(self, url: str) -> int:
        return self.running.get(url, 0)

    def is_up(self, url: str) -> bool:
        return url in self.up

    def serves(self, url: str) -> bool:
        return url in self.up - self.drained

    def has_stand_in(self, url: str) -> bool:
        return bool(self.up - self.drained - {url})

    def cached_seconds(self, url: str) -> float:
        return self.worth.get(url, 0.0)


class Fleet:
    """A supervisor of scripted replicas, what they wrote, and their command lines life by life."""

    def __init__(self, directory: Path, *scripts: str, extra: tuple[str, ...] = SMALL, **settings: Any) -> None:
        self.output = io.StringIO()
        self.traffic = Books()
        self.directory = directory
        self.hopeless = asyncio.Event()
        self.urls = []
        workers = []
        for number, script in enumerate(scripts, 1):
            port = free_port()
            self.urls.append(base_url("127.0.0.1", port))
            argv = [sys.executable, SCRIPTED, "serve", "m", "--host", "127.0.0.1", "--port", str(port), *extra]
            environment = {"SCRIPT": script, "SCRIPT_DIRECTORY": str(directory)}
            workers.append(Worker(argv, environment, self.urls[-1], name=f"r{number}", output=self.output))
        drain_seconds = settings.pop("drain_seconds", 10.0)
        self.supervisor = Supervisor(
            workers,
            SupervisorSettings(KeeperSettings(**{"back_off": QUICK, **settings}), drain_seconds=drain_seconds),
            on_hopeless=self.hopeless.set,
        )

    @property
    def keepers(self) -> tuple[Keeper, ...]:
        return self.supervisor._keepers

    def lives(self, number: int = 0) -> list[str]:
        """Command lines, without what is the same in all."""
        file = self.directory / str(httpx.URL(self.urls[number]).port)
        return [line.partition(" --max-model-len 16384")[2].strip() for line in file.read_text().splitlines()]

    def states(self) -> list[State]:
        return [keeper.state for keeper in self.keepers]

    def pids(self) -> list[int]:
        return [pid for line in self.output.getvalue().splitlines() for pid in announced(line)]

    async def all_ready(self) -> None:
        await until(lambda: set(self.states()) == {State.READY}, "all are ready")


@contextlib.asynccontextmanager
async def running(fleet: Fleet) -> AsyncIterator[Fleet]:
    """Whatever happens, nothing of it is left."""
    fleet.supervisor.start(fleet.traffic)
    try:
        yield fleet
    finally:
        await fleet.supervisor.stop(asyncio.Event())
        await until(lambda: not any(map(is_running, fleet.pids())), "nothing is left")


async def until(condition: Callable[[], object], what: str) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + DEADLINE_SECONDS
    while not condition():
        assert loop.time() < deadline, f"waited in vain until {what}"
        await asyncio.sleep(0.02)


@pytest.fixture(autouse=True)
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="workers")
    return caplog


# ---- one replica ---------------------------------------------------------------------------------------------------


async def test_a_killed_replica_leaves_the_traffic_and_comes_back(tmp_path: Path) -> None:
    async with running(Fleet(tmp_path, "ok")) as fleet:
        (url,) = fleet.urls
        await fleet.all_ready()
        os.kill(fleet.pids()[0], signal.SIGKILL)
        await until(lambda: fleet.keepers[0].lives == 2 and fleet.states() == [State.READY], "it is back")
        assert fleet.traffic.log == [f"join {url}", f"leave {url}", f"join {url}"]
        assert fleet.keepers[0].last_end == "r1 ended by itself: killed by SIGKILL"
        assert not is_running(fleet.pids()[1])  # the engine core of its first life


async def test_a_replica_whose_port_was_taken_meanwhile_moves_at_once(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "ok")
    (template,) = fleet.supervisor._workers
    names = fleet.supervisor.names
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", int(httpx.URL(template.url).port or 0)))
        stranger.listen()
        port = free_port()
        there = base_url("127.0.0.1", port)
        command = [*template.command, "--port", str(port)]
        template.elsewhere = lambda: Worker(command, template.environment, there, name="r1", output=fleet.output)
        async with running(fleet):
            await fleet.all_ready()
            assert fleet.traffic.log == [f"join {there}"]
            assert fleet.keepers[0].failed_starts == 0
            assert names == {there: "r1"}
            assert fleet.supervisor.show()["workers"][0]["replica"] == there


async def test_too_many_failed_starts_in_a_row_are_given_up_with_a_line_and_no_other_is_touched(
    tmp_path: Path, said: pytest.LogCaptureFixture
) -> None:
    async with running(Fleet(tmp_path, "crash", "ok")) as fleet:
        await until(lambda: fleet.states() == [State.GIVEN_UP, State.READY], "one is given up")
        assert len(fleet.lives()) == 3
        assert fleet.keepers[1].lives == 1
        assert not fleet.hopeless.is_set()
        await fleet.supervisor.wait_settled()
    (line,) = [line for line in said.messages if "given up" in line]
    assert line == (
        f"r1 ({fleet.urls[0]}): ended before it was ready: exit code 3; given up after 3 failed starts in a row; "
        "`warmlane restart` tries again"
    )


async def test_when_all_are_given_up_it_is_told(tmp_path: Path) -> None:
    async with running(Fleet(tmp_path, "crash", "crash")) as fleet:
        await asyncio.wait_for(fleet.hopeless.wait(), DEADLINE_SECONDS)
        assert fleet.supervisor.is_hopeless


async def test_a_start_that_takes_too_long_is_a_failed_start(tmp_path: Path) -> None:
    async with running(Fleet(tmp_path, "slow,ok", ready_seconds=0.5)) as fleet:
        await until(lambda: fleet.keepers[0].lives == 2, "it was started again")
        assert fleet.keepers[0].last_end.endswith("not ready after 0 s")
    assert fleet.traffic.log in ([], [f"join {fleet.urls[0]}"])


async def test_what_cannot_be_executed_is_a_failed_start(tmp_path: Path) -> None:
    worker = Worker([str(tmp_path / "absent")], {}, base_url("127.0.0.1", free_port()), name="r1")
    keeper = Keeper(worker, Books(), KeeperSettings(back_off=QUICK))
    task = asyncio.create_task(keeper.run())
    await until(lambda: keeper.state is State.GIVEN_UP, "it is given up")
    assert keeper.last_end == f"r1: cannot run {tmp_path / 'absent'}: No such file or directory"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_dead_engine_behind_a_server_that_answers_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vitals, "LOOK_SECONDS", 0.05)
    async with running(Fleet(tmp_path, "ok")) as fleet:
        await fleet.all_ready()
        async with httpx.AsyncClient(trust_env=False) as client:
            await client.post(f"{fleet.urls[0]}/engine-dies")
        await until(lambda: fleet.keepers[0].lives == 2 and fleet.states() == [State.READY], "it is back")
        assert fleet.keepers[0].last_end == "r1 answers HTTP 503 on /health: its engine is dead"


async def test_a_replica_that_hangs_is_lost_after_a_time_of_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vitals, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(vitals, "TIMEOUT_SECONDS", 0.2)
    async with running(Fleet(tmp_path, "ok", silent_seconds=0.5, stop_seconds=0.5)) as fleet:
        await fleet.all_ready()
        os.killpg(fleet.pids()[0], signal.SIGSTOP)
        await until(lambda: fleet.keepers[0].lives == 2 and fleet.states() == [State.READY], "it is back")
        assert "has not answered on /health for " in fleet.keepers[0].last_end


# ---- out of memory -------------------------------------------------------------------------------------------------


async def test_a_remedy_is_proposed_and_nothing_changed_unasked(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    async with running(Fleet(tmp_path, "small-cache")) as fleet:
        await until(lambda: fleet.states() == [State.GIVEN_UP], "it is given up")
        assert fleet.lives() == ["", "", ""]
        shown = fleet.supervisor.show()["workers"][0]
        assert (shown["changes"], shown["proposal"]) == ([], "--max-model-len 3072")
    proposal = 'r1: the remedy is --max-model-len 3072 (instead of 16384); [workers] remedies = "apply" does it'
    assert said.messages.count(proposal) == 3
    assert any("r1 has a KV cache too small for one request of full length: " in line for line in said.messages)


async def test_a_cache_too_small_to_start_is_healed_where_that_is_wanted(tmp_path: Path) -> None:
    async with running(Fleet(tmp_path, "small-cache", takes_remedies=True)) as fleet:
        await fleet.all_ready()
        assert fleet.lives() == ["", "--max-model-len 3072"]
        assert fleet.supervisor.show()["workers"][0]["changes"] == ["--max-model-len 3072"]


async def test_a_specification_is_never_changed(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    async with running(Fleet(tmp_path, "oom-start", takes_remedies=True, is_verbatim=True)) as fleet:
        await until(lambda: fleet.states() == [State.GIVEN_UP], "it is given up")
        assert fleet.lives() == ["", "", ""]
    assert any("its profile is kept as written" in line for line in said.messages)


async def test_steps_follow_one_another_until_it_starts(tmp_path: Path) -> None:
    script = "oom-start,oom-start,ok"
    async with running(Fleet(tmp_path, script, takes_remedies=True)) as fleet:
        await fleet.all_ready()
        assert fleet.lives() == [
            "",
            "--gpu-memory-utilization 0.85",
            "--gpu-memory-utilization 0.85 --max-num-seqs 8",
        ]


async def test_who_has_the_memory_gets_a_start_to_leave(tmp_path: Path) -> None:
    async with running(Fleet(tmp_path, "taken,taken,ok", takes_remedies=True)) as fleet:
        await fleet.all_ready()
        assert fleet.lives() == ["", "", "--gpu-memory-utilization 0.76"]


async def test_out_of_memory_under_load_lowers_sequences_first(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    async with running(Fleet(tmp_path, "oom-load,ok", takes_remedies=True)) as fleet:
        await fleet.all_ready()
        async with httpx.AsyncClient(trust_env=False) as client:
            with pytest.raises(httpx.TransportError):
                await client.post(f"{fleet.urls[0]}/v1/chat/completions", json={})
        await until(lambda: fleet.keepers[0].lives == 2 and fleet.states() == [State.READY], "it is back")
        assert fleet.lives() == ["", "--max-num-seqs 8"]
    assert any(line.startswith("r1 ran out of GPU memory, under load: ") for line in said.messages)


# ---- rolling restarts ----------------------------------------------------------------------------------------------


async def rolled(fleet: Fleet) -> dict[str, Any]:
    def last() -> dict[str, Any]:
        found: dict[str, Any] = fleet.supervisor.show()["restart"]
        return found

    await until(lambda: last()["is_over"], "the restart is over")
    return last()


async def test_all_are_renewed_one_by_one_the_least_worth_first(tmp_path: Path) -> None:
    async with running(Fleet(tmp_path, "ok", "ok", "ok")) as fleet:
        await fleet.all_ready()
        one, two, three = fleet.urls
        fleet.traffic.worth = {one: 3.0, two: 1.0, three: 2.0}
        fleet.traffic.log.clear()
        fleet.supervisor.restart()
        assert (await rolled(fleet))["renewed"] == ["r2", "r3", "r1"]
        turns = [[f"drain {url}", f"leave {url}", f"join {url}"] for url in (two, three, one)]
        assert fleet.traffic.log == [line for turn in turns for line in turn]
        assert [keeper.lives for keeper in fleet.keepers] == [2, 2, 2]


async def test_a_replica_goes_when_its_last_request_has_ended(tmp_path: Path) -> None:
    async with running(Fleet(tmp_path, "ok", "ok")) as fleet:
        await fleet.all_ready()
        busy = fleet.urls[0]
        fleet.traffic.running[busy] = 1
        fleet.supervisor.restart("r1")
        await until(lambda: busy in fleet.traffic.drained, "it is drained")
        await asyncio.sleep(0.3)
        assert fleet.keepers[0].lives == 1
        fleet.traffic.running[busy] = 0
        assert (await rolled(fleet))["problem"] == ""
        assert [keeper.lives for keeper in fleet.keepers] == [2, 1]


async def test_requests_that_do_not_end_hold_it_up_for_a_bounded_time(tmp_path: Path) -> None:
    async with running(Fleet(tmp_path, "ok", "ok", drain_seconds=0.3)) as fleet:
        await fleet.all_ready()
        fleet.traffic.running[fleet.urls[0]] = 1
        fleet.supervisor.restart(fleet.urls[0])
        assert (await rolled(fleet))["renewed"] == ["r1"]


async def test_it_stops_at_the_first_that_does_not_come_back(tmp_path: Path) -> None:
    async with running(Fleet(tmp_path, "ok,crash", "ok", "ok")) as fleet:
        await fleet.all_ready()
        fleet.supervisor.restart()
        over = await rolled(fleet)
        assert over["problem"].startswith("r1 does not come back: ")
        assert over["left"] == ["r2", "r3"]
        assert fleet.states() == [State.GIVEN_UP, State.READY, State.READY]
        assert [keeper.lives for keeper in fleet.keepers[1:]] == [1, 1]


async def test_nobody_goes_whom_nobody_stands_in_for(tmp_path: Path) -> None:
    async with running(Fleet(tmp_path, "ok")) as fleet:
        await fleet.all_ready()
        with pytest.raises(RestartRefused, match="Nobody stands in for r1"):
            fleet.supervisor.restart()
        fleet.supervisor.restart(alone=True)
        with pytest.raises(RestartRefused, match="under way"):
            fleet.supervisor.restart(alone=True)
        assert (await rolled(fleet))["renewed"] == ["r1"]
        with pytest.raises(RestartRefused, match="No such replica"):
            fleet.supervisor.restart("r2")


async def test_it_waits_for_a_stand_in_and_stops_without_one(tmp_path: Path) -> None:
    async with running(Fleet(tmp_path, "ok", "ok,crash", drain_seconds=0.5)) as fleet:
        await fleet.all_ready()
        pid = fleet.keepers[1].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await until(lambda: fleet.states() == [State.READY, State.GIVEN_UP], "one is given up")
        fleet.supervisor.restart("r1")
        assert (await rolled(fleet))["problem"] == "nobody stands in for r1"
        assert (fleet.states()[0], fleet.keepers[0].lives) == (State.READY, 1)


async def test_an_order_revives_one_that_was_given_up(tmp_path: Path) -> None:
    async with running(Fleet(tmp_path, "crash,crash,crash,ok", "ok")) as fleet:
        await until(lambda: fleet.states() == [State.GIVEN_UP, State.READY], "one is given up")
        host_and_port = fleet.urls[0].removeprefix("http://")
        fleet.supervisor.restart(host_and_port)
        assert (await rolled(fleet))["renewed"] == ["r1"]
        assert fleet.keepers[0].failed_starts == 0


# ---- the end -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", ["ok", "slow", "crash"])
async def test_it_ends_cleanly_in_whatever_state(tmp_path: Path, script: str) -> None:
    fleet = Fleet(tmp_path, script, script)
    async with running(fleet):
        await until(lambda: fleet.keepers and (script == "crash" or len(fleet.pids()) == 4), "they are under way")
    assert all(keeper.pid is None for keeper in fleet.keepers)


async def test_it_ends_before_anything_has_started(tmp_path: Path) -> None:
    for turns in range(4):
        async with running(Fleet(tmp_path, "ok")):
            for _ in range(turns):
                await asyncio.sleep(0)
    await Supervisor([], SupervisorSettings(KeeperSettings())).stop(asyncio.Event())


async def test_who_insists_does_not_wait_for_the_grace(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "stubborn", stop_seconds=600.0)
    fleet.supervisor.start(fleet.traffic)
    await until(lambda: len(fleet.pids()) == 2, "it ignores SIGTERM by now")
    insisted = asyncio.Event()
    stopping = asyncio.create_task(fleet.supervisor.stop(insisted))
    await asyncio.sleep(0.3)
    assert not stopping.done()
    insisted.set()
    await asyncio.wait_for(stopping, DEADLINE_SECONDS)
    await until(lambda: not any(map(is_running, fleet.pids())), "nothing is left")
