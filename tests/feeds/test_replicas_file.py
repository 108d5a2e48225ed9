"""Replicas from a file that changes: replaced, broken, gone and back; and with other sources that name the same."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from scripted_replica import wait_until

from gateway.config import ConfigError
from gateway.core.model import DrainRequested, ReplicaAdded, ReplicaRemoved
from gateway.feeds.discovery import Discovery
from gateway.feeds.engines import Engines, Said
from gateway.feeds.replicas import Replicas
from gateway.feeds.replicas_file import ReplicasFile
from gateway.feeds.sources import Addresses, Found

A, B = "http://10.0.0.1:8000", "http://10.0.0.2:8000"


def listing(*urls: str, more: str = "") -> str:
    return "\n".join(f'[[replicas]]\nurl = "{url}"\n{more}' for url in urls) or "replicas = []\n"


def replace(file: Path, text: str) -> None:
    """As a careful program does it: another file, moved over the old one."""
    new = file.with_suffix(".new")
    new.write_text(text)
    os.replace(new, file)


class Setting:
    def __init__(self, folder: Path, facts, text: str, *more) -> None:
        self.file = folder / "replicas.toml"
        self.file.write_text(text)
        self.engines = Engines({A: Said(None, None)})
        self.replicas = Replicas()
        source = ReplicasFile(self.file, self.engines.say)
        self.discovery = Discovery(
            self.replicas, facts.append, static={}, sources=[source, *more], interval_seconds=0.02
        )

    async def becomes(self, *urls: str) -> None:
        await wait_until(lambda: set(self.replicas) == set(urls))


async def test_a_change_counts_and_brings_what_the_file_says(tmp_path, facts, running):
    setting = Setting(tmp_path, facts, listing(B, more="prefill_rate = 4e4\nengine = 'sglang'\ncache_tokens = 90000\n"))
    running(setting.discovery.run())
    await setting.becomes(B)
    assert facts == [ReplicaAdded(B, 4e4)]
    assert (setting.engines.name(B), setting.engines.cache_tokens(B)) == ("sglang", 90_000)
    assert setting.discovery.source(B) == "file"
    assert setting.discovery.is_configured(B)
    replace(setting.file, listing(A, "HTTP://10.0.0.2:8000/"))
    await setting.becomes(A, B)
    assert facts[1:] == [ReplicaAdded(A, None)], "the other one is the same, however it is written"
    assert setting.engines.name(B) is None
    replace(setting.file, "replicas = []")
    await setting.becomes()
    assert ReplicaRemoved(A) in facts


@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        ("", "replicas"),
        ('[[replicas]]\nurl = "http://10.0', "not TOML"),
        ('[[replicas]]\nurl = "10.0.0.1:8000"', "expected http://HOST"),
        (listing(A, A), "listed twice"),
        (listing(A, more="colour = 'red'\n"), "colour"),
        ("\x00", "not TOML"),
        ("replicas = " + "9" * 5_000, "not TOML"),
    ],
)
async def test_a_broken_file_changes_nothing_and_is_said_once(tmp_path, facts, running, caplog, broken, problem):
    setting = Setting(tmp_path, facts, listing(A))
    running(setting.discovery.run())
    await setting.becomes(A)
    caplog.set_level("INFO")
    replace(setting.file, broken)
    await wait_until(lambda: caplog.records)
    replace(setting.file, broken + " ")
    setting.file.unlink()
    await wait_until(lambda: any("No such file" in one.message for one in caplog.records))
    assert list(setting.replicas) == [A]
    warnings = [one.message for one in caplog.records if one.levelname == "WARNING"]
    assert len(warnings) <= 3
    assert problem in warnings[0]
    assert str(setting.file) in warnings[0]
    replace(setting.file, listing(B))
    await setting.becomes(B)
    assert caplog.records[-1].message == f"{setting.file} works again"


def test_a_gateway_does_not_start_with_a_file_that_it_cannot_use(tmp_path):
    file = tmp_path / "replicas.toml"
    with pytest.raises(ConfigError, match=r"discovery.replicas_file: .*No such file"):
        ReplicasFile(file, lambda said: None)
    file.write_text("[[replica]]")
    with pytest.raises(ConfigError, match=r"discovery.replicas_file: .*replica"):
        ReplicasFile(file, lambda said: None)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(ConfigError, match="Not a regular file"):
        ReplicasFile(file, lambda said: None)
    file.unlink()
    with open(file, "wb") as opened:
        opened.truncate(100 * 2**20)
    with pytest.raises(ConfigError, match="Larger than 4 MiB"):
        ReplicasFile(file, lambda said: None)


async def test_a_replica_of_several_sources_is_one_and_goes_with_the_last(tmp_path, facts, running):
    """O-08: a full reconcile over all of them."""
    addresses = {"10.0.0.1", "10.0.0.2"}

    async def resolve(host: str, port: int) -> frozenset[str]:
        return frozenset(addresses)

    setting = Setting(tmp_path, facts, listing(A, more="prefill_rate = 4e4\n"), Addresses("http://vllm:8000", resolve))
    running(setting.discovery.run())
    await setting.becomes(A, B)
    setting.discovery.note_registered({A: 1.0})
    assert facts.of(ReplicaAdded).count(ReplicaAdded(A, 4e4)) == 1
    assert len(facts.of(ReplicaAdded)) == 2
    assert setting.discovery.source(A) == "file"
    replace(setting.file, listing())
    await wait_until(lambda: setting.discovery.source(A) == "dns")
    addresses.discard("10.0.0.1")
    await wait_until(lambda: setting.discovery.source(A) == "registered")
    assert facts.of(ReplicaRemoved) == []
    setting.discovery.note_registered({})
    assert facts.of(ReplicaRemoved) == [ReplicaRemoved(A)]


async def test_a_drained_replica_that_returns_to_the_file_is_still_drained(tmp_path, facts, running):
    setting = Setting(tmp_path, facts, listing(A, B))
    running(setting.discovery.run())
    await setting.becomes(A, B)
    setting.discovery.drain(A, True)
    replace(setting.file, listing(B))
    await setting.becomes(B)
    replace(setting.file, listing(A, B))
    await setting.becomes(A, B)
    assert facts[-2:] == [ReplicaAdded(A), DrainRequested(A)]


async def test_a_name_in_the_file_is_followed(tmp_path, facts, running):
    """O-08: it moved to another address."""
    addresses, asked = {"10.0.0.1"}, []

    async def resolve(host: str, port: int) -> frozenset[str]:
        asked.append(host)
        return frozenset(addresses)

    class Listed:
        label, place, known = "file", "replicas.toml", {}

        async def look(self) -> Found:
            return Found({"http://gpu:8000": None})

    replicas = Replicas()
    discovery = Discovery(replicas, facts.append, static={}, sources=[Listed()], interval_seconds=0.02, resolve=resolve)
    running(discovery.run())
    await wait_until(lambda: len(replicas) == 1)
    before = replicas.incarnations
    await wait_until(lambda: asked)
    addresses.clear()
    addresses.add("10.0.0.2")
    await wait_until(lambda: replicas.incarnations != before)
    assert ReplicaRemoved("http://gpu:8000", returns=True) in facts
