"""Costs: why a request went where it did, each candidate's cost by its parts, and what became of the request."""

from __future__ import annotations

import textwrap

from rich.cells import cell_len

from gateway.figures import NONE, count, plain, seconds, short_name, tokens
from gateway.top.frames import Candidate, Decision
from gateway.top.table import HEADING, SOFT, Column, Line, Table


def costs_of(one: Decision, width: int) -> list[Line]:
    """Why it was decided so, each candidate's cost by its parts, and what became of the request."""
    sentences = [one.why] if one.why else []
    if one.candidates > len(one.ranking):
        sentences.append(f"{one.candidates - len(one.ranking)} dearer candidates are not listed.")
    lines = [Line().add(line, HEADING) for line in textwrap.wrap(plain(" ".join(sentences)), width)]
    weights = {
        part: max(abs(row.parts.get(part, 0.0)) for row in one.ranking) for row in one.ranking for part in row.parts
    }
    parts = sorted((part for part, weight in weights.items() if weight), key=lambda part: -weights[part])
    columns: tuple[Column[Candidate], ...] = (
        Column("COST s" if one.policy == "cache-cost" else "COST", 8, lambda row: cost(row.total_seconds), 0),
        Column("CACHED", 8, lambda row: tokens(row.cached_tokens), 1),
        Column("FLIGHT", 6, lambda row: count(row.in_flight), 50),
        *(part_column(part, rank) for rank, part in enumerate(parts, 2)),
    )
    table = Table(columns, width, "CANDIDATE", one.ranking, lambda row: short_name(row.replica))
    lines += [table.heading(), *(table.row(row, False) for row in one.ranking)]
    return [*lines, *(Line().add(line, SOFT) for line in textwrap.wrap(plain(facts(one)), width))]


def part_column(part: str, rank: int) -> Column[Candidate]:
    return Column(part, max(8, cell_len(part)), lambda row: cost(row.parts.get(part)), rank)


def cost(value: float | None) -> str:
    return NONE if value is None else f"{value:.3f}" if value else "0"


def facts(one: Decision) -> str:
    """What became of the request."""
    found = [f"request {one.request_id}", one.route, f"tenant {one.tenant}" if one.tenant else ""]
    found.append(f"attempt {one.attempt}" if one.attempt > 1 else "")
    end = one.end
    if end is not None and end.outcome != "moved":
        found += [f"status {end.status or NONE}", f"waited {seconds(end.waited_seconds)}"]
        found += [f"gateway itself {seconds(end.overhead_seconds)}", f"whole {seconds(end.duration_seconds)}"]
        if end.prompt_tokens is not None:
            cached = "" if end.cached_tokens is None else f", {tokens(end.cached_tokens)} of them cached"
            found.append(f"replica reported {tokens(end.prompt_tokens)} prompt tokens{cached}")
        if end.completion_tokens is not None:
            found.append(f"answer {tokens(end.completion_tokens)} tokens")
    return " | ".join(fact for fact in found if fact)
