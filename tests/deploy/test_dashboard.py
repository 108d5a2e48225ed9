"""The Grafana dashboards: every metric and label in their queries exists, and Grafana finds them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest
import yaml

from gateway.families import FAMILIES
from gateway.several.totals import ADDED
from tests.deploy.host import DEPLOY

DASHBOARDS = {path.stem: json.loads(path.read_text()) for path in sorted((DEPLOY / "grafana" / "dashboards").iterdir())}
PROVISIONING = DEPLOY / "grafana" / "provisioning"
PANELS = [panel for board in DASHBOARDS.values() for panel in board["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
VARIABLES = [variable for board in DASHBOARDS.values() for variable in board["templating"]["list"]]
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
            assert set(re.findall(r"(\w+)[!=]", matchers)) <= labels[name.removesuffix("_bucket")]
        known = {
            label for name in re.findall(r"warmlane_[a-z_]+", query) for label in labels[name.removesuffix("_bucket")]
        }
        for by in re.findall(r"by \(([^)]*)\)", query):
            if "warmlane_" in query:
                assert {label.strip() for label in by.split(",")} <= known | SCRAPED_LABELS


ADDED_UP = re.compile(r"\b(?:sum|avg)(?: by \(([^)]*)\))? ?\((warmlane_\w+)")


def test_what_every_gateway_says_alike_is_not_added_up():
    """Two gateways tell of the same replicas: of what each sees whole (`several/totals.py`) the most counts."""
    whole = {family.name for family in FAMILIES if family.kind == "gauge" and "replica" in family.labels} - ADDED
    files = (DEPLOY / "prometheus" / "rules").iterdir()
    rules = [
        rule["expr"]
        for file in files
        for group in yaml.safe_load(file.read_text())["groups"]
        for rule in group["rules"]
    ]
    found = [(by, name) for query in (*QUERIES, *rules) for by, name in ADDED_UP.findall(query)]
    assert len(found) > 10
    assert [name for by, name in found if name in whole and "instance" not in by] == []


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


def test_recorded_series_are_recorded():
    groups = yaml.safe_load((DEPLOY / "prometheus" / "rules" / "recording.yml").read_text())["groups"]
    recorded = {rule["record"] for group in groups for rule in group["rules"]}
    used = {name for query in QUERIES for name in re.findall(r"\bwarmlane:[\w:]+", query)}
    assert used
    assert used <= recorded


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_stand_side_by_side_and_have_what_they_need(name):
    panels = DASHBOARDS[name]["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells


def test_panels_explain_themselves():
    titles = [panel["title"] for panel in PANELS]
    assert len(set(titles)) == len(titles)
    for panel in PANELS:
        assert panel["description"]
        assert all(target["legendFormat"] for target in panel["targets"])


def test_variables_are_declared_and_filled_from_metrics_that_exist():
    labels = {family.name: family.labels for family in FAMILIES}
    for variable in VARIABLES:
        name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"]).groups()
        assert label in labels[name]
    for board in DASHBOARDS.values():
        used = set(re.findall(r"\$(?!__)\{?(\w+)", json.dumps(board["panels"])))
        assert used == {variable["name"] for variable in board["templating"]["list"]}


def test_each_dashboard_leads_to_the_others():
    assert set(DASHBOARDS) == {"fleet", "replica", "routing", "tenants"}
    for name, board in DASHBOARDS.items():
        (link,) = board["links"]
        assert board["uid"] == f"warmlane-{name}"
        assert set(link["tags"]) <= set(board["tags"])


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
    assert used == {variable["datasource"]["uid"] for variable in VARIABLES}
    home = compose["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/fleet.json"
