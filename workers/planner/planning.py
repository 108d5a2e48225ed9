"""From a question to a plan: which flags are meant, which layout is best, what it holds, what is wrong with it.

With a profile the layout is that of its flags. Without one it is chosen (`layouts.ranked`), and the other flags are
those of the `recommended` profile of the preset that comes nearest. What is given on the command line beats both.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from workers import presets
from workers.command_line import DEFAULT_HOST, DEFAULT_PORT, flag_words, with_gateway_flags
from workers.planner import kv_cache, layouts
from workers.planner.hardware import UnknownGpu, gpu_named
from workers.planner.layouts import Estimate, Layout, Machine
from workers.planner.memory import Measured
from workers.planner.models import Model, ModelError, load
from workers.planner.question import Goal, PlanError, Question
from workers.planner.rules import Case, Finding, Sibling, findings
from workers.planner.settings import FlagError, Settings, settings_of
from workers.presets import FlagValue, Measurement, Preset, PresetError
from workers.presets.versions import NEWEST, Version, VersionError, parse_version

SERVED_CONTEXT = 32_768
"""Of a model without a preset: its own limit is often far more than a first plan should reserve for."""
MEAN_SHARE = 2
"""A request is expected to be half as long as the longest, unless told."""
PARALLEL_FLAGS = ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size", "enable-expert-parallel")
GOAL_OF_PROFILE: dict[str, Goal] = {"latency": "latency", "throughput": "throughput"}
REMEDIES: tuple[dict[str, FlagValue], ...] = (
    {"gpu-memory-utilization": 0.95},
    {"max-num-batched-tokens": 2048},
    {"max-num-seqs": 16},
    {"max-num-batched-tokens": 1024},
    {"enforce-eager": True},
    {"kv-cache-dtype": "fp8"},
)
"""Tried one after the other, each on top of the ones before, until a plan fits. A shorter context comes last."""
SHORTEST_CONTEXT = 4_096
"""Nobody wants to be told that 300 tokens fit."""
MOST_GIB = 100_000
"""No GPU has a hundredth of it."""
PROBLEMS = (PlanError, PresetError, ModelError, UnknownGpu, FlagError, VersionError)
"""What `plan` raises; the message is one clear line for the person who asked."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change with which the plan fits."""

    change: str
    estimate: Estimate


@dataclass(frozen=True, slots=True)
class Plan:
    case: Case
    preset: str | None
    """Whose flags were taken."""
    profile: str | None
    is_preset: bool
    """Nothing was changed: `warmlane up` with this preset gives this plan."""
    goal: Goal
    findings: tuple[Finding, ...]
    alternatives: tuple[Estimate, ...]
    """All layouts, best first."""
    remedies: tuple[Remedy, ...]
    """When it does not fit."""
    profiles: Mapping[str, Estimate]
    """The profiles of a preset for exactly these GPUs, with the flags that they have."""

    @property
    def chosen(self) -> Estimate:
        return self.case.chosen

    @property
    def fits(self) -> bool:
        """It starts. Prefix caching switched off is an error, too, but of another kind."""
        return self.chosen.fits and not any(one.is_error and one.code != "E2" for one in self.findings)

    @property
    def executor(self) -> str | None:
        """What spreads one replica over several nodes."""
        return "ray" if self.chosen.layout.gpus > self.case.machine.per_node else None

    @property
    def engine_flags(self) -> dict[str, FlagValue]:
        """For `vllm serve`, to get this plan."""
        sizes = zip(PARALLEL_FLAGS, self.chosen.layout[1:], strict=False)
        split: dict[str, FlagValue] = {name: size for name, size in sizes if size > 1}
        rest = {name: value for name, value in self.case.flags.items() if name not in PARALLEL_FLAGS[:3]}
        spread: dict[str, FlagValue] = {"distributed-executor-backend": self.executor} if self.executor else {}
        return {**split, **spread, **rest}

    @property
    def cached_sessions(self) -> int:
        """Sessions of the expected length that the caches of all replicas hold."""
        return self.case.fleet_tokens // self.case.mean_tokens

    @property
    def reusable_share(self) -> float | None:
        """At most, of the prompts' tokens that a prefix cache can still hold when they come again."""
        if self.case.sessions is None:
            return None
        return min(1.0, self.case.fleet_tokens / (self.case.sessions * self.case.mean_tokens))


