"""The Grafana dashboard: every metric and label in its queries exists, and Grafana finds it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest
import yaml

from gateway.telemetry import FAMILIES
from tests.deploy.host import DEPLOY

DASHBOARD = json.loads((DEPLOY / "grafana" / "dashboards" / "warmlane.json").read_text())
PROVISIONING = DEPLOY / "grafana" / "provisioning"
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
SCRAPED_LABELS = {"instance", "job"}
START_SECONDS = 60.0


def metrics(prefix: str) -> set[str]:
    return {name for query in QUERIES for name in re.findall(rf"\b{prefix}[a-z_]+", query)}


def test_every_metric_of_the_gateway_exists():
    series = set()
    for family in FAMILIES:
        endings = ("_bucket", "_sum", "_count") if family.kind == "histogram" else ("",)
        series |= {f"{family.name}{ending}" for ending in endings}
    assert len(metrics("warmlane_")) > 10
    assert metrics("warmlane_") <= series


def test_labels_are_those_of_the_metrics():
    labels = {family.name: {*family.labels, "le"} for family in FAMILIES}
    for query in QUERIES:
        for name, matchers in re.findall(r"(warmlane_[a-z_]+)\{([^}]*)\}", query):
            assert set(re.findall(r"(\w+)[!=]", matchers)) <= labels[name]
        known = {
            label for name in re.findall(r"warmlane_[a-z_]+", query) for label in labels[name.removesuffix("_bucket")]
        }
        for by in re.findall(r"by \(([^)]*)\)", query):
            if "warmlane_" in query:
                assert {label.strip() for label in by.split(",")} <= known


@pytest.fixture
def page() -> Iterator[str]:
    """`/metrics` of a replica that answers like vLLM; its names are compared with real vLLM's elsewhere."""
    replica = subprocess.Popen(
        [sys.executable, "-m", "workers.sim_replica", "--port", "0"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert replica.stdout is not None
    with replica.stdout:
        url = next(found[0] for line in replica.stdout if (found := re.search(r"http://[0-9.:]+\d", line)))
        yield httpx.get(f"{url}/metrics").text
        replica.terminate()
        replica.wait(START_SECONDS)


def test_every_metric_of_replicas_exists(page):
    found = set(re.findall(r"^(vllm:[a-z_]+)", page, re.MULTILINE))
    assert len(metrics("vllm:")) > 3
    assert metrics("vllm:") <= found


def test_panels_stand_side_by_side_and_have_what_they_need():
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
    for panel in PANELS:
        assert panel["title"]
        assert panel["description"]
        assert all(target["legendFormat"] for target in panel["targets"])


def test_grafana_finds_source_and_dashboard():
    (source,) = yaml.safe_load((PROVISIONING / "datasources" / "prometheus.yml").read_text())["datasources"]
    used = {target["datasource"]["uid"] for panel in PANELS for target in panel["targets"]}
    assert used == {source["uid"]}
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    assert "prometheus" in compose
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((PROVISIONING / "dashboards" / "warmlane.yml").read_text())["providers"]
    mounted = dict(volume.split(":")[:2][::-1] for volume in compose["grafana"]["volumes"])
    assert mounted[provider["options"]["path"]] == "./grafana/dashboards"
    assert mounted["/etc/grafana/provisioning"] == "./grafana/provisioning"
    home = compose["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/warmlane.json"
