"""Keys over real sockets, both ways of serving clients: who is let in, how much, and what a replica gets to see."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import httpx
import msgspec
import openai
import pytest

from tests.proxy.conftest import RunningGateway, eventually, running_gateway
from tests.proxy.scripted import ANSWER, Exchange, ScriptedReplica
from tests.proxy.test_front_door import ODD_BODY, post, raw_request

KEY, OTHER_KEY, REPLICA_KEY = "wl-canary-alice", "wl-canary-bob", "sk-canary-replica"
CHAT = "/v1/chat/completions"
RESPONSE = b'{"id":"resp_1","object":"response","model":"m","usage":{"input_tokens":1,"output_tokens":1}}'


class Keys:
    """A keys file: each call writes it anew."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, alice: dict[str, Any] | None = None, bob: dict[str, Any] | None = None) -> None:
        lines: list[str] = []
        for name, secret, fields in (("alice", KEY, alice), ("bob", OTHER_KEY, bob)):
            if fields is not None:
                digest = hashlib.sha256(secret.encode()).hexdigest()
                table = {"name": name, "sha256": digest, "tenant": f"{name}-co", **fields}
                lines += ["[[keys]]", *(f"{field} = {json.dumps(value)}" for field, value in table.items())]
        self.path.write_text("\n".join(lines))


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    keys = Keys(tmp_path / "keys.toml")
    keys.write(alice={}, bob={})
    return keys


Guarded = Callable[..., contextlib.AbstractAsyncContextManager[RunningGateway]]


@pytest.fixture
def guarded(keys: Keys, mode: str) -> Guarded:
    """A gateway with that keys file; its client is alice's."""

    @contextlib.asynccontextmanager
    async def running(*replicas: ScriptedReplica, auth: dict[str, Any] | None = None, **tables: Any):  # type: ignore[no-untyped-def]
        table = {"keys_file": str(keys.path), **(auth or {})}
        async with running_gateway(*replicas, mode=mode, auth=table, key=KEY, **tables) as gateway:
            yield gateway

    return running


