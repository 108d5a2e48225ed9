"""Session: one person at one terminal, from the first frame to `q`; or one picture where there is no terminal."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable

from rich.console import Console
from rich.text import Text

from gateway import operate
from gateway.dry_run import Unanswered
from gateway.figures import short_name
from gateway.stop_signals import StopSignals
from gateway.top import terminal
from gateway.top.frames import Frame
from gateway.top.picture import Picture
from gateway.top.screen import Screen
from gateway.top.sparkline import ASCII, BLOCKS
from gateway.top.stream import Lost, frames
from gateway.top.view import Drain, View


def new_console() -> Console:
    """Colours as the terminal has them, none with NO_COLOR; what its encoding lacks becomes `?`."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    return Console(highlight=False, markup=False, emoji=False)


def screen_of(console: Console, picture: Picture, view: View, url: str) -> Screen:
    return Screen(picture, view, url, BLOCKS if console.encoding.startswith("utf") else ASCII)


async def show_once(console: Console, url: str, key: str | None) -> None:
    """Raises `Unanswered`."""
    async with contextlib.aclosing(frames(url, key)) as coming:
        picture = Picture(await first_of(coming))
    for line in screen_of(console, picture, View(picture, None), url).lines(console.width, None):
        line.rstrip()
        console.print(line)


async def first_of(coming: AsyncIterator[Frame | Lost]) -> Frame:
    """Raises `Unanswered`."""
    told = await anext(coming)
    assert isinstance(told, Frame)  # before the first frame nothing is lost: it is an error
    return told


class Session:
    def __init__(self, console: Console, url: str, admin: str | None, key: str | None) -> None:
        self._console = console
        self._url, self._admin, self._key = url, admin, key
        self._changed = asyncio.Event()
        self._drains: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until `q`, Ctrl-C, or the terminal is gone. Raises `Unanswered` when there is no gateway at the start."""
        async with contextlib.aclosing(frames(self._url, self._key)) as coming:
            picture = Picture(await first_of(coming))
            view = View(picture, None if self._admin is None else lambda asked: self._begin_drain(view, asked))
            with contextlib.ExitStack() as until_left:
                stop = until_left.enter_context(StopSignals().heard())
                until_left.enter_context(stop.heeded_by(lambda: self._leave(view)))
                until_left.enter_context(terminal.resizes(self._changed.set))
                until_left.enter_context(self._console.screen(hide_cursor=True))
                if sys.stdin.isatty():
                    keys = terminal.keys(sys.stdin.fileno(), self._pressed(view), lambda: self._leave(view))
                    until_left.enter_context(keys)
                reading = asyncio.create_task(self._read(coming, picture))
                reading.add_done_callback(lambda _: self._leave(view))  # it ends by a mistake only
                try:
                    await self._draw(screen_of(self._console, picture, view, self._url), view)
                finally:
                    reading.cancel()
                    await asyncio.gather(reading, *self._drains, return_exceptions=True)
                if not reading.cancelled():
                    reading.result()

    async def _read(self, coming: AsyncIterator[Frame | Lost], picture: Picture) -> None:
        async for told in coming:
            picture.take(told)
            self._changed.set()

    async def _draw(self, screen: Screen, view: View) -> None:
        while not view.left:
            self._changed.clear()
            width, height = terminal.size(sys.stdout.fileno())
            lines = Text("\n", no_wrap=True).join(screen.lines(width, height))
            options = self._console.options.update_dimensions(width, height)
            self._console.update_screen(lines, options=options)
            await self._changed.wait()

    def _pressed(self, view: View) -> Callable[[str], None]:
        def pressed(key: str) -> None:
            view.press(key)
            self._changed.set()

        return pressed

    def _leave(self, view: View) -> None:
        view.left = True
        self._changed.set()

    def _begin_drain(self, view: View, asked: Drain) -> None:
        task = asyncio.create_task(self._drain(view, asked))
        self._drains.add(task)
        task.add_done_callback(self._drains.discard)

    async def _drain(self, view: View, asked: Drain) -> None:
        assert self._admin is not None
        view.note = "Asking the admin listener ..."
        try:
            await asyncio.to_thread(operate.drain, self._admin, asked.replica, self._key, draining=asked.draining)
            does = "gets no new requests" if asked.draining else "gets requests again"
            view.note = f"{short_name(asked.replica)} {does}."
        except Unanswered as error:
            view.note = f"Not done: {error}"
        self._changed.set()
