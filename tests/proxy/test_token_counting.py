"""Early prompts are counted by the replica that got them, byte for byte, and the next prompts are estimated by that."""

from __future__ import annotations

from tests.proxy.conftest import eventually, running_gateway
from tests.proxy.scripted import Exchange, ScriptedReplica, answer_chat

WORDS = "word " * 400


async def answer(exchange: Exchange) -> None:
    if b" /tokenize " in exchange.request_line:
        await exchange.answer(b'{"count":1000,"max_model_len":4096,"tokens":[]}')
    else:
        await answer_chat(exchange)


def paths(replica: ScriptedReplica) -> list[bytes]:
    return [exchange.request_line.split(b" ")[1] for exchange in replica.exchanges]


async def test_the_first_prompts_are_counted_and_the_next_is_estimated_by_it(mode):
    async with ScriptedReplica(answer).running() as replica:
        async with running_gateway(replica, mode=mode, feeds={"tokenize": True}) as gateway:
            for _ in range(5):
                assert (await gateway.chat(WORDS)).status_code == 200
            await eventually(lambda: paths(replica).count(b"/tokenize") == 3)
            assert paths(replica).count(b"/v1/chat/completions") == 5
            chats = [e.body for e in replica.exchanges if b"/v1/chat" in e.request_line]
            counted = [e.body for e in replica.exchanges if b"/tokenize" in e.request_line]
            assert set(counted) == set(chats[:1])
            dry = await gateway.client.post("/warmlane/route", content=chats[0])
            assert abs(dry.json()["ranking"][0]["prompt_tokens"] - 1_000) < 20


async def test_nothing_is_counted_for_a_policy_that_does_not_look_at_caches(mode):
    async with ScriptedReplica(answer).running() as replica:
        routing = {"policy": "round-robin"}
        async with running_gateway(replica, mode=mode, routing=routing, feeds={"tokenize": True}) as gateway:
            for _ in range(3):
                assert (await gateway.chat(WORDS)).status_code == 200
            assert paths(replica) == [b"/v1/chat/completions"] * 3


async def test_an_answer_that_keeps_state_is_not_counted(mode):
    async with ScriptedReplica(answer).running() as replica:
        async with running_gateway(replica, mode=mode, feeds={"tokenize": True}) as gateway:
            body = {"model": "m", "input": WORDS}
            assert (await gateway.client.post("/v1/responses", json=body)).status_code == 200
            assert (await gateway.chat(WORDS)).status_code == 200
            await eventually(lambda: b"/tokenize" in paths(replica))
            assert [e.body for e in replica.exchanges if b"/tokenize" in e.request_line] == [replica.exchanges[1].body]
