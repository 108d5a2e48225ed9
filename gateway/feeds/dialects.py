"""Dialects: how each engine says what the gateway asks. One row for each; what a row lacks, that engine does not say.

For what is missing the gateway has something else, so no engine needs a case of its own elsewhere:

- no load: what was sent there from here is counted anyway (`core.load`), and a first token that is late makes a replica
  dearer, which is what a queue behind a few slots looks like;
- no KV usage: unknown, and the replicas are compared without it;
- no size of the cache: `[[replicas]] cache_tokens`, else `[routing] default_cache_tokens`;
- no hit counters: only a start time, or nothing, tells a restart, so a replica that was ejected comes back as cold;
- no `cached_tokens` in usage: what is believed of its cache is not corrected by its answers;
- no `/tokenize`: bytes for each token are learned from usage alone.

The sources of names are the engines' own, in the versions that stand beside each row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.config import EngineName

MOST_TOKENS = 10**12
"""Larger is no cache of anything."""

Names = tuple[bytes, ...]
"""Names of one family over the versions of an engine, newest first; the first that is on a page counts."""


@dataclass(frozen=True, slots=True)
class Families:
    """Which families of a metrics page say what."""

    running: Names = ()
    waiting: Names = ()
    kv_usage: Names = ()
    """Share, 0..1, that running requests hold; what is only cached does not count."""
    prefix_queries: Names = ()
    prefix_hits: Names = ()
    cache_config: Names = ()
    """Size of the cache in labels, as vLLM has it ..."""
    cache_tokens: Names = ()
    """... or as a number of tokens ..."""
    cache_blocks: Names = ()
    block_tokens: Names = ()
    """... or as blocks, and the size of one."""
    sleep_state: Names = ()
    started_at: Names = (b"process_start_time_seconds",)
    engine: str = "engine"
    """Label that tells the engines of one replica (data parallel ranks) apart."""
    ranks_repeat: bool = False
    """The ranks of one engine may each tell the same gauge: the largest counts."""
    part_label: str = ""
    """A gauge with a value in this label is a part of the one without."""
    queries_leave_hits_out: bool = False
    """`prefix_queries` counts only what was not found."""

    @property
    def wanted(self) -> Names:
        gauges = (*self.running, *self.waiting, *self.kv_usage, *self.sleep_state, *self.started_at)
        sizes = (*self.cache_config, *self.cache_tokens, *self.cache_blocks, *self.block_tokens)
        return (*gauges, *sizes, *self.prefix_queries, *self.prefix_hits)


@dataclass(frozen=True, slots=True)
class Dialect:
    engine: EngineName
    owner: str = ""
    """`owned_by` in its `/v1/models`."""
    mark: bytes = b""
    """How the names of its families begin."""
    greeting: bytes = b""
    """What it answers at `/`."""
    health: tuple[str, ...] = ("/health",)
    """The first that there is, over the versions; nothing of it generates tokens."""
    metrics: str | None = "/metrics"
    families: Families = Families()
    without_metrics: str = ""
    """Why there may be no page, and what to do about it."""
    size: str | None = None
    """Page that tells the size of the cache where the metrics do not ..."""
    read_size: Callable[[Any], int | None] = lambda page: None
    """... from its JSON, in tokens."""
    can_pause: bool = False
    """vLLM's `/is_paused`."""
    counts_tokens: bool = False
    """`/tokenize` takes the body of a chat or completion as it is."""
    implied_tag: str = ""
    """A model may be asked for without this end of its name."""
    salts: bool = False
    """`cache_salt` in a body keeps its prefix apart from others."""


def llama_cpp_size(props: Any) -> int | None:
    """`/props`: each slot keeps one prefix in its context. Where the slots share one context (`--kv-unified`, and with
    it the default of four) this is too much, and where idle slots are kept in main memory (`--cache-ram`) too little;
    which of both, hits will tell (`core.belief`)."""
    slots, settings = props.get("total_slots"), props.get("default_generation_settings")
    context = settings.get("n_ctx") if isinstance(settings, dict) else None
    if type(slots) is not int or type(context) is not int:
        return None
    return slots * context


def ollama_size(running: Any) -> int | None:
    """`/api/ps`: the contexts of the models that are loaded at the moment. How many requests share one
    (`OLLAMA_NUM_PARALLEL`) it does not say."""
    models = running.get("models")
    found = [one.get("context_length") for one in models if isinstance(one, dict)] if isinstance(models, list) else []
    contexts = [length for length in found if type(length) is int and length > 0]
    return sum(contexts) if contexts and len(contexts) == len(found) else None


PLAIN = Dialect("openai", health=("/health", "/v1/models"), can_pause=True, counts_tokens=True)
"""An engine that is not known (yet): whatever speaks OpenAI's API. Asked for what vLLM has, it may know it or not."""

