"""The commands of the page "troubleshooting", run beside an embedded fleet."""

from __future__ import annotations

import inspect
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.doctor_command import doctor
from tests.doctor.processes import PATIENCE_SECONDS, WARMLANE, running

PAGE = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.M | re.S) for line in block.splitlines()]


@pytest.fixture(scope="module")
def gateway() -> Iterator[str]:
    with running((*WARMLANE, "up", "--port", "0"), r"serves (\S+)") as url:
        yield url


def here(command: str, gateway: str) -> str:
    """The command with the address that the gateway of this test has, and with a short look."""
    assert "http://127.0.0.1:8000" in command
    command = command.replace("http://127.0.0.1:8000", gateway).replace("--seconds 60", "")
    if " doctor " in command and "--seconds" not in command:
        command += " --seconds 1"
    return command.replace(".venv/bin/warmlane", f"{sys.executable} -c 'from gateway.cli import main; main()'")


@pytest.mark.parametrize("command", [one for one in COMMANDS if "--watch" not in one])
def test_every_command_runs(command: str, gateway: str) -> None:
    ended = subprocess.run(
        ["sh", "-c", here(command, gateway)], capture_output=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert gateway.encode() in ended.stdout or b"http://127.0.0.1:" in ended.stdout


def test_the_watch_runs_until_it_is_interrupted(gateway: str) -> None:
    (command,) = [one for one in COMMANDS if "--watch" in one]
    shell = ["sh", "-c", f"exec {here(command, gateway)}"]
    with subprocess.Popen(shell, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        next(line for line in watching.stdout if "No prompts came" in line)
        watching.send_signal(signal.SIGINT)
        assert watching.wait(PATIENCE_SECONDS) == 0


def test_the_commands_are_there_and_ten_seconds_are_ten() -> None:
    assert len(COMMANDS) == 6
    assert "for ten seconds" in PAGE
    assert inspect.signature(doctor).parameters["seconds"].default == 10.0
