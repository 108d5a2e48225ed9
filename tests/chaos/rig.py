"""The rig of the fault tests: a gateway, scripted and embedded replicas, each a process that can be killed or frozen.

    async with standing(tmp_path, replicas=3, config={"upstream": {"first_byte_timeout_seconds": 5.0}}) as rig:
        load = Load(rig.gateway.url)
        async with load.running():
            rig.replicas[0].kill()
            await eventually(lambda: rig.gateway.state(rig.replicas[0]) ...)

Everything that a process prints lies in the folder of the test. Processes end with the rig, and when pytest is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]
START_SECONDS = 30.0
STOP_SECONDS = 15.0
SHORT = os.environ.get("CHAOS_SHORT") == "1"
"""CI's form: shorter runs, the same targets."""
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)

Config = Mapping[str, Mapping[str, Any]]
"""Tables of the gateway's configuration file."""


def span(long_seconds: float, short_seconds: float) -> float:
    """How long to keep something up: the long form, or the one for CI."""
    return short_seconds if SHORT else long_seconds


def die_with_parent() -> None:
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def free_ports(count: int) -> list[int]:
    """For who starts again on the port that it had."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


async def eventually(
    condition: Callable[[], bool | Awaitable[bool]], what: str, seconds: float = 30.0, every: float = 0.02
) -> float:
    """Poll until it holds; returns how long that took. Raises `AssertionError` that says `what` did not come."""
    began = time.monotonic()
    while True:
        answer = condition()
        if await answer if isinstance(answer, Awaitable) else answer:
            return time.monotonic() - began
        assert time.monotonic() - began < seconds, f"waited {seconds:g} s in vain until {what}"
        await asyncio.sleep(every)


class Process:
    """One process whose output goes to files. `ready` is looked for in what it prints, and starts with its URL."""

    def __init__(
        self, name: str, command: Sequence[str], folder: Path, ready: str, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.command = list(command)
        self.ready = re.compile(ready)
        self.out_path, self.err_path = folder / f"{name}.out", folder / f"{name}.err"
        self.url = ""
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Returns once it says that it is ready."""
        out, err = len(self.out), len(self.err)
        self._spawn()
        seen: list[str] = []

        def is_ready() -> bool:
            assert self.running, f"{self.name} ended at once: {self.err[-2_000:]}"
            seen[:] = self.ready.findall(self.out[out:] + self.err[err:])
            return bool(seen)

        await eventually(is_ready, f"{self.name} is ready", START_SECONDS)
        self.url = seen[-1]

    def _spawn(self) -> None:
        with self.out_path.open("ab") as out, self.err_path.open("ab") as err:
            self._process = subprocess.Popen(
                self.command,
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                preexec_fn=die_with_parent,
            )

    @property
    def out(self) -> str:
        return self.out_path.read_text("utf-8", "replace") if self.out_path.exists() else ""

    @property
    def err(self) -> str:
        return self.err_path.read_text("utf-8", "replace") if self.err_path.exists() else ""

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        return None if self._process is None else self._process.poll()

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and gone when this returns."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(STOP_SECONDS)

    def freeze(self) -> None:
        self.send(signal.SIGSTOP)

    def thaw(self) -> None:
        self.send(signal.SIGCONT)

    async def ended(self, seconds: float = STOP_SECONDS) -> float:
        """Wait for its end; returns how long that took."""
        return await eventually(lambda: not self.running, f"{self.name} has ended", seconds)

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL where that is not enough."""
        if not self.running:
            return
        self.send(signal.SIGCONT)
        self.send(signal.SIGTERM)
        try:
            await self.ended()
        except AssertionError:
            self.kill()

    def __repr__(self) -> str:
        return f"<{self.name} {self.url or 'not started'}{'' if self.running else ', not running'}>"


@dataclass
class Received:
    """One request as a scripted replica got it, and how it ended there. Times are `time.monotonic()`."""

    number: int
    at: float
    head: str
    body: str
    sha256: str
    connection: int
    on_connection: int
    end: str = ""
    """`answered`, `cut` (the gateway closed), `refused`, `dropped`, `broken`; empty while it runs or was killed."""
    ended_at: float | None = None

    @property
    def headers(self) -> dict[str, str]:
        lines = (line.partition(":") for line in self.head.split("\r\n")[1:])
        return {name.lower(): value.strip() for name, _, value in lines}

    @property
    def request_id(self) -> str:
        return self.headers.get("x-request-id", "")


class ScriptedReplica(Process):
    """A replica that does as told (`tests.chaos.scripted`)."""

    def __init__(self, name: str, folder: Path, port: int = 0, host: str = "127.0.0.1") -> None:
        self.record_path = folder / f"{name}.jsonl"
        command = [sys.executable, "-m", "tests.chaos.scripted", "--host", host, "--port", str(port)]
        command += ["--record", str(self.record_path)]
        super().__init__(name, command, folder, r"ready (\S+)")

    async def start(self, *, port: int | None = None) -> None:
        """Started again it takes its old port, or the one that is given."""
        if self.url or port is not None:
            self.command[self.command.index("--port") + 1] = str(self.port if port is None else port)
        await super().start()

    async def behave(self, **fields: Any) -> None:
        """Change fields of its `Behaviour`; those that are not named stay."""
        async with httpx.AsyncClient(trust_env=False) as client:
            (await client.post(f"{self.url}/behave", json=fields)).raise_for_status()

    def received(self) -> list[Received]:
        """What it got so far, of former lives as well."""
        found: list[Received] = []
        if not self.record_path.exists():
            return found
        by_number: dict[int, Received] = {}
        for text in self.record_path.read_text().splitlines():
            line = json.loads(text)
            if "head" in line:
                by_number[line["number"]] = Received(**line)
                found.append(by_number[line["number"]])
            elif "ended_at" in line:
                one = by_number[line["number"]]
                one.end, one.ended_at = line["end"], line["ended_at"]
        return found

    def raw_bytes(self) -> str:
        """The whole record as text, to search it for what must not be there."""
        return self.record_path.read_text() if self.record_path.exists() else ""


class EmbeddedReplica(Process):
    """The embedded replica, which is served by uvicorn as vLLM is."""

    def __init__(self, name: str, folder: Path, *options: str) -> None:
        command = [sys.executable, "-m", "workers.sim_replica", "--port", "0", "--model", "m", *options]
        super().__init__(name, command, folder, r"ready (\S+)")

    async def start(self) -> None:
        if self.url:
            self.command[self.command.index("--port") + 1] = str(self.port)
        await super().start()


class GatewayProcess(Process):
    """`warmlane serve` with a configuration file."""

    def __init__(
        self,
        name: str,
        folder: Path,
        config: Config,
        replicas: Iterable[str],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.config_path = folder / f"{name}.toml"
        self.config_path.write_text(as_toml(config, replicas))
        run = "from gateway.cli import main; main()"
        command = [sys.executable, "-c", run, "serve", "--config", str(self.config_path)]
        super().__init__(name, command, folder, r"listening on (\S+?),", environment)
        self._client = httpx.AsyncClient(trust_env=False, timeout=10.0)

    async def get(self, path: str) -> httpx.Response:
        return await self._client.get(self.url + path)

    async def chat(self, content: str = "hi", **fields: Any) -> httpx.Response:
        body = {"model": "m", "messages": [{"role": "user", "content": content}], **fields}
        return await self._client.post(f"{self.url}/v1/chat/completions", json=body)

    async def close(self) -> None:
        await self.stop()
        await self._client.aclose()

    async def metrics(self) -> Metrics:
        return Metrics.read((await self.get("/metrics")).text)

    async def state(self, replica: Process) -> str:
        """Of its health, as the gateway sees it."""
        page = await self.metrics()
        states = [one for one in page.samples if one.name == "warmlane_replica_state" and one.value == 1.0]
        return next((one.labels["state"] for one in states if one.labels["replica"] == replica.url), "gone")

    async def wait_state(self, replica: Process, state: str, seconds: float = 30.0) -> float:
        async def reached() -> bool:
            return await self.state(replica) == state

        return await eventually(reached, f"{replica.name} is {state}", seconds)

    def log_records(self) -> list[dict[str, Any]]:
        """The request log so far."""
        lines = [line for line in self.out.splitlines() if line.startswith("{")]
        return [json.loads(line) for line in lines if line.endswith("}")]

    def memory_bytes(self) -> int:
        """Resident memory."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))


