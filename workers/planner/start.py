"""What a start of an engine should come to, with exactly the flags that it gets: the plan to hold its log against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from workers.planner import kv_cache, layouts
from workers.planner.hardware import Gpu, UnknownGpu, gpu_named
from workers.planner.kv_cache import Capacity
from workers.planner.layouts import Machine
from workers.planner.memory import GIB, Measured
from workers.planner.models import Layer, Model, ModelError, load
from workers.planner.planning import layout_of, measured_record
from workers.planner.settings import FlagError, Settings, flags_of, settings_of
from workers.presets import FlagValue, Preset
from workers.presets.versions import Version, VersionError, behaviour_of, parse_version

CPU = Gpu("cpu", "CPU", 16.0, 0.0, "pcie")
"""Stands for a small card: vLLM's defaults for batches on the CPU are those of one. Nothing else of it counts."""
CPU_CACHE_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
BLOCKS_FLAG = "num-gpu-blocks-override"
CACHE_FLAGS = (BLOCKS_FLAG, "kv-cache-memory-bytes")
"""With these the cache is not what the card has left."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Memory is that of one card."""

    kv_tokens: int
    concurrency: float
    weights_gib: float | None = None
    kv_cache_gib: float | None = None


@dataclass(frozen=True, slots=True)
class StartPlan:
    """One replica as it is started."""

    preset: Preset
    model: Model
    settings: Settings
    flags: Mapping[str, FlagValue]
    environment: Mapping[str, str]
    version: Version
    memory_gib: float | None
    """Of one card, as the driver shows it; `None`: as the table says."""

    @property
    def usable_gib(self) -> float | None:
        """Of one card, for weights, cache and the rest; `None` where no driver was asked, or a flag sets the cache."""
        if self.memory_gib is None or self.sets_cache:
            return None
        return self.memory_gib * self.settings.gpu_memory_utilization

    @property
    def sets_cache(self) -> bool:
        return any(name in self.flags for name in CACHE_FLAGS)

    def expected(self, *, by_arithmetic_alone: bool = False) -> Expected | None:
        """`None` where nothing follows from the flags."""
        if self.preset.gpu is None:
            return self.on_cpu()
        if self.sets_cache:
            return None
        gpu = gpu_named(self.preset.gpu.name)
        machine = Machine(
            gpu, self.memory_gib or gpu.memory_gib, self.preset.gpu.count, gpu.interconnect, self.preset.gpu.count
        )
        layout = layout_of(self.flags, self.preset.gpu.count)
        measured = Measured() if by_arithmetic_alone else self.measured()
        found = layouts.estimate(self.model, machine, layout, self.settings, self.version, measured)
        return Expected(
            kv_tokens=found.reported_tokens,
            concurrency=found.capacity.concurrency if found.fits else 0.0,
            weights_gib=found.memory.weights,
            kv_cache_gib=found.memory.kv_cache,
        )

    def measured(self) -> Measured:
        """What was measured with this preset, where the split is the same."""
        record, gpu = measured_record(self.preset), self.preset.gpu
        if record is None or gpu is None:
            return Measured()
        if layout_of(self.flags, gpu.count) != layout_of(self.preset.profile().flags, gpu.count):
            return Measured()
        return Measured(record.weights_gib, record.overhead_gib, record.max_num_batched_tokens)

    def on_cpu(self) -> Expected | None:
        space = self.environment.get(CPU_CACHE_VARIABLE)
        gib = float(space) if space and space.replace(".", "", 1).isdigit() else None
        told = self.flags.get(BLOCKS_FLAG)
        if isinstance(told, int) and not isinstance(told, bool):
            found = self.capacity(told)
        elif gib is not None:
            found = self.capacity(int(gib * GIB) // self.block_bytes)
        else:
            return None
        return Expected(self.reported(found), found.concurrency, kv_cache_gib=gib)

    def capacity(self, blocks: int) -> Capacity:
        settings = self.settings
        in_flight = layouts.in_flight_tokens(settings, self.version)
        return kv_cache.capacity(self.groups, blocks, settings.block_size, settings.max_model_len, in_flight)

    def reported(self, found: Capacity) -> int:
        return found.reported_tokens if behaviour_of(self.version).reports_requests else found.tokens_by_groups

    @property
    def groups(self) -> tuple[kv_cache.Group, ...]:
        draft = [Layer("full")] * self.settings.draft_layers
        return kv_cache.groups_of((*self.model.layers, *draft), self.settings.hybrid_manager)

    @property
    def block_bytes(self) -> int:
        settings = self.settings
        layers = range(len(self.model.layers) + settings.draft_layers)
        token_bytes = self.model.token_bytes(settings.tensor_parallel, settings.kv_element_bytes)
        return kv_cache.block_bytes(self.groups, layers, token_bytes, settings.block_size)


def plan_start(
    preset: Preset,
    words: Sequence[str],
    environment: Mapping[str, str],
    version: str | Version,
    *,
    model: str | None = None,
    memory_gib: float | None = None,
) -> StartPlan | None:
    """`words` are the engine's flags. `None` for what the planner does not cover."""
    try:
        shape, flags = load(model or preset.model), flags_of(words)
        at = parse_version(version) if isinstance(version, str) else version
        # On the CPU vLLM prepares one step at a time.
        told = flags if preset.gpu is not None else {"async-scheduling": False, **flags}
        settings = settings_of(told, shape, gpu_named(preset.gpu.name) if preset.gpu else CPU, at)
    except (ModelError, FlagError, VersionError, UnknownGpu):
        return None
    return StartPlan(preset, shape, settings, flags, environment, at, memory_gib)
