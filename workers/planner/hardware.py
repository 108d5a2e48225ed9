"""GPUs as the planner sees them: memory that the driver shows, generation, and how several of them are connected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Interconnect = Literal["nvlink", "pcie"]
"""AMD's Infinity Fabric counts as nvlink: what matters is whether an all-reduce is cheap."""

GPUS_PER_NODE = 8
"""The usual server; `--gpus-per-node` says otherwise."""


class UnknownGpu(Exception):
    """The message is one clear line for the person who asked."""


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    title: str
    memory_gib: float
    """Visible to programs: less than the name says, since names count in 10^9 bytes and the driver keeps some."""
    capability: float
    """CUDA compute capability; 9.4 stands for AMD's gfx942, which has what the rules ask of Hopper."""
    interconnect: Interconnect
    """As sold in servers."""
    memory_source: Literal["measured", "table"] = "table"
    """`measured`: the driver said so on such a card."""

    @property
    def is_amd(self) -> bool:
        return self.name.startswith("mi")

    @property
    def mxfp4_kernels(self) -> str:
        """What vLLM picks by itself for experts in MXFP4 (0.32: FlashInfer, AITER, Triton, Marlin in this order)."""
        if self.is_amd:
            return "aiter"
        if 10.0 <= self.capability < 12.0:
            return "flashinfer_trtllm"
        return "triton" if 9.0 <= self.capability < 10.0 else "marlin"

    @property
    def has_fp8_cache(self) -> bool:
        return self.capability >= 8.9


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("t4-16", "T4 16 GB", 14.6, 7.5, "pcie"),
        Gpu("v100-32", "V100 32 GB", 31.7, 7.0, "nvlink"),
        Gpu("rtx4080-16", "RTX 4080 16 GB", 15.7, 8.9, "pcie"),
        Gpu("rtx4090-24", "RTX 4090 24 GB", 23.6, 8.9, "pcie"),
        Gpu("a100-40", "A100 40 GB", 39.4, 8.0, "nvlink"),
        Gpu("a100-80", "A100 80 GB", 79.2, 8.0, "nvlink"),
        Gpu("l40s-48", "L40S 48 GB", 44.4, 8.9, "pcie"),
        Gpu("rtx6000ada-48", "RTX 6000 Ada 48 GB", 47.4, 8.9, "pcie"),
        Gpu("h100-80", "H100 80 GB", 79.2, 9.0, "nvlink"),
        Gpu("rtxpro6000-96", "RTX PRO 6000 Blackwell 96 GB", 95.0, 12.0, "pcie"),
        Gpu("h200-141", "H200 141 GB", 139.8, 9.0, "nvlink", "measured"),
        Gpu("b200-180", "B200 180 GB", 178.3, 10.0, "nvlink"),
        Gpu("mi300x-192", "MI300X 192 GB", 191.7, 9.4, "nvlink"),
    )
}


def gpu_named(name: str) -> Gpu:
    """Raises `UnknownGpu`."""
    gpu = GPUS.get(name.lower())
    if gpu is None:
        raise UnknownGpu(f"unknown GPU {name!r}; known: {', '.join(GPUS)}")
    return gpu
