"""TLS in, from clients to the gateway, and out, from the gateway to its replicas; over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import ssl
from pathlib import Path

import openai
import pytest

from gateway import app
from gateway.config import Config, ConfigError, Server, Upstream
from gateway.core.model import ReplicaId
from gateway.proxy.errors import TlsFailed
from gateway.proxy.places import TOLD
from gateway.proxy.upstream import Upstream as Replica
from gateway.tls import Certificate, TlsError, replica_context
from tests.proxy.certificates import Authority, Pair, openssl
from tests.proxy.conftest import RunningGateway, eventually, running_gateway
from tests.proxy.scripted import ANSWER, Exchange, ScriptedReplica
from tests.proxy.test_client_connection import read_answer
from tests.proxy.test_front_door import ODD_BODY, post

EVENT = b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,'
EVENTS = [EVENT + b'"delta":{"content":"%d"},"finish_reason":null}]}\n\n' % number for number in range(3)]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ours"), "ours")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("stranger"), "stranger")


@pytest.fixture(scope="module")
def pair(authority: Authority) -> Pair:
    return authority.issue("gateway", "DNS:localhost", "IP:127.0.0.1")


def server(pair: Pair) -> dict[str, str]:
    return {"tls_certificate": str(pair.certificate), "tls_key": str(pair.key)}


async def stream(exchange: Exchange) -> None:
    await exchange.start_stream()
    for event in EVENTS:
        await exchange.chunk(event)
    await exchange.chunk(b"data: [DONE]\n\n")
    await exchange.end_stream()


async def speak(gateway: RunningGateway, context: ssl.SSLContext, *requests: bytes) -> bytes:
    """Requests on one new connection, each after the answer to the one before; all bodies, and what came last."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port, ssl=context)
    bodies = b""
    try:
        for request in requests[:-1]:
            writer.write(request)
            bodies += (await read_answer(reader))[1]
        writer.write(requests[-1])
        return bodies + await asyncio.wait_for(reader.read(), 10)
    finally:
        writer.transport.abort()


async def test_clients_speak_https(mode: str, authority: Authority, pair: Pair) -> None:
    async def script(exchange: Exchange) -> None:
        if b'"stream":true' in exchange.body:
            await stream(exchange)
        else:
            await exchange.answer(exchange.body if len(exchange.body) > 100_000 else ANSWER)

    context = authority.client_context()
    async with ScriptedReplica(script).running() as replica:
        async with running_gateway(replica, mode=mode, server=server(pair), verify=context) as gateway:
            assert gateway.url.startswith("https://")
            assert (await gateway.chat()).content == ANSWER
            large = ODD_BODY[:-2] + b',"x":"' + b"y" * 3_000_000 + b'"}'
            assert (await gateway.client.post("/v1/chat/completions", content=large)).content == large
            answers = await speak(
                gateway,
                context,
                post(ODD_BODY, close=False),
                b"GET /health HTTP/1.1\r\nhost: g\r\n\r\n",
                post(ODD_BODY),
            )
            assert answers.count(ANSWER) == 2
            sdk = openai.AsyncOpenAI(
                base_url=gateway.url + "/v1",
                api_key="k",
                max_retries=0,
                http_client=openai.DefaultAsyncHttpxClient(verify=context, trust_env=False),
            )
            async with sdk:
                messages = [{"role": "user", "content": "x"}]
                whole = await sdk.chat.completions.create(model="m", messages=messages)  # type: ignore[call-overload]
                assert whole.choices[0].message.content == "hello"
                pieces = await sdk.chat.completions.create(model="m", messages=messages, stream=True)  # type: ignore[call-overload]
                assert [piece.choices[0].delta.content async for piece in pieces] == ["0", "1", "2"]


async def test_a_silent_handshake_is_cut_off_in_the_time_for_a_head(mode: str, pair: Pair) -> None:
    async with ScriptedReplica().running() as replica:
        limits = {"header_timeout_seconds": 0.3, **server(pair)}
        async with running_gateway(replica, mode=mode, server=limits, verify=False, wait_ready=False) as gateway:
            silent = [await gateway.connect() for _ in range(5)]
            for reader, writer in silent:
                with contextlib.suppress(ConnectionError):
                    assert await asyncio.wait_for(reader.read(), 10) == b""
                writer.close()


