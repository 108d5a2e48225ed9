"""What the doctor prints: JSON with the documented keys, a table that no server can make a terminal obey."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import msgspec

from gateway.doctor import report as reports
from gateway.doctor.rules import RULES, examine
from gateway.doctor.window import Replica, Window
from tests.doctor.recordings import recording

PAGE = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")


def told(*replicas: Replica) -> reports.Report:
    window = Window(8.0, replicas)
    return reports.report(window, examine(window))


def memory(url: str = "http://a:8000") -> Replica:
    return recording("memory").replica(url)


def test_the_keys_of_the_json_are_documented() -> None:
    table = PAGE.partition("\n## JSON")[2]
    documented = re.findall(r"^\| `([a-z_]+)` \|", table, re.MULTILINE)
    assert documented == list(reports.Report.__struct_fields__)
    for struct in (reports.ReplicaFigures, reports.GatewayFigures, reports.Found):
        assert [name for name in struct.__struct_fields__ if f"`{name}`" not in table] == []


def test_every_finding_has_its_heading_and_no_other() -> None:
    headings = re.findall(r"^### (\S+)$", PAGE, re.MULTILINE)
    assert sorted(headings) == sorted(rule.code for rule in RULES)
    assert len(set(headings)) == len(headings)


def test_json_holds_the_same_as_the_rules_found() -> None:
    answer = msgspec.json.decode(reports.as_json(told(memory())))
    assert (answer["schema"], answer["worst"], answer["seconds"]) == (1, "error", 8.0)
    assert answer["findings"][0] == {
        "code": "memory-bound",
        "severity": "error",
        "subject": "http://a:8000",
        "evidence": "waiting 2 -> 24 requests in 8.0 s, 2 running, KV cache 88% full (median)",
        "figures": {"waiting_first": 2.5, "waiting_last": 23.5, "running": 2.0, "seconds": 8.01, "kv_usage": 0.8841},
        "change": "KV cache is what is short: lower --max-model-len, then --max-num-seqs, then add replicas",
        "flags": ["--max-model-len", "--max-num-seqs"],
        "docs": "docs/troubleshooting.md#memory-bound",
    }


def test_the_table_has_figures_findings_and_the_count() -> None:
    text = reports.as_text(told(memory(), memory("http://b:8000")))
    assert text.count("#preemptions") == 1  # once for both
    assert "http://a:8000, http://b:8000: 12" in text
    assert "  2 warnings  " in text  # in that row: so it adds up to the last line
    assert text.splitlines()[-1] == "2 errors, 2 warnings."
    assert max(map(len, text.splitlines())) <= reports.WIDTH


def test_a_quiet_fleet_is_said_to_be_quiet() -> None:
    text = reports.as_text(told(recording("idle").replica("http://a:8000")))
    assert text.splitlines()[-1].startswith("Nothing found. No prompts came in that time")


def test_control_characters_of_a_server_are_not_shown() -> None:
    evil = dataclasses.replace(memory(), version="0.32\x1b]0;owned\x07", models=None, models_problem="\x1b[2J")
    text = reports.as_text(told(evil))
    assert "\x1b" not in text
    assert "\x07" not in text


def test_changes_are_findings_that_came_or_went() -> None:
    quiet, busy = told(recording("idle").replica("http://a:8000")), told(memory())
    came, went = reports.changes(quiet, busy), reports.changes(busy, quiet)
    assert came[0].startswith("+ error memory-bound: http://a:8000: waiting 2 -> 24")
    assert went == ["- error memory-bound: http://a:8000", "- warning preemptions: http://a:8000"]
    assert reports.changes(busy, busy) == []
