"""`docs/clients.md` names every client of the matrix, at the version that is installed for it."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.clients.agents import AGENTS
from tests.clients.matrix import ROOT, SDKS

HERE = Path(__file__).parent
PAGE = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
NODE_ITSELF = re.compile(r"node-linux-")


def pinned() -> dict[str, str]:
    """Version by package, of all lists in this folder."""
    texts = [path.read_text(encoding="utf-8") for path in HERE.glob("requirements*.txt")]
    found = dict(re.findall(r"^([\w-]+)==(\S+)$", "\n".join(texts), re.MULTILINE))
    package = json.loads((HERE / "package.json").read_text(encoding="utf-8"))
    return found | package["dependencies"] | package["optionalDependencies"]


def test_every_client_is_documented() -> None:
    for client in (*SDKS, *AGENTS):
        assert client.name.partition(",")[0] in PAGE, client.name


def test_every_version_is_documented() -> None:
    for name, version in pinned().items():
        if not NODE_ITSELF.match(name):
            assert re.search(rf"\b{re.escape(version)}\b", PAGE), (name, version)
