"""One replica from a preset: the exact command line, and running it in the foreground (`warmlane replica`).

`command_line` is pure and knows the flags that the gateway relies on; `workers.worker.Worker` runs what it returns.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from workers import presets
from workers.presets import DEFAULT_PROFILE, FlagValue, Preset, PresetError
from workers.worker import Worker, WorkerFailed

__all__ = ["CommandLine", "LaunchError", "Worker", "WorkerFailed", "command_line", "find_vllm", "run_replica"]

DEFAULT_HOST = "127.0.0.1"
"""vLLM's own key guards only some of its paths, so a replica listens to the gateway's machine unless told otherwise."""
DEFAULT_PORT = 8101
READY_TIMEOUT_SECONDS = 1_800.0
"""gpt-oss-120b needed 207 s with its weights at hand; a first start downloads 65 GB before that."""
EVENTS_PORT_OFFSET = 10_000
"""KV events on the HTTP port plus this, their replay on plus twice this (minus, where that exceeds 65,535)."""

GATEWAY_FLAGS: dict[str, FlagValue] = {
    # Recipes for benchmarks switch it off; without it routing has nothing to gain.
    "enable-prefix-caching": True,
    # Reports cached_tokens in `usage`, which the gateway compares with its prediction.
    "enable-prompt-tokens-details": True,
    # One algorithm on all replicas, of the kind that any language can recompute (the default hashes Python pickles).
    "prefix-caching-hash-algo": "sha256_cbor",
    # The gateway asks these several times a second.
    "disable-access-log-for-endpoints": "/health,/metrics,/ping,/v1/models",
}


class LaunchError(Exception):
    """The replica cannot be started as asked. The message is one clear line for the person who asked."""


class CommandLine(NamedTuple):
    argv: tuple[str, ...]
    environment: dict[str, str]
    """To be added to the inherited one."""

    def __str__(self) -> str:
        """As typed into a shell."""
        return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in self.environment.items()), self.shell])

    @property
    def shell(self) -> str:
        return shlex.join(self.argv)


def command_line(
    preset: Preset,
    profile: str = DEFAULT_PROFILE,
    *,
    host: str = DEFAULT_HOST,
    port: int = DEFAULT_PORT,
    vllm: str = "vllm",
    model: str | None = None,
    gpus: Sequence[str] = (),
    extra: Sequence[str] = (),
) -> CommandLine:
    """What to execute for one replica of `preset`. Raises `PresetError` when it has no such profile.

    `model` replaces the preset's own; `gpus` are the devices that this replica may use (`assign_gpus`), all when empty;
    `extra` flags go last, where vLLM lets the last one win.
    """
    chosen = preset.profile(profile)
    flags = dict(chosen.flags)
    environment = dict(chosen.environment)
    address = ["--host", host, "--port", str(port)]
    if preset.program == "embedded":
        argv = [sys.executable, "-m", "workers.sim_replica", "--model", model or preset.model_name]
    else:
        argv = [vllm, "serve", model or preset.model]
        if preset.served_model_name:
            address += ["--served-model-name", preset.served_model_name]
        if profile != "spec":
            flags = {**flags, **GATEWAY_FLAGS, "kv-events-config": json.dumps(kv_events(host, port))}
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return CommandLine((*argv, *flag_words(flags), *address, *extra), environment)


def flag_words(flags: Mapping[str, FlagValue]) -> list[str]:
    words: list[str] = []
    for name, value in flags.items():
        if value is True:
            words.append(f"--{name}")
        elif value is False:
            words.append(f"--no-{name}")
        else:
            words += [f"--{name}", str(value)]
    return words


def kv_events(host: str, port: int) -> dict[str, object]:
    """vLLM's `--kv-events-config`. The events carry prompts as token ids and have no key, so they follow the HTTP host.

    vLLM binds TCP to all interfaces or not at all; on loopback a socket file that only its owner may open stands in.
    """
    if is_loopback(host):
        endpoints = [f"ipc:///tmp/warmlane-{os.getuid()}-kv-{kind}-{port}" for kind in ("events", "replay")]
    else:
        offset = EVENTS_PORT_OFFSET if port + 2 * EVENTS_PORT_OFFSET <= 65_535 else -EVENTS_PORT_OFFSET
        endpoints = [f"tcp://*:{port + steps * offset}" for steps in (1, 2)]
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": endpoints[0],
        "replay_endpoint": endpoints[1],
    }


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def base_url(host: str, port: int) -> str:
    """Where this machine reaches a replica that listens on `host`."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{reachable}:{port}"


