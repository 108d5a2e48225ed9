"""Test 18: the framing corpus against a gateway process, both ways of serving, and what uvicorn's two parsers make of
it alone."""

from __future__ import annotations

import sys
from pathlib import Path

import httpx
import pytest

from tests.chaos.conftest import Figures
from tests.chaos.framing import CORPUS, WHOLE, exchange, problem
from tests.chaos.rig import Process
from tests.chaos.wire import gateway_before
from tests.proxy.conftest import MODES
from tests.proxy.scripted import ScriptedReplica

QUICK = {"header_timeout_seconds": 1.0, "body_timeout_seconds": 1.0}
AMBIGUOUS = [payload for payload in CORPUS if payload not in WHOLE]
SILENCE_SECONDS = 0.3
"""A bare uvicorn has no limit: what it has not closed by then stays open."""


@pytest.mark.parametrize("way", MODES)
async def test_18_framing_corpus(tmp_path: Path, figures: Figures, way: str) -> None:
    """O-18, O-19: raw payloads over a socket, a replica that records what reaches it."""
    problems, most = [], 0
    async with ScriptedReplica().running() as replica:
        async with gateway_before(tmp_path, {"server": {**QUICK, "http": way}}, replica.url) as gateway:
            for payload in CORPUS:
                before = len(replica.exchanges)
                answer = await exchange(gateway.port, payload, 10.0)
                bodies = [one.body for one in replica.exchanges[before:]]
                most = max(most, len(bodies) - max(0, payload.requests - 1))
                problems.append(problem(payload, answer, bodies))
    wrong = [one for one in problems if one]
    measured = f"{len(CORPUS)} payloads, at most {most} request from one, {len(wrong)} answered wrongly"
    target = ">= 60 payloads, never 2 from one, ambiguous = 400 + close"
    figures.record(18, f'http = "{way}"', measured, target, not wrong and most <= 1)
    assert wrong == []


@pytest.mark.parametrize("parser", ["httptools", "h11"])
async def test_18_what_each_parser_lets_through(tmp_path: Path, figures: Figures, parser: str) -> None:
    """uvicorn alone, for the choice between its parsers: a figure, and only that it answers is asserted."""
    command = [sys.executable, "-m", "uvicorn", "tests.chaos.bare:app", "--http", parser, "--port", "0"]
    bare = Process(f"uvicorn-{parser}", command, tmp_path, r"running on (http://\S+)")
    await bare.start()
    try:
        async with httpx.AsyncClient(trust_env=False, base_url=bare.url) as client:
            seen, lax = 0, []
            for payload in AMBIGUOUS:
                await exchange(bare.port, payload, SILENCE_SECONDS)
                now = int((await client.get("/count")).text)
                if now > seen:
                    lax.append(payload.name)
                seen = now
            assert (await client.get("/")).status_code == 200
    finally:
        await bare.stop()
    print("\n".join(["", *lax]))
    measured = f"{len(lax)} of {len(AMBIGUOUS)} ambiguous payloads reach the application"
    figures.record(18, f"uvicorn alone on {parser}", measured, "for the choice only", True)
