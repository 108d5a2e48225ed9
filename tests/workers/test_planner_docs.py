"""The page "choose hardware" does what it says: its commands run, its lists are those of the code."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from gateway.cli import main
from workers import presets
from workers.command_line import flag_words
from workers.planner.hardware import GPUS
from workers.planner.models import bundled
from workers.planner.rules import RULES

DOCS = Path(__file__).parents[2] / "docs"
HARDWARE = (DOCS / "hardware.md").read_text(encoding="utf-8")
PRESETS = (DOCS / "presets.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"^```sh\n(.*?)^```$", HARDWARE, re.M | re.S) for line in block.splitlines()]


def rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def names(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def run(command: str, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    program, *words = shlex.split(command)
    assert program == ".venv/bin/warmlane"
    at = words.index("--") if "--" in words else len(words)
    with pytest.raises(SystemExit) as ended:
        main([*words[:at], *more, *words[at:]])
    assert not ended.value.code
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_runs(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command, capsys).strip()


def test_the_sentences_beside_the_commands_are_true(capsys: pytest.CaptureFixture[str]) -> None:
    plans = [command for command in COMMANDS if " plan " in command]
    first, spec, four, pcie, latency, own, sessions, measured = (
        json.loads(run(command, capsys, "--json")) for command in plans
    )
    assert first["fits"]
    assert not spec["fits"]
    assert spec["remedies"]
    assert (four["replicas"], four["tensor_parallel"]) == (2, 2)
    assert (pcie["tensor_parallel"], pcie["pipeline_parallel"]) == (1, 2)
    assert latency["tensor_parallel"] == 4
    assert "--max-num-seqs 64" in own["flags"]
    assert "W12" in [one["code"] for one in sessions["warnings"]]
    assert measured["weights_source"] == "measured"


def test_gpt_oss_120b_fits_where_the_table_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    counts = {"one": 1, "two": 2, "four": 4}
    for gpus, _ in rows(HARDWARE.partition("## Which GPU for gpt-oss-120b")[2].partition("\n## ")[0]):
        for gpu in names(gpus):
            for count in (number for word, number in counts.items() if word in gpus.rpartition(":")[2]):
                command = f".venv/bin/warmlane plan --model openai/gpt-oss-120b --gpu {gpu} --count {count}"
                plan = json.loads(run(command, capsys, "--json"))
                assert plan["fits"], command
                if (gpu, count) in (("a100-80", 2), ("a100-80", 4)):
                    assert (plan["tensor_parallel"], plan["replicas"]) == (2, count // 2)
                    assert int(plan["concurrent_requests"]) == 27


def test_every_gpu_model_and_finding_is_documented_and_no_other() -> None:
    models, gpus = re.search(r"^Models: (.*?)GPUs: (.*?)^$", HARDWARE, re.M | re.S).groups()  # type: ignore[union-attr]
    assert names(gpus) == list(GPUS)
    assert sorted(name.rsplit("/")[-1].lower() for name in names(models) if "/" in name) == bundled()
    table = HARDWARE.partition("## Findings")[2]
    assert [names(row[0])[0] for row in rows(table)] == list(RULES)


def test_the_table_of_presets_is_the_data() -> None:
    documented = [
        (names(row[0])[0], names(row[1])[0], row[2].strip("`")) for row in rows(PRESETS.partition("## Flags")[2])
    ]
    assert documented == [
        (name, profile, shlex.join(flag_words(preset.profiles[profile].flags)).replace("|", "\\|"))
        for name, preset in presets.load_all().items()
        for profile in preset.profiles
    ]


def test_every_profile_is_explained() -> None:
    explained = {names(row[0])[0] for row in rows(PRESETS.partition("## Versions")[0])}
    assert explained == {profile for preset in presets.load_all().values() for profile in preset.profiles}
