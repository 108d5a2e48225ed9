"""Several worker processes of one gateway: as many hits as one, quick pages under load, and one that hangs."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import httpx

from gateway.keys import new_entry, new_secret
from tests.chaos.openloop import percentile
from tests.chaos.rig import EmbeddedReplica, GatewayProcess, eventually, span
from tests.proxy.certificates import Authority
from tests.redis_server import redis_server
from tests.several.conftest import children

CONVERSATIONS = 30
TURNS = 6
AT_ONCE = 6
OPTIONS = ("--cache-tokens", "60000", "--decode-rate", "2000", "--prefill-rate", "40000")
"""Three caches hold the conversations with little to spare."""
MOST_POINTS = 2.0
MOST_SCRAPE_MS = 100.0


@asynccontextmanager
async def standing(folder: Path, workers: int, replicas: int = 3) -> AsyncIterator[GatewayProcess]:
    fleet = [EmbeddedReplica(f"embedded-{workers}-{number}", folder, *OPTIONS) for number in range(replicas)]
    server = {"workers": workers, "drain_delay_seconds": 0.0, "drain_seconds": 2.0}
    try:
        await asyncio.gather(*(one.start() for one in fleet))
        gateway = GatewayProcess(f"gateway-{workers}", folder, {"server": server}, [one.url for one in fleet])
        await gateway.start()
        try:
            for one in fleet:
                await gateway.wait_state(one, "up")
            yield gateway
        finally:
            await gateway.close()
    finally:
        for one in fleet:
            if one.running:
                one.kill()


async def ask(url: str, messages: list[dict[str, str]]) -> tuple[int, int]:
    """Cached and all tokens of the prompt. Over a connection of its own, so through any worker."""
    async with httpx.AsyncClient(trust_env=False, timeout=30.0) as client:
        body = {"model": "m", "max_tokens": 20, "messages": messages}
        usage = (await client.post(f"{url}/v1/chat/completions", json=body)).raise_for_status().json()["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]


async def cached_share(url: str) -> float:
    """Of prompt tokens, in per cent, over conversations that a few clients carry on side by side."""
    random = Random(7)
    waiting = list(range(CONVERSATIONS))
    cached = total = 0

    async def carry_on() -> None:
        nonlocal cached, total
        while waiting:
            name = waiting.pop()
            messages = [
                {"role": "system", "content": f"{name}: " + "rules of the house, " * random.randrange(100, 400)}
            ]
            for turn in range(TURNS):
                messages.append(
                    {"role": "user", "content": f"{turn} {name} " + "and then? " * random.randrange(50, 200)}
                )
                hits, tokens = await ask(url, messages)
                cached, total = cached + hits, total + tokens
                messages.append({"role": "assistant", "content": "So it is. " * 20})

    await asyncio.gather(*(carry_on() for _ in range(AT_ONCE)))
    return 100.0 * cached / total


async def test_workers_hit_as_often_as_one_process(tmp_path: Path) -> None:
    shares = {}
    for workers in (1, 2, 4):
        async with standing(tmp_path, workers) as gateway:
            shares[workers] = await cached_share(gateway.url)
    print({workers: f"{share:.1f} % cached" for workers, share in shares.items()})
    assert shares[1] > 50.0
    for workers in (2, 4):
        assert abs(shares[workers] - shares[1]) <= MOST_POINTS


async def test_pages_of_all_are_quick_under_load(tmp_path: Path) -> None:
    async with standing(tmp_path, 4) as gateway:
        until = time.monotonic() + span(10.0, 5.0)
        took: list[float] = []

        async def load() -> None:
            while time.monotonic() < until:
                await ask(gateway.url, [{"role": "user", "content": "What now? " * 100}])
                await asyncio.sleep(0.1)

        async def scrape() -> None:
            async with httpx.AsyncClient(trust_env=False, timeout=10.0) as client:
                while time.monotonic() < until:
                    began = time.monotonic()
                    (await client.get(f"{gateway.url}/metrics")).raise_for_status()
                    took.append((time.monotonic() - began) * 1e3)
                    await asyncio.sleep(0.05)

        await asyncio.gather(scrape(), *(load() for _ in range(8)))
    print(f"{len(took)} pages: p50 {percentile(took, 0.5):.0f} ms, p99 {percentile(took, 0.99):.0f} ms")
    assert percentile(took, 0.5) <= MOST_SCRAPE_MS


async def test_a_worker_that_hangs_gets_no_more_connections(tmp_path: Path) -> None:
    """O-26 in kind: a process that is stopped answers nobody, and nobody waits for it for long."""
    async with standing(tmp_path, 3, replicas=1) as gateway:
        victim = children(gateway.pid)[0]
        before = (await gateway.metrics()).total("warmlane_requests_total")
        os.kill(victim, signal.SIGSTOP)

        async def is_out() -> bool:
            async with httpx.AsyncClient(trust_env=False, timeout=5.0) as client:
                try:
                    return "warmlane_processes 2.0" in (await client.get(f"{gateway.url}/metrics")).text
                except httpx.TimeoutException:  # handed over before it was known to hang
                    return False

        took = await eventually(is_out, "it is known to hang", 20.0)
        began = time.monotonic()
        for number in range(12):
            await ask(gateway.url, [{"role": "user", "content": f"{number}"}])
        each = (time.monotonic() - began) / 12
        os.kill(victim, signal.SIGCONT)

        async def is_back() -> bool:
            return (await gateway.metrics()).total("warmlane_processes") == 3.0

        back = await eventually(is_back, "it serves again", 10.0)
        assert (await gateway.metrics()).total("warmlane_requests_total") >= before + 12
    print(f"known after {took:.1f} s; a request then {each * 1e3:.0f} ms; back after {back:.1f} s")


async def test_with_tls_keys_and_redis(tmp_path: Path) -> None:
    """All that a gateway may have: each worker has it. What came through the hub is not heard through Redis again."""
    pair = Authority(tmp_path, "authority").issue("gateway", "IP:127.0.0.1")
    secret = new_secret()
    (tmp_path / "keys.toml").write_text(new_entry("team", secret, None))
    replica = EmbeddedReplica("embedded", tmp_path, *OPTIONS)
    await replica.start()
    with redis_server(tmp_path) as redis:
        config = {
            "server": {"workers": 2, "tls_certificate": str(pair.certificate), "tls_key": str(pair.key)},
            "auth": {"keys_file": str(tmp_path / "keys.toml"), "isolate_tenants": True},
            "redis": {"url": redis.url},
        }
        gateway = GatewayProcess("gateway", tmp_path, config, [replica.url], {"WARMLANE_REDIS_SECRET": "s" * 32})
        try:
            await gateway.start()
            headers = {"Authorization": f"Bearer {secret}"}

            async def shares_alone() -> bool:
                async with httpx.AsyncClient(trust_env=False, verify=False, headers=headers, timeout=10.0) as client:
                    page = (await client.get(f"{gateway.url}/metrics")).text
                values = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
                peers = values.get("warmlane_peers"), values.get("warmlane_peers_connected")
                return peers == ("0.0", "1.0") and page.count('state="up"} 1.0') == 1

            for _ in range(4):
                await eventually(shares_alone, "Redis is there, and in it nobody but the siblings")
            cached = []
            for number in range(4):
                async with httpx.AsyncClient(trust_env=False, verify=False, headers=headers, timeout=30.0) as client:
                    messages = [{"role": "user", "content": "The same for all. " * 300 + str(number)}]
                    body = {"model": "m", "max_tokens": 1, "messages": messages}
                    answer = (await client.post(f"{gateway.url}/v1/chat/completions", json=body)).raise_for_status()
                    cached.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
            assert cached[0] == 0
            assert min(cached[1:]) > 500  # one salt in all workers
        finally:
            await gateway.close()
            replica.kill()
