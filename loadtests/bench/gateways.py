"""How each gateway is installed and started. One row of `GATEWAYS` is all that the benchmark knows about one.

Every gateway gets the same two replicas, one core, room for all connections, and no log but errors, except Warmlane,
which runs as it ships: default policy, one JSON record for each request (into a file).
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from loadtests.bench.processes import BenchmarkFailure, free_port

DIRECT = "direct"
"""The name under which a replica without any gateway is measured."""
WARMLANE = "warmlane"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a gateway runs."""

    port: int
    replicas: tuple[str, ...]
    folder: Path
    """Its own: configuration, temporary files."""
    peers: Path
    """Where installed peers live, one venv each."""
    index_memory_mib: int | None = None
    """Cap of the prefix index, where a gateway has one; `None`: its default."""


@dataclass(frozen=True, slots=True)
class Gateway:
    name: str
    command: Callable[[Place], list[str]]
    version: Callable[[Path], str | None]
    """Given the folder of peers: the version, after installing it where needed; `None`: it cannot be had here."""
    verbatim: bool = True
    """Must bodies arrive byte for byte as sent? The routers that parse and write JSON anew are let off."""


def nginx_command(place: Place) -> list[str]:
    """A plain proxy, round robin: what forwarding alone costs."""
    temporary = "\n".join(
        f"  {kind}_temp_path {place.folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    servers = " ".join(f"server {url.removeprefix('http://')};" for url in place.replicas)
    config = place.folder / "nginx.conf"
    config.write_text(f"""\
worker_processes 1; daemon off; pid {place.folder}/nginx.pid; error_log stderr error; worker_rlimit_nofile 20000;
events {{ worker_connections 8192; }}
http {{
{temporary}
  access_log off; tcp_nodelay on; client_max_body_size 64m; client_body_buffer_size 1m; keepalive_requests 100000000;
  upstream replicas {{ {servers} keepalive 1024; keepalive_requests 100000000; }}
  server {{
    listen 127.0.0.1:{place.port} backlog=4096;
    location / {{
      proxy_pass http://replicas; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    }}
  }}
}}
""")
    return [str(nginx_program()), "-p", str(place.folder), "-e", "stderr", "-c", str(config)]


def nginx_program() -> Path | None:
    found = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    return Path(found) if found else None


def nginx_version(_peers: Path) -> str | None:
    program = nginx_program()
    if not program:
        return None
    return subprocess.run([program, "-v"], capture_output=True, text=True, check=True).stderr.strip().rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class Peer:
    """A router from the package index, in a venv of its own."""

    package: str
    pinned: str
    """Figures are only worth comparing between runs with the same version."""
    program: str
    arguments: tuple[str, ...] = ()

    @property
    def variable(self) -> str:
        """Environment variable with the path of an installed program to use instead."""
        return f"BENCH_{self.package.upper().replace('-', '_')}"

    def path(self, peers: Path) -> Path:
        return Path(os.environ.get(self.variable) or peers / self.package / "bin" / self.program)

    def command(self, place: Place) -> list[str]:
        return [
            *(str(self.path(place.peers)), *self.arguments),
            *("--host", "127.0.0.1", "--port", str(place.port)),
            *("--worker-urls", *place.replicas),
            *("--policy", "cache_aware", "--log-level", "error"),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())),
            # Room for 512 streams and for bodies of any size, as the others have.
            *("--max-concurrent-requests", "8192", "--max-payload-size", "67108864"),
        ]

    def version(self, peers: Path) -> str:
        program = self.path(peers)
        if not program.exists():
            folder = peers / self.package
            venv.create(folder, with_pip=True, clear=True)
            install = [str(folder / "bin" / "pip"), "install", "--quiet", f"{self.package}=={self.pinned}"]
            if subprocess.run(install).returncode != 0 or not program.exists():
                raise BenchmarkFailure(f"could not install {self.package}; see above, or set {self.variable}")
        script = f"from importlib.metadata import version; print(version({self.package!r}))"
        python = program.parent / "python"
        return subprocess.run([python, "-c", script], capture_output=True, text=True, check=True).stdout.strip()


VLLM_ROUTER = Peer("vllm-router", "0.1.17", "vllm-router")
SGLANG_ROUTER = Peer("sglang-router", "0.3.2", "smg", ("launch",))


def warmlane_command(place: Place) -> list[str]:
    replicas = "\n".join(f'[[replicas]]\nurl = "{url}"' for url in place.replicas)
    routing = f"[routing]\nindex_memory_mib = {place.index_memory_mib}" if place.index_memory_mib else ""
    config = place.folder / "warmlane.toml"
    config.write_text(f'[server]\nhost = "127.0.0.1"\nport = {place.port}\nlog = "json"\n{replicas}\n{routing}\n')
    program = os.environ.get("BENCH_WARMLANE") or str(Path(sys.executable).parent / "warmlane")
    return [program, "serve", "--config", str(config), "--policy", "cache-cost"]


GATEWAYS = (
    Gateway("nginx", nginx_command, nginx_version),
    Gateway("vllm-router", VLLM_ROUTER.command, VLLM_ROUTER.version, verbatim=False),
    Gateway("sglang-router", SGLANG_ROUTER.command, SGLANG_ROUTER.version, verbatim=False),
    Gateway(WARMLANE, warmlane_command, lambda _peers: version("warmlane")),
)


def gateway_from_command(text: str) -> Gateway:
    """`NAME=COMMAND`: any other gateway. `{port}`, `{replica1}` and `{replica2}` in the command are filled in."""
    name, separator, command = text.partition("=")
    if not (name and separator and command):
        raise BenchmarkFailure(f"expected NAME=COMMAND: {text!r}")

    def fill(place: Place) -> list[str]:
        values = {f"replica{at}": url for at, url in enumerate(place.replicas, 1)}
        return [part.format(port=place.port, **values) for part in shlex.split(command)]

    return Gateway(name, fill, lambda _peers: "given command")
