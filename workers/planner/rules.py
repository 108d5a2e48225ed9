"""What is wrong with a plan, or will be: one small pure function for each finding, in the table `RULES`.

E: it will not start, or not do what it is for. W: it will run, and something should be known. Codes are fixed, so that
scripts can rely on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from workers.planner.layouts import Estimate, Machine, divides_heads
from workers.planner.models import Model
from workers.planner.settings import Settings
from workers.presets import FlagValue
from workers.presets.versions import Version, behaviour_of, unknown_flags, unknown_variables

MINIMUM_CAPABILITY = 8.0
"""Ampere; older cards have neither the attention kernels nor MXFP4."""
WINDOW_SHARE = 0.25
UNEQUAL = 0.1
"""Replicas whose caches differ by more than this should not get equal shares."""
H100_MEMORY_GIB = 90.0
"""Cards of Hopper below this are those of the recipe's notes."""
H100_TIGHT_SHARE = 0.7
"""The notes concern models whose weights take more of the card than this."""
REPORTED_OVERHEAD_GIB = 7.5
"""Of gpt-oss-120b on one H100 (vllm#27508: 1.71 GiB were left for the KV cache at 0.95)."""


@dataclass(frozen=True, slots=True)
class Finding:
    code: str
    message: str

    @property
    def is_error(self) -> bool:
        return self.code.startswith("E")


@dataclass(frozen=True, slots=True)
class Sibling:
    """Another replica of the same fleet."""

    name: str
    raw_tokens: int
    block_size: int
    hashing: str
    """All that a block's hash depends on beside the tokens, as text."""


@dataclass(frozen=True, slots=True)
class Case:
    """Everything a rule may look at."""

    model: Model
    machine: Machine
    chosen: Estimate
    flags: Mapping[str, FlagValue]
    environment: Mapping[str, str]
    version: Version
    mean_tokens: int
    """Expected length of a request, prompt and answer."""
    sessions: int | None
    """Conversations that are alive at a time and should find their history."""
    sequences: int
    """Requests at a time, as wanted or as `max-num-seqs` allows."""
    hashing: str
    siblings: tuple[Sibling, ...]
    memory_is_from_driver: bool

    @property
    def settings(self) -> Settings:
        return self.chosen.settings

    @property
    def fleet_tokens(self) -> int:
        return self.chosen.raw_tokens * self.chosen.layout.replicas


Rule = Callable[[Case], str | None]


def findings(case: Case) -> list[Finding]:
    """Errors first."""
    return [Finding(code, message) for code, rule in RULES.items() for message in said(rule, case)]


def said(rule: Rule, case: Case) -> Iterator[str]:
    message = rule(case)
    if message is not None:
        yield message


# -- errors


def too_small(case: Case) -> str | None:
    if case.chosen.fits:
        return None
    memory, capacity = case.chosen.memory, case.chosen.capacity
    if memory.kv_cache <= 0:
        return (
            f"does not fit: weights {memory.weights:.1f} GiB and overhead {memory.overhead:.1f} GiB are more than the "
            f"{memory.usable:.1f} GiB that each GPU may use"
        )
    return (
        f"does not fit: {memory.kv_cache:.2f} GiB are left for KV cache on each GPU, {capacity.blocks} blocks; one "
        f"request of {capacity.context} tokens needs {capacity.request_blocks + 1}"
    )


def no_prefix_cache(case: Case) -> str | None:
    if case.settings.prefix_caching:
        return None
    return "prefix caching is switched off (recipes for benchmarks do that): routing by prefix has nothing to gain"


def bad_split(case: Case) -> str | None:
    tensor, model = case.settings.tensor_parallel, case.model
    if not divides_heads(model, tensor):
        return f"--tensor-parallel-size {tensor} does not divide {model.heads} heads and {model.kv_heads} KV heads"
    if tensor > case.machine.per_node:
        return f"--tensor-parallel-size {tensor} is more than the {case.machine.per_node} GPUs of a node: use pipeline"
    if case.settings.gpus > case.machine.count:
        return f"the flags want {case.settings.gpus} GPUs, there are {case.machine.count}"
    return None


