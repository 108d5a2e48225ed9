"""The models API (O-26): ids of any shape can be retrieved, the list is one stable union, an unknown model is a 404."""

from __future__ import annotations

from urllib.parse import quote

import pytest

from tests.proxy.conftest import eventually, running_gateway
from tests.proxy.scripted import ScriptedReplica

IDS = ("org/name:tag", "plain", "a/b/c.d-e_f", "Ünïcode/模型", "with space", "100%", "v1/models", "../up", "q?x=1#y")


@pytest.mark.parametrize("safe", ["", "/:"])
async def test_ids_of_any_shape_are_retrieved_encoded_and_as_they_are(safe: str) -> None:
    async with ScriptedReplica(models=IDS).running() as replica, running_gateway(replica) as gateway:
        listed = [card["id"] for card in (await gateway.client.get("/v1/models")).json()["data"]]
        assert listed == sorted(IDS)
        for id in IDS:
            reader, writer = await gateway.connect()  # a client library would tidy the path up
            writer.write(
                f"GET /v1/models/{quote(id, safe=safe)} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode()
            )
            answer = await reader.read()
            writer.close()
            assert answer.startswith(b"HTTP/1.1 200 "), (id, answer[:200])
            assert f'"id":"{id}"'.encode() in answer.replace(b'": "', b'":"'), id


async def test_an_id_that_nobody_lists() -> None:
    async with ScriptedReplica().running() as replica, running_gateway(replica) as gateway:
        for path in ("nobody", "m/", "org%2Fname", "%00", "M"):
            answer = await gateway.client.get(f"/v1/models/{path}")
            assert answer.status_code == 404, path
            assert answer.json()["error"]["code"] == "model_not_found"
            assert answer.json()["error"]["param"] == "model"


async def test_the_list_is_a_stable_union_of_the_replicas_that_are_up() -> None:
    first, second = ScriptedReplica(models=("b", "both")), ScriptedReplica(models=("a", "both"))
    first.models[1] |= {"max_model_len": 900, "created": 9, "owned_by": "first", "root": "/models/both"}
    second.models[1] |= {"max_model_len": 1200, "created": 3}
    async with first.running(), second.running(), running_gateway(first, second) as gateway:
        answers = [await gateway.client.get("/v1/models") for _ in range(20)]
        assert len({answer.content for answer in answers}) == 1, "not one replica's list or another's"
        cards = {card["id"]: card for card in answers[0].json()["data"]}
        assert list(cards) == ["a", "b", "both"]
        assert (cards["both"]["max_model_len"], cards["both"]["created"]) == (900, 3)
        assert cards["a"]["max_model_len"] == 1000

        await first.stop()
        await eventually(lambda: _lists(gateway, ["a", "both"]))
        one = (await gateway.client.get("/v1/models/both")).json()
        assert one["max_model_len"] == 1200
        # Who asks for the model of the one that is down hears that, not that there is no such model.
        refused = await gateway.chat(model="b")
        assert refused.status_code in (502, 503), refused.text
        assert refused.json()["error"]["code"] != "model_not_found"


async def _lists(gateway, ids: list[str]) -> bool:
    return [card["id"] for card in (await gateway.client.get("/v1/models")).json()["data"]] == ids


async def test_an_unknown_model_is_a_404_and_reaches_no_replica(mode: str) -> None:
    async with ScriptedReplica().running() as replica, running_gateway(replica, mode=mode) as gateway:
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/v1/embeddings"):
            for model in ("nobody", "M", "m ", "m\n", "x" * 10_000):
                answer = await gateway.chat(path=path, model=model, prompt="x", input="x")
                assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found"), (path, model)
        assert replica.exchanges == []
