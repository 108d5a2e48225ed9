"""Screen: picture and view as lines of a given width, and of a height if there is one.

Colours only repeat what words say.
"""

from __future__ import annotations

from typing import TypeVar

from rich.text import Text

from gateway.figures import NONE, clock, count, percent, seconds, short_name, tokens
from gateway.top.costs import costs_of
from gateway.top.frames import Decision, Replica
from gateway.top.picture import Picture
from gateway.top.sparkline import Ramp, sparkline
from gateway.top.table import HEADING, SELECTED, SOFT, WRONG, Column, Line, Table
from gateway.top.view import View

Figure = TypeVar("Figure")

FULL = 0.85
"""Above it engines begin to preempt."""
OLD_SECONDS = 10.0
"""Figures of a replica that are older are not shown."""
LEAST_DECISIONS, LEAST_REPLICAS = 5, 3
"""Lines with their heading."""
ONCE_DECISIONS = 12
BAD = frozenset(("failed", "unreachable", "refused", "rejected", "empty", "overdue", "moved", "draining"))
STATES = {"up": "green", "ejected": "bold red", "draining": "yellow", "unknown": "yellow", "asleep": "yellow"}
REASONS = {"warm": "green", "spilled": "yellow", "cold": "cyan"}


REPLICA_COLUMNS: tuple[Column[Replica], ...] = (
    Column("STATE", 8, lambda row: row.state, 0, lambda row: STATES.get(row.state, ""), right=False),
    Column("KV", 5, lambda row: percent(fresh(row, row.kv_usage)), 1, lambda row: WRONG if is_full(row) else ""),
    Column("RUN", 4, lambda row: count(fresh(row, row.running)), 3),
    Column("QUEUE", 5, lambda row: count(fresh(row, row.waiting)), 2),
    Column("FLIGHT", 6, lambda row: count(row.in_flight), 4),
    Column("BOOKED", 16, lambda row: booked(row), 5),
    Column("HITS", 5, lambda row: percent(row.hit_rate), 1),
    Column("MODELS", 24, lambda row: ", ".join(row.models), 6, lambda row: SOFT, right=False),
)
DECISION_COLUMNS: tuple[Column[Decision], ...] = (
    Column("REASON", 7, lambda one: one.reason, 0, lambda one: REASONS.get(one.reason, ""), right=False),
    Column("PROMPT", 9, lambda one: f"{tokens(one.ranking[0].prompt_tokens)} tok" if one.ranking else NONE, 3),
    Column("CACHED", 6, lambda one: percent(cached_share(one)), 1),
    Column("TTFT", 7, lambda one: seconds(one.end.ttft_seconds if one.end else None), 2),
    Column("OUTCOME", 11, lambda one: outcome(one), 1, lambda one: WRONG if is_bad(one) else "", right=False),
    Column("MODEL", 24, lambda one: one.model or NONE, 4, lambda one: SOFT, right=False),
)


def fresh(row: Replica, value: Figure | None) -> Figure | None:
    return value if row.load_age is not None and row.load_age <= OLD_SECONDS else None


def is_full(row: Replica) -> bool:
    return (fresh(row, row.kv_usage) or 0.0) > FULL


def booked(row: Replica) -> str:
    return f"{tokens(row.pending_tokens)} tok {seconds(row.pending_seconds)}" if row.pending_tokens else "0 tok"


def cached_share(one: Decision) -> float | None:
    if not one.ranking or not one.ranking[0].prompt_tokens:
        return None
    return one.ranking[0].cached_tokens / one.ranking[0].prompt_tokens


def outcome(one: Decision) -> str:
    return (one.end.error or one.end.outcome.replace("_", " ")) if one.end else "running"


def is_bad(one: Decision) -> bool:
    return one.end is not None and one.end.outcome in BAD


