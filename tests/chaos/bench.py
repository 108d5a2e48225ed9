"""The benchmark's C programs as a rig: mock replicas and a load generator that stand thousands of streams on one core.

Mock replicas stamp each event with the time it was sent, the load generator says how late it came: delays are one-way.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from loadtests.bench.bodies import FILES, GROUPS, make_body
from loadtests.bench.processes import free_port
from loadtests.bench.stand import LoadReport
from tests.chaos.rig import ROOT, Config, GatewayProcess, Process, eventually

SOURCES = ROOT / "loadtests" / "bench"
ENDLESS_CACHE_BLOCKS = 100_000_000
"""Nothing may wait for KV cache where streams are counted."""
LAST_EVENT = 1
"""`[DONE]`."""


def built(folder: Path) -> Path:
    """Compiles the programs into the folder and writes the bodies of short streams."""
    for name in ("loadgen", "mock"):
        subprocess.run(["cc", "-O2", "-o", str(folder / name), str(SOURCES / f"{name}.c")], check=True)
    file = next(one for one in FILES if one.name == "stream_1k")
    bodies = [make_body(file, group=at % GROUPS, member=at // GROUPS) for at in range(8 * GROUPS)]
    (folder / "bodies.bin").write_bytes(b"".join(b"%08d%b" % (len(body), body) for body in bodies))
    return folder


def put_first(pid: int) -> None:
    """What else the machine does is not the gateway's delay: let its parts go first, where we may say so."""
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(pid, os.SCHED_RR, os.sched_param(1))


@contextlib.contextmanager
def first_as_well() -> Iterator[None]:
    """This process too, while it takes times itself."""
    put_first(0)
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def room_for_descriptors() -> int:
    """How many this process, and those it starts, may have: as many as the machine lets it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


class Mock(Process):
    """One mock replica. It prints nothing: it is there when its port is."""

    def __init__(self, name: str, command: list[str], folder: Path, port: int) -> None:
        super().__init__(name, command, folder, "")
        self.url = f"http://127.0.0.1:{port}"

    async def start(self) -> None:
        self._spawn()
        await eventually(self.listens, f"{self.name} listens")

    async def listens(self) -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            return False
        writer.close()
        return True


@dataclass(frozen=True)
class Bench:
    folder: Path
    interval_ms: int
    events: int

    @contextlib.asynccontextmanager
    async def mocks(self, count: int) -> AsyncIterator[list[Mock]]:
        mocks: list[Mock] = []
        try:
            for number in range(count):
                port = free_port()
                values = (port, self.interval_ms, self.events, ENDLESS_CACHE_BLOCKS)
                command = [str(self.folder / "mock"), *map(str, values)]
                mocks.append(Mock(f"mock-{number}", command, self.folder, port))
                await mocks[-1].start()
                put_first(mocks[-1].pid)
            yield mocks
        finally:
            for mock in mocks:
                mock.kill()

    @contextlib.asynccontextmanager
    async def gateway(
        self, folder: Path, mocks: list[Mock], config: Config | None = None
    ) -> AsyncIterator[GatewayProcess]:
        gateway = GatewayProcess("gateway", folder, config or {}, [mock.url for mock in mocks])
        try:
            await gateway.start()
            put_first(gateway.pid)
            for mock in mocks:
                await gateway.wait_state(mock, "up")
            yield gateway
        finally:
            await gateway.close()

    async def load(self, port: int, streams: int, ramp_seconds: float) -> LoadReport:
        """So many streams at once, one each; they begin spread over the ramp. Fails unless every event came."""
        command = [str(self.folder / "loadgen"), "-p", str(port), "-f", str(self.folder / "bodies.bin")]
        command += ["-c", str(streams), "-n", str(streams), "-R", str(ramp_seconds)]
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=os.environ
        )
        put_first(process.pid)
        output, complaints = await process.communicate()
        assert process.returncode == 0, complaints
        report = msgspec.json.decode(output, type=LoadReport)
        totals = report.totals
        assert (totals.sent, totals.failed, complaints) == (streams, 0, b"")
        assert totals.events == streams * (self.events + LAST_EVENT)
        return report
