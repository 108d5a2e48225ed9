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
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

VARIABLE = "WARMLANE_REPLICA_MARK"
PROCESSES = Path("/proc")
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
    with suppress(OSError):
        for entry in os.listdir(PROCESSES):
            if entry.isdecimal() and has_mark(int(entry), mark):
                yield int(entry)


def has_mark(pid: int, mark: str) -> bool:
    try:
        variables = (PROCESSES / str(pid) / "environ").read_bytes()
    except OSError:
        return False  # somebody else's, or gone
    return assignment(mark).encode() in variables.split(b"\0")


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
    except OSError:
        return False
    finally:
        os.close(process)
    return True
