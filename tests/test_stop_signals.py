"""Signals are heeded by whoever is at work, and kept where nobody is."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from gateway.stop_signals import StopSignals


async def send(number: int, until: asyncio.Event) -> None:
    os.kill(os.getpid(), number)
    await asyncio.wait_for(until.wait(), 10)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_the_first_asks_and_the_second_insists(number: int) -> None:
    with StopSignals().heard() as signals:
        assert not signals.asked.is_set()
        await send(number, signals.asked)
        assert not signals.insisted.is_set()
        await send(number, signals.insisted)


async def test_a_signal_between_two_who_heed_is_told_to_the_next() -> None:
    heard: list[str] = []
    with StopSignals().heard() as signals:
        with signals.heeded_by(lambda: heard.append("one")):
            pass
        await send(signal.SIGINT, signals.asked)
        assert heard == []
        with signals.heeded_by(lambda: heard.append("two")):
            assert heard == ["two"]
            signals.ask()
            assert heard == ["two", "two"]
        with signals.heeded_by(lambda: heard.append("three")):
            assert heard[2:] == ["three", "three"]
