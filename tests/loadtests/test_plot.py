"""The plot of a report: drawn in both formats, every policy named, names that do not touch."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.core.settings import POLICY_NAMES
from loadtests.plot import draw, moved_apart, problem
from loadtests.report import BOUND, Plan, Report, replay
from loadtests.simulator import Fleet
from loadtests.traces import Synthetic, synthetic


@pytest.fixture(scope="module")
def reports() -> list[Report]:
    trace = synthetic(Synthetic(requests=60), 1)
    return [replay(trace, Plan(Fleet(replicas=2), load=load)) for load in (0.5, 1.0)]


@pytest.mark.parametrize("count", [1, 2])
def test_the_svg_names_every_policy_as_text(tmp_path: Path, reports: list[Report], count: int):
    path = tmp_path / "plot.svg"
    draw(reports[:count], path, "hot-prompt, 2 replicas")
    words = re.findall(r">([^<>]+)</text>", path.read_text())
    for name in (*POLICY_NAMES, BOUND):
        assert words.count(name) == 2, "once in each panel"
    assert {"mean", "99th percentile", "0.5"} <= set(words)
    assert ("1" in words) == (count == 2)
    assert "Time to first token: hot-prompt, 2 replicas" in words
    assert words.count("seconds, log scale") == 2


def test_equal_reports_are_equal_files(tmp_path: Path, reports: list[Report]):
    for name in ("one.svg", "two.svg"):
        draw(reports, tmp_path / name, "traffic")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_the_png_is_one(tmp_path: Path, reports: list[Report]):
    draw(reports, tmp_path / "plot.png", "traffic")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_markers_are_explained_only_where_requests_were_shed(tmp_path: Path, reports: list[Report]):
    shed = replace(reports[0], rows=tuple(replace(row, shed_pct=9.0) for row in reports[0].rows))
    for report, expected in ((reports[0], False), (shed, True)):
        draw([report], tmp_path / "plot.svg", "traffic")
        assert ("hollow" in (tmp_path / "plot.svg").read_text()) == expected


def test_a_policy_without_times_is_left_out(tmp_path: Path, reports: list[Report]):
    """Everything was shed: no time, and no logarithm of it."""
    first, *others = reports[0].rows
    nothing = replace(first, ttft_mean_s=0.0, ttft_p99_s=0.0)
    draw([replace(reports[0], rows=(nothing, *others))], tmp_path / "plot.svg", "traffic")
    assert f">{first.policy}</text>" not in (tmp_path / "plot.svg").read_text()


def test_names_that_would_touch_spread_and_stay_below_the_ceiling():
    assert moved_apart([0, 50, 100], 10, 200) == [0, 50, 100]
    assert moved_apart([50, 52, 100], 10, 200) == [46, 56, 100]
    assert moved_apart([50, 52, 58], 10, 200) == pytest.approx([43.33, 53.33, 63.33], abs=0.01)
    assert moved_apart([98, 99, 100], 10, 100) == [80, 90, 100]


def test_what_cannot_be_drawn_is_said_at_once(tmp_path: Path):
    assert problem(tmp_path / "plot.png") is None
    assert "must end in .png or .svg" in (problem(tmp_path / "plot.pdf") or "")
    assert "no such folder" in (problem(tmp_path / "missing" / "plot.svg") or "")


def test_without_matplotlib_the_way_to_get_it_is_said(tmp_path: Path):
    assert "python -m pip install matplotlib" in (problem(tmp_path / "plot.png", find=lambda name: None) or "")
