"""What an engine is told, as far as memory and rules depend on it: vLLM's flags, with its defaults for the others."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from workers.planner.hardware import Gpu
from workers.planner.models import Model
from workers.presets import FlagValue
from workers.presets.versions import Version, behaviour_of

BLOCK_SIZE = 16
SHORT_NAMES = {"tp": "tensor-parallel-size", "pp": "pipeline-parallel-size", "dp": "data-parallel-size"}
SIZES = ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size")


class FlagError(Exception):
    """A flag has a value that cannot be read. The message is one clear line for the person who asked."""


@dataclass(frozen=True, slots=True)
class Settings:
    tensor_parallel: int
    pipeline_parallel: int
    data_parallel: int
    expert_parallel: bool
    gpu_memory_utilization: float
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    kv_element_bytes: int
    prefix_caching: bool
    hybrid_manager: bool
    async_scheduling: bool
    """The next step is prepared while one runs: vLLM's default on GPUs."""
    enforce_eager: bool
    speculation: bool
    draft_layers: int
    """Attention layers of a draft model; they have KV cache, too."""
    stream_interval: int
    moe_backend: str | None
    """`None`: vLLM picks."""

    @property
    def gpus(self) -> int:
        """Of one replica."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel


def flags_of(words: Sequence[str]) -> dict[str, FlagValue]:
    """Flags as on vLLM's command line: `--name value`, `--name=value`, `--name`, `--no-name`. Raises `FlagError`."""
    flags: dict[str, FlagValue] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.lstrip("-").partition("=")
        if not word.startswith("-") or not name:
            raise FlagError(f"{word!r} is not a flag")
        name = SHORT_NAMES.get(name, name).replace("_", "-")
        if equals or (rest and not is_flag(rest[0])):
            flags[name] = value_of(value if equals else rest.pop(0))
        elif name.startswith("no-"):
            flags[name.removeprefix("no-")] = False
        else:
            flags[name] = True
    return flags


def is_flag(word: str) -> bool:
    return word.startswith("-") and not word.removeprefix("-")[:1].isdigit()


def value_of(word: str) -> FlagValue:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def settings_of(flags: Mapping[str, FlagValue], model: Model, gpu: Gpu, version: Version) -> Settings:
    """Flags as the engine understands them. Raises `FlagError`."""
    batched, sequences = scheduler_defaults(gpu)
    tensor, pipeline, data = (whole(flags, name, 1) for name in SIZES)
    draft = speculation(flags)
    behaviour = behaviour_of(version)
    return Settings(
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        data_parallel=data,
        expert_parallel=bool(flags.get("enable-expert-parallel", False)),
        gpu_memory_utilization=fraction(flags, "gpu-memory-utilization", behaviour.gpu_memory_utilization),
        max_model_len=whole(flags, "max-model-len", model.max_context),
        max_num_seqs=whole(flags, "max-num-seqs", sequences),
        max_num_batched_tokens=whole(flags, "max-num-batched-tokens", batched),
        block_size=whole(flags, "block-size", BLOCK_SIZE),
        kv_element_bytes=1 if str(flags.get("kv-cache-dtype", "auto")).startswith("fp8") else 2,
        prefix_caching=bool(flags.get("enable-prefix-caching", True)),
        hybrid_manager=not flags.get("disable-hybrid-kv-cache-manager", False)
        and not (flags.get("kv-events-config") and behaviour.events_end_hybrid_cache),
        async_scheduling=bool(flags.get("async-scheduling", True)),
        enforce_eager=bool(flags.get("enforce-eager", False)),
        speculation=draft is not None,
        draft_layers=1 if draft is not None and str(draft.get("method", "")).startswith("eagle") else 0,
        stream_interval=whole(flags, "stream-interval", 1),
        moe_backend=None if flags.get("moe-backend", "auto") == "auto" else str(flags["moe-backend"]),
    )


def scheduler_defaults(gpu: Gpu) -> tuple[int, int]:
    """vLLM's `max-num-batched-tokens` and `max-num-seqs` for its server on this card (0.32)."""
    if gpu.memory_gib >= 160:
        return 16384, 1024
    if gpu.memory_gib >= 70 and not gpu.name.startswith("a100"):
        return 8192, 1024
    return 2048, 256


def speculation(flags: Mapping[str, FlagValue]) -> dict[str, object] | None:
    text = flags.get("speculative-config")
    if text is None:
        return None
    try:
        read = json.loads(str(text))
    except ValueError as error:
        raise FlagError(f"--speculative-config: not JSON: {error}") from error
    if not isinstance(read, dict):
        raise FlagError("--speculative-config: expected an object")
    return read


def whole(flags: Mapping[str, FlagValue], name: str, default: int) -> int:
    value = flags.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise FlagError(f"--{name}: expected a whole number from 1, got {value!r}")
    return value


def fraction(flags: Mapping[str, FlagValue], name: str, default: float) -> float:
    value = flags.get(name, default)
    if isinstance(value, (bool, str)) or not 0 < value <= 1:
        raise FlagError(f"--{name}: expected a number above 0 and up to 1, got {value!r}")
    return float(value)
