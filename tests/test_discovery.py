"""docs/discovery.md, run as it stands: its files, its commands, real replicas, a real Redis, a real name server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from tests.feeds.name_server import name_server
from tests.redis_server import RedisServer, die_with_parent, free_port, redis_server
from tests.test_docs import blocks

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "discovery.md").read_text(encoding="utf-8")
WARMLANE = [sys.executable, "-c", "from gateway.cli import main; main()"]
DEADLINE_SECONDS = 60.0


def section(title: str) -> str:
    text = PAGE.partition(f"\n## {title}\n")[2]
    assert text, title
    return text.partition("\n## ")[0]


class Here:
    """The page's ports, as they are in this test, and the processes of its commands."""

    def __init__(self, folder: Path, redis: RedisServer) -> None:
        self.folder = folder
        self.ports = {"8101": str(free_port()), "8102": str(free_port()), "6379": str(redis.port)}
        self.ports["--port 8000"] = "--port 0"
        self.processes: list[subprocess.Popen[bytes]] = []

    def text(self, example: str) -> str:
        for theirs, ours in self.ports.items():
            example = example.replace(theirs, ours)
        return example

    def write(self, title: str) -> None:
        """The files of a section, under the names that their first lines say."""
        for block in blocks(section(title), "toml"):
            name = re.match(r"# (\w+\.toml)", block)
            (self.folder / (name[1] if name else "warmlane.toml")).write_text(self.text(block))

    def commands(self, title: str) -> list[list[str]]:
        (block,) = blocks(section(title), "sh")
        lines = [line.removesuffix(" &") for line in self.text(block).splitlines()]
        return [shlex.split(line, comments=True) for line in lines if "warmlane " in line]

    def start(self, command: list[str]) -> Path:
        """Returns what it writes to its standard error."""
        assert command[0] == "warmlane"
        log = self.folder / f"{len(self.processes)}.log"
        with log.open("wb") as err:
            self.processes.append(
                subprocess.Popen(
                    [*WARMLANE, *command[1:]],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=err,
                    cwd=self.folder,
                    env={**os.environ, "PYTHONPATH": str(ROOT), "WARMLANE_REDIS_SECRET": "a secret of the fleet"},
                    preexec_fn=die_with_parent,
                )
            )
        return log

    async def serve(self, command: list[str]) -> str:
        """URL of the gateway that it starts."""
        assert command[1] == "serve"
        log = self.start(command if "--port" in command else [*command, "--port", "0"])
        until = time.monotonic() + DEADLINE_SECONDS
        while (found := re.search(r"listening on (http://\S+),", log.read_text())) is None:
            assert self.processes[-1].poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            await asyncio.sleep(0.05)
        return found[1]


@contextlib.contextmanager
def here(folder: Path) -> Iterator[Here]:
    with redis_server(folder) as redis:
        place = Here(folder, redis)
        try:
            yield place
        finally:
            for process in place.processes:
                process.terminate()
            for process in place.processes:
                process.wait(DEADLINE_SECONDS)


async def becomes(gateway: str, source: str, count: int) -> None:
    """Until so many replicas of the gateway are up, all from there."""
    until = time.monotonic() + DEADLINE_SECONDS
    async with httpx.AsyncClient(trust_env=False) as client:
        while True:
            shown = (await client.get(f"{gateway}/warmlane/replicas")).json()
            found = [(one["source"], one["health"]) for one in shown["replicas"]]
            if found == [(source, "up")] * count:
                return
            assert time.monotonic() < until, shown
            await asyncio.sleep(0.05)


async def test_the_ways_of_the_page(tmp_path: Path) -> None:
    with here(tmp_path) as place:
        place.write("Replicas that announce themselves")
        serve, *replicas = place.commands("Replicas that announce themselves")
        announced = await place.serve(serve)
        for command in replicas:
            place.start(command)
        await becomes(announced, "registered", len(replicas))
        async with httpx.AsyncClient(trust_env=False) as client:
            body = {"model": "embedded", "messages": [{"role": "user", "content": "Hello"}]}
            assert (await client.post(f"{announced}/v1/chat/completions", json=body)).status_code == 200

        place.write("A file")
        (serve,) = place.commands("A file")
        await becomes(await place.serve(serve), "file", 2)

        async with name_server() as names:
            place.ports["8600"] = str(names.address[1])
            names.serve(f"0 {place.ports['8101']} 127.0.0.1", f"1 {place.ports['8102']} 127.0.0.2")
            place.write("Service records")
            await becomes(await place.serve(serve), "dns", 1)

        place.processes[1].terminate()
        await becomes(announced, "registered", 1)
        assert place.processes[1].wait(DEADLINE_SECONDS) == 0

        (command,) = re.findall(r"`(warmlane up --register) REDIS`", PAGE)
        place.start([*command.split(), f"redis://127.0.0.1:{place.ports['6379']}", "--port", "0", "--replicas", "2"])
        await becomes(announced, "registered", 3)
        place.processes[-1].terminate()
        await becomes(announced, "registered", 1)
