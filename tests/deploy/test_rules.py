"""The Prometheus rules: what they are made of exists, each alert is explained, and each has cases (`rule_cases.py`).

Whether they fire is what promtool says (`make test-deploy`).
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from gateway.families import FAMILIES
from tests.deploy.host import DEPLOY, ROOT
from tests.deploy.rule_cases import CASES
from tests.deploy.test_dashboard import page

__all__ = ["page"]

PROMETHEUS = DEPLOY / "prometheus"


def rules(name: str) -> list[dict[str, Any]]:
    return [
        rule for group in yaml.safe_load((PROMETHEUS / "rules" / name).read_text())["groups"] for rule in group["rules"]
    ]


ALERTS = rules("alerts.yml")
RECORDED = rules("recording.yml")
EXPRESSIONS = "\n".join(rule["expr"] for rule in (*ALERTS, *RECORDED))
GUIDE = (ROOT / "docs" / "operate.md").read_text(encoding="utf-8")


def test_every_metric_of_the_gateway_exists():
    kinds = {family.name: family.kind for family in FAMILIES}
    used = set(re.findall(r"\bwarmlane_\w+", EXPRESSIONS))
    assert len(used) > 10
    for name in used:
        histogram = re.sub(r"_(bucket|sum|count)$", "", name)
        assert name in kinds or kinds.get(histogram) == "histogram", name


def test_every_metric_of_replicas_exists(page):
    found = set(re.findall(r"^(vllm:\w+)", page, re.MULTILINE))
    used = set(re.findall(r"\bvllm:\w+", EXPRESSIONS))
    assert len(used) > 5
    assert used <= found


def test_recorded_series_are_recorded():
    assert set(re.findall(r"\bwarmlane:[\w:]+", EXPRESSIONS)) <= {rule["record"] for rule in RECORDED}


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_each_alert_says_what_it_is_and_where_to_read_on(alert):
    assert alert["labels"]["severity"] in ("page", "warn")
    assert alert["annotations"]["summary"]
    assert alert["annotations"]["description"].endswith(".")
    assert alert["annotations"]["runbook"] == f"docs/operate.md#{alert['alert'].lower()}"


def test_the_guide_explains_every_alert_and_no_other():
    explained = re.findall(r"^### (Warmlane\w+)$", GUIDE, re.MULTILINE)
    assert len(set(explained)) == len(explained)
    assert set(explained) == {alert["alert"] for alert in ALERTS}


def test_each_alert_has_a_fleet_in_which_it_fires_and_one_that_comes_close():
    assert {(alert["alert"], alert["labels"]["severity"]) for alert in ALERTS} == {
        (case.alert, case.severity) for case in CASES
    }
    assert {case.alert for case in CASES if case.close} == {alert["alert"] for alert in ALERTS}


def test_prometheus_of_the_compose_file_has_the_rules():
    (pattern,) = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["rule_files"]
    assert {path.name for path in PROMETHEUS.glob(pattern)} == {"alerts.yml", "recording.yml"}
    volumes = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["prometheus"]["volumes"]
    assert "./prometheus/rules:/etc/prometheus/rules:ro" in volumes
