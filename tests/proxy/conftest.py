"""A gateway in the test's own event loop, in front of scripted replicas, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import ssl
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from gateway import app
from gateway.config import Admin, Auth, Config, Feeds, Replica, Routing, Server, Tracing, Upstream, checked
from tests.proxy.scripted import ScriptedReplica

MODES = ("fast", "asgi")


class RunningGateway:
    def __init__(self, url: str, task: asyncio.Task[int], client: httpx.AsyncClient) -> None:
        self.url = url
        self.task = task
        self.client = client

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    async def chat(self, content: str = "hi", *, path: str = "/v1/chat/completions", **fields: Any) -> httpx.Response:
        body = {"model": "m", "messages": [{"role": "user", "content": content}], **fields}
        return await self.client.post(path, json=body)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    def stop(self) -> None:
        """As SIGTERM does."""
        os.kill(os.getpid(), signal.SIGTERM)

    async def metrics(self) -> str:
        return (await self.client.get("/metrics")).text


@contextlib.asynccontextmanager
async def running_gateway(
    *replicas: ScriptedReplica,
    mode: str = "fast",
    wait_ready: bool = True,
    server: dict[str, Any] | None = None,
    upstream: dict[str, Any] | None = None,
    routing: dict[str, Any] | None = None,
    feeds: dict[str, Any] | None = None,
    verify: ssl.SSLContext | bool = True,
    auth: dict[str, Any] | None = None,
    admin: dict[str, Any] | None = None,
    tracing: dict[str, Any] | None = None,
    key: str | None = None,
) -> AsyncIterator[RunningGateway]:
    """`key`: the client's own, sent with all its requests."""
    quick = {"port": 0, "http": mode, "log": "off", "drain_delay_seconds": 0.0, "drain_seconds": 1.0}
    config = Config(
        server=Server(**{**quick, **(server or {})}),
        replicas=[Replica(url=replica.url) for replica in replicas],
        routing=Routing(**(routing or {})),
        upstream=Upstream(**(upstream or {})),
        feeds=Feeds(
            **{
                "probe_interval_seconds": 0.1,
                "scrape_interval_seconds": 0.1,
                "probe_timeout_seconds": 1.0,
                "tokenize": False,  # replicas here get what clients sent and nothing else
                **(feeds or {}),
            }
        ),
        auth=Auth(**(auth or {})),
        admin=Admin(**(admin or {})),
        tracing=Tracing(**(tracing or {})),
    )
    listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(app.serve(checked(config), on_ready=listening.set_result))
    done, _ = await asyncio.wait((listening, task), timeout=10, return_when=asyncio.FIRST_COMPLETED)
    if task in done:
        task.result()
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(
        base_url=listening.result(), trust_env=False, timeout=10, verify=verify, headers=headers
    ) as client:
        gateway = RunningGateway(listening.result(), task, client)
        try:
            if wait_ready:
                await until_ready(client, len(replicas))
            yield gateway
        finally:
            await client.aclose()
            if not task.done():
                gateway.stop()
            await asyncio.wait_for(task, 15)


async def until_ready(client: httpx.AsyncClient, replicas: int) -> None:
    """Until every replica is known to be up."""

    async def up() -> bool:
        page = (await client.get("/metrics")).text
        return page.count('state="up"} 1.0') >= replicas

    await eventually(up)


async def eventually(condition: Callable[[], Any], timeout: float = 10.0) -> None:
    """Poll until the condition (plain or async) holds. Raises `TimeoutError`."""
    async with asyncio.timeout(timeout):
        while True:
            result = condition()
            if asyncio.iscoroutine(result):
                result = await result
            if result:
                return
            await asyncio.sleep(0.01)


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)
