"""Lines, and tables of them that drop the columns that do not fit, the least important first.

Every text passes `Line.add`, so nothing that a replica, a model or a client calls itself is obeyed by the terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rich.cells import cell_len
from rich.text import Text

from gateway.figures import plain

HEADING, SELECTED, SOFT, WRONG = "bold", "reverse", "dim", "bold red"
LEAST_NAME, MOST_NAME = 16, 40
"""Cells of the first column."""

Row = TypeVar("Row")


class Line:
    def __init__(self) -> None:
        self.text = Text(no_wrap=True, overflow="crop", end="")

    def add(self, text: str, style: str = "", width: int | None = None, *, right: bool = False) -> Line:
        """... cut or filled to `width` cells; what is cut loses its middle, since names differ at their ends."""
        piece = plain(text)
        if width is not None:
            piece = cut(piece, width)
            space = " " * (width - cell_len(piece))
            piece = space + piece if right else piece + space
        self.text.append(piece, style)
        return self


def cut(text: str, width: int) -> str:
    if cell_len(text) <= width:
        return text
    if cell_len(text) > len(text) or width < 8:  # wide characters: no arithmetic with their middle
        found = Text(text)
        found.truncate(width)
        return found.plain
    tail = (width - 2) // 2
    return f"{text[: width - 2 - tail]}..{text[-tail:]}"


@dataclass(frozen=True, slots=True)
class Column(Generic[Row]):
    title: str
    width: int
    cell: Callable[[Row], str]
    rank: int
    """0 is shown always; the largest goes first."""
    style: Callable[[Row], str] = lambda row: ""
    right: bool = True


class Table(Generic[Row]):
    """A first column of names as wide as there is room, and of the others those that fit."""

    def __init__(
        self,
        columns: Sequence[Column[Row]],
        width: int,
        title: str,
        rows: Iterable[Row],
        name_of: Callable[[Row], str],
    ) -> None:
        shown = list(columns)
        longest = max((cell_len(name_of(row)) for row in rows), default=0)
        least = min(max(longest, len(title), LEAST_NAME), MOST_NAME)
        while shown and least + sum(column.width + 1 for column in shown) > width and max(one.rank for one in shown):
            shown.remove(max(shown, key=lambda one: one.rank))
        self._columns = shown
        self._title, self._name_of = title, name_of
        self._name = max(LEAST_NAME, min(least, width - sum(column.width + 1 for column in shown)))

    def heading(self) -> Line:
        line = Line().add(self._title, HEADING, self._name)
        for column in self._columns:
            line.add(" ").add(column.title, HEADING, column.width, right=column.right)
        return line

    def row(self, row: Row, is_selected: bool) -> Line:
        line = Line().add(self._name_of(row), "", self._name)
        for column in self._columns:
            line.add(" ").add(column.cell(row), column.style(row), column.width, right=column.right)
        if is_selected:
            line.text.stylize(SELECTED)
        return line