def assign_gpus(preset: Preset, index: int, visible: str | None) -> tuple[str, ...]:
    """Devices of the replica number `index` (from 0) on one machine; `visible` is CUDA_VISIBLE_DEVICES, if set.

    Raises `LaunchError` when `visible` lists too few.
    """
    if preset.gpu is None:
        return ()
    first, last = index * preset.gpu.count, (index + 1) * preset.gpu.count
    if visible is None:
        return tuple(str(device) for device in range(first, last))
    devices = tuple(device.strip() for device in visible.split(",") if device.strip())
    if len(devices) < last:
        raise LaunchError(
            f"CUDA_VISIBLE_DEVICES lists {len(devices)} GPUs; {index + 1} replicas of {preset.gpu.count} need {last}"
        )
    return devices[first:last]


def find_vllm(path: str | None = None) -> str:
    """The `vllm` executable: `path` when given, else from PATH. Raises `LaunchError`."""
    found = shutil.which(path or "vllm")
    if found:
        return found
    if path:
        raise LaunchError(f"--vllm {path}: not an executable file")
    raise LaunchError("vLLM was not found: pip install '.[vllm]' in a clone, or give its path with --vllm PATH")


def require_model(preset: Preset, model: str | None) -> None:
    """vLLM would look for a missing directory on the model hub; say what is wrong instead. Raises `LaunchError`."""
    if model is None and preset.has_local_model and not Path(preset.model).is_dir():
        source = f"; {preset.model_source}" if preset.model_source else ""
        raise LaunchError(f"the model directory {preset.model} does not exist{source}, or give another with --model")


def run_replica(
    name: str,
    profile: str = DEFAULT_PROFILE,
    *,
    host: str = DEFAULT_HOST,
    port: int = DEFAULT_PORT,
    vllm: str | None = None,
    model: str | None = None,
    dry_run: bool = False,
    extra: Sequence[str] = (),
) -> int:
    """Run one replica of the preset `name` in the foreground until it ends or a signal stops it; returns the exit code.

    0: stopped by a signal, or printed the dry run. 2: cannot be done as asked, one line says why. 1: it failed.
    """
    try:
        preset = presets.load(name)
        preset.profile(profile)
        if preset.program == "vllm" and not dry_run:
            vllm = find_vllm(vllm)
            require_model(preset, model)
        command = command_line(preset, profile, host=host, port=port, vllm=vllm or "vllm", model=model, extra=extra)
    except (PresetError, LaunchError) as error:
        print(f"warmlane: {error}", file=sys.stderr)
        return 2
    if dry_run:
        print(command)
        return 0
    worker = Worker(command.argv, command.environment, base_url(host, port), name=name)
    return asyncio.run(run_in_foreground(worker))


async def run_in_foreground(worker: Worker, ready_timeout: float = READY_TIMEOUT_SECONDS) -> int:
    """Exit code of a foreground command whose whole work is this worker. A second signal kills it at once."""
    stopping = asyncio.Event()
    killing = asyncio.Event()
    loop = asyncio.get_running_loop()

    def heed_signal() -> None:
        (killing if stopping.is_set() else stopping).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, heed_signal)
    try:
        await worker.start()
        await first_of(stopping.wait(), announce_and_wait(worker, ready_timeout))
    except WorkerFailed as error:
        print(f"warmlane: {error}", file=sys.stderr)
        return 1
    finally:
        await first_of(worker.stop(), killing.wait())
        if worker.pid is not None:
            await worker.wait()
    if stopping.is_set():
        return 0
    print(f"warmlane: {worker.name} ended by itself with exit code {worker.exit_code}", file=sys.stderr)
    return 1


async def announce_and_wait(worker: Worker, ready_timeout: float) -> None:
    await worker.wait_ready(ready_timeout)
    print(f"warmlane: {worker.name} is ready at {worker.url}", file=sys.stderr)
    await worker.wait()


async def first_of(*waits: Coroutine[object, object, object]) -> None:
    """Run all until one is done; cancel the others; raise what the first one raised."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
            raise result
