"""`warmlane replay`: from the words of the command line to a report on stdout, with progress on stderr."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from gateway.core.settings import POLICY_NAMES
from loadtests import report, traces
from loadtests.simulator import Fleet

RECORDED = "recorded"


class Refused(Exception):
    """The request makes no sense; one line says why."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What the command line said."""

    policies: tuple[str, ...] = ()
    """All when empty."""
    replicas: int = 8
    cache_tokens: int = 1_500_000
    load: str = "1.0"
    speed: float = 1.0
    seeds: int = 1
    never_shed: bool = False

    def plan(self) -> report.Plan:
        """Raises `Refused`."""
        for name in self.policies:
            if name not in POLICY_NAMES:
                raise Refused(f"--policy: unknown policy {name!r}; one of {', '.join(POLICY_NAMES)}")
        load = self.load_number()
        if not positive(self.speed):
            raise Refused("--speed: must be above 0")
        if load is not None and self.speed != 1.0:
            raise Refused(f"--speed multiplies the trace's own rate: add --load {RECORDED}")
        return report.Plan(
            fleet=Fleet(replicas=self.replicas, cache_tokens=self.cache_tokens),
            load=load,
            speed=self.speed,
            policies=tuple(dict.fromkeys(self.policies)) or POLICY_NAMES,
            seeds=self.seeds,
            sheds=not self.never_shed,
        )

    def load_number(self) -> float | None:
        if self.load == RECORDED:
            return None
        try:
            load = float(self.load)
        except ValueError:
            load = 0.0
        if not positive(load):
            raise Refused(f"--load: a number above 0 or `{RECORDED}`, not {self.load!r}")
        return load


def positive(value: float) -> bool:
    return value > 0 and isfinite(value)


def run(path: Path, wish: Wish, as_json: bool) -> str:
    """What to print. Raises `Refused`."""
    plan = wish.plan()
    try:
        trace = traces.read(path)
    except traces.TraceError as error:
        raise Refused(f"--trace: {error}") from error
    found = report.replay(trace, plan, Ticker(sys.stderr.isatty()))
    return report.as_json(found) if as_json else report.as_table(found)


class Ticker:
    """Progress on stderr: a line for each finished run, and on a terminal one that moves."""

    def __init__(self, is_terminal: bool) -> None:
        self._is_terminal = is_terminal
        self._name = ""
        self._since = time.monotonic()

    def __call__(self, name: str, of: int, done: int) -> None:
        now = time.monotonic()
        if name != self._name:
            self._name, self._since = name, now
            return
        start, rate = "\r" if self._is_terminal else "", done / max(now - self._since, 1e-9)
        if done < of:
            if self._is_terminal:
                print(f"\rwarmlane: {name} {100 * done // of} % ", end="", file=sys.stderr, flush=True)
            return
        print(f"{start}warmlane: {name}: {rate:,.0f} requests a second", file=sys.stderr, flush=True)