async def answer_over_tls(gateway: RunningGateway, context: ssl.SSLContext) -> bytes:
    """To one request on a new connection; empty where that is cut."""
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        return await speak(gateway, context, post(ODD_BODY))
    return b""


async def test_silent_handshakes_count_as_connections_and_give_their_places_up(
    mode: str, authority: Authority, pair: Pair
) -> None:
    """They would hold descriptors without a bound; and whoever asks for something gets a place of theirs."""
    limits = {"max_connections": 5, "header_timeout_seconds": 60.0, **server(pair)}
    context = authority.client_context()
    async with ScriptedReplica().running() as replica:
        async with running_gateway(replica, mode=mode, server=limits, verify=context) as gateway:
            await gateway.client.aclose()
            silent = [await gateway.connect() for _ in range(5 + TOLD + 20)]
            answers: list[bytes] = []
            async with asyncio.timeout(20):
                while not answers or ANSWER not in answers[-1]:
                    answers.append(await answer_over_tls(gateway, context))
                    await asyncio.sleep(0.05)
            cut = sum(reader.at_eof() or reader.exception() is not None for reader, _ in silent)
            assert cut >= 20, "beyond those that could be told there is no room"
            for _, writer in silent:
                writer.close()


async def test_limits_hold_over_tls(mode: str, authority: Authority, pair: Pair) -> None:
    limits = {"header_timeout_seconds": 0.3, "max_body_mib": 1, **server(pair)}
    context = authority.client_context()
    async with ScriptedReplica().running() as replica:
        async with running_gateway(replica, mode=mode, server=limits, verify=context) as gateway:
            assert await speak(gateway, context, b"POST /v1/chat/comp") == b""
            head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ncontent-length: 1048577\r\n\r\n"
            assert b" 413 " in (await speak(gateway, context, head))[:20]
            assert b" 400 " in (await speak(gateway, context, b"BAD\0\r\n\r\n"))[:20]
            assert replica.exchanges == []


async def test_who_does_not_speak_tls_is_closed(mode: str, authority: Authority, pair: Pair) -> None:
    context = authority.client_context()
    async with ScriptedReplica().running() as replica:
        async with running_gateway(replica, mode=mode, server=server(pair), verify=context) as gateway:
            reader, writer = await gateway.connect()
            writer.write(post(ODD_BODY))
            try:
                assert b"HTTP" not in await asyncio.wait_for(reader.read(), 5)
            except ConnectionError:
                pass
            writer.close()
            assert (await gateway.chat()).status_code == 200
            assert len(replica.exchanges) == 1


async def test_a_client_that_leaves_stops_the_replica_over_tls(mode: str, authority: Authority, pair: Pair) -> None:
    """O-01."""

    async def script(exchange: Exchange) -> None:
        await exchange.wait_closed()

    context = authority.client_context()
    replicas = authority.issue("left", "IP:127.0.0.1")
    upstream = {"ca_file": str(authority.file)}
    async with ScriptedReplica(script).running(tls=replicas.server_context()) as replica:
        async with running_gateway(
            replica, mode=mode, server=server(pair), upstream=upstream, verify=context
        ) as gateway:
            _, writer = await asyncio.open_connection("127.0.0.1", gateway.port, ssl=context)
            writer.write(post(ODD_BODY, close=False))
            await eventually(lambda: replica.exchanges)
            writer.close()
            await replica.exchanges[0].wait_closed(1.0)
            await writer.wait_closed()


async def test_replicas_speak_https(mode: str, authority: Authority) -> None:
    async def script(exchange: Exchange) -> None:
        if b'"stream": true' in exchange.body or b'"stream":true' in exchange.body:
            await stream(exchange)
        else:
            await exchange.answer(exchange.body)

    replicas = authority.issue("replica", "IP:127.0.0.1")
    upstream = {"ca_file": str(authority.file)}
    async with ScriptedReplica(script).running(tls=replicas.server_context()) as replica:
        async with running_gateway(replica, mode=mode, upstream=upstream) as gateway:
            for size in (10, 100_000, 5_000_000):
                body = b'{"model":"m","messages":[],"x":"' + b"y" * size + b'"}'
                response = await gateway.client.post("/v1/chat/completions", content=body)
                assert response.content == body
            assert (await gateway.chat(stream=True)).content.startswith(b"".join(EVENTS))
            assert response.headers["x-warmlane-replica"] == replica.url
            assert replica.exchanges[-1].on_connection > 1, "connections are kept"


