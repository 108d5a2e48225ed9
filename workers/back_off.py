"""When a replica that ended is started again: after a pause that doubles, and not for ever.

A pause is forgotten once the replica was ready for a calm time. Starts that failed are counted in a row, and any start
that succeeds ends the row: a replica that comes up each time is worth starting again, however often it falls.
"""

from __future__ import annotations

from dataclasses import dataclass

GROWTH = 2.0


@dataclass(frozen=True, slots=True)
class BackOffSettings:
    first_seconds: float = 1.0
    longest_seconds: float = 60.0
    calm_seconds: float = 300.0
    """Ready for so long, and the next pause is the first one again."""
    max_failed_starts: int = 5
    """In a row; then it is given up."""


class BackOff:
    def __init__(self, settings: BackOffSettings) -> None:
        self._settings = settings
        self._ends = 0
        self.failed_starts = 0
        """In a row."""

    def __repr__(self) -> str:
        return f"<BackOff after {self._ends} ends, {self.failed_starts} failed starts in a row>"

    @property
    def is_over(self) -> bool:
        """There were too many failed starts in a row."""
        return self.failed_starts >= self._settings.max_failed_starts

    def started(self) -> None:
        self.failed_starts = 0

    def start_failed(self) -> float:
        """Seconds until the next start."""
        self.failed_starts += 1
        return self._grow()

    def ended(self, ready_seconds: float) -> float:
        """It was ready for so long and is gone. Seconds until the next start."""
        if ready_seconds >= self._settings.calm_seconds:
            self._ends = 0
        return self._grow()

    def forget(self) -> None:
        """Somebody who knows better wants it started."""
        self._ends = self.failed_starts = 0

    def _grow(self) -> float:
        settings = self._settings
        pause = min(settings.first_seconds * GROWTH ** min(self._ends, 32), settings.longest_seconds)
        self._ends += 1
        return pause
