"""Mooncake's traces: JSON lines with `timestamp` (ms), `input_length`, `output_length`, `hash_ids` (512-token blocks)
and perhaps `session`.

Timestamps that were rounded to seconds are recognised; `spread` moves them apart. When one request of a session ended
is not recorded, so thinking is guessed: the gap between two arrivals, less the time that the answer took at 60 tokens a
second.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from loadtests.traces.lines import Lines, Source, at_least
from loadtests.traces.model import BLOCK_TOKENS, Request, Trace

COARSE_MS = 1_000
"""Timestamps that are all multiples of a second or more were rounded, if on average two requests share each."""
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
    """What the timestamps were rounded to, or 0."""
    distinct = set(timestamps)
    if len(timestamps) < 2 * len(distinct) or not all(float(stamp).is_integer() for stamp in distinct):
        return 0
    common = math.gcd(*(int(stamp) for stamp in distinct))
    return common if common >= COARSE_MS else 0


def encode(requests: Iterable[Request]) -> bytes:
    """Requests as a file in this format; times of thinking are lost."""
    encoder = msgspec.json.Encoder()
    lines = (Line(r.arrival * 1000, r.input_tokens, r.output_tokens, r.blocks, r.session) for r in requests)
    return b"".join(encoder.encode(line) + b"\n" for line in lines)
