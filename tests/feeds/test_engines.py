"""Which engine a replica runs: found out over real sockets, and what the feeds then ask and do not ask."""

from __future__ import annotations

import logging
from pathlib import Path
from random import Random

import pytest
from scripted_replica import ok, wait_until

from gateway.core.model import CacheSized, LoadReported, ModelsListed, ProbeAnswered, RouteRequest
from gateway.feeds.engines import Engines, Said
from gateway.feeds.probes import Probes
from gateway.feeds.replicas import Replicas
from gateway.feeds.scrape import Scrape
from gateway.feeds.token_counts import TokenCounts

PAGES = Path(__file__).parent / "pages"
PAUSED = "/is_paused"


def models(owner: str, name: str = "tiny") -> bytes:
    return ok(f'{{"object":"list","data":[{{"id":"{name}","object":"model","owned_by":"{owner}"}}]}}'.encode())


@pytest.fixture
def replicas() -> Replicas:
    return Replicas()


@pytest.fixture
def engines() -> Engines:
    return Engines()


@pytest.fixture
def probe(replicas, facts, client, running, engines):
    def start(engines: Engines = engines) -> None:
        settings = {"interval_seconds": 0.01, "timeout_seconds": 5.0, "random": Random(1), "engines": engines}
        running(Probes(replicas, facts.append, client, **settings).run())

    return start


@pytest.fixture
def scrape(replicas, facts, client, running, engines):
    def start(**settings) -> None:
        fixed = {"interval_seconds": 0.01, "timeout_seconds": 5.0, "max_bytes": 256 * 1024, "random": Random(1)}
        running(Scrape(replicas, facts.append, client, engines=engines, **fixed, **settings).run())

    return start


async def test_sglang_is_never_asked_for_a_health_that_generates(start_replica, replicas, facts, probe, engines):
    """Its /health waits a second for a token of its own, which a probe that has 1.5 s may not survive."""
    one = await start_replica()
    one.answers = {"/v1/models": models("sglang"), "/ready": ok(b""), "/health": ok(b"", "503 Busy")}
    replicas.update(added=[one.id])
    probe()
    await wait_until(lambda: facts.of(ProbeAnswered).count(ProbeAnswered(one.id, True)) >= 3)
    assert engines.name(one.id) == "sglang"
    assert not {"/health", PAUSED} & set(one.asked)


async def test_an_older_sglang_has_another_page_for_it(start_replica, replicas, facts, probe):
    one = await start_replica()
    one.answers = {"/v1/models": models("sglang"), "/ping": ok(b"")}
    replicas.update(added=[one.id])
    probe()
    await wait_until(lambda: ProbeAnswered(one.id, True) in facts)
    one.answers["/ping"] = ok(b"", "503 Service Unavailable")
    await wait_until(lambda: ProbeAnswered(one.id, False, "HTTP 503") in facts)


async def test_nobody_hears_of_the_models_of_a_replica_that_is_not_healthy(start_replica, replicas, facts, probe):
    """It was asked for them to know who it is; a list is a sign of life."""
    one = await start_replica()
    one.answers = {"/v1/models": models("llamacpp"), "/health": ok(b"", "503 Loading model")}
    replicas.update(added=[one.id])
    probe()
    await wait_until(lambda: len(facts) >= 3)
    assert set(facts) == {ProbeAnswered(one.id, False, "HTTP 503")}
    one.answers["/health"] = ok(b'{"status":"ok"}')
    await wait_until(lambda: ProbeAnswered(one.id, True) in facts)
    assert facts.index(facts.of(ModelsListed)[0]) < facts.index(ProbeAnswered(one.id, True))


async def test_llama_cpp_tells_the_size_of_its_cache_beside_its_metrics(start_replica, replicas, facts, probe):
    one = await start_replica()
    props = ok(b'{"default_generation_settings":{"n_ctx":4096},"total_slots":2}')
    one.answers = {"/v1/models": models("llamacpp"), "/health": ok(b""), "/props": props}
    replicas.update(added=[one.id])
    probe()
    await wait_until(lambda: facts.of(CacheSized))
    assert facts.of(CacheSized)[0] == CacheSized(one.id, 8_192)


async def test_what_the_configuration_says_of_the_cache_is_not_asked_for(start_replica, replicas, facts, probe):
    one = await start_replica()
    one.answers = {"/v1/models": models("library"), "/api/version": ok(b'{"version":"0.1"}')}
    replicas.update(added=[one.id])
    probe(Engines({one.id: Said(cache_tokens=16_384)}))
    await wait_until(lambda: facts.of(CacheSized))
    assert facts.of(CacheSized)[0] == CacheSized(one.id, 16_384)
    assert "/api/ps" not in one.asked


