"""Any trace file becomes a trace: its first line says which format it has. Only in front of a request log something
else may stand: the greeting of `warmlane up`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from loadtests.traces import azure, chats, mooncake, request_log
from loadtests.traces.lines import Lines, Source, Tell, say_nothing
from loadtests.traces.model import Request, Trace, TraceError

FORMATS = "Mooncake JSON lines, Claude Code chats, Azure's CSV with ContextTokens, or a request log of the gateway"


def open_trace(path: Path, chat_count: int | None = None, tell: Tell = say_nothing) -> Source:
    """The trace in a file, gzip or plain, for each seed. `chat_count`: so many chats of a file of chats. `tell` gets a
    line for what is left out. Raises `TraceError`."""
    lines = Lines.of(path)
    keys = keys_of(lines.first)
    if "hash_rle" in keys:
        return chats.parse(lines, chat_count)
    if chat_count is not None:
        raise TraceError(f"{path}: holds no chats to choose from")
    if azure.is_header(lines.first):
        return azure.parse(lines)
    if "request_id" in (keys or first_keys(lines)):
        return request_log.parse(lines, tell)
    if not lines.first.lstrip().startswith(b"{"):
        raise TraceError(f"{path}, line {lines.texts[0][0]}: not a trace; known are {FORMATS}")
    return mooncake.parse(lines)


def read(path: Path, seed: int = 0) -> Trace:
    """The trace in a file. Raises `TraceError`."""
    return open_trace(path)(seed)


def write(path: Path, requests: Iterable[Request]) -> None:
    """Requests as a file in Mooncake's format."""
    path.write_bytes(mooncake.encode(requests))


def first_keys(lines: Lines) -> frozenset[str]:
    """Of the first line that is a JSON object."""
    return next((keys for _, text in lines.texts if (keys := keys_of(text))), frozenset())


def keys_of(line: bytes) -> frozenset[str]:
    """Of a JSON object; none of anything else."""
    try:
        return frozenset(msgspec.json.decode(line, type=dict[str, msgspec.Raw]))
    except msgspec.MsgspecError:
        return frozenset()
