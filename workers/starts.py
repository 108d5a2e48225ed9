"""What starts of replicas on this machine measured, beside what was planned: a small file, one line for each start.

It lies where state of the user belongs, `$XDG_STATE_HOME/warmlane/starts.jsonl`, and holds the last starts only.
Writers take turns, and a reader sees the old file or the new one, whole.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
from msgspec import Struct

KEPT = 200
"""Some 100 KB; what is older is of no use for a plan."""
PATIENCE_SECONDS = 0.1
"""A turn takes a millisecond or two. Who writes may have requests to serve: no longer than they can bear."""
TRY_SECONDS = 0.01
FILE = Path("warmlane", "starts.jsonl")


class Planned(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Memory is that of one card."""

    kv_tokens: int
    concurrency: float
    weights_gib: float | None = None
    kv_cache_gib: float | None = None


class Start(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One start; what the engine did not write is absent. Memory is that of one card."""

    time: str
    """When it was ready, UTC, as in RFC 3339."""
    preset: str
    profile: str
    model: str
    vllm: str
    """Version, as the engine says."""
    hardware: str
    flags: str
    """As asked for: without what a supervisor changed since (`workers.remedies`)."""
    kv_tokens: int
    """As vLLM reports it."""
    context: int
    concurrency: float
    weights_gib: float | None = None
    overhead_gib: float | None = None
    """What is used beside weights and KV cache."""
    kv_cache_gib: float | None = None
    start_seconds: float | None = None
    load_seconds: float | None = None
    engine_seconds: float | None = None
    planned: Planned | None = None


def file_for(environment: Mapping[str, str]) -> Path | None:
    """Of the user whose environment this is; `None` for one without a home."""
    state = environment.get("XDG_STATE_HOME", "")
    if os.path.isabs(state):  # others are to be passed over, says the XDG specification
        return Path(state) / FILE
    try:
        return Path.home() / ".local" / "state" / FILE
    except RuntimeError:  # a container may run under a number that nobody knows
        return None


def read(file: Path | None) -> list[Start]:
    """Oldest first; lines that are not ours are passed over. Empty where nothing was measured."""
    if file is None:
        return []
    try:
        lines = file.read_bytes().splitlines()
    except OSError:
        return []
    return [start for line in lines if (start := parsed(line)) is not None]


def parsed(line: bytes) -> Start | None:
    try:
        return msgspec.json.decode(line, type=Start)
    except (msgspec.DecodeError, RecursionError):  # of another version, or a hand; or nested without end
        return None


def add(file: Path, start: Start, patience_seconds: float = PATIENCE_SECONDS) -> None:
    """Raises `OSError`, also where another process has its turn for longer than that."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with taking_turns(file.with_suffix(".lock"), patience_seconds):
        try:
            lines = file.read_bytes().splitlines()
        except FileNotFoundError:
            lines = []
        lines = [*lines, msgspec.json.encode(start)][-KEPT:]
        replace_whole(file, b"\n".join(lines) + b"\n")


@contextmanager
def taking_turns(lock: Path, patience_seconds: float) -> Iterator[None]:
    last_try = time.monotonic() + patience_seconds
    with lock.open("wb") as held:
        while True:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= last_try:
                    raise OSError(error.errno, "another process holds its lock") from error
                time.sleep(TRY_SECONDS)
        yield


def replace_whole(file: Path, content: bytes) -> None:
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(descriptor, "wb") as new:
            new.write(content)
        os.replace(name, file)
    except OSError:
        os.unlink(name)
        raise