@dataclass(frozen=True)
class Sample:
    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True)
class Metrics:
    """A page of `/metrics`."""

    samples: list[Sample]

    @classmethod
    def read(cls, page: str) -> Metrics:
        line = re.compile(r"^(?P<name>[a-z_]+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$", re.MULTILINE)
        label = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
        return cls(
            [
                Sample(found["name"], dict(label.findall(found["labels"] or "")), float(found["value"]))
                for found in line.finditer(page)
            ]
        )

    def total(self, name: str, **labels: str) -> float:
        """Sum over the samples of this name that have these labels; 0 where there is none."""
        return sum(one.value for one in self.samples if one.name == name and labels.items() <= one.labels.items())


@dataclass
class Rig:
    """What stands for one test."""

    folder: Path
    replicas: list[ScriptedReplica]
    embedded: list[EmbeddedReplica] = field(default_factory=list)
    gateways: list[GatewayProcess] = field(default_factory=list)

    @property
    def gateway(self) -> GatewayProcess:
        return self.gateways[0]

    @property
    def all_replicas(self) -> list[Process]:
        return [*self.replicas, *self.embedded]

    async def add_gateway(self, config: Config | None = None, *, wait: bool = True) -> GatewayProcess:
        """One more gateway in front of the same replicas; ready when all of them are up."""
        urls = [replica.url for replica in self.all_replicas]
        name = f"gateway-{len(self.gateways) + 1}"
        gateway = GatewayProcess(name, self.folder, config or {}, urls)
        self.gateways.append(gateway)
        await gateway.start()
        if wait:
            for replica in self.all_replicas:
                await gateway.wait_state(replica, "up")
        return gateway

    async def stop(self) -> None:
        for gateway in self.gateways:
            await gateway.close()
        for replica in self.all_replicas:
            if replica.running:
                replica.kill()


