"""A person at a terminal: types, and sees what is on the screen. The terminal is a pseudo terminal of a given size."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import struct
import subprocess
import sys
import termios
from collections.abc import AsyncIterator, Mapping, Sequence

from tests.chaos.rig import ROOT, eventually

WARMLANE = (sys.executable, "-c", "from gateway.cli import main; main()")
CONTROL = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|\r|\n|[^\x1b\r\n]+")
UNFINISHED = re.compile(r"\x1b(\[[?0-9;]*)?$")


class Typist:
    def __init__(self, columns: int, lines: int) -> None:
        self.raw = ""
        """All that came."""
        self.process: subprocess.Popen[bytes]
        self._ours, self.theirs = os.openpty()
        self._cells: dict[int, dict[int, str]] = {}
        self._at = (0, 0)
        self._rest = ""
        self.resize(columns, lines)
        self.first_modes = self.modes

    def begin(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            [*WARMLANE, "top", *arguments],
            cwd=ROOT,
            env=environment,
            stdin=self.theirs,
            stdout=self.theirs,
            stderr=self.theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )

    def resize(self, columns: int, lines: int) -> None:
        self._cells = {}
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    @property
    def screen(self) -> str:
        rows = [self._cells[row] for row in sorted(self._cells)]
        return "\n".join("".join(row.get(column, " ") for column in range(max(row) + 1)) for row in rows)

    @property
    def modes(self) -> object:
        """Of the terminal, as a shell would find it."""
        return termios.tcgetattr(self._ours)

    async def sees(self, pattern: str, seconds: float = 20.0) -> str:
        """Wait until it is on the screen."""

        def is_there() -> bool:
            assert self.process.poll() is None, f"it ended: {self.raw[-2_000:]}"
            return re.search(pattern, self.screen) is not None

        try:
            await eventually(is_there, f"{pattern!r} is on the screen", seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}:\n{self.screen}") from None
        return self.screen

    async def ends(self) -> int:
        await eventually(lambda: self.process.poll() is not None, "it ends", 20.0)
        await asyncio.sleep(0)
        self.read()
        return self.process.returncode

    def read(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            while data := os.read(self._ours, 65_536):
                text = data.decode("utf-8", "replace")
                self.raw += text
                self._show(self._rest + text)

    def _show(self, text: str) -> None:
        """Move the cursor and write: all that the program uses."""
        cut = UNFINISHED.search(text)
        self._rest, text = (text[cut.start() :], text[: cut.start()]) if cut else ("", text)
        for found in CONTROL.finditer(text):
            row, column = self._at
            if found[2] == "H":
                place = [int(number or 1) - 1 for number in (found[1] or "1;1").split(";")]
                self._at = (place[0], place[1])
            elif found[2] is None and found[0] not in "\r\n":
                for character in found[0]:
                    self._cells.setdefault(row, {})[column] = character
                    column += 1
                self._at = (row, column)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._ours)


@contextlib.asynccontextmanager
async def at_terminal(*arguments: str, **environment: str) -> AsyncIterator[Typist]:
    """`warmlane top` with these arguments, in front of somebody."""
    typist = Typist(80, 24)
    os.set_blocking(typist._ours, False)
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    typist.begin(arguments, {**kept, "TERM": "xterm-256color", **environment})
    loop = asyncio.get_running_loop()
    loop.add_reader(typist._ours, typist.read)
    try:
        yield typist
    finally:
        loop.remove_reader(typist._ours)
        os.close(typist.theirs)
        typist.close()
