"""Runs the coroutine of one exchange without the event loop's help where none is needed.

An `asyncio.Task` starts its coroutine in the next iteration of the loop and resumes it an iteration after its future is
done. An `Exchange` starts at once and is resumed by whoever completes what it waits for, in the same call stack: less
work for each request, and no wait behind other connections' events. It awaits `Completion`s that way and ordinary
futures as a task does. What needs a real task (time-outs, `TaskGroup`) is awaited as one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Completion(Generic[T]):
    """A value that comes once. Awaited by one exchange; `complete` resumes it before it returns."""

    __slots__ = ("_resume", "_value", "done")

    def __init__(self) -> None:
        self.done = False
        self._value: T | None = None
        self._resume: Callable[[], None] | None = None

    def complete(self, value: T) -> None:
        """Repeating it changes nothing."""
        if self.done:
            return
        self.done = True
        self._value = value
        resume, self._resume = self._resume, None
        if resume is not None:
            resume()

    def call_when_done(self, resume: Callable[[], None]) -> None:
        self._resume = resume

    def forget(self) -> None:
        """Whoever waited does not any more."""
        self._resume = None

    def __await__(self) -> Generator[Completion[T], None, T]:
        if not self.done:
            yield self
        return self._value  # type: ignore[return-value]


class Exchange:
    """One running coroutine. `ended` completes when it is over, however it ended."""

    __slots__ = ("_coroutine", "_running", "_waiting", "ended")

    def __init__(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._coroutine = coroutine
        self.ended = Completion[None]()
        self._waiting: Completion[Any] | asyncio.Future[Any] | None = None
        self._running = False

    def start(self) -> None:
        self._step(None)

    def cancel(self) -> None:
        """Raise `CancelledError` where it waits. Not to be called from inside the coroutine."""
        if self._running or self.ended.done:
            return  # it is about to end, or over: the coroutine itself closed what we hang on
        waiting, self._waiting = self._waiting, None
        if isinstance(waiting, Completion):
            waiting.forget()
        elif waiting is not None:
            waiting.remove_done_callback(self._future_done)
            waiting.cancel()
        self._step(asyncio.CancelledError())

    def _resume(self) -> None:
        self._waiting = None
        self._step(None)

    def _future_done(self, future: asyncio.Future[Any]) -> None:
        if self._waiting is not future:
            return  # cancelled after it was done and before we were told
        self._waiting = None
        self._step(None)

    def _step(self, error: BaseException | None) -> None:
        self._running = True
        try:
            waiting = self._coroutine.send(None) if error is None else self._coroutine.throw(error)
        except (StopIteration, asyncio.CancelledError):
            self.ended.complete(None)
            return
        except BaseException as bug:
            self.ended.complete(None)
            asyncio.get_running_loop().call_exception_handler({"message": "an exchange failed", "exception": bug})
            return
        finally:
            self._running = False
            error = None  # its traceback holds this frame, and all that the request held: a cycle, for the collector
        self._waiting = waiting
        if type(waiting) is Completion:
            waiting.call_when_done(self._resume)
        else:  # a future; the flag is how it tells a task that it was awaited rather than yielded by mistake
            waiting._asyncio_future_blocking = False
            waiting.add_done_callback(self._future_done)
