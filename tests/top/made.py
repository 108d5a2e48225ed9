"""Frames as a gateway makes them, with what a test wants to be different."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.top.frames import Frame, frame_in


def candidate(replica: str = "http://r-0:8000", **fields: Any) -> dict[str, Any]:
    parts = {"queue": 0.25, "prefill": 0.5, "tie": 0.0}
    return {
        "replica": replica,
        "total_seconds": 0.75,
        "parts": parts,
        "prompt_tokens": 1000,
        "cached_tokens": 930,
        "in_flight": 2,
        "pending_tokens": 0,
        "kv_usage": None,
        **fields,
    }


def decision(number: int, **fields: Any) -> dict[str, Any]:
    return {
        "number": number,
        "at": 1_000.0 + number,
        "request_id": f"id-{number}",
        "route": "/v1/chat/completions",
        "model": "tiny",
        "tenant": "",
        "attempt": 1,
        "policy": "cache-cost",
        "reason": "warm",
        "replica": "http://r-0:8000",
        "why": f"The reason of {number}.",
        "candidates": 2,
        "ranking": [candidate(), candidate("http://r-1:8000")],
        "end": None,
        **fields,
    }


def end(**fields: Any) -> dict[str, Any]:
    return {
        "outcome": "completed",
        "error": "",
        "status": 200,
        "ttft_seconds": 0.042,
        "duration_seconds": 1.5,
        **fields,
    }


def replica(number: int, **fields: Any) -> dict[str, Any]:
    return {
        "replica": f"http://r-{number}:8000",
        "engine": "vllm",
        "health": "up",
        "available": True,
        "draining": False,
        "last_failure": "",
        "models": ["tiny"],
        "in_flight": 1,
        "running": 3,
        "waiting": 4,
        "kv_usage": 0.5,
        "load_age": 0.5,
        "pending_tokens": 1200,
        "pending_seconds": 0.03,
        "hit_rate": 0.83,
        **fields,
    }


def encoded(**fields: Any) -> bytes:
    """As the stream has it."""
    made = {
        "run": "one",
        "version": "1.2.3",
        "policy": "cache-cost",
        "started": 0.0,
        "at": 2_000.0,
        "in_flight": 2,
        "waiting": 1,
        "index_blocks": 10,
        "index_capacity_blocks": 100,
        "replicas": [replica(0), replica(1)],
        "decisions": [],
        **fields,
    }
    return b"data: %b\n\n" % msgspec.json.encode(made)


def frame(**fields: Any) -> Frame:
    return frame_in(encoded(**fields))
