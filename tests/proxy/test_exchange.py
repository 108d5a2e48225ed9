"""The stand-in for a task: starts at once, is resumed in place, cancels wherever it waits."""

from __future__ import annotations

import asyncio

import pytest

from gateway.proxy.exchange import Completion, Exchange


async def test_runs_in_the_callers_stack_until_it_waits() -> None:
    trace: list[str] = []
    answer = Completion[int]()

    async def work() -> None:
        trace.append("began")
        trace.append(f"got {await answer}")

    exchange = Exchange(work())
    exchange.start()
    assert trace == ["began"]
    assert not exchange.ended.done
    answer.complete(7)
    assert trace == ["began", "got 7"]
    assert exchange.ended.done


async def test_a_completion_that_came_first_does_not_suspend() -> None:
    answer = Completion[str]()
    answer.complete("early")
    answer.complete("ignored")
    got: list[str] = []

    async def work() -> None:
        got.append(await answer)

    Exchange(work()).start()
    assert got == ["early"]


async def test_awaits_ordinary_futures_and_tasks() -> None:
    got: list[int] = []

    async def later() -> int:
        await asyncio.sleep(0)
        return 3

    async def work() -> None:
        got.append(await asyncio.get_running_loop().create_task(later()))
        with pytest.raises(ZeroDivisionError):
            await asyncio.get_running_loop().create_task(fail())

    async def fail() -> None:
        raise ZeroDivisionError

    exchange = Exchange(work())
    exchange.start()
    while not exchange.ended.done:  # noqa: ASYNC110 - iterations of the loop are what is waited for
        await asyncio.sleep(0)
    assert got == [3]


async def test_cancel_raises_where_it_waits_and_runs_the_finally() -> None:
    trace: list[str] = []
    never = Completion[None]()

    async def work() -> None:
        try:
            await never
        except asyncio.CancelledError:
            trace.append("cancelled")
            raise
        finally:
            trace.append("cleaned")

    exchange = Exchange(work())
    exchange.start()
    exchange.cancel()
    assert trace == ["cancelled", "cleaned"]
    assert exchange.ended.done
    never.complete(None)  # too late: nobody listens
    assert trace == ["cancelled", "cleaned"]


async def test_cancel_reaches_the_task_that_it_waits_for() -> None:
    inner: asyncio.Task[None] | None = None

    async def work() -> None:
        nonlocal inner
        inner = asyncio.get_running_loop().create_task(asyncio.sleep(3600))
        await inner

    exchange = Exchange(work())
    exchange.start()
    exchange.cancel()
    assert inner is not None
    with pytest.raises(asyncio.CancelledError):
        await inner


async def test_a_bug_is_reported_and_ends_it() -> None:
    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["exception"]))

    async def work() -> None:
        raise KeyError("bug")

    exchange = Exchange(work())
    exchange.start()
    assert exchange.ended.done
    assert isinstance(reported[0], KeyError)