def as_bob(**headers: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {OTHER_KEY}", **headers}


# -- who is let in

PATHS = [
    b"/v1/chat/completions",
    b"/v1/completions?api_key=" + KEY.encode(),
    b"/v1/responses",
    b"/v1/responses/resp_1",
    b"/v1/responses/resp_1/cancel",
    b"/v1/messages",
    b"/v1/messages/count_tokens",
    b"/v1/embeddings",
    b"/v1/audio/transcriptions",
    b"/tokenize",
    b"/v2/rerank",
    b"/invocations",
    b"/inference/v1/generate",
    b"/metrics",
    b"/docs",
    b"/openapi.json",
    b"/redoc",
    b"/v1/models",
    b"/v1/models/m",
    b"/warmlane/route",
    b"/",
    b"*",
    b"//v1/chat/completions",
    b"/v1//chat/completions",
    b"/V1/chat/completions",
    b"/v1/chat/completions/",
    b"/v1/chat/completions#x",
    b"/%76%31/chat/completions",
    b"/v1/chat%2Fcompletions",
    b"/v1%2Fmodels",
    b"/v1/%2e%2e/metrics",
    b"/health/../v1/models",
    b"/health/..%2fv1/models",
    b"/health%2f..%2fv1/models",
    b"/%68ealth",
    b"/health/",
    b"/health;/v1/models",
    b"/health%00",
    b"/Health",
    b"//health",
    b"/ready/x",
    b"http://g/v1/chat/completions",
    b"http://g/v1/models",
    b"http://user:" + KEY.encode() + b"@g/v1/models",
    b"http://g/health/../metrics",
]
"""O-21: every route that exists, and spellings that some parser takes for one."""

METHODS = [b"GET", b"POST", b"HEAD", b"PUT", b"DELETE", b"OPTIONS", b"PATCH", b"TRACE", b"BREW"]

BAD_KEYS = {
    "none": b"",
    "empty": b"authorization: \r\n",
    "empty bearer": b"authorization: Bearer \r\n",
    "wrong": b"authorization: Bearer wl-canary-wrong\r\n",
    "prefix": b"authorization: Bearer " + KEY[:-1].encode() + b"\r\n",
    "longer": b"authorization: Bearer " + KEY.encode() + b"x\r\n",
    "two in one": b"authorization: Bearer " + KEY.encode() + b", Bearer " + KEY.encode() + b"\r\n",
    "hash": b"authorization: Bearer " + hashlib.sha256(KEY.encode()).hexdigest().encode() + b"\r\n",
    "basic": b"authorization: Basic " + KEY.encode() + b"\r\n",
    "no scheme": b"authorization: " + KEY.encode() + b"\r\n",
    "wrong x-api-key": b"x-api-key: wrong\r\n",
    "other header": b"api-key: " + KEY.encode() + b"\r\n",
    "underscore": b"x_api_key: " + KEY.encode() + b"\r\n",
    "cookie": b"cookie: authorization=Bearer " + KEY.encode() + b"\r\n",
    "proxy": b"proxy-authorization: Bearer " + KEY.encode() + b"\r\n",
}


async def status_of(gateway: RunningGateway, method: bytes, target: bytes, headers: bytes, body: bytes = b"") -> int:
    """Of one request on a connection of its own; 400 where it was closed without an answer."""
    length = b"content-length: %d\r\n" % len(body) if body else b""
    request = (
        method + b" " + target + b" HTTP/1.1\r\nhost: g\r\nconnection: close\r\n" + headers + length + b"\r\n" + body
    )
    answer = await raw_request(gateway, request)
    return int(answer.split(b" ", 2)[1]) if answer else 400


async def test_o_21_no_path_is_open_without_a_key(guarded: Guarded) -> None:
    """O-21: paths and encodings, with and without a body."""
    async with ScriptedReplica().running() as replica, guarded(replica) as gateway:
        for target in PATHS:
            for method, body in ((b"GET", b""), (b"POST", ODD_BODY)):
                assert await status_of(gateway, method, target, b"", body) in (400, 401), (method, target)
        assert replica.exchanges == []


async def test_o_21_no_method_is_open_without_a_key(guarded: Guarded) -> None:
    async with ScriptedReplica().running() as replica, guarded(replica) as gateway:
        for method in METHODS:
            for target in (CHAT.encode(), b"/v1/models", b"/metrics", b"/nothing"):
                assert await status_of(gateway, method, target, b"") in (400, 401), (method, target)
            if method not in (b"GET", b"HEAD"):
                assert await status_of(gateway, method, b"/health", b"") in (400, 401), method
        assert replica.exchanges == []


async def test_o_21_no_other_key_opens(guarded: Guarded) -> None:
    async with ScriptedReplica().running() as replica, guarded(replica) as gateway:
        for name, header in BAD_KEYS.items():
            for target in (CHAT.encode(), b"/v1/messages", b"/v1/responses/resp_1/cancel", b"/warmlane/route"):
                assert await status_of(gateway, b"POST", target, header, ODD_BODY) == 401, (name, target)
            assert await status_of(gateway, b"GET", b"/metrics", header) == 401, name
        assert replica.exchanges == []
        page = (await gateway.client.get("/metrics")).text
        refused = [line for line in page.splitlines() if line.startswith("warmlane_key_refusals_total")]
        assert {line.split("{")[1].split("}")[0] for line in refused} == {
            'reason="no_key",tenant="none"',
            'reason="wrong_key",tenant="none"',
        }


async def test_with_a_key_every_spelling_of_a_path_is_what_it_was_without_keys(guarded: Guarded, mode: str) -> None:
    """O-21: what was checked is what is forwarded, so nothing but the exact target reaches the replica."""

    async def outcomes(gateway: RunningGateway, replica: ScriptedReplica) -> list[tuple[int, list[bytes]]]:
        found = []
        for target in PATHS:
            for method, body in ((b"GET", b""), (b"POST", ODD_BODY)):
                replica.exchanges.clear()
                status = await status_of(gateway, method, target, b"x-api-key: " + KEY.encode() + b"\r\n", body)
                found.append((status, [exchange.request_line for exchange in replica.exchanges]))
        return found

    async with ScriptedReplica().running() as replica:
        async with guarded(replica) as gateway:
            with_keys = await outcomes(gateway, replica)
        async with running_gateway(replica, mode=mode) as gateway:
            assert await outcomes(gateway, replica) == with_keys
    assert sum(bool(lines) for _, lines in with_keys) > 5


async def test_health_and_readiness_are_open(guarded: Guarded) -> None:
    async with ScriptedReplica().running() as replica, guarded(replica) as gateway:
        assert await status_of(gateway, b"GET", b"/health", b"") == 200
        assert await status_of(gateway, b"GET", b"/ready?x=1", BAD_KEYS["wrong"]) == 200


async def test_a_refusal_comes_before_the_body(guarded: Guarded) -> None:
    """401 without `100 Continue`, and the connection closes: nobody uploads without a key."""
    head = b"POST %b HTTP/1.1\r\nhost: g\r\nexpect: 100-continue\r\ncontent-length: 50000000\r\n\r\n"
    async with ScriptedReplica().running() as replica, guarded(replica) as gateway:
        for path in (CHAT.encode(), b"/v1/responses/resp_1/cancel"):
            answer = await raw_request(gateway, head % path)
            assert answer.startswith(b"HTTP/1.1 401 ")
            assert b"www-authenticate: bearer\r\n" in answer.lower()
            assert b"connection: close\r\n" in answer.lower()
            assert b" 100 " not in answer
        assert replica.exchanges == []


async def test_a_refusal_reaches_a_client_that_is_still_sending(guarded: Guarded) -> None:
    async with ScriptedReplica().running() as replica, guarded(replica) as gateway:
        body = b'{"x":"' + b"y" * 5_000_000 + b'"}'
        async with httpx.AsyncClient(base_url=gateway.url, trust_env=False, timeout=10) as stranger:
            for path in (CHAT, "/v1/models"):
                answer = await stranger.post(path, content=body)
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
        assert replica.exchanges == []


async def test_each_request_of_a_connection_needs_its_key(guarded: Guarded) -> None:
    good = post(ODD_BODY, close=False, headers=b"authorization: Bearer " + KEY.encode() + b"\r\n")
    async with ScriptedReplica().running() as replica, guarded(replica) as gateway:
        answer = await raw_request(gateway, good + post(ODD_BODY, close=False))
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert answer.count(ANSWER) == 1
        assert len(replica.exchanges) == 1


async def test_the_errors_are_those_of_the_apis(guarded: Guarded) -> None:
    async with ScriptedReplica().running() as replica, guarded(replica) as gateway:
        async with httpx.AsyncClient(base_url=gateway.url, trust_env=False) as stranger:
            chat = await stranger.post(CHAT, json={})
            claude = await stranger.post("/v1/messages", json={}, headers={"x-api-key": "wrong"})
        assert set(chat.json()["error"]) == {"message", "type", "param", "code"}
        assert chat.headers["content-type"] == "application/json"
        assert claude.json()["type"] == "error"
        assert claude.json()["error"]["type"] == "authentication_error"


async def test_the_sdks_get_in_with_a_key_and_raise_without(guarded: Guarded) -> None:
    message = {"role": "user", "content": "hi"}
    async with ScriptedReplica().running() as replica, guarded(replica) as gateway:
        for secret in (KEY, "wrong"):
            async with (
                openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=secret, max_retries=0) as client,
                anthropic.AsyncAnthropic(base_url=gateway.url, api_key=secret, max_retries=0) as claude,
            ):
                if secret == KEY:
                    chat = await client.chat.completions.create(model="m", messages=[message])  # type: ignore[list-item]
                    assert chat.choices[0].message.content == "hello"
                    await claude.messages.create(model="m", max_tokens=1, messages=[message])  # type: ignore[list-item]
                    assert [model.id async for model in client.models.list()] == ["m"]
                else:
                    with pytest.raises(openai.AuthenticationError):
                        await client.chat.completions.create(model="m", messages=[message])  # type: ignore[list-item]
                    with pytest.raises(openai.AuthenticationError):
                        await client.models.list()
                    with pytest.raises(anthropic.AuthenticationError):
                        await claude.messages.create(model="m", max_tokens=1, messages=[message])  # type: ignore[list-item]
        assert len(replica.exchanges) == 2