def too_old_gpu(case: Case) -> str | None:
    gpu = case.machine.gpu
    if gpu.capability >= MINIMUM_CAPABILITY:
        return None
    return f"{gpu.title} has compute capability {gpu.capability}; {MINIMUM_CAPABILITY} is needed"


def batch_below_sequences(case: Case) -> str | None:
    batched, sequences = case.settings.max_num_batched_tokens, case.settings.max_num_seqs
    if batched >= sequences:
        return None
    return f"--max-num-batched-tokens {batched} is less than --max-num-seqs {sequences}: vLLM refuses it"


def refused_flag(case: Case) -> str | None:
    return "; ".join(unknown_flags(case.flags, case.version)) or None


# -- warnings


def weak_prefix_cache(case: Case) -> str | None:
    behaviour = behaviour_of(case.version)
    if not case.model.is_hybrid or behaviour.drops_windows:
        return None
    if not behaviour.reads_retention_variable:
        return (
            f"vLLM {case.version} keeps freed window blocks in the prefix cache, where they push out the prefixes: "
            "about half of it is lost. 0.29 and later do not"
        )
    if case.environment.get("VLLM_PREFIX_CACHE_RETENTION_INTERVAL") == "0":
        return None
    return (
        f"vLLM {case.version} keeps freed window blocks in the prefix cache unless it is started with "
        "VLLM_PREFIX_CACHE_RETENTION_INTERVAL=0"
    )


def is_tight_h100(case: Case) -> bool:
    gpu, memory = case.machine.gpu, case.chosen.memory
    return gpu.capability == 9.0 and gpu.memory_gib < H100_MEMORY_GIB and case.model.is_mxfp4 and memory.usable > 0


def one_h100(case: Case) -> str | None:
    settings, weights = case.settings, case.chosen.memory.weights
    if not is_tight_h100(case) or settings.gpus > 1 or weights < H100_TIGHT_SHARE * case.machine.memory_gib:
        return None
    if settings.max_num_batched_tokens <= 1024 and settings.gpu_memory_utilization >= 0.95:
        return None
    return (
        "one H100: the upstream recipe wants --gpu-memory-utilization 0.95 and --max-num-batched-tokens 1024; more is "
        "at risk of running out of memory"
    )


def several_h100(case: Case) -> str | None:
    settings = case.settings
    if not is_tight_h100(case) or settings.tensor_parallel < 2 or settings.gpu_memory_utilization < 0.95:
        return None
    return "two or more H100: the upstream recipe wants --gpu-memory-utilization below 0.95"