@pytest.mark.parametrize("name", ["replica.test", None])
async def test_the_name_in_the_certificate_counts(authority: Authority, name: str | None) -> None:
    """An address from DNS is verified against `tls_server_name`; without it the address itself has to be there."""
    replicas = authority.issue("named", "DNS:replica.test")
    upstream = {"ca_file": str(authority.file), **({} if name is None else {"tls_server_name": name})}
    async with ScriptedReplica().running(tls=replicas.server_context()) as replica:
        async with running_gateway(replica, upstream=upstream, wait_ready=name is not None) as gateway:
            if name is not None:
                assert (await gateway.chat()).status_code == 200
                return
            await refused_by_certificate(gateway, replica)


async def test_a_replica_of_another_authority_is_not_spoken_to(authority: Authority, stranger: Authority) -> None:
    replicas = stranger.issue("replica", "IP:127.0.0.1")
    upstream = {"ca_file": str(authority.file)}
    async with ScriptedReplica().running(tls=replicas.server_context()) as replica:
        async with running_gateway(replica, upstream=upstream, wait_ready=False) as gateway:
            await refused_by_certificate(gateway, replica)


async def refused_by_certificate(gateway: RunningGateway, replica: ScriptedReplica) -> None:
    """It is never up, clients get a clear error, and nothing of theirs reaches it."""

    async def ejected() -> bool:
        return 'state="ejected"} 1.0' in await gateway.metrics()

    await eventually(ejected)
    response = await gateway.chat()
    assert response.status_code in (502, 503)
    assert response.json()["error"]["code"] in ("replica_tls_failed", "no_replica")
    assert (await gateway.client.get("/ready")).status_code == 503
    assert replica.exchanges == []