async def test_ollama_is_known_by_its_greeting_and_not_scraped(start_replica, replicas, facts, probe, scrape, engines):
    one = await start_replica()
    one.answers = {
        "/v1/models": models("somebody", "somebody/llama3:latest"),
        "/": ok(b"Ollama is running"),
        "/api/version": ok(b'{"version":"0.1"}'),
    }
    replicas.update(added=[one.id])
    probe()
    await wait_until(lambda: ProbeAnswered(one.id, True) in facts)
    assert engines.name(one.id) == "ollama"
    assert [card.id for card in facts.of(ModelsListed)[0].models] == ["somebody/llama3:latest", "somebody/llama3"]
    scrape()
    seen = len(one.asked)
    await wait_until(lambda: len(one.asked) >= seen + 5)
    assert "/metrics" not in one.asked
    assert facts.of(LoadReported) == []


async def test_an_unknown_engine_serves_as_a_plain_one_with_one_notice(
    start_replica, replicas, facts, probe, engines, caplog
):
    one = await start_replica()
    one.answers = {"/v1/models": models("acme")}
    replicas.update(added=[one.id])
    with caplog.at_level(logging.INFO, logger="gateway.feeds.engines"):
        probe()
        await wait_until(lambda: facts.of(ProbeAnswered).count(ProbeAnswered(one.id, True)) >= 5)
    assert engines.name(one.id) is None
    assert [record.getMessage() for record in caplog.records] == [
        f"{one.id} runs no engine known here (its models belong to 'acme'): plain OpenAI API"
    ]
    assert one.asked.count("/") == 1
    assert facts.of(ModelsListed)


async def test_an_engine_is_known_from_its_page_whoever_owns_its_models(
    start_replica, replicas, facts, probe, scrape, engines
):
    one = await start_replica()
    page = (PAGES / "sglang.txt").read_bytes()
    one.answers = {"/v1/models": models("acme"), "/metrics": ok(page), "/ready": ok(b""), "/health": ok(b"")}
    replicas.update(added=[one.id])
    probe()
    await wait_until(lambda: ProbeAnswered(one.id, True) in facts)
    scrape()
    await wait_until(lambda: engines.name(one.id) == "sglang")
    await wait_until(lambda: any(fact.snapshot.running == 8 for fact in facts.of(LoadReported)))
    await wait_until(lambda: "/ready" in one.asked)


async def test_another_engine_at_the_same_address_is_found_out(start_replica, replicas, facts, probe, engines):
    one = await start_replica()
    one.answers = {"/v1/models": models("vllm"), "/health": ok(b"")}
    replicas.update(added=[one.id])
    probe()
    await wait_until(lambda: ProbeAnswered(one.id, True) in facts)
    assert engines.name(one.id) == "vllm"
    one.answers = {"/v1/models": models("library"), "/api/version": ok(b"{}")}
    await wait_until(lambda: engines.name(one.id) == "ollama")
    await wait_until(lambda: facts[-1] == ProbeAnswered(one.id, True))


async def test_what_comes_back_after_a_failure_is_judged_anew(start_replica, replicas, facts, probe, scrape, engines):
    """A page is the strongest sign, but not of what runs there now."""
    one = await start_replica()
    page = ok(b"vllm:num_requests_running 1\n")
    one.answers = {"/v1/models": models("vllm"), "/health": ok(b""), "/metrics": page}
    replicas.update(added=[one.id])
    probe()
    scrape()
    await wait_until(lambda: facts.of(LoadReported) and ProbeAnswered(one.id, True) in facts)
    one.answers = {"/health": ok(b"", "503 Loading model")}
    await wait_until(lambda: ProbeAnswered(one.id, False, "HTTP 503") in facts)
    assert engines.name(one.id) == "vllm"
    one.answers = {"/v1/models": models("llamacpp"), "/health": ok(b"")}
    await wait_until(lambda: engines.name(one.id) == "llama.cpp")


async def test_what_the_configuration_says_is_not_questioned(start_replica, replicas, facts, probe):
    one = await start_replica()
    one.answers = {"/v1/models": models("vllm"), "/ready": ok(b"")}
    replicas.update(added=[one.id])
    engines = Engines({one.id: Said(engine="sglang")})
    probe(engines)
    await wait_until(lambda: ProbeAnswered(one.id, True) in facts)
    assert engines.name(one.id) == "sglang"
    assert set(one.asked) <= {"/ready", "/v1/models"}


async def test_the_page_of_tensorrt_llm_is_elsewhere(start_replica, replicas, facts, scrape, engines):
    one = await start_replica()
    page = (PAGES / "tensorrt_llm.txt").read_bytes()
    one.answers = {"/prometheus/metrics": ok(page), "/metrics": ok(b"[]")}
    replicas.update(added=[one.id])
    engines.hear_owners(one.id, ["tensorrt_llm"])
    scrape()
    await wait_until(lambda: facts)
    assert facts[0].snapshot.cache_tokens == 32_000
    assert "/metrics" not in one.asked


