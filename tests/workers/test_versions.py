"""What a version of vLLM does not know is found before it starts."""

from __future__ import annotations

import pytest

from workers import presets
from workers.command_line import GATEWAY_FLAGS
from workers.presets import PresetError
from workers.presets.versions import (
    NEWEST,
    OLDEST,
    Version,
    VersionError,
    known,
    parse_version,
    unknown_flags,
    unknown_variables,
)

ALL = [(name, preset, profile) for name, preset in presets.load_all().items() for profile in preset.profiles]
VLLM = [(name, preset, profile) for name, preset, profile in ALL if preset.program == "vllm"]


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("0.32", (0, 32, 0)),
        ("v0.18.0", (0, 18, 0)),
        ("0.24.1+cu129", (0, 24, 1)),
        ("0.29.0rc2", (0, 29, 0)),
        ("1.0.0.dev3", (1, 0, 0)),
    ],
)
def test_versions_are_read_as_vllm_prints_them(text: str, version: tuple[int, int, int]) -> None:
    assert parse_version(text) == Version(*version)


@pytest.mark.parametrize("text", ["", "newest", "0", "0.x", "0.18.a.b.c.d-e", "1"])
def test_other_text_is_not_a_version(text: str) -> None:
    if text == "0.18.a.b.c.d-e":
        assert parse_version(text) == (0, 18, 0)
        return
    with pytest.raises(VersionError, match="is not a version of vLLM"):
        parse_version(text)


@pytest.mark.parametrize(("name", "preset", "profile"), VLLM, ids=[f"{name}-{profile}" for name, _, profile in VLLM])
def test_the_newest_version_knows_everything_that_presets_use(name: str, preset: presets.Preset, profile: str) -> None:
    chosen = preset.profile(profile, NEWEST)
    flags = chosen.flags if profile == "spec" else {**chosen.flags, **GATEWAY_FLAGS, "kv-events-config": "{}"}
    assert unknown_flags(flags, NEWEST) == []
    assert unknown_variables(chosen.environment, NEWEST) == []


@pytest.mark.parametrize("profile", ["spec", "recommended"])
def test_the_oldest_version_knows_what_the_specifications_presets_use(profile: str) -> None:
    for name, preset in presets.load_all().items():
        if "spec" in preset.profiles:
            chosen = preset.profile(profile, OLDEST)
            assert unknown_flags({**chosen.flags, **GATEWAY_FLAGS}, OLDEST) == [], name
            assert unknown_variables(chosen.environment, OLDEST) == [], name


def test_a_flag_before_its_time_is_refused_with_the_version_that_brought_it() -> None:
    (line,) = unknown_flags({"prefix-cache-retention-interval": 0, "max-model-len": 1}, Version(0, 24))
    assert line.startswith("vLLM 0.24.0 does not know --prefix-cache-retention-interval (vLLM 0.29.0 and later)")


def test_a_variable_that_is_gone_is_refused_with_what_took_its_place() -> None:
    (line,) = unknown_variables({"VLLM_MXFP4_USE_MARLIN": "1", "OMP_NUM_THREADS": "1"}, NEWEST)
    assert line.startswith("vLLM 0.32.0 does not know VLLM_MXFP4_USE_MARLIN (vLLM 0.18.0 until before ")
    assert "--moe-backend marlin" in line


def test_a_misspelt_flag_is_refused_by_every_version() -> None:
    assert len(unknown_flags({"max-model-length": 1}, NEWEST)) == 1


def test_the_list_is_in_order_of_versions() -> None:
    for entry in [*known().flags.values(), *known().variables.values()]:
        assert entry.gone is None or parse_version(entry.since) < parse_version(entry.gone)


# -- adaptations


def test_window_retention_is_set_for_the_versions_that_read_it() -> None:
    preset = presets.load("gpt-oss-120b-h100-80-x2")
    name = "VLLM_PREFIX_CACHE_RETENTION_INTERVAL"
    environments = {
        text: preset.profile("recommended", parse_version(text)).environment for text in ("0.22", "0.28", "0.29")
    }
    assert environments == {"0.22": {}, "0.28": {name: "0"}, "0.29": {}}
    assert preset.profile("recommended").environment == {name: "0"}
    assert preset.profile("spec", Version(0, 24)).environment == {}


def test_a_variable_may_stand_for_a_flag_in_older_versions() -> None:
    preset = presets.load("gpt-oss-120b-b200-180-x1")
    old, new, unsure = (preset.profile("recommended", version) for version in (OLDEST, NEWEST, None))
    assert "moe-backend" not in old.flags
    assert old.environment["VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8"] == "1"
    assert new.flags["moe-backend"] == unsure.flags["moe-backend"] == "flashinfer_trtllm"
    assert "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8" not in {**new.environment, **unsure.environment}


def test_an_adaptation_of_no_version_is_refused() -> None:
    text = 'title = "t"\nprogram = "vllm"\nmodel = "m"\n[profiles.recommended]\nwhy = "w"\n'
    text += '[[adaptations]]\nsince = "soon"\nbelow = "0.2"\nwhy = "w"'
    with pytest.raises(PresetError, match="preset example: 'soon' is not a version"):
        presets.parse(text, "example")
