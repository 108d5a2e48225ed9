"""Traces: when requests came and which prefixes they share, without any text.

A block id stands for a whole prefix: two requests with the same id at the same place share everything up to there. Only
ids of full blocks are kept, since an engine caches no others. The format on disk is Mooncake's: JSON lines with
`timestamp` (ms), `input_length`, `output_length`, `hash_ids` (512-token blocks) and perhaps `session`.

What is random (arrivals inside a coarse timestamp, a synthetic trace) depends on the seed alone.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import msgspec

BLOCK_TOKENS = 512
"""Tokens in one block of Mooncake's traces."""
COARSE_MS = 1_000
"""Timestamps that are all multiples of a second or more were rounded, if on average two requests share each."""
GZIP_MAGIC = b"\x1f\x8b"


class TraceError(Exception):
    """The file is no trace; the message says where."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace."""

    arrival: float
    """Seconds from the start of the trace."""
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    """Ids of its full 512-token blocks, first block first."""
    session: str | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival."""

    requests: tuple[Request, ...]
    quantum_seconds: float = 0.0
    """Arrivals were rounded down to multiples of this; 0: they are exact."""

    @property
    def seconds(self) -> float:
        """How long it lasts; a trace of one moment lasts no time."""
        return self.requests[-1].arrival - self.requests[0].arrival + self.quantum_seconds if self.requests else 0.0

    @property
    def input_tokens(self) -> int:
        return sum(request.input_tokens for request in self.requests)


class Line(msgspec.Struct, omit_defaults=True):
    """One line of the file."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()
    session: str | int | None = None


# ---- files ---------------------------------------------------------------------------------------------------------


def read(path: Path) -> Trace:
    """A trace from a file, gzip or plain. Raises `TraceError`."""
    try:
        content = path.read_bytes()
        if content.startswith(GZIP_MAGIC):
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    decoder = msgspec.json.Decoder(Line)
    lines: list[Line] = []
    for number, text in enumerate(content.splitlines(), 1):
        if text.strip():
            try:
                lines.append(checked(decoder.decode(text)))
            except (msgspec.MsgspecError, ValueError) as error:
                raise TraceError(f"{path}, line {number}: {error}") from error
    if not lines:
        raise TraceError(f"{path}: no requests")
    lines.sort(key=lambda line: line.timestamp)
    start = lines[0].timestamp
    return Trace(tuple(request_of(line, start) for line in lines), quantum_ms([x.timestamp for x in lines]) / 1000)


def checked(line: Line) -> Line:
    if line.input_length < 1:
        raise ValueError("`input_length` must be at least 1")
    if line.output_length < 0:
        raise ValueError("`output_length` must not be negative")
    return line


def request_of(line: Line, start_ms: float) -> Request:
    return Request(
        arrival=(line.timestamp - start_ms) / 1000,
        input_tokens=line.input_length,
        output_tokens=max(1, line.output_length),  # an engine makes at least one token
        blocks=line.hash_ids[: line.input_length // BLOCK_TOKENS],
        session=None if line.session is None else str(line.session),
    )


def quantum_ms(timestamps: Sequence[float]) -> int:
    """What the timestamps were rounded to, or 0."""
    distinct = set(timestamps)
    if len(timestamps) < 2 * len(distinct) or not all(float(stamp).is_integer() for stamp in distinct):
        return 0
    common = math.gcd(*(int(stamp) for stamp in distinct))
    return common if common >= COARSE_MS else 0


def write(path: Path, requests: Iterable[Request]) -> None:
    """Requests as a file that `read` reads."""
    encode = msgspec.json.Encoder().encode
    lines = (Line(r.arrival * 1000, r.input_tokens, r.output_tokens, r.blocks, r.session) for r in requests)
    path.write_bytes(b"".join(encode(line) + b"\n" for line in lines))


# ---- time ----------------------------------------------------------------------------------------------------------


def spread(trace: Trace, seed: int) -> Trace:
    """Rounded arrivals, each moved to a random place inside its quantum; exact ones stay."""
    if not trace.quantum_seconds:
        return trace
    random = Random(seed)
    moved = [replace(r, arrival=r.arrival + random.random() * trace.quantum_seconds) for r in trace.requests]
    moved.sort(key=lambda request: request.arrival)
    return Trace(tuple(moved))


def sped_up(trace: Trace, speed: float) -> Trace:
    """The same requests `speed` times as fast."""
    return Trace(
        tuple(replace(request, arrival=request.arrival / speed) for request in trace.requests),
        trace.quantum_seconds / speed,
    )


def speed_for_load(trace: Trace, load: float, fleet_rate: float) -> float:
    """How much faster the trace must run to offer `load` times the input tokens a second that the fleet can prefill
    when nothing is cached (`fleet_rate`)."""
    return load * fleet_rate * trace.seconds / trace.input_tokens if trace.seconds else 1.0


# ---- ceilings ------------------------------------------------------------------------------------------------------


def cached_tokens(trace: Trace, capacity_tokens: int | None) -> list[int]:
    """Prompt tokens of each request that one LRU cache for everybody would hold, requests served as they arrive.

    `None`: a cache without end. Of a prompt of whole blocks the last is never used: one token must be computed.
    """
    held: OrderedDict[int, None] = OrderedDict()
    capacity = None if capacity_tokens is None else capacity_tokens // BLOCK_TOKENS
    found: list[int] = []
    for request in trace.requests:
        blocks = request.blocks
        known = next((place for place, block in enumerate(blocks) if block not in held), len(blocks))
        found.append(min(known, (request.input_tokens - 1) // BLOCK_TOKENS) * BLOCK_TOKENS)
        for block in reversed(blocks):  # the tail is the first to be evicted
            held.pop(block, None)
            held[block] = None
        while capacity is not None and len(held) > capacity:
            held.popitem(last=False)
    return found


# ---- synthetic -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Prompts that open with one of a few shared system prompts, sampled several times each, in bursts."""

    requests: int = 2_000
    rate: float = 20.0
    """Requests per second."""
    groups: int = 8
    """Different system prompts; the k-th is used 1/k as often as the first."""
    system_tokens: int = 8_192
    private_tokens: int = 2_048
    """Mean of an exponential distribution."""
    output_tokens: int = 200
    """The same."""
    samples: int = 1
    """Requests with the same prompt at the same moment."""
    burstiness: float = 1.0
    """Squared coefficient of variation of the gaps between arrivals: 1 is Poisson, 10 comes in waves."""


def synthetic(settings: Synthetic, seed: int) -> Trace:
    """A trace made up as `settings` say."""
    random = Random(seed)
    system_blocks = settings.system_tokens // BLOCK_TOKENS
    weights = [1 / rank for rank in range(1, settings.groups + 1)]
    gap_shape = 1 / settings.burstiness
    gap_scale = settings.samples / settings.rate / gap_shape
    fresh = settings.groups * system_blocks  # ids below belong to the system prompts
    now = 0.0
    made: list[Request] = []
    while len(made) < settings.requests:
        group = random.choices(range(settings.groups), weights)[0]
        tokens = settings.system_tokens + 1 + int(random.expovariate(1 / settings.private_tokens))
        own = tokens // BLOCK_TOKENS - system_blocks
        blocks = (*range(group * system_blocks, (group + 1) * system_blocks), *range(fresh, fresh + own))
        fresh += own
        for _ in range(min(settings.samples, settings.requests - len(made))):
            output = 1 + int(random.expovariate(1 / settings.output_tokens))
            made.append(Request(now, tokens, output, blocks))
        now += random.gammavariate(gap_shape, gap_scale)
    return Trace(tuple(made))