def preemption(case: Case) -> str | None:
    raw, replicas = case.chosen.raw_tokens, case.chosen.layout.replicas
    each = -(-case.sequences // replicas)
    if not case.chosen.fits or each * case.mean_tokens <= raw:
        return None
    return (
        f"{each} requests of {case.mean_tokens} tokens are more than the {raw} that fit: requests will be preempted "
        f"and prefixes pushed out; they fit while they average {raw // each} tokens"
    )


def large_window(case: Case) -> str | None:
    capacity = case.chosen.capacity
    share = capacity.window_blocks / capacity.request_blocks
    if share <= WINDOW_SHARE or not case.model.is_hybrid:
        return None
    return (
        f"{100 * share:.0f} % of the blocks of a full request are reserved for windows and tokens in flight: fewer "
        f"--max-num-batched-tokens than {case.settings.max_num_batched_tokens} let more requests in"
    )


def slow_links(case: Case) -> str | None:
    if case.machine.interconnect == "nvlink" or case.settings.tensor_parallel == 1:
        return None
    return "tensor parallelism without NVLink: prefer --pipeline-parallel-size or several replicas, and measure"


def ignored_variable(case: Case) -> str | None:
    return "; ".join(unknown_variables(case.environment, case.version)) or None


def different_hashes(case: Case) -> str | None:
    ours = (case.settings.block_size, case.hashing)
    others = [one.name for one in case.siblings if (one.block_size, one.hashing) != ours]
    if not others:
        return None
    return (
        f"block size, hash algorithm or PYTHONHASHSEED differ from {', '.join(others)}: their KV events cannot be "
        "compared"
    )


def unequal_replicas(case: Case) -> str | None:
    ours = case.chosen.raw_tokens
    others = [
        f"{one.name} ({one.raw_tokens} tokens)"
        for one in case.siblings
        if abs(one.raw_tokens - ours) > UNEQUAL * max(ours, one.raw_tokens)
    ]
    if not others:
        return None
    return (
        f"caches of unequal size, {ours} tokens here beside {', '.join(others)}: policies that count requests will "
        "overload the smaller"
    )


def speculation_on_hybrid(case: Case) -> str | None:
    if not case.settings.speculation or not case.model.is_hybrid or not case.settings.prefix_caching:
        return None
    return (
        "speculative decoding with a prefix cache on a model with windows: a hit needs one block more, and structured "
        "output was seen broken; compare cached_tokens with and without"
    )


def bundled_tokens(case: Case) -> str | None:
    interval = case.settings.stream_interval
    if interval == 1:
        return None
    return f"--stream-interval {interval} sends tokens in bundles: first token and time between tokens look odd"


def working_set(case: Case) -> str | None:
    if case.sessions is None or not case.chosen.fits:
        return None
    wanted = case.sessions * case.mean_tokens
    if wanted <= case.fleet_tokens:
        return None
    return (
        f"{case.sessions} sessions of {case.mean_tokens} tokens are {wanted}, the caches of all replicas hold "
        f"{case.fleet_tokens}: routing cannot help with the rest; add replicas or --kv-offloading-size"
    )


def marketing_memory(case: Case) -> str | None:
    if case.memory_is_from_driver:
        return None
    return (
        f"{case.machine.memory_gib} GiB for {case.machine.gpu.title} come from a table, not from a driver: give "
        "--gpu-memory what nvidia-smi or amd-smi shows"
    )


def guessed_overhead(case: Case) -> str | None:
    settings, memory = case.settings, case.chosen.memory
    is_one = is_tight_h100(case) and settings.gpus == 1
    if memory.overhead_is_measured or not is_one or memory.weights < H100_TIGHT_SHARE * case.machine.memory_gib:
        return None
    left = max(0.0, memory.usable - memory.weights - REPORTED_OVERHEAD_GIB)
    return (
        f"{memory.overhead:.1f} GiB of overhead are an estimate. On one H100 up to {REPORTED_OVERHEAD_GIB} were "
        f"reported; then {left:.1f} GiB are left for the KV cache. A start says what is true: give it as --overhead"
    )


def early_fp8(case: Case) -> str | None:
    if case.settings.kv_element_bytes > 1 or case.machine.gpu.has_fp8_cache:
        return None
    return f"{case.machine.gpu.title} has no native fp8: a KV cache in fp8 is not verified there"


def lost_windows(case: Case) -> str | None:
    if not case.model.is_hybrid or case.settings.hybrid_manager:
        return None
    return (
        "layers with windows are kept like all others: the cache holds half as much. Before vLLM 0.20 KV events do that"
    )


RULES: dict[str, Rule] = {
    "E1": too_small,
    "E2": no_prefix_cache,
    "E3": bad_split,
    "E4": too_old_gpu,
    "E5": batch_below_sequences,
    "E6": refused_flag,
    "W1": weak_prefix_cache,
    "W2": one_h100,
    "W3": several_h100,
    "W4": preemption,
    "W5": large_window,
    "W6": slow_links,
    "W7": ignored_variable,
    "W8": different_hashes,
    "W9": unequal_replicas,
    "W10": speculation_on_hybrid,
    "W11": bundled_tokens,
    "W12": working_set,
    "W13": marketing_memory,
    "W14": early_fp8,
    "W15": lost_windows,
    "W16": guessed_overhead,
}
