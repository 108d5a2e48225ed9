"""`/metrics` in Prometheus text, with vLLM's names, types and labels."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Mapping
from time import time

from workers.sim.exchange import Exchange
from workers.sim.recorder import FAMILIES, Histogram
from workers.sim.service import EngineService

CONTENT_TYPE = b"text/plain; version=1.0.0; charset=utf-8"
GAUGES = {
    "num_requests_running": "Number of requests in model execution batches.",
    "num_requests_waiting": "Number of requests waiting to be processed.",
    "num_requests_waiting_by_reason": "Number of waiting requests by reason.",
    "engine_sleep_state": "Engine sleep state; awake = 0 means engine is sleeping; awake = 1 means engine is awake.",
    "kv_cache_usage_perc": "KV-cache usage. 1 means 100 percent usage.",
}
COUNTERS = {
    "prefix_cache_queries": "Prefix cache queries, in terms of number of queried tokens.",
    "prefix_cache_hits": "Prefix cache hits, in terms of number of cached tokens.",
    "num_preemptions": "Cumulative number of preemption from the engine.",
    "prompt_tokens": "Number of prefill tokens processed.",
    "prompt_tokens_by_source": "Number of prompt tokens by source.",
    "prompt_tokens_cached": "Number of cached prompt tokens (local + external).",
    "prompt_tokens_cached_by_source": "Prefix-cache hit tokens by the cache tier that supplied them.",
    "generation_tokens": "Number of generation tokens processed.",
    "request_success": "Count of successfully processed requests.",
    "admission_rejections": "Number of admission attempts rejected by a queue limit, by reason.",
}
"""vLLM's families with their help texts; the histograms are the recorder's."""

Samples = list[tuple[Mapping[str, str], float]]


class Metrics:
    def __init__(self, service: EngineService) -> None:
        self._service = service
        self._settings = service.settings
        self._labels = {"engine": "0", "model_name": service.settings.model}
        self._started_at = time()

    async def serve(self, exchange: Exchange) -> None:
        await exchange.answer(200, self.text().encode(), CONTENT_TYPE)

    def text(self) -> str:
        lines: list[str] = []
        self._write_process(lines)
        self._write_gauges(lines)
        self._write_counters(lines)
        for name, histogram in self._service.recorder.histograms.items():
            self._write_histogram(lines, f"vllm:{name}", FAMILIES[name][0], histogram)
        info = self._cache_config()
        _write(lines, "vllm:cache_config_info", "gauge", "Information of the LLMEngine CacheConfig", [(info, 1.0)])
        return "\n".join(lines) + "\n"

    # ---- families ----------------------------------------------------------------------------------------------------

    def _write_process(self, lines: list[str]) -> None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        release = dict(zip(("major", "minor", "patchlevel"), map(str, sys.version_info[:3]), strict=True))
        python = {"implementation": "CPython", **release, "version": ".".join(release.values())}
        values: tuple[tuple[str, str, str, Mapping[str, str], float], ...] = (
            ("python_info", "gauge", "Python platform information", python, 1.0),
            (
                "process_start_time_seconds",
                "gauge",
                "Start time of the process since unix epoch in seconds.",
                {},
                self._started_at,
            ),
            (
                "process_cpu_seconds_total",
                "counter",
                "Total user and system CPU time spent in seconds.",
                {},
                usage.ru_utime + usage.ru_stime,
            ),
            ("process_open_fds", "gauge", "Number of open file descriptors.", {}, len(os.listdir("/dev/fd"))),
        )
        for name, kind, text, labels, value in values:
            _write(lines, name, kind, text, [(labels, value)])

    def _write_gauges(self, lines: list[str]) -> None:
        statistics, awake = self._service.statistics(), not self._service.asleep
        states = {"awake": float(awake), "weights_offloaded": float(not awake), "discard_all": 0.0}
        gauges = {
            "num_requests_running": self._one(statistics.running),
            "num_requests_waiting": self._one(statistics.waiting),
            "num_requests_waiting_by_reason": self._by("reason", {"capacity": statistics.waiting, "deferred": 0}),
            "engine_sleep_state": self._by("sleep_state", states),
            "kv_cache_usage_perc": self._one(statistics.kv_usage),
        }
        for name, samples in gauges.items():
            _write(lines, f"vllm:{name}", "gauge", GAUGES[name], samples)

    def _write_counters(self, lines: list[str]) -> None:
        statistics, hits = self._service.statistics(), self._service.statistics().prefix_hits
        computed = statistics.prefix_queries - hits
        sources = {"local_compute": computed, "local_cache_hit": hits, "external_kv_transfer": 0}
        tiers = {"device": hits, "host": 0, "p2p": 0, "disk": 0, "external_unspecified": 0}
        rejected = {"model_name": self._settings.model, "reason": "max_num_queued_reqs"}
        counters: dict[str, Samples] = {
            "prefix_cache_queries": self._one(statistics.prefix_queries),
            "prefix_cache_hits": self._one(hits),
            "num_preemptions": self._one(statistics.preemptions),
            "prompt_tokens": self._one(statistics.prompt_tokens),
            "prompt_tokens_by_source": self._by("source", sources),
            "prompt_tokens_cached": self._one(hits),
            "prompt_tokens_cached_by_source": self._by("source", tiers),
            "generation_tokens": self._one(statistics.generation_tokens),
            "request_success": self._by("finished_reason", self._service.recorder.finished),
            "admission_rejections": [(rejected, self._service.rejected)],
        }
        for name, samples in counters.items():
            _write(lines, f"vllm:{name}_total", "counter", COUNTERS[name], samples)
            created = [(labels, self._started_at) for labels, _ in samples]
            _write(lines, f"vllm:{name}_created", "gauge", COUNTERS[name], created)

    def _write_histogram(self, lines: list[str], name: str, text: str, histogram: Histogram) -> None:
        lines += (f"# HELP {name} {text}", f"# TYPE {name} histogram")
        total = 0
        for bound, count in zip((*histogram.bounds, "+Inf"), histogram.counts, strict=True):
            total += count
            lines.append(_sample(f"{name}_bucket", {**self._labels, "le": str(bound)}, total))
        lines.append(_sample(f"{name}_count", self._labels, total))
        lines.append(_sample(f"{name}_sum", self._labels, histogram.sum))
        _write(lines, f"{name}_created", "gauge", text, self._one(self._started_at))

    def _cache_config(self) -> dict[str, str]:
        engine = self._settings.engine
        tokens = engine.cache_blocks * engine.block_size
        return {
            "block_size": str(engine.block_size),
            "cache_dtype": "auto",
            "enable_prefix_caching": "True",
            "engine": "0",
            "gpu_memory_utilization": "0.92",
            "hash_block_size": "None",
            "kv_cache_max_concurrency": str(tokens / self._settings.context_tokens),
            "kv_cache_size_tokens": str(tokens),
            "num_cpu_blocks": "None",
            "num_gpu_blocks": str(engine.cache_blocks),
            "num_gpu_blocks_override": "None",
            "prefix_caching_hash_algo": "sha256",
            "sliding_window": "None",
            "user_specified_block_size": "True",
        }

    def _one(self, value: float) -> Samples:
        return [(self._labels, value)]

    def _by(self, label: str, values: Mapping[str, float]) -> Samples:
        return [({**self._labels, label: key}, value) for key, value in values.items()]


def _write(lines: list[str], name: str, kind: str, text: str, samples: Samples) -> None:
    lines += (f"# HELP {name} {text}", f"# TYPE {name} {kind}")
    lines += [_sample(name, labels, value) for labels, value in samples]


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    shown = ",".join(f'{key}="{_escape(text)}"' for key, text in sorted(labels.items()))
    return f"{name}{{{shown}}} {float(value)!r}" if shown else f"{name} {float(value)!r}"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
