"""Real vLLM replicas on the CPU, with a model just slow enough that a prefix hit is worth a second.

Replicas and routers are `Worker`s: they end with this process, however it ends, and their output goes to files.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import httpx

from loadtests.bench.processes import BenchmarkFailure, free_port
from workers import presets
from workers.launch import LaunchError, base_url, command_line, find_vllm
from workers.worker import Worker

ROOT = Path(__file__).parents[2]
BENCH = ROOT / ".bench"
"""Logs, peers, results of trial runs; nothing in it is kept under version control."""
MODEL_SCRIPT = ROOT / "tests" / "vllm" / "make_model.py"
MODEL_SIZE = ("--hidden", "384", "--layers", "6", "--heads", "6", "--kv-heads", "2", "--inner", "1024")
"""Makes a cold prompt of 4,000 tokens take about a second while all replicas are busy, a warm one a twentieth of it."""
MODEL_NAME = "tiny"
"""As the preset serves it."""
HOST = "127.0.0.1"
BLOCK_TOKENS = 32
"""Of the preset `cpu-tiny`."""
CACHE_BLOCKS = 512
"""16,384 tokens a replica: about four prompts of the workload, so that a fleet of three is full with a dozen chats."""
MAX_MODEL_LEN = 8_192
FLAGS = (
    *("--num-gpu-blocks-override", str(CACHE_BLOCKS), "--max-model-len", str(MAX_MODEL_LEN)),
    # In vLLM 0.32 engine and worker are two processes on a CPU, and each waits for the other in a loop of sched_yield,
    # for up to a second. With three replicas on two busy cores, workers were seen runnable but hardly run for seconds;
    # the likely reason is that Linux 6.18 puts back whoever yields. Slowest first token of a run: 4.8 and 5.9 s, with
    # both in one process 2.7 s (one run, same chats). The class is named because the short name `uni` is overruled.
    *("--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor"),
)
START_SECONDS = 240.0
"""Three replicas together took 40 s with a warm disk cache; a cold one doubles that."""
ROUTER_START_SECONDS = 60.0
QUIET_SECONDS = 30.0
"""For requests of a run that was cut short to leave the replicas: they are aborted within a second."""
POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Counters:
    """What one replica counted since it started."""

    requests: int
    """Finished completions."""
    queried_tokens: int
    hit_tokens: int


@dataclass(frozen=True, slots=True)
class Fleet:
    workers: tuple[Worker, ...]
    cache_tokens: int
    """KV cache of one replica, as it reports it."""

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(worker.url for worker in self.workers)

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self.workers if worker.pid is not None]

    async def counters(self) -> list[Counters]:
        async with plain_client() as client:
            return [read_counters((await client.get(f"{url}/metrics")).text) for url in self.urls]

    async def version(self) -> str:
        async with plain_client() as client:
            return str((await client.get(f"{self.urls[0]}/version")).json()["version"])

    async def clear_caches(self) -> None:
        """Empty prefix caches everywhere. A replica refuses while a request holds blocks, so it is asked again."""
        async with plain_client() as client:
            for url in self.urls:
                deadline = asyncio.get_running_loop().time() + QUIET_SECONDS
                while not (await client.post(f"{url}/reset_prefix_cache")).json()["success"]:
                    if asyncio.get_running_loop().time() > deadline:
                        raise BenchmarkFailure(f"{url} does not drop its prefix cache: it still has requests")
                    await asyncio.sleep(POLL_SECONDS)


def plain_client() -> httpx.AsyncClient:
    return httpx.AsyncClient(trust_env=False, timeout=30.0)


@asynccontextmanager
async def replica_fleet(count: int, folder: Path) -> AsyncIterator[Fleet]:
    """`count` replicas that answer, with empty caches. Raises `BenchmarkFailure` when vLLM is not there."""
    vllm, model = prepare_vllm(), ROOT / ".cache" / "engine-model"
    prepare_model(Path(vllm).with_name("python"), model)
    with log_files(folder, [f"replica-{at}" for at in range(1, count + 1)]) as logs:
        workers = []
        for name, log in logs.items():
            port = free_port()
            command = command_line(
                presets.load("cpu-tiny"), host=HOST, port=port, vllm=vllm, model=str(model), extra=FLAGS
            )
            environment = {**command.environment, "VLLM_SERVER_DEV_MODE": "1"}  # adds /reset_prefix_cache
            workers.append(Worker(command.argv, environment, base_url(HOST, port), name=name, output=log))
        async with running(workers, START_SECONDS):
            async with plain_client() as client:
                page = (await client.get(f"{workers[0].url}/metrics")).text
            yield Fleet(tuple(workers), read_cache_tokens(page))


@contextmanager
def log_files(folder: Path, names: Sequence[str]) -> Iterator[dict[str, TextIO]]:
    folder.mkdir(parents=True, exist_ok=True)
    files = {name: (folder / f"{name}.log").open("w", encoding="utf-8") for name in names}
    try:
        yield dict(files)
    finally:
        for file in files.values():
            file.close()


@asynccontextmanager
async def running(workers: Sequence[Worker], seconds: float) -> AsyncIterator[None]:
    """All answer `/health` inside; all are gone afterwards, whatever happened."""
    try:
        await asyncio.gather(*(worker.start() for worker in workers))
        await asyncio.gather(*(worker.wait_ready(seconds) for worker in workers))
        yield
    finally:
        await asyncio.gather(*(worker.stop() for worker in workers))


def prepare_vllm() -> str:
    try:
        return find_vllm(str(ROOT / os.environ.get("VLLM_VENV", ".venv-vllm") / "bin" / "vllm"))
    except LaunchError as error:
        raise BenchmarkFailure(f"{error} (`make bench-vllm` prepares it)") from error


def prepare_model(python: Path, directory: Path) -> None:
    """Make the model unless it is there. The stamp names script and sizes, so a change of either makes a new one."""
    recipe = f"{hashlib.sha256(MODEL_SCRIPT.read_bytes()).hexdigest()} {' '.join(MODEL_SIZE)}\n"
    stamp = directory / "recipe"
    if stamp.exists() and stamp.read_text() == recipe:
        return
    stamp.unlink(missing_ok=True)
    if subprocess.run([python, MODEL_SCRIPT, directory, *MODEL_SIZE]).returncode != 0:
        raise BenchmarkFailure(f"{MODEL_SCRIPT.name} failed")
    stamp.write_text(recipe)


def read_counters(page: str) -> Counters:
    families = ("vllm:request_success_total", "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total")
    return Counters(*(family_total(page, family) for family in families))


def family_total(page: str, family: str) -> int:
    """Sum over all samples of one family of a metrics page."""
    samples = (line for line in page.splitlines() if line.startswith((f"{family}{{", f"{family} ")))
    return int(sum(float(line.rpartition(" ")[2]) for line in samples))


def read_cache_tokens(page: str) -> int:
    """Blocks x block size; the null block included, as vLLM's own figure has it."""
    info = re.search(r"^vllm:cache_config_info\{(.*)\}", page, re.MULTILINE)
    labels = dict(re.findall(r'(\w+)="([^"]*)"', info[1])) if info else {}
    try:
        return int(labels["num_gpu_blocks"]) * int(labels["block_size"])
    except (KeyError, ValueError) as error:
        raise BenchmarkFailure("a replica does not say how large its KV cache is") from error
