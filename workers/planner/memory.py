"""Bytes on one GPU: weights, what the engine takes beside them, and what is left for the KV cache.

Weights follow from the model's sizes and how vLLM lays them out: kernels for experts in MXFP4 want matrices in whole
tiles, and the padding counts. 65.97 GiB were reported for gpt-oss-120b with Marlin and 13.72 GiB for gpt-oss-20b; this
arithmetic gives 65.9 and 13.7. The overhead is the weak part: starts on one card were reported from 2 to 7.5 GiB. So
what a start measured takes the place of both (`Measured`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from workers.planner.kv_cache import stages_of
from workers.planner.models import Model
from workers.planner.settings import Settings

GIB = 2**30
MXFP4_GROUP = 32
"""Values that share a scale: tensor parallelism divides experts in such steps."""

CONTEXT_GIB = 0.5
"""CUDA context, libraries, allocator."""
GRAPHS_GIB = 0.7
"""CUDA graphs and compiled code; nothing with --enforce-eager. Both together fit few sequences on several cards."""
COMMUNICATION_GIB = 0.6
"""NCCL's buffers, with two or more GPUs."""
GIB_PER_1K_TOKENS = 0.25
"""Activations of a step of 1,024 tokens."""
SHARED_ACTIVATIONS = 0.7
"""Tensor parallelism divides some of them."""
LOGITS_COPIES = 3
"""Of float32 logits for each sequence, while tokens are chosen."""
DRAFT_MLP = 12
"""Weights of a draft's MLP by its width squared: three matrices to and from four times the width."""


class Tile(NamedTuple):
    """Sizes of expert matrices are rounded up to multiples of these."""

    hidden: int
    intermediate: int
    inner: int
    """The dimension over which a matrix multiplies."""


TILES = {
    "marlin": Tile(256, 128, 1),
    "flashinfer_trtllm": Tile(256, 128, 1),
    "flashinfer_cutlass": Tile(128, 128, 1),
    "aiter": Tile(256, 256, 1),
    # 64.38 and 64.67 GiB of gpt-oss-120b were seen on Hopper; this gives 64.6.
    "triton": Tile(1, 64, 256),
}


@dataclass(frozen=True, slots=True)
class Measured:
    """What a start of this model on this GPU told; it replaces the estimate."""

    weights_gib: float | None = None
    """Of one GPU."""
    overhead_gib: float | None = None
    batched_tokens: int | None = None
    """`max-num-batched-tokens` of that start; more would take more memory."""


@dataclass(frozen=True, slots=True)
class Memory:
    """GiB of the fullest GPU."""

    usable: float
    weights: float
    overhead: float
    weights_are_measured: bool
    overhead_is_measured: bool

    @property
    def kv_cache(self) -> float:
        """Negative when not even the weights fit."""
        return self.usable - self.weights - self.overhead


def memories(model: Model, kernels: str, memory_gib: float, settings: Settings, measured: Measured) -> list[Memory]:
    """One for each pipeline stage. `kernels` compute the experts; `memory_gib` is what the driver shows of a GPU."""
    overhead = overhead_gib(model, settings)
    draft = draft_bytes(model) / GIB if settings.draft_layers else 0.0
    if measured.overhead_gib is not None:
        told = settings.max_num_batched_tokens
        further = max(0, told - (measured.batched_tokens or told))
        overhead = measured.overhead_gib + GIB_PER_1K_TOKENS * further / 1024
    return [
        Memory(
            usable=memory_gib * settings.gpu_memory_utilization,
            weights=computed if measured.weights_gib is None else measured.weights_gib + draft,
            overhead=overhead,
            weights_are_measured=measured.weights_gib is not None,
            overhead_is_measured=measured.overhead_gib is not None,
        )
        for computed in weights_gib(model, kernels, settings)
    ]


def weights_gib(model: Model, kernels: str, settings: Settings) -> list[float]:
    """On one GPU of each pipeline stage."""
    tensor, stages = settings.tensor_parallel, stages_of(len(model.layers), settings.pipeline_parallel)
    layers = model.dense_bytes / tensor + expert_bytes(model, kernels, settings)
    found = [layers * len(stage) / len(model.layers) for stage in stages]
    found[0] += model.embedding_bytes / tensor
    if not (model.tied and len(stages) == 1):
        found[-1] += model.embedding_bytes / tensor
    if settings.draft_layers:
        found[-1] += draft_bytes(model)
    return [size / GIB for size in found]


def expert_bytes(model: Model, kernels: str, settings: Settings) -> float:
    """Routed experts of all layers on one GPU: a share of each expert, or with expert parallelism a share of them."""
    experts = model.experts
    if experts is None:
        return 0.0
    ranks = settings.tensor_parallel * settings.data_parallel
    whole = settings.expert_parallel
    intermediate = experts.intermediate if whole else ceil(experts.intermediate / ranks)
    hidden, inner = experts.hidden, 1
    if model.is_mxfp4:
        tile = TILES.get(kernels, Tile(1, 1, 1))
        intermediate = rounded_up(rounded_up(intermediate, MXFP4_GROUP), tile.intermediate)
        hidden, inner = rounded_up(hidden, tile.hidden), tile.inner
    size = experts.padded_bytes(intermediate, rounded_up(hidden, inner), hidden, rounded_up(intermediate, inner))
    return size / ranks if whole else size


def overhead_gib(model: Model, settings: Settings) -> float:
    """Estimate of what the engine takes beside weights and KV cache on one GPU."""
    several = settings.gpus > 1
    activations = GIB_PER_1K_TOKENS * settings.max_num_batched_tokens / 1024
    logits = LOGITS_COPIES * settings.max_num_seqs * model.vocabulary * 4 / GIB
    return (
        CONTEXT_GIB
        + (0.0 if settings.enforce_eager else GRAPHS_GIB)
        + (COMMUNICATION_GIB if several else 0.0)
        + activations * (SHARED_ACTIVATIONS if settings.tensor_parallel > 1 else 1.0)
        + logits
    )


def draft_bytes(model: Model) -> float:
    """At most, of an EAGLE-3 draft (one layer, its own head), which every GPU holds whole."""
    width = (model.heads + 2 * model.kv_heads) * model.head_dim
    attention = 2 * model.hidden * width + model.heads * model.head_dim * model.hidden
    joined = 3 * model.hidden**2  # three hidden states of the model become one
    return 2.0 * (attention + joined + DRAFT_MLP * model.hidden**2 + model.hidden * model.vocabulary)


def rounded_up(value: int, multiple: int) -> int:
    return ceil(value / multiple) * multiple
