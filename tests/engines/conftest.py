"""Other engines than vLLM, real ones: marked `engines`, run by `make test-engines`.

llama.cpp's server comes from a wheel (`install.sh`), its model is made here.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.chaos.rig import ROOT, Config, GatewayProcess, Process

HERE = Path(__file__).parent
PYTHON = ROOT / os.environ.get("LLAMA_VENV", ".venv-llama") / "bin" / "python"


@pytest.hookimpl(tryfirst=True)  # the marker must be there before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("engines")


class LlamaServer(Process):
    """llama.cpp's server with the tiny model."""

    def __init__(self, name: str, folder: Path, model: Path, slots: int, context: int, *options: str) -> None:
        command = [str(PYTHON), str(HERE / "serve_llama.py"), str(model), "0", str(slots), str(context), *options]
        super().__init__(name, command, folder, r"ready (http://\S+)")

    async def start(self) -> None:
        """Where it was, if it was somewhere."""
        if self.url:
            self.command[3] = str(self.port)
        await super().start()


@dataclass(frozen=True)
class Fleet:
    replicas: list[LlamaServer]
    gateway: GatewayProcess


Standing = Callable[..., AbstractAsyncContextManager[Fleet]]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not PYTHON.exists():
        pytest.fail(f"{PYTHON} is not there; `make test-engines` prepares all that these tests need")
    made = tmp_path_factory.mktemp("model") / "tiny.gguf"
    subprocess.run([sys.executable, HERE / "make_gguf.py", made], check=True)
    return made


@pytest.fixture
def standing(model: Path, tmp_path: Path) -> Standing:
    """So many servers of llama.cpp, each with so many slots, and a gateway in front of them, all up."""

    @contextlib.asynccontextmanager
    async def stand(
        count: int = 2, *options: str, slots: int = 2, context: int = 8_192, config: Config | None = None
    ) -> AsyncIterator[Fleet]:
        replicas = [
            LlamaServer(f"llama-{number + 1}", tmp_path, model, slots, context, *options) for number in range(count)
        ]
        gateway = None
        try:
            for replica in replicas:
                await replica.start()
            tables = {"feeds": {"tokenize": True}, **(config or {})}
            gateway = GatewayProcess("gateway", tmp_path, tables, [replica.url for replica in replicas])
            await gateway.start()
            for replica in replicas:
                await gateway.wait_state(replica, "up")
            yield Fleet(replicas, gateway)
        finally:
            if gateway is not None:
                await gateway.close()
            for replica in replicas:
                if replica.running:
                    replica.kill()

    return stand