async def test_a_change_of_the_keys_counts_on_open_connections(guarded: Guarded, keys: Keys) -> None:
    async with ScriptedReplica().running() as replica, guarded(replica) as gateway:
        assert (await gateway.chat()).status_code == 200
        keys.write(bob={})

        async def refused() -> bool:
            return (await gateway.chat()).status_code == 401

        await eventually(refused)
        keys.path.write_text("[[keys]")
        await asyncio.sleep(0)
        keys.write(alice={})

        async def let_in() -> bool:
            return (await gateway.chat()).status_code == 200

        await eventually(let_in)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
async def test_the_admin_key_opens_views_and_nothing_else(
    guarded: Guarded, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ADMIN", "an-admin-key-for-tests")
    admin = {"Authorization": "Bearer an-admin-key-for-tests"}
    async with (
        ScriptedReplica().running() as replica,
        guarded(replica, admin={"key_env": "ADMIN"}, server={"host": host}) as gateway,
    ):
        body = {"model": "m", "messages": []}
        for method, path, sent in (("GET", "/warmlane/replicas", None), ("POST", "/warmlane/route", body)):
            assert (await gateway.client.request(method, path, json=sent, headers=admin)).status_code == 200
            with_clients_key = await gateway.client.request(method, path, json=sent)
            assert with_clients_key.status_code == (200 if host == "127.0.0.1" else 401)
        for path in (
            CHAT,
            "/v1/responses/resp_1/cancel",
            "/warmlane/../v1/chat/completions",
            "/warmlane/%2e%2e/metrics",
        ):
            answer = await gateway.client.post(path, json=body, headers=admin)
            assert answer.status_code in (401, 404), path
        for path in ("/metrics", "/v1/models", "/docs"):
            assert (await gateway.client.get(path, headers=admin)).status_code == 401
        assert replica.exchanges == []


# -- what a replica gets to see

CREDENTIALS = {"Authorization": f"Bearer {KEY}", "x-api-key": "canary-unused", "cookie": "a=b"}


async def test_a_clients_key_ends_here_and_the_replicas_key_is_sent(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O-22: the client's key never leaves the gateway."""
    monkeypatch.setenv("REPLICA_KEY", REPLICA_KEY)
    async with (
        ScriptedReplica().running() as replica,
        guarded(replica, upstream={"api_key_env": "REPLICA_KEY"}) as gateway,
    ):
        sent = {**CREDENTIALS, "connection": "keep-alive, authorization, cookie"}
        assert (await gateway.client.post(CHAT, content=ODD_BODY, headers=sent)).status_code == 200
        (exchange,) = replica.exchanges
        assert [value for name, value in exchange.headers if name == "authorization"] == [f"Bearer {REPLICA_KEY}"]
        assert b"canary-alice" not in exchange.raw_head
        assert b"x-api-key" not in exchange.raw_head
        assert exchange.body == ODD_BODY


async def test_a_clients_key_ends_here_without_a_key_for_replicas(guarded: Guarded) -> None:
    async with ScriptedReplica().running() as replica, guarded(replica) as gateway:
        assert (await gateway.client.post(CHAT, content=ODD_BODY, headers=CREDENTIALS)).status_code == 200
        assert not {"authorization", "x-api-key"} & dict(replica.exchanges[0].headers).keys()
        assert replica.exchanges[0].header("cookie") == "a=b"


@pytest.mark.parametrize("has_key", [False, True])
async def test_without_keys_for_clients(mode: str, has_key: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials pass through, unless the replica's own takes their place."""
    monkeypatch.setenv("REPLICA_KEY", REPLICA_KEY)
    upstream = {"api_key_env": "REPLICA_KEY"} if has_key else {}
    async with (
        ScriptedReplica().running() as replica,
        running_gateway(replica, mode=mode, upstream=upstream) as gateway,
    ):
        assert (await gateway.client.post(CHAT, content=ODD_BODY, headers=CREDENTIALS)).status_code == 200
        (exchange,) = replica.exchanges
        assert exchange.header("authorization") == f"Bearer {REPLICA_KEY if has_key else KEY}"
        assert exchange.header("x-api-key") == (None if has_key else "canary-unused")


async def test_probes_and_scrapes_show_the_replicas_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's `--api-key` guards its list of models as well."""
    monkeypatch.setenv("REPLICA_KEY", REPLICA_KEY)
    heads: set[tuple[str, str | None]] = set()

    class Noting(ScriptedReplica):
        async def _control(self, head: bytes, writer: asyncio.StreamWriter) -> None:
            exchange = Exchange(head, b"", asyncio.StreamReader(), writer, 0, 0)
            heads.add((exchange.request_line.decode().split()[1], exchange.header("authorization")))
            await super()._control(head, writer)

    async with Noting().running() as replica, running_gateway(replica, upstream={"api_key_env": "REPLICA_KEY"}):
        await eventually(lambda: {"/health", "/v1/models", "/metrics"} <= {path for path, _ in heads})
    assert {key for _, key in heads} == {f"Bearer {REPLICA_KEY}"}


# -- how much


async def test_only_the_models_of_a_key(guarded: Guarded, keys: Keys) -> None:
    keys.write(alice={"models": ["m"]}, bob={})
    async with ScriptedReplica(models=("m", "n")).running() as replica, guarded(replica) as gateway:
        assert (await gateway.chat()).status_code == 200
        for body in ({"model": "n", "messages": []}, {"messages": []}, {"model": 7}, ["m"]):
            refused = await gateway.client.post(CHAT, json=body)
            assert refused.status_code == 403, body
            assert refused.json()["error"]["code"] == "model_not_allowed"
            assert refused.json()["error"]["param"] == "model"
        hidden = await gateway.client.post(CHAT, content=b"\x1f\x8b", headers={"content-encoding": "gzip"})
        assert hidden.status_code == 403
        assert len(replica.exchanges) == 1
        listed = (await gateway.client.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == ["m"]
        assert (await gateway.client.get("/v1/models/n")).status_code == 404
        assert (await gateway.client.get("/v1/models/n", headers=as_bob())).status_code == 200
        assert (await gateway.client.post(CHAT, json={"model": "n"}, headers=as_bob())).status_code == 200


async def test_only_the_models_of_a_key_in_forms(guarded: Guarded, keys: Keys) -> None:
    keys.write(alice={"models": ["m"]})
    path = "/v1/audio/transcriptions"
    async with ScriptedReplica(models=("m", "n")).running() as replica, guarded(replica) as gateway:
        for model, status in (("m", 200), ("n", 403)):
            answer = await gateway.client.post(path, data={"model": model}, files={"file": ("a.wav", b"RIFF")})
            assert answer.status_code == status
        decoy = (
            b'--B\r\nContent-Disposition: form-data; name="file"; filename="name="model"\r\n\r\nm\r\n"\r\n\r\n'
            b"x\r\n--B--\r\n"
        )
        headers = {"content-type": "multipart/form-data; boundary=B"}
        assert (await gateway.client.post(path, content=decoy, headers=headers)).status_code == 403
        assert len(replica.exchanges) == 1


def told_to_wait(answer: httpx.Response) -> int:
    """Seconds."""
    assert answer.status_code == 429
    assert answer.json()["error"]["code"] == "rate_limit_exceeded"
    return int(answer.headers["retry-after"])


async def test_what_a_replica_refuses_counts_as_a_request(guarded: Guarded, keys: Keys) -> None:
    """It was sent; only what the gateway itself had no room for is given back."""

    async def refuse(exchange: Exchange) -> None:
        await exchange.answer(b"{}", status="503 Service Unavailable")

    keys.write(alice={"requests_per_minute": 2})
    async with ScriptedReplica(refuse).running() as replica, guarded(replica) as gateway:
        for _ in range(2):
            assert (await gateway.chat()).status_code == 503
        told_to_wait(await gateway.chat())


async def test_requests_per_minute(guarded: Guarded, keys: Keys) -> None:
    keys.write(alice={"requests_per_minute": 3}, bob={})
    async with ScriptedReplica().running() as replica, guarded(replica) as gateway:
        for _ in range(3):
            assert (await gateway.chat()).status_code == 200
        assert 1 <= told_to_wait(await gateway.chat()) <= 20
        assert (await gateway.client.post(CHAT, content=ODD_BODY, headers=as_bob())).status_code == 200
        assert len(replica.exchanges) == 4
        page = await gateway.metrics()
        assert 'warmlane_key_refusals_total{reason="requests_per_minute",tenant="alice-co"} 1.0' in page
        assert 'warmlane_admitted_total{tenant="alice-co"} 3.0' in page
        assert 'warmlane_admitted_total{tenant="bob-co"} 1.0' in page
        shed = [line for line in page.splitlines() if line.startswith("warmlane_shed_total{")]
        assert all(line.endswith(" 0.0") for line in shed), "the gateway had room"


async def test_what_had_no_replica_is_no_request(guarded: Guarded, keys: Keys) -> None:
    keys.write(alice={"requests_per_minute": 1})
    async with ScriptedReplica().running() as replica:
        async with guarded(replica) as gateway:
            await replica.stop()
            assert [(await gateway.chat()).status_code for _ in range(4)] == [503] * 4


async def test_tokens_per_minute_come_from_usage(guarded: Guarded, keys: Keys) -> None:
    keys.write(alice={"tokens_per_minute": 100})

    async def script(exchange: Exchange) -> None:
        await exchange.answer(b'{"usage":{"prompt_tokens":400,"completion_tokens":100}}')

    async with ScriptedReplica(script).running() as replica, guarded(replica) as gateway:
        assert (await gateway.chat()).status_code == 200
        assert 235 <= told_to_wait(await gateway.chat()) <= 242, "a debt of 400 at 100 a minute"
        page = await gateway.metrics()
        assert 'warmlane_tenant_tokens_total{kind="prompt",tenant="alice-co"} 400.0' in page
        assert 'warmlane_tenant_tokens_total{kind="completion",tenant="alice-co"} 100.0' in page
        assert len(replica.exchanges) == 1


async def test_streams_that_hide_their_usage_count_all_the_same(guarded: Guarded, keys: Keys) -> None:
    keys.write(alice={"tokens_per_minute": 100}, bob={"tokens_per_minute": 100})
    event = b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}' + b" " * 140 + b"\n\n"

    async def script(exchange: Exchange) -> None:
        await exchange.start_stream()
        for _ in range(200):
            await exchange.chunk(event)
        if exchange.number == 2:
            await exchange.wait_closed()
        await exchange.end_stream()

    async with ScriptedReplica(script).running() as replica, guarded(replica) as gateway:
        assert (await gateway.chat(stream=True)).status_code == 200
        assert told_to_wait(await gateway.chat(stream=True)) > 30
        # Leaving before the end is no way around it either.
        body = {"model": "m", "messages": [], "stream": True}
        async with gateway.client.stream("POST", CHAT, json=body, headers=as_bob()) as answer:
            seen = 0
            async for piece in answer.aiter_raw():
                seen += len(piece)
                if seen >= 200 * len(event):
                    break

        async def limited() -> bool:
            return (await gateway.client.post(CHAT, json=body, headers=as_bob())).status_code == 429

        await eventually(limited)
        assert len(replica.exchanges) == 2


@pytest.mark.parametrize(
    "usage", [b"null", b'{"prompt_tokens":1,"completion_tokens":400},"padding":"%b"' % (b"x" * 40_000)]
)
async def test_answers_that_hide_their_usage_count_by_their_size(guarded: Guarded, keys: Keys, usage: bytes) -> None:
    keys.write(alice={"tokens_per_minute": 100})

    async def script(exchange: Exchange) -> None:
        await exchange.answer(b'{"choices":[],"text":"%b","usage":%b}' % (b"x" * 40_000, usage))

    async with ScriptedReplica(script).running() as replica, guarded(replica) as gateway:
        assert (await gateway.chat()).status_code == 200
        assert told_to_wait(await gateway.chat()) > 5_000, "a debt of more than 10,000 at 100 a minute"


async def test_an_answer_that_nobody_waits_for_counts(guarded: Guarded, keys: Keys) -> None:
    keys.write(alice={"tokens_per_minute": 1_000})

    async def script(exchange: Exchange) -> None:
        await exchange.wait_closed()

    async with ScriptedReplica(script).running() as replica, guarded(replica) as gateway:
        leaving = asyncio.create_task(gateway.chat(max_tokens=5_000))
        await eventually(lambda: len(replica.exchanges) == 1)
        leaving.cancel()

        async def limited() -> bool:
            body = {"model": "nobody-has-it", "messages": []}
            return (await gateway.client.post(CHAT, json=body)).status_code == 429

        await eventually(limited)
        assert 200 <= told_to_wait(await gateway.chat()) <= 242, "a debt of 4,000 at 1,000 a minute"


async def test_a_look_at_a_stored_response_costs_no_tokens(guarded: Guarded, keys: Keys) -> None:
    keys.write(alice={"tokens_per_minute": 100})

    async def script(exchange: Exchange) -> None:
        await exchange.answer(RESPONSE.replace(b'"input_tokens":1', b'"input_tokens":9000'))

    async with ScriptedReplica(script).running() as replica, guarded(replica) as gateway:
        for _ in range(3):
            assert (await gateway.client.get("/v1/responses/resp_1")).status_code == 200


async def test_what_no_replica_served_costs_no_tokens(guarded: Guarded, keys: Keys) -> None:
    keys.write(alice={"tokens_per_minute": 100})

    async def script(exchange: Exchange) -> None:
        await exchange.answer(b'{"error":{}}', status="400 Bad Request")

    async with ScriptedReplica(script).running() as replica, guarded(replica) as gateway:
        for _ in range(5):
            assert (await gateway.chat("x" * 300)).status_code == 400
            assert (await gateway.chat("x" * 300, model="unknown")).status_code in (400, 404)


async def test_concurrent_requests(guarded: Guarded, keys: Keys) -> None:
    keys.write(alice={"concurrent_requests": 2})
    release = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await release.wait()
        await exchange.answer(ANSWER)

    async with ScriptedReplica(script).running() as replica, guarded(replica) as gateway:
        running = [asyncio.create_task(gateway.chat()) for _ in range(2)]
        await eventually(lambda: len(replica.exchanges) == 2)
        assert told_to_wait(await gateway.chat()) == 1
        _, writer = await gateway.connect()
        running[0].cancel()  # a client that leaves gives its place back

        async def let_in() -> bool:
            writer.write(post(ODD_BODY, close=False, headers=b"x-api-key: " + KEY.encode() + b"\r\n"))
            await asyncio.sleep(0.02)
            return len(replica.exchanges) == 3

        await eventually(let_in)
        release.set()
        writer.close()
        assert (await running[1]).status_code == 200


async def test_the_log_says_whose_request_it_was(guarded: Guarded, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    async with ScriptedReplica().running() as replica, guarded(replica, server={"log": "json"}) as gateway:
        await gateway.chat()
        await gateway.chat(model="nobody-has-it")
    out, err = capfdbinary.readouterr()
    records = [msgspec.json.decode(line) for line in out.splitlines()]
    assert [(one["key"], one["tenant"], one["status"]) for one in records] == [
        ("alice", "alice-co", 200),
        ("alice", "alice-co", 404),
    ]
    assert KEY.encode() not in out + err


# -- limits before the body

KEY_LINE = b"authorization: Bearer " + KEY.encode() + b"\r\n"
UPLOAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\n" + KEY_LINE
FRAMINGS = [
    b"content-length: 5000000\r\n",
    b"transfer-encoding: chunked\r\n",
    b"expect: 100-continue\r\ncontent-length: 2\r\n",
]


@pytest.mark.parametrize("limit", ["requests_per_minute", "tokens_per_minute", "concurrent_requests"])
async def test_who_is_over_a_limit_is_told_before_the_body_comes(
    guarded: Guarded, keys: Keys, limit: str, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    keys.write(alice={limit: 1})

    async def script(exchange: Exchange) -> None:
        if limit == "concurrent_requests":
            await exchange.wait_closed(60)
        await exchange.answer(ANSWER)

    async with ScriptedReplica(script).running() as replica:
        async with guarded(replica, server={"log": "json"}) as gateway:
            first = asyncio.create_task(gateway.chat())
            await eventually(lambda: len(replica.exchanges) == 1)
            if limit != "concurrent_requests":
                await first
            for framing in FRAMINGS:
                answer = await raw_request(gateway, UPLOAD + framing + b"\r\n")
                head, _, told = answer.partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 429 "), "and no 100 Continue before it"
                assert b"\r\nretry-after: " in head.lower()
                assert json.loads(told)["error"]["code"] == "rate_limit_exceeded"
            page = await gateway.metrics()
            assert f'warmlane_key_refusals_total{{reason="{limit}",tenant="alice-co"}} 3.0' in page
            first.cancel()
            assert len(replica.exchanges) == 1
    records = [json.loads(line) for line in capfdbinary.readouterr().out.splitlines()]
    refused = [one for one in records if one["status"] == 429]
    assert [(one["key"], one["outcome"], one["request_bytes"]) for one in refused] == [("alice", "refused", 0)] * 3


async def test_a_small_body_is_read_and_its_connection_stays(guarded: Guarded, keys: Keys) -> None:
    """To close it would cost more than to read on, above all with TLS."""
    keys.write(alice={"requests_per_minute": 1})
    async with ScriptedReplica().running() as replica, guarded(replica) as gateway:
        reader, writer = await gateway.connect()
        for expected in (b"200", b"429", b"429"):
            writer.write(post(ODD_BODY, close=False, headers=KEY_LINE))
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
            assert head.startswith(b"HTTP/1.1 " + expected)
            assert b"connection: close" not in head.lower()
            await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]))
        writer.close()
        assert len(replica.exchanges) == 1


async def test_a_request_takes_its_place_when_its_head_has_come(guarded: Guarded, keys: Keys) -> None:
    """So one key cannot have any number of uploads under way. Who leaves gives the place back."""
    keys.write(alice={"concurrent_requests": 1}, bob={})
    async with ScriptedReplica().running() as replica, guarded(replica) as gateway:
        for end in ("left", "broken", "too large"):
            reader, writer = await gateway.connect()
            writer.write(UPLOAD + b"transfer-encoding: chunked\r\n\r\n4\r\n{   \r\n")

            async def full() -> bool:
                return (await gateway.chat()).status_code == 429

            await eventually(full)
            assert (await gateway.client.post(CHAT, content=ODD_BODY, headers=as_bob())).status_code == 200
            if end == "left":
                writer.transport.abort()
            elif end == "broken":
                writer.write(b"zz\r\n")
                assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)).startswith(b"HTTP/1.1 400 ")
            else:
                writer.write(65 * (b"100000\r\n" + b" " * 2**20 + b"\r\n"))
                assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)).startswith(b"HTTP/1.1 413 ")

            async def free() -> bool:
                return (await gateway.chat()).status_code == 200

            await eventually(free)
            writer.transport.abort()