@dataclass(frozen=True, slots=True)
class Basis:
    """What the question comes to, before a layout is chosen."""

    question: Question
    model: Model
    machine: Machine
    preset_name: str | None
    preset: Preset | None
    record: Measurement | None
    version: Version
    flags: Mapping[str, FlagValue]
    environment: Mapping[str, str]
    settings: Settings

    def estimate(self, layout: Layout, settings: Settings | None = None) -> Estimate:
        told = settings or self.settings
        return layouts.estimate(self.model, self.machine, layout, told, self.version, self.measured(layout))

    def as_preset(self) -> Estimate | None:
        """What the preset itself is, on all GPUs there are."""
        if self.preset is None or self.preset.gpu is None:
            return None
        name = self.question.profile or presets.DEFAULT_PROFILE
        flags = {**self.flags, **self.preset.profile(name, self.version).flags}
        settings = settings_of(flags, self.model, self.machine.gpu, self.version)
        return self.estimate(layout_of(flags, self.question.count), settings)

    def measured(self, layout: Layout) -> Measured:
        """What was measured with one split says nothing of another."""
        question, record = self.question, self.record
        if is_measured(question):
            if layout[1:] != layout_of(self.flags, question.count)[1:]:
                return Measured()
            return Measured(question.weights_gib, question.overhead_gib, self.settings.max_num_batched_tokens)
        if record is None or self.preset is None:
            return Measured()
        if layout[1:] != layout_of(self.preset.profile().flags, layout.gpus)[1:]:
            return Measured()
        return Measured(record.weights_gib, record.overhead_gib, record.max_num_batched_tokens)


def plan(question: Question) -> Plan:
    """Raises one of `PROBLEMS`."""
    check_memory(question)
    model, machine = load(question.model), machine_of(question)
    goal = question.goal or GOAL_OF_PROFILE.get(question.profile or "", "balanced")
    basis = basis_of(question, question.count)
    is_fixed = follows_flags(basis)
    if is_measured(question) and not is_fixed and question.count > 1:
        raise PlanError("--weights and --overhead are those of one split: name it, with --profile or behind --")
    candidates = [
        (basis if is_fixed else basis_of(question, layout.gpus)).estimate(layout)
        for layout in layouts.possible(model, machine)
    ]
    every = layouts.ranked(candidates, machine, goal)
    if is_fixed:
        chosen = basis.estimate(layout_of(basis.flags, question.count))
    else:
        basis = basis_of(question, every[0].layout.gpus)
        chosen = every[0]
    case = case_of(basis, chosen)
    found = findings(case)
    return Plan(
        case=case,
        preset=basis.preset_name,
        profile=question.profile or (presets.DEFAULT_PROFILE if basis.preset else None),
        is_preset=not question.flags and not question.environment and chosen == basis.as_preset(),
        goal=goal,
        findings=tuple(found),
        alternatives=tuple(every),
        remedies=tuple(remedies(basis, chosen, every)) if lacks_memory_only(found) else (),
        profiles=profiles_of(question),
    )


def profiles_of(question: Question) -> dict[str, Estimate]:
    """What each profile of the preset for exactly these GPUs comes to, with nothing changed."""
    _, preset = nearest_preset(question, question.count)
    if preset is None or preset.gpu is None or preset.gpu.count != question.count:
        return {}
    plain = replace(question, context=None, gpu_memory_utilization=None, flags=None, environment=None)
    found: dict[str, Estimate] = {}
    for name in preset.profiles:
        basis = basis_of(replace(plain, profile=name), question.count)
        found[name] = basis.estimate(layout_of(basis.flags, question.count))
    return found


def check_memory(question: Question) -> None:
    """Raises `PlanError` for `nan`, `inf` and their like."""
    told = {
        "--gpu-memory": question.gpu_memory_gib,
        "--weights": question.weights_gib,
        "--overhead": question.overhead_gib,
    }
    for name, gib in told.items():
        if gib is not None and not abs(gib) <= MOST_GIB:
            raise PlanError(f"{name}: expected GiB of one GPU, got {gib:g}")


def machine_of(question: Question) -> Machine:
    gpu = gpu_named(question.gpu)
    return Machine(
        gpu=gpu,
        memory_gib=question.gpu_memory_gib or gpu.memory_gib,
        count=question.count,
        interconnect=question.interconnect or gpu.interconnect,
        per_node=question.gpus_per_node,
    )