VLLM = Dialect(
    "vllm",
    owner="vllm",
    mark=b"vllm:",
    can_pause=True,
    counts_tokens=True,
    salts=True,
    families=Families(
        running=(b"vllm:num_requests_running",),
        waiting=(b"vllm:num_requests_waiting",),
        kv_usage=(b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc"),
        prefix_queries=(
            b"vllm:prefix_cache_queries_total",
            b"vllm:prefix_cache_queries",
            b"vllm:gpu_prefix_cache_queries_total",
            b"vllm:gpu_prefix_cache_queries",
        ),
        prefix_hits=(
            b"vllm:prefix_cache_hits_total",
            b"vllm:prefix_cache_hits",
            b"vllm:gpu_prefix_cache_hits_total",
            b"vllm:gpu_prefix_cache_hits",
        ),
        cache_config=(b"vllm:cache_config_info",),
        sleep_state=(b"vllm:engine_sleep_state",),
    ),
)
"""0.18 to 0.32, with the names of some versions before."""

SGLANG = Dialect(
    "sglang",
    owner="sglang",
    mark=b"sglang:",
    # Its /health generates a token for each question and sleeps a second before it looks whether one came: more than
    # half of a probe's time-out, and all of it behind a long prefill. /ready and /ping only look at flags.
    health=("/ready", "/ping", "/v1/models"),
    counts_tokens=True,
    salts=True,
    families=Families(
        running=(b"sglang:num_running_reqs",),
        waiting=(b"sglang:num_queue_reqs",),
        kv_usage=(b"sglang:token_usage",),
        prefix_queries=(b"sglang:prompt_tokens_total",),
        prefix_hits=(b"sglang:cached_tokens_total",),
        cache_tokens=(b"sglang:max_total_num_tokens",),
        engine="dp_rank",
        ranks_repeat=True,
        part_label="priority",
    ),
    without_metrics="start SGLang with --enable-metrics",
)
"""0.5.23: `srt/observability/metrics_collector.py`, `srt/entrypoints/http_server.py`. `token_usage` leaves out what is
only cached (`pool_stats_observer.py`), as vLLM's does. Several processes make the page, so it has no start time."""

TENSORRT_LLM = Dialect(
    "tensorrt-llm",
    owner="tensorrt_llm",
    mark=b"trtllm_",
    metrics="/prometheus/metrics",  # /metrics is JSON there, and reading it takes the statistics away from others
    # Its gauges (running, waiting, utilization) are set when requests complete and stay so meanwhile: an idle replica
    # could look busy for ever. What only grows, or never changes, is right at any age.
    families=Families(
        prefix_queries=(b"trtllm_prompt_tokens_total",),
        prefix_hits=(b"trtllm_prompt_cached_tokens_total",),
        cache_blocks=(b"trtllm_kv_cache_max_blocks",),
        block_tokens=(b"trtllm_kv_cache_tokens_per_block",),
    ),
    without_metrics="start trtllm-serve with return_perf_metrics and enable_iter_perf_stats",
    salts=True,
)
"""Main of 2026 (commit 050f80d): `tensorrt_llm/metrics/collector.py`, `serve/openai_server.py`. Older pages have other
names or only histograms, and then say nothing."""

LLAMA_CPP = Dialect(
    "llama.cpp",
    owner="llamacpp",
    mark=b"llamacpp:",
    families=Families(
        running=(b"llamacpp:requests_processing",),
        waiting=(b"llamacpp:requests_deferred",),
        prefix_queries=(b"llamacpp:prompt_tokens_total",),
        prefix_hits=(b"llamacpp:prompt_tokens_cached_total",),
        queries_leave_hits_out=True,
    ),
    without_metrics="start llama-server with --metrics",
    size="/props",
    read_size=llama_cpp_size,
)
"""b11434 (`tools/server/server-task.cpp`, `server-context.cpp`) and b11549, seen. Its `/tokenize` wants a `content`."""

OLLAMA = Dialect(
    "ollama",
    owner="library",
    greeting=b"Ollama is running",
    health=("/api/version",),
    metrics=None,
    size="/api/ps",
    read_size=ollama_size,
    implied_tag=":latest",
)
"""Main of 2025 (`server/routes.go`, `openai/openai.go` at 634c416, `api/types.go`): no metrics, no `/tokenize`, no
`cached_tokens`. `owned_by` is the namespace of a model, `library` for those that have none."""

DIALECTS: dict[EngineName, Dialect] = {
    one.engine: one for one in (VLLM, SGLANG, TENSORRT_LLM, LLAMA_CPP, OLLAMA, PLAIN)
}


def dialect_of_page(page: bytes) -> Dialect | None:
    """Whose metrics page this is, by a sample of its own."""
    lines = b"\n" + page
    marked = (one for one in DIALECTS.values() if one.mark)
    return next((one for one in marked if b"\n" + one.mark in lines), None)


def dialect_of_owners(owners: Iterable[str]) -> Dialect | None:
    """Whose list of models this is: all entries have one owner that is known."""
    found = set(owners)
    return next((one for one in DIALECTS.values() if one.owner and {one.owner} == found), None)


def dialect_of_greeting(greeting: bytes) -> Dialect | None:
    """Who answers so at `/`."""
    return next((one for one in DIALECTS.values() if one.greeting and greeting.strip() == one.greeting), None)


def read_size(dialect: Dialect, page: bytes) -> int | None:
    """Size of the cache in tokens, from the dialect's page of it."""
    try:
        answer = msgspec.json.decode(page)
    except (msgspec.DecodeError, RecursionError):
        return None
    size = dialect.read_size(answer) if isinstance(answer, dict) else None
    return size if size is not None and 0 < size <= MOST_TOKENS else None
