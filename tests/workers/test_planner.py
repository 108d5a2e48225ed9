"""`warmlane plan`: the figures that were measured or promised, the choice of a layout, and the command itself."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.cli import main
from workers import presets
from workers.command_line import EVENTS_FLAG
from workers.planner.hardware import GPUS
from workers.planner.layouts import Layout, Machine, possible
from workers.planner.models import load
from workers.planner.planning import Plan, plan
from workers.planner.question import Question
from workers.planner.report import Report, as_text, report
from workers.planner.settings import FlagError, flags_of, settings_of
from workers.presets.versions import NEWEST

OSS = "openai/gpt-oss-120b"
MEASURED_TOKENS = 1_383_290
CONTRACT = {
    "fits": bool,
    "kv_tokens": int,
    "concurrent_requests": float,
    "tensor_parallel": int,
    "pipeline_parallel": int,
    "warnings": list,
}


def ask(gpu: str, count: int = 1, model: str = OSS, **words: Any) -> Plan:
    return plan(Question(model, gpu, count, **words))


@pytest.fixture
def warmlane(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["plan", *map(str, arguments)])
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    return run


# -- figures


def test_the_measured_h200_row_within_one_percent() -> None:
    """Loaded 64.67 GiB and overhead 3.76 GiB from the record of the preset, one batch of 8,192 in flight."""
    found = report(ask("h200-141", context=40_000, gpu_memory_utilization=0.9))
    assert (found.weights_source, found.overhead_source, found.vllm) == ("measured", "measured", "0.24.0")
    assert found.kv_tokens == pytest.approx(MEASURED_TOKENS, rel=0.01)
    assert found.kv_cache_gib == pytest.approx(57.39, abs=0.02)


def test_the_h200_row_from_arithmetic_alone_within_fifteen_percent() -> None:
    for version in ("0.24.0", "0.32.0"):
        found = report(ask("h200-141", context=40_000, gpu_memory_utilization=0.9, use_measured=False, vllm=version))
        assert (found.weights_source, found.overhead_source) == ("computed", "estimated")
        assert found.kv_tokens == pytest.approx(MEASURED_TOKENS, rel=0.15)


def test_what_the_operator_measured_beats_the_record() -> None:
    found = report(ask("h100-80", weights_gib=64.38, overhead_gib=5.0))
    assert (found.weights_gib, found.overhead_gib) == (64.38, 5.0)
    assert found.weights_source == "measured"


def test_what_was_measured_with_one_split_says_nothing_of_another() -> None:
    found = ask("h100-80", 2, flags=flags_of(["-tp", "2"]), weights_gib=33.3)
    assert found.chosen.memory.weights == 33.3
    others = [one for one in found.alternatives if one.layout[1:] != found.chosen.layout[1:]]
    assert others
    assert not any(one.memory.weights_are_measured for one in others)


def test_a_preset_is_named_only_where_it_gives_this_plan() -> None:
    assert ask("h100-80", 2).is_preset
    assert ask("h100-80", 4).is_preset  # two replicas of it
    assert not ask("h100-80", 2, context=4096).is_preset
    assert not ask("h100-80", 2, flags={"seed": 1}).is_preset
    assert not ask("h100-80", 2, interconnect="pcie").is_preset


def test_two_a100_40_with_the_specifications_flags_do_not_fit_and_this_is_how_they_do() -> None:
    found = ask("a100-40", 2, profile="spec")
    assert not found.fits
    assert report(found).kv_tokens == 0
    changes = [one.change for one in found.remedies]
    assert changes[0].startswith("--gpu-memory-utilization 0.95")
    assert any(change.startswith("4 GPUs: ") for change in changes)
    for one in found.remedies:
        assert one.estimate.fits
    retried = ask("a100-40", 2, profile="spec", flags=flags_of(changes[0].split()))
    assert retried.fits


def test_a_plan_without_a_profile_still_says_that_the_specification_does_not_fit() -> None:
    found = report(ask("a100-40", 2))
    assert found.fits
    assert not found.profiles["spec"].fits
    assert found.profiles["recommended"].fits


@pytest.mark.parametrize("name", [name for name, one in presets.load_all().items() if one.gpu and one.model])
def test_every_profile_of_a_preset_fits_but_the_one_that_is_known_not_to(name: str) -> None:
    preset = presets.load(name)
    assert preset.gpu is not None
    for profile in preset.profiles:
        found = ask(preset.gpu.name, preset.gpu.count, preset.model, profile=profile)
        assert found.preset == name
        assert found.fits == ((name, profile) != ("gpt-oss-120b-a100-40-x2", "spec")), profile
        if found.fits and profile != "spec":
            assert [one for one in found.findings if one.is_error] == []


def test_a_gpu_that_is_too_old_is_not_mended_by_more_of_them() -> None:
    found = ask("t4-16", model="Qwen/Qwen3-8B")
    assert {one.code for one in found.findings if one.is_error} == {"E1", "E4"}
    assert found.remedies == ()


def test_a_shorter_context_is_the_last_resort() -> None:
    found = ask("rtx4080-16", model="openai/gpt-oss-20b", context=131_072)
    assert not found.fits
    (change, *_) = [one.change for one in found.remedies]
    assert "--max-model-len" in change
    length = int(change.rpartition(" ")[2])
    assert length % 1024 == 0
    assert 4_096 <= length < 131_072


def test_the_working_set_bounds_what_can_be_hit() -> None:
    many, few = ask("h200-141", sessions=500, mean_tokens=20_000), ask("h200-141", sessions=10, mean_tokens=20_000)
    assert few.reusable_share == 1.0
    assert many.reusable_share == pytest.approx(many.case.fleet_tokens / 10_000_000)
    assert many.cached_sessions == many.case.fleet_tokens // 20_000
    assert ask("h200-141").reusable_share is None


def test_windows_reserve_room_for_the_batches_that_are_scheduled_at_once() -> None:
    """One before 0.26, since then one for each stage and one that is prepared meanwhile."""

    def reserved(count: int, flags: str, vllm: str) -> int:
        asked = f"--max-num-batched-tokens 2048 {flags}"
        return ask("h100-80", count, flags=flags_of(asked.split()), vllm=vllm).chosen.capacity.window_blocks - 1

    one, two, three = (-(-(127 + batches * 2048) // 16) for batches in (1, 2, 3))
    assert reserved(2, "-tp 2", "0.25.1") == one
    assert reserved(2, "-tp 2", "0.26.0") == two
    assert reserved(2, "-tp 2 --no-async-scheduling", "0.32.0") == one
    assert reserved(2, "-pp 2", "0.32.0") == three


def test_kv_tokens_are_what_that_version_writes() -> None:
    """Before 0.21 the log counted blocks by groups: half of the prompt tokens where windows are half of the groups."""
    old, new = (ask("h100-80", 2, profile="spec", vllm=version) for version in ("0.20.0", "0.21.0"))
    assert old.chosen.capacity == new.chosen.capacity
    assert old.chosen.reported_tokens == old.chosen.raw_tokens // 2
    assert new.chosen.reported_tokens > old.chosen.reported_tokens


def test_kv_events_cost_half_of_the_cache_before_0_20() -> None:
    """So the launcher leaves them out there; whoever adds them is told."""
    without_events = ask("h100-80", 2, profile="recommended", vllm="0.19.0")
    assert "kv-events-config" not in without_events.case.flags
    assert "W15" not in [one.code for one in without_events.findings]
    with_events = ask("h100-80", 2, profile="recommended", vllm="0.19.0", flags={"kv-events-config": "{}"})
    assert "W15" in [one.code for one in with_events.findings]
    assert with_events.chosen.raw_tokens == pytest.approx(
        ask("h100-80", 2, profile="recommended", vllm="0.20.0").chosen.raw_tokens / 2, rel=0.001
    )


# -- layouts


@pytest.mark.parametrize(
    ("gpu", "count", "words", "layout"),
    [
        ("h200-141", 1, {}, Layout(1, 1, 1)),
        ("h200-141", 8, {}, Layout(8, 1, 1)),  # each cache is roomy: replicas
        ("h100-80", 2, {}, Layout(1, 2, 1)),  # alone they would hold an eighth each
        ("h100-80", 8, {}, Layout(4, 2, 1)),
        ("h100-80", 2, {"interconnect": "pcie"}, Layout(1, 1, 2)),
        ("h100-80", 4, {"goal": "latency"}, Layout(1, 4, 1)),
        ("a100-40", 4, {}, Layout(1, 4, 1)),
        ("l40s-48", 2, {}, Layout(1, 1, 2)),
        ("l40s-48", 2, {"interconnect": "nvlink"}, Layout(1, 2, 1)),
        ("l40s-48", 2, {"profile": "spec"}, Layout(1, 2, 1)),
        ("h100-80", 4, {"profile": "recommended"}, Layout(1, 4, 1)),
        ("h100-80", 8, {"profile": "recommended"}, Layout(2, 4, 1)),
        ("b200-180", 4, {}, Layout(4, 1, 1)),
    ],
)
def test_the_layout_follows_links_and_room(gpu: str, count: int, words: dict[str, Any], layout: Layout) -> None:
    assert ask(gpu, count, **words).chosen.layout == layout


def test_over_several_nodes_tensor_stays_inside_and_pipeline_goes_across() -> None:
    """A model that no node holds: 671 GB on nodes of four H100."""
    path = Path(__file__).parent / "data" / "deepseek-v3"
    found = report(ask("h100-80", 16, str(path), gpus_per_node=4, context=32_768))
    assert (found.tensor_parallel, found.pipeline_parallel, found.replicas) == (4, 4, 1)
    assert found.distributed_executor == "ray"
    assert "--distributed-executor-backend ray" in found.flags
    assert report(ask("h200-141")).distributed_executor is None


def test_layouts_use_every_gpu_and_divide_the_heads() -> None:
    machine = Machine(GPUS["h100-80"], 79.2, 12, "nvlink", 8)
    found = list(possible(load(OSS), machine))
    assert all(one.replicas * one.gpus == 12 for one in found)
    assert {one.tensor_parallel for one in found} == {1, 2, 4}


def test_the_first_alternative_is_the_choice() -> None:
    found = ask("h100-80", 4)
    assert found.alternatives[0].layout == found.chosen.layout
    assert len({one.layout for one in found.alternatives}) == len(found.alternatives) > 4


# -- flags


def test_flags_are_read_as_vllm_reads_them() -> None:
    words = "-tp 2 --max-model-len=4096 --enforce_eager --no-enable-prefix-caching --gpu-memory-utilization 0.9 -dp 2"
    assert flags_of(words.split()) == {
        "tensor-parallel-size": 2,
        "max-model-len": 4096,
        "enforce-eager": True,
        "enable-prefix-caching": False,
        "gpu-memory-utilization": 0.9,
        "data-parallel-size": 2,
    }


@pytest.mark.parametrize(
    "words",
    ["stray", "--max-model-len none", "--gpu-memory-utilization 1.5", "--max-num-seqs 0", "--speculative-config x"],
)
def test_flags_that_cannot_be_read_are_refused(words: str) -> None:
    with pytest.raises(FlagError):
        settings_of(flags_of(words.split()), load(OSS), GPUS["h100-80"], NEWEST)


@pytest.mark.parametrize("gib", ["inf", "nan"])
@pytest.mark.parametrize("option", ["--gpu-memory", "--weights", "--overhead"])
def test_gigabytes_that_are_no_number_are_refused(warmlane: Callable[..., tuple[int, str, str]], option: str, gib: str):
    code, _, said = warmlane("--model", OSS, "--gpu", "h100-80", "--count", 1, option, gib)
    assert code == 2
    assert option in said


def test_the_printed_flags_give_the_same_plan() -> None:
    first = ask("h100-80", 2, context=65_536)
    again = ask("h100-80", 2, flags=flags_of(shlex.split(report(first).flags)))
    assert again.chosen == first.chosen


# -- the command


def test_json_has_the_keys_of_the_contract(warmlane) -> None:
    code, out, err = warmlane("--model", OSS, "--gpu", "h100-80", "--count", 2, "--context", 65536, "--json")
    answer = json.loads(out)
    assert (code, err) == (0, "")
    for key, kind in CONTRACT.items():
        assert isinstance(answer[key], kind), key
    assert answer.keys() == set(Report.__struct_fields__)
    assert all(one.keys() == {"code", "message"} for one in answer["warnings"])


def test_text_says_plainly_whether_it_fits(warmlane) -> None:
    code, out, _ = warmlane("--model", OSS, "--gpu", "a100-40", "--count", 2, "--profile", "spec")
    assert code == 0
    assert "DOES NOT FIT" in out
    assert "To make it fit: --gpu-memory-utilization 0.95" in out
    assert re.search(r"^E1 +does not fit: ", out, re.M)
    assert "Run it" not in out
    _, out, _ = warmlane("--model", OSS, "--gpu", "a100-40", "--count", 2)
    assert "The flags of profile 'spec' do not fit on 2 x A100 40 GB." in out
    _, out, _ = warmlane("--model", OSS, "--gpu", "h200-141", "--count", 8, "--sessions", 100)
    assert "Fits as 8 x one GPU: " in out
    assert "at most 100 % of what comes again is still there" in out


@pytest.mark.parametrize(
    ("asked", "lines"),
    [
        ("--gpu h100-80 --count 4", ["Run it: warmlane up --preset gpt-oss-120b-h100-80-x2 --replicas 2"]),
        (
            "--gpu h200-141 --count 1 --profile latency",
            ["Run it: warmlane up --preset gpt-oss-120b-h200-141-x1 --profile latency --replicas 1"],
        ),
        (
            "--gpu h200-141 --count 16",
            [
                "Run it: on each of 2 machines, 8 times, each on GPUs and a port of its own: "
                "warmlane replica --preset gpt-oss-120b-h200-141-x1 --host ADDRESS",
                "In front of them: warmlane serve --replica http://ADDRESS:PORT ..., once for each replica",
            ],
        ),
    ],
)
def test_what_to_run_is_what_machines_can_do(warmlane, asked: str, lines: list[str]) -> None:
    code, out, _ = warmlane("--model", OSS, *asked.split())
    assert code == 0
    assert out.splitlines()[-len(lines) :] == lines


def test_what_is_no_preset_is_run_as_any_with_its_flags(warmlane) -> None:
    asked = ["--model", OSS, "--gpu", "h200-141", "--context", "40000", "--count", 2]
    _, out, _ = warmlane(*asked)
    run = rf"^Run it: VLLM_\w+=0 warmlane up --preset any --model {OSS} --replicas 2 -- .*--max-model-len 40000 "
    assert re.search(run, out, re.M)
    assert "sha256_cbor" not in out  # the launcher adds it
    _, out, _ = warmlane(*asked, "--gpus-per-node", 1, "--env", "HF_HOME=/a b")
    assert "on each of 2 machines, once: " in out
    assert f" HF_HOME='/a b' warmlane replica --preset any --model {OSS} --host ADDRESS -- " in out


@pytest.mark.parametrize("model", [OSS, "openai/gpt-oss-20b", "Qwen/Qwen3-8B"])
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_what_a_plan_says_to_run_can_be_run_and_is_the_plan(
    model: str, gpu: str, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    found = ask(gpu, count, model)
    (line,) = re.findall(r"^Run it: warmlane (up .*)$", as_text(found), re.M) or [""]
    assert bool(line) == found.fits
    if not line:
        return
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(line.replace("up ", "up --dry-run --vllm-version 0.32.0 ", 1)))
    assert not ended.value.code
    commands = capsys.readouterr().out.splitlines()
    assert len(commands) == found.chosen.layout.replicas
    for command in commands:
        words = shlex.split(command)
        for name, value in found.engine_flags.items():
            if name != EVENTS_FLAG:
                assert f"--{name}" in words, command
                assert value is True or words[words.index(f"--{name}") + 1] == str(value), command


def test_flags_of_vllm_may_follow(warmlane) -> None:
    asked = ["--model", OSS, "--gpu", "h200-141", "--count", 1, "--mean-tokens", 20_000, "--json"]
    _, out, _ = warmlane(*asked, "--", "--no-enable-prefix-caching")
    assert [one["code"] for one in json.loads(out)["warnings"]] == ["E2"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--gpu abacus", "unknown GPU 'abacus'; known: t4-16, "),
        ("--model gpt-5", "unknown model 'gpt-5'"),
        ("--profile fastest", "this preset has no profile 'fastest'"),
        (
            "--gpu rtx4080-16 --profile spec",
            "no preset of openai/gpt-oss-120b on 1 x rtx4080-16 has the profile 'spec'",
        ),
        ("--interconnect string", "--interconnect string: expected nvlink or pcie"),
        ("--goal cheap", "--goal cheap: expected balanced, latency, throughput"),
        ("--vllm-version latest", "'latest' is not a version of vLLM"),
        ("--context 200000", "openai/gpt-oss-120b has a context of 131072 tokens, not 200000"),
        ("--env NONSENSE", "--env NONSENSE: expected NAME=VALUE"),
        ("--count 2 --weights 33", "--weights and --overhead are those of one split"),
        ("--beside embedded", "preset embedded runs without a GPU"),
        ("--gpu-memory-utilization 1.2", "--gpu-memory-utilization: expected a number above 0 and up to 1"),
        ("-- --max-num-seqs none", "--max-num-seqs: expected a whole number from 1"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(warmlane, words: str, complaint: str) -> None:
    given = words.split()
    for option, value in (("--model", OSS), ("--gpu", "h200-141"), ("--count", "1")):
        if option not in given:
            given = [option, value, *given]
    code, out, err = warmlane(*given)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith(f"warmlane: {complaint}")
