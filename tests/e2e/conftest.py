"""The live page in a real browser: marked `e2e`, run by `make test-e2e`.

Chromium is the system's, Playwright lies in a folder of its own (`install.sh`). What the page says to the console, and
what it asks of anybody but the gateway, fails a test.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.rig import ROOT, Rig, free_ports, standing

HERE = Path(__file__).parent
PLAYWRIGHT = ROOT / os.environ.get("E2E_PACKAGES", ".cache/e2e")
KEY = "an-admin-key-for-tests"
FLAGS = (
    "--no-sandbox",  # as root in a container there is none to be had; it opens pages of this machine only
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.hookimpl(tryfirst=True)  # the marker must be there before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("e2e")


@pytest.fixture
async def browser() -> AsyncIterator[Any]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None or not PLAYWRIGHT.exists():
        pytest.fail("chromium or Playwright is missing; `make test-e2e` prepares all that these tests need")
    if str(PLAYWRIGHT) not in sys.path:
        sys.path.append(str(PLAYWRIGHT))
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        running = await playwright.chromium.launch(executable_path=chromium, args=list(FLAGS))
        yield running
        await running.close()


Opened = Callable[..., Awaitable[Any]]


@pytest.fixture
async def opened(browser: Any) -> AsyncIterator[Opened]:
    """A page of the dashboard of a gateway; what goes wrong in it fails the test."""
    wrong: list[str] = []

    async def open_page(url: str, *, wrong_is_fine: bool = False, **options: Any) -> Any:
        context = await browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        page = await context.new_page()
        if not wrong_is_fine:
            page.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        host = url.split("/")[2].split(":")[0]
        page.on("request", lambda asked: wrong.append(asked.url) if not is_own(asked.url, host) else None)
        await page.goto(f"{url}/dashboard")
        return page

    yield open_page
    assert wrong == []


def is_own(url: str, host: str) -> bool:
    return url.startswith((f"http://{host}:", "data:"))


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    """Two embedded replicas and a gateway with an admin listener, on a port that it keeps when it starts again."""
    port, admin_port = free_ports(2)
    key = tmp_path / "admin-key"
    key.write_text(KEY)
    config = {"server": {"port": port}, "admin": {"port": admin_port, "key_file": str(key)}}
    async with standing(tmp_path, replicas=0, embedded=2, config=config) as stands:
        yield stands
