"""Replicas from a preset on this machine: what is chosen, checked and said before anything starts.

`command_line` is the exact command; here are the preset where none is named, the engine and its version, the cards, and
running one replica in the foreground (`warmlane replica`). `workers.worker.Worker` runs it, `StartReport` hears it.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from math import prod
from pathlib import Path

from msgspec import structs

from workers import presets, starts
from workers.command_line import DEFAULT_HOST, DEFAULT_PORT, EVENTS_FLAG, CommandLine, base_url, command_line
from workers.engine_version import Engine, LaunchError, check_known, find_engine, find_vllm
from workers.extra_flags import heed, served_name
from workers.gpus import detect
from workers.placement import Machine, Placement, described, working_numactl
from workers.planner.settings import SIZES, FlagError, flags_of, is_flag
from workers.planner.start import plan_start
from workers.preset_choice import EMBEDDED, Choice, choose, kinds
from workers.presets import ANY_GPU, DEFAULT_PROFILE, Gpu, Preset, PresetError
from workers.start_report import Identity, StartReport, cpu_hardware
from workers.worker import Worker, WorkerFailed, how_it_ended

__all__ = ["CommandLine", "LaunchError", "Worker", "WorkerFailed", "base_url", "command_line", "find_vllm"]

MADE_UP = "embedded replicas, whose answers are made up"
SECRET_FLAGS = ("--api-key", "--hf-token")
READY_TIMEOUT_SECONDS = 1_800.0
"""gpt-oss-120b needed 207 s with its weights at hand; a first start downloads 65 GB before that."""


def this_machine(environment: Mapping[str, str]) -> Machine:
    found = detect()
    numactl = working_numactl() if found.devices else None
    return Machine(found.devices, environment, numactl, troubles=found.troubles)


@dataclass(frozen=True, slots=True)
class Request:
    """What a person asked for. `None`: not said."""

    preset: str | None = None
    profile: str = DEFAULT_PROFILE
    vllm: str | None = None
    """Path of the executable."""
    vllm_version: str | None = None
    model: str | None = None
    extra: tuple[str, ...] = ()
    must_run: bool = True
    """A dry run needs neither an engine nor a model."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A preset that can be started on this machine, as often as there are cards."""

    name: str
    preset: Preset
    request: Request
    engine: Engine | None
    """`None` for the embedded replica."""
    machine: Machine
    replicas: int | None
    """As many as the cards allow, where the preset was chosen here."""
    notes: tuple[str, ...] = ()
    """For the person who asked."""

    def place(self, index: int = 0, of: int = 1) -> Placement:
        """Raises `LaunchError` when there are too few cards and it must run."""
        try:
            return self.machine.place(self.preset.gpu, index, of)
        except LaunchError as error:
            if self.request.must_run:
                raise
            return Placement(notes=(str(error),))

    def command(self, placement: Placement, host: str, port: int) -> CommandLine:
        """Raises `LaunchError`."""
        request = self.request
        if self.engine is None:
            return command_line(
                self.preset, request.profile, host=host, port=port, model=request.model, extra=request.extra
            )
        command = command_line(
            self.preset,
            request.profile,
            host=host,
            port=port,
            vllm=self.engine.executable if request.must_run else request.vllm or "vllm",
            version=self.engine.version,
            model=request.model,
            placement=placement,
            extra=request.extra,
        )
        warnings = check_known(self.engine, command.flags, command.environment, self.machine.environment)
        return command._replace(notes=(*command.notes, *warnings))

    def worker(
        self, name: str, host: str, port: int, index: int = 0, of: int = 1, free_port: Callable[[], int] | None = None
    ) -> tuple[Worker, CommandLine]:
        """The replica number `index` of so many, not started yet, and its command. Raises `LaunchError`.

        `free_port` finds another port for it where this one is taken when it starts.
        """
        placement = self.place(index, of)
        command = self.command(placement, host, port)
        report = self.report(command, placement, name)

        def elsewhere() -> Worker:
            assert free_port is not None
            return self.worker(name, host, free_port(), index, of, free_port)[0]

        worker = Worker(
            command.argv,
            command.environment,
            base_url(host, port),
            name=name,
            on_line=report.hear if report else None,
            progress=report.progress if report else None,
            elsewhere=elsewhere if free_port is not None else None,
        )
        return worker, command

    @property
    def model_name(self) -> str:
        """What clients write in `model`."""
        told, preset = self.request.model, self.preset
        own = None if self.engine is None else preset.served_model_name
        return served_name(self.request.extra) or own or told or preset.model_name

    @property
    def prefill_rate(self) -> float | None:
        """Uncached prompt tokens per second as the preset's were measured; unknown for another model."""
        measured = self.preset.measured if self.request.model is None else []
        rates = [one.prefill_tokens_per_second for one in measured]
        return next((rate for rate in rates if rate is not None), None)

    def report(self, command: CommandLine, placement: Placement, name: str) -> StartReport | None:
        """`None` for the embedded replica, which measures nothing."""
        if self.engine is None:
            return None
        identity = Identity(
            replica=name,
            preset=self.name,
            profile=self.request.profile,
            model=self.request.model or self.preset.model,
            hardware=self.hardware(placement),
            flags=shlex.join(fit_to_keep(command.flags)),
            version=str(self.engine.version),
        )
        plan = plan_start(
            self.preset,
            command.flags,
            command.environment,
            self.engine.version,
            model=self.request.model,
            memory_gib=placement.memory_gib,
        )
        return StartReport(identity, plan, starts.file_for(self.machine.environment), say)

    def hardware(self, placement: Placement) -> str:
        if self.preset.gpu is None:
            return cpu_hardware()
        used = tuple(slot for slot in self.machine.slots if slot.label in placement.gpus and slot.device)
        return described(used) if used else f"{self.preset.gpu.count} x {self.preset.gpu.name}"


