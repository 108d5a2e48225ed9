"""Why a replica failed, read from lines as engines wrote them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from workers.causes import Cause, Causes, Kind, read_line

RECORDED = Path(__file__).with_name("data") / "vllm-0.32-cache-too-small.txt"
LENGTH = (
    "KV cache is needed, which is larger than the available KV cache memory (1 GiB). Based on the available memory, "
    "the estimated maximum model length is "
)
CORE = "(EngineCore pid=7) ERROR 11-30 20:29:53 [core.py:1510] "
ALLOCATOR = "Tried to allocate 1.16 GiB. GPU 0 has a total capacity of 79.19 GiB of which 700.06 MiB is free."
TAKEN = (
    "ValueError: Free memory on device cuda:0 (61.5/79.19 GiB) on startup is less than desired GPU memory utilization "
    "(0.9, 71.27 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
)


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (f"{CORE}torch.OutOfMemoryError: CUDA out of memory. {ALLOCATOR}", Kind.OUT_OF_MEMORY),
        (f"torch.cuda.OutOfMemoryError: CUDA out of memory. {ALLOCATOR}", Kind.OUT_OF_MEMORY),
        (f"{CORE}OutOfMemoryError('CUDA out of memory. {ALLOCATOR}')", Kind.OUT_OF_MEMORY),
        (f"{CORE}torch.OutOfMemoryError: HIP out of memory. {ALLOCATOR}", Kind.OUT_OF_MEMORY),
        ("RuntimeError: CUDA error: out of memory", Kind.OUT_OF_MEMORY),
        ("torch.AcceleratorError: HIP error: out of memory", Kind.OUT_OF_MEMORY),
        (
            "RuntimeError: CUDA out of memory occurred when warming up sampler with 256 dummy requests.",
            Kind.OUT_OF_MEMORY,
        ),
        (
            "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
            Kind.OUT_OF_MEMORY,
        ),
        (
            "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
            Kind.NO_CACHE,
        ),
        (TAKEN, Kind.MEMORY_TAKEN),
        (f"(EngineCore_DP0 pid=43) {TAKEN}", Kind.MEMORY_TAKEN),
    ],
)
def test_each_kind_is_told_by_the_form_of_its_error(line: str, kind: Kind) -> None:
    cause = read_line(line)
    assert cause is not None
    assert cause.kind is kind


def test_figures_of_the_engine_are_taken_over() -> None:
    old = read_line(
        "ValueError: The model's max seq len (32768) is larger than the maximum number of tokens that can be stored in "
        "KV cache (7344). Try increasing `gpu_memory_utilization` or decreasing `max_model_len`"
    )
    assert old is not None
    assert (old.kind, old.longest_tokens) == (Kind.CACHE_TOO_SMALL, 7_344)
    taken = read_line(TAKEN)
    assert taken is not None
    assert taken.free_share == pytest.approx(61.5 / 79.19)


def test_what_vllm_wrote_on_a_cpu_names_the_longest_request_that_fits() -> None:
    found = [cause for line in RECORDED.read_text().splitlines() if (cause := read_line(line))]
    assert {(cause.kind, cause.longest_tokens) for cause in found} == {(Kind.CACHE_TOO_SMALL, 3_168)}


def test_what_vllm_wrote_on_an_h200_that_another_process_had_filled() -> None:
    cause = read_line(
        "(EngineCore pid=2989) ValueError: Free memory on device cuda:0 (5.49/139.8 GiB) on startup is less than "
        "desired GPU memory utilization (0.9, 125.82 GiB). Decrease GPU memory utilization or reduce GPU memory used "
        "by other processes."
    )
    assert cause is not None
    assert cause.kind is Kind.MEMORY_TAKEN
    assert cause.free_share == pytest.approx(5.49 / 139.8)


@pytest.mark.parametrize(
    "line",
    [
        "INFO Received request cmpl-1: prompt: 'why does torch say CUDA out of memory?'",
        "INFO Free memory on device cuda:0 (77.1/79.19 GiB) on startup. Desired GPU memory utilization is (0.9, 71.27)",
        "INFO Available KV cache memory: 7.8 GiB",
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
        "",
    ],
)
def test_what_only_mentions_memory_is_no_cause(line: str) -> None:
    assert read_line(line) is None


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("Free memory on device cuda:0 (1.2.3/4 GiB) on startup is less than desired GPU memory utilization", None),
        ("Free memory on device cuda:0 (./. GiB) on startup is less than desired GPU memory utilization", None),
        (
            "Free memory on device cuda:0 (1/0 GiB) on startup is less than desired GPU memory utilization",
            Cause(Kind.MEMORY_TAKEN, ""),
        ),
        (
            "Free memory on device cuda:0 (1,000.5/2,001 GiB) on startup is less than the engine's budget",
            Cause(Kind.MEMORY_TAKEN, "", free_share=0.5),
        ),
        (f"{LENGTH}{'9' * 5_000}", Cause(Kind.CACHE_TOO_SMALL, "")),
        (f"{LENGTH}3,168. Try", Cause(Kind.CACHE_TOO_SMALL, "", longest_tokens=3_168)),
        (f"max seq len ({'9' * 5_000}) is larger than the maximum number of tokens x KV cache (1)", None),
        (f"max seq len (9) is larger than the maximum number of tokens x KV cache ({'9' * 5_000})", None),
    ],
)
def test_a_figure_is_what_can_be_read_as_one(line: str, cause: Cause | None) -> None:
    found = read_line(line)
    assert (found and dataclasses.replace(found, line="")) == cause


def test_a_cause_counts_for_an_end_soon_after_it_only() -> None:
    now = 0.0
    causes = Causes(lambda: now)
    assert causes.last is None
    causes.note(TAKEN)
    causes.note("and a line that says nothing")
    now = causes.FRESH_SECONDS - 1
    assert isinstance(causes.last, Cause)
    now = causes.FRESH_SECONDS + 1
    assert causes.last is None
    causes.note(TAKEN)
    causes.forget()
    assert causes.last is None