async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """As a server that speaks plain HTTP does with a TLS hello."""
    await reader.read(1)
    writer.write(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n")
    await writer.drain()
    writer.close()


async def connect_error(url: str, config: Upstream) -> str:
    loop = asyncio.get_running_loop()
    with pytest.raises(TlsFailed) as raised:
        await Replica(ReplicaId(url), config, loop, replica_context(config.ca_file)).connect()
    return str(raised.value)


async def test_errors_of_connections_say_what_is_wrong(authority: Authority, stranger: Authority) -> None:
    ours = Upstream(ca_file=str(authority.file))
    foreign = stranger.issue("foreign", "IP:127.0.0.1").server_context()
    misnamed = authority.issue("misnamed", "DNS:elsewhere").server_context()
    async with ScriptedReplica().running(tls=foreign) as first, ScriptedReplica().running(tls=misnamed) as second:
        plain = await asyncio.start_server(refuse, "127.0.0.1", 0)
        async with plain:
            plain_url = f"https://127.0.0.1:{plain.sockets[0].getsockname()[1]}"
            assert "certificate was not accepted: unable to get local issuer" in await connect_error(first.url, ours)
            assert "not valid for '127.0.0.1'" in await connect_error(second.url, ours)
            assert "does not speak TLS" in await connect_error(plain_url, ours)


async def test_an_https_replica_is_verified_even_if_nobody_said_how(stranger: Authority) -> None:
    replicas = stranger.issue("unsaid", "IP:127.0.0.1")
    async with ScriptedReplica().running(tls=replicas.server_context()) as replica:
        with pytest.raises(TlsFailed):
            await Replica(ReplicaId(replica.url), Upstream(), asyncio.get_running_loop()).connect()


async def start(config: Config) -> str:
    with pytest.raises(ConfigError) as raised:
        await app.serve(config)
    return str(raised.value)


async def test_a_certificate_that_cannot_be_used_is_an_error_at_the_start(
    tmp_path: Path, authority: Authority, pair: Pair
) -> None:
    other = authority.issue("other", "DNS:other")
    locked = tmp_path / "locked.key"
    openssl("pkey", "-in", pair.key, "-aes256", "-passout", "pass:x", "-out", locked)
    text = tmp_path / "text.pem"
    text.write_text("no certificate")
    cases = [
        ({"tls_certificate": "/nowhere.pem"}, "server.tls_certificate /nowhere.pem: No such file or directory"),
        ({"tls_certificate": str(text)}, f"server.tls_certificate {text}: "),
        (
            {**server(pair), "tls_key": str(other.key)},
            f"server.tls_key {other.key}: its key does not match the certificate, {pair.certificate}",
        ),
        ({**server(pair), "tls_key": str(locked)}, "without a passphrase"),
    ]
    for table, message in cases:
        assert message in await start(Config(server=Server(port=0, **table)))
    for file in ("/nowhere.pem", str(text)):
        assert f"upstream.ca_file {file}: " in await start(
            Config(server=Server(port=0), upstream=Upstream(ca_file=file))
        )


def test_what_is_wrong_with_a_pair_is_said_without_its_content(
    tmp_path: Path, authority: Authority, pair: Pair
) -> None:
    def written(name: str, text: str) -> Path:
        (tmp_path / name).write_text(text)
        return tmp_path / name

    canary = "Q0FOQVJZ"
    words, empty = written("words", f"{canary}\n"), written("empty", "")
    bad_certificate = written("bad.pem", f"-----BEGIN CERTIFICATE-----\n{canary}\n-----END CERTIFICATE-----\n")
    bad_key = written("bad.key", f"-----BEGIN PRIVATE KEY-----\n{canary}\n-----END PRIVATE KEY-----\n")
    absent = tmp_path / "absent"
    certificate, key = pair.certificate, pair.key
    cases: list[tuple[Path, Path | None, str, str]] = [
        (certificate, None, "certificate", f"{certificate}: holds no private key; server.tls_key names its file"),
        (certificate, certificate, "key", f"{certificate}: holds no private key"),
        (certificate, words, "key", f"{words}: is not PEM"),
        (certificate, absent, "key", f"{absent}: No such file or directory"),
        (certificate, bad_key, "key", f"{bad_key}: its key cannot be decoded"),
        (absent, key, "certificate", f"{absent}: No such file or directory"),
        (tmp_path, key, "certificate", f"{tmp_path}: Is a directory"),
        (words, key, "certificate", f"{words}: is not PEM"),
        (empty, None, "certificate", f"{empty}: is not PEM"),
        (key, key, "certificate", f"{key}: holds no certificate"),
        (bad_certificate, key, "certificate", f"{bad_certificate}: its certificate cannot be decoded"),
    ]
    for one, other, called, problem in cases:
        with pytest.raises(TlsError) as raised:
            Certificate(str(one), None if other is None else str(other))
        assert str(raised.value) == f"server.tls_{called} {problem}"
        assert canary not in str(raised.value)
    with pytest.raises(TlsError, match=r"its certificates cannot be decoded$"):
        replica_context(str(bad_certificate))


async def shown(port: int, context: ssl.SSLContext) -> int:
    """Serial number of the certificate that a new connection is shown."""
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    found = writer.get_extra_info("peercert")
    writer.transport.abort()
    return int(found["serialNumber"], 16)


async def test_a_renewed_certificate_serves_new_connections(
    tmp_path: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    old, new = (authority.issue(name, "IP:127.0.0.1") for name in ("old", "new"))
    files = Pair(tmp_path / "in-use.pem", tmp_path / "in-use.key")

    def put(what: Path, where: Path) -> None:
        shutil.copy(what, tmp_path / "next")
        os.replace(tmp_path / "next", where)

    put(old.certificate, files.certificate)
    put(old.key, files.key)
    certificate = Certificate(str(files.certificate), str(files.key))
    looks: asyncio.Queue[None] = asyncio.Queue()

    async def sleep(_: float) -> None:
        await looks.get()

    async def look() -> None:
        looks.put_nowait(None)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    following = asyncio.create_task(certificate.follow(sleep=sleep))
    listening = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=certificate.context)
    port = listening.sockets[0].getsockname()[1]
    context = authority.client_context()
    first = await shown(port, context)
    put(new.certificate, files.certificate)  # half of the pair
    await look()
    assert "the old TLS certificate stays" in caplog.text
    assert await shown(port, context) == first
    put(new.key, files.key)
    await look()
    assert "TLS certificate loaded again" in caplog.text
    assert await shown(port, context) != first
    files.key.unlink()
    await look()
    assert await shown(port, context) != first
    following.cancel()
    listening.close()
    await listening.wait_closed()


def test_a_pair_that_was_never_right_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TlsError):
        Certificate(str(tmp_path / "none.pem"), None)
