"""One replica as a child process: start it, wait until it answers, stop it, and leave no orphan behind.

A replica is more than one process (vLLM has an API server, an engine and a worker), so each child leads a process group
of its own and the whole group is killed at the end, however the end came:

- `stop()`: SIGTERM to the leader, which tells its own children; after the grace time SIGKILL to the group.
- The leader ends by itself: SIGKILL to what is left of the group, and to what left the group (`workers.descendants`).
- This process dies, even by SIGKILL: a watchdog, a few lines of shell that wait on a pipe from here, sees it close and
  ends the group.

Watchdog and replica lead sessions of their own, so that a Ctrl-C in the terminal reaches neither: the owner decides.

The child's output goes on to stderr, each line after the worker's name; the last lines are kept for error messages.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import subprocess
import sys
from asyncio.subprocess import Process
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TextIO
from urllib.parse import urlsplit

import httpx

from workers import descendants

log = logging.getLogger(__name__)

STOP_GRACE_SECONDS = 10.0
"""From SIGTERM to SIGKILL. An idle vLLM is gone in 2.5 s; one with a request in flight waits for its client."""
POLL_SECONDS = 0.2
PROBE_TIMEOUT_SECONDS = 2.0
PROGRESS_SECONDS = 10.0
"""Between two lines that say the replica is not ready yet: large models load for minutes."""
KEPT_LINES = 30
GONE_SECONDS = 10.0
"""After SIGKILL: the kernel takes back gigabytes of an engine's memory before the process is gone."""
LAST_OUTPUT_SECONDS = 2.0
"""For the rest of the output after the end. It ends at once, unless a process that was not found holds the pipe."""
READ_BYTES = 65_536
"""A line longer than this is passed on in pieces."""
HEARD_CHARACTERS = 4_096
"""Of a line, by who listens. What they look for is shorter; a line may have a prompt of any length in it."""
LINES_AT_ONCE = 100
"""Then everything else that this process does has its turn."""

SOCKET_FILE = re.compile(r'ipc://(/[^"\s]+)')
"""ZeroMQ endpoints in a command. vLLM leaves the files behind, so the worker removes them."""

WATCHDOG = """
mark="$1"
read -r group || exit 0
read -r stopped && exit 0
kill -s TERM -- "-$group" 2>/dev/null
tries=25
while [ "$tries" -gt 0 ] && kill -s 0 -- "-$group" 2>/dev/null; do
  sleep 0.2
  tries=$((tries - 1))
done
kill -s KILL -- "-$group" 2>/dev/null
"""
WATCHDOG += descendants.WATCHDOG
"""First line of its input: the group to watch. A second line: it is gone. End of input instead: our side died."""


class WorkerFailed(Exception):
    """The replica could not be started, ended, or was not ready in time. The message has its last lines of output, the
    `reason` has not."""

    def __init__(self, reason: str, last_lines: Sequence[str] = ()) -> None:
        lines = "".join(f"\n    {line}" for line in last_lines)
        super().__init__(f"{reason}{'; its last lines:' if lines else ''}{lines}")
        self.reason = reason


class PortTaken(WorkerFailed):
    """Somebody else listens where the replica was to."""


