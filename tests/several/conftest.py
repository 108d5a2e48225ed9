"""Gateways of several worker processes, in front of embedded replicas."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.chaos.rig import EmbeddedReplica, GatewayProcess, Metrics

PATIENCE_SECONDS = 30.0
ADMIN_KEY = "an-admin-key-that-is-long-enough-0123456789"
ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}


def until(condition: Callable[[], Any], what: str, seconds: float = PATIENCE_SECONDS) -> Any:
    """Poll until it holds; returns what it returned."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.02)
    return found


def children(pid: int) -> list[int]:
    """Living child processes."""
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(one) for one in listed if is_alive(int(one))]


def is_alive(pid: int) -> bool:
    """Zombies are not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def client_ports(pid: int, port: int) -> set[int]:
    """Ports of the clients whose connections to the gateway's port this process holds."""
    links = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(entry))
    found = set()
    for row in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, state, *_, inode = row.split()[:10]
        if state == "01" and int(local.split(":")[1], 16) == port and f"socket:[{inode}]" in links:
            found.add(int(remote.split(":")[1], 16))
    return found


class Several:
    """A gateway with workers, and the replicas before which it stands."""

    def __init__(
        self, folder: Path, replicas: list[EmbeddedReplica], secret: str = "", **tables: dict[str, Any]
    ) -> None:
        """`secret`: a client's key, where one is needed to look at it."""
        server = {"workers": 2, "drain_delay_seconds": 0.1, "drain_seconds": 10.0, **tables.pop("server", {})}
        urls = [one.url for one in replicas]
        config = {"server": server, **tables}
        self.secret = secret
        self.replicas = replicas
        self.count = server["workers"]
        self.process = GatewayProcess("gateway", folder, config, urls, {"WARMLANE_ADMIN_KEY": ADMIN_KEY})
        asyncio.run(self.process.start())
        self.url = self.process.url
        self.client = self.new_client()
        until(lambda: self.metrics().total("warmlane_replica_state", state="up") == len(replicas), "all are up")

    def new_client(self, secret: str = "") -> httpx.Client:
        headers = {"x-api-key": secret or self.secret} if secret or self.secret else {}
        return httpx.Client(base_url=self.url, trust_env=False, timeout=30.0, headers=headers)

    @property
    def workers(self) -> list[int]:
        return children(self.process.pid)

    def serves_whole(self, starts: float = 0.0) -> bool:
        """All workers do, after so many starts at least: of one just killed the parent may not know yet."""
        with contextlib.suppress(httpx.HTTPError), self.new_client() as client:
            page = Metrics.read(client.get("/metrics").text)
            is_whole = page.total("warmlane_processes") == self.count
            return is_whole and page.total("warmlane_process_starts_total") >= starts
        return False

    def starts(self) -> float:
        with self.new_client() as client:
            return Metrics.read(client.get("/metrics").text).total("warmlane_process_starts_total")

    def metrics(self) -> Metrics:
        return Metrics.read(self.client.get("/metrics").text)

    def chat(self, content: str = "hi", client: httpx.Client | None = None, **fields: Any) -> httpx.Response:
        body = {"model": "m", "max_tokens": 2, "messages": [{"role": "user", "content": content}], **fields}
        return (client or self.client).post("/v1/chat/completions", json=body)

    def stop(self) -> None:
        self.client.close()
        if self.process.running:
            self.process.send(signal.SIGTERM)
            asyncio.run(self.process.stop())


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EmbeddedReplica]]:
    folder = tmp_path_factory.mktemp("replicas")
    found = [EmbeddedReplica(f"replica-{number}", folder, "--decode-rate", "200") for number in range(2)]
    try:
        for one in found:
            asyncio.run(one.start())
        yield found
    finally:
        for one in found:
            if one.running:
                one.kill()
