"""What is measured: one function for each phase, from a test stand to named figures.

A figure's name ends with its unit. `Plan` says how long each phase takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from loadtests.bench.processes import BenchmarkFailure, resident_mib
from loadtests.bench.stand import LoadReport, MockSettings, Percentiles, Stand

Figures = dict[str, float]

KEEP_ALIVE_CONNECTIONS = 64
STREAMS = 512
INTERVAL_MS = 20
REQUESTS_PER_SECOND = 100
CACHE_TOKENS = 1_400_000
"""KV cache that the mock replicas report: one H200 with gpt-oss-120b."""
ENDLESS_CACHE_TOKENS = 1_600_000_000
"""For the memory phase: nothing but the configured cap may limit a prefix index."""
MIN_SAMPLES = 100
"""A 99th percentile of fewer is a maximum."""


@dataclass(frozen=True, slots=True)
class Plan:
    rounds: int
    warm_up_seconds: float
    saturation_seconds: float
    latency_seconds: float
    events: int
    """Events of one stream."""
    stream_seconds: float
    memory_prompts: int
    index_memory_mib: int
    """Cap in the memory phase; small enough that the prompts fill it in the first half."""

    @property
    def settings(self) -> MockSettings:
        return MockSettings(INTERVAL_MS, self.events, CACHE_TOKENS)

    @property
    def memory_settings(self) -> MockSettings:
        return MockSettings(INTERVAL_MS, self.events, ENDLESS_CACHE_TOKENS)


FULL = Plan(
    rounds=3,
    warm_up_seconds=0.5,
    saturation_seconds=4.0,
    latency_seconds=10.0,
    events=200,
    stream_seconds=8.0,
    memory_prompts=1_000_000,
    index_memory_mib=256,
)
QUICK = Plan(
    rounds=1,
    warm_up_seconds=0.3,
    saturation_seconds=1.5,
    latency_seconds=3.0,
    events=100,
    stream_seconds=3.0,
    memory_prompts=100_000,
    index_memory_mib=16,
)


def measure_saturation(stand: Stand, plan: Plan, size: str) -> Figures:
    """CPU time of one request when the gateway is never idle."""
    report, trust = stand.load(
        f"chat_{size}",
        *("-c", str(KEEP_ALIVE_CONNECTIONS)),
        *("-t", str(plan.saturation_seconds), "-w", str(plan.warm_up_seconds)),
    )
    if report.done < MIN_SAMPLES:
        raise BenchmarkFailure(f"only {report.done} requests in {report.seconds:.1f} s")
    return {
        "cpu_us": report.cpu_seconds * 1e6 / report.done,
        "requests_per_second": report.done / report.seconds,
        "core_share": report.cpu_seconds / report.seconds,
        **trust,
    }


def measure_latency(stand: Stand, plan: Plan, size: str) -> Figures:
    """Latency at a low, fixed rate; what a gateway adds is the difference to `direct`."""
    report, trust = stand.load(
        f"chat_{size}",
        *("-c", "16", "-r", str(REQUESTS_PER_SECOND)),
        *("-t", str(plan.latency_seconds), "-w", str(plan.warm_up_seconds)),
    )
    return {**percentiles_ms("latency", report.latency_us), **trust}


def measure_streams(stand: Stand, plan: Plan) -> Figures:
    """Many paced streams at once. They start evenly spread over one stream's life, and so do all that follow them."""
    life_seconds = plan.events * INTERVAL_MS / 1000
    report, trust = stand.load(
        "stream_1k",
        *("-c", str(STREAMS), "-R", str(life_seconds)),
        *("-t", str(plan.stream_seconds), "-w", str(life_seconds)),
    )
    return {
        "cpu_us": report.cpu_seconds * 1e6 / max(1, report.events),
        "events_per_second": report.events / report.seconds,
        "core_share": report.cpu_seconds / report.seconds,
        **percentiles_ms("first_event", report.first_byte_us),
        **percentiles_ms("event_delay", report.event_delay_us),
        **trust,
    }


def measure_memory(stand: Stand, plan: Plan) -> Figures:
    """Memory under many prompts that share nothing, with the index capped at `plan.index_memory_mib`."""
    idle = resident_mib(stand.gateway_pid)
    report = load_distinct(stand, plan.memory_prompts // 2)
    half = resident_mib(stand.gateway_pid)
    report = load_distinct(stand, plan.memory_prompts // 2)
    end = resident_mib(stand.gateway_pid)
    return {
        "prompts": plan.memory_prompts // 2 * 2,
        "idle_mib": idle,
        "half_mib": half,
        "end_mib": end,
        "cap_mib": plan.index_memory_mib,
        "growth_of_cap": (end - idle) / plan.index_memory_mib,
        "late_growth_of_cap": (end - half) / plan.index_memory_mib,
        "cpu_us": report.cpu_seconds * 1e6 / report.done,
    }


def load_distinct(stand: Stand, prompts: int) -> LoadReport:
    return stand.load("distinct_4k", "-c", str(KEEP_ALIVE_CONNECTIONS), "-n", str(prompts))[0]


def percentiles_ms(name: str, values: Percentiles | None) -> Figures:
    if values is None or values.count < MIN_SAMPLES:
        raise BenchmarkFailure(f"too few samples of {name}: {values}")
    return {f"{name}_p50_ms": values.p50 / 1000, f"{name}_p99_ms": values.p99 / 1000}


@dataclass(frozen=True, slots=True)
class Phase:
    name: str
    kind: str
    """What `--only` selects."""
    measure: Callable[[Stand, Plan], Figures]


PHASES = (
    *(
        Phase(f"saturation-{size}", "saturation", partial(measure_saturation, size=size))
        for size in ("1k", "32k", "256k")
    ),
    Phase("latency-32k", "latency", partial(measure_latency, size="32k")),
    Phase("stream", "stream", measure_streams),
)
MEMORY = Phase("memory", "memory", measure_memory)
"""Apart from the others: it needs a gateway started with the small cap."""
