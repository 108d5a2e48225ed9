"""Fault tests: marked `chaos`, run by `make chaos`; each records its figures, `report.py` makes a table of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.chaos.rig import ROOT, SHORT

FIGURES = ROOT / ".bench" / "chaos" / "figures.jsonl"


@pytest.hookimpl(tryfirst=True)  # the marker must be there before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker("chaos")


class Figures:
    """Where a test writes what it measured: one JSON line for each figure."""

    def record(self, number: int, title: str, measured: str, target: str, met: bool) -> None:
        """`number` is that of the list of thirty tests; a number may have several figures with different titles."""
        FIGURES.parent.mkdir(parents=True, exist_ok=True)
        figure = {"number": number, "title": title, "measured": measured, "target": target, "met": met, "short": SHORT}
        with FIGURES.open("a", encoding="utf-8") as file:
            file.write(json.dumps(figure) + "\n")
        print(f"\n[{number:2}] {title}: {measured} (target {target}) {'met' if met else 'NOT MET'}")


@pytest.fixture
def figures() -> Figures:
    return Figures()
