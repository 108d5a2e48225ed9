"""The build of the package where not all is there that compiling its hot modules needs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_a_compiler_that_cannot_compile_leaves_the_package_interpreted():
    """As gcc without Python's headers: it is there, and fails."""
    environment = os.environ | {"CC": "false", "WARMLANE_COMPILE": "auto"}
    command = [sys.executable, "setup.py", "--version"]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "stays interpreted" in ended.stderr
