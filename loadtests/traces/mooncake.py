"""Mooncake's traces: JSON lines with `timestamp` (ms), `input_length`, `output_length`, `hash_ids` (512-token blocks)
and perhaps `session`.

Timestamps that were rounded to seconds are recognised; `spread` moves them apart. When one request of a session ended
is not recorded, so thinking is guessed: the gap between two arrivals, less the time that the answer took at 60 tokens a
second.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median

import msgspec

from loadtests.traces.lines import Lines, Source, at_least
from loadtests.traces.model import BLOCK_TOKENS, Request, Trace

COARSE_MS = 1_000
OFF_MS = 5
NEARLY_ALL = 0.95
"""Timestamps were rounded to some number of seconds if on average two requests share each, and nearly all are multiples
of it to within a few milliseconds."""
ANSWER_TOKENS_PER_SECOND = 60.0
"""Of the engine that served the trace, as guessed; the simulator's default."""


class Line(msgspec.Struct, omit_defaults=True):
    """One line of the file."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()
    session: str | int | None = None


def parse(lines: Lines) -> Source:
    decoder = msgspec.json.Decoder(Line)

    def checked(text: bytes) -> Line:
        line = decoder.decode(text)
        at_least(1, input_length=line.input_length)
        at_least(0, output_length=line.output_length)
        return line

    found = sorted(lines.each(checked), key=lambda line: line.timestamp)
    trace = Trace(tuple(requests_of(found)), quantum_ms([line.timestamp for line in found]) / 1000)
    return lambda seed: trace


def requests_of(lines: Sequence[Line]) -> Iterable[Request]:
    start = lines[0].timestamp
    free_at: dict[str, float] = {}  # when the answer before ended, by session
    for line in lines:
        arrival, output = (line.timestamp - start) / 1000, max(1, line.output_length)  # an engine makes at least one
        session = None if line.session is None else str(line.session)
        think = None
        if session is not None:
            if session in free_at:
                think = max(0.0, arrival - free_at[session])
            free_at[session] = arrival + output / ANSWER_TOKENS_PER_SECOND
        blocks = line.hash_ids[: line.input_length // BLOCK_TOKENS]
        yield Request(arrival, line.input_length, output, blocks, session, think)


def quantum_ms(timestamps: Sequence[float]) -> int:
    """What the timestamps were rounded to, or 0. Some may be off by a few milliseconds, as in Mooncake's own traces."""
    distinct = sorted(set(timestamps))
    if len(distinct) < 2 or len(timestamps) < 2 * len(distinct):
        return 0
    quantum = COARSE_MS * round(median(after - before for before, after in pairwise(distinct)) / COARSE_MS)
    if not quantum:
        return 0
    near = sum(abs(stamp - quantum * round(stamp / quantum)) <= OFF_MS for stamp in timestamps)
    return quantum if near >= NEARLY_ALL * len(timestamps) else 0


def encode(requests: Iterable[Request]) -> bytes:
    """Requests as a file in this format; times of thinking are lost."""
    encoder = msgspec.json.Encoder()
    lines = (Line(r.arrival * 1000, r.input_tokens, r.output_tokens, r.blocks, r.session) for r in requests)
    return b"".join(encoder.encode(line) + b"\n" for line in lines)