def fit_to_keep(words: Sequence[str]) -> list[str]:
    """Flags without keys, and without KV events, whose addresses differ between starts that are the same else."""
    kept, flag = [], ""
    for word in words:
        shown = "***" if flag in SECRET_FLAGS else word
        if is_flag(word):
            name, equals, _ = word.partition("=")
            flag = name.replace("_", "-")
            shown = f"{name}=***" if equals and flag in SECRET_FLAGS else word
        if flag != f"--{EVENTS_FLAG}":
            kept.append(shown)
    return kept


def prepare(request: Request, machine: Machine | None = None, *, may_embed: bool = False) -> Launch:
    """Everything that can be refused is refused here. Raises `PresetError`, `LaunchError`.

    `machine` is this one unless given. `may_embed`: without a named preset embedded replicas will do, also where there
    are cards but no vLLM.
    """
    name = request.preset
    chosen: Choice | None = None
    notes: tuple[str, ...] = ()
    if name is None:
        machine = machine or this_machine(os.environ)
        name, chosen, notes = preset_for(machine, request, may_embed)
    preset = presets.load(name)
    preset.profile(request.profile)
    if not (preset.model or request.model):
        raise LaunchError(f"preset {name} loads what --model names")
    if machine is None:
        machine = this_machine(os.environ) if preset.gpu is not None else Machine(environment=os.environ)
    if machine.troubles and (machine.slots or request.preset is not None):
        notes = (f"WARNING: a GPU driver is here and fails: {'; '.join(machine.troubles)}", *notes)
    notes = (*notes, *heed(request.extra))
    preset = structs.replace(preset, gpu=cards_of(preset, request, machine))
    engine = None
    if preset.program == "vllm":
        engine = find_engine(request.vllm, request.vllm_version, must_run=request.must_run)
        if request.must_run:
            require_model(preset, request.model)
    return Launch(name.lower(), preset, request, engine, machine, chosen.replicas if chosen else None, notes)


