"""The terminal: its size, and keys as names, one by one and not echoed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import termios
import tty
from collections.abc import Callable, Iterator

KEYS = {
    b"\x1b[A": "up",
    b"\x1bOA": "up",
    b"\x1b[B": "down",
    b"\x1bOB": "down",
    b"\x1b[5~": "page up",
    b"\x1b[6~": "page down",
    b"\x1b[H": "home",
    b"\x1bOH": "home",
    b"\x1b[1~": "home",
    b"\x1b[F": "end",
    b"\x1bOF": "end",
    b"\x1b[4~": "end",
    b"\x1b": "escape",
    b"\t": "tab",
    b"\r": "enter",
    b"\n": "enter",
}
SEQUENCE = re.compile(rb"\x1b(?:\[[0-9;?]*[A-Za-z~]|O[A-Za-z])?|.", re.DOTALL)
READ_BYTES = 1024
UNTOLD = 80, 24
NO_KEY = b"\x00"


def keys_in(typed: bytes) -> list[str]:
    """Unknown sequences are no keys."""
    found = []
    for sequence in SEQUENCE.findall(typed):
        name = KEYS.get(sequence) or (sequence.decode("ascii", "ignore") if len(sequence) == 1 else "")
        if name:
            found.append(name)
    return found


@contextlib.contextmanager
def keys(terminal: int, pressed: Callable[[str], None], gone: Callable[[], None]) -> Iterator[None]:
    """While it lasts, each key is a call; `gone`: there is no terminal any more. Afterwards it is as it was."""
    loop, before = asyncio.get_running_loop(), termios.tcgetattr(terminal)

    def read() -> None:
        try:
            typed = os.read(terminal, READ_BYTES)
        except OSError:  # hung up
            typed = b""
        if not typed:
            loop.remove_reader(terminal)
            gone()
        for key in keys_in(typed):
            pressed(key)

    tty.setcbreak(terminal)
    changed = termios.tcgetattr(terminal)
    changed[6][termios.VSUSP] = NO_KEY  # Ctrl-Z would leave the shell with our screen
    termios.tcsetattr(terminal, termios.TCSANOW, changed)
    loop.add_reader(terminal, read)
    try:
        yield
    finally:
        loop.remove_reader(terminal)
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def size(descriptor: int) -> tuple[int, int]:
    """Columns and lines. A terminal that has not been told says 0, as one of a container does at first."""
    columns, lines = os.get_terminal_size(descriptor)
    return columns or UNTOLD[0], lines or UNTOLD[1]


@contextlib.contextmanager
def resizes(changed: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGWINCH, changed)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)
