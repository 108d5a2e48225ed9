"""Keys, their limits and their tenants, without sockets: time is moved by hand."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import random
import re
from pathlib import Path

import httpx
import msgspec
import pytest

from gateway.access import Access, configured_access, replica_key, without_credentials
from gateway.config import Auth, ConfigError, Upstream
from gateway.forms import only_model
from gateway.isolation import MAX_NAMES, Isolation, TooManyNames
from gateway.keys import (
    Key,
    NoKey,
    WrongKey,
    checked_keys,
    digest_of,
    keys_in_variable,
    new_entry,
    new_secret,
    presented,
    read_keys,
)
from gateway.limits import Bucket, Caller, OverLimit, Stay, guessed_tokens, used_tokens
from gateway.prompt import NotJson, Shape, parse

CANARY = "wl-canary-0123456789"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def entry(secret: str = CANARY, **fields: object) -> str:
    """One `[[keys]]` of a keys file."""
    table = {"name": "alice", "sha256": hashlib.sha256(secret.encode()).hexdigest(), **fields}
    return "[[keys]]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in table.items())


def key(**fields: object) -> Key:
    return Key(**{"name": "alice", "sha256": digest_of(CANARY.encode()), "tenant": "acme", **fields})  # type: ignore[arg-type]


def bearer(secret: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", b"Bearer " + secret.encode())]


# -- the file and the variable


def test_a_keys_file_is_read_whole() -> None:
    text = entry(
        tenant="acme",
        models=["m", "n"],
        requests_per_minute=60,
        tokens_per_minute=90_000,
        concurrent_requests=4,
        priority=-2,
    )
    assert read_keys(text.encode(), "f") == [
        Key("alice", digest_of(CANARY.encode()), "acme", frozenset({"m", "n"}), 60, 90_000, 4, -2)
    ]


def test_a_key_without_more_may_do_anything_for_a_tenant_of_its_own() -> None:
    (found,) = read_keys(entry().encode(), "f")
    assert found == Key("alice", digest_of(CANARY.encode()), "alice")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("keys = 3", "f: keys: expected a list, not a whole number"),
        ("[[keys]]\nname = 'a'", "f: keys[0].sha256: missing, and needed"),
        (entry(name="two words"), "f: keys[0].name: expected 1 to 64 letters, digits and _ . : @ / -, no spaces"),
        (entry(name="a\n"), "f: keys[0].name: expected 1 to 64 letters"),
        (entry(sha256="abc"), "f: keys[0].sha256: expected 64 hex digits, as `warmlane key new` prints"),
        (entry(tenant="a b"), "f: keys[0].tenant: expected 1 to 64 letters"),
        ("[keys]\nname = 'a'", "f: keys: write [[keys]], with two brackets"),
        (entry(modles=[]), "f: unknown key keys[0].modles; did you mean models?"),
        (
            entry() + entry(name="b", requests_per_minute=0),
            "f: keys[1].requests_per_minute: expected a whole number of at least 1",
        ),
        (entry(rpm=3), "f: unknown key keys[0].rpm"),
        (entry(models="m"), "f: keys[0].models: expected a list, not text in quotes"),
        ("[[keys]", "f: not TOML: "),
        ("a=" + "[" * 5_000, "f: not TOML: "),
        ("a=" + "9" * 5_000, "f: not TOML: "),
    ],
)
def test_what_cannot_be_understood_is_refused_with_its_place(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match="^" + re.escape(message)) as caught:
        read_keys(text.encode(), "f")
    assert "\n" not in str(caught.value)


def test_a_file_of_other_bytes_is_refused() -> None:
    with pytest.raises(ConfigError, match="not TOML"):
        read_keys(b"\xff\xfe", "f")


def test_the_variable_gives_keys_by_name() -> None:
    assert keys_in_variable("a=k1, b = k2=") == [
        Key("a", digest_of(b"k1"), "a"),
        Key("b", digest_of(b"k2="), "b"),
    ]


def test_a_key_in_the_variable_that_can_be_guessed_is_complained_about(caplog: pytest.LogCaptureFixture) -> None:
    keys_in_variable(f"alice=short-secret,bob={'x' * 15},carol={'x' * 16}")
    assert [record.getMessage() for record in caplog.records] == [
        f"WARMLANE_API_KEYS: the key of {name} has fewer than 16 characters and can be guessed"
        for name in ("alice", "bob")
    ]


@pytest.mark.parametrize("value", [CANARY, f"={CANARY}", f"a=,{CANARY}", f"a b={CANARY}", f"a={CANARY},", ","])
def test_a_wrong_variable_is_refused_without_repeating_it(value: str) -> None:
    with pytest.raises(ConfigError, match=r"^WARMLANE_API_KEYS: entry \d is not name=key$"):
        keys_in_variable(value)


def test_names_and_keys_must_differ() -> None:
    with pytest.raises(ConfigError, match="the name alice is there twice"):
        checked_keys([key(), key(sha256=b"x")])
    with pytest.raises(ConfigError, match="bob and alice are the same key"):
        checked_keys([key(), key(name="bob")])


def test_a_new_key_fits_its_entry() -> None:
    secret = new_secret()
    assert re.fullmatch(r"wl-[A-Za-z0-9_-]{43}", secret)
    assert secret != new_secret()
    (found,) = read_keys(new_entry("ci/bot", secret, "acme").encode(), "f")
    assert (found.name, found.tenant, found.sha256) == ("ci/bot", "acme", digest_of(secret.encode()))
    assert secret not in new_entry("ci", secret, None)
    with pytest.raises(ConfigError, match=r"^key: name: "):
        new_entry('a"\n', secret, None)


# -- what a request shows


@pytest.mark.parametrize(
    ("headers", "shown"),
    [
        ([], []),
        ([(b"authorization", b"Bearer k")], [b"k"]),
        ([(b"authorization", b"bearer   k ")], [b"k"]),
        ([(b"authorization", b"BEARER k")], [b"k"]),
        ([(b"x-api-key", b" k ")], [b"k"]),
        ([(b"x-api-key", b"unused"), (b"authorization", b"Bearer k")], [b"unused", b"k"]),
        ([(b"authorization", b"Basic k")], []),
        ([(b"authorization", b"k")], []),
        ([(b"authorization", b"Bearer")], []),
        ([(b"authorization", b"Bearer ")], []),
        ([(b"authorization", b"")], []),
        ([(b"x-api-key", b"")], []),
        ([(b"api-key", b"k"), (b"cookie", b"x-api-key=k"), (b"proxy-authorization", b"Bearer k")], []),
        ([(b"x-api-key", b"%d" % number) for number in range(9)], [b"0", b"1", b"2", b"3"]),
    ],
)
def test_keys_are_found_in_two_headers(headers: list[tuple[bytes, bytes]], shown: list[bytes]) -> None:
    assert presented(headers) == shown


def test_a_key_is_known_by_all_of_it() -> None:
    access = Access([key()], Clock())
    assert access.caller(bearer(CANARY)).key.name == "alice"
    assert access.caller([(b"x-api-key", b"unused"), *bearer(CANARY)]).key.name == "alice"
    for wrong in (CANARY[:-1], CANARY + "x", CANARY.upper(), digest_of(CANARY.encode()).hex(), "x" * 60_000):
        with pytest.raises(WrongKey) as caught:
            access.caller(bearer(wrong))
        assert wrong not in str(caught.value)
    with pytest.raises(NoKey):
        access.caller([(b"host", b"g")])


def test_credentials_are_taken_out_of_the_headers() -> None:
    headers = [(b"accept", b"*/*"), *bearer("a"), (b"x-api-key", b"b"), (b"authorization", b"Basic c")]
    assert without_credentials(headers) == [(b"accept", b"*/*")]


# -- the file changes


def test_a_changed_file_counts_and_a_broken_one_does_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    file = tmp_path / "keys.toml"
    file.write_text(entry())
    access = Access([], Clock(), file=file)
    access.reload(entry("second").encode())
    assert access.caller(bearer("second")).key.name == "alice"
    with pytest.raises(WrongKey):
        access.caller(bearer(CANARY))
    for _ in range(3):
        access.reload(b"[[keys]")
    access.reload("No such file or directory")
    assert access.caller(bearer("second")).key.name == "alice"
    access.reload(b"")
    with pytest.raises(WrongKey):
        access.caller(bearer("second"))
    lines = [record.getMessage() for record in caplog.records]
    assert [line.endswith("the keys from before stay") for line in lines] == [False, True, True, False]
    assert lines[0] == f"{file} has changed: 1 keys now"
    assert lines[3] == f"{file} has changed and holds no keys now: every request will be refused"
    assert caplog.records[3].levelno == logging.WARNING


async def test_the_file_is_watched(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(entry())
    access = Access([], Clock(), file=file)
    watching = asyncio.create_task(access.watch())
    try:
        file.write_text(entry("second"))
        async with asyncio.timeout(10):
            while True:
                try:
                    access.caller(bearer("second"))
                    break
                except WrongKey:
                    await asyncio.sleep(0.02)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


def test_what_a_key_has_running_survives_a_change_of_the_file() -> None:
    clock = Clock()
    access = Access([], clock)
    access.reload(entry(concurrent_requests=1, requests_per_minute=2).encode())
    stay = access.caller(bearer(CANARY)).enter(clock.now)
    access.reload(entry("second", concurrent_requests=1, requests_per_minute=2, priority=5).encode())
    caller = access.caller(bearer("second"))
    with pytest.raises(OverLimit, match="concurrent requests, limit 1"):
        caller.enter(clock.now)
    stay.leave(0, clock.now)
    caller.enter(clock.now).leave(0, clock.now)
    with pytest.raises(OverLimit, match="requests per minute, limit 2"):
        caller.enter(clock.now)


# -- limits


def test_a_bucket_gives_a_minute_at_once_and_then_fills_evenly() -> None:
    bucket = Bucket(60, 0.0)
    for _ in range(60):
        assert bucket.wait_seconds(1, 0.0) == 0
        bucket.take(1, 0.0)
    assert bucket.wait_seconds(1, 0.0) == pytest.approx(1.0)
    assert bucket.wait_seconds(1, 0.5) == pytest.approx(0.5)
    assert bucket.wait_seconds(1, 1.001) == 0
    bucket.take(-1_000, 2.0)
    assert bucket.wait_seconds(60, 2.0) == 0
    assert bucket.wait_seconds(61, 2.0) == 0, "more than it ever holds needs a full one"
    bucket.take(120, 2.0)
    assert bucket.wait_seconds(1, 2.0) == pytest.approx(61.0), "and leaves a debt"


def test_no_window_of_time_gets_more_than_its_share() -> None:
    rng = random.Random(7)
    bucket, now, taken = Bucket(30, 0.0), 0.0, []
    for _ in range(5_000):
        now += rng.expovariate(2.0)
        if bucket.wait_seconds(1, now) == 0:
            bucket.take(1, now)
            taken.append(now)
    for first in range(0, len(taken) - 60, 7):
        seconds = taken[first + 59] - taken[first]
        assert 30 + seconds / 2 + 1e-6 >= 60
    assert len(taken) >= now / 2, "and nothing that was due was refused"


def entered(caller: Caller, prompt_tokens: int, now: float) -> Stay:
    """One request that was read at once."""
    stay = caller.enter(now)
    try:
        stay.reserve(prompt_tokens, now)
    except OverLimit:
        stay.leave(0, now, refused=True)
        raise
    return stay


def test_concurrent_requests_are_counted_from_entering_to_leaving() -> None:
    caller = Caller(key(concurrent_requests=2), 0.0)
    first, second = caller.enter(0.0), caller.enter(0.0)
    with pytest.raises(OverLimit) as caught:
        caller.enter(0.0)
    assert (caught.value.reason, caught.value.retry_after) == ("concurrent_requests", 1.0)
    first.leave(0, 1.0)
    first.leave(0, 1.0)
    caller.enter(1.0)
    with pytest.raises(OverLimit):
        caller.enter(1.0)
    second.leave(0, 1.0)
    assert caller.running == 1


def test_tokens_are_taken_as_estimated_and_settled_as_used() -> None:
    caller = Caller(key(tokens_per_minute=600), 0.0)
    stay = entered(caller, 500, 0.0)
    with pytest.raises(OverLimit) as caught:
        entered(caller, 200, 0.0)
    assert caught.value.reason == "tokens_per_minute"
    assert caught.value.retry_after == pytest.approx(10.0)
    stay.leave(100, 0.0)
    entered(caller, 500, 0.0).leave(1_000, 0.0)
    with pytest.raises(OverLimit) as caught:
        caller.enter(0.0)
    assert caught.value.retry_after == pytest.approx(50.1), "a debt of 500 and one token"
    caller.enter(50.2)


def test_what_is_refused_takes_nothing() -> None:
    caller = Caller(key(requests_per_minute=2, tokens_per_minute=10), 0.0)
    entered(caller, 10, 0.0)
    for _ in range(5):
        with pytest.raises(OverLimit, match="tokens"):
            entered(caller, 10, 0.0)
    entered(caller, 10, 60.0)
    assert caller.running == 2


@pytest.mark.parametrize(
    ("served", "prompt", "completion", "used"),
    [(False, 10, 10, 0), (True, 10, 5, 15), (True, None, None, 107), (True, 10, None, 110), (True, None, 5, 12)],
)
def test_used_tokens(served: bool, prompt: int | None, completion: int | None, used: int) -> None:
    assert used_tokens(7, served=served, prompt=prompt, completion=completion, guessed=100) == used


@pytest.mark.parametrize(
    ("most", "streamed", "answer_bytes", "tokens"),
    [
        (None, True, 2_000, 10),
        (5_000, True, 0, 0),
        (None, False, 2_000, 500),
        (100, False, 2_000, 100),
        (5_000, False, 0, 5_000),
        (None, False, 0, 300),
    ],
)
def test_guessed_tokens(most: int | None, streamed: bool, answer_bytes: int, tokens: int) -> None:
    assert guessed_tokens(most, streamed=streamed, answer_bytes=answer_bytes, seconds=3.0) == tokens


def test_a_request_that_was_refused_later_is_given_back() -> None:
    caller = Caller(key(requests_per_minute=1), 0.0)
    for _ in range(3):
        caller.enter(0.0).leave(0, 0.0, refused=True)
    caller.enter(0.0).leave(0, 0.0)
    with pytest.raises(OverLimit, match="requests"):
        caller.enter(0.0)


# -- tenants of their own


def test_a_salt_goes_in_and_nothing_else_changes() -> None:
    body = b'{ "model":"m" , "x":1.0, "big":12345678901234567890123,"messages":[ {"content":"caf\\u00e9 \xc3\xa9"} ]}\n'
    salted = Isolation(b"s").salted(body, "acme")
    assert msgspec.json.decode(salted, type=dict[str, msgspec.Raw]) == {
        **msgspec.json.decode(body, type=dict[str, msgspec.Raw]),
        "cache_salt": msgspec.Raw(b'"%b"' % Isolation(b"s").salt("acme", b"").encode()),
    }


def test_salts_differ_by_tenant_secret_and_the_clients_own() -> None:
    def salt(body: bytes, tenant: str, secret: bytes = b"s") -> str:
        return str(json.loads(Isolation(secret).salted(body, tenant))["cache_salt"])

    plain, own = b'{"a":1}', b'{"cache_salt":"x","a":1}'
    salts = [salt(plain, "a"), salt(plain, "b"), salt(plain, "a", b"t"), salt(own, "a"), salt(own, "b")]
    assert len(set(salts)) == 5
    assert all(re.fullmatch("[0-9a-f]{64}", one) for one in salts)
    assert salt(plain, "a") == salt(b'{"cache_salt":null}', "a")
    forged = b'{"cache_salt":"%b"}' % salts[1].encode()
    assert salt(forged, "a") != salts[1]


@pytest.mark.parametrize(
    "body",
    [
        b'{"cache_salt":"mine","cache_salt":"theirs"}',
        b'{"\\u0063ache_salt":"theirs"}',
        b'{"cache_salt":"a","\\u0063ache_salt":"theirs"}',
    ],
)
def test_no_spelling_keeps_a_salt_of_the_clients(body: bytes) -> None:
    salted = Isolation(b"s").salted(body, "acme")
    pairs = json.loads(salted, object_pairs_hook=lambda pairs: pairs)
    assert [name for name, _ in pairs] == ["cache_salt"]
    assert b"theirs" not in salted


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"{" * 100_000, b'{"\xed\xa0\x80":1,"model":"m"}', b'{"\xff":1}'])
def test_what_cannot_be_salted_is_refused(body: bytes) -> None:
    with pytest.raises(NotJson):
        Isolation(b"s").salted(body, "acme")


@pytest.mark.parametrize(
    "body",
    [
        b'{%b"model":"m"}' % b"".join(b'"%x":0,' % number for number in range(MAX_NAMES)),
        b'{"a":{%b"model":"m"}}' % (b'"":0,' * MAX_NAMES),
        b'{"a":[%b""],"text":"%b"}' % (b'"",' * 2 * MAX_NAMES, b":" * MAX_NAMES),
    ],
)
def test_a_body_of_very_many_names_is_refused_before_they_are_read(
    monkeypatch: pytest.MonkeyPatch, body: bytes
) -> None:
    """Each would become a text and an entry: 281 MiB for 1.2 million of them."""

    def refuse_to_decode(source: bytes) -> None:
        raise AssertionError("one object for each name")

    monkeypatch.setattr("gateway.isolation.decode_object", refuse_to_decode)
    with pytest.raises(TooManyNames):
        Isolation(b"s").salted(body, "acme")


def test_many_colons_in_texts_and_many_messages_are_salted() -> None:
    messages = [{"role": "user", "content": '10:30:00 {"a": 1}' * 10}] * 60_000
    salted = json.loads(Isolation(b"s").salted(json.dumps({"model": "m", "messages": messages}).encode(), "acme"))
    assert salted["messages"] == messages
    assert len(salted["cache_salt"]) == 64


@pytest.mark.parametrize("body", [b"[]", b'"x"', b"null", b" [1]"])
def test_what_is_no_object_is_left_to_be_refused(body: bytes) -> None:
    assert Isolation(b"s").salted(body, "acme") == body


def test_the_routing_key_takes_the_salt_from_the_body() -> None:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 3_000}]}).encode()

    def blocks(tenant: str) -> list[int]:
        return list(parse(Isolation(b"s").salted(body, tenant), Shape.CHAT, block_bytes=1_024).blocks)

    assert len(blocks("a")) == 2
    assert blocks("a") == blocks("a")
    assert not set(blocks("a")) & set(blocks("b"))


# -- the model that is checked is the one that the replica reads


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"cheap","model":"dear","messages":[]}',
        b'{"model":"cheap","\\u006dodel":"dear","messages":[]}',
        b'{"\\u006dodel":"cheap","model":"dear","messages":[]}',
        b'{"model":"cheap","messages":[],"mod\\u0065l":"de\\u0061r"}',
        b'{"model":"cheap","messages":7,"model":"dear"}',
    ],
)
def test_of_several_models_the_last_counts_as_with_the_replica(body: bytes) -> None:
    assert json.loads(body)["model"] == "dear"
    assert parse(body, Shape.CHAT, block_bytes=1_024).model == "dear"


def form(**fields: str) -> httpx.Request:
    return httpx.Request("POST", "http://g/", data=fields, files={"file": ("a.wav", b"RIFF\r\n\r\n" * 40)})


def read_form(request: httpx.Request) -> str | None:
    headers = [(name.lower(), value) for name, value in request.headers.raw]
    return only_model(headers, request.read())


def test_the_model_of_a_plain_form_is_read() -> None:
    assert read_form(form(model="org/name:tag", language="en")) == "org/name:tag"
    assert read_form(form(language="en")) is None


BOUNDARY = [(b"content-type", b"multipart/form-data; boundary=B")]
CHEAP = b'--B\r\nContent-Disposition: form-data; name="model"\r\n\r\ncheap\r\n'


def test_the_form_of_these_tests_is_good() -> None:
    assert only_model(BOUNDARY, CHEAP + b"--B--\r\n") == "cheap"


@pytest.mark.parametrize(
    "body",
    [
        CHEAP + CHEAP.replace(b"cheap", b"dear") + b"--B--\r\n",
        CHEAP + CHEAP.replace(b'"model"', b"model").replace(b"cheap", b"dear") + b"--B--\r\n",
        CHEAP + CHEAP.replace(b'"model"', b'"mod\\el"').replace(b"cheap", b"dear") + b"--B--\r\n",
        CHEAP + CHEAP.replace(b'name="model"', b"name*=utf-8''model").replace(b"cheap", b"dear") + b"--B--\r\n",
        CHEAP + CHEAP.replace(b'"model"', b'"x"; name="model"').replace(b"cheap", b"dear") + b"--B--\r\n",
        CHEAP + CHEAP.replace(b"\r\n\r\n", b"\r\n folded\r\n\r\n") + b"--B--\r\n",
        CHEAP.replace(b"--B\r\n", b"--B \r\n") + b"--B--\r\n",
        CHEAP + b"--B\r\nno head at all",
        CHEAP,
        b"preamble\r\n" + CHEAP + b"--B--\r\n",
        CHEAP + b"--B--\r\n" + CHEAP.replace(b"cheap", b"dear") + b"--B--\r\n",
        CHEAP + b"--Bx\r\n" + CHEAP.replace(b"cheap", b"dear") + b"--B--\r\n",
        CHEAP.replace(b"cheap", b"\xff") + b"--B--\r\n",
        b"",
    ],
)
def test_a_form_that_could_be_read_otherwise_has_no_model(body: bytes) -> None:
    assert only_model(BOUNDARY, body) is None


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [*BOUNDARY, *BOUNDARY],
        [(b"content-type", b"multipart/form-data")],
        [(b"content-type", b'multipart/form-data; boundary="B"')],
        [(b"content-type", b"multipart/form-data; boundary=B; boundary=C")],
        [(b"content-type", b"application/json")],
    ],
)
def test_a_form_whose_boundary_could_be_read_otherwise_has_no_model(headers: list[tuple[bytes, bytes]]) -> None:
    assert only_model(headers, CHEAP + b"--B--\r\n") is None


# -- configuration


@pytest.mark.parametrize("value", ["", " ", "\n"])
def test_a_variable_without_keys_is_said_to_have_none(value: str, caplog: pytest.LogCaptureFixture) -> None:
    assert configured_access(Auth(), {"WARMLANE_API_KEYS": value}, Clock()) is None
    assert "WARMLANE_API_KEYS is set but holds no keys" in caplog.text


async def test_only_a_regular_file_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys.toml"
    os.mkfifo(file)
    with pytest.raises(ConfigError, match="Not a regular file"):
        Access([], Clock(), file=file)
    file.unlink()
    file.write_text(entry())
    access = Access([], Clock(), file=file)
    known = len(access)
    file.unlink()
    os.mkfifo(file)
    watching = asyncio.create_task(access.watch())
    async with asyncio.timeout(10):
        while True:
            await asyncio.sleep(0.01)
            if "Not a regular file; the keys from before stay" in caplog.text:
                break
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert len(access) == known > 0


def test_without_keys_nobody_is_asked() -> None:
    assert configured_access(Auth(), {}, Clock()) is None
    assert configured_access(Auth(), {"WARMLANE_API_KEYS": " "}, Clock()) is None


def test_keys_come_from_file_and_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(entry())
    access = configured_access(Auth(keys_file=str(file)), {"WARMLANE_API_KEYS": "bob=two"}, Clock())
    assert access is not None
    assert {access.caller(bearer(one)).key.name for one in (CANARY, "two")} == {"alice", "bob"}


def test_a_file_without_keys_lets_nobody_in(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys.toml"
    file.write_text("")
    access = configured_access(Auth(keys_file=str(file)), {}, Clock())
    assert access is not None
    with pytest.raises(NoKey):
        access.caller([])
    assert "holds no keys yet" in caplog.text


@pytest.mark.parametrize(
    ("auth", "message"),
    [
        (Auth(required=True), "auth.required is true, but there are no keys"),
        (Auth(isolate_tenants=True), "auth.isolate_tenants is true, but there are no keys"),
        (Auth(keys_file="/nowhere/keys.toml"), "auth.keys_file: /nowhere/keys.toml: No such file or directory"),
    ],
)
def test_a_configuration_that_cannot_hold_is_refused(auth: Auth, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configured_access(auth, {}, Clock())


def test_required_means_at_least_one(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text("")
    with pytest.raises(ConfigError, match="holds no keys"):
        configured_access(Auth(keys_file=str(file), required=True), {}, Clock())


def test_the_replicas_key(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(f"{CANARY}\n")
    assert replica_key(Upstream(), {}) is None
    assert replica_key(Upstream(api_key_env="K"), {"K": CANARY}) == CANARY
    assert replica_key(Upstream(api_key_file=str(file)), {}) == CANARY


@pytest.mark.parametrize(
    ("upstream", "value", "message"),
    [
        (Upstream(api_key_env="K", api_key_file="f"), "", "upstream.api_key_env or upstream.api_key_file, not both"),
        (Upstream(api_key_env="K"), "", r"upstream.api_key_env: \$K: is empty"),
        (
            Upstream(api_key_env="K"),
            f"{CANARY}\r\nx: y",
            r"upstream.api_key_env: \$K: holds what cannot stand in a header",
        ),
        (Upstream(api_key_env="K"), f"{CANARY} é", r"upstream.api_key_env: \$K: holds what cannot stand in a header"),
        (Upstream(api_key_file="/nowhere/key"), "", "upstream.api_key_file: /nowhere/key: No such file or directory"),
    ],
)
def test_a_wrong_key_for_replicas_is_refused_without_repeating_it(upstream: Upstream, value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        replica_key(upstream, {"K": value})
    assert CANARY not in str(caught.value)
