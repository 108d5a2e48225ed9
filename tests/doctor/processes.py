"""Programs that tests of the doctor start: an embedded replica, a gateway, and the doctor itself."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PATIENCE_SECONDS = 60.0
WARMLANE = (sys.executable, "-c", "from gateway.cli import main; main()")


@contextmanager
def running(command: tuple[str, ...], ready: str, *, on_stderr: bool = False) -> Iterator[str]:
    """What `ready` (a regular expression) finds in its output. It is ended with SIGTERM and must end well."""
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE} if on_stderr else {"stdout": subprocess.PIPE}
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, text=True, **pipes) as process:
        try:
            output = process.stderr if on_stderr else process.stdout
            assert output is not None
            yield next(match[1] for line in output if (match := re.search(ready, line)))
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(PATIENCE_SECONDS)
    assert code == 0


def replica(*options: str) -> Any:
    return running((sys.executable, "-m", "workers.sim_replica", "--port", "0", *options), r"^ready (\S+)")


def gateway(*options: str) -> Any:
    return running((*WARMLANE, "serve", "--port", "0", *options), r"listening on ([^, ]+)", on_stderr=True)


def doctor(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*WARMLANE, "doctor", *words],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
        env={**os.environ, **environment},
    )


def findings(*words: str, **environment: str) -> tuple[int, dict[str, Any]]:
    """Exit code, and what it prints with `--json`."""
    ended = doctor(*words, "--json", **environment)
    assert ended.stderr == ""
    return ended.returncode, json.loads(ended.stdout)


def codes(told: dict[str, Any]) -> set[tuple[str, str]]:
    return {(one["code"], one["subject"]) for one in told["findings"]}
