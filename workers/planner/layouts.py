"""Ways to use the GPUs: so many replicas of so many GPUs each, split by tensor or by pipeline.

vLLM's own advice is about one engine: tensor parallelism where GPUs share NVLink, pipeline parallelism where they do
not, and across nodes tensor inside and pipeline between. With a gateway in front, several replicas are a third way:
nothing is exchanged between them, and each prefix lives where it is used. It pays as soon as each replica's cache is
roomy; below that, larger replicas hold more prefixes, since the weights are there once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from workers.planner import kv_cache, memory
from workers.planner.hardware import Gpu, Interconnect
from workers.planner.kv_cache import Capacity
from workers.planner.memory import GIB, Measured, Memory
from workers.planner.models import Layer, Model
from workers.planner.question import Goal
from workers.planner.settings import Settings
from workers.presets.versions import Version, behaviour_of

ROOM_TOKENS = 500_000
"""A replica with so much cache gains little from being larger (1x H200 has three times that, 1x H100 half)."""
ROOM_REQUESTS = 16
"""Nor does one that holds so many requests of full length, where contexts are short."""


class Layout(NamedTuple):
    replicas: int
    tensor_parallel: int
    pipeline_parallel: int
    data_parallel: int = 1

    @property
    def gpus(self) -> int:
        """Of one replica."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel

    def __str__(self) -> str:
        sizes = {"TP": self.tensor_parallel, "PP": self.pipeline_parallel, "DP": self.data_parallel}
        split = " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "one GPU"
        return f"{self.replicas} x {split}"


@dataclass(frozen=True, slots=True)
class Machine:
    """The GPUs there are."""

    gpu: Gpu
    memory_gib: float
    """Of one GPU, as the driver shows it."""
    count: int
    interconnect: Interconnect
    per_node: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """One layout with its figures, for one replica."""

    layout: Layout
    settings: Settings
    memory: Memory
    """Of the fullest GPU."""
    capacity: Capacity
    version: Version

    @property
    def fits(self) -> bool:
        return self.capacity.holds_one_request

    @property
    def reported_tokens(self) -> int:
        """As vLLM of this version reports it: each rank for itself."""
        if not self.fits:
            return 0
        by_requests = behaviour_of(self.version).reports_requests
        return self.capacity.reported_tokens if by_requests else self.capacity.tokens_by_groups

    @property
    def raw_tokens(self) -> int:
        return self.capacity.raw_tokens * self.layout.data_parallel if self.fits else 0

    @property
    def concurrency(self) -> float:
        """Requests of full length that one replica runs at once."""
        return self.capacity.concurrency * self.layout.data_parallel if self.fits else 0.0


def estimate(
    model: Model, machine: Machine, layout: Layout, settings: Settings, version: Version, measured: Measured
) -> Estimate:
    """What one replica of the layout has. `measured` must be of this layout."""
    told = replace(
        settings,
        tensor_parallel=layout.tensor_parallel,
        pipeline_parallel=layout.pipeline_parallel,
        data_parallel=layout.data_parallel,
    )
    kernels = told.moe_backend or machine.gpu.mxfp4_kernels
    stages = memory.memories(model, kernels, machine.memory_gib, told, measured)
    layers = (*model.layers, *[Layer("full")] * told.draft_layers)
    groups = kv_cache.groups_of(layers, told.hybrid_manager)
    token_bytes = model.token_bytes(told.tensor_parallel, told.kv_element_bytes)
    spans = list(kv_cache.stages_of(len(model.layers), told.pipeline_parallel))
    spans[-1] = range(spans[-1].start, len(layers))  # a draft runs behind the last stage
    blocks = min(
        int(stage.kv_cache * GIB // kv_cache.block_bytes(groups, span, token_bytes, told.block_size))
        for stage, span in zip(stages, spans, strict=True)
    )
    return Estimate(
        layout=layout,
        settings=told,
        memory=min(stages, key=lambda stage: stage.kv_cache),
        capacity=kv_cache.capacity(
            groups, max(blocks, 0), told.block_size, told.max_model_len, in_flight_tokens(told, version)
        ),
        version=version,
    )


def in_flight_tokens(settings: Settings, version: Version) -> int:
    """Tokens scheduled but not settled, for which windows reserve room."""
    if not behaviour_of(version).batches_in_flight:
        return settings.max_num_batched_tokens
    batches = settings.pipeline_parallel + (1 if settings.async_scheduling else 0)
    return batches * settings.max_num_batched_tokens


def possible(model: Model, machine: Machine) -> Iterable[Layout]:
    """All layouts that use all GPUs with equal replicas and that vLLM accepts."""
    for gpus in divisors(machine.count):
        for tensor in divisors(gpus):
            pipeline = gpus // tensor
            if tensor <= machine.per_node and pipeline <= len(model.layers) and divides_heads(model, tensor):
                yield Layout(machine.count // gpus, tensor, pipeline)


def divides_heads(model: Model, tensor_parallel: int) -> bool:
    """Heads are dealt out evenly; heads of keys and values may also be held several times."""
    if model.heads % tensor_parallel:
        return False
    if model.latent_dim is not None:
        return True
    return model.kv_heads % tensor_parallel == 0 or tensor_parallel % model.kv_heads == 0


def divisors(number: int) -> list[int]:
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def ranked(estimates: Iterable[Estimate], machine: Machine, goal: Goal) -> list[Estimate]:
    """Best first."""
    return sorted(estimates, key=lambda one: latency_order(one, machine) if goal == "latency" else order(one, machine))


def order(one: Estimate, machine: Machine) -> tuple[bool, bool, bool, int, float]:
    """What fits; roomy; split as the links want it; then more replicas while roomy, else the most prefixes."""
    room = min(ROOM_TOKENS, ROOM_REQUESTS * one.settings.max_model_len)
    is_roomy = one.raw_tokens >= room
    many = one.layout.replicas if is_roomy else 0
    return (
        not one.fits,
        not is_roomy,
        is_against_links(one.layout, machine),
        -many,
        -one.raw_tokens * one.layout.replicas,
    )


def latency_order(one: Estimate, machine: Machine) -> tuple[bool, bool, int, float]:
    """What fits; split as the links want it; then the more GPUs share the work on one token the better."""
    return (not one.fits, is_against_links(one.layout, machine), -one.layout.tensor_parallel, -one.raw_tokens)


def is_against_links(layout: Layout, machine: Machine) -> bool:
    """Tensor parallelism without NVLink, or pipeline parallelism within a node that has it."""
    if machine.interconnect == "pcie":
        return layout.tensor_parallel > 1
    nodes = -(-layout.gpus // machine.per_node)
    return layout.pipeline_parallel > nodes