@contextlib.asynccontextmanager
async def standing(
    folder: Path,
    *,
    replicas: int = 3,
    embedded: int = 0,
    embedded_options: Sequence[str] = (),
    gateways: int = 1,
    config: Config | None = None,
) -> AsyncIterator[Rig]:
    """So many scripted and embedded replicas and gateways with this configuration, all up."""
    rig = Rig(
        folder,
        [ScriptedReplica(f"replica-{number + 1}", folder) for number in range(replicas)],
        [EmbeddedReplica(f"embedded-{number + 1}", folder, *embedded_options) for number in range(embedded)],
    )
    try:
        await asyncio.gather(*(replica.start() for replica in rig.all_replicas))
        for _ in range(gateways):
            await rig.add_gateway(config)
        yield rig
    finally:
        await rig.stop()


def as_toml(config: Config, replicas: Iterable[str]) -> str:
    """The configuration file: any free port unless the test says otherwise."""
    tables = {name: dict(table) for name, table in config.items()}
    tables["server"] = {"port": 0, **tables.get("server", {})}
    tables["feeds"] = {"tokenize": False, **tables.get("feeds", {})}  # replicas get what clients sent, nothing else
    lines: list[str] = []
    for name, table in tables.items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in table.items()]
    for url in replicas:
        lines += ["[[replicas]]", f"url = {json.dumps(url)}"]
    return "\n".join(lines) + "\n"
