"""docs/gateways.md taken at its word: its two gateways as plain processes, with a real Redis."""

from __future__ import annotations

import asyncio
import re
import secrets
import shlex
import socket
from pathlib import Path

import httpx
import yaml

from gateway.config import load
from tests.chaos.rig import ROOT, EmbeddedReplica, GatewayProcess, eventually
from tests.redis_server import redis_server

PAGE = (ROOT / "docs" / "gateways.md").read_text(encoding="utf-8")


def block(section: str, language: str) -> str:
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return str(found)


def commands(section: str) -> list[list[str]]:
    lines = block(section, "sh").splitlines()
    return [[word for word in shlex.split(line, comments=True) if word != "&"] for line in lines]


class Documented(GatewayProcess):
    """`warmlane serve` with these arguments."""

    def __init__(self, name: str, folder: Path, arguments: list[str], environment: dict[str, str]) -> None:
        super().__init__(name, folder, {}, [], environment)
        self.command = [*self.command[: self.command.index("serve")], *arguments]


async def test_two_plain_processes_share_what_they_know(tmp_path: Path) -> None:
    secret, server, *serving = commands("Two of them as plain processes")
    assert secret[:2] == ["export", "WARMLANE_REDIS_SECRET=$(openssl"]
    assert server[0] == "redis-server"
    assert [words[:4] for words in serving] == [["warmlane", "serve", "--config", "warmlane.toml"]] * 2
    assert len({words[-1] for words in serving}) == 2
    replica = EmbeddedReplica("embedded", tmp_path)
    await replica.start()
    file = tmp_path / "warmlane.toml"
    with redis_server(tmp_path, *server[server.index("--save") :]) as redis:
        text = block("Two of them as plain processes", "toml").replace("redis://127.0.0.1:6379", redis.url)
        file.write_text(f'{text}[[replicas]]\nurl = "{replica.url}"\n')
        environment = {"WARMLANE_REDIS_SECRET": secrets.token_hex(32)}
        gateways = []
        for words in serving:
            words[words.index("warmlane.toml")] = str(file)
            words[words.index("--port") + 1] = str(free_port())
            gateways.append(Documented(f"gateway-{words[-1]}", tmp_path, words[1:], environment))
        try:
            await asyncio.gather(*(one.start() for one in gateways))
            for one in gateways:
                await one.wait_state(replica, "up")
            await eventually(lambda: both_have_a_peer(gateways), "each hears of the other")
            prompt = "What one was sent the other knows. " * 200
            assert (await gateways[0].chat(prompt)).status_code == 200
            await eventually(lambda: expects_it_cached(gateways[1], prompt), "the other expects it there")
        finally:
            for one in gateways:
                await one.close()
            replica.kill()


async def both_have_a_peer(gateways: list[Documented]) -> bool:
    return all([(await one.metrics()).total("warmlane_peers") == 1.0 for one in gateways])


async def expects_it_cached(gateway: Documented, prompt: str) -> bool:
    body = {"model": "m", "messages": [{"role": "user", "content": prompt}]}
    async with httpx.AsyncClient(trust_env=False) as client:
        (row,) = (await client.post(f"{gateway.url}/warmlane/route", json=body)).json()["ranking"]
    return bool(row["cached_tokens"] > 0.8 * row["prompt_tokens"])


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def test_the_compose_commands_name_profiles_and_services_that_are_there() -> None:
    services = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]
    for words in commands("Two of them in Docker"):
        assert words[:2] == ["docker", "compose"]
        profiles = {words[place + 1] for place, word in enumerate(words) if word == "--profile"}
        named = words[words.index("--build") + 1 :]
        assert "balancer" in named
        for name in named:
            assert profiles & set(services[name]["profiles"]), name
        assert profiles <= {profile for name in named for profile in services[name]["profiles"]}


def test_the_times_that_the_page_tells_are_those_of_the_files() -> None:
    config = load(ROOT / "deploy" / "docker" / "warmlane-several.toml")
    assert f"({config.server.drain_delay_seconds:g} s in the file above)" in PAGE
