"""What engines write while they start is understood: real logs, and the wording of the versions between them."""

from __future__ import annotations

from pathlib import Path

import pytest

from workers.engine_log import EngineFacts, EngineLog

LOGS = Path(__file__).with_name("data") / "engine_logs"


def heard(text: str) -> EngineLog:
    log = EngineLog()
    for line in text.splitlines():
        log.hear(line)
    return log


def progress_of(text: str) -> list[str | None]:
    """Each step once."""
    log, steps = EngineLog(), [None]
    for line in text.splitlines():
        log.hear(line)
        if log.progress != steps[-1]:
            steps.append(log.progress)
    return steps


def recorded(name: str) -> str:
    return (LOGS / f"{name}.log").read_text(encoding="utf-8")


def test_a_start_on_an_h200_with_0_24() -> None:
    assert heard(recorded("0.24-h200")).facts == EngineFacts(
        version="0.24.0",
        weights_gib=15.0,
        load_seconds=1.59946,
        kv_cache_gib=12.0,
        kv_tokens=98_303,
        context=40_000,
        concurrency=2.46,
        graphs_gib=0.2,
        engine_seconds=34.92,
    )


def test_a_start_of_gpt_oss_on_an_h200() -> None:
    """The other model runner of the same version; the first start on a GPU through `warmlane up`."""
    assert heard(recorded("0.24-h200-gpt-oss")).facts == EngineFacts(
        version="0.24.0",
        weights_gib=64.67,
        load_seconds=3.207594,
        kv_cache_gib=59.66,
        kv_tokens=1_633_939,
        context=131_072,
        concurrency=12.47,
        graphs_gib=0.09,
        engine_seconds=59.15,
    )
    steps = progress_of(recorded("0.24-h200-gpt-oss"))
    assert steps[:5] == [None, "loading weights", "measuring memory", "compiling", "preparing the engine"]
    assert "capturing CUDA graphs, 43 %" in steps
    assert steps[-1] == "opening its port"


def test_a_start_on_the_cpu_with_0_32() -> None:
    assert heard(recorded("0.32-cpu")).facts == EngineFacts(
        version="0.32.0",
        kv_cache_gib=1.0,
        kv_tokens=32_768,
        context=16_384,
        concurrency=2.0,
        blocks=1_024,
        engine_seconds=0.09,
    )


def test_how_far_a_start_is() -> None:
    assert progress_of(recorded("0.32-cpu")) == [
        None,
        "loading weights",
        "loading weights, 0 %",
        "loading weights, 100 %",
        "preparing the engine",
        "opening its port",
    ]
    steps = progress_of(recorded("0.24-h200"))
    assert steps[:5] == [None, "loading weights", "measuring memory", "compiling", "preparing the engine"]
    assert "capturing CUDA graphs, 55 %" in steps
    assert steps[-1] == "opening its port"


@pytest.mark.parametrize(
    ("line", "facts"),
    [
        # The first model runner says "memory", the second does not; older ones wrote four digits.
        (
            "Model loading took 64.38 GiB memory and 14.38 seconds",
            {"weights_gib": 64.38, "load_seconds": 14.38},
        ),
        ("Model loading took 65.9651 GiB and 12.799889 seconds", {"weights_gib": 65.9651, "load_seconds": 12.799889}),
        ("[gpu_worker.py:460] Available KV cache memory: 10.55 GiB", {"kv_cache_gib": 10.55}),
        ("[gpu_worker.py:276] Available KV cache memory: -2.14 GiB", {"kv_cache_gib": -2.14}),
        ("[kv_cache_utils.py:1319] GPU KV cache size: 290,864 tokens", {"kv_tokens": 290_864}),
        ("GPU + host KV cache size: 1,000 tokens", {"kv_tokens": 1_000}),
        (
            "[kv_cache_utils.py:1324] Maximum concurrency for 32,768 tokens per request: 33.04x",
            {"context": 32_768, "concurrency": 33.04},
        ),
        (
            "GPU KV cache size: 1,383,290 tokens, Maximum concurrency for 40,000 tokens per request: 34.58x",
            {"kv_tokens": 1_383_290, "context": 40_000, "concurrency": 34.58},
        ),
        ("Auto set (9.81/23.54) GiB for KV cache on node 0, with", {"kv_cache_gib": 9.81}),
        ("init engine (profile, create kv cache, warmup model) took 207.1 seconds", {"engine_seconds": 207.1}),
        ("init engine (profile, create kv cache, warmup model) took 9.2 s (compilation: 2 s)", {"engine_seconds": 9.2}),
        ("the prompt says: the model took 3 GiB of KV cache", {}),
    ],
)
def test_one_line_in_the_wording_of_a_version(line: str, facts: dict[str, float]) -> None:
    assert heard(f"(EngineCore pid=7) INFO 11-30 12:00:00 {line}").facts == EngineFacts(**facts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("line", "progress"),
    [
        (
            "Loading safetensors checkpoint shards:  56% Completed | 5/9 [00:13<00:11]",
            "loading weights, 56 %",
        ),
        ("(Worker pid=1) Loading pt checkpoint shards: 100% Completed | 2/2 [00:01<00:00]", "loading weights, 100 %"),
        ("Multi-thread loading shards:  33% Completed | 1/3 [00:01<00:02]", "loading weights, 33 %"),
        ("Loading safetensors using Runai Model Streamer:   7% Completed | 3/40", "loading weights, 7 %"),
        (
            "(EngineCore pid=9) Capturing CUDA graphs (FULL):  73%|###| 8/11 [00:00]",
            "capturing CUDA graphs, 73 %",
        ),
        ("GET /health 100% fine", None),
    ],
)
def test_bars_tell_the_percentage(line: str, progress: str | None) -> None:
    assert heard(line).progress == progress


def test_of_several_cards_the_fullest_weights_and_the_smallest_cache_count() -> None:
    text = "\n".join(
        f"(Worker_TP{rank} pid={rank}) INFO {line}"
        for rank, weights, cache in ((0, 33.5, 35.1), (1, 33.7, 35.0))
        for line in (
            f"Model loading took {weights} GiB memory and 10.0 seconds",
            f"Available KV cache memory: {cache} GiB",
        )
    )
    facts = heard(text).facts
    assert (facts.weights_gib, facts.kv_cache_gib) == (33.7, 35.0)


@pytest.mark.parametrize(
    "line",
    [
        "Model loading took , GiB and 2 seconds",
        "Model loading took 1.2.3 GiB and 2 seconds",
        f"Model loading took {'9' * 5_000} GiB and 2 seconds",
        "KV cache size: , tokens",
        f"KV cache size: {'9' * 5_000} tokens",
        "KV cache size: 1,2,3 tokens",
        "Maximum concurrency for 1,, tokens per request: 1.00x",
        f"Graph capturing finished in {'9' * 5_000} secs, took 1 GiB",
    ],
)
def test_what_is_no_figure_is_no_fact(line: str) -> None:
    assert heard(line).facts == EngineFacts()


def test_thousands_may_be_parted() -> None:
    facts = heard("KV cache size: 1,234,567 tokens\nMaximum concurrency for 1,024 tokens per request: 1,205.63x").facts
    assert (facts.kv_tokens, facts.context, facts.concurrency) == (1_234_567, 1_024, 1_205.63)
