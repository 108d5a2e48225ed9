"""The stream: one frame for all, none while nobody looks, and nothing that grows behind somebody slow."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from gateway.core.model import LoadReported, LoadSnapshot
from gateway.dashboard.live import AT_ONCE, Live
from gateway.request_log import RequestRecord
from gateway.telemetry import Telemetry
from tests.chaos.rig import eventually
from tests.core.fleet import Fleet, ask

TICK_SECONDS = 0.02


class Names:
    def name(self, replica: str) -> str | None:
        return "vllm"


class Stage:
    """A stream over a real router."""

    def __init__(self, replicas: int = 2) -> None:
        self.fleet = Fleet(replicas)
        self.is_leaving = False
        telemetry = Telemetry(router=self.fleet.router, log=None)
        self.live = Live(
            self.fleet.router,
            telemetry,
            Names(),
            lambda: self.fleet.now,
            "cache-cost",
            lambda: self.is_leaving,
            tick_seconds=TICK_SECONDS,
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Stage]:
        task = asyncio.create_task(self.live.run())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def decide(self, count: int = 1) -> list[RequestRecord]:
        records = []
        for _ in range(count):
            record = RequestRecord(request_id="id", route="/v1/chat/completions", model="tiny")
            decision = self.fleet.router.decide(ask(b"x" * 600), self.fleet.now)
            record.started(decision)
            self.live.decisions.note(record, decision)
            records.append(record)
        return records


async def take(frames: AsyncIterator[bytes]) -> dict[str, Any]:
    event = await asyncio.wait_for(anext(frames), 10.0)
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    found: dict[str, Any] = json.loads(event.removeprefix(b"data: "))
    return found


async def take_until(frames: AsyncIterator[bytes], key: str) -> dict[str, Any]:
    """The first frame that has something there."""
    while True:
        if (frame := await take(frames)).get(key):
            return frame


async def test_a_whole_picture_first_and_then_what_is_new() -> None:
    async with Stage().running() as stage:
        stage.decide(3)
        load = LoadSnapshot(stage.fleet.now, running=2, waiting=1, kv_usage=0.5)
        stage.fleet.router.observe(LoadReported(stage.fleet.replicas[0], load), stage.fleet.now)
        with stage.live.viewer():
            frames = stage.live.frames()
            first = await take(frames)
            assert first["whole"]
            assert [one["number"] for one in first["decisions"]] == [3, 2, 1]
            (row, _) = first["replicas"]
            assert (row["health"], row["running"], row["waiting"], row["kv_usage"]) == ("up", 2, 1, 0.5)
            second = await take(frames)
            assert second["decisions"] == []
            assert second["left_out"] == 0
            (record,) = stage.decide()
            third = await take_until(frames, "decisions")
            assert [one["number"] for one in third["decisions"]] == [4]
            assert third["decisions"][0]["end"] is None
            record.outcome, record.duration_seconds = "completed", 1.0
            over = await take_until(frames, "ended")
            assert [(one["number"], one["end"]["outcome"]) for one in over["ended"]] == [(4, "completed")]


async def test_of_many_decisions_some_are_told_and_the_rest_is_counted() -> None:
    async with Stage().running() as stage:
        with stage.live.viewer():
            frames = stage.live.frames()
            await take(frames)
            stage.decide(AT_ONCE + 30)
            frame = await take_until(frames, "decisions")
            assert len(frame["decisions"]) == AT_ONCE
            assert frame["left_out"] == 30


async def test_what_was_decided_while_nobody_looked_is_not_left_out() -> None:
    async with Stage().running() as stage:
        stage.decide(100)
        with stage.live.viewer():
            frames = stage.live.frames()
            await take(frames)
            for _ in range(3):
                assert (await take(frames))["left_out"] == 0


async def test_who_missed_some_gets_a_whole_picture_and_all_others_share_one_frame() -> None:
    async with Stage().running() as stage:
        with stage.live.viewer(), stage.live.viewer(), stage.live.viewer():
            slow, quick, other = (stage.live.frames() for _ in range(3))
            for frames in (slow, quick, other):
                await take(frames)
            pairs = [await asyncio.gather(anext(quick), anext(other)) for _ in range(5)]
            assert pairs[-1][0] is pairs[-1][1]
            assert "whole" not in json.loads(pairs[-1][0].removeprefix(b"data: "))
            assert (await take(slow))["whole"]


async def test_while_nobody_looks_there_are_no_frames() -> None:
    """The counters of the plots are looked at all the same."""
    async with Stage().running() as stage:
        await asyncio.sleep(10 * TICK_SECONDS)
        assert stage.live._frame == b""
        with stage.live.viewer():
            assert (await take(stage.live.frames()))["points"]


async def test_the_stream_ends_when_the_gateway_leaves() -> None:
    async with Stage().running() as stage:
        with stage.live.viewer():
            frames = stage.live.frames()
            await take(frames)
            stage.is_leaving = True

            async def is_over() -> bool:
                return await anext(frames, None) is None

            await eventually(is_over, "the stream ends")


async def test_a_frame_of_a_large_fleet_stays_small() -> None:
    async with Stage(64).running() as stage:
        with stage.live.viewer():
            frames = stage.live.frames()
            await take(frames)
            stage.decide(200)
            await take_until(frames, "decisions")
            assert len(stage.live._frame) < 100_000
