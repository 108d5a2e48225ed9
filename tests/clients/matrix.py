"""Clients against a replica and against the gateway in front of its twin: who they are, what they are led through.

`install.sh` puts them where `SDKS` and `agents.AGENTS` look for them. Each runs as a process of its own with an
environment of its own, so that nothing on the machine (keys, proxies, settings of the same program) gets into a test.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.chaos.rig import GatewayProcess, eventually
from tests.clients import turns
from tests.proxy.scripted import Exchange, ScriptedReplica

ROOT = Path(__file__).parents[2]
DRIVERS = Path(__file__).parent / "drivers"
CACHE = ROOT / ".cache" / "clients"
PYTHON = ROOT / ".venv-clients" / "bin" / "python"
AIDER = CACHE / "aider" / "bin" / "aider"
PATIENCE_SECONDS = 90.0
"""For one run of a client. The slowest take ten on an idle machine; this one may be busy."""


@dataclass(frozen=True)
class Scenario:
    name: str
    model: str = "m"
    stream: bool = False
    temperature: float = 0.0
    retries: int = 0
    """How often the SDK may send a request again by itself."""


TURNS = (Scenario("turn"), Scenario("turn, streamed", stream=True))
REFUSALS = (
    Scenario("400", "refuses"),
    Scenario("400, streamed", "refuses", stream=True),
    Scenario("429", "busy"),
    Scenario("429, streamed", "busy", stream=True),
)
UNKNOWN = (Scenario("404", "nowhere"), Scenario("404, streamed", "nowhere", stream=True))
"""The gateway answers these itself, in its own words."""
BREAKS = (Scenario("broken off", "breaks"), Scenario("broken off, streamed", "breaks", stream=True))
RETRIES = (
    Scenario("429, retried", "hurried", retries=1),
    Scenario("429, streamed, retried", "hurried", stream=True, retries=1),
)
BROKEN_RETRIES = Scenario("broken off, streamed, may retry", "breaks", stream=True, retries=1)
INSIDE = (Scenario("error event", "fails", stream=True),)


@dataclass(frozen=True)
class Sdk:
    """A library, and the driver that leads it through the scenarios."""

    name: str
    driver: str

    def argv(self) -> list[str]:
        if self.driver.endswith(".py"):
            return [installed(PYTHON), str(DRIVERS / self.driver)]
        installed(DRIVERS / "node_modules")
        return [packaged("node-linux-*/bin/node"), str(DRIVERS / self.driver)]


SDKS = (
    Sdk("openai-python", "openai_python.py"),
    Sdk("openai-python, Responses", "openai_python_responses.py"),
    Sdk("anthropic-python", "anthropic_python.py"),
    Sdk("LangChain", "langchain_openai_chat.py"),
    Sdk("openai-node", "openai_node.mjs"),
    Sdk("Vercel AI SDK", "ai_sdk.mjs"),
)


def installed(path: Path) -> str:
    assert path.exists(), f"{path.relative_to(ROOT)} is missing; `make clients` installs what these tests need"
    return str(path)


def packaged(pattern: str) -> str:
    """A program in an npm package, which has one package for each platform."""
    found = next(iter(sorted((CACHE / "node_modules").glob(pattern))), CACHE / "node_modules" / pattern)
    return installed(found)


async def run(argv: list[str], environment: Mapping[str, str], directory: Path) -> tuple[int, str, str]:
    """Run a client to its end: exit status, output, error output. One that hangs is killed with all its children."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = await asyncio.create_subprocess_exec(
            *argv,
            cwd=directory,
            env={"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "NO_PROXY": "127.0.0.1", **environment},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
        try:
            status = await asyncio.wait_for(process.wait(), PATIENCE_SECONDS)
        except TimeoutError:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        output.seek(0)
        errors.seek(0)
        told = output.read(), errors.read()
    assert status is not None, f"{argv[0]} did not end within {PATIENCE_SECONDS:g} s: {told}"
    return status, *told


async def lead(sdk: Sdk, url: str, scenarios: tuple[Scenario, ...], home: Path) -> dict[str, Any]:
    """Transcript and exception for each scenario."""
    argv = [*sdk.argv(), url, json.dumps([asdict(scenario) for scenario in scenarios])]
    status, output, errors = await run(argv, {"HOME": str(home)}, home)
    assert status == 0, errors
    told: dict[str, Any] = json.loads(output.splitlines()[-1])
    return told


class Witness:
    """A script that keeps the requests of several replicas in one order."""

    def __init__(self) -> None:
        self.exchanges: list[Exchange] = []

    async def __call__(self, exchange: Exchange) -> None:
        self.exchanges.append(exchange)
        await turns.answer_turn(exchange)

    @property
    def seen(self) -> list[turns.Seen]:
        return turns.seen(self.exchanges)


@dataclass(frozen=True)
class Lane:
    """Where a client is pointed, and what arrived at the replica behind."""

    url: str
    witness: Witness


@contextlib.asynccontextmanager
async def scripted_lanes(folder: Path) -> AsyncIterator[tuple[Lane, Lane]]:
    """A scripted replica of its own, and a gateway in front of two that answer alike."""
    near, far = Witness(), Witness()
    alone = ScriptedReplica(near, turns.MODELS)
    first, second = (ScriptedReplica(far, turns.MODELS) for _ in range(2))
    async with alone.running(), first.running(), second.running():
        async with gateway_to(folder, first.url, second.url) as url:
            yield Lane(alone.url, near), Lane(url, far)


@contextlib.asynccontextmanager
async def gateway_that_knows(folder: Path, key: str, *replicas: str) -> AsyncIterator[str]:
    """A gateway process that lets in who has this key."""
    keys = folder / f"{key}.keys.toml"
    keys.write_text(f'[[keys]]\nname = "{key}"\nsha256 = "{hashlib.sha256(key.encode()).hexdigest()}"\n')
    gateway = GatewayProcess(f"gateway-{key}", folder, {"auth": {"keys_file": str(keys)}}, replicas)

    async def is_ready() -> bool:
        return (await gateway.get("/ready")).status_code == 200

    try:
        await gateway.start()
        await eventually(is_ready, "a replica is up")
        yield gateway.url
    finally:
        await gateway.close()


@contextlib.asynccontextmanager
async def gateway_to(folder: Path, *replicas: str) -> AsyncIterator[str]:
    """A gateway process as it comes, once it knows that its replicas are up."""
    gateway = GatewayProcess("gateway", folder, {}, replicas)

    async def all_up() -> bool:
        return (await gateway.metrics()).total("warmlane_replica_state", state="up") == len(replicas)

    try:
        await gateway.start()
        await eventually(all_up, "all replicas are up")
        yield gateway.url
    finally:
        await gateway.close()
