"""The first prompts of a model are counted by their replica, over real sockets; whatever goes wrong leaves no fact."""

from __future__ import annotations

import pytest
from scripted_replica import ok, wait_until

from gateway.core.model import BlockHash, PromptCounted, RouteRequest, Space
from gateway.feeds.token_counts import MAX_PROMPT_BYTES, PROMPTS_OF_MODEL, TokenCounts

BODY = b'{"model":"m","messages":[{"role":"user","content":"some words"}]}'


def prompt(model: str | None = "m", length: int = 3_400) -> RouteRequest:
    return RouteRequest(model=model, blocks=[BlockHash(1)], length=length)


@pytest.fixture
def counts(facts, client, running) -> TokenCounts:
    made = TokenCounts(facts.append)
    running(made.run(client))
    return made


async def test_sends_the_body_as_it_is_and_reports_what_was_counted(start_replica, facts, counts):
    one = await start_replica()
    one.answers = {"/tokenize": ok(b'{"count":2000,"max_model_len":8192,"tokens":[1,2,3],"token_strs":null}')}
    counts.note(one.id, prompt(), BODY)
    await wait_until(lambda: facts)
    assert facts == [PromptCounted(one.id, "m", Space.TEXT, 3_400, 2_000)]
    assert (one.asked, one.bodies) == (["/tokenize"], [BODY])


async def test_asks_for_the_first_prompts_of_each_model_only(start_replica, facts, counts):
    one = await start_replica()
    one.answers = {"/tokenize": ok(b'{"count":2000}')}
    for model in ("m", "m", "m", "m", "n", None):
        counts.note(one.id, prompt(model), BODY)
    await wait_until(lambda: len(facts) >= PROMPTS_OF_MODEL + 2)
    counts.note(one.id, prompt("m"), BODY)
    counts.note(one.id, prompt("o"), BODY)
    await wait_until(lambda: any(fact.model == "o" for fact in facts))
    assert [fact.model for fact in facts] == ["m"] * PROMPTS_OF_MODEL + ["n", None, "o"]


@pytest.mark.parametrize(
    "answer",
    [
        ok(b"{}", "404 Not Found"),
        ok(b'{"count":"many"}'),
        ok(b"<html>"),
        ok(b'{"tokens":[]}'),
        ok(b'{"count":1' + b"0" * 400 + b"}"),
        ok(b'{"count":0}'),
        ok(b'{"count":-5}'),
        ok(b'{"tokens":' + b"[" * 100_000),
        b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{",
    ],
)
async def test_an_engine_that_cannot_count_teaches_nothing_and_harms_nobody(answer, start_replica, facts, counts):
    broken, fine = await start_replica(), await start_replica()
    broken.answers = {"/tokenize": answer}
    fine.answers = {"/tokenize": ok(b'{"count":7}')}
    counts.note(broken.id, prompt(), BODY)
    counts.note(fine.id, prompt(), BODY)
    await wait_until(lambda: facts)
    assert [(fact.replica, fact.prompt_tokens) for fact in facts] == [(fine.id, 7)]


@pytest.mark.parametrize(
    ("request_", "body"),
    [
        (prompt(), b"x" * (MAX_PROMPT_BYTES + 1)),
        (prompt(), b'{"messages":[{"content":[{"type":"image_url","image_url":{"url":"http://pictures/1"}}]}]}'),
        (RouteRequest(model="m", length=20), b"{}"),
    ],
)
async def test_large_prompts_media_and_short_prompts_are_left_alone(request_, body, start_replica, facts, counts):
    one = await start_replica()
    one.answers = {"/tokenize": ok(b'{"count":7}')}
    counts.note(one.id, request_, body)
    counts.note(one.id, prompt(), BODY)
    await wait_until(lambda: facts)
    assert one.bodies == [BODY]
