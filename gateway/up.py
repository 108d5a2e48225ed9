"""Replicas and the gateway in one foreground process tree: start all, say how to call them, stop all.

Replicas become ready before the gateway listens; the first signal drains the gateway and then ends the replicas, a
second one ends everything at once. Nothing outlives this process (`workers.worker` sees to that even if it is killed).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import httpx
import msgspec
import uvloop

from gateway import app
from gateway.access import configured_access
from gateway.admin_key import read_admin_key
from gateway.config import Config, Replica
from gateway.listeners import StartError, listen_all
from gateway.stderr_log import report_unforeseen
from gateway.tls import replica_context
from workers import presets
from workers.launch import assign_gpus, base_url, command_line, find_vllm, first_of, require_model
from workers.worker import Worker, WorkerFailed

HOST = "127.0.0.1"
"""Replicas listen on loopback only: nobody is to reach them past the gateway."""
EMBEDDED_READY_SECONDS = 60.0
"""They need a second; a machine that is busy installing, some more."""
VLLM_READY_SECONDS = 1_800.0
"""gpt-oss-120b needs minutes with its weights at hand; a first start downloads 65 GB before that."""
GATEWAY_READY_SECONDS = 30.0
"""From listening until the first probe was answered: one probe interval, and what a slow machine adds."""
POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Fleet:
    workers: tuple[Worker, ...]
    model: str
    """What clients write in `model`."""
    prefill_rate: float | None
    ready_seconds: float


def plan_fleet(preset_name: str, count: int | None, vllm: str | None) -> Fleet:
    """Workers that are not started yet. Raises `PresetError`, `LaunchError`."""
    preset = presets.load(preset_name)
    embedded = preset.program == "embedded"
    executable = "" if embedded else find_vllm(vllm)
    if not embedded:
        require_model(preset, None)
    workers = []
    for index, port in enumerate(free_ports(count or (2 if embedded else 1))):
        gpus = assign_gpus(preset, index, os.environ.get("CUDA_VISIBLE_DEVICES"))
        command = command_line(preset, host=HOST, port=port, vllm=executable, gpus=gpus)
        workers.append(Worker(command.argv, command.environment, base_url(HOST, port), name=f"replica-{index + 1}"))
    rates = [one.prefill_tokens_per_second for one in preset.measured if one.prefill_tokens_per_second is not None]
    return Fleet(
        workers=tuple(workers),
        model=preset.model_name,
        prefill_rate=rates[0] if rates else None,
        ready_seconds=EMBEDDED_READY_SECONDS if embedded else VLLM_READY_SECONDS,
    )


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on right now, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((HOST, 0))
        return [one.getsockname()[1] for one in sockets]


def run(config: Config, fleet: Fleet) -> int:
    """Blocks until a signal stops it. Returns the exit code: 0 stopped, 1 something did not start."""
    return uvloop.run(run_together(config, fleet))


async def run_together(config: Config, fleet: Fleet) -> int:
    found = [Replica(worker.url, fleet.prefill_rate) for worker in fleet.workers]
    config = msgspec.structs.replace(config, replicas=[*config.replicas, *found])
    read_admin_key(config.admin)  # a key that is missing fails before the long start
    app.own_certificate(config)  # so does a certificate
    replica_context(config.upstream.ca_file)
    asyncio.get_running_loop().set_exception_handler(report_unforeseen)
    needs_key = configured_access(config.auth, os.environ, time.monotonic) is not None  # and a wrong file, too
    try:
        with stop_signals() as stopping:
            for sock in listen_all(config):  # so does a port in use
                if sock is not None:
                    sock.close()
            await first_of(start_all(fleet), stopping.wait())
            return 0 if stopping.is_set() else await serve(config, fleet, stopping, needs_key)
    except (WorkerFailed, StartError) as error:
        print(f"warmlane: {error}", file=sys.stderr)
        return 1
    finally:
        with stop_signals() as killing:
            await first_of(stop_all(fleet.workers), killing.wait())
            await stop_all(fleet.workers, grace_seconds=0.0)


async def start_all(fleet: Fleet) -> None:
    for worker in fleet.workers:
        await worker.start()
    await asyncio.gather(*(worker.wait_ready(fleet.ready_seconds) for worker in fleet.workers))


async def stop_all(workers: Sequence[Worker], grace_seconds: float | None = None) -> None:
    graces = {} if grace_seconds is None else {"grace_seconds": grace_seconds}
    await asyncio.gather(*(worker.stop(**graces) for worker in workers))


async def serve(config: Config, fleet: Fleet, stopping: asyncio.Event, needs_key: bool) -> int:
    """The gateway in front of running workers, until a signal."""
    beside = [asyncio.ensure_future(report_end(worker)) for worker in fleet.workers]

    def on_ready(url: str) -> None:
        if stopping.is_set():  # the signal came before the gateway heeded signals itself
            os.kill(os.getpid(), signal.SIGTERM)
        beside.append(asyncio.ensure_future(greet(url, fleet, needs_key)))

    try:
        return await app.serve(config, on_ready=on_ready)
    finally:
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)


async def report_end(worker: Worker) -> None:
    code = await worker.wait()
    print(f"warmlane: {worker.name} ended by itself with exit code {code}; going on without it", file=sys.stderr)


async def greet(url: str, fleet: Fleet, needs_key: bool) -> None:
    """Say how to call the gateway, once a call would be answered."""
    deadline = asyncio.get_running_loop().time() + GATEWAY_READY_SECONDS
    # It asks itself, so nothing is to be verified: the certificate may be of a private authority, and for another name.
    async with httpx.AsyncClient(trust_env=False, timeout=GATEWAY_READY_SECONDS, verify=False) as client:
        try:
            while (await client.get(f"{url}/ready")).status_code != httpx.codes.OK:
                if asyncio.get_running_loop().time() > deadline:
                    print(f"warmlane: no replica is ready after {GATEWAY_READY_SECONDS:g} s", file=sys.stderr)
                    return
                await asyncio.sleep(POLL_SECONDS)
        except httpx.HTTPError as error:
            print(f"warmlane: {url}/ready does not answer: {error or type(error).__name__}", file=sys.stderr)
            return
    print(greeting(url, fleet, needs_key), flush=True)


def greeting(url: str, fleet: Fleet, needs_key: bool) -> str:
    replicas = ", ".join(worker.url for worker in fleet.workers)
    header, key = "", "unused"
    if needs_key:
        header, key = ' -H "Authorization: Bearer $KEY"', "KEY"
    private = ""
    if url.startswith("https:"):
        private = "# Where its authority is a private one: curl --cacert FILE, and SSL_CERT_FILE=FILE for Python.\n"
    return f"""
# Warmlane serves {url} in front of {replicas}. Ctrl-C stops all. Try, in another terminal:
{private}
curl {url}/v1/chat/completions -H 'Content-Type: application/json'{header} -d '{{"model": "{fleet.model}", \
"messages": [{{"role": "user", "content": "Hello"}}]}}'

# or in Python, with `pip install openai`:

from openai import OpenAI
client = OpenAI(base_url="{url}/v1", api_key="{key}")
answer = client.chat.completions.create(model="{fleet.model}", messages=[{{"role": "user", "content": "Hello"}}])
print(answer.choices[0].message.content)
"""


@contextlib.contextmanager
def stop_signals() -> Iterator[asyncio.Event]:
    """An event that Ctrl-C and SIGTERM set. The gateway takes the signals over while it serves."""
    loop, asked = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, asked.set)
    try:
        yield asked
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
