"""What a replica has started and what has left its process group since: found by a mark in its environment.

Whoever calls `setsid` leaves the group, and with the death of his parent the tree of processes too. What he keeps is
the environment that he was started with, and a mark that was made up for one start of one replica is in that of its
descendants alone. (To adopt orphans, as `PR_SET_CHILD_SUBREAPER` would, does not tell whose they were, and takes over
the children of everything else that runs in this process.)

Only Linux shows the environment of a process. One that was started with another one, or wrote over it, is not found.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

VARIABLE = "WARMLANE_REPLICA_MARK"
PROCESSES = Path("/proc")
END_MILLISECONDS = 2_000
"""A killed process has this long to be gone; the kernel takes back its memory first."""
LOOK_SECONDS = 0.02
ROUNDS = 5
"""Looks at all processes until none is found: a process may start another one while it is looked for."""

WATCHDOG = """
for entry in $(grep -lsxzF -- "$mark" /proc/[0-9]*/environ); do
  pid="${entry#/proc/}"
  grep -qsxzF -- "$mark" "$entry" && kill -s KILL "${pid%/environ}" 2>/dev/null
done
"""
"""The same in shell, for when this process is dead. `$mark`: the variable as the environment has it."""


def new_mark() -> str:
    return secrets.token_hex(16)


def assignment(mark: str) -> str:
    return f"{VARIABLE}={mark}"


def kill_marked(mark: str) -> None:
    """SIGKILL to all that was started with the mark. Nothing happens where that cannot be told, or nobody is left."""
    if not hasattr(os, "pidfd_open"):
        return
    for _ in range(ROUNDS):
        if not [pid for pid in marked(mark) if kill(pid, mark)]:
            return


def marked(mark: str) -> Iterator[int]:
    """Processes of this machine with the mark."""
    return (pid for pid in processes() if has_mark(pid, mark))


def processes() -> Iterator[int]:
    """All of this machine; none where nobody can look."""
    with suppress(OSError):
        yield from (int(entry) for entry in os.listdir(PROCESSES) if entry.isdecimal())


def has_mark(pid: int, mark: str) -> bool:
    try:
        variables = (PROCESSES / str(pid) / "environ").read_bytes()
    except OSError:
        return False  # somebody else's, or gone
    return assignment(mark).encode() in variables.split(b"\0")


def wait_gone(leader: int, seconds: float) -> bool:
    """Whether all processes of this group have ended by then. A zombie has; where nobody can look, all have."""
    deadline = time.monotonic() + seconds
    while any(is_of_group(pid, leader) for pid in processes()):
        if time.monotonic() >= deadline:
            return False
        time.sleep(LOOK_SECONDS)
    return True


def is_of_group(pid: int, leader: int) -> bool:
    try:
        state, _, group = (PROCESSES / str(pid) / "stat").read_text().rpartition(") ")[2].split()[:3]
    except (OSError, ValueError):
        return False  # it has ended meanwhile
    return int(group) == leader and state not in "ZX"


def kill(pid: int, mark: str) -> bool:
    """Whether it was there to be killed. The descriptor stands for one process, whoever gets its number later."""
    try:
        process = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if not has_mark(pid, mark):
            return False
        signal.pidfd_send_signal(process, signal.SIGKILL)
        end = select.poll()
        end.register(process, select.POLLIN)
        end.poll(END_MILLISECONDS)
    except OSError:
        return False
    finally:
        os.close(process)
    return True
