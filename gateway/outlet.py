"""An outlet: what is written to a stream goes through a queue to a thread that may wait for the reader.

Whoever reads it may stop, as `up 2>&1 | less` does: then a pipe fills up, and the next one to write waits without end.
That must not be the event loop. The queue is bounded; what does not fit is dropped by whole lines, which are counted,
and the count is written once there is room again.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import threading
from collections import deque
from collections.abc import Iterator
from typing import TextIO, cast

MAX_WAITING_BYTES = 1024 * 1024
"""Some thousand lines: minutes of what replicas write. Beyond it the reader is gone rather than slow."""
FINISH_SECONDS = 1.0
"""For the last lines at the end; a reader that does not take them by then does not get them."""
WRITTEN_AT_ONCE = 64 * 1024
"""A pipe's size on Linux."""
WAIT_SECONDS = 1.0
"""Between two looks at a descriptor that somebody else made non-blocking."""


class Outlet(io.TextIOBase):
    """A text stream over a descriptor that never makes its writer wait. Its thread starts with the first line."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._begun = ""
        """Of a line: `print` writes the end of it by itself."""
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._dropped = 0
        self._changed = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        with self._changed:
            whole, end, self._begun = (self._begun + text).rpartition("\n")
            if end:
                self._accept(f"{whole}\n".encode("utf-8", "backslashreplace"))
        return len(text)

    def flush(self) -> None:
        """Hand over also what has no end of line."""
        with self._changed:
            if self._begun:
                self._accept(self._begun.encode("utf-8", "backslashreplace"))
                self._begun = ""

    def finish(self) -> None:
        """Wait a moment for the thread to write it all."""
        self.flush()
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(FINISH_SECONDS)

    def _accept(self, lines: bytes) -> None:
        if self._closing or self._waiting_bytes + len(lines) > MAX_WAITING_BYTES:
            self._dropped += lines.count(b"\n")
            return
        self._tell_dropped()
        self._waiting.append(lines)
        self._waiting_bytes += len(lines)
        self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._empty, name="standard-error", daemon=True)
            self._thread.start()

    def _tell_dropped(self) -> None:
        """At the place where they are missing."""
        if self._dropped:
            told = b"warmlane: %d lines are missing here: nobody read them in time\n" % self._dropped
            self._dropped = 0
            self._waiting.append(told)
            self._waiting_bytes += len(told)

    def _empty(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._dropped or self._closing)
                if not self._waiting:
                    self._tell_dropped()
                if not self._waiting:
                    return
                lines = self._waiting[0]
            try:
                self._write_all(lines)
            except OSError:
                pass  # the reader is gone: nobody is left to tell
            with self._changed:
                self._waiting.popleft()
                self._waiting_bytes -= len(lines)

    def _write_all(self, lines: bytes) -> None:
        """By the descriptor: a thread that waits in a stream of Python's own would hold its lock at the very end."""
        rest = memoryview(lines)
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest[:WRITTEN_AT_ONCE]) :]
            except BlockingIOError:
                select.select([], [self._descriptor], [], WAIT_SECONDS)


@contextlib.contextmanager
def outlet(stream: TextIO) -> Iterator[TextIO]:
    """One to where `stream` writes, finished at the end; the stream itself where that is no descriptor."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):
        yield stream
        return
    stream.flush()
    one = Outlet(descriptor)
    try:
        yield cast(TextIO, one)
    finally:
        one.finish()
