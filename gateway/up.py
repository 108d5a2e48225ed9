"""Replicas and the gateway in one foreground process tree: start all, say how to call them, stop all.

The gateway listens at once; each replica gets requests when it is ready, is started again when it ends, and is given up
when it does not start (`workers.supervisor`). When all were given up, and there are no others, this ends. The first
signal drains the gateway and then ends the replicas, a second one ends everything at once. Nothing of a replica's
process group outlives this process (`workers.worker` sees to that even if it is killed).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TextIO

import httpx
import uvloop

from gateway import app
from gateway.access import configured_access
from gateway.config import Config, Workers
from gateway.feeds.announcer import Announcer
from gateway.listeners import StartError
from gateway.outlet import outlet
from gateway.stderr_log import report_unforeseen
from gateway.stop_signals import StopSignals
from workers.back_off import BackOffSettings
from workers.command_line import CommandLine
from workers.keeper import KeeperSettings, cancel
from workers.launch import MADE_UP, Request, prepare, say
from workers.supervisor import Supervisor, SupervisorSettings
from workers.worker import Worker

HOST = "127.0.0.1"
"""Replicas listen on loopback only: nobody is to reach them past the gateway."""
EMBEDDED_READY_SECONDS = 60.0
"""They need a second; a machine that is busy installing, some more."""
VLLM_READY_SECONDS = 1_800.0
"""gpt-oss-120b needs minutes with its weights at hand; a first start downloads 65 GB before that."""
GATEWAY_TIMEOUT_SECONDS = 30.0
"""For the gateway to answer itself."""
POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Fleet:
    workers: tuple[Worker, ...]
    """Not started, and not to be: the supervisor starts others like them."""
    model: str
    """What clients write in `model`."""
    prefill_rate: float | None
    ready_seconds: float
    is_verbatim: bool = False
    """The flags are a specification's, to be kept as written."""
    is_embedded: bool = False
    notes: tuple[str, ...] = ()
    """What was chosen, and why."""
    commands: tuple[CommandLine, ...] = ()
    """For a dry run, in the order of the workers."""


def plan_fleet(request: Request, count: int | None) -> Fleet:
    """Workers that are not started yet. Raises `PresetError`, `LaunchError`."""
    launch = prepare(request, may_embed=True)
    embedded = launch.engine is None
    total = count or launch.replicas or (2 if embedded else 1)
    ports = free_ports(total)
    made = [
        launch.worker(f"replica-{index + 1}", HOST, port, index, total, lambda: free_ports(1)[0])
        for index, port in enumerate(ports)
    ]
    notes = dict.fromkeys([*launch.notes, *(note for _, command in made for note in command.notes)])
    if launch.engine is not None and not request.must_run:
        notes[f"for {launch.engine}"] = None
    return Fleet(
        workers=tuple(worker for worker, _ in made),
        model=launch.model_name,
        prefill_rate=launch.prefill_rate,
        ready_seconds=EMBEDDED_READY_SECONDS if embedded else VLLM_READY_SECONDS,
        is_verbatim=request.profile == "spec",
        is_embedded=embedded,
        notes=tuple(notes),
        commands=tuple(command for _, command in made),
    )


def print_dry_run(fleet: Fleet) -> int:
    """Each replica's command on standard output, and beside them what was chosen."""
    for command in fleet.commands:
        print(command, flush=True)
    for note in (*fleet.notes, "ports are free ones of this moment"):
        say(note)
    return 0


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on right now, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((HOST, 0))
        return [one.getsockname()[1] for one in sockets]


def run(config: Config, fleet: Fleet, announcer: Announcer | None = None) -> int:
    """Blocks until a signal stops it. Returns the exit code: 0 stopped, 1 something did not start. `announcer`: tells
    other gateways of the replicas."""
    return uvloop.run(run_together(config, fleet, announcer))


