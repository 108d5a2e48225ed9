"""Presets are data: the specification's rows are as it says, and a wrong file is refused with the key's path."""

from __future__ import annotations

import re
from math import prod
from pathlib import Path

import pytest

from gateway.cli import main
from workers import presets
from workers.planner.planning import plan
from workers.planner.question import Question
from workers.presets import PresetError
from workers.presets.versions import Version


def specification() -> dict[str, str]:
    """Rows of the specification: the end of the preset's name -> flags."""
    text = Path(__file__).with_name("data").joinpath("specification.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d.*?) \| `(.*)` \|$", text, re.MULTILINE)
    return {
        f"{card.lower().replace(' ', '')}-{memory}-x{count}": flags
        for hardware, flags in rows
        for count, card, memory in re.findall(r"(\d)x (.*?)-(\d+)GB", hardware)
    }


SPECIFICATION = specification()
ANY = "any"
MINIMAL = """
title = "t"
program = "vllm"
model = "m"
[profiles.recommended]
why = "w"
"""


def words(preset: presets.Preset, profile: str) -> str:
    return " ".join(f"--{name} {value}" for name, value in preset.profile(profile).flags.items())


@pytest.mark.parametrize("row", SPECIFICATION)
def test_spec_profile_is_the_specifications_row(row: str) -> None:
    preset = presets.load(f"gpt-oss-120b-{row}")
    assert preset.model == "openai/gpt-oss-120b"
    assert words(preset, "spec") == SPECIFICATION[row]
    assert preset.profile("spec").environment == {}
    assert preset.profile("spec", Version(0, 24)).flags == preset.profile("spec").flags


def test_the_specification_has_six_rows_for_seven_kinds_of_machine() -> None:
    assert len(SPECIFICATION) == 7
    assert len(set(SPECIFICATION.values())) == 6