async def test_pipelined_requests_take_their_places_one_after_the_other(guarded: Guarded, keys: Keys) -> None:
    keys.write(alice={"concurrent_requests": 1})
    request = post(ODD_BODY, close=False, headers=KEY_LINE)
    async with ScriptedReplica().running() as replica, guarded(replica) as gateway:
        answer = await raw_request(gateway, 3 * request + post(ODD_BODY, headers=KEY_LINE))
        assert answer.count(b"HTTP/1.1 200 ") == 4
        assert len(replica.exchanges) == 4


async def test_what_the_gateway_refuses_is_no_request(guarded: Guarded, keys: Keys) -> None:
    keys.write(alice={"requests_per_minute": 1, "models": ["m"]})
    async with ScriptedReplica().running() as replica, guarded(replica) as gateway:
        for _ in range(3):
            assert (await gateway.client.post(CHAT, content=b"no JSON")).status_code == 400
            assert (await gateway.chat(model="another")).status_code == 403
            assert (await raw_request(gateway, UPLOAD + b"content-length: 99999999\r\n\r\n")).startswith(
                b"HTTP/1.1 413"
            )
        assert (await gateway.chat()).status_code == 200
        told_to_wait(await gateway.chat())


async def test_an_upload_that_is_given_up_is_a_request(guarded: Guarded, keys: Keys) -> None:
    """Or a key could begin any number of them."""
    keys.write(alice={"requests_per_minute": 1})
    async with ScriptedReplica().running() as replica, guarded(replica) as gateway:
        _, writer = await gateway.connect()
        writer.write(UPLOAD + b"content-length: 5000000\r\n\r\n{")

        async def refused() -> bool:
            return (await gateway.chat()).status_code == 429

        await eventually(refused)
        writer.transport.abort()
        await asyncio.sleep(0.05)
        assert await refused()
        assert replica.exchanges == []


