"""Reads the few families that routing needs from a replica's metrics page, in the Prometheus text format. Which they
are says the dialect of its engine (`dialects.py`).

A page has some 600 lines of which about fifteen matter, so only those are parsed: 0.15 ms against 6 ms with
prometheus-client's parser for a page of vLLM 0.32 (51 kB). What is absent or not a usable number is `None`, never zero.
Engines of one replica (data parallel ranks, one label each) are summed; a sum that lacks an engine would understate, so
one unusable sample makes the whole family unknown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

from gateway.core.model import LoadSnapshot
from gateway.feeds.dialects import VLLM, Families, Names

BEHIND_NAME = (b"{", b" ", b"\t")

MOST = 1e15
MOST_DIGITS = 15
"""Larger is no count of anything here, and would overflow where counts are multiplied or made whole."""

MOST_LINES = 4_096
"""Lines of the wanted families: a hundred engines have a thousand. Reading more would hold up the requests (100,000
took 0.6 s), so a page with more says nothing."""
MOST_PAGE_LINES = 65_536
"""Lines of all: a hundred engines have 60,000. Four million, which the size of a page allows, took 0.35 s to split."""
MOST_LINE_BYTES = 4_096
"""Of a wanted line: the longest of vLLM has some 1,000. One with 800,000 labels took as long."""

LABEL = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"')

Number = TypeVar("Number", int, float)


class Sample(NamedTuple):
    labels: dict[str, str]
    value: float | None
    """`None` when it is no finite number of zero or more."""


class Absurd(Exception):
    """A page that no engine writes: it says nothing. The message is short, for people."""


Gauge = dict[str, float | None]
"""A gauge, engine by engine of one replica."""


def read_load(page: bytes, taken_at: float, families: Families = VLLM.families) -> LoadSnapshot:
    """The load snapshot that a page describes. A page without any of the families gives one of `None`s. Raises
    `Absurd`."""
    lines = _lines(page, families.wanted)
    capacities = _cache_tokens(lines, families)
    return LoadSnapshot(
        taken_at=taken_at,
        running=_total(_gauge(lines, families.running, families).values()),
        waiting=_total(_gauge(lines, families.waiting, families).values()),
        kv_usage=_kv_usage(_gauge(lines, families.kv_usage, families, max), capacities),
        prefix_queries=_queries(lines, families),
        prefix_hits=_counted(lines, families.prefix_hits),
        cache_tokens=_complete(capacities.values(), sum),
        started_at=_complete([sample.value for sample in _samples(lines, families.started_at)], max),
        asleep=_asleep(_samples(lines, families.sleep_state)),
    )


def _lines(page: bytes, names: Names) -> list[bytes]:
    """Those that start with one of the names. Raises `Absurd`."""
    if page.count(b"\n") > MOST_PAGE_LINES:
        raise Absurd(f"more than {MOST_PAGE_LINES} lines")
    lines = [line for line in page.split(b"\n") if line.startswith(names)]
    if len(lines) > MOST_LINES:
        raise Absurd(f"more than {MOST_LINES} lines of load")
    if any(len(line) > MOST_LINE_BYTES for line in lines):
        raise Absurd(f"a line of load with more than {MOST_LINE_BYTES} bytes")
    return lines


def _samples(lines: list[bytes], names: Names) -> list[Sample]:
    """Samples of the first of these names that the page has. A longer name that starts alike is another family."""
    for name in names:
        end = len(name)
        of_it = [line[end:] for line in lines if line.startswith(name) and line[end : end + 1] in BEHIND_NAME]
        if of_it:
            return [read_sample(line) for line in of_it]
    return []


def read_sample(line: bytes) -> Sample:
    """What follows the name: `{labels} value [timestamp]`. Braces may occur inside quoted label values."""
    rest = line.decode("utf-8", "replace")
    labels: dict[str, str] = {}
    if rest.startswith("{"):
        position = 1
        while found := LABEL.match(rest, position):
            labels[found[1]] = found[2]
            position = found.end() + rest.startswith(",", found.end())
        if not rest.startswith("}", position):
            return Sample(labels, None)
        rest = rest[position + 1 :]
    fields = rest.split()
    return Sample(labels, _number(fields[0]) if fields else None)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value <= MOST else None


def _complete(values: Iterable[Number | None], combine: Callable[[list[Number]], Number]) -> Number | None:
    """All values combined, or `None` if there are none or one of them is unknown."""
    everything = list(values)
    known = [value for value in everything if value is not None]
    return combine(known) if known and len(known) == len(everything) else None


def _total(values: Iterable[float | None]) -> int | None:
    total = _complete(values, sum)
    return None if total is None else int(total)


def _counted(lines: list[bytes], names: Names) -> int | None:
    return _total(sample.value for sample in _samples(lines, names))


def _queries(lines: list[bytes], families: Families) -> int | None:
    """Tokens looked up. Some count apart what was found."""
    queries = _counted(lines, families.prefix_queries)
    if queries is None or not families.queries_leave_hits_out:
        return queries
    return queries + (_counted(lines, families.prefix_hits) or 0)


def _gauge(
    lines: list[bytes], names: Names, families: Families, combine: Callable[[list[float]], float] = sum
) -> Gauge:
    """One value for each engine: its samples combined, or the largest where its ranks repeat it."""
    found: dict[str, list[float | None]] = {}
    for sample in _samples(lines, names):
        if not sample.labels.get(families.part_label):
            found.setdefault(sample.labels.get(families.engine, ""), []).append(sample.value)
    if families.ranks_repeat:
        combine = max
    return {engine: _complete(values, combine) for engine, values in found.items()}


def _cache_tokens(lines: list[bytes], families: Families) -> dict[str, int | None]:
    """Capacity of each engine, from whichever form its dialect has."""
    if families.cache_config:
        return _configured_tokens(_samples(lines, families.cache_config), families.engine)
    if families.cache_tokens:
        gauge = _gauge(lines, families.cache_tokens, families)
        return {engine: _whole(tokens) for engine, tokens in gauge.items()}
    blocks, sizes = (_gauge(lines, names, families) for names in (families.cache_blocks, families.block_tokens))
    return {engine: _whole((count or 0.0) * (sizes.get(engine) or 0.0)) for engine, count in blocks.items()}


def _whole(number: float | None) -> int | None:
    """An amount that is there."""
    return int(number) or None if number is not None and number <= MOST else None


def _configured_tokens(samples: list[Sample], engine: str) -> dict[str, int | None]:
    """vLLM's own count where it gives one: blocks times block size overstates what hybrid models can hold, which spend
    blocks on their window layers too."""
    capacities: dict[str, int | None] = {}
    for sample in samples:
        tokens = _count(sample.labels.get("kv_cache_size_tokens"))
        blocks, block_size = _count(sample.labels.get("num_gpu_blocks")), _count(sample.labels.get("block_size"))
        if tokens is None and blocks is not None and block_size is not None:
            tokens = blocks * block_size
        capacities[sample.labels.get(engine, "")] = tokens
    return capacities


def _count(text: str | None) -> int | None:
    """A label that holds a positive whole number; vLLM writes `None` where it does not know yet."""
    if text is None or not (text.isascii() and text.isdigit()) or len(text) > MOST_DIGITS:
        return None
    return int(text) or None


def _kv_usage(gauge: Gauge, capacities: dict[str, int | None]) -> float | None:
    """Share of all blocks in use: the mean over engines weighted by capacity. Without every capacity the fullest engine
    speaks for all: pressure that is hidden costs preemptions, pressure that is overstated only a detour."""
    usages = {engine: usage if usage is not None and usage <= 1 else None for engine, usage in gauge.items()}
    fullest = _complete(usages.values(), max)
    capacity = _complete([capacities.get(engine) for engine in usages], sum)
    if fullest is None or capacity is None:
        return fullest
    return sum((usage or 0.0) * (capacities[engine] or 0) for engine, usage in usages.items()) / capacity


def _asleep(samples: list[Sample]) -> bool | None:
    """One sleeping engine hangs the requests that reach it, so it makes the whole replica asleep."""
    awake = _complete([sample.value for sample in samples if sample.labels.get("sleep_state") == "awake"], min)
    return None if awake is None else awake == 0
