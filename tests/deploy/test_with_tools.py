"""What the tools of others say of `deploy/`, and the script's steps that need a network (make test-deploy)."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from tests.deploy.host import DEPLOY, ROOT, Host, run
from tests.deploy.rule_cases import promtool_tests
from tests.deploy.test_dashboard import QUERIES
from tests.redis_server import free_port, redis_server

pytestmark = pytest.mark.deploy

TOOLS = ROOT / ".cache" / "deploy"
STEPS = (DEPLOY / "install" / "steps.sh").read_text()
INSTALL_SECONDS = 600.0
SHOW_SECONDS = 180.0
START_SECONDS = 60.0
STOP_SECONDS = 30.0


def checked(command: list[str], **options: object) -> str:
    ended = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False, **options)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


# -- Prometheus


def test_prometheus_accepts_the_configuration():
    checked([str(TOOLS / "promtool"), "check", "config", str(DEPLOY / "prometheus" / "prometheus.yml")])


def test_prometheus_accepts_every_query_of_the_dashboard(tmp_path):
    """As recording rules, since that is what promtool reads expressions from."""
    rules = [
        {"record": f"panel:{number}", "expr": filled(query, "1m", "localhost:8000")}
        for number, query in enumerate(QUERIES)
    ]
    path = tmp_path / "rules.yml"
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"{len(rules)} rules found" in checked([str(TOOLS / "promtool"), "check", "rules", str(path)])


def filled(query: str, rate_interval: str, address: str) -> str:
    """As Grafana sends it."""
    return query.replace("$__rate_interval", rate_interval).replace("$address", address).replace("$tenant", ".*")


def test_alerts_fire_when_they_should_and_only_then(tmp_path):
    rules = DEPLOY / "prometheus" / "rules"
    checked([str(TOOLS / "promtool"), "check", "rules", *map(str, rules.iterdir())])
    path = tmp_path / "cases.yml"
    path.write_text(json.dumps(promtool_tests([str(file) for file in rules.iterdir()])))
    checked([str(TOOLS / "promtool"), "test", "rules", str(path)])


EMPTY = {
    "ALERTS": "no alert fires",
    'warmlane_upstream_attempts_total{result!~"completed|client_left|rejected"}': "no flight fails",
    "warmlane_replays_total": "no replica is lost",
    "warmlane_tenant_waiting_requests": "nobody waits",
    "baseline_1d": "an hour of traffic comes first",
}
"""Queries with these have no answer in the fleet of the test, and why."""

KEYS = {"acme": "", "small": "requests_per_minute = 1", "metrics": "models = []"}
"""Keys, each the name of its tenant, and their limits."""

CONFIG = """
[auth]
keys_file = "keys.toml"
required = true
[routing]
shadow = ["least-work"]
[redis]
url = "{redis}"
[discovery]
redis = true
[admin]
allow = ["127.0.0.0/8"]
[tracing]
endpoint = "http://127.0.0.1:9"
"""
"""Nobody takes the traces, so they are counted as lost."""


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[str], list[str]]]:
    """Gateways and replicas: `warmlane up`, and one of two processes beside it, which share a Redis."""
    monkeypatch.setenv("WARMLANE_REDIS_SECRET", "0" * 64)
    config = tmp_path / "warmlane.toml"
    (tmp_path / "keys.toml").write_text(
        "\n".join(
            f'[[keys]]\nname = "{name}"\nsha256 = "{hashlib.sha256(name.encode()).hexdigest()}"\n{limits}'
            for name, limits in KEYS.items()
        )
    )
    command = [sys.executable, "-c", "from gateway.cli import main; main()"]
    with redis_server(tmp_path) as redis:
        config.write_text(CONFIG.replace("{redis}", redis.url))
        with started([*command, "up", "--port", "0", "--config", str(config)]) as output:
            greeting = next(line for line in output if "serves" in line)
            first, *replicas = re.findall(r"http://([0-9.:]+\d)", greeting)
            second = f"127.0.0.1:{free_port()}"
            serve = ["serve", "--workers", "2", "--port", second.split(":")[1], "--config", str(config)]
            with started([*command, *serve, *(f"--replica=http://{replica}" for replica in replicas)]):
                wait_until_ready(f"http://{second}")
                yield [first, second], replicas


def wait_until_ready(gateway: str) -> None:
    until = time.monotonic() + START_SECONDS
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{gateway}/ready").status_code == 200:
                return
        assert time.monotonic() < until, "the second gateway does not become ready"
        time.sleep(0.1)


@pytest.fixture
def prometheus(fleet: tuple[list[str], list[str]], tmp_path: Path) -> Iterator[str]:
    """The URL of one with the configuration of the compose file."""
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(tmp_path / "*.yml")]
    for job, targets in zip(config["scrape_configs"], fleet, strict=True):
        job.pop("dns_sd_configs", None)
        job["static_configs"] = [{"targets": targets}]
    config["scrape_configs"][0]["authorization"] = {"credentials": "metrics"}
    for file in (DEPLOY / "prometheus" / "rules").iterdir():
        (tmp_path / file.name).write_text(file.read_text().replace("interval: 1m", "interval: 1s"))
    path = tmp_path / "prometheus.yaml"
    path.write_text(yaml.safe_dump(config))
    listens = f"127.0.0.1:{free_port()}"
    command = [str(TOOLS / "prometheus"), f"--config.file={path}", f"--web.listen-address={listens}"]
    with started([*command, f"--storage.tsdb.path={tmp_path}/series"]):
        yield f"http://{listens}"


def test_every_panel_shows_something_under_traffic(fleet, prometheus):
    (gateways, (replica, *_)), url = fleet, prometheus
    gateway, other = (f"http://{one}" for one in gateways)
    prompts = ["".join(f"{first}{number} " for number in range(1000)) for first in range(4)]
    due = [query for query in QUERIES if not any(name in query for name in EMPTY)]
    assert len(due) > len(QUERIES) - 6
    deadline = time.monotonic() + SHOW_SECONDS
    for prompt in itertools.cycle(prompts):
        assert time.monotonic() < deadline, due
        assert ask(gateway, "acme", prompt) == 200
        assert ask(other, "acme", prompt) == 200
        assert ask(gateway, "small", prompt) in (200, 429)
        assert ask(gateway, "nobody", prompt) == 401
        due = [query for query in due if not values(url, filled(query, "30s", replica))]
        if not due:
            break
    firing = httpx.get(f"{url}/api/v1/rules", params={"type": "alert"}).json()["data"]["groups"]
    assert {rule["health"] for group in firing for rule in group["rules"]} == {"ok"}


def ask(gateway: str, key: str, prompt: str) -> int:
    chat = {"model": "embedded", "messages": [{"role": "user", "content": prompt}], "max_tokens": 4, "stream": True}
    chat["stream_options"] = {"include_usage": True}
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{gateway}/v1/chat/completions", json=chat, headers=headers).status_code


def values(url: str, query: str) -> list[float]:
    """What Prometheus answers, without what is no number (a share of nothing)."""
    with contextlib.suppress(httpx.TransportError):  # it is still starting
        answer = httpx.get(f"{url}/api/v1/query", params={"query": query}).json()
        found = [float(one["value"][1]) for one in answer["data"]["result"]]
        return [value for value in found if not math.isnan(value)]
    return []


@contextlib.contextmanager
def started(command: list[str]) -> Iterator[Iterator[str]]:
    """Lines of a program's output while it runs."""
    program = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert program.stdout is not None
    with program.stdout:
        try:
            yield program.stdout
        finally:
            program.terminate()
            assert program.wait(STOP_SECONDS) == 0


