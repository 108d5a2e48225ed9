"""Processes of the benchmark: start one pinned to a core with its output in a file, read its CPU time and memory, stop.

Figures are those of a whole process tree as the kernel counts them in /proc, threads and children included.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

STOP_SECONDS = 10.0
"""A gateway without requests that is still there after so long is killed."""
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
MIB = 1024 * 1024


class BenchmarkFailure(Exception):
    """A figure could not be taken, or would not be worth anything."""


@contextmanager
def started(command: Sequence[str], core: int, log: Path) -> Iterator[int]:
    """Pid of a process that runs on `core` in a session of its own; all of that session is stopped at the end."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["taskset", "-c", str(core), *command], stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield process.pid
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(STOP_SECONDS)
        except ProcessLookupError:
            break
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def process_tree(root: int) -> list[int]:
    """The process and all its descendants."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and (fields := stat_fields(int(folder.name))):
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    tree = [root]
    for pid in tree:
        tree += children.get(pid, [])
    return tree


def stat_fields(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; empty when the process is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return text.rpartition(")")[2].split()


def cpu_seconds(pids: Sequence[int]) -> float:
    """User and system time so far, children that ended included."""
    return sum(sum(int(ticks) for ticks in stat_fields(pid)[11:15]) for pid in pids) / CLOCK_TICKS


def busy_seconds() -> float:
    """Time that all cores of the machine spent on anything but idling."""
    user, nice, system, _idle, _iowait, irq, softirq, *_ = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    return sum(map(int, (user, nice, system, irq, softirq))) / CLOCK_TICKS


def resident_mib(root: int) -> float:
    pages = sum(int(fields[21]) for pid in process_tree(root) if (fields := stat_fields(pid)))
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def wait_listening(port: int, pid: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError as error:
            fields = stat_fields(pid)
            if not fields or fields[0] == "Z" or time.monotonic() > deadline:
                raise BenchmarkFailure(f"nothing listens on port {port}") from error
        time.sleep(0.05)