def preset_for(machine: Machine, request: Request, may_embed: bool) -> tuple[str, Choice | None, tuple[str, ...]]:
    """The preset that suits the machine, and why."""
    slots = machine.slots
    choice = choose(slots)
    if choice is None:
        if not slots:
            urgent = "WARNING: " if machine.troubles else ""
            return EMBEDDED, None, (f"{urgent}no GPU found ({machine.why_empty}): {MADE_UP}",)
        if not may_embed:
            raise LaunchError(
                f"no preset is for {described(slots)}: name one with --preset (any model: --preset any --model NAME)"
            )
        return EMBEDDED, None, (f"no preset is for {described(slots)}: {MADE_UP}; --preset names another",)
    if may_embed and request.must_run:
        try:
            find_vllm(request.vllm)
        except LaunchError as error:
            return EMBEDDED, None, (f"{choice.why}; but {error}. So {MADE_UP}",)
    return choice.preset, choice, (choice.why,)


def cards_of(preset: Preset, request: Request, machine: Machine) -> Gpu | None:
    """What one replica occupies, where the user's flags split it otherwise or the preset takes any cards."""
    gpu = preset.gpu
    if gpu is None or preset.program != "vllm":
        return gpu
    try:
        flags = {**preset.profile(request.profile).flags, **flags_of(request.extra)}
        count = prod(int(flags.get(size, 1)) for size in SIZES)
    except (FlagError, ValueError):
        return gpu  # vLLM says what is wrong with it
    name = next(iter(kinds(machine.slots)), gpu.name) if gpu.name == ANY_GPU else gpu.name
    return Gpu(name, max(1, count))


def require_model(preset: Preset, model: str | None) -> None:
    """vLLM would look for a missing directory on the model hub; say what is wrong instead. Raises `LaunchError`."""
    if model is None and preset.has_local_model and not Path(preset.model).is_dir():
        source = f"; {preset.model_source}" if preset.model_source else ""
        raise LaunchError(f"the model directory {preset.model} does not exist{source}, or give another with --model")


def say(message: str) -> None:
    print(f"warmlane: {message}", file=sys.stderr, flush=True)


Presence = Callable[[str, float | None], AbstractAsyncContextManager[None]]
"""While it is entered others know of the replica: its URL here, and its prefill rate if known."""


def run_replica(
    request: Request,
    *,
    host: str = DEFAULT_HOST,
    port: int = DEFAULT_PORT,
    machine: Machine | None = None,
    presence: Presence | None = None,
) -> int:
    """Run one replica in the foreground until it ends or a signal stops it; returns the exit code. `presence` is
    entered when it is ready, and left before it is stopped.

    0: stopped by a signal, or printed the dry run. 2: cannot be done as asked, one line says why. 1: it failed.
    """
    try:
        launch = prepare(request, machine)
        if not request.must_run:
            print_dry_run(launch, launch.command(launch.place(), host, port))
            return 0
        worker, command = launch.worker(launch.name, host, port)
    except (PresetError, LaunchError) as error:
        say(str(error))
        return 2
    for note in (*launch.notes, *command.notes):
        say(note)
    return asyncio.run(run_in_foreground(worker, presence=presence, prefill_rate=launch.prefill_rate))


def print_dry_run(launch: Launch, command: CommandLine) -> None:
    """The command on standard output, and beside it what it was made for."""
    print(command, flush=True)
    for note in (*launch.notes, *([f"for {launch.engine}"] if launch.engine else []), *command.notes):
        say(note)


async def run_in_foreground(
    worker: Worker,
    ready_timeout: float = READY_TIMEOUT_SECONDS,
    presence: Presence | None = None,
    prefill_rate: float | None = None,
) -> int:
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
        present = nullcontext() if presence is None else presence(worker.url, prefill_rate)
        await first_of(stopping.wait(), announce_and_wait(worker, ready_timeout, present))
    except WorkerFailed as error:
        print(f"warmlane: {error}", file=sys.stderr)
        return 1
    finally:
        await first_of(worker.stop(), killing.wait())
        if worker.pid is not None:
            await worker.wait()
    if stopping.is_set():
        return 0
    how = "" if worker.exit_code is None else f": {how_it_ended(worker.exit_code)}"
    print(f"warmlane: {worker.name} ended by itself{how}", file=sys.stderr)
    return 1


async def announce_and_wait(worker: Worker, ready_timeout: float, present: AbstractAsyncContextManager[None]) -> None:
    await worker.wait_ready(ready_timeout)
    print(f"warmlane: {worker.name} is ready at {worker.url}", file=sys.stderr)
    async with present:
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
