"""`warmlane top` at a terminal, in front of a real gateway with embedded replicas."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import termios
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.top import terminal
from tests.chaos.rig import Rig, free_ports, standing
from tests.proxy.conftest import running_gateway
from tests.proxy.scripted import ScriptedReplica
from tests.test_admin import run_here
from tests.top.typist import at_terminal

KEY = "an-admin-key-for-tests"
LONG = "The same beginning, over and over. " * 100
CANARY = "the-canary-is-yellow"
LEFT = "\x1b[?1049l\x1b[?25h"
"""Our screen is left, and the cursor is back."""


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    """Two embedded replicas, and a gateway on a port that it keeps when it starts again."""
    port, admin_port = free_ports(2)
    key = tmp_path / "admin-key"
    key.write_text(KEY)
    config = {"server": {"port": port}, "admin": {"port": admin_port, "key_file": str(key)}}
    async with standing(tmp_path, replicas=0, embedded=2, config=config) as stands:
        yield stands


async def test_a_person_at_a_terminal_of_80_by_24(rig: Rig) -> None:
    """Looks, asks why, drains and undrains, has the gateway start again underneath, and leaves no trace."""
    admin = re.search(r"admin listener on (\S+)", rig.gateway.err)[1]
    await rig.gateway.chat(LONG + CANARY, max_tokens=4)
    served = (await rig.gateway.chat(LONG + CANARY, max_tokens=4)).headers["x-warmlane-replica"][len("http://") :]
    async with at_terminal(rig.gateway.url, "--admin", admin, WARMLANE_ADMIN_KEY=KEY) as typist:
        await typist.sees("replicas 2 of 2 up")
        await typist.sees(rf"{served} warm .* [89]\d % .*completed")
        typist.type("\t")
        await typist.sees(rf"{served} is believed to hold [\d,]+ of [\d,]+ prompt")
        await typist.sees("replica reported [0-9,]+ prompt tokens")
        assert "CANDIDATE" in typist.screen
        typist.type("\x1b")
        await typist.sees("d drain")
        typist.type("d")
        await typist.sees(r"Drain \S+\? No new requests; 0 there finish\. y/N")
        typist.type("n")
        await typist.sees("Nothing was done")
        typist.type("dy")
        await typist.sees(r"\d +draining ")
        await typist.sees("gets no new requests")
        typist.type("k")  # who is not up stands first
        await typist.sees("d drain")
        typist.type("dy")
        await typist.sees("gets requests again")
        await typist.sees("replicas 2 of 2 up")
        typist.resize(60, 30)
        await typist.sees("hit rate")
        assert max(map(len, typist.screen.splitlines())) <= 60
        typist.resize(160, 30)
        rig.gateway.kill()
        await typist.sees("No connection since .*, trying again: .*(closed|connect|peer)")
        await rig.gateway.start()
        await typist.sees("live .*started again")
        await typist.sees("None yet")
        await rig.gateway.chat(LONG, max_tokens=4)
        await typist.sees("completed")
        typist.type("q")
        assert await typist.ends() == 0
        assert typist.raw.endswith(LEFT)
        assert CANARY not in typist.raw
        assert KEY not in typist.raw
        assert typist.modes == typist.first_modes
    async with at_terminal(rig.gateway.url, NO_COLOR="1") as typist:
        await typist.sees("live")
        typist.type("d")
        await typist.sees("To drain from here: warmlane top URL --admin URL")
        typist.type("\x03")
        assert await typist.ends() == 0
        assert typist.raw.endswith(LEFT)
        assert typist.modes == typist.first_modes
        assert not re.search(r"\x1b\[(\d+;)*[349][0-8]", typist.raw), "no colour"


def test_a_terminal_that_has_not_been_told_its_size_has_one() -> None:
    ours, theirs = os.openpty()
    assert terminal.size(theirs) == (80, 24)
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    assert terminal.size(theirs) == (100, 30)
    os.close(ours)
    os.close(theirs)


@pytest.fixture
async def guarded(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """URL of a gateway that wants the admin key of whoever looks."""
    monkeypatch.setenv("ADMIN", KEY)
    async with ScriptedReplica().running() as replica:
        async with running_gateway(replica, admin={"key_env": "ADMIN"}, server={"host": "0.0.0.0"}) as gateway:
            await gateway.chat("hello")
            yield f"http://127.0.0.1:{gateway.port}"


async def test_piped_it_prints_one_picture(guarded: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert await run_here("top", guarded, "--key-env", "ADMIN") == 0
    told = capsys.readouterr()
    assert "replicas 1 of 1 up" in told.out
    assert "is the only candidate" in told.out
    assert "\x1b" not in told.out
    assert told.err == ""


@pytest.mark.parametrize(("variable", "problem"), [("WRONG", "holds another key"), ("UNSET", "is not set")])
async def test_without_the_right_key_it_says_which_one_is_wanted(
    guarded: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variable: str, problem: str
) -> None:
    monkeypatch.setenv("WRONG", "another-key-of-some-length")
    assert await run_here("top", guarded, "--key-env", variable) == 1
    told = capsys.readouterr()
    assert told.out == ""
    (line,) = told.err.splitlines()
    assert re.search(rf"HTTP 401: .*\${variable} {problem}: --key-env", line)
