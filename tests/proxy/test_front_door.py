"""Requests and answers through the gateway, over real sockets, both ways of serving clients."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import random
import tracemalloc

import httpx
import msgspec
import pytest

from tests.proxy.conftest import eventually, running_gateway
from tests.proxy.scripted import ANSWER, Exchange, ScriptedReplica

ODD_BODY = (
    b'{ "model" :"m",  "messages":[{"role":"user","content":"caf\\u00e9 caf\xc3\xa9 \xf0\x9f\x98\x80"}],'
    b'"temperature":1.0,"top_p":0.7, "seed":12345678901234567890123, "return_token_ids":true,'
    b'"chat_template_kwargs":{"enable_thinking":false},"cache_salt":"s","invented":{"a":[1,2 ,3]}}\n'
)


async def raw_request(gateway, request: bytes) -> bytes:  # type: ignore[no-untyped-def]
    """Send bytes on a new connection and read until the gateway closes it."""
    reader, writer = await gateway.connect()
    writer.write(request)
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return bytes(answer)


def post(body: bytes, *, path: str = "/v1/chat/completions", headers: bytes = b"", close: bool = True) -> bytes:
    connection = b"connection: close\r\n" if close else b""
    return (
        (
            b"POST "
            + path.encode()
            + b" HTTP/1.1\r\nhost: g\r\ncontent-type: application/json\r\n"
            + connection
            + headers
        )
        + b"content-length: %d\r\n\r\n" % len(body)
        + body
    )


async def test_body_reaches_the_replica_byte_for_byte(mode: str) -> None:
    async with ScriptedReplica().running() as replica, running_gateway(replica, mode=mode) as gateway:
        response = await gateway.client.post("/v1/chat/completions?x=%2F&y", content=ODD_BODY)
        assert response.status_code == 200
        assert response.content == ANSWER
        assert replica.exchanges[0].body == ODD_BODY
        assert replica.exchanges[0].request_line == b"POST /v1/chat/completions?x=%2F&y HTTP/1.1"


@pytest.mark.parametrize("size", [0, 1, 1000, 70_000, 3_000_000])
async def test_large_bodies_and_answers_pass_unchanged(mode: str, size: int) -> None:
    filler = random.Random(size).randbytes(size // 2).hex().encode()
    body = b'{"model":"m","messages":[{"role":"user","content":"' + filler + b'"}]}'

    async def echo(exchange: Exchange) -> None:
        await exchange.answer(exchange.body)

    async with ScriptedReplica(echo).running() as replica, running_gateway(replica, mode=mode) as gateway:
        response = await gateway.client.post("/v1/chat/completions", content=body)
        assert hashlib.sha256(response.content).digest() == hashlib.sha256(body).digest()


async def test_chunked_request_body_is_joined(mode: str) -> None:
    async def pieces():  # type: ignore[no-untyped-def]
        for start in range(0, len(ODD_BODY), 7):
            yield ODD_BODY[start : start + 7]

    async with ScriptedReplica().running() as replica, running_gateway(replica, mode=mode) as gateway:
        response = await gateway.client.post("/v1/chat/completions", content=pieces())
        assert response.status_code == 200
        assert replica.exchanges[0].body == ODD_BODY
        assert replica.exchanges[0].header("content-length") == str(len(ODD_BODY))
        assert replica.exchanges[0].header("transfer-encoding") is None


async def test_headers_follow_the_contract(mode: str) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.answer(
            ANSWER, headers=b"x-custom: 1\r\nx-custom: 2\r\nKeep-Alive: timeout=5\r\nConnection: X-Hop\r\nX-Hop: s\r\n"
        )

    headers = [
        ("authorization", "Bearer key"),
        ("x-request-id", "my-id-1"),
        ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
        ("x-many", "a"),
        ("x-many", "b"),
        ("connection", "keep-alive, x-secret-hop"),
        ("x-secret-hop", "1"),
        ("te", "trailers"),
        ("proxy-authorization", "Basic abc"),
    ]
    async with ScriptedReplica(script).running() as replica, running_gateway(replica, mode=mode) as gateway:
        response = await gateway.client.post("/v1/chat/completions", content=ODD_BODY, headers=headers)
        sent = replica.exchanges[0].headers
        assert ("authorization", "Bearer key") in sent
        assert ("x-request-id", "my-id-1") in sent
        assert [value for name, value in sent if name == "x-many"] == ["a", "b"]
        assert dict(sent)["host"] == replica.url.removeprefix("http://")
        assert dict(sent)["traceparent"].startswith("00-0af7")
        assert not {"x-secret-hop", "te", "proxy-authorization", "connection"} & dict(sent).keys()
        assert response.headers["x-request-id"] == "my-id-1"
        assert response.headers["x-warmlane-replica"] == replica.url
        assert response.headers["x-warmlane-cached-tokens"] == "0"
        assert response.headers.get_list("x-custom") == ["1", "2"]
        assert not {"keep-alive", "x-hop"} & response.headers.keys()


@pytest.mark.parametrize("given", ["has space", "a" * 200, "semi;colon"])
async def test_unsafe_request_ids_are_replaced(mode: str, given: str) -> None:
    async with ScriptedReplica().running() as replica, running_gateway(replica, mode=mode) as gateway:
        response = await gateway.client.post("/v1/chat/completions", content=ODD_BODY, headers={"x-request-id": given})
        made = response.headers["x-request-id"]
        assert made != given
        assert replica.exchanges[0].header("x-request-id") == made


async def test_each_event_is_forwarded_as_it_arrives(mode: str) -> None:
    """O-17."""
    released = [asyncio.Event() for _ in range(3)]
    events = [b'data: {"choices":[{"delta":{"content":"%d"}}]}\n\n' % number for number in range(3)]

    async def script(exchange: Exchange) -> None:
        await exchange.start_stream()
        for event, gate in zip(events, released, strict=True):
            await gate.wait()
            await exchange.chunk(event)
        await exchange.end_stream()

    async with ScriptedReplica(script).running() as replica, running_gateway(replica, mode=mode) as gateway:
        async with gateway.client.stream("POST", "/v1/chat/completions", content=ODD_BODY) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            pieces = response.aiter_raw()
            for event, gate in zip(events, released, strict=True):
                gate.set()  # the next event is not sent before this one has arrived
                assert await asyncio.wait_for(anext(pieces), 5) == event


STREAM = (
    (
        ": comment\r\n\r\n"
        'data: {"choices":[{"delta":{"content":"日本語 \U0001f600"}}]}\n\n'
        "event: ping\ndata: {}\n\n"
        'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":1}}\n\ndata: [DONE]\n\n'
    ).encode()
    + b"data: "
    + b"x" * 400_000
    + b"\n\n"
)


@pytest.mark.parametrize("seed", range(6))
async def test_streams_pass_unchanged_however_they_are_cut(mode: str, seed: int) -> None:
    """O-17."""
    rng = random.Random(seed)
    sizes = [1, 3, 17, 1000, 65_536, 200_000] if seed else [1]
    stream = STREAM if seed else STREAM[:300]

    async def script(exchange: Exchange) -> None:
        await exchange.start_stream()
        at = 0
        while at < len(stream):
            size = rng.choice(sizes)
            await exchange.chunk(stream[at : at + size])
            at += size
        await exchange.end_stream()

    async with ScriptedReplica(script).running() as replica, running_gateway(replica, mode=mode) as gateway:
        response = await gateway.client.post("/v1/chat/completions", content=ODD_BODY)
        assert response.content == stream


async def test_split_across_tcp_segments_anywhere(mode: str) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    raw = head + b"5\r\nhello\r\n0\r\n\r\n"

    async def script(exchange: Exchange) -> None:
        for byte in raw:
            await exchange.send(bytes([byte]))
            await asyncio.sleep(0)

    async with ScriptedReplica(script).running() as replica, running_gateway(replica, mode=mode) as gateway:
        for _ in range(3):
            assert (await gateway.client.post("/v1/chat/completions", content=ODD_BODY)).content == b"hello"


async def test_compressed_answer_keeps_its_label(mode: str) -> None:
    packed = gzip.compress(ANSWER)

    async def script(exchange: Exchange) -> None:
        assert exchange.header("accept-encoding") == "gzip"
        await exchange.answer(packed, headers=b"content-encoding: gzip\r\n")

    async with ScriptedReplica(script).running() as replica, running_gateway(replica, mode=mode) as gateway:
        response = await gateway.client.post(
            "/v1/chat/completions", content=ODD_BODY, headers={"accept-encoding": "gzip"}
        )
        assert response.headers["content-encoding"] == "gzip"
        assert response.content == ANSWER


async def test_accept_encoding_is_never_invented(mode: str) -> None:
    async with ScriptedReplica().running() as replica, running_gateway(replica, mode=mode) as gateway:
        await raw_request(gateway, post(ODD_BODY))
        assert replica.exchanges[0].header("accept-encoding") is None
        assert replica.exchanges[0].header("user-agent") is None


async def test_compressed_request_body_passes_intact(mode: str) -> None:
    packed = gzip.compress(ODD_BODY)
    async with ScriptedReplica().running() as replica, running_gateway(replica, mode=mode) as gateway:
        response = await gateway.client.post(
            "/v1/chat/completions", content=packed, headers={"content-encoding": "gzip"}
        )
        assert response.status_code == 200
        assert replica.exchanges[0].body == packed


async def test_answer_that_ends_with_its_connection(mode: str) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\nthe rest")
        await exchange.send(b" of it")
        exchange.writer.close()

    async with ScriptedReplica(script).running() as replica, running_gateway(replica, mode=mode) as gateway:
        assert (await gateway.client.post("/v1/chat/completions", content=ODD_BODY)).content == b"the rest of it"
        assert (await gateway.client.post("/v1/chat/completions", content=ODD_BODY)).status_code == 200


async def test_interim_answers_are_skipped(mode: str) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        await exchange.answer(ANSWER)

    async with ScriptedReplica(script).running() as replica, running_gateway(replica, mode=mode) as gateway:
        assert (await gateway.chat()).content == ANSWER


@pytest.mark.parametrize(
    ("status", "body", "headers"),
    [
        ("400 Bad Request", b'{"error":{"message":"too long","type":"BadRequestError","param":null,"code":400}}', b""),
        ("429 Too Many Requests", b'{"error":{}}', b"Retry-After: 7\r\n"),
        ("503 Service Unavailable", b"busy", b"Retry-After: 3\r\n"),
        ("500 Internal Server Error", b"{}", b""),
        ("422 Unprocessable Entity", b'{"detail":[]}', b""),
    ],
)
async def test_the_replicas_own_errors_pass_unchanged(mode: str, status: str, body: bytes, headers: bytes) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.answer(body, status=status, headers=headers)

    async with ScriptedReplica(script).running() as replica, running_gateway(replica, mode=mode) as gateway:
        response = await gateway.chat(stream=True)
        assert response.status_code == int(status[:3])
        assert response.content == body
        if headers:
            assert response.headers["retry-after"] == headers.split()[1].decode()
        assert len(replica.exchanges) == 1


MALFORMED = [
    b"",
    b"{",
    b'{"model":"m",',
    b"\xef\xbb\xbf" + ODD_BODY,
    ODD_BODY.decode().encode("utf-16"),
    b'{"model":"m","temperature":NaN,"messages":[]}',
    b'{"model":"\xe9"}',
    b'{"messages":' + b"[" * 20_000,
    b'{"messages":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
]


@pytest.mark.parametrize("body", MALFORMED, ids=range(len(MALFORMED)))
async def test_malformed_bodies_are_refused_and_the_next_request_is_fine(mode: str, body: bytes) -> None:
    """O-20."""
    async with ScriptedReplica().running() as replica, running_gateway(replica, mode=mode) as gateway:
        response = await gateway.client.post("/v1/chat/completions", content=body)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["code"] == "invalid_json"
        assert set(error) == {"message", "type", "param", "code"}
        assert (await gateway.chat()).status_code == 200
        assert len(replica.exchanges) == 1


@pytest.mark.parametrize("body", [b"[]", b'"x"', b"null", b'{"messages":7}', b'{"model":3,"messages":[1]}', b"{}"])
async def test_json_of_another_shape_is_for_the_replica_to_judge(mode: str, body: bytes) -> None:
    """O-15, O-20."""
    async with ScriptedReplica().running() as replica, running_gateway(replica, mode=mode) as gateway:
        assert (await gateway.client.post("/v1/chat/completions", content=body)).status_code == 200
        assert replica.exchanges[0].body == body


@pytest.mark.parametrize(
    "path",
    [
        "//v1/chat/completions",
        "/V1/chat/completions",
        "/%76%31/chat/completions",
        "/v1/chat/completions/",
        "/invocations",
        "/inference/v1/generate",
        "/v1/%2e%2e/metrics",
        "/v1%2Fchat%2Fcompletions",
        "/reset_prefix_cache",
    ],
)
async def test_paths_outside_the_table_reach_no_replica(mode: str, path: str) -> None:
    async with ScriptedReplica().running() as replica, running_gateway(replica, mode=mode) as gateway:
        answer = await raw_request(gateway, post(ODD_BODY, path=path))
        assert answer.startswith(b"HTTP/1.1 404 ")
        assert msgspec.json.decode(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "not_found"
        absolute = await raw_request(gateway, post(ODD_BODY, path="http://g" + path))
        assert absolute.startswith(b"HTTP/1.1 404 ")
        assert replica.exchanges == []


async def test_unknown_model(mode: str) -> None:
    async with ScriptedReplica().running() as replica, running_gateway(replica, mode=mode) as gateway:
        response = await gateway.chat(model="nope")
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"
        assert "nope" in response.json()["error"]["message"]
        assert replica.exchanges == []


async def test_models_are_merged_and_the_smaller_length_counts() -> None:
    first, second = ScriptedReplica(models=("m", "org/one:tag")), ScriptedReplica(models=("m",))
    second.models[0]["max_model_len"] = 400
    async with first.running(), second.running(), running_gateway(first, second) as gateway:
        await eventually(lambda: models_listed(gateway.client))
        listed = (await gateway.client.get("/v1/models")).json()
        assert [(card["id"], card["max_model_len"]) for card in listed["data"]] == [("m", 400), ("org/one:tag", 1000)]
        assert (await gateway.client.get("/v1/models/org/one:tag")).json()["id"] == "org/one:tag"
        assert (await gateway.client.get("/v1/models/org%2Fone%3Atag")).json()["id"] == "org/one:tag"
        missing = await gateway.client.get("/v1/models/none")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


async def models_listed(client: httpx.AsyncClient) -> bool:
    data = (await client.get("/v1/models")).json()["data"]
    return [card["max_model_len"] for card in data] == [400, 1000]


async def test_stored_responses_go_to_their_owner() -> None:
    async def script(exchange: Exchange) -> None:
        if exchange.request_line.startswith(b"POST /v1/responses HTTP"):
            await exchange.answer(
                b'{"id":"resp_%d","object":"response"}' % exchange.writer.get_extra_info("sockname")[1]
            )
        else:
            await exchange.answer(b'{"object":"response"}')

    first, second = ScriptedReplica(script), ScriptedReplica(script)
    async with first.running(), second.running(), running_gateway(first, second) as gateway:
        owners = {}
        for number in range(6):
            response = await gateway.client.post("/v1/responses", json={"model": "m", "input": f"{number}" * 3000})
            owners[response.json()["id"]] = response.headers["x-warmlane-replica"]
        assert len(set(owners.values())) == 2
        for id_, owner in owners.items():
            follow_up = {"model": "m", "input": "next", "previous_response_id": id_}
            for response in (
                await gateway.client.post("/v1/responses", json=follow_up),
                await gateway.client.get(f"/v1/responses/{id_}"),
                await gateway.client.post(f"/v1/responses/{id_}/cancel"),
            ):
                assert response.status_code == 200
                assert response.headers["x-warmlane-replica"] == owner


async def test_the_id_of_a_streamed_response_is_learned() -> None:
    async def script(exchange: Exchange) -> None:
        if exchange.request_line.startswith(b"GET"):
            await exchange.answer(b"{}")
            return
        await exchange.start_stream()
        await exchange.chunk(b'event: response.created\ndata: {"response":{"id":"resp_s1","object":"response"}}\n\n')
        await exchange.end_stream()

    first, second = ScriptedReplica(script), ScriptedReplica(script)
    async with first.running(), second.running(), running_gateway(first, second) as gateway:
        made = await gateway.client.post("/v1/responses", json={"model": "m", "input": "x", "stream": True})
        for _ in range(4):
            got = await gateway.client.get("/v1/responses/resp_s1")
            assert got.headers["x-warmlane-replica"] == made.headers["x-warmlane-replica"]


async def test_usage_of_the_answer_reaches_the_metrics(mode: str) -> None:
    async with ScriptedReplica().running() as replica, running_gateway(replica, mode=mode) as gateway:
        await gateway.chat()
        page = await gateway.metrics()
        assert 'warmlane_cached_tokens_total{kind="reported"} 4.0' in page
        assert 'warmlane_prompt_tokens_total{model="m"} 7.0' in page
        assert 'warmlane_completion_tokens_total{model="m"} 2.0' in page


async def test_dry_run_is_not_open_to_the_world() -> None:
    async with ScriptedReplica().running() as replica:
        async with running_gateway(replica, server={"host": "0.0.0.0"}) as gateway:
            refused = await gateway.client.post("/warmlane/route", content=ODD_BODY)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_open")


async def test_dry_run_explains_and_books_nothing() -> None:
    first, second = ScriptedReplica(), ScriptedReplica()
    async with first.running(), second.running(), running_gateway(first, second) as gateway:
        body = {"model": "m", "messages": [{"role": "user", "content": "word " * 2000}]}
        served = await gateway.client.post("/v1/chat/completions", json=body)
        told = (await gateway.client.post("/warmlane/route", json=body)).json()
        assert told["replica"] == served.headers["x-warmlane-replica"]
        assert told["reason"] == "warm"
        assert told["ranking"][0]["cached_tokens"] > 0
        assert len(told["ranking"]) == 2
        for row in told["ranking"]:
            assert row["total_seconds"] == pytest.approx(sum(row["parts"].values()))
        assert len(first.exchanges) + len(second.exchanges) == 1


async def test_the_body_is_let_go_when_the_answer_begins(mode: str) -> None:
    """Thousands of long answers must not keep their prompts in memory."""
    size = 8_000_000

    async def script(exchange: Exchange) -> None:
        exchange.body = b""
        await exchange.start_stream()
        await exchange.chunk(b"data: {}\n\n")
        await exchange.wait_closed(20)

    async with ScriptedReplica(script).running() as replica, running_gateway(replica, mode=mode) as gateway:
        _, writer = await gateway.connect()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            body = b'{"model":"m","messages":[],"x":"' + b"y" * size + b'"}'
            writer.write(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ncontent-length: %d\r\n\r\n" % len(body) + body
            )
            del body
            await eventually(lambda: replica.exchanges and not replica.exchanges[-1].body)
            await eventually(lambda: tracemalloc.get_traced_memory()[0] - before < size / 4)
        finally:
            tracemalloc.stop()
            writer.close()
