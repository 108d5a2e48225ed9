"""What is on the screen, for any size and any fleet."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
from rich.cells import cell_len

from gateway.top.picture import LISTED, Picture
from gateway.top.screen import Screen
from gateway.top.sparkline import ASCII, BLOCKS, sparkline
from gateway.top.stream import Lost
from gateway.top.view import Drain, View
from tests.top.made import candidate, decision, end, frame, replica

URL = "http://127.0.0.1:8000"


class Shown:
    def __init__(self, **first: Any) -> None:
        self.picture = Picture(frame(whole=True, **first))
        self.drains: list[Drain] = []
        self.view = View(self.picture, self.drains.append)
        self.screen = Screen(self.picture, self.view, URL, BLOCKS)

    def lines(self, width: int = 80, height: int | None = 24) -> list[str]:
        return [line.plain for line in self.screen.lines(width, height)]

    def text(self, width: int = 80, height: int | None = 24) -> str:
        return "\n".join(self.lines(width, height))

    def press(self, *keys: str) -> None:
        for key in keys:
            self.view.press(key)


def large(seed: int = 0) -> dict[str, Any]:
    chance = random.Random(seed)
    fleet = [replica(number, health=chance.choice(["up", "ejected", "asleep"])) for number in range(64)]
    made = [decision(number, end=chance.choice([None, end()])) for number in range(50, 0, -1)]
    points = [[2_000.0 - 5 * age, chance.random(), chance.random(), 1.0, 3] for age in range(179, -1, -1)]
    return {"replicas": fleet, "decisions": made, "points": points}


@pytest.mark.parametrize("width", [60, 80, 200])
@pytest.mark.parametrize("height", [10, 24, 60])
@pytest.mark.parametrize("keys", [(), ("down",) * 40, ("tab", "down", "down"), ("d",)])
def test_it_fills_the_terminal_exactly(width: int, height: int, keys: tuple[str, ...]) -> None:
    shown = Shown(**large())
    shown.press(*keys)
    lines = shown.lines(width, height)
    assert len(lines) == height
    assert max(cell_len(line) for line in lines) <= width


@pytest.mark.parametrize("size", [(1, 1), (20, 3), (5, 40)])
def test_a_terminal_that_is_too_small_is_no_error(size: tuple[int, int]) -> None:
    shown = Shown(**large())
    shown.press("tab")
    assert len(shown.lines(*size)) == size[1]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_replica_is_a_row(width: int) -> None:
    (row,) = [line for line in Shown().lines(width) if line.startswith("r-0:8000")]
    wanted = ["r-0:8000", "up", "50 %", "3", "4", "1"] + (["1,200 tok 30 ms"] if width >= 80 else []) + ["83 %"]
    assert re.match(" +".join(wanted), row), row


def test_what_is_not_known_is_not_zero() -> None:
    shown = Shown(replicas=[replica(0, running=None, kv_usage=None, hit_rate=None), replica(1, load_age=60.0)])
    rows = [line.split() for line in shown.lines() if line.startswith("r-")]
    assert rows[0][2:4] == ["-", "-"]
    assert rows[0][-1] == "-"
    assert rows[1][2:5] == ["-", "-", "-"], "too old"


def test_who_is_not_up_stands_first_and_says_why() -> None:
    fleet = [replica(number) for number in range(63)]
    shown = Shown(replicas=[*fleet, replica(63, health="ejected", last_failure="connection refused")])
    text = shown.text()
    assert "replicas 63 of 64 up" in text
    assert re.search(r"REPLICA 1-\d+ of 64", text)
    assert "r-63:8000: ejected: connection refused" in text


def test_the_selected_replica_is_always_seen() -> None:
    shown = Shown(replicas=[replica(number) for number in range(64)])
    for key, seen in (("end", "r-63:"), ("up", "r-62:"), ("home", "r-0:"), ("page down", "r-10:"), ("j", "r-11:")):
        shown.press(key)
        assert any(line.startswith(seen) for line in shown.lines()), key
        assert shown.view.replica is not None
        assert shown.view.replica.replica.startswith(f"http://{seen}")


def test_decisions_come_and_end_newest_first() -> None:
    shown = Shown(decisions=[decision(1)])
    shown.picture.take(frame(decisions=[decision(3, reason="spilled"), decision(2)], left_out=188))
    assert "DECISION +188 more" in shown.text()
    rows = [line for line in shown.lines() if "tok" in line and re.match(r"\d\d:", line)]
    assert [row.split()[2] for row in rows] == ["spilled", "warm", "warm"]
    assert all("running" in row for row in rows)
    shown.picture.take(frame(ended=[{"number": 3, "end": end()}, {"number": 77, "end": end()}]))
    (row,) = [line for line in shown.lines() if "spilled" in line]
    assert re.search(r"93 % +42 ms completed", row)


def test_a_picture_after_a_gap_tells_ends_and_nothing_twice() -> None:
    shown = Shown(decisions=[decision(1)])
    shown.picture.take(frame(whole=True, decisions=[decision(2), decision(1, end=end())]))
    assert [(one.number, one.end is None) for one in shown.picture.decisions] == [(2, True), (1, False)]


def test_the_list_is_bounded() -> None:
    shown = Shown()
    for number in range(1, 500):
        shown.picture.take(frame(decisions=[decision(number)]))
    assert len(shown.picture.decisions) == LISTED


def test_a_decision_opens_with_its_costs_and_the_list_stands_still() -> None:
    ranking = [candidate(), candidate("http://r-1:8000", parts={"prefill": 2.0, "crowd": 0.125}, cached_tokens=12_345)]
    shown = Shown(decisions=[decision(2, ranking=ranking, candidates=9), decision(1)])
    shown.press("tab")
    assert "The reason of 2. 7 dearer candidates are not listed." in shown.text()
    shown.picture.take(frame(decisions=[decision(3)]))
    text = shown.text()
    assert "The reason of 2." in text
    heads = next(line.split() for line in text.splitlines() if line.startswith("CANDIDATE"))
    assert heads[3:6] == ["CACHED", "prefill", "queue"] or heads[:3] == ["CANDIDATE", "COST", "s"]
    assert "tie" not in heads, "what costs nobody anything says nothing"
    costs = next(line.split() for line in text.splitlines() if line.startswith("r-1:8000") and "12.3k" in line)
    assert "2.000" in costs
    assert "id-2" in text
    shown.press("down")
    assert "The reason of 1." in shown.text()
    shown.press("escape")
    assert "The reason of" not in shown.text()
    assert len([line for line in shown.lines() if re.match(r"\d\d:.*warm", line)]) == 3


def test_the_least_costs_go_first_where_the_terminal_is_narrow() -> None:
    parts = {f"part-{number}": float(number) for number in range(1, 9)}
    shown = Shown(decisions=[decision(1, ranking=[candidate(parts=parts)])])
    shown.press("tab")
    for width, seen in ((60, 2), (80, 4), (160, 8)):
        heads = next(line for line in shown.lines(width) if line.startswith("CANDIDATE"))
        assert len(re.findall(r"part-\d", heads)) >= seen
        assert "part-8" in heads


def test_a_gateway_that_starts_again_is_said_and_begins_anew() -> None:
    shown = Shown(decisions=[decision(7)])
    shown.press("tab")
    shown.picture.take(Lost("connection refused"))
    assert "No connection since" in shown.lines()[0]
    assert "connection refused" in shown.text(160)
    shown.picture.take(frame(run="two", whole=True, decisions=[decision(1)], points=[]))
    assert "live" in shown.lines()[0]
    assert "started again" in shown.lines()[0]
    assert "The reason of 7." in shown.text(), "what is being read stays"
    shown.press("escape")
    assert [one.number for one in shown.picture.decisions] == [1]


def test_a_drain_is_asked_for_twice() -> None:
    shown = Shown(replicas=[replica(0), replica(1, draining=True)])
    shown.press("down", "d")
    assert "Drain r-0:8000? No new requests; 1 there finish. y/N" in shown.lines()[-1]
    shown.press("enter")
    assert shown.drains == []
    assert "Nothing was done." in shown.lines()[-1]
    shown.press("d", "y")
    assert shown.drains == [Drain("http://r-0:8000", True, 1)]
    shown.press("home", "d")
    assert "Undrain r-1:8000?" in shown.lines()[-1]
    shown.press("y")
    assert shown.drains[-1] == Drain("http://r-1:8000", False, 1)
    shown.press("d")
    shown.view.press("q")
    assert not shown.view.left, "a question was answered with no"
    shown.press("q")
    assert shown.view.left


def test_without_an_admin_listener_it_says_how_to_drain() -> None:
    picture = Picture(frame())
    view = View(picture, None)
    view.press("d")
    assert "--admin" in view.note


def test_one_of_several_workers_says_whose_picture_it_is() -> None:
    assert "alone" not in Shown().lines()[0]
    assert ", worker 2 of 4 alone  live " in Shown(process="worker 2 of 4").lines()[0]


def test_nothing_that_others_call_themselves_is_obeyed() -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\u202e\u200b\x9b31m\r\n"
    bad = candidate(f"http://{evil}", parts={evil: 1.0})
    shown = Shown(
        version=evil,
        policy=evil,
        process=evil,
        replicas=[replica(0, replica=f"http://{evil}", engine=evil, health=evil, last_failure=evil, models=[evil])],
        decisions=[
            decision(1, request_id=evil, route=evil, model=evil, tenant=evil, reason=evil, replica=evil, why=evil)
            | {"ranking": [bad], "end": end(outcome=evil, error=evil), "policy": evil}
        ],
    )
    shown.press("tab")
    shown.picture.take(Lost(evil))
    for text in (shown.text(200, 40), shown.text(80, None)):
        assert all(line.isprintable() for line in text.splitlines())
    shown.press("escape", "d")
    assert shown.lines()[-1].isprintable()


def test_names_in_wide_characters_keep_the_columns() -> None:
    shown = Shown(
        replicas=[replica(0, replica="http://模型模型模型模型模型模型模型模型模型模型模型模型:8000"), replica(1)]
    )
    rows = [line for line in shown.lines() if line.startswith(("r-", "模"))]
    assert len({cell_len(row[: row.index(" up ")]) for row in rows}) == 1


def test_an_empty_fleet_and_no_decisions_are_said() -> None:
    text = Shown(replicas=[]).text()
    assert "There are no replicas." in text
    assert "no request came" in text


def test_a_sparkline_has_gaps_where_nothing_was_known() -> None:
    now = 900.0
    points = [(0.1, 1.0), (449.0, None), (460.0, 0.5), (900.0, 0.0)]
    assert sparkline(points, now, 10, 1.0, BLOCKS) == "█    ▅   ▁"
    assert sparkline(points, now, 10, None, ASCII) == "#    =   _"
    assert sparkline([], now, 4, None, BLOCKS) == "    "
    absurd = [(900.0, 1e308), (900.0, 1e308)]
    assert sparkline(absurd, now, 2, 1.0, BLOCKS) == sparkline(absurd, now, 2, None, BLOCKS) == " █"
    assert sparkline([(-1e9, 1.0), (1e9, 0.0)], now, 4, None, BLOCKS) == "   ▁", "clocks may differ"
