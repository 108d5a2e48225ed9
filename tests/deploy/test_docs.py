"""What docs/install.md says of script and compose file is what they do."""

from __future__ import annotations

import re

import yaml

from tests.deploy.host import DEPLOY, ROOT
from workers import presets

PAGE = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
COMPOSE = (DEPLOY / "compose.yaml").read_text()
SERVICES = yaml.safe_load(COMPOSE)["services"]


def test_the_options_of_the_script_that_are_named_exist():
    accepted = set(re.findall(r"^  (--[a-z-]+)", (DEPLOY / "install.sh").read_text(), re.MULTILINE))
    commands = re.findall(r"install\.sh[^`\n]*", PAGE)
    named = {option for command in commands for option in re.findall(r"--[a-z-]+", command)}
    named |= {word for word in re.findall(r"`(--[a-z-]+)[^`]*`", PAGE) if word not in ("--scale",)}
    assert {"--check", "--dry-run", "--resume", "--only", "--upgrade"} <= named
    assert named <= accepted


def test_every_variable_of_the_compose_file_is_in_the_table_and_no_other():
    used = set(re.findall(r"\$\{([A-Z0-9_]+)", COMPOSE))
    for name in ("gateway", "gateway-1"):
        used |= set(SERVICES[name]["environment"])
    table = PAGE.partition("| variable |")[2].partition("\n\n")[0]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`([A-Z0-9_]+)`", row[0])} == used


def test_the_profiles_that_are_named_exist():
    there = {profile for service in SERVICES.values() for profile in service.get("profiles", ())}
    for text in (PAGE, COMPOSE):
        assert set(re.findall(r"--profile ([a-z]+)", text)) <= there
    assert "The profile `redis`" in PAGE
    for service in re.findall(r"--scale ([a-z]+)=", PAGE):
        assert service in SERVICES


def test_the_flags_of_vllm_are_known():
    known = presets.load("gpt-oss-120b-h200-141-x1")
    command = next(line for line in PAGE.splitlines() if "vllm serve" in line)
    assert known.model in command
    for option in ("--enable-prefix-caching", "--enable-prompt-tokens-details"):
        assert PAGE.count(option) == 2


def test_images_have_the_versions_of_the_compose_file():
    (image,) = re.findall(r"vllm/vllm-openai:(\S+)", PAGE)
    assert f"VLLM_TAG:-{image}}}" in COMPOSE
