"""A file that stays small: when it is full it becomes FILE.1, what was FILE.1 becomes FILE.2, and the oldest goes.

Several processes may write to the same one. Each writes whole lines at its end, looks before each time whether it still
is the file of that name (another process, or logrotate, may have moved it), and makes room under a lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os

MODE = 0o640
"""It tells who asked for what, if not with which words."""


class RotatedFile:
    """`write` takes whole lines; it is called by one thread. `files`: how many are kept, the one being written too."""

    def __init__(self, path: str, *, max_bytes: int, files: int) -> None:
        """Raises `OSError` when it cannot be opened."""
        self._path = path
        self._max_bytes = max_bytes
        self._files = files
        self._torn = False
        """The last write ended within a line, on a full disk say."""
        self._descriptor = self._open()

    def __repr__(self) -> str:
        return f"<RotatedFile {self._path}>"

    def write(self, lines: bytes) -> None:
        """Raises `OSError`; then what of `lines` was written ends within a line, which the next one does not join."""
        if not self._is_current():
            self._reopen()
        if (size := os.fstat(self._descriptor).st_size) and size + len(lines) > self._max_bytes:
            self._rotate()
        rest = memoryview(b"\n" + lines if self._torn else lines)
        self._torn = True
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]
        self._torn = False

    def flush(self) -> None:
        """Nothing is kept here."""

    def close(self) -> None:
        os.close(self._descriptor)

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        descriptor = os.open(self._path, flags | os.O_NONBLOCK, MODE)  # a pipe that nobody reads would hold us up here
        os.set_blocking(descriptor, True)
        return descriptor

    def _reopen(self) -> None:
        descriptor = self._open()
        os.close(self._descriptor)
        self._descriptor = descriptor

    def _is_current(self) -> bool:
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False

    def _rotate(self) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            if self._is_current():  # else another process was first
                self._move_all()
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self._reopen()

    def _move_all(self) -> None:
        names = [self._path, *(f"{self._path}.{number}" for number in range(1, self._files))]
        if len(names) == 1:
            os.unlink(self._path)
        for number in range(len(names) - 1, 0, -1):
            with contextlib.suppress(FileNotFoundError):
                os.replace(names[number - 1], names[number])
