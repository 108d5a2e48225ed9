"""Figures in an engine's log: the patterns that find them, and what they are worth.

A log may quote a prompt, so what stands where a figure is expected may be anything: what a pattern here matches can be
read, always, and is of bounded length.
"""

from __future__ import annotations

DIGITS = r"(?:\d{1,3}(?:,\d{3}){1,5}|\d{1,18})"
"""With separators between thousands, or without; 18 digits fit into 64 bits. What follows must not be a digit."""
WHOLE = rf"({DIGITS})(?!\d)"
REAL = rf"(-?{DIGITS}(?:\.\d{{1,20}})?)(?!\d)"


def whole(text: str) -> int:
    return int(text.replace(",", ""))


def real(text: str) -> float:
    return float(text.replace(",", ""))