class Screen:
    """`lines` has exactly `height` lines, or as many as there are when that is `None`."""

    def __init__(self, picture: Picture, view: View, url: str, ramp: Ramp) -> None:
        self._picture, self._view, self._url, self._ramp = picture, view, url, ramp

    def lines(self, width: int, height: int | None) -> list[Text]:
        head = self._head(width)
        if height is None:
            lines = [*head, *self._body(width, None)]
        else:
            body = self._body(width, height - len(head) - 1)
            room = max(0, height - len(head) - 1)
            lines = [*head, *body[:room], *([Line()] * (room - len(body))), self._foot()][-height:]
        for line in lines:
            line.text.truncate(width)
        return [line.text for line in lines]

    # -- head and foot

    def _head(self, width: int) -> list[Line]:
        picture, frame = self._picture, self._picture.frame
        running = seconds(max(0.0, frame.at - frame.started))
        title = Line().add("Warmlane ", HEADING).add(f"{frame.version}, {frame.policy}, up {running}")
        title.add(f", {frame.process} alone" if frame.process else "", "yellow").add("  ")
        if picture.lost:
            title.add(f"No connection since {clock(frame.at)}, trying again: {picture.lost}", WRONG)
        else:
            title.add(f"live {clock(frame.at)}", "green")
            title.add(", started again" if picture.began_anew else "", "yellow").add(f"  {self._url}", SOFT)
        up = sum(row.state == "up" for row in frame.replicas)
        share = frame.index_blocks / max(1, frame.index_capacity_blocks)
        totals = Line().add(f"replicas {up} of {len(frame.replicas)} up", "" if up == len(frame.replicas) else WRONG)
        totals.add(f" | {frame.in_flight} in flight | {frame.waiting} waiting | prefix index {percent(share)} full")
        return [title, totals, *self._plots(width)]

    def _plots(self, width: int) -> list[Line]:
        picture = self._picture
        hits = [(point.at, point.hit_rate) for point in picture.points]
        ttft = [(point.at, point.ttft_p50) for point in picture.points]
        hit = next((value for _, value in reversed(hits) if value is not None), None)
        last = next((point for point in reversed(picture.points) if point.ttft_p50 is not None), None)
        median, most = (None, None) if last is None else (last.ttft_p50, last.ttft_p90)
        room = max(10, width - 46)
        return [
            Line().add("hit rate, 15 min     ").add(sparkline(hits, picture.frame.at, room, 1.0, self._ramp), "green")
            .add(f" {percent(hit)}"),
            Line().add("first token, 15 min  ").add(sparkline(ttft, picture.frame.at, room, None, self._ramp), "cyan")
            .add(f" {seconds(median)}, p90 {seconds(most)}"),
        ]  # fmt: skip

    def _foot(self) -> Line:
        view = self._view
        if view.asked is not None:
            return Line().add(view.asked.question, SELECTED)
        if view.note:
            return Line().add(view.note, HEADING)
        if view.held is not None:
            return Line().add("up/down choose  Tab, Esc back: the list stands still  q quit", SOFT)
        return Line().add("up/down choose  d drain  Tab decisions and their costs  q quit", SOFT)

    # -- what changes

    def _body(self, width: int, room: int | None) -> list[Line]:
        picture, view = self._picture, self._view
        opened = view.decision if room is not None else next(iter(picture.decisions), None)
        costs = costs_of(opened, width) if opened is not None else []
        if room is None:
            replicas, decisions = len(picture.replicas) + 2, ONCE_DECISIONS + 1
        else:
            costs = costs[: max(0, room - LEAST_REPLICAS - LEAST_DECISIONS)]
            left = room - len(costs)
            least = max(LEAST_REPLICAS, left * 2 // 5) if costs else left // 2
            replicas = min(len(picture.replicas) + 2, max(least, left - min(len(view.decisions), ONCE_DECISIONS) - 1))
            decisions = left - replicas
        space = [] if room is not None else [Line()]
        parts = [self._replicas(width, replicas), self._decisions(width, decisions), costs]
        return [line for part in parts for line in (*space, *part)]

    def _replicas(self, width: int, room: int) -> list[Line]:
        rows, chosen = self._picture.replicas, self._view.replica
        selected = next((place for place, row in enumerate(rows) if row is chosen), 0)
        first, last = window(len(rows), selected, room - 2)
        title = f"REPLICA {first + 1}-{last} of {len(rows)}" if last - first < len(rows) else "REPLICA"
        table = Table(REPLICA_COLUMNS, width, title, rows, lambda row: short_name(row.replica))
        mark = chosen if self._view.held is None else None
        lines = [table.heading(), *(table.row(row, row is mark) for row in rows[first:last])]
        return [*lines, more_of(chosen) if chosen is not None else Line().add("There are no replicas.", WRONG)]

    def _decisions(self, width: int, room: int) -> list[Line]:
        listed, opened = self._view.decisions, self._view.decision
        selected = next((place for place, one in enumerate(listed) if one is opened), 0)
        first, last = window(len(listed), selected, room - 1)
        left_out = self._picture.frame.left_out
        seen = listed[first:last]
        title = f"DECISION +{left_out:,} more" if left_out and self._view.held is None else "DECISION"
        table = Table(DECISION_COLUMNS, width, title, seen, lambda one: f"{clock(one.at)} {short_name(one.replica)}")
        lines = [table.row(one, one is opened) for one in seen]
        return [table.heading(), *(lines or [Line().add("None yet: no request came.", SOFT)])]


def more_of(row: Replica) -> Line:
    """What has no column."""
    line = Line().add(f"  {short_name(row.replica)}: ", SOFT)
    if row.health == "ejected":
        line.add(f"ejected: {row.last_failure}. ", WRONG)
    age = "never" if row.load_age is None else f"{row.load_age:.0f} s ago"
    return line.add(
        f"{row.engine or 'engine not known'}, told its load {age}, {', '.join(row.models) or 'no model'}", SOFT
    )


def window(total: int, selected: int, room: int) -> tuple[int, int]:
    """Which of `total` rows are seen, the selected one among them."""
    room = max(0, room)
    first = min(max(0, selected - room // 2), max(0, total - room))
    return first, min(total, first + room)
