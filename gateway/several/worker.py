"""The process of one worker: a gateway like any other, which gets its configuration and its connections from the
parent, and ends with it."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import sys

import uvloop

from gateway import app
from gateway.config import ConfigError
from gateway.outlet import outlet
from gateway.several.member import Member
from gateway.stderr_log import log_to_stderr, report_unforeseen

WRONG_USAGE = 2
PR_SET_PDEATHSIG = 1


def main(parent: str, talking: str, handing: str) -> None:
    """The process id of the parent, and the descriptors of this end."""
    end_with(int(parent))
    with outlet(sys.stderr) as stderr, contextlib.redirect_stderr(stderr):
        log_to_stderr()
        try:
            code = uvloop.run(work(socket.socket(fileno=int(talking)), socket.socket(fileno=int(handing))))
        except ConfigError as error:
            print(f"warmlane: {' '.join(str(error).split())}", file=sys.stderr)
            code = WRONG_USAGE
    sys.exit(code)


async def work(talking: socket.socket, handing: socket.socket) -> int:
    asyncio.get_running_loop().set_exception_handler(report_unforeseen)
    member = Member(handing)
    with member.signals.heard() as signals:
        config = await member.join(talking)
        try:
            return await app.serve_until(signals, config, on_ready=lambda url: member.ready(), member=member)
        finally:
            await member.end()


def end_with(parent: int) -> None:
    """Where the system can, it kills us when the parent ends, so that even a worker that hangs is gone with it; where
    it cannot, the closed channel ends us."""
    with contextlib.suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before that
        sys.exit(1)
