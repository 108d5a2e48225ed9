"""View: what the person at the keys looks at, and what a key does to it.

Either a replica is selected, and decisions pass by as they come; or a decision is, and the list stands still, so that
nothing moves away from under a reader. A drain is asked for twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gateway.figures import short_name
from gateway.top.frames import Decision, Replica
from gateway.top.picture import Picture

PAGE_ROWS = 10
MOVES = {
    **dict.fromkeys(("up", "k"), -1),
    **dict.fromkeys(("down", "j"), 1),
    "page up": -PAGE_ROWS,
    "page down": PAGE_ROWS,
    **dict.fromkeys(("home", "g"), -1_000_000),
    **dict.fromkeys(("end", "G"), 1_000_000),
}


@dataclass(frozen=True, slots=True)
class Drain:
    """Asked for, and not confirmed yet."""

    replica: str
    draining: bool
    in_flight: int

    @property
    def question(self) -> str:
        name = short_name(self.replica)
        if not self.draining:
            return f"Undrain {name}? It gets requests again. y/N"
        return f"Drain {name}? No new requests; {self.in_flight} there finish. y/N"


class View:
    def __init__(self, picture: Picture, drain: Callable[[Drain], None] | None) -> None:
        self._picture = picture
        self._drain = drain
        """`None` where no admin listener was given."""
        self.left = False
        """Nobody looks any more."""
        self.note = ""
        """What came of the last key, until the next."""
        self.asked: Drain | None = None
        self.held: list[Decision] | None = None
        """The list while it stands still; `None` while decisions pass by."""
        self._replica, self._decision = "", 0

    @property
    def replica(self) -> Replica | None:
        """The selected one, or the first."""
        rows = self._picture.replicas
        return next((row for row in rows if row.replica == self._replica), rows[0] if rows else None)

    @property
    def decision(self) -> Decision | None:
        return self.held[self._decision] if self.held else None

    @property
    def decisions(self) -> list[Decision]:
        return list(self._picture.decisions) if self.held is None else self.held

    def press(self, key: str) -> None:
        self.note = ""
        if self.asked is not None:
            asked, self.asked = self.asked, None
            if key in ("y", "Y") and self._drain is not None:
                self._drain(asked)
            else:
                self.note = "Nothing was done."
        elif key in MOVES:
            self._move(MOVES[key])
        elif key in ("tab", "enter"):
            self._switch()
        elif key == "escape":
            self.held = None
        elif key == "d":
            self._ask()
        elif key in ("q", "Q"):
            self.left = True

    def _move(self, rows: int) -> None:
        if self.held is not None:
            self._decision = within(self._decision + rows, len(self.held))
            return
        names = [row.replica for row in self._picture.replicas]
        if names:
            at = names.index(self._replica) if self._replica in names else 0
            self._replica = names[within(at + rows, len(names))]

    def _switch(self) -> None:
        if self.held is not None:
            self.held = None
        elif self._picture.decisions:
            self.held, self._decision = list(self._picture.decisions), 0
        else:
            self.note = "There are no decisions yet."

    def _ask(self) -> None:
        row = self.replica
        if self.held is not None or row is None:
            self.note = "Select a replica first (Tab)."
        elif self._drain is None:
            self.note = "To drain from here: warmlane top URL --admin URL, with its key in the environment."
        else:
            self.asked = Drain(row.replica, not row.draining, row.in_flight)


def within(place: int, count: int) -> int:
    return min(max(place, 0), count - 1)
