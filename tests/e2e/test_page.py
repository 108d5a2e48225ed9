"""What a person does with the live page, done by a browser."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.rig import EmbeddedReplica, GatewayProcess, Rig
from tests.e2e.conftest import KEY, Opened

LONG = "The same beginning, over and over. " * 100
PATIENCE_MS = 30_000


async def says(page: Any, selector: str, text: str) -> None:
    """Wait until it is there."""
    await page.locator(selector, has_text=re.compile(text)).first.wait_for(timeout=PATIENCE_MS)


async def test_which_replica_served_a_request_and_why(rig: Rig, opened: Opened) -> None:
    page = await opened(rig.gateway.url)
    await says(page, "#link", "^Live$")
    await says(page, "#no-decisions", "curl .*/v1/chat/completions")
    first = await rig.gateway.chat(LONG)
    second = await rig.gateway.chat(LONG)
    served = second.headers["x-warmlane-replica"].removeprefix("http://")
    await says(page, "summary", "warm")
    assert await page.locator("summary").count() == 2
    warm = page.locator("li", has_text="warm")
    assert served in await warm.inner_text()
    await warm.locator(".outcome", has_text="completed").wait_for(timeout=PATIENCE_MS)
    await warm.locator("summary").click()
    await says(page, ".breakdown", rf"{served} is believed to hold")
    text = await warm.inner_text()
    assert second.headers["x-request-id"] in text
    assert re.search(r"prompt tokens, [\d,]+ of them cached", text)
    assert await warm.locator("tbody tr").count() == 2
    assert first.headers["x-warmlane-replica"] == second.headers["x-warmlane-replica"]
    assert LONG[:20] not in await page.content()


async def test_where_would_this_body_go(rig: Rig, opened: Opened) -> None:
    served = (await rig.gateway.chat(LONG)).headers["x-warmlane-replica"].removeprefix("http://")
    page = await opened(rig.gateway.url, wrong_is_fine=True)  # the browser itself reports the 400
    await page.fill("#body", json.dumps({"model": "m", "messages": [{"role": "user", "content": LONG}]}))
    await page.click("#ask button[type=submit]")
    await says(page, "#answer", rf"To {served} by cache-cost, warm\.")
    await page.fill("#body", "{")
    await page.click("#ask button[type=submit]")
    await says(page, "#answer .wrong", "JSON")
    assert len(rig.gateway.log_records()) <= 1, "a question is no request"


async def test_drain_and_undrain_with_the_admin_key(rig: Rig, opened: Opened) -> None:
    page = await opened(rig.gateway.url, wrong_is_fine=True)  # the browser itself reports the 401
    row = page.locator("#fleet tbody tr").first
    await row.get_by_role("button", name=re.compile("^Drain")).click()
    await page.fill("#key", "a-wrong-key-of-some-length")
    await page.press("#key", "Enter")
    await says(page, "#drained", "Not done: The admin key")
    await row.get_by_role("button", name=re.compile("^Drain")).click()
    await page.fill("#key", KEY)
    await page.click("#key-go")
    await row.locator(".state", has_text="draining").wait_for(timeout=PATIENCE_MS)
    await row.get_by_role("button", name=re.compile("^Undrain")).click()
    await row.locator(".state", has_text="up").wait_for(timeout=PATIENCE_MS)
    assert KEY not in await page.content()


async def test_a_replica_that_dies_is_seen(rig: Rig, opened: Opened) -> None:
    page = await opened(rig.gateway.url)
    await says(page, "#totals", "2 of 2")
    rig.embedded[1].kill()
    await says(page, "#fleet .state", "ejected")
    await says(page, "#totals", "1 of 2")
    assert await page.locator("#fleet tr[data-out] .why").inner_text() != ""


async def test_the_gateway_restarts_underneath(rig: Rig, opened: Opened) -> None:
    page = await opened(rig.gateway.url, wrong_is_fine=True)  # the browser itself reports connections that fail
    await rig.gateway.chat(LONG)
    await says(page, "summary", "cold")
    rig.gateway.kill()
    await says(page, "#link", "^No connection")
    assert await page.locator("body.stale").count() == 1
    await rig.gateway.start()
    await says(page, "#link", "^Live$")
    await says(page, "#list .divider", "started again")
    await says(page, "#totals", "2 of 2")
    await rig.gateway.chat(LONG)
    await page.locator("summary").nth(1).wait_for(timeout=PATIENCE_MS)
    assert await page.locator("body.stale").count() == 0
    await rig.gateway.stop()
    assert rig.gateway.exit_code == 0, "it did not wait for the page"


async def test_the_list_stands_still_for_a_reader(rig: Rig, opened: Opened) -> None:
    page = await opened(rig.gateway.url)
    await rig.gateway.chat(LONG)
    await says(page, "summary", "completed")
    await page.click("#pause")
    await rig.gateway.chat(LONG)
    await says(page, "#rest", "1 new: paused")
    assert await page.locator("summary").count() == 1
    await page.click("#pause")
    await page.locator("summary").nth(1).wait_for(timeout=PATIENCE_MS)
    await page.fill("#find", "warm")
    assert await page.locator("#list li:visible").count() == 1


async def test_with_the_keyboard_alone(rig: Rig, opened: Opened) -> None:
    page = await opened(rig.gateway.url)
    await rig.gateway.chat(LONG)
    await says(page, "summary", "completed")
    seen = []
    for _ in range(60):
        await page.keyboard.press("Tab")
        name = await page.evaluate("document.activeElement.closest('summary')?.tagName ?? document.activeElement.id")
        seen.append(name)
        if name == "SUMMARY":
            break
    assert seen[-1] == "SUMMARY", seen
    await page.keyboard.press("Enter")
    await says(page, ".breakdown", "Nobody is believed to hold")
    await page.locator("#plots svg").first.focus()
    await page.keyboard.press("ArrowLeft")


async def test_what_a_screen_reader_gets(rig: Rig, opened: Opened) -> None:
    """Every control has a name, every table headers, each plot a sentence."""
    page = await opened(rig.gateway.url)
    await says(page, "#fleet .state", "up")
    nameless = await page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, textarea")]
            .filter((one) => !one.textContent.trim() && !one.labels?.length && !one.getAttribute("aria-label"))
            .map((one) => one.outerHTML)"""
    )
    assert nameless == []
    assert await page.locator("#fleet thead th[scope=col]").count() == 9
    assert await page.locator("#fleet tbody th[scope=row]").count() == 2
    for drawn in await page.locator("#plots svg").all():
        assert "last 15 minutes" in await drawn.get_attribute("aria-label")
    assert await page.locator("h1").count() == 1
    assert await page.evaluate("document.documentElement.lang") == "en"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [(1280, 900), (390, 844)])
