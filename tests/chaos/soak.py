"""Traffic without end, with clients that leave and replicas that fail: `python -m tests.chaos.soak --requests N`.

Replicas and clients are in this process, the gateway is one of its own. One request in ten is given up by its client,
one in a hundred meets a fault of its replica. Prints what the gateway held at the beginning, on the way and at the end,
as one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random

import uvloop

from tests.chaos.light import (
    STREAM_HEAD,
    KeptClient,
    LightReplica,
    Served,
    chat,
    emptied,
    gateway_before,
    light_replicas,
    post,
)
from tests.chaos.rig import GatewayProcess
from tests.chaos.scripted import event, whole_answer

CLIENTS = 48
ABORT_SHARE = 0.10
FAULT_SHARE = 0.01
CONVERSATIONS = 500
"""Prompts come from so many, so that the index is full soon and what grows later is a leak."""
INDEX_MIB = 16
SAMPLES = 200
"""Looks at the gateway's memory over the run."""
ANSWER = whole_answer(1, 20)
EVENTS = [event(1, token, last=token == 4) for token in range(5)]


class Replicas:
    """What the replicas do: most answer at once, some fail in one of four ways."""

    def __init__(self) -> None:
        self.random = Random(27)
        self.faults: Counter[str] = Counter()

    def script(self, served: Served) -> None:
        if self.random.random() < FAULT_SHARE:
            self.fail(served, self.random.choice(("500", "reset", "cut", "error event")))
        elif b'"stream": true' in served.body:
            served.write(STREAM_HEAD)
            served.piece(EVENTS[0])
            asyncio.get_running_loop().call_later(0.002, self.go_on, served)
        else:
            asyncio.get_running_loop().call_later(0.002, served.answer, ANSWER)

    def go_on(self, served: Served) -> None:
        for one in EVENTS[1:]:
            served.piece(one)
        served.piece(b"data: [DONE]\n\n")
        served.end_stream()

    def fail(self, served: Served, how: str) -> None:
        self.faults[how] += 1
        if how == "500":
            served.answer(b'{"error":{"message":"scripted"}}', b"500 Internal Server Error")
            return
        if how != "reset":
            served.write(STREAM_HEAD)
            served.piece(EVENTS[0])
        if how == "error event":
            served.piece(b'data: {"error":{"message":"scripted","code":500}}\n\n')
            served.end_stream()
        else:
            served.reset()


class Soak:
    def __init__(self, gateway: GatewayProcess, requests: int) -> None:
        self.gateway = gateway
        self.requests = requests
        self.sent = 0
        self.ends: Counter[str] = Counter()
        self.samples: list[tuple[float, int, int]] = []
        """Time, requests sent, resident bytes."""
        self.random = Random(72)
        self.conversations = [f"conversation {at} " * 60 for at in range(CONVERSATIONS)]

    async def run(self) -> None:
        watching = asyncio.create_task(self.watch())
        await asyncio.gather(*(self.client() for _ in range(CLIENTS)))
        watching.cancel()

    async def watch(self) -> None:
        due = 0
        while True:
            if self.sent >= due:
                self.samples.append((time.monotonic(), self.sent, self.gateway.memory_bytes()))
                due += max(1, self.requests // SAMPLES)
            await asyncio.sleep(0.05)

    async def client(self) -> None:
        loop = asyncio.get_running_loop()
        client: KeptClient | None = None
        while self.sent < self.requests:
            self.sent += 1
            if client is None or client.transport.is_closing():
                _, client = await loop.create_connection(lambda: KeptClient(loop), "127.0.0.1", self.gateway.port)
            content = f"{self.random.choice(self.conversations)}{self.random.randrange(4)}"
            ended = client.begin(post(chat(content, stream=self.sent % 2 == 0), f"soak-{self.sent}"))
            if self.random.random() < ABORT_SHARE:
                await asyncio.sleep(self.random.random() * 0.004)
                client.reset()
                self.ends["aborted"] += 1
                client = None
            elif (end := await ended) == "whole":
                self.ends[f"{client.status}"] += 1
            else:
                self.ends[end] += 1
                client = None
        if client is not None:
            client.transport.abort()


async def soak(requests: int, folder: Path, log: str) -> dict[str, object]:
    behaviour = Replicas()
    async with light_replicas(3, behaviour.script) as replicas:
        config = {"server": {"log": log}, "routing": {"index_memory_mib": INDEX_MIB}}
        async with gateway_before(replicas, folder, config) as gateway:
            run = Soak(gateway, requests)
            keep = asyncio.create_task(forget(replicas))
            base = gateway.descriptors()
            base_tasks = (await gateway.metrics()).total("warmlane_tasks")
            began = time.monotonic()
            await run.run()
            seconds = time.monotonic() - began
            gauges_seconds = await emptied(gateway)
            await asyncio.sleep(6.0)  # until kept connections to the replicas have idled out
            keep.cancel()
            page = await gateway.metrics()
            return {
                "seconds": seconds,
                "ends": run.ends,
                "faults": behaviour.faults,
                "samples": run.samples,
                "descriptors": [base, gateway.descriptors()],
                "threads": len(os.listdir(f"/proc/{gateway.pid}/task")),
                "tasks": [base_tasks, page.total("warmlane_tasks")],
                "gauges_seconds": gauges_seconds,
                "counted": page.total("warmlane_requests_total"),
                "up": page.total("warmlane_replica_state", state="up"),
                "complaints": gateway.err.count("Traceback"),
            }


async def forget(replicas: list[LightReplica]) -> None:
    """What was served is not needed here, and a million would not fit."""
    while True:
        for replica in replicas:
            replica.served.clear()
        await asyncio.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, required=True)
    parser.add_argument("--log", choices=("json", "off"), default="json")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(uvloop.run(soak(given.requests, Path(folder), given.log))))


if __name__ == "__main__":
    main()
