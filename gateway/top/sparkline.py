"""Sparkline: a quarter of an hour in one line. A column without values stays empty: missing is not zero."""

from __future__ import annotations

from collections.abc import Iterable

from gateway.dashboard.history import POINTS, STEP_SECONDS

SPAN_SECONDS = POINTS * STEP_SECONDS
Ramp = str
BLOCKS: Ramp = "▁▂▃▄▅▆▇█"
ASCII: Ramp = "_.-=+*#"
"""Where the terminal's encoding has no blocks."""


def sparkline(
    values: Iterable[tuple[float, float | None]], now: float, width: int, top: float | None, ramp: Ramp
) -> str:
    """`values`: time and value; `top`: what the highest step stands for, the largest mean of a column when `None`."""
    sums, counts = [0.0] * width, [0] * width
    for at, value in values:
        column = width - 1 - int(max(0.0, now - at) / SPAN_SECONDS * width)
        if value is not None and column >= 0:
            sums[column] += value
            counts[column] += 1
    means = [total / number if number else None for total, number in zip(sums, counts, strict=True)]
    most = top or max((mean for mean in means if mean is not None), default=0.0) or 1.0
    return "".join(" " if mean is None else step(mean / most, ramp) for mean in means)


def step(share: float, ramp: Ramp) -> str:
    return ramp[min(len(ramp) - 1, int(max(0.0, min(1.0, share)) * len(ramp)))]
