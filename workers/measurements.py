"""What was measured with presets, beside the plan for them: starts on this machine, and those that come along."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct

from workers.planner.start import plan_start
from workers.presets import DEFAULT_PROFILE, Measurement, Preset
from workers.start_report import planned
from workers.starts import Planned, Start

SHIPPED, HERE = "shipped", "here"


class Row(Struct, frozen=True, kw_only=True):
    """The keys of `warmlane presets --measured --json`. Memory is that of one card; what is not known is null."""

    preset: str
    profile: str
    source: str
    time: str | None = None
    vllm: str
    hardware: str
    flags: str
    """All of the engine's for a start here; where they differ from the profile for one that comes along."""
    start_seconds: float | None
    weights_gib: float | None
    overhead_gib: float | None
    kv_cache_gib: float | None
    kv_tokens: int | None
    concurrency: float | None = None
    planned: Planned | None
    """By arithmetic alone for one that comes along, else what the plan said then."""


def rows(presets: Mapping[str, Preset], starts: Sequence[Start]) -> list[Row]:
    """By preset; those of this machine behind those that come along, the latest last."""
    found = []
    for name, preset in presets.items():
        found += [shipped(name, preset, record) for record in preset.measured]
        found += [from_here(start) for start in starts if start.preset == name]
    return found


def shipped(name: str, preset: Preset, record: Measurement) -> Row:
    profile = preset.profile(DEFAULT_PROFILE)
    words = [f"--{flag}={value}" for flag, value in profile.flags.items() if value is not False]
    plan = plan_start(preset, [*words, *shlex.split(record.flags)], profile.environment, record.vllm)
    expected = plan.expected(by_arithmetic_alone=True) if plan and record.kv_cache_tokens is not None else None
    return Row(
        preset=name,
        profile=DEFAULT_PROFILE,
        source=SHIPPED,
        vllm=record.vllm,
        hardware=record.hardware,
        flags=record.flags,
        start_seconds=record.start_seconds,
        weights_gib=record.weights_gib,
        overhead_gib=record.overhead_gib,
        kv_cache_gib=record.kv_cache_gib,
        kv_tokens=record.kv_cache_tokens,
        planned=planned(expected) if expected else None,
    )


def from_here(start: Start) -> Row:
    return Row(
        preset=start.preset,
        profile=start.profile,
        source=HERE,
        time=start.time,
        vllm=start.vllm,
        hardware=start.hardware,
        flags=start.flags,
        start_seconds=start.start_seconds,
        weights_gib=start.weights_gib,
        overhead_gib=start.overhead_gib,
        kv_cache_gib=start.kv_cache_gib,
        kv_tokens=start.kv_tokens,
        concurrency=start.concurrency,
        planned=start.planned,
    )


def as_json(found: Sequence[Row]) -> str:
    return msgspec.json.format(msgspec.json.encode(found), indent=2).decode()


def as_text(found: Sequence[Row]) -> str:
    """Three lines each: what was started, with which flags, and what it came to. Of equal starts only the latest."""
    latest = {(row.preset, row.profile, row.vllm, row.hardware, row.flags, row.source): row for row in found}
    return "\n".join(f"{heading(row)}\n    {flags(row)}\n    {figures(row)}" for row in latest.values())


def heading(row: Row) -> str:
    when = f"here, {row.time[:16].replace('T', ' ')}" if row.time else row.source
    return f"{row.preset} {row.profile}, vLLM {row.vllm}, {row.hardware} ({when})"


def flags(row: Row) -> str:
    if row.source == HERE:
        return f"with {row.flags}" if row.flags else "with no flags"
    return f"with the profile's flags{f', but {row.flags}' if row.flags else ''}"


def hardware(record: Measurement) -> str:
    """For one line: where it was measured, and with what other flags than the profile's."""
    return f"{record.hardware} (with {record.flags})" if record.flags else record.hardware


def figures(row: Row) -> str:
    plan = row.planned
    parts = [
        pair("weights", row.weights_gib, plan.weights_gib if plan else None, ".2f", " GiB"),
        pair("KV cache", row.kv_cache_gib, plan.kv_cache_gib if plan else None, ".2f", " GiB"),
        pair("KV tokens", row.kv_tokens, plan.kv_tokens if plan else None, ",", ""),
        pair("overhead", row.overhead_gib, None, ".2f", " GiB"),
        pair("started in", row.start_seconds, None, ".0f", " s"),
    ]
    return ", ".join(part for part in parts if part)


def pair(name: str, measured: float | None, plan: float | None, form: str, unit: str) -> str:
    """Measured, and in brackets what was planned."""
    if measured is None:
        return ""
    text = f"{name} {measured:{form}}{unit}"
    return text if plan is None else f"{text} (plan: {plan:{form}})"
