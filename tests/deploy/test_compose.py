"""The compose file and the image: what they name exists, and they agree with each other and with the presets."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import yaml

from gateway.config import load
from tests.deploy.host import DEPLOY, ROOT
from workers import presets
from workers.launch import command_line

COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
DOCKERFILE = (DEPLOY / "docker" / "Dockerfile").read_text()
PRESET = "gpt-oss-120b-h200-141-x1"
VLLM = ("replica-1", "replica-2")
SEVERAL = ("gateway-1", "gateway-2")


def with_defaults(text: str) -> str:
    """As compose reads it where no variable is set."""
    return re.sub(r"\$\{[A-Z0-9_]+:-([^}]*)\}", r"\1", text)


@pytest.mark.parametrize("name", SERVICES)
def test_what_a_service_names_exists(name):
    service = SERVICES[name]
    for network in service["networks"]:
        assert network in COMPOSE["networks"]
    for volume in service.get("volumes", ()):
        source = volume.partition(":")[0]
        assert (DEPLOY / source).exists() if source.startswith(".") else source in COMPOSE["volumes"]
    for other in service.get("depends_on", ()):
        assert other in SERVICES
    if "build" in service:
        assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()


def test_every_foreign_image_has_a_version():
    images = [with_defaults(service["image"]) for service in SERVICES.values() if "build" not in service]
    assert len(images) == 6
    for image in images:
        assert re.fullmatch(r"[a-z/-]+:v?\d[\w.-]*", image), image


def test_only_the_gateway_runs_unless_a_profile_is_asked_for():
    assert [name for name, service in SERVICES.items() if "profiles" not in service] == ["gateway"]


def test_ports_are_open_to_this_machine_only():
    for name, service in SERVICES.items():
        for port in service.get("ports", ()):
            assert with_defaults(port).startswith("127.0.0.1:"), name


def test_replicas_have_the_name_that_the_gateway_looks_up():
    config = load(DEPLOY / "docker" / "warmlane.toml")
    assert config.discovery.dns is not None
    host = re.fullmatch(r"http://([a-z]+):8000", config.discovery.dns)[1]
    assert "replicas" in SERVICES["gateway"]["networks"]
    for name in ("embedded", *VLLM):
        assert SERVICES[name]["networks"]["replicas"]["aliases"] == [host]


def test_vllm_has_the_flags_of_the_preset():
    expected = shlex.split(command_line(presets.load(PRESET), host="0.0.0.0", port=8000).shell)[3:]
    events = expected.index("--kv-events-config")
    del expected[events : events + 2]
    words = shlex.split(with_defaults(SERVICES["replica-1"]["command"]))
    assert words == ["--model", presets.load(PRESET).model, *expected]
    assert PRESET in (DEPLOY / "compose.yaml").read_text()


@pytest.mark.parametrize("name", VLLM)
def test_vllm_gets_gpus_and_shared_memory(name):
    service = SERVICES[name]
    assert service["ipc"] == "host"
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}


def test_no_two_replicas_share_a_gpu():
    gpus = [with_defaults(SERVICES[name]["environment"]["CUDA_VISIBLE_DEVICES"]) for name in VLLM]
    assert len(set(gpus)) == len(gpus)


@pytest.mark.parametrize(
    ("name", "file"), [("gateway", "warmlane.toml"), *((one, "warmlane-several.toml") for one in SEVERAL)]
)
def test_the_gateway_has_time_to_drain(name, file):
    server = load(DEPLOY / "docker" / file).server
    assert f"./docker/{file}:" in SERVICES[name]["volumes"][0]
    assert float(SERVICES[name]["stop_grace_period"].rstrip("s")) > server.drain_delay_seconds + server.drain_seconds


# -- several gateways


def test_the_gateways_of_the_profile_share_the_redis_that_is_there():
    config = load(DEPLOY / "docker" / "warmlane-several.toml")
    assert config.redis.url == "redis://redis:6379"
    assert "several" in SERVICES["redis"]["profiles"]
    assert config.discovery == load(DEPLOY / "docker" / "warmlane.toml").discovery
    for name in SEVERAL:
        assert config.redis.secret_env in SERVICES[name]["environment"]
        assert config.auth.isolation_secret_env in SERVICES[name]["environment"]
        assert SERVICES[name]["depends_on"] == ["redis"]


def test_the_balancer_knows_both_gateways_and_waits_longer_than_they_do():
    rules = (DEPLOY / "docker" / "haproxy.cfg").read_text()
    assert re.findall(r"^    server (\S+) (\S+):8000$", rules, re.MULTILINE) == [(one, one) for one in SEVERAL]
    assert SERVICES["balancer"]["depends_on"] == list(SEVERAL)
    config = load(DEPLOY / "docker" / "warmlane-several.toml")
    assert "timeout server 11m" in rules
    assert config.upstream.first_byte_timeout_seconds < 11 * 60
    (kept,) = re.findall(r"timeout http-keep-alive (\d+)s", rules)
    assert float(kept) < config.server.keep_alive_seconds
    assert "option httpchk GET /ready" in rules
    assert "check inter 1s fall 1" in rules
    assert config.server.drain_delay_seconds >= 3.0  # a look that is just over, a second, and one that takes its time


def test_the_embedded_replica_listens_where_the_gateway_looks():
    assert SERVICES["embedded"]["command"][:3] == ["replica", "--preset", "embedded"]
    assert SERVICES["embedded"]["command"][-2:] == ["--port", "8000"]


# -- the image


def test_what_is_copied_into_the_image_exists_and_is_not_ignored():
    copied = [word for line in re.findall(r"^COPY (?!--)(.*)$", DOCKERFILE, re.MULTILINE) for word in line.split()[:-1]]
    let_in = re.findall(r"^!(.*)$", (DEPLOY / "docker" / "Dockerfile.dockerignore").read_text(), re.MULTILINE)
    assert sorted(copied) == sorted(let_in)
    assert [name for name in copied if not (ROOT / name).exists()] == []


def test_script_and_image_build_from_the_same_sources():
    sources = re.search(r"^SOURCES='(.*)'$", (DEPLOY / "install" / "steps.sh").read_text(), re.MULTILINE)[1].split()
    for name in sources:
        assert re.search(rf"^COPY .*\b{re.escape(name)}\b", DOCKERFILE, re.MULTILINE), name


def test_the_image_runs_as_nobody_special_and_says_whether_it_lives():
    last = DOCKERFILE.rpartition("\nFROM ")[2]
    assert re.search(r"^USER [1-9]\d*:[1-9]\d*$", last, re.MULTILINE)
    assert "HEALTHCHECK" in last
    assert "http://127.0.0.1:8000/health" in last
    assert 'ENTRYPOINT ["warmlane"]' in last


# -- Prometheus


def test_prometheus_asks_the_gateway_and_every_replica():
    jobs = {
        job["job_name"]: job
        for job in yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    }
    (target,) = jobs["gateway"]["static_configs"][0]["targets"]
    assert target == "gateway:8000"
    (names,) = jobs["replicas"]["dns_sd_configs"]
    assert (names["names"], names["type"], names["port"]) == (["replicas"], "A", 8000)
