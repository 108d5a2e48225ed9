"""The test stand: mock replicas and load generator on one core, the gateway under test alone on another.

Every load is accounted for on both sides. The load generator says what it sent and got, the mock replicas what they got
and sent; unless the two agree and every answer was a 200, there is no figure but a `BenchmarkFailure`: nobody cares how
fast error pages and truncated bodies are.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.request import Request, urlopen

import msgspec

from loadtests.bench.gateways import Gateway, Place
from loadtests.bench.processes import (
    BenchmarkFailure,
    busy_seconds,
    cpu_seconds,
    free_port,
    process_tree,
    started,
    stat_fields,
    wait_listening,
)

REPLICAS = 2
READY_SECONDS = 60.0
"""From the start of a gateway to its first answer. The slowest peer asks its replicas for some seconds first."""
LOAD_SECONDS = 600.0
LAST_EVENT = 1
"""A stream ends with one event more, `[DONE]`."""
WARM_UP = ("-c", "16", "-n", "400")


class Percentiles(msgspec.Struct, frozen=True):
    count: int
    p50: float
    p90: float
    p99: float
    max: float


class Totals(msgspec.Struct, frozen=True):
    """One whole run of the load generator."""

    sent: int
    done: int
    failed: int
    events: int
    request_bytes: int
    request_sum: int
    response_bytes: int


class LoadReport(msgspec.Struct, frozen=True):
    """What the load generator prints: figures of its window, and totals."""

    seconds: float
    cpu_seconds: float
    done: int
    events: int
    totals: Totals
    latency_us: Percentiles | None
    first_byte_us: Percentiles | None
    event_delay_us: Percentiles | None


class Counts(msgspec.Struct, frozen=True):
    """What the mock replicas counted."""

    requests: int = 0
    streams: int = 0
    running: int = 0
    other_requests: int = 0
    events: int = 0
    request_bytes: int = 0
    request_sum: int = 0
    response_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Workshop:
    """Folders and cores, the same for all stands of a run."""

    folder: Path
    gateway_core: int
    load_core: int

    @property
    def peers(self) -> Path:
        return self.folder / "peers"

    def program(self, name: str) -> str:
        return str(self.folder / name)

    def bodies(self, name: str) -> str:
        return str(self.folder / "bodies" / f"{name}.bin")

    def log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"


@dataclass(frozen=True, slots=True)
class MockSettings:
    interval_ms: int
    events: int
    cache_tokens: int


@dataclass(frozen=True, slots=True)
class Stand:
    """A gateway that answers, its replicas, and the load on it."""

    workshop: Workshop
    settings: MockSettings
    port: int
    gateway_pid: int
    mocks: dict[int, int]
    """Port -> pid."""
    verbatim: bool

    def load(self, bodies: str, *options: str) -> tuple[LoadReport, dict[str, float]]:
        """Run the load generator; its report, and the figures that tell how far it can be trusted."""
        before = self.counts()
        pids = process_tree(self.gateway_pid)
        ours = [*pids, *self.mocks.values()]
        busy = busy_seconds() - cpu_seconds(ours) - children_seconds()
        began = time.monotonic()
        report = self.generate(bodies, pids, options)
        wall = time.monotonic() - began
        foreign = busy_seconds() - cpu_seconds(ours) - children_seconds() - busy
        after = self.counts()
        self.check(report, difference(after, before))
        extra = (after.other_requests - before.other_requests) / report.totals.sent
        return report, {"foreign_cores": max(0.0, foreign / wall), "extra_requests": extra}

    def generate(self, bodies: str, pids: Sequence[int], options: Sequence[str]) -> LoadReport:
        watched = [argument for pid in pids for argument in ("-g", str(pid))]
        command = ["taskset", "-c", str(self.workshop.load_core), self.workshop.program("loadgen")]
        command += ["-p", str(self.port), "-f", self.workshop.bodies(bodies), *watched, *options]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LOAD_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise BenchmarkFailure(f"load not over after {LOAD_SECONDS:.0f} s") from error
        if done.returncode != 0 or done.stderr:
            raise BenchmarkFailure(f"load generator: {done.stderr.strip() or done.returncode}")
        return msgspec.json.decode(done.stdout, type=LoadReport)

    def check(self, report: LoadReport, counted: Counts) -> None:
        totals = report.totals
        events = counted.streams * (self.settings.events + LAST_EVENT)
        exact = [
            ("requests answered with 200", totals.done, totals.sent),
            ("requests at the replicas", counted.requests, totals.sent),
            ("events sent by the replicas", counted.events, events),
            ("events received", totals.events, events),
        ]
        if self.verbatim:
            exact += [
                ("request bytes at the replicas", counted.request_bytes, totals.request_bytes),
                ("sum over request bodies", counted.request_sum, totals.request_sum),
                ("response bytes received", totals.response_bytes, counted.response_bytes),
            ]
        for what, found, expected in exact:
            if found != expected:
                raise BenchmarkFailure(f"{what}: {found:,}, expected {expected:,}")
        # JSON that was written anew may lose spaces or gain defaults, but no text.
        if counted.request_bytes < 0.95 * totals.request_bytes:
            raise BenchmarkFailure(f"of {totals.request_bytes:,} request bytes only {counted.request_bytes:,} arrived")

    def counts(self) -> Counts:
        total = Counts()
        for port in self.mocks:
            with urlopen(f"http://127.0.0.1:{port}/counts", timeout=10) as answer:
                total = combine(total, msgspec.json.decode(answer.read(), type=Counts), 1)
        return total


def combine(left: Counts, right: Counts, sign: int) -> Counts:
    values = {name: getattr(left, name) + sign * getattr(right, name) for name in Counts.__struct_fields__}
    values["request_sum"] %= 2**64
    return Counts(**values)


def difference(after: Counts, before: Counts) -> Counts:
    return combine(after, before, -1)


def children_seconds() -> float:
    """CPU time of this process and of those that it awaited: the runs of the load generator."""
    return cpu_seconds([os.getpid()])


@contextmanager
def direct_stand(workshop: Workshop, settings: MockSettings) -> Iterator[Stand]:
    """A replica without a gateway."""
    with ExitStack() as stack:
        mocks = start_mocks(stack, workshop, settings)
        port, pid = next(iter(mocks.items()))
        stand = Stand(workshop, settings, port, pid, mocks, verbatim=True)
        stand.load("chat_1k", *WARM_UP)
        yield stand


@contextmanager
def gateway_stand(
    gateway: Gateway, workshop: Workshop, settings: MockSettings, index_memory_mib: int | None = None
) -> Iterator[Stand]:
    with ExitStack() as stack:
        mocks = start_mocks(stack, workshop, settings)
        folder = workshop.folder / "run" / gateway.name
        folder.mkdir(parents=True, exist_ok=True)
        replicas = tuple(f"http://127.0.0.1:{port}" for port in mocks)
        place = Place(free_port(), replicas, folder, workshop.peers, index_memory_mib)
        log = workshop.log(gateway.name)
        pid = stack.enter_context(started(gateway.command(place), workshop.gateway_core, log))
        try:
            wait_ready(place.port, pid)
            stand = Stand(workshop, settings, place.port, pid, mocks, gateway.verbatim)
            stand.load("chat_1k", *WARM_UP)
            yield stand
            log.unlink()  # hundreds of MB of request records that nobody will read
        except BenchmarkFailure as failure:
            raise BenchmarkFailure(f"{failure}\n{last_lines(log)}") from failure


def start_mocks(stack: ExitStack, workshop: Workshop, settings: MockSettings) -> dict[int, int]:
    mocks = {}
    for at in range(REPLICAS):
        port = free_port()
        arguments = (port, settings.interval_ms, settings.events, settings.cache_tokens // 16)
        command = [workshop.program("mock"), *map(str, arguments)]
        mocks[port] = stack.enter_context(started(command, workshop.load_core, workshop.log(f"mock-{at}")))
    for port, pid in mocks.items():
        wait_listening(port, pid, READY_SECONDS)
    return mocks


def wait_ready(port: int, pid: int) -> None:
    """Until a chat completion is answered with 200."""
    body = b'{"model":"mock-model","messages":[{"role":"user","content":"hi"}],"max_tokens":3,"stream":false}'
    request = Request(f"http://127.0.0.1:{port}/v1/chat/completions", body, {"Content-Type": "application/json"})
    deadline = time.monotonic() + READY_SECONDS
    while True:
        try:
            with urlopen(request, timeout=5):
                return
        except OSError as error:
            fields = stat_fields(pid)
            if not fields or fields[0] == "Z" or time.monotonic() > deadline:
                raise BenchmarkFailure(f"gateway not ready: {error}") from error
        time.sleep(0.2)


def last_lines(log: Path, lines: int = 15) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
