"""Azure's traces of LLM inference (2023 and 2024): CSV with `TIMESTAMP,ContextTokens,GeneratedTokens`.

Lengths and times only: no request shares a prefix with another, so they say how policies balance, not how they cache.
"""

from __future__ import annotations

from datetime import UTC, datetime

from loadtests.traces.lines import Lines, Source, at_least
from loadtests.traces.model import Request, Trace, TraceError

COLUMNS = ("timestamp", "contexttokens", "generatedtokens")
"""Names without case, spaces and underscores: the files differ in these."""


def header(line: bytes) -> list[str]:
    names = line.decode("utf-8-sig", "replace").strip().lower().split(",")
    return [name.strip().strip('"').replace("_", "").replace(" ", "") for name in names]


def is_header(line: bytes) -> bool:
    return set(header(line)) >= set(COLUMNS)


def parse(lines: Lines) -> Source:
    names = header(lines.first)
    places = [names.index(name) for name in COLUMNS]

    def row(text: bytes) -> tuple[float, int, int]:
        cells = text.decode().split(",")
        if len(cells) != len(names):
            raise ValueError(f"{len(cells)} columns instead of {len(names)}")
        at, context, generated = (cells[place].strip().strip('"') for place in places)
        tokens, output = int(context), int(generated)
        at_least(0, ContextTokens=tokens, GeneratedTokens=output)
        return unix_time(at), max(1, tokens), max(1, output)  # an engine sees and makes at least one

    rows = sorted(lines.each(row, skip=1))
    if not rows:
        raise TraceError(f"{lines.path}: no requests")
    start = rows[0][0]
    trace = Trace(tuple(Request(at - start, tokens, output) for at, tokens, output in rows))
    return lambda seed: trace


def unix_time(text: str) -> float:
    """Of an ISO date and time; UTC where no zone is given."""
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
