"""Picture: what is known of the gateway, from its frames. A gateway that starts again begins with an empty one."""

from __future__ import annotations

from collections import deque

from gateway.dashboard.history import POINTS, Point
from gateway.top.frames import Decision, End, Frame, Replica
from gateway.top.stream import Lost

LISTED = 100
"""Decisions that are kept; the gateway has the last 200."""


class Picture:
    def __init__(self, first: Frame) -> None:
        self.frame = first
        """The newest."""
        self.lost = ""
        """Why there is no connection; empty while there is one."""
        self.began_anew = False
        """The gateway started again while somebody looked."""
        self.points: deque[Point] = deque(maxlen=POINTS)
        self.decisions: deque[Decision] = deque(maxlen=LISTED)
        """Newest first."""
        self._newest = 0
        self.take(first)

    @property
    def replicas(self) -> list[Replica]:
        """Those that are not up stand first: in a large fleet they would not be seen."""
        return sorted(self.frame.replicas, key=lambda one: one.state == "up")

    def take(self, told: Frame | Lost) -> None:
        if isinstance(told, Lost):
            self.lost = told.why
            return
        self.lost = ""
        if told.run != self.frame.run:
            self.began_anew = True
            self.decisions.clear()
            self._newest = 0
        self.frame = told
        if told.whole:
            self.points.clear()
            self.points.extend(told.points)
        if told.point is not None:
            self.points.append(told.point)
        self._take_decisions(told)

    def _take_decisions(self, told: Frame) -> None:
        ends: dict[int, End] = {one.number: one.end for one in told.ended}
        for decision in reversed(told.decisions):
            if decision.number > self._newest:
                self._newest = decision.number
                self.decisions.appendleft(decision)
            elif decision.end is not None:
                ends[decision.number] = decision.end
        for decision in self.decisions if ends else ():
            decision.end = decision.end or ends.get(decision.number)