# -- tenants


async def test_tenants_share_no_prefix_when_isolated(guarded: Guarded) -> None:
    async with ScriptedReplica().running() as replica, guarded(replica, auth={"isolate_tenants": True}) as gateway:
        body = {"model": "m", "messages": [{"role": "user", "content": "x" * 9_000}]}
        expected = []
        for headers in ({}, {}, as_bob(), as_bob()):
            answer = await gateway.client.post(CHAT, json=body, headers=headers)
            expected.append(int(answer.headers["x-warmlane-cached-tokens"]) > 0)
        assert expected == [False, True, False, True]
        salts = [json.loads(exchange.body).pop("cache_salt") for exchange in replica.exchanges]
        assert salts[0] == salts[1] != salts[2] == salts[3]
        for exchange in replica.exchanges:
            assert exchange.header("content-length") == str(len(exchange.body))
            assert {**body, "cache_salt": None} == {**json.loads(exchange.body), "cache_salt": None}


async def test_isolation_takes_no_compressed_bodies(guarded: Guarded) -> None:
    async with ScriptedReplica().running() as replica, guarded(replica, auth={"isolate_tenants": True}) as gateway:
        answer = await gateway.client.post(CHAT, content=b"\x1f\x8b", headers={"content-encoding": "gzip"})
        assert answer.status_code == 415
        assert answer.json()["error"]["code"] == "encoded_body"
        many = await gateway.client.post(CHAT, content=b'{%b"model":"m"}' % (b'"":0,' * 300_000))
        assert (many.status_code, many.json()["error"]["code"]) == (400, "too_many_names")
        assert replica.exchanges == []


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
async def test_isolation_lets_nothing_out_without_a_salt(guarded: Guarded, path: str) -> None:
    """Python's JSON takes the bytes of a surrogate in a name; who salts does not."""
    async with ScriptedReplica().running() as replica, guarded(replica, auth={"isolate_tenants": True}) as gateway:
        body = b'{"\xed\xa0\x80":1,"model":"m","cache_salt":"mine","messages":[]}'
        answer = await gateway.client.post(path, content=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")
        assert replica.exchanges == []
        nested = b'{"z":{"\xed\xa0\x80":1},"model":"m","messages":[]}'
        await gateway.client.post(path, content=nested)
        assert all(b'"cache_salt":"' in exchange.body for exchange in replica.exchanges)


async def test_stored_responses_belong_to_their_tenant(guarded: Guarded) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.answer(RESPONSE)

    async with ScriptedReplica(script).running() as replica, guarded(replica) as gateway:
        made = await gateway.client.post("/v1/responses", json={"model": "m", "input": "hi"})
        assert made.status_code == 200
        follow = {"model": "m", "input": "and?", "previous_response_id": "resp_1"}
        for method, path, body in (
            ("GET", "/v1/responses/resp_1", None),
            ("POST", "/v1/responses/resp_1/cancel", {}),
            ("POST", "/v1/responses", follow),
        ):
            seen = len(replica.exchanges)
            assert (await gateway.client.request(method, path, json=body, headers=as_bob())).status_code == 404
            assert len(replica.exchanges) == seen
            assert (await gateway.client.request(method, path, json=body)).status_code == 200


async def test_a_stream_that_its_client_leaves_is_its_tenants(guarded: Guarded) -> None:
    async def script(exchange: Exchange) -> None:
        if exchange.request_line.startswith(b"GET"):
            await exchange.answer(RESPONSE)
            return
        await exchange.start_stream()
        await exchange.chunk(b'event: response.created\ndata: {"response":{"id":"resp_1","object":"response"}}\n\n')
        await exchange.wait_closed(60)

    async with ScriptedReplica(script).running() as replica, guarded(replica) as gateway:
        body = {"model": "m", "input": "hi", "stream": True}
        async with gateway.client.stream("POST", "/v1/responses", json=body) as answer:
            await anext(answer.aiter_raw())

        async def kept_from_others() -> bool:
            return (await gateway.client.get("/v1/responses/resp_1", headers=as_bob())).status_code == 404

        await eventually(kept_from_others)
        assert (await gateway.client.get("/v1/responses/resp_1")).status_code == 200


async def test_a_body_that_hides_whose_response_it_names_is_refused(guarded: Guarded) -> None:
    async with ScriptedReplica().running() as replica, guarded(replica) as gateway:
        packed = gzip.compress(b'{"model":"m","input":"and?","previous_response_id":"resp_1"}')
        answer = await gateway.client.post("/v1/responses", content=packed, headers={"content-encoding": "gzip"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (415, "encoded_body")
        assert not replica.exchanges


async def test_answers_that_tell_whose_they_are_are_asked_for_uncompressed(guarded: Guarded) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.answer(RESPONSE)

    async with ScriptedReplica(script).running() as replica, guarded(replica) as gateway:
        headers = {"accept-encoding": "gzip, br"}
        await gateway.client.post("/v1/responses", json={"model": "m", "input": "hi"}, headers=headers)
        await gateway.client.get("/v1/responses/resp_1", headers=headers)
        assert [exchange.header("accept-encoding") for exchange in replica.exchanges] == ["identity", "gzip, br"]


@pytest.mark.parametrize("name", ["request_id", "request\\u005fid"])
async def test_nobody_takes_the_id_of_anothers_response(guarded: Guarded, name: str) -> None:
    """vLLM calls a response what the body's `request_id` says."""

    async def script(exchange: Exchange) -> None:
        await exchange.answer(RESPONSE, status="200 OK" if exchange.number == 2 else "500 Internal Server Error")

    body = b'{"model":"m","input":"x","store":false,"%b":"resp_1"}' % name.encode()
    async with ScriptedReplica(script).running() as replica, guarded(replica) as gateway:
        path, stored = "/v1/responses", "/v1/responses/resp_1"
        failed = await gateway.client.post(path, content=body, headers=as_bob())
        assert failed.status_code == 500
        assert (await gateway.client.post(path, content=body)).status_code == 200, "a failed one belongs to nobody"
        assert (await gateway.client.post(path, content=body, headers=as_bob())).status_code == 404
        assert (await gateway.client.get(stored, headers=as_bob())).status_code == 404
        assert len(replica.exchanges) == 2
        await gateway.client.get(stored)
        assert len(replica.exchanges) == 3


@pytest.mark.parametrize("id", ["resp_plain", "of-my-own", "x" * 256])
async def test_an_id_of_ones_own_is_ones_own(guarded: Guarded, id: str) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.answer(b'{"metadata":{"id":"resp_no"},"id":"%b","output":[]}' % id.encode())

    async with ScriptedReplica(script).running() as replica, guarded(replica) as gateway:
        body = {"model": "m", "input": "x"}
        made = await gateway.client.post("/v1/responses", json={**body, "request_id": id})
        assert made.status_code == 200
        for named in ({"request_id": id}, {"previous_response_id": id}):
            answer = await gateway.client.post("/v1/responses", json=body | named, headers=as_bob())
            assert answer.status_code == 404
        assert (await gateway.client.get(f"/v1/responses/{id}", headers=as_bob())).status_code == 404
        assert len(replica.exchanges) == 1
        assert (await gateway.client.get(f"/v1/responses/{id}")).status_code == 200


@pytest.mark.parametrize("id", ["resp_\u00e9", 'resp_a"b', "resp_" + "L" * 300, "resp a", "resp/a", "", ".."])
async def test_no_response_has_an_id_that_would_be_nobodys(guarded: Guarded, id: str) -> None:
    async with ScriptedReplica().running() as replica, guarded(replica) as gateway:
        body = {"model": "m", "input": "x"}
        assert (await gateway.client.post("/v1/responses", json={**body, "request_id": id})).status_code == 400
        follow = {**body, "previous_response_id": id}
        assert (await gateway.client.post("/v1/responses", json=follow, headers=as_bob())).status_code == 404
        assert not replica.exchanges


async def test_the_dry_run_answers_for_the_key_that_asks(guarded: Guarded) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x" * 9_000}]}

    def cached(answer: httpx.Response) -> int:
        return int(answer.json()["ranking"][0]["cached_tokens"])

    async with ScriptedReplica().running() as replica, guarded(replica, auth={"isolate_tenants": True}) as gateway:
        await gateway.client.post(CHAT, json=body)
        assert cached(await gateway.client.post("/warmlane/route", json=body)) > 0
        assert cached(await gateway.client.post("/warmlane/route", json=body, headers=as_bob())) == 0
        assert len(replica.exchanges) == 1
