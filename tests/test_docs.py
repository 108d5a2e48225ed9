"""What the documents say is what the tree does: keys, policies, metrics, commands, and all examples that can run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
import typer
from msgspec import NODEFAULT, structs

from gateway.cli import cli
from gateway.config import Config, load
from gateway.core.admission import ShedReason
from gateway.core.model import HealthState, Outcome, Reason
from gateway.core.settings import POLICY_NAMES
from gateway.families import FAMILIES
from gateway.proxy.endpoints import ENDPOINTS
from gateway.request_log import RequestRecord

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
METRICS = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
CONFIGURATION = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
PRESETS = (ROOT / "docs" / "presets.md").read_text(encoding="utf-8")
CLIENTS = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
START_SECONDS = 60.0


def rows(text: str) -> list[list[str]]:
    """Cells of every table row whose first cell is code."""
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


# -- configuration


def documented_keys() -> dict[str, str]:
    """`table.key` -> default as written."""
    found: dict[str, str] = {}
    for section in re.split(r"^## ", CONFIGURATION, flags=re.MULTILINE)[1:]:
        table = re.match(r"`\[+([a-z]+)\]+`", section)[1]
        found |= {f"{table}.{names(row[0])[0]}": row[1] for row in rows(section)}
    return found


def configured_keys() -> dict[str, str]:
    found: dict[str, str] = {}
    for table in structs.fields(Config):
        settings = table.type.__args__[0] if table.name == "replicas" else table.type
        for key in structs.fields(settings):
            found[f"{table.name}.{key.name}"] = "required" if key.default is NODEFAULT else written(key.default)
    return found


def written(default: object) -> str:
    return "not set" if default is None else f"`{json.dumps(default)}`"


def test_every_configuration_key_is_documented_with_its_default_and_no_other():
    assert documented_keys() == configured_keys()


def test_documented_defaults_are_toml():
    for key, default in documented_keys().items():
        if default not in ("required", "not set"):
            tomllib.loads(f"{key.partition('.')[2]} = {default.strip('`')}")


def test_the_example_file_of_the_readme_is_accepted(tmp_path):
    (example,) = blocks(README, "toml")
    path = tmp_path / "warmlane.toml"
    path.write_text(example)
    assert [replica.url for replica in load(path).replicas] == ["http://gpu-1:8000", "http://gpu-2:8000"]


# -- policies, metrics, log, commands


def test_every_policy_is_in_the_readme_and_in_the_reference():
    table = README.partition("## Policies")[2].partition("\n## ")[0]
    assert sorted(names(row[0])[0] for row in rows(table)) == sorted(POLICY_NAMES)
    (row,) = [row for row in rows(CONFIGURATION) if row[0] == "`policy`"]
    assert sorted(names(row[2])) == sorted(POLICY_NAMES)
    assert f'`"{Config().routing.policy}"`' == row[1]


def test_every_metric_is_documented_with_its_kind_and_labels_and_no_other():
    documented = {
        names(row[0])[0]: (row[1], tuple(names(row[2]))) for row in rows(METRICS) if row[0].startswith("`warmlane_")
    }
    assert documented == {family.name: (family.kind, family.labels) for family in FAMILIES}


def test_every_label_value_is_documented():
    for value in [*Outcome, *Reason, *HealthState, *ShedReason]:
        assert f"`{value.value}`" in METRICS


def test_every_field_of_the_log_is_documented_and_no_other():
    section, _, decisions = METRICS.partition("## The request log")[2].partition("## The decision log")
    documented = [name for row in rows(section) for name in names(row[0])]
    assert sorted([*documented, "decisions"]) == sorted(RequestRecord.__struct_fields__)
    assert sorted(name for row in rows(decisions) for name in names(row[0])) == sorted(
        ("policy", "reason", "replica", "candidates", "ranking")
    )


def test_every_command_is_in_the_readme():
    for command in typer.main.get_command(cli).commands:  # type: ignore[attr-defined]
        assert re.search(rf"`(warmlane )?{command}[ `]", README), command


def test_every_link_leads_somewhere():
    pages = (ROOT / "README.md", ROOT / "THREATS.md", ROOT / "deploy" / "README.md", *(ROOT / "docs").glob("*.md"))
    for path in pages:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_every_test_that_holds_a_promise_exists():
    named = re.findall(r"`(tests/[a-z_/]+.py)`", (ROOT / "THREATS.md").read_text(encoding="utf-8"))
    assert len(named) > 5
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_path_that_the_readme_names_exists():
    for path in names(README.partition("## Where things are")[2]):
        assert (ROOT / path).exists(), path


# -- the examples, run


@pytest.fixture(scope="module")
def gateway() -> Iterator[str]:
    """Base URL of `warmlane up` on a free port."""
    up = subprocess.Popen(
        [sys.executable, "-c", "from gateway.cli import main; main()", "up", "--port", "0"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert up.stdout is not None
    with up.stdout:
        greeting = next(line for line in up.stdout if "serves" in line)
        yield re.search(r"serves (\S+)", greeting)[1]
        up.terminate()
        assert up.wait(START_SECONDS) == 0


def here(example: str, gateway: str) -> str:
    """An example with the address that the gateway of this test has."""
    assert "http://127.0.0.1:8000" in example
    return example.replace("http://127.0.0.1:8000", gateway)


def request_of(example: str) -> tuple[str, bytes]:
    """Path and body of a `curl` example, for machines without curl."""
    body = re.search(r"-d ('.*')", example)[1]  # a word of the shell, which may have `$(...)` in it
    path = re.search(r"http://127.0.0.1:8000(/\S+)", example)[1]
    return path, subprocess.run(["sh", "-c", f"printf %s {body}"], capture_output=True, check=True).stdout


@pytest.mark.parametrize("example", [block for block in blocks(README, "sh") if "curl" in block])
def test_curl_examples_are_answered(gateway, example):
    path, body = request_of(example)
    answer = httpx.post(f"{gateway}{path}", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["message"]["content"]
    for header in ("x-warmlane-replica", "x-warmlane-cached-tokens", "x-request-id"):
        assert header in answer.headers
        assert f"`{header}`" in README


@pytest.mark.parametrize("example", blocks(README, "python"))
def test_python_examples_run(gateway, example):
    ended = subprocess.run(
        [sys.executable, "-c", here(example, gateway)], capture_output=True, timeout=START_SECONDS, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert ended.stdout.strip()


@pytest.mark.parametrize("example", [block for block in blocks(README, "sh") if "warmlane route" in block])
def test_the_dry_run_example_prints_a_table(gateway, example):
    warmlane = f"{sys.executable} -c 'from gateway.cli import main; main()'"
    command = here(example, gateway).replace(".venv/bin/warmlane", warmlane)
    ended = subprocess.run(["sh", "-c", command], capture_output=True, timeout=START_SECONDS, check=True)
    assert ended.stdout.startswith(b"policy cache-cost: ")


def test_every_endpoint_of_the_readme_answers(gateway):
    table = README.partition("## Operating it")[2].partition("\n## ")[0]
    for row in rows(table):
        method, path = names(row[0])[0].split()
        body = b'{"model": "embedded", "messages": []}' if method == "POST" else None
        assert httpx.request(method, f"{gateway}{path}", content=body).status_code == 200, path


def test_what_the_embedded_replica_lacks_is_documented_and_answered_like_vllm(gateway):
    section = PRESETS.partition("## The embedded replica")[2].partition("\n## ")[0]
    lacking = []
    for path in sorted(endpoint.path for endpoint in ENDPOINTS.values()):
        answer = httpx.post(f"{gateway}{path}", json={"model": "embedded"})
        if answer.status_code == 404:
            assert answer.json() == {"detail": "Not Found"}
            lacking.append(path)
    assert lacking == sorted(name for name in names(section) if re.fullmatch(r"/[a-z0-9/]+", name))


def test_the_replay_of_the_readme_runs():
    commands = re.findall(r"^    \.venv/bin/warmlane (replay .*)$", README, re.MULTILINE)
    assert len(commands) == 1
    program = [sys.executable, "-c", "from gateway.cli import main; main()", *commands[0].split(), "--limit", "50"]
    assert b"cache-cost" in subprocess.run(program, capture_output=True, timeout=START_SECONDS, check=True).stdout


def test_the_clients_of_the_readme_are_set_as_they_were_run():
    """Each word of code with an address, a key or a name in it stands on the page of the clients too."""
    table = README.partition("| tool | setting |")[2].partition("\n\n")[0]
    page = " ".join(CLIENTS.split())
    found = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    assert len(found) >= 8
    for tool, setting in found:
        assert tool.casefold() in page.casefold()
        for code in names(setting):
            for word in re.split(r" (?=[A-Z_]+=|aider|claude)", code):
                assert word in page or word.replace("=", " = ", 1) in page, (tool, word)


def test_the_examples_are_there():
    assert len(blocks(README, "sh")) == 3
    assert len(blocks(README, "python")) == 1
    assert msgspec.json.decode(request_of(blocks(README, "sh")[0])[1])["model"] == "embedded"