async def run_together(config: Config, fleet: Fleet, announcer: Announcer | None = None) -> int:
    asyncio.get_running_loop().set_exception_handler(report_unforeseen)
    needs_key = configured_access(config.auth, os.environ, time.monotonic) is not None
    has_others = bool(config.replicas or config.discovery.names_any or config.admin.allow)
    with StopSignals().heard() as signals, outlet(sys.stdout) as out:

        def on_hopeless() -> None:
            print("warmlane: every replica was given up, and there are no others: stopping", file=sys.stderr)
            signals.ask()

        supervisor = Supervisor(
            fleet.workers,
            supervisor_settings(config.workers, fleet),
            prefill_rate=fleet.prefill_rate,
            on_hopeless=None if has_others else on_hopeless,
        )
        page = "/dashboard" if config.server.dashboard else ""
        beside: list[asyncio.Task[None]] = []

        def on_ready(url: str) -> None:
            for note in fleet.notes:
                say(note)
            beside.append(asyncio.create_task(greet(url, fleet, supervisor, needs_key, page, signals, out)))

        if announcer is not None:
            beside.append(asyncio.create_task(announcer.run_until(signals.asked)))
        try:
            await app.serve_until(signals, config, on_ready=on_ready, workers=supervisor, announcer=announcer)
        except StartError as error:
            print(f"warmlane: {error}", file=sys.stderr)
            return 1
        finally:
            await cancel(*beside)
            await supervisor.stop(signals.insisted)
        return 1 if supervisor.is_hopeless and not has_others else 0


def supervisor_settings(workers: Workers, fleet: Fleet) -> SupervisorSettings:
    return SupervisorSettings(
        KeeperSettings(
            BackOffSettings(
                first_seconds=workers.first_back_off_seconds,
                longest_seconds=workers.longest_back_off_seconds,
                calm_seconds=workers.calm_seconds,
                max_failed_starts=workers.max_failed_starts,
            ),
            ready_seconds=fleet.ready_seconds if workers.ready_seconds is None else workers.ready_seconds,
            stop_seconds=workers.stop_seconds,
            silent_seconds=workers.silent_seconds,
            takes_remedies=workers.remedies == "apply",
            is_verbatim=fleet.is_verbatim,
        ),
        drain_seconds=workers.drain_seconds,
    )


async def greet(
    url: str, fleet: Fleet, supervisor: Supervisor, needs_key: bool, page: str, signals: StopSignals, out: TextIO
) -> None:
    """Say how to call the gateway, once a call would be answered."""
    await supervisor.wait_settled()
    # It asks itself, so nothing is to be verified: the certificate may be of a private authority, and for another name.
    async with httpx.AsyncClient(trust_env=False, timeout=GATEWAY_TIMEOUT_SECONDS, verify=False) as client:
        try:
            ready = False
            while not ready:
                await asyncio.sleep(POLL_SECONDS)
                ready = (await client.get(f"{url}/ready")).is_success
        except httpx.HTTPError as error:
            if signals.asked.is_set():
                return  # the listener is closed
            print(f"warmlane: {url}/ready does not answer: {error or type(error).__name__}", file=sys.stderr)
            return
    print(greeting(url, fleet, supervisor.names, needs_key, page), file=out, flush=True)


def greeting(url: str, fleet: Fleet, urls: Iterable[str], needs_key: bool, page: str) -> str:
    replicas = ", ".join(urls)
    header, key = "", "unused"
    if needs_key:
        header, key = ' -H "Authorization: Bearer $KEY"', "KEY"
    private = made_up = ""
    if fleet.is_embedded:
        why = [note for note in fleet.notes if MADE_UP in note] or [f"These are {MADE_UP}"]
        made_up = "".join(f"# {note}.\n" for note in why)
    if url.startswith("https:"):
        private = "# Where its authority is a private one: curl --cacert FILE, and SSL_CERT_FILE=FILE for Python.\n"
    look = f"\n# Which replica a request went to, and why: {url}{page}\n" if page else ""
    return f"""
# Warmlane serves {url} in front of {replicas}. Ctrl-C stops all. Try, in another terminal:
{made_up}{private}
curl {url}/v1/chat/completions -H 'Content-Type: application/json'{header} -d '{{"model": "{fleet.model}", \
"messages": [{{"role": "user", "content": "Hello"}}]}}'

# or in Python, with `pip install openai`:

from openai import OpenAI
client = OpenAI(base_url="{url}/v1", api_key="{key}")
answer = client.chat.completions.create(model="{fleet.model}", messages=[{{"role": "user", "content": "Hello"}}])
print(answer.choices[0].message.content)
{look}"""
