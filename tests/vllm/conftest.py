"""Real vLLM for tests: two replicas of the preset `cpu-tiny` and a gateway in front of them, once for the session.

All are `Worker`s, run by a loop in a thread of their own, so that their output is read while a test blocks. They end
with the session, and if pytest is killed, by their watchdogs. Logs: `.cache/test-vllm/`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO, TypeVar

import httpx
import pytest

from workers import presets, starts
from workers.command_line import base_url
from workers.launch import LaunchError, Request, prepare
from workers.placement import Machine
from workers.worker import Worker

ROOT = Path(__file__).parents[2]
LOGS = ROOT / ".cache" / "test-vllm"
STATE = LOGS / "state"
STARTS = STATE / starts.FILE
"""What these starts measured."""
HOST = "127.0.0.1"
START_SECONDS = 240.0
"""Two replicas took 30 s together with a warm disk cache, and 56 s each with a cold one."""
READY_SECONDS = 60.0

Result = TypeVar("Result")
Run = Callable[[Coroutine[Any, Any, Result]], Result]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def wait_until(condition: Callable[[], object], what: str, seconds: float = READY_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s in vain until {what}"
        time.sleep(0.1)


@dataclass
class Fleet:
    """Replicas that can be killed and started again, and the gateway in front of them, if any."""

    run: Run[Any]
    workers: list[Worker] = field(default_factory=list)
    gateway: str = ""

    @property
    def replicas(self) -> list[str]:
        return [worker.url for worker in self.workers]

    def is_up(self, replica: str) -> bool:
        """In the gateway's eyes."""
        metrics = httpx.get(f"{self.gateway}/metrics", trust_env=False).text
        return f'warmlane_replica_state{{replica="{replica}",state="up"}} 1' in metrics

    def kill(self, replica: str) -> None:
        """SIGKILL to all processes of one replica at once."""
        worker = self.workers[self.replicas.index(replica)]
        assert worker.pid is not None
        os.killpg(worker.pid, signal.SIGKILL)
        self.run(worker.wait())

    def terminate(self, replica: str) -> None:
        """SIGTERM to one replica, which finishes what it has begun."""
        worker = self.workers[self.replicas.index(replica)]
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGTERM)

    def wait_gone(self, replica: str) -> None:
        self.run(self.workers[self.replicas.index(replica)].wait())

    def restart(self, replica: str) -> None:
        """Start a dead replica again, at its old address, and wait until it answers."""
        index = self.replicas.index(replica)
        self.workers[index] = self.workers[index].again()
        self.run(self.workers[index].start())
        self.run(self.workers[index].wait_ready(START_SECONDS))


@pytest.fixture(scope="session")
def background() -> Iterator[Run[Any]]:
    """Runs a coroutine in the workers' loop and waits for its result."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="workers", daemon=True)
    thread.start()
    yield lambda coroutine: asyncio.run_coroutine_threadsafe(coroutine, loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def vllm_executable() -> str:
    return str(ROOT / os.environ.get("VLLM_VENV", ".venv-vllm") / "bin" / "vllm")


def log_of(name: str) -> TextIO:
    LOGS.mkdir(parents=True, exist_ok=True)
    return (LOGS / f"{name}.log").open("w", encoding="utf-8")


def new_worker(name: str, command: tuple[str, ...], environment: dict[str, str], url: str) -> Worker:
    return Worker(command, environment, url, name=name, output=log_of(name))


def close(worker: Worker) -> None:
    assert worker.output is not None
    worker.output.close()


async def start_all(workers: list[Worker]) -> None:
    await asyncio.gather(*(worker.start() for worker in workers))
    await asyncio.gather(*(worker.wait_ready(START_SECONDS) for worker in workers))


async def stop_all(workers: list[Worker]) -> None:
    await asyncio.gather(*(worker.stop() for worker in workers))


@pytest.fixture(scope="session")
def replicas(background: Run[Any]) -> Iterator[Fleet]:
    """Two real replicas."""
    model = None if Path.cwd() == ROOT else str(ROOT / presets.load("cpu-tiny").model)
    drains = ("--shutdown-timeout", "20")
    STARTS.unlink(missing_ok=True)
    try:
        request = Request("cpu-tiny", vllm=vllm_executable(), model=model, extra=drains)
        launch = prepare(request, Machine(environment={**os.environ, "XDG_STATE_HOME": str(STATE)}))
    except LaunchError as error:
        pytest.fail(f"{error}; `make test-vllm` prepares all that these tests need")
    workers = []
    for name in ("replica-1", "replica-2"):
        worker, _ = launch.worker(name, HOST, free_port())
        worker.output = log_of(name)
        workers.append(worker)
    fleet = Fleet(background, workers)
    try:
        background(start_all(fleet.workers))
        yield fleet
    finally:
        background(stop_all(fleet.workers))
        for worker in fleet.workers:
            close(worker)


@pytest.fixture(scope="session")
def vllm_replica(replicas: Fleet) -> str:
    """Base URL of a real vLLM that no test kills. It serves the model `tiny`."""
    return replicas.replicas[0]


@pytest.fixture(scope="session")
def vllm_fleet(replicas: Fleet, background: Run[Any]) -> Iterator[Fleet]:
    """The two replicas with a gateway in front of them, ready."""
    port = free_port()
    command = [str(Path(sys.executable).with_name("warmlane")), "serve", "--host", HOST, "--port", str(port)]
    for url in replicas.replicas:
        command += ["--replica", url]
    worker = new_worker("gateway", tuple(command), {}, base_url(HOST, port))
    try:
        background(start_all([worker]))
        replicas.gateway = worker.url
        wait_until(lambda: all(map(replicas.is_up, replicas.replicas)), "the gateway has heard of both replicas")
        yield replicas
    finally:
        background(stop_all([worker]))
        close(worker)
