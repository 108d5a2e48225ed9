"""SIGINT and SIGTERM, heard from the first moment of a command to its last.

Whoever is at work heeds them: the server while it serves, whoever ends replicas after it. Between two of them a signal
is kept, where Python would end the process with a traceback, or the system at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator

NUMBERS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """`asked` is set by the first signal, `insisted` by the second."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.insisted = asyncio.Event()
        self._heed: Callable[[], None] | None = None

    def ask(self) -> None:
        """As a signal does."""
        (self.insisted if self.asked.is_set() else self.asked).set()
        if self._heed is not None:
            self._heed()

    def signalled(self) -> None:
        self.ask()

    @contextlib.contextmanager
    def heard(self) -> Iterator[StopSignals]:
        loop = asyncio.get_running_loop()
        for number in NUMBERS:
            loop.add_signal_handler(number, self.signalled)
        try:
            yield self
        finally:
            for number in NUMBERS:
                loop.remove_signal_handler(number)

    @contextlib.contextmanager
    def heeded_by(self, heed: Callable[[], None]) -> Iterator[None]:
        """`heed` is called for each signal; at once for those that came before."""
        self._heed = heed
        for event in (self.asked, self.insisted):
            if event.is_set():
                heed()
        try:
            yield
        finally:
            self._heed = None
