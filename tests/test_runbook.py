"""The runbook of docs/operate.md is run as it stands, by a shell, against a fleet that has keys and a Redis."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx

from gateway import keys
from tests.redis_server import redis_server
from tests.test_docs import blocks
from tests.test_up import KEY, WARMLANE, Up
from tests.test_up import start as start

ROOT = Path(__file__).parent.parent
GUIDE = (ROOT / "docs" / "operate.md").read_text(encoding="utf-8")
OLD_KEY = keys.new_secret()
CURL = """
import sys, httpx
name, value = sys.argv[3].split(": ", 1)
print(httpx.get(sys.argv[4], headers={name: value}).raise_for_status().text)
"""
"""For machines without curl: all of it that the runbook uses."""


def commands(section: str) -> str:
    (block,) = blocks(GUIDE.partition(f"\n## {section}\n")[2].partition("\n## ")[0], "sh")
    return block


def run(up: Up, folder: Path, section: str) -> str:
    """The commands of a section; what they print."""
    block = commands(section)
    for written, here in {
        "http://127.0.0.1:8000": up.url,
        "http://127.0.0.1:8001": up.admin_url,
        "/etc/warmlane": str(folder),
    }.items():
        block = block.replace(written, here)
    programs = {"warmlane": WARMLANE, "curl": [sys.executable, "-c", CURL]}
    functions = "".join(f'{name}() {{ {shlex.join(program)} "$@"; }}\n' for name, program in programs.items())
    ended = subprocess.run(
        ["sh", "-euc", functions + block],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "WARMLANE_ADMIN_KEY": KEY, "KEY": OLD_KEY},
        capture_output=True,
        text=True,
        timeout=60.0,
        check=False,
    )
    assert ended.returncode == 0, (block, ended.stdout, ended.stderr)
    return ended.stdout


def status(up: Up, key: str) -> int:
    return httpx.get(f"{up.url}/v1/models", headers={"authorization": f"Bearer {key}"}).status_code


def is_connected(up: Up) -> bool:
    page = httpx.get(f"{up.url}/metrics", headers={"authorization": f"Bearer {OLD_KEY}"}).text
    return "warmlane_peers_connected 1.0" in page


def test_the_rolling_restart_is_the_one_that_runs_under_load() -> None:
    """`tests/test_up.py` has it, with clients that must not notice."""
    assert commands("Rolling restart") == "warmlane restart --all --url http://127.0.0.1:8001\n"


def test_the_commands_of_the_runbook_do_what_it_says(start: Callable[..., Up], tmp_path: Path) -> None:
    folder = tmp_path / "etc"
    folder.mkdir()
    keys_file = folder / "keys.toml"
    keys_file.write_text(old := keys.new_entry("alice", OLD_KEY, "acme"))
    with redis_server(tmp_path) as redis:
        settings = f'[auth]\nkeys_file = "{keys_file}"\n[redis]\nurl = "{redis.url}"\n'
        up = start("--replicas", "2", settings=settings)
        up.wait_greeted()
        up.wait_for(lambda: [one["state"] for one in up.workers().values()] == ["ready", "ready"])

        drained = run(up, folder, "Draining")
        assert {"replica-1", "replica-2"} <= set(drained.split())
        assert re.search(r": draining, 0 requests there\n.*: up, 0 requests there\n$", drained)

        assert '"embedded"' in run(up, folder, "Rotating keys")
        new_key = (folder / "alice-2.txt").read_text().splitlines()[0]
        assert [status(up, key) for key in (OLD_KEY, new_key)] == [200, 200]
        keys_file.write_text(keys_file.read_text().replace(old, ""))
        up.wait_for(lambda: status(up, OLD_KEY) == 401)
        assert status(up, new_key) == 200
        keys_file.write_text(keys_file.read_text() + old)
        up.wait_for(lambda: status(up, OLD_KEY) == 200)

        up.wait_for(lambda: is_connected(up))
        redis.kill()
        up.wait_for(lambda: not is_connected(up))
        assert run(up, folder, "Loss of Redis") == "warmlane_peers_connected 0.0\n"
        redis.start()
        up.wait_for(lambda: is_connected(up))
        assert up.stop() == 0
