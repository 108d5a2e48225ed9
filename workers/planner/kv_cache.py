"""How many tokens a KV cache holds, counted in blocks as vLLM counts them.

Layers with the same attention form groups of equal size, and all groups draw blocks from one pool: a block holds
`block_size` tokens of one group's layers. A request takes blocks from every group: as many as its tokens need where
layers see everything, and where they see a window, the window and what is in flight. vLLM reports the pool as
"GPU KV cache size", which is how many requests of full length fit times that length: less than the tokens that fit
(`Capacity.raw_tokens`) as soon as there is a window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from workers.planner.models import Layer

PADDING_LIMIT = 1.5
"""Groups get the size of the larger kind while that is less than 1.5 times the smaller (vLLM's heuristic)."""


@dataclass(frozen=True, slots=True)
class Group:
    """Layers, by number, that share a block table."""

    layer: Layer
    members: tuple[int, ...]

    def blocks(self, tokens: int, block_size: int, in_flight: int) -> int:
        """What one request of so many tokens holds at most, with `in_flight` tokens scheduled but not settled."""
        span = self.layer.span
        match self.layer.kind:
            case "sliding" if span is not None:  # the window may begin within a block
                return ceil(min(span - 1 + in_flight, tokens) / block_size) + 1
            case "local" if span is not None:
                return ceil(min(span + in_flight, tokens) / block_size)
        return ceil(tokens / block_size)


@dataclass(frozen=True, slots=True)
class Capacity:
    blocks: int
    block_size: int
    request_blocks: int
    """Of one request of full length."""
    window_blocks: int
    """Those of them that are windows and what is in flight."""
    context: int
    raw_tokens: int
    """Tokens of prompts that fit: what the prefix cache can hold."""
    groups: int

    @property
    def concurrency(self) -> float:
        """Requests of full length that run at once; vLLM's "Maximum concurrency"."""
        return self.blocks / self.request_blocks

    @property
    def reported_tokens(self) -> int:
        """vLLM's "GPU KV cache size"."""
        return int(self.concurrency * self.context)

    @property
    def tokens_by_groups(self) -> int:
        """What vLLM before 0.21 called "GPU KV cache size"."""
        return self.blocks // self.groups * self.block_size

    @property
    def holds_one_request(self) -> bool:
        """One block is never handed out."""
        return self.blocks - 1 >= self.request_blocks


def groups_of(layers: Sequence[Layer], has_hybrid_manager: bool = True) -> tuple[Group, ...]:
    """Without the hybrid manager windows are kept like everything else."""
    members: dict[Layer, list[int]] = {}
    for index, layer in enumerate(layers):
        members.setdefault(layer if has_hybrid_manager else Layer("full"), []).append(index)
    sizes = [len(indices) for indices in members.values()]
    size = max(sizes) if max(sizes) < PADDING_LIMIT * min(sizes) else min(sizes)
    return tuple(
        Group(layer, tuple(indices[first :: ceil(len(indices) / size)]))
        for layer, indices in members.items()
        for first in range(ceil(len(indices) / size))
    )


def stages_of(layers: int, pipeline_parallel: int) -> tuple[range, ...]:
    """Layers of each pipeline stage; what does not divide goes to the stages before the last, from behind."""
    counts = [layers // pipeline_parallel] * pipeline_parallel
    for position in range(2, layers % pipeline_parallel + 2):
        counts[-position] += 1
    ends = [sum(counts[: index + 1]) for index in range(pipeline_parallel)]
    return tuple(range(end - count, end) for count, end in zip(counts, ends, strict=True))


def block_bytes(groups: Sequence[Group], stage: range, token_bytes: int, block_size: int) -> int:
    """Of one block of the pool on one GPU of the stage; `token_bytes` are those of one token in one layer."""
    widest = max(sum(member in stage for member in group.members) for group in groups)
    return widest * token_bytes * block_size


def capacity(groups: Sequence[Group], blocks: int, block_size: int, context: int, in_flight: int) -> Capacity:
    needs = [(group.layer.kind, group.blocks(context, block_size, in_flight)) for group in groups]
    complete = sum(kind == "full" for kind, _ in needs)
    return Capacity(
        blocks=blocks,
        block_size=block_size,
        request_blocks=sum(need for _, need in needs),
        window_blocks=sum(need for kind, need in needs if kind != "full"),
        context=context,
        raw_tokens=blocks * block_size // max(complete, 1),
        groups=len(groups),
    )


def longest_context(groups: Sequence[Group], blocks: int, block_size: int, in_flight: int, limit: int) -> int:
    """The longest request, up to `limit` tokens, that the pool holds; 0 for none."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if capacity(groups, blocks, block_size, middle, in_flight).holds_one_request:
            low = middle
        else:
            high = middle - 1
    return low