def basis_of(question: Question, gpus: int) -> Basis:
    """With the flags of the preset that is nearest to replicas of so many GPUs."""
    model, machine = load(question.model), machine_of(question)
    name, preset = nearest_preset(question, gpus)
    record = measured_record(preset) if preset and question.use_measured else None
    version = parse_version(question.vllm or (record.vllm if record else str(NEWEST)))
    flags, environment = flags_and_environment(question, preset, model, version)
    settings = settings_of(flags, model, machine.gpu, version)
    if model.max_context and settings.max_model_len > model.max_context:
        raise PlanError(f"{question.model} has a context of {model.max_context} tokens, not {settings.max_model_len}")
    return Basis(question, model, machine, name, preset, record, version, flags, environment, settings)


def nearest_preset(question: Question, gpus: int) -> tuple[str | None, Preset | None]:
    """The preset of this model for so many of these GPUs, or fewer; with a profile they must divide.

    Raises `PlanError`.
    """
    short = question.model.rsplit("/", 1)[-1].lower()
    gpu = gpu_named(question.gpu).name
    found = {
        preset.gpu.count: (name, preset)
        for name, preset in presets.load_all().items()
        if preset.gpu is not None and preset.gpu.name == gpu and preset.model.rsplit("/", 1)[-1].lower() == short
    }
    fitting = [count for count in found if count <= gpus and (question.profile is None or gpus % count == 0)]
    if question.profile is not None and not fitting:
        raise PlanError(f"no preset of {question.model} on {gpus} x {gpu} has the profile {question.profile!r}")
    return found[max(fitting)] if fitting else (None, None)


def measured_record(preset: Preset) -> Measurement | None:
    complete = [one for one in preset.measured if one.weights_gib is not None]
    return complete[-1] if complete else None


def flags_and_environment(
    question: Question, preset: Preset | None, model: Model, version: Version
) -> tuple[dict[str, FlagValue], dict[str, str]]:
    profile = preset.profile(question.profile or presets.DEFAULT_PROFILE, version) if preset else None
    flags: dict[str, FlagValue] = dict(profile.flags) if profile else {}
    if question.profile is None:
        flags = {name: value for name, value in flags.items() if name not in PARALLEL_FLAGS}
    if question.profile != "spec":
        flags, _ = with_gateway_flags(flags, model.is_hybrid, version, DEFAULT_HOST, DEFAULT_PORT)
    if profile is None and model.max_context:
        flags["max-model-len"] = min(model.max_context, SERVED_CONTEXT)
    flags |= question.flags or {}
    if question.context is not None:
        flags["max-model-len"] = question.context
    if question.gpu_memory_utilization is not None:
        flags["gpu-memory-utilization"] = question.gpu_memory_utilization
    return flags, {**(profile.environment if profile else {}), **(question.environment or {})}


def is_measured(question: Question) -> bool:
    return question.weights_gib is not None or question.overhead_gib is not None


def follows_flags(basis: Basis) -> bool:
    """Whether the flags say how to split, so that there is nothing to choose."""
    return basis.question.profile is not None or any(flag in basis.flags for flag in PARALLEL_FLAGS)


