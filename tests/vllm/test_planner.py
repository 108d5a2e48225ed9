"""The planner counts blocks as vLLM does: against its own code, and against what real replicas write at start."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from random import Random
from typing import Any

import pytest
from msgspec import structs

from tests.vllm.conftest import (
    HOST,
    LOGS,
    ROOT,
    START_SECONDS,
    STARTS,
    Fleet,
    Run,
    close,
    free_port,
    new_worker,
    vllm_executable,
    wait_until,
)
from workers import presets, starts
from workers.command_line import base_url, command_line
from workers.engine_version import version_of
from workers.planner.kv_cache import Capacity, block_bytes, capacity, groups_of, stages_of
from workers.planner.models import Layer
from workers.planner.start import plan_start
from workers.presets import Preset
from workers.presets.versions import NEWEST, known, parse_version

pytestmark = pytest.mark.vllm

REPORTED = re.compile(r"KV cache size: ([\d,]+) tokens, Maximum concurrency for ([\d,]+) tokens per request: ([\d.]+)x")
ORACLE_SECONDS = 120.0
"""The import of vLLM alone takes 10 s with a warm disk cache."""
KINDS = (Layer("full"), Layer("sliding", 128), Layer("sliding", 1024), Layer("local", 8192))


TINY_GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 128,
    "vocab_size": 4096,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
    "attention_bias": True,
    "tie_word_embeddings": False,
}


def vllm_python() -> str:
    return str(Path(vllm_executable()).with_name("python"))


def random_case(random: Random) -> dict[str, Any]:
    windows = random.sample(KINDS[1:], random.randint(0, 1))
    layers = random.randint(1, 64)
    period = random.randint(2, 7)
    kinds = [windows[0] if windows and index % period else KINDS[0] for index in range(layers)]
    return {
        "layers": [[one.kind, one.span] for one in kinds],
        "stages": random.choice([1, 1, 2, 3, 4]) if layers >= 4 else 1,
        "latent": random.choice([None, None, 576]) if not windows else None,
        "kv_heads": random.choice([1, 2, 8]),
        "head_dim": random.choice([64, 128]),
        "block_size": random.choice([16, 32, 64]),
        "max_model_len": random.randint(1_000, 131_072),
        "in_flight": random.choice([512, 2_048, 8_192, 16_384]),
        "gib": random.uniform(4.0, 100.0),
    }


def planned(case: dict[str, Any]) -> Capacity:
    groups = groups_of([Layer(kind, span) for kind, span in case["layers"]])
    token_bytes = 2 * (case["latent"] or 2 * case["kv_heads"] * case["head_dim"])
    blocks = min(
        int(case["gib"] * 2**30) // block_bytes(groups, stage, token_bytes, case["block_size"])
        for stage in stages_of(len(case["layers"]), case["stages"])
    )
    return capacity(groups, blocks, case["block_size"], case["max_model_len"], case["in_flight"])


def test_the_formula_is_vllms_own_for_any_model() -> None:
    """Two hundred made-up models, cut into stages, through vLLM's functions and through ours."""
    random = Random(7)
    cases = [random_case(random) for _ in range(200)]
    oracle = subprocess.run(
        [vllm_python(), str(Path(__file__).with_name("kv_oracle.py"))],
        input=json.dumps(cases),
        env={**os.environ, "VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=ORACLE_SECONDS,
        check=True,
    )
    answers = json.loads(oracle.stdout.splitlines()[-1])
    assert len(answers) == len(cases)
    for case, answer in zip(cases, answers, strict=True):
        found = planned(case)
        told = [found.blocks, found.reported_tokens, found.concurrency] if found.holds_one_request else None
        assert told == answer, case
    assert sum(answer is None for answer in answers) < len(cases) / 2


def said(log: Path) -> tuple[int, int, float]:
    """Tokens, context and concurrency that a replica wrote at start."""
    match = REPORTED.search(log.read_text(encoding="utf-8"))
    assert match, f"{log} does not say how large the KV cache is"
    tokens, context, concurrency = match.groups()
    return int(tokens.replace(",", "")), int(context.replace(",", "")), float(concurrency)


def planned_for(preset: Preset, words: list[str]) -> tuple[int, int, float]:
    """The same from the planner, as the launcher plans a start."""
    plan = plan_start(preset, words, {}, NEWEST)
    assert plan is not None
    expected = plan.expected()
    assert expected is not None
    return expected.kv_tokens, plan.settings.max_model_len, round(expected.concurrency, 2)


def test_the_plan_of_a_real_replica_is_what_it_reports(replicas: Fleet) -> None:
    preset = structs.replace(presets.load("cpu-tiny"), model=str(ROOT / presets.load("cpu-tiny").model))
    assert replicas.workers
    assert said(LOGS / "replica-1.log") == planned_for(preset, list(command_line(preset).flags))


def test_what_a_real_start_measured_is_kept_beside_its_plan(replicas: Fleet) -> None:
    """Through the launcher: its version was found, its log heard, its plan held against it."""
    assert replicas.workers
    wait_until(lambda: len(starts.read(STARTS)) >= 2, "both starts are kept")
    found = version_of(vllm_executable())
    for start in starts.read(STARTS)[:2]:
        assert (start.preset, start.vllm) == ("cpu-tiny", str(found))
        assert (start.kv_tokens, start.context, start.concurrency) == (32_768, 16_384, 2.0)
        assert start.kv_cache_gib == 1.0
        assert start.planned is not None
        assert (start.planned.kv_tokens, start.planned.concurrency) == (start.kv_tokens, start.concurrency)
        assert start.planned.kv_cache_gib == start.kv_cache_gib
        assert start.start_seconds is not None
        assert 1 < start.start_seconds < START_SECONDS


def test_the_plan_of_a_real_replica_with_windows_is_what_it_reports(tmp_path: Path, background: Run[Any]) -> None:
    """The architecture of gpt-oss, tiny and with random weights: windows and all, by turns."""
    model = tmp_path / "tiny-gpt-oss"
    shutil.copytree(ROOT / presets.load("cpu-tiny").model, model, ignore=shutil.ignore_patterns("*.safetensors"))
    (model / "config.json").write_text(json.dumps(TINY_GPT_OSS))
    preset = structs.replace(presets.load("cpu-tiny"), model=str(model))
    more = shlex.split(
        "--load-format dummy --max-model-len 8192 --max-num-batched-tokens 2048 --num-gpu-blocks-override 600"
    )
    command = command_line(preset, host=HOST, port=free_port(), vllm=vllm_executable(), extra=more)
    worker = new_worker("windows", command.argv, command.environment, base_url(HOST, 1))
    log = LOGS / "windows.log"
    try:
        background(worker.start())
        wait_until(lambda: REPORTED.search(log.read_text(encoding="utf-8")), "it has a KV cache", START_SECONDS)
    finally:
        background(worker.stop())
        close(worker)
    assert said(log) == planned_for(preset, list(command.flags))
    assert said(log)[0] == 15_123


def test_the_list_of_flags_is_that_of_the_installed_vllm() -> None:
    """`workers/presets/known/vllm.toml` against vLLM's parser; the installed version must be one of those listed."""
    answer = subprocess.run(
        [vllm_python(), str(Path(__file__).with_name("flags_oracle.py"))],
        env={**os.environ, "VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=ORACLE_SECONDS,
        check=True,
    )
    installed = json.loads(answer.stdout.splitlines()[-1])
    version = parse_version(installed["version"])
    assert version_of(vllm_executable()) == version
    lists = known()
    listed = {name for name, entry in lists.flags.items() if entry.covers(version)}
    variables = {name for name, entry in lists.variables.items() if entry.covers(version)}
    assert set(installed["flags"]) - listed == set()
    assert listed - set(installed["flags"]) == set()
    assert variables == {name for name in installed["variables"] if name.startswith("VLLM_")}