class Worker:
    """A replica that this process owns. `url` is where it will answer; `environment` is added to our own.
    `on_line` is called with the beginning of each line of its output, after the line was passed on; `progress` says how
    far a start is; `elsewhere` makes one like it on another port.

    `start`, `wait_ready` and `stop` are called in this order by one owner; `stop` may be called at any time and twice.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        url: str,
        *,
        name: str = "replica",
        output: TextIO | None = None,
        on_line: Callable[[str], None] | None = None,
        progress: Callable[[], str | None] | None = None,
        elsewhere: Callable[[], Worker] | None = None,
    ) -> None:
        self.command = tuple(command)
        self.environment = dict(environment)
        self.url = url
        self.name = name
        self.output = output
        self.listeners = [on_line] if on_line is not None else []
        self.progress = progress
        self._mark = descendants.new_mark()
        self.elsewhere = elsewhere
        self._process: Process | None = None
        self._watchdog: Process | None = None
        self._leash: int | None = None
        self._ended: asyncio.Task[int] | None = None
        self._last_lines: deque[str] = deque(maxlen=KEPT_LINES)

    def __repr__(self) -> str:
        return f"Worker({self.name!r}, {self.url}, pid={self.pid}, exit_code={self.exit_code})"

    def again(self, *more: str, on_line: Callable[[str], None] | None = None) -> Worker:
        """One that was not started, with the same command and `more` words at its end, at the same address. `on_line`
        hears beside who hears already."""
        worker = Worker(
            (*self.command, *more),
            self.environment,
            self.url,
            name=self.name,
            output=self.output,
            progress=self.progress,
        )
        worker.listeners = [*self.listeners, *([on_line] if on_line is not None else [])]
        return worker

    @property
    def pid(self) -> int | None:
        """Process id of the leader, which is also the id of its process group; `None` before `start`."""
        return self._process.pid if self._process else None

    @property
    def exit_code(self) -> int | None:
        """`None` before the end; negative: minus the signal's number."""
        return self._process.returncode if self._process else None

    async def start(self) -> None:
        """Start the process. Raises `WorkerFailed` when it cannot be executed, or somebody else has its port."""
        if self._process is not None:
            raise RuntimeError(f"{self!r} was started before")
        if await self._is_taken():  # else the stranger's good health would be taken for ours
            raise PortTaken(f"{self.name}: something else listens on {self.url} already")
        await self._start_watchdog()
        assert self._leash is not None
        ends: list[int] = []
        try:
            read_end, write_end = ends = [*os.pipe()]
            # A plain pipe, not asyncio's: its `wait` would also wait for grandchildren that hold the pipe open.
            self._process = await asyncio.create_subprocess_exec(
                *self.command,
                stdin=subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                env={**os.environ, **self.environment, descendants.VARIABLE: self._mark},
                start_new_session=True,
            )
            os.write(self._leash, b"%d\n" % self._process.pid)
        except BaseException as error:
            await self._undo_start(ends)
            if isinstance(error, OSError):
                what = f"cannot run {self.command[0]}: {error.strerror}"
                raise WorkerFailed(f"{self.name}: {what}") from error
            raise
        os.close(write_end)
        self._ended = asyncio.create_task(self._see_to_the_end(self._process, read_end))

    async def _undo_start(self, ends: Sequence[int]) -> None:
        for end in ends:
            os.close(end)
        if self._process is not None:
            kill_group(self._process.pid)
            await self._process.wait()
            descendants.kill_marked(self._mark)
        await self._dismiss_watchdog()

    async def _is_taken(self) -> bool:
        parts = urlsplit(self.url)
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_SECONDS):
                _, writer = await asyncio.open_connection(parts.hostname, parts.port)
        except (OSError, TimeoutError):
            return False
        writer.close()
        return True

    async def wait_ready(self, timeout: float, report_seconds: float = PROGRESS_SECONDS) -> None:
        """Return once `/health` answers 200; say every `report_seconds` that it does not yet.

        Raises `WorkerFailed` when the process ends before that, or after `timeout` seconds (it is then still running).
        """
        if self._ended is None:
            raise RuntimeError(f"{self!r} was not started")
        loop = asyncio.get_running_loop()
        started = loop.time()
        next_report = started + report_seconds
        async with httpx.AsyncClient(trust_env=False, timeout=PROBE_TIMEOUT_SECONDS) as client:
            while not await self._is_healthy(client):
                await asyncio.wait({self._ended}, timeout=POLL_SECONDS)
                now = loop.time()
                if self._ended.done():
                    raise self._failed(f"ended before it was ready: {how_it_ended(self._ended.result())}")
                if now - started > timeout:
                    raise self._failed(f"not ready after {timeout:.0f} s")
                if now >= next_report:
                    at = self.progress() if self.progress is not None else None
                    self._say(
                        f"not ready yet, {now - started:.0f} s of at most {timeout:.0f} s{f': {at}' if at else ''}"
                    )
                    next_report += report_seconds

    async def wait(self) -> int:
        """Exit code, once the process and all of its group are gone. Cancelling this does not stop the replica."""
        if self._ended is None:
            raise RuntimeError(f"{self!r} was not started")
        return await asyncio.shield(self._ended)

    async def stop(self, grace_seconds: float = STOP_GRACE_SECONDS) -> None:
        """End the process and its group; return when all are gone. Cancelling this kills the group at once."""
        if self._process is None or self._ended is None:
            return
        try:
            if self._process.returncode is None:
                self._process.terminate()
            await asyncio.wait({self._ended}, timeout=grace_seconds)
        finally:
            self.kill()
        await self.wait()

    def kill(self) -> None:
        """SIGKILL to all of it. Whoever waits for its end will see it."""
        if self._process is not None and self._ended is not None and not self._ended.done():
            kill_group(self._process.pid)

    async def _start_watchdog(self) -> None:
        read_end, leash = os.pipe()
        try:
            self._watchdog = await asyncio.create_subprocess_exec(
                "/bin/sh",
                "-c",
                WATCHDOG,
                "watchdog",
                descendants.assignment(self._mark),
                stdin=read_end,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except BaseException:
            os.close(leash)
            raise
        finally:
            os.close(read_end)
        self._leash = leash

    async def _dismiss_watchdog(self) -> None:
        assert self._leash is not None
        assert self._watchdog is not None
        try:
            os.write(self._leash, b"stopped\nstopped\n")
        except OSError:
            pass  # somebody killed the watchdog; nothing is left to tell it
        os.close(self._leash)
        self._leash = None
        await self._watchdog.wait()

    async def _see_to_the_end(self, process: Process, read_end: int) -> int:
        """Own the running process: pass its output on, see it end, remove what is left of its group."""
        copying = asyncio.create_task(self._copy_output(read_end))
        exit_code = await process.wait()
        kill_group(process.pid)
        await asyncio.to_thread(descendants.kill_marked, self._mark)  # milliseconds for hundreds of processes
        if not await asyncio.to_thread(descendants.wait_gone, process.pid, GONE_SECONDS):
            log.warning("%s: processes of it have not ended %g s after SIGKILL", self.name, GONE_SECONDS)
        await asyncio.wait({copying}, timeout=LAST_OUTPUT_SECONDS)
        copying.cancel()
        self._remove_socket_files()
        await self._dismiss_watchdog()
        return exit_code

    def _remove_socket_files(self) -> None:
        for path in SOCKET_FILE.findall(" ".join(self.command)):
            Path(path).unlink(missing_ok=True)

    async def _copy_output(self, read_end: int) -> None:
        reader = asyncio.StreamReader()
        pipe = os.fdopen(read_end, "rb", buffering=0)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        try:
            await self._pass_on_lines(reader)
        finally:
            transport.close()

    async def _pass_on_lines(self, reader: asyncio.StreamReader) -> None:
        rest = bytearray()
        while data := await reader.read(READ_BYTES):
            # Progress bars return the carriage without a new line.
            first, *others = re.split(rb"[\r\n]+", data)
            rest += first
            if others:
                lines = [bytes(rest), *others[:-1]]
                rest[:] = others[-1]
                for start in range(0, len(lines), LINES_AT_ONCE):
                    self._pass_on(lines[start : start + LINES_AT_ONCE])
                    await asyncio.sleep(0)
            if len(rest) > READ_BYTES:
                self._pass_on([bytes(rest)])
                rest.clear()
        self._pass_on([bytes(rest)])

    def _pass_on(self, lines: Sequence[bytes]) -> None:
        for line in lines:
            if line:
                text = line.decode("utf-8", "replace")
                self._last_lines.append(text)
                self._say(text)
                self._tell(text[:HEARD_CHARACTERS])

    def _tell(self, text: str) -> None:
        """Whatever a listener makes of a line, the replica lives on: with no reader at its pipe it would die."""
        for hear in tuple(self.listeners):
            try:
                hear(text)
            except Exception:
                self.listeners.remove(hear)
                log.exception("%s: one that listens to its output failed, and hears no more of it", self.name)

    def _say(self, text: str) -> None:
        output = self.output or sys.stderr
        try:
            output.write(f"{self.name} | {text}\n")
            output.flush()
        except (OSError, ValueError):
            pass  # our own stderr is gone; the replica must not hang on a full pipe because of that

    async def _is_healthy(self, client: httpx.AsyncClient) -> bool:
        try:
            return (await client.get(f"{self.url}/health")).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def _failed(self, what: str) -> WorkerFailed:
        return WorkerFailed(f"{self.name} ({self.url}): {what}", tuple(self._last_lines))


def how_it_ended(exit_code: int) -> str:
    """For people: the code, or the signal that a negative one stands for."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"


def kill_group(leader: int) -> None:
    """SIGKILL to a whole process group; nothing happens when it is empty."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        pass
    except PermissionError:
        pass  # macOS says so for a group of zombies