@pytest.mark.parametrize("row", SPECIFICATION)
@pytest.mark.parametrize("version", ["0.18.0", "0.24.0", "0.32.0"])
def test_the_dry_run_of_spec_is_the_specifications_command(
    row: str, version: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"replica --preset gpt-oss-120b-{row} --profile spec --host 0.0.0.0 --port 8000 --dry-run"
    with pytest.raises(SystemExit) as ended:
        main([*words.split(), "--vllm-version", version])
    assert not ended.value.code
    printed = capsys.readouterr()
    assert printed.out == f"vllm serve openai/gpt-oss-120b {SPECIFICATION[row]} --host 0.0.0.0 --port 8000\n"
    assert printed.err == f"warmlane: for vLLM {version} (told)\n"


def test_names_of_the_contract() -> None:
    contract = {f"gpt-oss-120b-{row}" for row in SPECIFICATION} | {"gpt-oss-120b-h200-141-x1", "embedded", "cpu-tiny"}
    assert contract <= set(presets.names())


def test_every_preset_loads_and_recommends_something_with_a_reason() -> None:
    for name, preset in presets.load_all().items():
        assert preset.profile().why.strip(), name
        assert preset.profile().flags == preset.profiles["recommended"].flags, name


def test_names_say_model_gpu_and_count() -> None:
    for name, preset in presets.load_all().items():
        if preset.gpu is not None and name != ANY:
            model = preset.model.rsplit("/", 1)[-1]
            assert name == f"{model.lower()}-{preset.gpu.name}-x{preset.gpu.count}"


def test_parallel_size_uses_every_gpu_of_the_preset() -> None:
    for name, preset in presets.load_all().items():
        for profile in preset.profiles.values():
            if preset.gpu is not None:
                sizes = [profile.flags.get(f"{kind}-parallel-size", 1) for kind in ("tensor", "pipeline", "data")]
                assert prod(int(size) for size in sizes) == preset.gpu.count, name


def test_batched_tokens_are_never_fewer_than_sequences() -> None:
    """vLLM refuses to start otherwise."""
    for name, preset in presets.load_all().items():
        for profile in preset.profiles.values():
            batched, sequences = (profile.flags.get(f"max-num-{what}") for what in ("batched-tokens", "seqs"))
            if batched is not None:
                assert isinstance(batched, int), name
                assert isinstance(sequences, int), name
                assert batched >= sequences, name


def test_no_preset_switches_prefix_caching_off() -> None:
    for name, preset in presets.load_all().items():
        for profile in preset.profiles.values():
            assert "no-enable-prefix-caching" not in profile.flags, name
            assert profile.flags.get("enable-prefix-caching", True) is True, name


def test_two_a100_are_corrected_because_the_specification_does_not_fit() -> None:
    recommended = presets.load("gpt-oss-120b-a100-40-x2").profile()
    assert recommended.flags["gpu-memory-utilization"] == 0.95
    assert recommended.flags["max-num-batched-tokens"] == 2048
    assert "do not start" in recommended.why


def test_unknown_preset_is_one_line_that_lists_the_known_ones() -> None:
    with pytest.raises(PresetError, match=r"^unknown preset 'h100'; presets: .*cpu-tiny.*$"):
        presets.load("h100")


@pytest.mark.parametrize("name", ["../__init__", "", "embedded.toml", "/etc/passwd"])
def test_a_path_is_not_a_preset(name: str) -> None:
    with pytest.raises(PresetError, match="unknown preset"):
        presets.load(name)


def test_unknown_profile_is_one_line_that_lists_the_known_ones() -> None:
    with pytest.raises(PresetError, match=r"^this preset has no profile 'spec'; it has: recommended$"):
        presets.load("embedded").profile("spec")


@pytest.mark.parametrize(
    ("extra", "where"),
    [
        ("colour = 1", "colour"),
        ("[gpu]\nname = 'x'\ncount = 0", "$.gpu.count"),
        ("[profiles.fastest]\nwhy = ''", "fastest"),
        ("[profiles.latency]\nwhy = ''\nflag = 1", "`$.profiles[...]`"),
        ("[profiles.latency]\nwhy = ''\nflags = {a = [1]}", "flags"),
        ("title = 'again'", "not TOML"),
        ("another = " + "9" * 5_000, "not TOML"),
    ],
)
def test_a_wrong_file_is_refused_with_the_path_of_the_key(extra: str, where: str) -> None:
    text = f"{extra}\n{MINIMAL}" if "=" in extra and not extra.startswith("[") else f"{MINIMAL}\n{extra}"
    with pytest.raises(PresetError, match=re.escape(where)) as refused:
        presets.parse(text, "example")
    assert str(refused.value).startswith("preset example: ")
    assert "\n" not in str(refused.value)


def test_a_model_directory_tells_where_it_comes_from() -> None:
    preset = presets.load("cpu-tiny")
    assert preset.has_local_model
    assert preset.model_source
    assert preset.model_name == "tiny"
    assert presets.load("gpt-oss-120b-h100-80-x1").model_name == "openai/gpt-oss-120b"


def test_any_is_for_no_model_and_no_card_of_its_own() -> None:
    preset = presets.load(ANY)
    assert preset.gpu == presets.Gpu(presets.ANY_GPU, 1)
    assert (preset.model, preset.profile().flags) == ("", {})


def test_names_of_the_issue_are_there_and_may_be_written_in_capitals() -> None:
    wanted = {f"gpt-oss-120b-{gpu}" for gpu in ("a100-80-x1", "rtxpro6000-96-x1", "b200-180-x1", "mi300x-192-x1")}
    wanted |= {f"gpt-oss-20b-{gpu}-x1" for gpu in ("rtx4080-16", "rtx4090-24", "l40s-48", "a100-80")}
    wanted |= {f"qwen3-8b-{gpu}-x1" for gpu in ("rtx4090-24", "l40s-48", "a100-80")}
    assert wanted <= set(presets.names())
    assert presets.load("Qwen3-8B-L40S-48-x1") == presets.load("qwen3-8b-l40s-48-x1")


def computed_claims() -> list[tuple[str, str, float, float]]:
    """Preset, profile, and what its `why` says of KV cache and of requests of full length."""
    pattern = re.compile(r"Computed: about ([\d.]+) GiB of KV cache, ([\d.]+) requests of full length")
    return [
        (name, profile, *map(float, found.groups()))
        for name, preset in presets.load_all().items()
        for profile, one in preset.profiles.items()
        if (found := pattern.search(one.why))
    ]


@pytest.mark.parametrize(("name", "profile", "gib", "requests"), computed_claims())
def test_figures_in_the_reasons_are_those_of_the_planner(name: str, profile: str, gib: float, requests: float) -> None:
    preset = presets.load(name)
    assert preset.gpu is not None
    found = plan(Question(preset.model, preset.gpu.name, preset.gpu.count, profile=profile)).chosen
    assert found.memory.kv_cache * preset.gpu.count == pytest.approx(gib, rel=0.02, abs=0.05)
    assert found.concurrency == pytest.approx(requests, rel=0.02, abs=0.05)


def test_every_profile_of_a_gpu_but_spec_and_the_measured_one_has_its_figures() -> None:
    profiles = {
        (name, profile)
        for name, preset in presets.load_all().items()
        for profile in preset.profiles
        if preset.gpu is not None and profile != "spec" and name != ANY
    }
    assert profiles - {claim[:2] for claim in computed_claims()} == {("gpt-oss-120b-h200-141-x1", "recommended")}
