"""The lines of a trace file, gzip or plain; what is wrong with one is said with the file's name and its number."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from loadtests.traces.model import Trace, TraceError

GZIP_MAGIC = b"\x1f\x8b"
Source = Callable[[int], Trace]
"""The trace for a seed."""
Tell = Callable[[str], None]
"""Takes a line for the person who reads the trace."""
T = TypeVar("T")


def say_nothing(message: str) -> None:
    """For programs that read traces."""


@dataclass(frozen=True, slots=True)
class Lines:
    """The lines that are not blank, with their numbers; at least one."""

    path: Path
    texts: tuple[tuple[int, bytes], ...]

    @classmethod
    def of(cls, path: Path) -> Lines:
        """Raises `TraceError`."""
        try:
            content = path.read_bytes()
            if content.startswith(GZIP_MAGIC):
                content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise TraceError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
        texts = tuple((number, text) for number, text in enumerate(content.splitlines(), 1) if text.strip())
        if not texts:
            raise TraceError(f"{path}: no requests")
        return cls(path, texts)

    @property
    def first(self) -> bytes:
        return self.texts[0][1]

    def each(self, parse: Callable[[bytes], T], skip: int = 0) -> Iterator[T]:
        """What `parse` makes of each line after the first `skip`. Raises `TraceError` for its ValueErrors."""
        for number, text in self.texts[skip:]:
            try:
                yield parse(text)
            except (msgspec.MsgspecError, ValueError) as error:
                raise TraceError(f"{self.path}, line {number}: {' '.join(str(error).split())}") from error


def at_least(least: int, **fields: float) -> None:
    """Raises ValueError for the first field below `least`."""
    for name, value in fields.items():
        if not value >= least:
            raise ValueError(f"`{name}` must be at least {least}")
