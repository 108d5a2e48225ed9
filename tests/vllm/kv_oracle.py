#!/usr/bin/env python3
"""vLLM's own arithmetic of KV caches, for the planner's test: cases as JSON on stdin, answers as JSON on stdout.

Run with the Python of an environment that has vLLM. An answer is [blocks, reported tokens, maximum concurrency],
or null where not one request fits.
"""

import json
import sys
from types import SimpleNamespace

import torch
from vllm.distributed.utils import get_pp_indices
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

WINDOWS = {
    "sliding": lambda span, common: SlidingWindowSpec(sliding_window=span, **common),
    "local": lambda span, common: ChunkedLocalAttentionSpec(attention_chunk_size=span, **common),
}


def answer(case: dict) -> list | None:
    heads, size = (1, case["latent"]) if case["latent"] else (case["kv_heads"], case["head_dim"])
    common = {"block_size": case["block_size"], "num_kv_heads": heads, "head_size": size, "dtype": torch.bfloat16}
    full = MLAAttentionSpec if case["latent"] else FullAttentionSpec
    specs = {
        f"layer.{index}": WINDOWS.get(kind, lambda _, words: full(**words))(span, common)
        for index, (kind, span) in enumerate(case["layers"])
    }
    workers = []
    for rank in range(case["stages"]):
        start, end = get_pp_indices(len(specs), rank, case["stages"])
        workers.append({f"layer.{index}": specs[f"layer.{index}"] for index in range(start, end)})
    config = engine_config(case)
    try:
        configs = kv_cache_utils.get_kv_cache_configs(config, workers, [int(case["gib"] * 2**30)] * len(workers))
    except ValueError as error:
        if "GiB KV cache is needed" in str(error):
            return None
        raise
    scheduler = kv_cache_utils.generate_scheduler_kv_cache_config(configs)
    tokens, concurrency = kv_cache_utils.get_kv_cache_capacity(config, scheduler)
    return [scheduler.num_blocks, tokens, concurrency]


def engine_config(case: dict) -> SimpleNamespace:
    """What those functions read of an engine's configuration."""
    layout = kv_cache_utils.KVCacheLayout.LBHNC
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=case["max_model_len"], original_max_model_len=None, hf_config=None),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, tensor_parallel_size=1),
        cache_config=SimpleNamespace(
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=0,
            get_resolved_kv_cache_layout=lambda: layout,
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
        num_prefill_lookahead_tokens=0,
        max_in_flight_tokens=case["in_flight"],
    )


if __name__ == "__main__":
    print(json.dumps([answer(case) for case in json.load(sys.stdin)]))
