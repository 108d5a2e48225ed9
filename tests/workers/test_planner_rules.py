"""Every rule fires where it should and is quiet where it should not."""

from __future__ import annotations

from typing import Any

import pytest

from workers.planner.planning import plan
from workers.planner.question import Question
from workers.planner.rules import RULES
from workers.planner.settings import flags_of


def ask(
    model: str = "openai/gpt-oss-120b", gpu: str = "h200-141", count: int = 1, flags: str = "", **words: Any
) -> Question:
    return Question(model, gpu, count, flags=flags_of(flags.split()), **words)


SPEC: dict[str, Any] = {"profile": "spec"}
DRAFT = 'speculative-config={"method":"eagle3","model":"draft"}'
TRIGGERS: dict[str, tuple[Question, Question]] = {
    "E1": (ask(gpu="a100-40", count=2, **SPEC), ask(gpu="a100-40", count=4, **SPEC)),
    "E2": (ask(flags="--no-enable-prefix-caching"), ask(flags="--enable-prefix-caching")),
    "E3": (ask(count=3, flags="--tensor-parallel-size 3"), ask(count=4, flags="--tensor-parallel-size 4")),
    "E4": (ask("Qwen/Qwen3-8B", "v100-32"), ask("Qwen/Qwen3-8B", "a100-40")),
    "E5": (
        ask(flags="--max-num-batched-tokens 32 --max-num-seqs 64"),
        ask(flags="--max-num-batched-tokens 64 --max-num-seqs 64"),
    ),
    "E6": (
        ask(flags="--prefix-cache-retention-interval 0", vllm="0.24.0"),
        ask(flags="--prefix-cache-retention-interval 0", vllm="0.29.0"),
    ),
    "W1": (ask(vllm="0.18.0"), ask(vllm="0.24.0")),
    "W2": (ask(gpu="h100-80", **SPEC), ask(gpu="h100-80", profile="recommended")),
    "W3": (ask(gpu="h100-80", count=4, **SPEC), ask(gpu="h100-80", count=2, **SPEC)),
    "W4": (ask(gpu="a100-40", count=4, **SPEC), ask(gpu="h100-80", count=2, **SPEC)),
    "W5": (
        ask(gpu="a100-40", count=4, vllm="0.32.0", **SPEC),
        ask(flags="--max-num-batched-tokens 2048", context=65536),
    ),
    "W6": (ask(gpu="l40s-48", count=2, **SPEC), ask(gpu="h100-80", count=2, **SPEC)),
    "W7": (
        ask(environment={"VLLM_USE_FLASHINFER_MOE_MXFP4_BF16": "1"}, vllm="0.32.0"),
        ask(environment={"VLLM_LOGGING_LEVEL": "INFO", "PYTHONHASHSEED": "0"}, vllm="0.32.0"),
    ),
    "W8": (ask(beside=("gpt-oss-120b-mi300x-192-x1",)), ask(beside=("gpt-oss-120b-h100-80-x2",))),
    "W9": (ask(beside=("gpt-oss-120b-h100-80-x1",)), ask(beside=("gpt-oss-120b-h200-141-x1",))),
    "W10": (ask(flags=f"--{DRAFT}"), ask("Qwen/Qwen3-8B", flags=f"--{DRAFT}")),
    "W11": (ask(flags="--stream-interval 20"), ask(flags="--stream-interval 1")),
    "W12": (ask(sessions=200, mean_tokens=30_000), ask(sessions=20, mean_tokens=30_000)),
    "W13": (ask(gpu="h100-80", count=2), ask(gpu="h100-80", count=2, gpu_memory_gib=79.1)),
    "W14": (
        ask(gpu="a100-80", count=2, flags="--kv-cache-dtype fp8"),
        ask(gpu="h100-80", count=2, flags="--kv-cache-dtype fp8"),
    ),
    "W15": (
        ask(flags="--disable-hybrid-kv-cache-manager"),
        ask("Qwen/Qwen3-8B", flags="--disable-hybrid-kv-cache-manager"),
    ),
    "W16": (ask(gpu="h100-80"), ask(gpu="h100-80", overhead_gib=3.8, weights_gib=64.67, profile="recommended")),
}


def codes(question: Question) -> list[str]:
    return [one.code for one in plan(question).findings]


@pytest.mark.parametrize("code", RULES)
def test_a_rule_fires_where_it_should_and_only_there(code: str) -> None:
    firing, quiet = TRIGGERS[code]
    assert code in codes(firing)
    assert code not in codes(quiet)


def test_every_rule_has_a_trigger() -> None:
    assert list(TRIGGERS) == list(RULES)


def test_a_clean_plan_has_nothing_to_say() -> None:
    assert codes(ask(mean_tokens=20_000)) == []


@pytest.mark.parametrize("code", [code for code in RULES if code.startswith("E")])
def test_an_error_means_that_it_will_not_do(code: str) -> None:
    """All but E2 keep it from starting."""
    assert plan(TRIGGERS[code][0]).fits == (code == "E2")


@pytest.mark.parametrize(
    ("question", "complaint"),
    [
        (TRIGGERS["E1"][0], "does not fit: "),
        (TRIGGERS["E3"][0], "--tensor-parallel-size 3 does not divide 64 heads and 8 KV heads"),
        (ask(count=16, flags="--tensor-parallel-size 16"), "more than the 8 GPUs of a node"),
        (ask(count=1, flags="--tensor-parallel-size 2"), "the flags want 2 GPUs, there are 1"),
        (TRIGGERS["E6"][0], "vLLM 0.24.0 does not know --prefix-cache-retention-interval"),
        (ask(flags="--colour red"), "--colour is not among the flags"),
        (TRIGGERS["W7"][0], "VLLM_USE_FLASHINFER_MOE_MXFP4_BF16"),
        (ask(flags="--kv-cache-dtype fp8 --stream-interval 7"), "--stream-interval 7"),
        (ask(vllm="0.24.0", environment={"VLLM_PREFIX_CACHE_RETENTION_INTERVAL": "64"}), "unless it is started with"),
    ],
)
def test_a_message_names_what_to_change(question: Question, complaint: str) -> None:
    messages = [one.message for one in plan(question).findings]
    assert any(complaint in message for message in messages), messages
    assert not any("\n" in message for message in messages)