async def test_it_fits_and_can_be_read(
    rig: Rig, opened: Opened, scheme: str, size: tuple[int, int], tmp_path: Path
) -> None:
    """Nothing sticks out to the side, and text stands out from its ground (4.5 to 1)."""
    viewport = {"width": size[0], "height": size[1]}
    page = await opened(rig.gateway.url, viewport=viewport, color_scheme=scheme)
    await asyncio.gather(*(rig.gateway.chat(LONG) for _ in range(3)))
    await says(page, "summary", "completed")
    await page.locator("summary").first.click()
    await says(page, ".breakdown", "believed")
    wide = await page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert wide[0] <= wide[1], wide
    faint = await page.evaluate(CONTRAST)
    assert faint == []
    await page.screenshot(path=tmp_path / "page.png", full_page=True)


CONTRAST = """() => {
  const paint = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (colour) => {
    paint.clearRect(0, 0, 1, 1);
    paint.fillStyle = colour;
    paint.fillRect(0, 0, 1, 1);
    return paint.getImageData(0, 0, 1, 1).data;
  };
  const straight = (value) => value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) =>
    0.2126 * straight(r / 255) + 0.7152 * straight(g / 255) + 0.0722 * straight(b / 255);
  const ground = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const data = rgb(getComputedStyle(at).backgroundColor);
      if (data[3] > 250) return data;
    }
    return rgb("white");
  };
  const found = new Set();
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((one) => one.nodeType === 3 && one.textContent.trim());
    if (!own || !node.checkVisibility() || node.closest("svg, option, .unseen, noscript, .skip")) continue;
    const [a, b] = [light(rgb(getComputedStyle(node).color)), light(ground(node))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) found.add(`${node.tagName} ${node.className}: ${ratio.toFixed(2)}`);
  }
  return [...found];
}"""


async def test_elsewhere_a_browser_asks_for_the_key(rig: Rig, opened: Opened, tmp_path: Path) -> None:
    config = {"server": {"host": "0.0.0.0"}, "admin": {"key_file": str(tmp_path / "admin-key")}}
    remote = await rig.add_gateway(config, wait=False)
    url = f"http://127.0.0.1:{remote.port}"
    page = await opened(url, http_credentials={"username": "me", "password": KEY}, wrong_is_fine=True)
    await says(page, "#link", "^Live$")
    await page.fill("#body", json.dumps({"model": "m", "messages": [{"role": "user", "content": LONG}]}))
    await page.click("#ask button[type=submit]")
    await says(page, "#answer", "by cache-cost")
    stranger = await opened(url, http_credentials={"username": "me", "password": "wrong"}, wrong_is_fine=True)
    assert "invalid_api_key" in await stranger.content()


async def test_sixty_four_replicas_and_two_hundred_decisions_a_second(opened: Opened, tmp_path: Path) -> None:
    """Replicas that are not there are rows as well. The page stays live."""
    real = EmbeddedReplica("embedded", tmp_path)
    await real.start()
    urls = [real.url, *(f"http://127.0.0.1:{port}" for port in range(9, 72))]
    gateway = GatewayProcess("gateway", tmp_path, {"server": {"log": "off"}}, urls)
    try:
        await gateway.start()
        await gateway.wait_state(real, "up")
        page = await opened(gateway.url)
        await says(page, "#totals", "1 of 64")
        assert await page.locator("#fleet tbody tr").count() == 64
        for _ in range(5):
            await asyncio.gather(*(gateway.chat("hi", max_tokens=1) for _ in range(200)))
        await says(page, "#link", "^Live$")
        assert await page.locator("summary").count() <= 100
        await says(page, "summary", "completed")
        await page.close()  # else it complains of the gateway that stops
    finally:
        await gateway.close()
        real.kill()
