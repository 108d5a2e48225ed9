"""Looking at servers that are played from recordings: what is asked, with which key, and what a slow one does."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from gateway.doctor.looking import Keys, look_around, publishes, version_of
from gateway.doctor.rules import examine
from gateway.doctor.window import Window
from tests.doctor.recordings import Recording, recording

Pages = Callable[[str], str]


class Played:
    """A server that answers from a recording, its pages in their order and the last one again and again."""

    def __init__(self, played: Recording) -> None:
        self.played = played
        self.edit: Pages = lambda page: page
        self.guarded: dict[str, str] = {}
        """Key by path."""
        self.asked: list[tuple[str, str]] = []
        """Path and key."""
        self.hanging = asyncio.Event()
        """Once it is set, nothing is answered any more."""
        self.on_page: Callable[[int], None] = lambda number: None
        self.url = ""
        self._pages = 0

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        async with self.server:
            yield self.url

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            path, key = head.split()[1], head.partition("Authorization: Bearer ")[2].partition("\r\n")[0]
            self.asked.append((path, key))
            if self.hanging.is_set():
                await asyncio.sleep(3600)
            status, body = self._answer(path, key)
            writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body.encode())}\r\n\r\n{body}".encode())
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def _answer(self, path: str, key: str) -> tuple[str, str]:
        if self.guarded.get(path, key) != key:
            return "401 Unauthorized", '{"error":"Unauthorized"}'
        if path == "/health":
            return "200 OK", ""
        if path == "/metrics":
            _, page = self.played.pages[min(self._pages, len(self.played.pages) - 1)]
            self._pages += 1
            self.on_page(self._pages)
            return "200 OK", self.edit(page)
        return ("200 OK", self.played.once[path]) if path in self.played.once else ("404 Not Found", "{}")

    def keys_for(self, path: str) -> set[str]:
        return {key for asked, key in self.asked if asked == path}


def codes(window: Window) -> set[str]:
    return {one.code for one in examine(window)}


def in_front_of(replica: Played) -> Played:
    """The recorded gateway with this replica."""
    there = "http://127.0.0.1:8472"
    one = recording("past_gateway")
    once = {path: answer.replace(there, replica.url) for path, answer in one.once.items()}
    played = Played(Recording(once, one.pages))
    played.edit = lambda page: page.replace(there, replica.url)
    return played


async def test_a_replica_is_looked_at_all_the_time_and_asked_once_who_it_is() -> None:
    played = Played(recording("idle"))
    async with played.serving() as url:
        window = await look_around([url, url], 1.0, Keys())
    (seen,) = window.replicas
    assert 2 <= len(seen.looks) == len(seen.seen) <= 11  # a busy machine misses some
    assert seen.looks[0].at < 1.0 <= seen.looks[-1].at
    assert (seen.version, [card.id for card in seen.models or ()], seen.kv_events) == ("0.32.0", ["tiny"], True)
    assert [played.asked.count((path, "")) for path in ("/version", "/v1/models", "/health")] == [1, 1, 1]
    assert examine(window) == []


async def test_a_gateway_leads_to_its_replicas() -> None:
    replica = Played(recording("past_replica"))
    async with replica.serving() as behind:
        async with in_front_of(replica).serving() as front:
            window = await look_around([front], 0.5, Keys())
    assert [one.url for one in window.gateways] == [front]
    assert [one.url for one in window.replicas] == [behind]
    assert {"prefix-cache-off", "no-cached-tokens", "kv-events-off"} <= codes(window)


async def test_each_key_goes_only_where_it_belongs() -> None:
    replica = Played(recording("past_replica"))
    replica.guarded["/v1/models"] = "for-replicas"
    async with replica.serving():
        gateway = in_front_of(replica)
        gateway.guarded = {"/metrics": "for-gateways", "/warmlane/replicas": "for-admins"}
        async with gateway.serving() as front:
            window = await look_around([front], 0.5, Keys("for-replicas", "for-gateways", "for-admins"))
    assert replica.keys_for("/v1/models") == {"for-replicas"}
    assert {key for path, key in replica.asked if path != "/v1/models"} == {""}
    assert gateway.keys_for("/metrics") == {"", "for-gateways"}
    assert gateway.keys_for("/warmlane/replicas") == {"", "for-admins"}
    assert {path for path, _ in gateway.asked} == {"/metrics", "/warmlane/replicas", "/ready"}
    assert gateway.keys_for("/ready") == {""}
    assert window.replicas[0].models is not None


async def test_without_keys_it_says_what_it_could_not_see() -> None:
    replica = Played(recording("past_replica"))
    replica.guarded["/v1/models"] = "for-replicas"
    async with replica.serving() as behind:
        gateway = in_front_of(replica)
        gateway.guarded["/warmlane/replicas"] = "for-admins"
        async with gateway.serving() as front:
            window = await look_around([front], 0.5, Keys())
    assert [one.url for one in window.replicas] == [behind]  # named in the gateway's metrics
    assert {"models-hidden", "replicas-hidden"} <= codes(window)


async def test_one_that_hangs_delays_nobody() -> None:
    hanging, well = Played(recording("idle")), Played(recording("idle"))
    hanging.hanging.set()
    async with hanging.serving() as one, well.serving() as other:
        window = await look_around([one, other], 0.5, Keys())
    assert [bool(seen.seen) for seen in window.replicas] == [False, True]
    assert window.replicas[1].looks[-1].at >= 0.5
    (finding,) = [finding for finding in examine(window) if finding.subject == one]
    assert (finding.code, finding.evidence) == (
        "unreachable",
        f"none of {len(window.replicas[0].looks)} looks was answered: no whole answer in 2 s",
    )


async def test_one_that_dies_meanwhile_is_seen_until_then() -> None:
    played = Played(recording("memory"))

    def end(page: int) -> None:
        if page == 4:
            played.server.close()

    played.on_page = end
    async with played.serving() as url:
        window = await look_around([url], 1.0, Keys())
    (finding,) = [finding for finding in examine(window) if finding.code == "died"]
    assert "refused" in finding.evidence or "Connect call failed" in finding.evidence
    assert "11 waiting" in finding.evidence or "17 waiting" in finding.evidence
    assert finding.subject == url


async def test_an_engine_of_another_kind_is_asked_only_what_costs_it_nothing() -> None:
    """SGLang generates a token for each GET of /health."""
    page = "sglang:num_running_reqs{} 1.0\nsglang:num_queue_reqs{} 0.0\nsglang:token_usage{} 0.5\n"
    models = '{"object":"list","data":[{"id":"m","owned_by":"sglang","max_model_len":4096}]}'
    played = Played(Recording({"/v1/models": models, "/ready": ""}, [(0.0, page)]))
    async with played.serving() as url:
        window = await look_around([url], 0.5, Keys())
    assert {"/health", "/is_paused"}.isdisjoint(path for path, _ in played.asked)
    (seen,) = window.replicas
    assert (seen.engine, seen.running[-1], seen.kv_usage, seen.health_problem) == ("sglang", 1, 0.5, "")
    assert codes(window) == {"not-vllm"}


async def test_a_replica_that_only_its_gateway_reaches_is_no_error() -> None:
    replica = Played(recording("past_replica"))
    with socket.socket() as nobody:  # holds the port, and does not listen
        nobody.bind(("127.0.0.1", 0))
        replica.url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        async with in_front_of(replica).serving() as front:
            window = await look_around([front], 0.5, Keys())
    assert "out-of-sight" in codes(window)
    assert "unreachable" not in codes(window)


async def test_names_that_are_no_addresses_are_not_asked() -> None:
    replica = Played(recording("past_replica"))
    replica.url = "file:///etc/passwd"
    async with in_front_of(replica).serving() as front:
        window = await look_around([front], 0.5, Keys())
    assert window.replicas == ()


@pytest.mark.parametrize("page", ["", "\x00\xff", "vllm:num_requests_running{", "warmlane_build_info NaN\n" * 10_000])
async def test_a_page_of_nonsense_says_nothing(page: str) -> None:
    played = Played(recording("idle"))
    played.edit = lambda _: page
    async with played.serving() as url:
        window = await look_around([url], 0.5, Keys())
    assert all(one.severity == "note" for one in examine(window))


def test_answers_of_another_shape_say_nothing() -> None:
    assert [version_of(answer) for answer in (None, [], {"version": 3}, {"version": "0.32.0"})] == [
        *[None] * 3,
        "0.32.0",
    ]
    sources = {"0": {"enable_kv_cache_events": True}}
    assert [publishes(answer) for answer in (None, [], {}, {"0": 1}, sources)] == [None, None, False, False, True]
