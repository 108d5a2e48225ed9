"""Frames: what a gateway tells whoever looks, once a second (`gateway.dashboard.live` makes them)."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from gateway.dashboard.history import Point
from gateway.figures import Whole


class NotAFrame(Exception):
    pass


class Candidate(Struct):
    replica: str
    total_seconds: float
    parts: dict[str, float]
    prompt_tokens: Whole
    cached_tokens: Whole
    in_flight: Whole


class End(Struct):
    outcome: str
    error: str = ""
    status: Whole = 0
    prompt_tokens: Whole | None = None
    cached_tokens: Whole | None = None
    completion_tokens: Whole | None = None
    waited_seconds: float = 0.0
    overhead_seconds: float = 0.0
    ttft_seconds: float | None = None
    duration_seconds: float = 0.0


class Decision(Struct):
    number: Whole
    at: float
    request_id: str
    route: str
    model: str
    tenant: str
    attempt: Whole
    policy: str
    reason: str
    replica: str
    candidates: Whole
    ranking: list[Candidate]
    why: str = ""
    end: End | None = None


class Ended(Struct):
    number: Whole
    end: End


class Replica(Struct):
    replica: str
    engine: str | None
    health: str
    draining: bool
    last_failure: str
    models: list[str]
    in_flight: Whole
    running: Whole | None
    waiting: Whole | None
    kv_usage: float | None
    load_age: float | None
    pending_tokens: Whole
    pending_seconds: float
    hit_rate: float | None

    @property
    def state(self) -> str:
        return "draining" if self.draining else self.health


class Frame(Struct):
    run: str
    version: str
    policy: str
    started: float
    at: float
    in_flight: Whole
    waiting: Whole
    index_blocks: Whole
    index_capacity_blocks: Whole
    replicas: list[Replica]
    decisions: list[Decision]
    """New ones, newest first."""
    process: str = ""
    """Whose picture it is, where several serve."""
    whole: bool = False
    left_out: Whole = 0
    ended: list[Ended] = []
    points: list[Point] = []
    """In a whole picture."""
    point: Point | None = None


DECODER = msgspec.json.Decoder(Frame)
PREFIX = b"data: "


def frame_in(event: bytes) -> Frame:
    """Raises `NotAFrame`."""
    try:
        return DECODER.decode(event.removeprefix(PREFIX))
    except (msgspec.DecodeError, RecursionError) as error:
        raise NotAFrame(str(error)) from error
