"""What differs between vLLM's versions: which flags and variables each knows, and what it makes of the same flags.

A flag that a version does not know stops its start, and a variable that it does not know is one line in a long log;
both are found here before anything starts. `known/vllm.toml` is the list.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import NamedTuple

import msgspec
from msgspec import Struct

LISTS = "known/vllm.toml"


class VersionError(Exception):
    """Not a version. The message is one clear line for the person who asked."""


class Version(NamedTuple):
    major: int
    minor: int
    patch: int = 0

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}"


NEWEST = Version(0, 32, 0)
"""The newest that was read and run; what a later one knows or drops is not known here."""
OLDEST = Version(0, 18, 0)
"""The oldest that the specification allows."""


def parse_version(text: str) -> Version:
    """`0.32`, `v0.32.0`, `0.24.0+cu129`, `0.18.0rc1`. Raises `VersionError`."""
    numbers = text.strip().removeprefix("v").partition("+")[0].split(".")
    try:
        major, minor, *rest = numbers
        patch = "".join(digit for digit in (rest[0] if rest else "0").partition("rc")[0] if digit.isdigit())
        return Version(int(major), int(minor), int(patch or 0))
    except (ValueError, IndexError) as error:
        raise VersionError(f"{text!r} is not a version of vLLM; expected one like {NEWEST}") from error


class Known(Struct, frozen=True, forbid_unknown_fields=True):
    """From `since` on, until before `gone`; `see` says what to use instead where it is not known."""

    since: str
    gone: str | None = None
    see: str = ""

    def covers(self, version: Version) -> bool:
        return parse_version(self.since) <= version and (self.gone is None or version < parse_version(self.gone))


class Lists(Struct, frozen=True, forbid_unknown_fields=True):
    flags: dict[str, Known]
    variables: dict[str, Known]


@cache
def known() -> Lists:
    text = resources.files("workers.presets").joinpath(LISTS).read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), Lists)


def unknown_flags(flags: Mapping[str, object], version: Version) -> list[str]:
    """A line for each flag that this version would refuse. Flags that are in no list are refused, too."""
    return [complaint(f"--{name}", known().flags.get(name), version) for name in flags if is_missing(name, version)]


def is_missing(flag: str, version: Version) -> bool:
    entry = known().flags.get(flag)
    return entry is None or not entry.covers(version)


def unknown_variables(environment: Mapping[str, str], version: Version) -> list[str]:
    """A line for each of vLLM's own variables that this version would ignore."""
    lists = known().variables
    return [
        complaint(name, lists.get(name), version)
        for name in environment
        if name.startswith("VLLM_") and not (name in lists and lists[name].covers(version))
    ]


def complaint(name: str, entry: Known | None, version: Version) -> str:
    if entry is None:
        return f"{name} is not among the flags and variables of vLLM that are known here"
    span = f"vLLM {entry.since} and later" if entry.gone is None else f"vLLM {entry.since} until before {entry.gone}"
    return f"vLLM {version} does not know {name} ({span}){f': {entry.see}' if entry.see else ''}"


class Behaviour(NamedTuple):
    """What a version does when it is told nothing; read from its source."""

    gpu_memory_utilization: float
    batches_in_flight: bool
    """Whether window layers reserve room for all batches that are scheduled at once, not for one."""
    reports_requests: bool
    """Whether "GPU KV cache size" is requests of full length times that length; before, blocks by groups."""
    events_end_hybrid_cache: bool
    """Whether KV events switch the hybrid cache manager off, so that windows are kept like everything else."""
    drops_windows: bool
    """Whether freed window blocks leave the prefix cache by themselves."""
    reads_retention_variable: bool


def behaviour_of(version: Version) -> Behaviour:
    return Behaviour(
        gpu_memory_utilization=0.92 if version >= (0, 20) else 0.9,
        batches_in_flight=version >= (0, 26),
        reports_requests=version >= (0, 21),
        events_end_hybrid_cache=version < (0, 20),
        drops_windows=version >= (0, 29),
        reads_retention_variable=(0, 23) <= version < (0, 29),
    )
