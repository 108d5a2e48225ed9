"""What left the process group of its replica ends with it; nobody else does."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.workers.test_launch import is_running, wait_until
from workers import descendants
from workers.worker import Worker

RUNAWAYS = """
cd {folder}
setsid sh -c 'echo $$ > child; setsid sh -c "echo \\$\\$ > grandchild; exec sleep 300"; exec sleep 300' &
(setsid sh -c 'echo $$ > orphan; exec sleep 300' &)
while ! [ -s child -a -s grandchild -a -s orphan ]; do sleep 0.02; done
touch all
exec sleep 300
"""
"""A child, its child and an orphan, each in a session of its own."""


class Wild:
    """A worker whose processes ran away, and where they are."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        script = RUNAWAYS.format(folder=folder)
        self.folder = folder
        self.worker = Worker(["/bin/sh", "-c", script], {}, "http://127.0.0.1:1", name="r", output=io.StringIO())

    async def start(self) -> list[int]:
        await self.worker.start()
        await asyncio.to_thread(wait_until, (self.folder / "all").exists, "all have begun")
        return [int((self.folder / name).read_text()) for name in ("child", "grandchild", "orphan")]


@pytest.fixture
def stranger() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(**environment: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(["sleep", "300"], env={**os.environ, **environment}, start_new_session=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


async def test_all_that_one_replica_started_ends_with_it_and_nothing_of_another(tmp_path: Path) -> None:
    one, other = Wild(tmp_path / "one"), Wild(tmp_path / "other")
    mine, others = await one.start(), await other.start()
    assert all(map(is_running, mine + others))
    await one.worker.stop()
    wait_until(lambda: not any(map(is_running, mine)), "they are gone")
    assert all(map(is_running, others))
    assert other.worker.pid is not None
    os.kill(other.worker.pid, signal.SIGKILL)
    assert await other.worker.wait() == -signal.SIGKILL
    wait_until(lambda: not any(map(is_running, others)), "they are gone too")


def test_the_mark_alone_is_what_counts(stranger: Callable[..., subprocess.Popen[bytes]]) -> None:
    mark = descendants.new_mark()
    assert mark != descendants.new_mark()
    marked = stranger(**{descendants.VARIABLE: mark})
    unmarked = [
        stranger(),
        stranger(**{descendants.VARIABLE: mark + "0"}),
        stranger(**{descendants.VARIABLE: mark[:-1]}),
        stranger(OTHER=descendants.assignment(mark)),
    ]
    descendants.kill_marked(mark)
    assert marked.wait(10) == -signal.SIGKILL
    assert [process.poll() for process in unmarked] == [None] * 4
    descendants.kill_marked(mark)


def test_the_watchdog_goes_by_the_mark_as_well(stranger: Callable[..., subprocess.Popen[bytes]]) -> None:
    mark = descendants.new_mark()
    marked, unmarked = stranger(**{descendants.VARIABLE: mark}), stranger(OTHER=descendants.assignment(mark))
    script = f"mark={descendants.assignment(mark)}\n{descendants.WATCHDOG}"
    subprocess.run(["/bin/sh", "-c", script], check=False, timeout=30)
    assert marked.wait(10) == -signal.SIGKILL
    assert unmarked.poll() is None


def test_a_group_is_waited_for_until_nobody_of_it_is_left(stranger: Callable[..., subprocess.Popen[bytes]]) -> None:
    """Seen with vLLM: a replica had stopped, and a killed process of it still held its memory."""
    one = stranger()
    assert not descendants.wait_gone(one.pid, 0.1)
    threading.Timer(0.2, one.kill).start()
    assert descendants.wait_gone(one.pid, 20.0)
    assert not is_running(one.pid)
    assert one.returncode is None  # a zombie until somebody asks for it
