"""One start of one replica: hears its log, says when it is ready what came of the plan, and keeps that.

It goes by the log alone, so that a replica that is started again is reported again, whoever starts it.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from workers import starts
from workers.engine_log import EngineFacts, EngineLog
from workers.planner.start import Expected, StartPlan
from workers.starts import Planned, Start

READY = re.compile(r"Starting vLLM (?:API )?server|Application startup complete")
"""The second comes from the server under it, and stands in should the first change its words."""
PROCESS = re.compile(r"^[^'\"]*\] non-default args: ")
"""With this each `vllm serve` begins, and its engines follow; a quoted prompt in the log is no beginning."""
WORTH_A_WORD = 0.15
"""A plan by arithmetic is good to that."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Identity:
    """What a start is of."""

    replica: str
    """Name of the worker."""
    preset: str
    profile: str
    model: str
    hardware: str
    flags: str
    version: str
    """Of vLLM, as found before the start; the engine's own word beats it."""


class StartReport:
    def __init__(
        self,
        identity: Identity,
        plan: StartPlan | None,
        file: Path | None,
        say: Say,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.identity = identity
        self.plan = plan
        self.file = file
        self._say = say
        self._clock = clock
        self._now = now
        self._began: float | None = clock()
        self._log = EngineLog()
        self._processes = 0
        self._is_reported = False

    def progress(self) -> str | None:
        """What the start is at, e.g. `loading weights, 56 %`."""
        return self._log.progress

    def hear(self, line: str) -> None:
        """A line of the replica's output."""
        if PROCESS.search(line):
            self._processes += 1
            if self._processes > 1:  # what a start wrote that failed is not this one's
                self._began, self._log, self._is_reported = None, EngineLog(), False
        if self._is_reported:
            return
        self._log.hear(line)
        if READY.search(line):
            self._is_reported = True
            self._report(self._log.facts)

    def _report(self, facts: EngineFacts) -> None:
        start = self.record(facts)
        if start is None:
            return
        for sentence in sentences(start):
            self._say(f"{self.identity.replica}: {sentence}")
        if self.file is None:
            return
        try:
            starts.add(self.file, start)
        except OSError as error:
            self._say(f"what it measured is not kept: {self.file}: {error.strerror}")

    def record(self, facts: EngineFacts) -> Start | None:
        """`None` when the engine said nothing of its cache."""
        if facts.kv_tokens is None or facts.context is None or facts.concurrency is None:
            return None
        plan, identity = self.plan, self.identity
        is_as_planned = plan is not None and plan.settings.max_model_len == facts.context  # else a remedy shortened it
        expected = plan.expected() if plan is not None and is_as_planned else None
        return Start(
            time=self._now().isoformat(timespec="seconds"),
            preset=identity.preset,
            profile=identity.profile,
            model=identity.model,
            vllm=facts.version or identity.version,
            hardware=identity.hardware,
            flags=identity.flags,
            kv_tokens=facts.kv_tokens,
            context=facts.context,
            concurrency=facts.concurrency,
            weights_gib=facts.weights_gib,
            overhead_gib=self.overhead_gib(facts),
            kv_cache_gib=facts.kv_cache_gib,
            start_seconds=round(self._clock() - self._began, 1) if self._began is not None else None,
            load_seconds=facts.load_seconds,
            engine_seconds=facts.engine_seconds,
            planned=planned(expected) if expected else None,
        )

    def overhead_gib(self, facts: EngineFacts) -> float | None:
        usable = self.plan.usable_gib if self.plan else None
        if usable is None or facts.weights_gib is None or facts.kv_cache_gib is None:
            return None
        return round(usable - facts.weights_gib - facts.kv_cache_gib, 2)


def planned(expected: Expected) -> Planned:
    def rounded(gib: float | None) -> float | None:
        return None if gib is None else round(gib, 2)

    return Planned(
        kv_tokens=expected.kv_tokens,
        concurrency=round(expected.concurrency, 2),
        weights_gib=rounded(expected.weights_gib),
        kv_cache_gib=rounded(expected.kv_cache_gib),
    )


def sentences(start: Start) -> Iterator[str]:
    """One with what was measured, one with the plan, and where they are far apart one that says what to do."""
    took = f"started in {start.start_seconds:.0f} s: " if start.start_seconds is not None else "started again: "
    yield took + figures(start)
    if start.planned is None:
        return
    difference = start.kv_tokens / start.planned.kv_tokens - 1 if start.planned.kv_tokens else None
    yield f"planned: {figures(start.planned)}{f' ({compared(difference)})' if difference is not None else ''}"
    if difference is None or abs(difference) > WORTH_A_WORD:
        told = [
            f"--{name} {value:g}"
            for name, value in (("weights", start.weights_gib), ("overhead", start.overhead_gib))
            if value is not None
        ]
        advice = f": `warmlane plan` with {' '.join(told)} counts with this start" if told else ""
        yield f"far from the plan{advice}"


def compared(difference: float) -> str:
    if difference == 0:
        return "exactly that"
    return "the same to 0.1 %" if abs(difference) < 0.0005 else f"{100 * difference:+.1f} % KV tokens"


def figures(one: Start | Planned) -> str:
    gib = {"weights": one.weights_gib, "KV cache": one.kv_cache_gib}
    parts = [f"{name} {value:.2f} GiB" for name, value in gib.items() if value is not None]
    length = f" of {one.context:,} tokens" if isinstance(one, Start) else ""
    return ", ".join([*parts, f"{one.kv_tokens:,} tokens", f"{one.concurrency:.2f} requests{length}"])


def cpu_hardware() -> str:
    """For a replica that runs on no card."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    model = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    return f"{os.cpu_count()} x {model.group(1) if model else 'CPU'}"
