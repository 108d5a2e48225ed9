"""Time to first token against load, a line for each policy: mean and p99 side by side, seconds on a log scale.

Names stand at the ends of the lines, moved apart where lines end together. Where a policy shed requests its markers are
hollow: those that were refused are in no time, so the line looks better than it is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from loadtests.report import BOUND, Report, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ENDINGS = (".png", ".svg")
COLOURS = {
    "cache-cost": "#0b6e4f",
    "least-work": "#c8553d",
    "prefix-only": "#8d6a9f",
    "session-hash": "#2b6ca3",
    "least-requests": "#d79a2b",
    "round-robin": "#7a7a7a",
    "random": "#b0b0b0",
    BOUND: "#333333",
}
"""Told apart in print and by people who do not see red and green."""
HERO = "cache-cost"
"""The default policy has the thick line."""
SHED_PCT = 0.5
"""Per cent of requests refused from which a marker is hollow."""
LABEL_POINTS = 12.5
"""Least distance of two names; their type is 9 points high."""
PANELS = (("mean", "ttft_mean_s"), ("99th percentile", "ttft_p99_s"))


def problem(path: Path, find: Callable[[str], object | None] = find_spec) -> str | None:
    """Why nothing can be drawn there, before hours of simulation say so."""
    if path.suffix.lower() not in ENDINGS:
        return f"{path}: must end in {' or '.join(ENDINGS)}"
    if not path.absolute().parent.is_dir():
        return f"{path}: there is no such folder"
    if find("matplotlib") is None:
        return f"needs matplotlib: {sys.executable} -m pip install matplotlib"
    return None


def draw(reports: Sequence[Report], path: Path, subject: str) -> None:
    """Draw the reports about one `subject`, one for each load. Raises OSError."""
    import matplotlib
    from matplotlib.figure import Figure

    # Text stays text, and equal figures are equal files.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "warmlane", "font.size": 9}):
        figure = Figure(figsize=(11, 4.8), dpi=150)
        figure.subplots_adjust(left=0.06, right=0.885, top=0.82, bottom=0.13, wspace=0.42)
        panels = figure.subplots(1, len(PANELS))
        for axes, (title, field) in zip(panels, PANELS, strict=True):
            draw_panel(axes, reports, title, field)
        write_heading(figure, reports, subject)
        figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)


def write_heading(figure: Figure, reports: Sequence[Report], subject: str) -> None:
    first = reports[0]
    seeds = f", mean of {first.seeds} seeds" if first.seeds > 1 else ""
    figure.text(0.06, 0.945, f"Time to first token: {subject}", fontsize=13, fontweight="bold")
    figure.text(0.06, 0.9, f"{first.requests:,} requests{seeds}; waiting in the gateway included", color="#555555")
    rows = [row for report in reports for row in report.rows]
    if any(row.shed_pct >= SHED_PCT for row in rows):
        note = f"hollow: {SHED_PCT:g} % of the requests or more were shed, and are in no time"
        figure.text(0.885, 0.9, note, color="#555555", ha="right")


def draw_panel(axes: Axes, reports: Sequence[Report], title: str, field: str) -> None:
    from matplotlib.ticker import LogLocator

    axes.set_title(title, loc="left", fontsize=10)
    axes.set_title("seconds, log scale", loc="right", fontsize=8, color="#555555")
    axes.set_yscale("log")
    axes.set_xlabel("load: offered input tokens / what all replicas prefill uncached")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, place: f"{value:g} s")
    axes.yaxis.set_minor_formatter(lambda value, place: "")
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(which="both", length=0)
    ends: list[tuple[str, float, float]] = []
    for name, rows in lines_of(reports).items():
        points = [(row.load, value) for row in rows if (value := getattr(row, field)) > 0]
        if points:
            draw_line(axes, name, points, [row.shed_pct >= SHED_PCT for row in rows if getattr(row, field) > 0])
            ends.append((name, *points[-1]))
    loads = sorted({round(report.bound.load, 2) for report in reports})
    axes.set_xticks(loads, [f"{load:g}" for load in loads])
    if len(loads) == 1:
        axes.set_xlim(loads[0] - 0.1, loads[0] + 0.1)
    name_lines(axes, ends)


def lines_of(reports: Sequence[Report]) -> dict[str, list[Row]]:
    """Rows by policy in order of load; the bound first, so that it lies below the others."""
    found: dict[str, list[Row]] = {}
    for report in sorted(reports, key=lambda report: report.bound.load):
        for row in (report.bound, *report.rows):
            found.setdefault(row.policy, []).append(row)
    return found


def draw_line(axes: Axes, name: str, points: Sequence[tuple[float, float]], hollow: Iterable[bool]) -> None:
    colour = COLOURS[name]
    loads, values = zip(*points, strict=True)
    width = 2.6 if name == HERO else 1.4
    axes.plot(loads, values, color=colour, linewidth=width, linestyle="--" if name == BOUND else "-", zorder=2)
    if name == BOUND:
        axes.scatter(loads, values, s=60, c=colour, marker="_", zorder=2)  # seen also where there is one load only
    else:
        faces = ["white" if is_hollow else colour for is_hollow in hollow]
        axes.scatter(loads, values, s=30 if name == HERO else 18, c=faces, edgecolors=colour, zorder=3)


def name_lines(axes: Axes, ends: Sequence[tuple[str, float, float]]) -> None:
    """A name beside the end of each line, and a thin line to it where it had to move."""
    axes.figure.draw_without_rendering()  # type: ignore[union-attr]  # scales are final only then
    points_per_pixel = 72 / axes.figure.dpi
    edge = axes.transAxes.transform((1, 0))[0]
    placed = sorted((axes.transData.transform((load, value))[1] * points_per_pixel, name) for name, load, value in ends)
    ceiling = axes.transAxes.transform((0, 1))[1] * points_per_pixel
    heights = moved_apart([height for height, _ in placed], LABEL_POINTS, ceiling)
    for (height, name), wanted in zip(placed, heights, strict=True):
        load, value = next((load, value) for other, load, value in ends if other == name)
        end = axes.transData.transform((load, value))[0]
        axes.annotate(
            name,
            (load, value),
            xytext=((edge - end) * points_per_pixel + 14, wanted - height),
            textcoords="offset points",
            color=COLOURS[name],
            fontweight="bold" if name == HERO else "normal",
            va="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": COLOURS[name],
                "linewidth": 0.6,
                "shrinkA": 1,
                "shrinkB": 4,
                "relpos": (0, 0.5),
            },
        )


def moved_apart(heights: Sequence[float], least: float, ceiling: float) -> list[float]:
    """Heights in rising order with at least so much between two, and none above the ceiling: those that would touch
    spread around their middle."""
    groups: list[list[float]] = []
    for height in heights:
        groups.append([height])
        while len(groups) > 1 and top(groups[-2], least, ceiling) + least > bottom(groups[-1], least, ceiling):
            last = groups.pop()
            groups[-1] += last
    return [bottom(group, least, ceiling) + place * least for group in groups for place in range(len(group))]


def bottom(group: Sequence[float], least: float, ceiling: float) -> float:
    tall = least * (len(group) - 1)
    return min(sum(group) / len(group) - tall / 2, ceiling - tall)


def top(group: Sequence[float], least: float, ceiling: float) -> float:
    return bottom(group, least, ceiling) + least * (len(group) - 1)