def layout_of(flags: Mapping[str, FlagValue], count: int) -> Layout:
    tensor, pipeline, data = (int(flags.get(flag, 1)) for flag in PARALLEL_FLAGS[:3])
    return Layout(max(1, count // (tensor * pipeline * data)), tensor, pipeline, data)


def case_of(basis: Basis, chosen: Estimate) -> Case:
    question, settings = basis.question, chosen.settings
    return Case(
        model=basis.model,
        machine=basis.machine,
        chosen=chosen,
        flags=basis.flags,
        environment=basis.environment,
        version=basis.version,
        mean_tokens=question.mean_tokens or max(1, settings.max_model_len // MEAN_SHARE),
        sessions=question.sessions,
        sequences=question.concurrency or settings.max_num_seqs * chosen.layout.replicas,
        hashing=hashing_of(basis.flags, basis.environment),
        siblings=tuple(sibling(name, basis.version) for name in question.beside),
        memory_is_from_driver=question.gpu_memory_gib is not None or basis.machine.gpu.memory_source == "measured",
    )


def hashing_of(flags: Mapping[str, FlagValue], environment: Mapping[str, str]) -> str:
    return f"{flags.get('prefix-caching-hash-algo', 'sha256')} seed {environment.get('PYTHONHASHSEED', 'none')}"


def sibling(name: str, version: Version) -> Sibling:
    """A preset as another replica of the fleet. Raises `PresetError` or `PlanError`."""
    preset = presets.load(name)
    if preset.gpu is None:
        raise PlanError(f"preset {name} runs without a GPU: there is nothing to compare")
    question = Question(preset.model, preset.gpu.name, preset.gpu.count, profile=presets.DEFAULT_PROFILE)
    basis = basis_of(question, preset.gpu.count)
    chosen = basis.estimate(layout_of(basis.flags, preset.gpu.count))
    return Sibling(name, chosen.raw_tokens, chosen.settings.block_size, hashing_of(basis.flags, basis.environment))


# -- when it does not fit


def lacks_memory_only(found: Sequence[Finding]) -> bool:
    """Other errors are in their messages, and less memory would not mend them."""
    return {one.code for one in found if one.is_error} - {"E2"} == {"E1"}


def remedies(basis: Basis, chosen: Estimate, every: Sequence[Estimate]) -> Iterator[Remedy]:
    """Flags with which the layout fits, other layouts that do, and more GPUs."""
    yield from changed_flags(basis, chosen)
    for other in every:
        if other.fits and other.layout != chosen.layout:
            yield Remedy(f"{other.layout} instead of {chosen.layout}", other)
            break
    yield from more_gpus(basis)


def changed_flags(basis: Basis, chosen: Estimate) -> Iterator[Remedy]:
    flags = dict(basis.flags)
    changed: dict[str, FlagValue] = {}
    for step in REMEDIES:
        if not is_change(step, chosen.settings, basis):
            continue
        flags |= step
        changed |= step
        found = basis.estimate(chosen.layout, settings_of(flags, basis.model, basis.machine.gpu, basis.version))
        if found.fits:
            yield Remedy(words(changed), found)
            return
    yield from shorter_context(basis, chosen.layout, flags, changed)


def is_change(step: Mapping[str, FlagValue], settings: Settings, basis: Basis) -> bool:
    """Whether the step asks for less than the plan has, of something that this GPU can do."""
    ((name, value),) = step.items()
    match name, value:
        case "gpu-memory-utilization", float(share):
            return settings.gpu_memory_utilization < share
        case "max-num-batched-tokens", int(tokens):
            return settings.max_num_batched_tokens > tokens
        case "max-num-seqs", int(sequences):
            return settings.max_num_seqs > sequences
        case "enforce-eager", _:
            return not settings.enforce_eager
    return settings.kv_element_bytes > 1 and basis.machine.gpu.has_fp8_cache


def shorter_context(
    basis: Basis, layout: Layout, flags: Mapping[str, FlagValue], changed: Mapping[str, FlagValue]
) -> Iterator[Remedy]:
    settings = settings_of(flags, basis.model, basis.machine.gpu, basis.version)
    found = basis.estimate(layout, settings)
    layers = kv_cache.groups_of(basis.model.layers, settings.hybrid_manager)
    length = kv_cache.longest_context(
        layers,
        found.capacity.blocks,
        settings.block_size,
        layouts.in_flight_tokens(found.settings, basis.version),
        settings.max_model_len,
    )
    if length < SHORTEST_CONTEXT:
        return
    length -= length % 1024
    yield Remedy(
        words({**changed, "max-model-len": length}), basis.estimate(layout, replace(settings, max_model_len=length))
    )


def more_gpus(basis: Basis) -> Iterator[Remedy]:
    """The fewest more GPUs of the kind, within a node, with which the same flags fit."""
    for count in (number for number in (2, 4, 8) if basis.machine.count < number <= basis.machine.per_node):
        machine = replace(basis.machine, count=count)
        wider = replace(basis, machine=machine, record=None)
        found = [one for layout in layouts.possible(basis.model, machine) if (one := wider.estimate(layout)).fits]
        if found:
            best = layouts.ranked(found, machine, "balanced")[0]
            yield Remedy(f"{count} GPUs: {best.layout}", best)
            return


def words(flags: Mapping[str, FlagValue]) -> str:
    return shlex.join(flag_words(flags))