async def test_an_engine_without_its_page_is_named_with_the_remedy(
    start_replica, replicas, facts, scrape, engines, caplog
):
    one = await start_replica()
    one.answers = {"/metrics": ok(b"{}", "501 Not Implemented")}
    replicas.update(added=[one.id])
    engines.hear_owners(one.id, ["llamacpp"])
    with caplog.at_level(logging.WARNING, logger="gateway.feeds.scrape"):
        scrape()
        await wait_until(lambda: len(one.asked) >= 3)
    assert [record.getMessage() for record in caplog.records] == [
        f"{one.id}/metrics is not usable: HTTP 501; start llama-server with --metrics"
    ]
    assert facts == []


async def test_who_cannot_count_tokens_is_not_asked(start_replica, facts, client, running, engines):
    able, unable = await start_replica(), await start_replica()
    able.answers = {"/tokenize": ok(b'{"count":3,"max_model_len":100,"tokens":[1,2,3]}')}
    engines.hear_owners(unable.id, ["llamacpp"])
    engines.hear_owners(able.id, ["sglang"])
    counts = TokenCounts(facts.append, engines)
    running(counts.run(client))
    request = RouteRequest(model="tiny", blocks=[1], length=600)
    counts.note(unable.id, request, b"{}")
    counts.note(able.id, request, b"{}")
    await wait_until(lambda: facts)
    assert facts[0].replica == able.id
    assert unable.asked == []


# ---- signs, one against the other ------------------------------------------------------------------------------------


def test_a_stronger_sign_replaces_a_weaker_one_and_not_the_other_way_round(engines, caplog) -> None:
    with caplog.at_level(logging.INFO, logger="gateway.feeds.engines"):
        engines.hear_greeting("http://a", b"Ollama is running")
        engines.hear_owners("http://a", ["vllm"])
        engines.hear_greeting("http://a", b"Ollama is running")
        assert engines.name("http://a") == "vllm"
        engines.hear_page("http://a", b"llamacpp:requests_processing 0\n")
        engines.hear_owners("http://a", ["vllm"])
        assert engines.name("http://a") == "llama.cpp"
    assert [record.getMessage() for record in caplog.records] == [
        "http://a runs ollama",
        "http://a runs vllm",
        "http://a runs llama.cpp",
    ]


def test_what_says_nothing_changes_nothing(engines) -> None:
    engines.hear_owners("http://a", ["sglang"])
    engines.hear_page("http://a", b"")
    engines.hear_owners("http://a", ["acme"])
    engines.give_up("http://a", ["acme"])
    assert engines.name("http://a") == "sglang"
    engines.forget("http://a")
    assert engines.name("http://a") is None
    assert not engines.is_met("http://a")


def test_of_vllm_nothing_is_said(engines, caplog) -> None:
    with caplog.at_level(logging.INFO, logger="gateway.feeds.engines"):
        engines.hear_owners("http://a", ["vllm"])
        engines.hear_page("http://a", b"vllm:num_requests_running 0\n")
    assert caplog.records == []


def test_names_of_owners_cannot_flood_or_forge_the_log(engines, caplog) -> None:
    with caplog.at_level(logging.INFO, logger="gateway.feeds.engines"):
        engines.give_up("http://a", ["x\nhttp://b runs vllm" + "y" * 10_000])
    assert "\n" not in caplog.records[0].getMessage()
    assert len(caplog.records[0].getMessage()) < 250


def test_who_does_not_know_salts_is_named_where_tenants_are_kept_apart(caplog) -> None:
    with caplog.at_level(logging.WARNING, logger="gateway.feeds.engines"):
        engines = Engines({"http://said": Said(engine="ollama")}, isolated=True)
        engines.hear_owners("http://a", ["vllm"])
        engines.hear_page("http://b", b"llamacpp:requests_processing 0\n")
        engines.hear_page("http://b", b"llamacpp:requests_processing 1\n")
        engines.give_up("http://c", ["acme"])
    assert [record.getMessage().partition("hold at ")[2] for record in caplog.records] == [
        "http://said: ollama may share caches",
        "http://b: llama.cpp may share caches",
        "http://c: openai may share caches",
    ]


def test_where_tenants_share_caches_anyway_nothing_is_said_of_salts(engines, caplog) -> None:
    with caplog.at_level(logging.WARNING, logger="gateway.feeds.engines"):
        engines.hear_owners("http://a", ["llamacpp"])
    assert caplog.records == []
