"""Figures as people read them, always with their unit; and texts of others as a terminal may have them."""

from __future__ import annotations

import time
from typing import Annotated

from msgspec import Meta

Whole = Annotated[int, Meta(ge=-(10**15), le=10**15)]
"""A number that another process tells: JSON knows larger ones, with which nothing can be counted."""
NONE = "-"
"""Not known. It is not zero."""


def tokens(value: float | None) -> str:
    if value is None:
        return NONE
    if value < 10_000:
        return f"{value:,.0f}"
    if value < 999_500:
        return f"{value / 1_000:.{1 if value < 99_950 else 0}f}k"
    return f"{value / 1_000_000:.1f}M"


def seconds(value: float | None) -> str:
    if value is None:
        return NONE
    if value < 0.00005:
        return "0 ms"
    if value < 0.9995:
        return f"{value * 1_000:.{1 if value < 0.00995 else 0}f} ms"
    if value < 99.95:
        return f"{value:.{2 if value < 9.995 else 1}f} s"
    return f"{value / 60:.0f} min" if value < 5_970 else f"{value / 3_600:.0f} h"


def percent(share: float | None) -> str:
    return NONE if share is None else f"{share * 100:.0f} %"


def count(value: int | None) -> str:
    return NONE if value is None else f"{value:,}"


def clock(at: float) -> str:
    """Time of day here."""
    try:
        return time.strftime("%H:%M:%S", time.localtime(at))
    except (OverflowError, ValueError, OSError):  # no time of ours
        return NONE


def short_name(url: str) -> str:
    """A replica as people call it: its URL without the scheme."""
    return url.removeprefix("http://").removeprefix("https://")


def plain(text: str) -> str:
    """Without anything that a terminal would obey, or that turns the direction of what follows."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else "?" for character in text)
