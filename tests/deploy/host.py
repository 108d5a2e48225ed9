"""A host for `deploy/install.sh`: a folder in place of `/`, and programs that stand in for those of the system.

The script looks at and writes to the folder (`--root`). The programs note how they were called and have the effect that
the script waits for, so a whole installation can be watched, a reboot in its middle included.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SECONDS = 60.0

SYSTEMS = {
    "ubuntu2204": 'PRETTY_NAME="Ubuntu 22.04.5 LTS"\nNAME="Ubuntu"\nVERSION_ID="22.04"\nID=ubuntu\nID_LIKE=debian\n',
    "ubuntu2404": 'PRETTY_NAME="Ubuntu 24.04.3 LTS"\nNAME="Ubuntu"\nVERSION_ID="24.04"\nID=ubuntu\nID_LIKE=debian\n',
    "debian12": 'PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nNAME="Debian GNU/Linux"\nVERSION_ID="12"\nID=debian\n',
}

PROGRAMS = {
    "uname": "case $1 in -m) echo x86_64 ;; *) echo 6.8.0-1-generic ;; esac",
    "id": "echo 0",
    "dpkg-query": '[ -e "$SYSTEM/packages" ] && echo installed',
    "apt-get": """case "$*" in
    *python3-venv*) touch "$SYSTEM/packages" ;;
    *cuda-toolkit-12-9) mkdir -p "$HOST/usr/local/cuda-12.9/bin" && cp "$0" "$HOST/usr/local/cuda-12.9/bin/nvcc" ;;
    *nvidia-open | *cuda-drivers) cp "$SYSTEM/driver" "$SYSTEM/module" ;;
esac""",
    "curl": "",
    "dpkg": 'mkdir -p "$HOST/usr/share/keyrings" && touch "$HOST/usr/share/keyrings/cuda-archive-keyring.gpg"',
    "modinfo": 'cat "$SYSTEM/module"',
    "getent": '[ -e "$SYSTEM/account" ]',
    "useradd": 'touch "$SYSTEM/account"',
    "systemctl": "",
}
QUIET = {"uname", "id", "dpkg-query", "modinfo", "getent"}
"""Programs that only ask are not noted."""


def run(command: list[str], environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """In the root of the sources, with `environment` added."""
    return subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | (environment or {}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


class Host:
    def __init__(self, folder: Path, system: str = "debian12", *, gpus: int = 1) -> None:
        self.root = folder / "root"
        self.prefix = folder / "opt"
        self.boots = 0
        self._system = folder / "system"
        self._programs = folder / "bin"
        self._calls = folder / "calls"
        for path in (self._system, self._programs):
            path.mkdir(parents=True)
        self.write("etc/os-release", SYSTEMS.get(system, system))
        for path in ("etc/apt/sources.list.d", "etc/systemd/system", "var/lib"):
            (self.root / path).mkdir(parents=True)
        # A display controller of NVIDIA each, between a bridge of NVIDIA and a display controller of somebody else.
        kinds = [("0x10de", "0x068000"), *[("0x10de", "0x030200")] * gpus, ("0x1234", "0x030000")]
        for number, (vendor, kind) in enumerate(kinds):
            self.write(f"sys/bus/pci/devices/0000:0{number}:00.0/vendor", vendor)
            self.write(f"sys/bus/pci/devices/0000:0{number}:00.0/class", kind)
        self.boot()
        self.offer_driver("580.82.07")
        for name, effect in PROGRAMS.items():
            note = "" if name in QUIET else f'echo "{name} $*" >>"{self._calls}"\n'
            self.program(name, f"{note}{effect}")

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(f"{text}\n")

    def program(self, name: str, text: str) -> None:
        path = self._programs / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def offer_driver(self, version: str) -> None:
        """What the package of the driver would install."""
        (self._system / "driver").write_text(version)

    def add_program(self, path: str, text: str = "") -> None:
        """In the folder of the environments."""
        program = self.prefix / path
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)

    def boot(self, *, loads_driver: bool = True) -> None:
        self.boots += 1
        self.write("proc/sys/kernel/random/boot_id", f"boot-{self.boots}")
        module = self._system / "module"
        if module.exists() and loads_driver:
            self.write("sys/module/nvidia/version", module.read_text())

    def install(self, *options: str) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": f"{self._programs}:{os.environ['PATH']}",
            "SYSTEM": str(self._system),
            "HOST": str(self.root),
        }
        command = ["sh", str(DEPLOY / "install.sh"), "--root", str(self.root), "--prefix", str(self.prefix), *options]
        return run(command, environment)

    def calls(self) -> list[str]:
        """What was called since the last look, other than questions."""
        found = self._calls.read_text().splitlines() if self._calls.exists() else []
        self._calls.unlink(missing_ok=True)
        return found

    def files(self) -> dict[str, bytes]:
        return {str(path.relative_to(self.root)): path.read_bytes() for path in self.root.rglob("*") if path.is_file()}
