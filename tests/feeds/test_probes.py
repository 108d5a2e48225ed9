"""Alive or not, and with which models: one slow or broken replica never hides the others."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
from random import Random

import msgspec
import pytest
from scripted_replica import hang, ok, wait_until

from gateway.core.model import ModelCard, ModelsListed, PauseReported, ProbeAnswered
from gateway.feeds.fetch import Hindered, fetch
from gateway.feeds.probes import MODELS_INTERVAL_SECONDS, Probes, read_models
from gateway.feeds.replicas import Replicas

HEALTHY = ok(b"")
MODELS = ok(
    b'{"object":"list","data":[{"id":"tiny","object":"model","created":1796037532,"owned_by":"vllm",'
    b'"root":"/models/tiny","parent":null,"max_model_len":8192,"permission":[{"id":"modelperm-1"}]}]}'
)


@pytest.fixture
def replicas() -> Replicas:
    return Replicas()


@pytest.fixture
def probe(replicas, facts, client, running):
    def start(**settings) -> None:
        settings = {"interval_seconds": 0.01, "timeout_seconds": 5.0, "random": Random(1), **settings}
        running(Probes(replicas, facts.append, client, **settings).run())

    return start


async def test_models_are_known_before_a_replica_is_called_healthy(start_replica, replicas, facts, probe):
    one = await start_replica()
    one.answers = {"/health": HEALTHY, "/v1/models": MODELS}
    replicas.update(added=[one.id])
    probe()
    await wait_until(lambda: len(facts) >= 2)
    card = ModelCard("tiny", created=1796037532, owned_by="vllm", root="/models/tiny", max_model_len=8192)
    assert facts[:2] == [ModelsListed(one.id, (card,)), ProbeAnswered(one.id, True)]


async def test_models_are_listed_again_after_a_while_and_after_a_failure(start_replica, replicas, facts, probe):
    now = 100.0
    one = await start_replica()
    one.answers = {"/health": HEALTHY, "/v1/models": MODELS}
    replicas.update(added=[one.id])
    probe(clock=lambda: now)
    await wait_until(lambda: one.asked.count("/health") >= 5)
    assert one.asked.count("/v1/models") == 1
    now += MODELS_INTERVAL_SECONDS
    await wait_until(lambda: one.asked.count("/v1/models") == 2)
    one.answers["/health"] = ok(b"", "503 Service Unavailable")
    await wait_until(lambda: ProbeAnswered(one.id, False, "HTTP 503") in facts)
    one.answers["/health"] = HEALTHY
    await wait_until(lambda: one.asked.count("/v1/models") == 3)


async def test_a_hung_replica_does_not_delay_the_probes_of_another(start_replica, replicas, facts, probe):
    stuck, fine = await start_replica(), await start_replica()
    stuck.answers = {"/health": hang}
    fine.answers = {"/health": HEALTHY, "/v1/models": MODELS}
    replicas.update(added=[stuck.id, fine.id])
    probe(timeout_seconds=3600.0)
    await wait_until(lambda: facts.of(ProbeAnswered).count(ProbeAnswered(fine.id, True)) >= 10)
    assert {fact.replica for fact in facts} == {fine.id}


async def test_a_hung_replica_is_reported_when_the_time_is_over(start_replica, replicas, facts, probe):
    stuck = await start_replica()
    stuck.answers = {"/health": hang}
    replicas.update(added=[stuck.id])
    probe(timeout_seconds=0.2)  # on a busy machine to connect takes a part of it
    await wait_until(lambda: len(facts) >= 2)
    assert facts[:2] == [ProbeAnswered(stuck.id, False, "no whole answer in 0.2 s")] * 2


async def test_a_refused_connection_is_a_failed_probe(start_replica, replicas, facts, probe):
    gone = await start_replica()
    await gone.stop()
    replicas.update(added=[gone.id])
    probe()
    await wait_until(lambda: facts)
    assert facts[0].ok is False
    assert facts[0].reason


async def test_a_redirect_is_not_followed(start_replica, replicas, facts, probe):
    one, elsewhere = await start_replica(), await start_replica()
    elsewhere.answers = {"/health": HEALTHY}
    one.answers = {"/health": ok(b"", "302 Found", f"Location: {elsewhere.id}/health\r\n")}
    replicas.update(added=[one.id])
    probe()
    await wait_until(lambda: facts)
    assert facts[0] == ProbeAnswered(one.id, False, "HTTP 302")
    assert elsewhere.asked == []


async def test_a_proxy_from_the_environment_is_ignored(start_replica, replicas, facts, probe, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    one = await start_replica()
    one.answers = {"/health": HEALTHY, "/v1/models": MODELS}
    replicas.update(added=[one.id])
    probe()
    await wait_until(lambda: ProbeAnswered(one.id, True) in facts)


async def test_a_model_list_that_cannot_be_read_is_logged_once_and_the_replica_stays_healthy(
    start_replica, replicas, facts, probe, caplog
):
    one = await start_replica()
    one.answers = {"/health": HEALTHY, "/v1/models": ok(b'{"error":"Unauthorized"}', "401 Unauthorized")}
    replicas.update(added=[one.id])
    with caplog.at_level(logging.WARNING, logger="gateway.feeds.probes"):
        probe()
        await wait_until(lambda: one.asked.count("/v1/models") >= 3)
    assert set(facts) == {ProbeAnswered(one.id, True)}
    assert [record.getMessage() for record in caplog.records] == [f"{one.id}/v1/models is not usable: HTTP 401"]


async def test_probes_follow_the_replica_set(start_replica, replicas, facts, probe):
    first, second = await start_replica(), await start_replica()
    for one in (first, second):
        one.answers = {"/health": HEALTHY, "/v1/models": MODELS}
    replicas.update(added=[first.id])
    probe()
    await wait_until(lambda: ProbeAnswered(first.id, True) in facts)
    replicas.update(removed=[first.id], added=[second.id])
    await wait_until(lambda: ProbeAnswered(second.id, True) in facts)
    asked = len(first.asked)
    facts.clear()
    await wait_until(lambda: len(facts) >= 5)
    assert {fact.replica for fact in facts} == {second.id}
    assert len(first.asked) == asked


async def test_a_replica_that_moved_lists_its_models_anew(start_replica, replicas, facts, probe):
    one = await start_replica()
    one.answers = {"/health": HEALTHY, "/v1/models": MODELS}
    replicas.update(added=[one.id])
    probe()
    await wait_until(lambda: len(facts.of(ModelsListed)) == 1)
    replicas.update(removed=[one.id], added=[one.id])
    await wait_until(lambda: len(facts.of(ModelsListed)) == 2)


async def test_each_probe_opens_its_own_connection(start_replica, replicas, facts, probe):
    """A kept connection would go on talking to a server that its name no longer points to."""
    one = await start_replica()
    seen: list[object] = []

    async def answer(writer: asyncio.StreamWriter) -> None:
        seen.append(writer.get_extra_info("peername"))
        writer.write(HEALTHY)

    one.answers = {"/health": answer, "/v1/models": MODELS}
    replicas.update(added=[one.id])
    probe()
    await wait_until(lambda: len(seen) >= 3)
    assert len(set(seen)) == len(seen)


async def test_a_feed_that_stumbles_over_the_unforeseen_is_logged_and_starts_again(
    start_replica, replicas, client, running, caplog
):
    one = await start_replica()
    one.answers = {"/health": HEALTHY, "/v1/models": MODELS}
    replicas.update(added=[one.id])
    told: list[object] = []

    def observe(fact: object) -> None:
        told.append(fact)
        raise LookupError("the receiver is broken")

    running(Probes(replicas, observe, client, interval_seconds=0.01, timeout_seconds=5.0, random=Random(1)).run())
    await wait_until(lambda: len(told) >= 2)
    assert "stumbled" in caplog.records[0].getMessage()


async def test_no_task_is_left_when_the_feed_is_cancelled(start_replica, replicas, facts, client):
    stuck = await start_replica()
    stuck.answers = {"/health": hang}
    replicas.update(added=[stuck.id])
    before = asyncio.all_tasks()
    probes = Probes(replicas, facts.append, client, interval_seconds=1.0, timeout_seconds=60.0, random=Random(1))
    feed = asyncio.ensure_future(probes.run())
    await wait_until(lambda: stuck.asked)
    serving = asyncio.all_tasks() - before - {feed}
    feed.cancel()
    await asyncio.gather(feed, return_exceptions=True)
    await stuck.stop()
    assert serving & asyncio.all_tasks() == set()


def test_odd_entries_of_a_model_list_are_read_leniently():
    body = msgspec.json.encode(
        {
            "data": [
                {"id": "base", "max_model_len": 8192, "created": 1.5, "new_field": {}},
                {"id": "adapter", "parent": "base", "root": "/loras/a", "owned_by": None, "max_model_len": "x"},
                {"id": 7},
                "text",
            ]
        }
    )
    assert read_models(body) == (
        ModelCard("base", created=1, max_model_len=8192),
        ModelCard("adapter", parent="base", root="/loras/a"),
    )


@pytest.mark.parametrize("number", ["1e308", "-1e300", "9" * 300])
def test_numbers_that_are_none_count_as_absent(number):
    body = f'{{"data":[{{"id":"a","created":{number},"max_model_len":{number}}}]}}'.encode()
    assert read_models(body) == (ModelCard("a"),)


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"data":null}', b"\xff", b"[" * 100_000, b'{"data":[{"id":"a","created":1e999}]}']
)
def test_an_answer_that_is_no_model_list_is_an_error(body):
    with pytest.raises(msgspec.DecodeError):
        read_models(body)


async def test_a_pause_is_reported_when_it_begins_and_when_it_ends(start_replica, replicas, facts, probe):
    """Only a vLLM in developer mode can be paused, and its health does not show it."""
    one = await start_replica()
    one.answers = {"/health": HEALTHY, "/v1/models": MODELS, "/is_paused": ok(b'{"is_paused":false}')}
    replicas.update(added=[one.id])
    probe()
    await wait_until(lambda: one.asked.count("/is_paused") >= 3)
    assert facts.of(PauseReported) == []
    one.answers["/is_paused"] = ok(b'{"is_paused":true}')
    await wait_until(lambda: facts.of(PauseReported) == [PauseReported(one.id, True)])
    one.answers["/is_paused"] = ok(b'{"is_paused":false}')
    await wait_until(lambda: facts.of(PauseReported)[1:] == [PauseReported(one.id, False)])


async def test_a_replica_that_knows_no_pause_is_asked_once(start_replica, replicas, facts, probe):
    one = await start_replica()
    one.answers = {"/health": HEALTHY, "/v1/models": MODELS}
    replicas.update(added=[one.id])
    probe()
    await wait_until(lambda: one.asked.count("/health") >= 5)
    assert one.asked.count("/is_paused") == 1
    assert facts.of(PauseReported) == []


async def test_a_pause_ends_with_the_process_that_was_paused(start_replica, replicas, facts, probe):
    one = await start_replica()
    one.answers = {"/health": HEALTHY, "/v1/models": MODELS, "/is_paused": ok(b'{"is_paused":true}')}
    replicas.update(added=[one.id])
    probe()
    await wait_until(lambda: PauseReported(one.id, True) in facts)
    one.answers["/health"] = ok(b"", "503 Service Unavailable")
    await wait_until(lambda: ProbeAnswered(one.id, False, "HTTP 503") in facts)
    del one.answers["/is_paused"]
    one.answers["/health"] = HEALTHY
    await wait_until(lambda: facts.of(PauseReported)[-1] == PauseReported(one.id, False))


async def test_a_probe_for_which_we_have_no_descriptor_is_no_word_about_the_replica(
    start_replica, replicas, facts, probe, client
):
    """Else the fleet would be ejected for what a flood of clients does to us."""
    one = await start_replica()
    one.answers = {"/health": HEALTHY, "/v1/models": MODELS}
    replicas.update(added=[one.id])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(socket.socket())
        with pytest.raises(Hindered):
            await fetch(client, f"{one.id}/health", timeout_seconds=5.0, max_bytes=100)
        probe()
        await asyncio.sleep(0.2)
        assert facts == []
    finally:
        for sock in held:
            sock.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    await wait_until(lambda: ProbeAnswered(one.id, True) in facts)
