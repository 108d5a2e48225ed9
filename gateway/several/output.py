"""What workers print, on the parent's own standard output and error: whole lines only, and the same line once.

Each worker writes to a pipe of its own, so no two can tear each other's lines, and of one that is killed half a line is
dropped. While nobody reads standard output the parent reads no more of the workers', and they count what they lose.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

READ_BYTES = 64 * 1024
MAX_LINE_BYTES = 1024 * 1024
"""A record has some 700 bytes; what is longer than this without an end is no line."""
FINISH_SECONDS = 1.0
"""For the last lines at the end; a reader that does not take them by then does not get them."""
WAIT_SECONDS = 1.0
"""Between two looks at a descriptor that somebody else made non-blocking."""
SAME_SECONDS = 10.0
"""What a worker says, and another within this time, is news once: all look at the same replicas and files."""
KEPT_LINES = 1_000


class Funnel:
    """Writes to a descriptor in a thread that may wait for the reader. Whoever hands it lines waits for their turn."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._turn = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._lines: bytes | None = None
        self._done: asyncio.Future[None] | None = None
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="standard-output", daemon=True)
        self._thread.start()

    async def write(self, lines: bytes) -> None:
        """Returns once they are written, or nobody will read them any more."""
        async with self._turn:
            self._done = self._loop.create_future()
            with self._changed:
                self._lines = lines
                self._changed.notify()
            await self._done

    async def finish(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        await asyncio.to_thread(self._thread.join, FINISH_SECONDS)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines is not None or self._closing)
                lines, self._lines = self._lines, None
            if lines is None:
                return
            with contextlib.suppress(OSError):  # the reader is gone: nobody is left to tell
                self._write_all(lines)
            if (done := self._done) is not None:
                with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                    self._loop.call_soon_threadsafe(settle, done)

    def _write_all(self, lines: bytes) -> None:
        rest = memoryview(lines)
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest[:READ_BYTES]) :]
            except BlockingIOError:
                select.select([], [self._descriptor], [], WAIT_SECONDS)


def settle(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)


async def pass_on(reader: asyncio.StreamReader, write: Callable[[bytes], object]) -> None:
    """Whole lines as they come, until the end. What `write` returns is awaited where it can be."""
    begun = b""
    while data := await reader.read(READ_BYTES):
        lines, end, begun = (begun + data).rpartition(b"\n")
        if len(begun) > MAX_LINE_BYTES:
            begun = b""
        if end:
            written = write(lines + end)
            if asyncio.iscoroutine(written):
                await written


class Said:
    """Which lines of standard error are news."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lines: OrderedDict[str, tuple[float, set[int]]] = OrderedDict()

    def is_news(self, line: str, worker: int) -> bool:
        """Not what another has said just before, as long as each says it once."""
        now = self._clock()
        at, by = self._lines.get(line, (float("-inf"), set()))
        if now - at > SAME_SECONDS or worker in by:
            self._lines[line] = now, {worker}
            self._lines.move_to_end(line)
            if len(self._lines) > KEPT_LINES:
                self._lines.popitem(last=False)
            return True
        by.add(worker)
        return False

    def print_news(self, lines: bytes, worker: int) -> None:
        news = [one for one in lines.decode("utf-8", "replace").splitlines() if self.is_news(one, worker)]
        if news:
            print("\n".join(news), file=sys.stderr, flush=True)
