"""Responses that go on behind their answer (`background`): they count for their key until their replica says that they
are over, however their clients come and go."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.core.model import ReplicaId
from gateway.feeds import background
from gateway.feeds.background import Background
from gateway.feeds.fetch import ReplicaClient
from gateway.limits import Caller, OverLimit
from tests.proxy.conftest import RunningGateway, eventually, running_gateway
from tests.proxy.scripted import Exchange, ScriptedReplica
from tests.proxy.test_access import KEY, Keys
from tests.test_keys import key

RESPONSES = "/v1/responses"


class Engine:
    """A replica that keeps responses as vLLM does: `queued` until told otherwise."""

    def __init__(self) -> None:
        self.responses: dict[str, dict[str, Any]] = {}
        self.looks = 0

    async def __call__(self, exchange: Exchange) -> None:
        method, path, _ = exchange.request_line.decode().split(" ")
        if method == "POST" and path == RESPONSES:
            await self._create(exchange)
            return
        if path == "/tokenize":
            await exchange.answer(b'{"count":1}')
            return
        id = path.split("/")[3]
        self.looks += method == "GET"
        if id not in self.responses:
            await exchange.answer(b'{"error":{"message":"not found"}}', status="404 Not Found")
            return
        if path.endswith("/cancel"):
            self.end(id, status="cancelled")
        await exchange.answer(json.dumps(self.responses[id]).encode())

    async def _create(self, exchange: Exchange) -> None:
        asked = json.loads(exchange.body)
        id = asked.get("request_id") or f"resp_{exchange.number}"
        told = {"id": id, "object": "response", "status": "queued", "output": [], "usage": None}
        self.responses[id] = {"metadata": asked.get("metadata")} | told  # the client's before the engine's
        if not asked.get("stream"):
            await exchange.answer(json.dumps(self.responses[id]).encode())
            return
        await exchange.start_stream()
        event = {"type": "response.created", "response": self.responses[id]}
        await exchange.chunk(b"event: response.created\ndata: %b\n\n" % json.dumps(event).encode())
        if exchange.header("x-end") != "whole":
            await exchange.wait_closed(60)
            return
        self.end(id, usage=(10, 20))
        event = {"type": "response.completed", "response": self.responses[id]}
        await exchange.chunk(b"event: response.completed\ndata: %b\n\n" % json.dumps(event).encode())
        await exchange.end_stream()

    def end(self, id: str, *, status: str = "completed", usage: tuple[int, int] | None = None) -> None:
        counts = None if usage is None else {"input_tokens": usage[0], "output_tokens": usage[1]}
        self.responses[id] |= {"status": status, "usage": counts}

    def end_all(self, usage: tuple[int, int] | None) -> None:
        for id in self.responses:
            self.end(id, usage=usage)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@contextlib.asynccontextmanager
async def limited(tmp_path: Path, mode: str, engine: Engine, **limits: Any) -> AsyncIterator[RunningGateway]:
    keys = Keys(tmp_path / "keys.toml")
    keys.write(alice=limits)
    async with ScriptedReplica(engine).running() as replica:
        auth = {"keys_file": str(keys.path)}
        async with running_gateway(replica, mode=mode, auth=auth, key=KEY) as gateway:
            yield gateway


async def ask(gateway: RunningGateway, **fields: Any) -> httpx.Response:
    return await gateway.client.post(RESPONSES, json={"model": "m", "input": "hi", "background": True, **fields})


def counts(gateway: RunningGateway) -> Any:
    """A request that needs a place and leaves no response."""
    return gateway.client.post("/tokenize", json={"model": "m", "prompt": "hi"})


async def until_let_in(gateway: RunningGateway) -> None:
    async def let_in() -> bool:
        return (await counts(gateway)).status_code != 429

    await eventually(let_in, 30)


async def refused(gateway: RunningGateway) -> bool:
    return (await counts(gateway)).status_code == 429


@pytest.mark.parametrize("spelling", [True, 1, "true", "yes"])
async def test_it_keeps_its_place_until_its_replica_says_that_it_is_over(
    tmp_path: Path, mode: str, engine: Engine, spelling: object
) -> None:
    async with limited(tmp_path, mode, engine, concurrent_requests=2) as gateway:
        for _ in range(2):
            assert (await ask(gateway, background=spelling)).json()["status"] == "queued"
        for _ in range(5):
            assert (await ask(gateway)).status_code == 429
        assert len(engine.responses) == 2
        engine.end("resp_1", usage=(1, 1))
        await until_let_in(gateway)
        assert (await ask(gateway)).status_code == 200
        assert await refused(gateway)


async def test_what_it_used_is_charged_at_its_end(tmp_path: Path, mode: str, engine: Engine) -> None:
    async with limited(tmp_path, mode, engine, tokens_per_minute=1_000) as gateway:
        assert (await ask(gateway)).status_code == 200
        assert (await ask(gateway)).status_code == 200, "nothing is known of the first yet"
        engine.end_all(usage=(1_500, 1_500))

        async def charged() -> bool:
            page = await gateway.metrics()
            return 'warmlane_tenant_tokens_total{kind="completion",tenant="alice-co"} 3000.0' in page

        await eventually(charged, 30)
        answer = await ask(gateway)
        assert answer.status_code == 429
        assert 290 <= int(answer.headers["retry-after"]) <= 301, "a debt of 5,000 at 1,000 a minute"
        assert 'warmlane_tenant_tokens_total{kind="prompt",tenant="alice-co"} 3000.0' in await gateway.metrics()


async def test_a_client_that_looks_has_its_place_back_at_once(
    tmp_path: Path, mode: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "FIRST_LOOK_SECONDS", 600.0)
    monkeypatch.setattr(background, "LONGEST_PAUSE_SECONDS", 600.0)
    async with limited(tmp_path, mode, engine, concurrent_requests=2) as gateway:
        for _ in range(2):
            assert (await ask(gateway)).status_code == 200
        assert await refused(gateway)
        assert (await gateway.client.get(f"{RESPONSES}/resp_1")).json()["status"] == "queued", "looking needs no place"
        await eventually(lambda: engine.looks == 2)
        assert await refused(gateway)
        engine.end("resp_1", usage=(1, 1))
        assert (await gateway.client.get(f"{RESPONSES}/resp_1")).json()["status"] == "completed"
        await until_let_in(gateway)
        assert (await ask(gateway)).status_code == 200
        assert await refused(gateway)
        assert (await gateway.client.post(f"{RESPONSES}/resp_2/cancel")).json()["status"] == "cancelled"
        await until_let_in(gateway)


@pytest.mark.parametrize("leaves", [True, False])
async def test_a_stream_that_its_client_leaves_goes_on_counting(
    tmp_path: Path, mode: str, engine: Engine, leaves: bool
) -> None:
    async with limited(tmp_path, mode, engine, concurrent_requests=1) as gateway:
        body = {"model": "m", "input": "hi", "background": True, "stream": True}
        headers = {} if leaves else {"x-end": "whole"}
        async with gateway.client.stream("POST", RESPONSES, json=body, headers=headers) as answer:
            async for _ in answer.aiter_raw():
                if leaves:
                    break
        if leaves:
            await asyncio.sleep(0.1)
            assert await refused(gateway)
            engine.end_all(usage=(1, 1))
        await until_let_in(gateway)
        assert engine.looks > 0 or not leaves


@pytest.mark.parametrize(
    "fields",
    [
        {"request_id": "of-my-own"},
        {"request_id": "~" * 256},
        {"user": "u" * 40_000},
        {"metadata": {"id": "resp_done"}},
        {"request_id": "of-my-own", "metadata": {"id": "resp_done"}},
    ],
)
async def test_no_name_and_no_padding_hides_it(
    tmp_path: Path, mode: str, engine: Engine, fields: dict[str, Any]
) -> None:
    async with limited(tmp_path, mode, engine, concurrent_requests=1) as gateway:
        engine.responses["resp_done"] = {"id": "resp_done", "status": "completed", "usage": None}
        assert (await ask(gateway, **fields)).status_code == 200
        await eventually(lambda: engine.looks > 0, 30)
        assert await refused(gateway)
        engine.end_all(usage=(1, 1))
        await until_let_in(gateway)


@pytest.mark.parametrize(
    "id", ["", ".", "..", "a/b", "a?b", "a b", "a%62", 'a"b', "a\r\nb", "resp_\u00e9", "i" * 257, "i" * 3_000_000]
)
async def test_an_id_that_could_not_be_followed_is_nobodys(tmp_path: Path, mode: str, engine: Engine, id: str) -> None:
    async with limited(tmp_path, mode, engine, concurrent_requests=1) as gateway:
        for background in (True, False):
            answer = await ask(gateway, request_id=id, background=background)
            assert answer.status_code == 400
            assert "request_id" in answer.json()["error"]["message"]
            assert len(answer.content) < 1_000
        assert (await ask(gateway, previous_response_id=id)).status_code == 404
        assert not engine.responses
        assert not await refused(gateway)


async def test_an_id_stands_for_one_response_at_a_time(tmp_path: Path, mode: str, engine: Engine) -> None:
    """An engine keeps one response for an id: the end of a short one would be taken for that of a long one."""
    async with limited(tmp_path, mode, engine, concurrent_requests=3) as gateway:
        assert (await ask(gateway, request_id="twice")).status_code == 200
        for more in ({}, {"background": False, "max_output_tokens": 1}, {"stream": True}):
            answer = await ask(gateway, request_id="twice", **more)
            assert answer.status_code == 409
            assert answer.json()["error"]["code"] == "response_id_taken"
        assert (await ask(gateway, request_id="once")).status_code == 200
        engine.end("once", usage=(1, 1))
        assert (await gateway.client.get(f"{RESPONSES}/once")).json()["status"] == "completed"
        await eventually(lambda: engine.looks >= 2)
        assert (await ask(gateway, request_id="twice")).status_code == 409
        engine.end("twice", usage=(1, 1))

        async def free() -> bool:
            return (await ask(gateway, request_id="twice")).status_code == 200

        await eventually(free, 30)


async def test_an_id_is_taken_from_the_request_on(tmp_path: Path, mode: str) -> None:
    may_answer = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await may_answer.wait()
        await exchange.answer(b'{"id":"twice","status":"completed"}')

    keys = Keys(tmp_path / "keys.toml")
    keys.write(alice={"concurrent_requests": 5})
    async with ScriptedReplica(script).running() as replica:
        async with running_gateway(replica, mode=mode, auth={"keys_file": str(keys.path)}, key=KEY) as gateway:
            first = asyncio.create_task(ask(gateway, request_id="twice", background=False))
            await eventually(lambda: len(replica.exchanges) == 1)
            assert (await ask(gateway, request_id="twice")).status_code == 409
            may_answer.set()
            assert (await first).status_code == 200
            assert (await ask(gateway, request_id="twice", background=False)).status_code == 200


async def test_one_whose_id_cannot_be_read_keeps_its_place_too(tmp_path: Path, mode: str) -> None:
    """A replica, or what is before it, that compresses although it is asked not to."""

    async def script(exchange: Exchange) -> None:
        if exchange.request_line.startswith(b"POST /v1/responses"):
            assert exchange.header("accept-encoding") == "identity"
            packed = gzip.compress(b'{"id":"resp_1","status":"queued"}')
            await exchange.answer(packed, headers=b"content-encoding: gzip\r\n")
        else:
            await exchange.answer(b'{"count":1}')

    keys = Keys(tmp_path / "keys.toml")
    keys.write(alice={"concurrent_requests": 1})
    async with ScriptedReplica(script).running() as replica:
        async with running_gateway(replica, mode=mode, auth={"keys_file": str(keys.path)}, key=KEY) as gateway:
            assert (await ask(gateway, max_output_tokens=150)).json()["status"] == "queued"
            assert await refused(gateway)
            await until_let_in(gateway)
            assert all(not one.request_line.startswith(b"GET /v1/responses") for one in replica.exchanges)


async def test_a_request_that_is_refused_is_not_followed(tmp_path: Path, mode: str) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.answer(b'{"error":{"message":"no background here"}}', status="400 Bad Request")

    keys = Keys(tmp_path / "keys.toml")
    keys.write(alice={"concurrent_requests": 1})
    async with ScriptedReplica(script).running() as replica:
        async with running_gateway(replica, mode=mode, auth={"keys_file": str(keys.path)}, key=KEY) as gateway:
            for _ in range(3):
                assert (await ask(gateway, request_id="x")).status_code == 400


# -- ends that cannot be seen

LIMITS: dict[str, Any] = {"concurrent_requests": 1, "tokens_per_minute": 60}


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


class Following:
    """`Background` on a clock of its own, in front of an engine."""

    def __init__(self, replica: ScriptedReplica) -> None:
        self.replica = ReplicaId(replica.url)
        self.clock = Clock()
        self.charged: list[tuple[str, int, int]] = []
        self.background = Background(self.clock, lambda *charged: self.charged.append(charged))

    def begin(self, id: str | None, *, most: int | None = None, caller: Caller | None = None) -> Caller:
        caller = caller or Caller(key(**LIMITS), self.clock.now)
        stay = caller.enter(self.clock.now)
        stay.reserve(100, self.clock.now)
        stay.most_tokens = most
        self.background.follow(stay, "acme", self.replica, id)
        return caller

    async def run_until(self, condition: Any, *, seconds_a_look: float) -> None:
        running = asyncio.create_task(self.background.run(ReplicaClient()))

        def passed() -> bool:
            self.clock.now += seconds_a_look
            return bool(condition())

        try:
            await eventually(passed)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "TICK_SECONDS", 0.01)


@pytest.mark.parametrize(
    ("status", "usage", "most", "charged"),
    [
        ("completed", (300, 400), None, 700),
        ("incomplete", (300, 400), 5, 700),
        ("failed", None, 5_000, 0),
        ("cancelled", None, 50, 150),
        ("completed", None, 50, 150),
    ],
)
async def test_every_end_is_charged_by_what_is_known(
    engine: Engine, status: str, usage: tuple[int, int] | None, most: int | None, charged: int
) -> None:
    async with ScriptedReplica(engine).running() as replica:
        following = Following(replica)
        engine.responses["resp_1"] = {"id": "resp_1"}
        engine.end("resp_1", status=status, usage=usage)
        caller = following.begin("resp_1", most=most)
        await following.run_until(lambda: not caller.running, seconds_a_look=0.1)
        assert len(following.background) == 0
        assert following.charged == ([("acme", *usage)] if usage else [])
        if not charged:
            caller.enter(following.clock.now)
            return
        with pytest.raises(OverLimit) as caught:
            caller.enter(following.clock.now)
        came_back = following.clock.now - 1_000.0
        assert caught.value.retry_after == pytest.approx(charged - 60 - came_back + 1)


async def test_what_its_replica_does_not_know_ends_with_a_guess(engine: Engine) -> None:
    async with ScriptedReplica(engine).running() as replica:
        following = Following(replica)
        caller = following.begin("resp_1")
        await following.run_until(lambda: not caller.running, seconds_a_look=0.5)
        assert engine.looks > background.FAILURES
        assert following.clock.now - 1_000 >= background.UNKNOWN_LENGTH_SECONDS
        assert following.charged == []


async def test_one_that_cannot_be_asked_for_ends_when_its_work_must_be_done(engine: Engine) -> None:
    async with ScriptedReplica(engine).running() as replica:
        following = Following(replica)
        caller = following.begin(None, most=3_000)
        await following.run_until(lambda: not caller.running, seconds_a_look=1.0)
        assert 30.0 <= following.clock.now - 1_000 < 40.0
        assert engine.looks == 0


@pytest.mark.parametrize(("most", "least"), [(50, 0.5), (30_000, 300.0), (10**9, background.FOLLOWED_SECONDS)])
@pytest.mark.parametrize("answer", ["404", "500", "large"])
async def test_an_answer_that_tells_nothing_frees_no_place_before_the_work_could_be_done(
    monkeypatch: pytest.MonkeyPatch, answer: str, most: int, least: float
) -> None:
    """What a client had kept may be more than is read of it, and its id one that its engine cannot look up."""
    monkeypatch.setattr(background, "MAX_ANSWER_BYTES", 1_000)
    looks = 0

    async def script(exchange: Exchange) -> None:
        nonlocal looks
        looks += 1
        if answer == "large":
            await exchange.answer(b'{"status":"in_progress","instructions":"%b"}' % (b"x" * 2_000))
        else:
            await exchange.answer(b"{}", status=f"{answer} Not So")

    async with ScriptedReplica(script).running() as replica:
        following = Following(replica)
        caller = following.begin("resp_1", most=most)
        await following.run_until(lambda: not caller.running, seconds_a_look=max(0.1, least / 100))
        assert following.clock.now - 1_000 >= least
        assert background.FAILURES <= looks < 200


async def test_a_replica_that_hangs_holds_up_nobody_elsewhere(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    hung = 0

    async def hang(exchange: Exchange) -> None:
        nonlocal hung
        hung += 1
        await exchange.wait_closed(60)

    monkeypatch.setattr(background, "TIMEOUT_SECONDS", 60.0)
    async with ScriptedReplica(hang).running() as bad, ScriptedReplica(engine).running() as good:
        following = Following(bad)
        hanging = [following.begin(f"resp_{number}") for number in range(100)]
        following.replica = ReplicaId(good.url)
        for number in range(30):
            engine.responses[f"resp_{number}"] = {"id": f"resp_{number}"}
            engine.end(f"resp_{number}", usage=(1, 1))
        others = [following.begin(f"resp_{number}") for number in range(30)]
        await following.run_until(lambda: not any(one.running for one in others), seconds_a_look=0.1)
        assert hung == background.AT_ONCE
        assert all(one.running for one in hanging)


async def test_a_replica_that_is_late_rests_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    async def hang(exchange: Exchange) -> None:
        asked.append(following.clock.now)
        await exchange.wait_closed(60)

    monkeypatch.setattr(background, "TIMEOUT_SECONDS", 0.1)
    async with ScriptedReplica(hang).running() as replica:
        following = Following(replica)
        callers = [following.begin(f"resp_{number}") for number in range(100)]
        await following.run_until(lambda: not any(one.running for one in callers), seconds_a_look=0.5)
        later = asked[background.AT_ONCE :]
        assert 1 <= len(later) < 40, "one at a time, and less and less often"
        assert following.clock.now - 1_000 < 3 * background.UNKNOWN_LENGTH_SECONDS


async def test_a_replica_that_is_gone_ends_it_and_one_that_stumbles_does_not(engine: Engine) -> None:
    async with ScriptedReplica(engine).running() as replica:
        following = Following(replica)
        engine.responses["resp_1"] = {"id": "resp_1", "status": "queued"}
        caller = following.begin("resp_1")
        await following.run_until(lambda: engine.looks >= 2, seconds_a_look=0.1)
        del engine.responses["resp_1"]
        await following.run_until(lambda: engine.looks >= 4, seconds_a_look=0.1)
        engine.responses["resp_1"] = {"id": "resp_1", "status": "queued"}
        await following.run_until(lambda: engine.looks >= 8, seconds_a_look=0.1)
        assert caller.running == 1
    await following.run_until(lambda: not caller.running, seconds_a_look=0.1)


async def test_nothing_is_followed_for_ever(engine: Engine) -> None:
    async with ScriptedReplica(engine).running() as replica:
        following = Following(replica)
        engine.responses["resp_1"] = {"id": "resp_1", "status": "in_progress"}
        caller = following.begin("resp_1", most=200)
        await following.run_until(lambda: not caller.running, seconds_a_look=60.0)
        assert following.clock.now - 1_000 > background.FOLLOWED_SECONDS
        assert engine.looks < 200, "a long one is looked at less and less"


async def test_the_oldest_goes_where_there_are_too_many(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "MAX_FOLLOWED", 10)
    async with ScriptedReplica(engine).running() as replica:
        following = Following(replica)
        first = following.begin("resp_0", most=100)
        others = [following.begin(f"resp_{number}") for number in range(1, 12)]
        assert len(following.background) == 10
        assert [one.running for one in (first, *others)] == [0, 0] + [1] * 10