# -- compose


def composed(*profiles: str, **environment: str) -> dict[str, dict[str, object]]:
    """Services as docker-compose understands the file. Its version 1, which Debian has, does not know `name`."""
    text = re.sub(r"^name:.*\n", "", (DEPLOY / "compose.yaml").read_text(), flags=re.MULTILINE)
    command = ["docker-compose", "--project-directory", str(DEPLOY), "--file", "-"]
    for profile in profiles:
        command += ["--profile", profile]
    output = checked([*command, "config"], input=text, env={"PATH": "/usr/bin:/bin", **environment})
    services: dict[str, dict[str, object]] = yaml.safe_load(output)["services"]
    return services


def test_docker_compose_accepts_every_profile():
    everything = composed("embedded", "vllm", "monitoring", "redis", "several")
    assert set(everything) == set(yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"])


def test_variables_choose_model_flags_and_versions():
    replica = composed("vllm", MODEL="openai/gpt-oss-20b", VLLM_FLAGS="--max-num-seqs 8", VLLM_TAG="v0.29.0")[
        "replica-1"
    ]
    assert str(replica["command"]).startswith("--model openai/gpt-oss-20b --max-num-seqs 8 --enable-prefix-caching")
    assert replica["image"] == "vllm/vllm-openai:v0.29.0"


# -- systemd


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Folder with the units as the script installs them, for programs that are there."""
    host = Host(tmp_path)
    host.add_program("uv/bin/uv")
    host.add_program("gateway/bin/warmlane")
    assert host.install("--only", "gateway", "--part", "3").returncode == 0
    return host.root / "etc/systemd/system"


@pytest.mark.parametrize(("unit", "exposure"), [("warmlane.service", 15), ("warmlane-replica@.service", 50)])
def test_systemd_accepts_the_units_and_finds_them_closed(installed, unit, exposure):
    """Exposure in tenths: 100 is a service with everything open."""
    path = str(installed / unit)
    ended = run(["systemd-analyze", "verify", "--man=no", path])
    assert (ended.returncode, ended.stderr) == (0, "")
    checked(["systemd-analyze", "security", "--offline=yes", f"--threshold={exposure}", "--no-pager", path])


def test_systemd_accepts_the_unit_that_resumes(tmp_path):
    host = Host(tmp_path / "with a space")
    host.prefix = tmp_path / "opt"  # which may have none
    assert host.install("--part", "2", "--resume-at-boot").returncode == 3
    ended = run(
        ["systemd-analyze", "verify", "--man=no", str(host.root / "etc/systemd/system/warmlane-install.service")]
    )
    assert (ended.returncode, ended.stderr) == (0, "")


# -- steps of the script


def test_the_packages_of_part_one_exist():
    """On the system where this runs, Debian or Ubuntu."""
    packages = re.search(r"^PACKAGES='(.*)'$", STEPS, re.MULTILINE)[1].split()
    checked(["apt-get", "install", "--simulate", "--yes", *packages])


def test_the_environments_are_made(tmp_path, monkeypatch):
    """With the real uv; a small package stands in for vLLM, and the Python at hand for 3.12."""
    monkeypatch.setenv("WARMLANE_COMPILE", "0")  # tests/test_setup.py and `make test-compiled` are about that
    host = Host(tmp_path)
    host.prefix.mkdir()
    (host.prefix / "uv").symlink_to(TOOLS / "uv")
    options = ("--part", "3", "--python", sys.executable, "--vllm-package", "iniconfig>=2")
    ended = host.install(*options)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "step" not in ended.stderr
    version = checked([str(host.prefix / "gateway/bin/warmlane"), "version"])
    assert version.startswith("warmlane ")
    checked([str(host.prefix / "vllm/bin/python"), "-c", "import iniconfig"])
    assert not (ROOT / "warmlane.egg-info").exists()

    again = host.install(*options)
    assert again.stdout.count("done already") == 5
    assert host.install("--check", *options).returncode == 0

    upgraded = host.install("--upgrade", "--dry-run", *options).stdout
    for name in ("uv", "vllm", "gateway"):
        assert f"part 3, {name}: done" not in upgraded
