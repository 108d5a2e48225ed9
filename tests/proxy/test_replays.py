"""When a request is sent once more, and when not: budget, switch, engines that shut down, deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import ssl
from pathlib import Path

import httpx
import pytest

from gateway.proxy.errors import ConnectFailed, ConnectionLost, EngineDraining, TlsFailed, UpstreamError
from gateway.proxy.replays import CAUSES, Replays
from gateway.proxy.upstream import STALE_SECONDS
from tests.proxy.certificates import Authority
from tests.proxy.conftest import RunningGateway, eventually, running_gateway
from tests.proxy.scripted import ANSWER, Exchange, ScriptedReplica
from tests.proxy.test_faults import EVENT, answer_after_going, nothing_in_flight
from tests.proxy.test_front_door import ODD_BODY, post, raw_request

SHUTTING_DOWN = (
    b'{"error":{"message":"cannot schedule new futures after shutdown","type":"InternalServerError","param":null,'
    b'"code":500}}'
)
NOTHING = (
    b'data: {"id":"c","object":"text_completion","created":1,"model":"m","choices":[],'
    b'"usage":{"prompt_tokens":3,"total_tokens":3,"completion_tokens":0}}\n\ndata: [DONE]\n\n'
)


async def silent(exchange: Exchange) -> None:
    await exchange.wait_closed(20)


async def shuts_down(exchange: Exchange) -> None:
    await exchange.answer(SHUTTING_DOWN, status="500 Internal Server Error")


async def counted(gateway: RunningGateway, name: str) -> dict[str, float]:
    """Values of one family by the rest of their lines."""
    page = await gateway.metrics()
    return {found[1]: float(found[2]) for found in re.finditer(rf"^{name}(\S*) (\S+)$", page, re.MULTILINE)}


async def is_out(gateway: RunningGateway, replica: ScriptedReplica) -> bool:
    states = await counted(gateway, "warmlane_replica_state")
    return states[f'{{replica="{replica.url}",state="ejected"}}'] == 1.0


def test_a_fifth_of_the_requests_earns_what_all_in_flight_may_spend_at_once() -> None:
    in_flight = 0
    replays = Replays(lambda: in_flight)
    assert sum(replays.take() for _ in range(40)) == 10, "a new gateway survives the loss of a small replica"
    for _ in range(50):
        replays.earn()
    assert sum(replays.take() for _ in range(40)) == 10
    in_flight = 100
    for _ in range(10_000):
        replays.earn()
    assert sum(replays.take() for _ in range(1_000)) == 100
    in_flight = 1
    for _ in range(10_000):
        replays.earn()
    assert sum(replays.take() for _ in range(1_000)) == 10, "who has little to do saves little"


async def test_one_of_two_replicas_may_die_with_half_of_all_requests(mode: str) -> None:
    """O-05: what it held goes to the other one, were it half of everything."""
    held = asyncio.Event()

    async def dies(exchange: Exchange) -> None:
        await held.wait()
        exchange.reset()

    async def waits(exchange: Exchange) -> None:
        await held.wait()
        await exchange.answer(ANSWER)

    dying, staying = ScriptedReplica(dies), ScriptedReplica(waits)
    async with dying.running(), staying.running():
        async with running_gateway(dying, staying, mode=mode, routing={"policy": "round-robin"}) as gateway:
            asked = [asyncio.create_task(gateway.chat(f"{number}")) for number in range(20)]
            await eventually(lambda: len(dying.exchanges) == len(staying.exchanges) == 10)
            held.set()
            assert {response.status_code for response in await asyncio.gather(*asked)} == {200}


async def test_replays_beyond_the_budget_become_errors_and_are_counted(mode: str) -> None:
    """O-05: where everything is lost all the time, next to nothing is sent again."""
    replicas = [ScriptedReplica(answer_after_going), ScriptedReplica(answer_after_going)]
    async with replicas[0].running(), replicas[1].running():
        async with running_gateway(*replicas, mode=mode, routing={"policy": "round-robin"}) as gateway:
            for number in range(60):
                assert (await gateway.chat(f"{number}")).status_code == 502
            refused = await counted(gateway, "warmlane_replays_refused_total")
            replayed = await counted(gateway, "warmlane_replays_total")
            assert replayed['{cause="lost"}'] == 60 - refused[""]
            assert 20 <= replayed['{cause="lost"}'] <= 22, "ten at the start, and a fifth of sixty"
            assert sum(len(one.exchanges) for one in replicas) == 60 + replayed['{cause="lost"}']


async def test_replays_can_be_switched_off(mode: str) -> None:
    """O-05: nothing that may have been begun is begun again, and so no request meets a dead kept connection either."""

    async def works_then_resets_on_second_use(exchange: Exchange) -> None:
        if b"lost" in exchange.body or exchange.on_connection == 2:
            exchange.reset()
        else:
            await exchange.answer(ANSWER)

    replicas = [ScriptedReplica(works_then_resets_on_second_use) for _ in range(2)]
    async with replicas[0].running(), replicas[1].running():
        async with running_gateway(*replicas, mode=mode, upstream={"replay": False}) as gateway:
            for number in range(8):
                assert (await gateway.chat(f"{number}")).status_code == 200
            response = await gateway.chat("lost")
            assert (response.status_code, response.json()["error"]["code"]) == (502, "replica_connection_lost")
            exchanges = replicas[0].exchanges + replicas[1].exchanges
            assert len(exchanges) == 9
            assert {exchange.on_connection for exchange in exchanges} == {1}
            assert await counted(gateway, "warmlane_replays_total") == {}


async def test_replays_are_counted_by_their_cause(mode: str) -> None:
    async def resets_on_second_use(exchange: Exchange) -> None:
        if exchange.on_connection == 2:
            exchange.reset()
        else:
            await exchange.answer(ANSWER)

    async with ScriptedReplica(resets_on_second_use).running() as replica:
        async with running_gateway(replica, mode=mode) as gateway:
            assert (await gateway.chat("first")).status_code == 200
            await asyncio.sleep(STALE_SECONDS + 0.1)
            assert (await gateway.chat("second")).status_code == 200
            assert await counted(gateway, "warmlane_replays_total") == {'{cause="kept"}': 1.0}


async def test_a_connection_lost_right_after_another_request_was_lost_with_its_replica(mode: str) -> None:
    """O-05: no server closes one so soon for idling, so the request's second chance is another replica's."""

    async def resets_on_second_use(exchange: Exchange) -> None:
        if exchange.on_connection == 2:
            exchange.reset()
        else:
            await exchange.answer(ANSWER)

    replicas = [ScriptedReplica(resets_on_second_use), ScriptedReplica(resets_on_second_use)]
    async with replicas[0].running(), replicas[1].running():
        async with running_gateway(*replicas, mode=mode, routing={"policy": "round-robin"}) as gateway:
            for text in ("first", "second", "lost"):
                assert (await gateway.chat(text)).status_code == 200
            assert await counted(gateway, "warmlane_replays_total") == {'{cause="lost"}': 1.0}


async def test_a_request_whose_idle_connection_is_lost_goes_to_another_replica_if_there_is_any(mode: str) -> None:
    """O-05: sent to the same one it was lost there again, where the replica flapped. It is no blame all the same."""
    losing = False

    async def flaps(exchange: Exchange) -> None:
        if losing:
            exchange.reset()
        else:
            await exchange.answer(ANSWER)

    flapping, staying = ScriptedReplica(flaps), ScriptedReplica()
    async with flapping.running(), staying.running():
        async with running_gateway(flapping, staying, mode=mode, routing={"policy": "round-robin"}) as gateway:
            for number in range(4):
                assert (await gateway.chat(f"{number}")).status_code == 200
            losing = True
            await asyncio.sleep(STALE_SECONDS + 0.1)
            for number in range(2):
                assert (await gateway.chat(f"{number}")).status_code == 200
            assert (await counted(gateway, "warmlane_replays_total"))['{cause="kept"}'] == 1.0
            assert len(staying.exchanges) == 4
            assert not await is_out(gateway, flapping)


# -- requests that kill who runs them


@pytest.mark.parametrize("dies", [True, False])
@pytest.mark.parametrize("kept", [True, False])
async def test_a_request_that_kills_its_replica_is_begun_twice_at_most(mode: str, kept: bool, dies: bool) -> None:
    """O-05: a kept connection that is lost may have carried it, whatever the attempts after it say."""
    begun: list[ScriptedReplica] = []
    replicas: list[ScriptedReplica] = []
    full = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        if b"poison" in exchange.body:
            here = next(one for one in replicas if any(exchange is other for other in one.exchanges))
            begun.append(here)
            if dies and here._server is not None:
                here._server.close()
            exchange.reset()
            return
        if sum(len(one.exchanges) for one in replicas) >= 10:
            full.set()
        await full.wait()
        await exchange.answer(ANSWER)

    replicas += [ScriptedReplica(script) for _ in range(5)]
    async with contextlib.AsyncExitStack() as stack:
        for replica in replicas:
            await stack.enter_async_context(replica.running())
        routing = {"policy": "round-robin"}
        async with running_gateway(*replicas, mode=mode, routing=routing) as gateway:
            if kept:
                answers = await asyncio.gather(*(gateway.chat(f"{number}") for number in range(10)))
                assert {answer.status_code for answer in answers} == {200}
            response = await gateway.chat("poison")
            assert (response.status_code, response.json()["error"]["code"]) == (502, "replica_connection_lost")
            assert len(begun) == 2


async def test_a_loss_is_not_hidden_by_the_refusals_after_it(mode: str) -> None:
    """O-05: 503 would say that nothing was begun."""
    replicas: list[ScriptedReplica] = []

    async def script(exchange: Exchange) -> None:
        if b"last" in exchange.body:
            for one in replicas:
                assert one._server is not None
                one._server.close()
            exchange.reset()
        else:
            await exchange.answer(ANSWER)

    replicas += [ScriptedReplica(script) for _ in range(2)]
    async with replicas[0].running(), replicas[1].running():
        async with running_gateway(*replicas, mode=mode) as gateway:
            assert (await gateway.chat("first")).status_code == 200
            response = await gateway.chat("last")
            assert (response.status_code, response.json()["error"]["code"]) == (502, "replica_connection_lost")
            assert sum(b"last" in one.body for replica in replicas for one in replica.exchanges) == 1


# -- engines that shut down


async def test_a_request_that_meets_an_engine_that_shuts_down_goes_to_another(mode: str) -> None:
    """The engine answers 500 and has done nothing; its health stays 200 until it is gone."""
    leaving, staying = ScriptedReplica(shuts_down), ScriptedReplica()
    async with leaving.running(), staying.running():
        async with running_gateway(leaving, staying, mode=mode, routing={"policy": "round-robin"}) as gateway:
            for number in range(10):
                response = await gateway.chat(f"{number}")
                assert (response.status_code, response.headers["x-warmlane-replica"]) == (200, staying.url)
            assert len(leaving.exchanges) <= 2, "one sign is enough; later only trials"
            assert await is_out(gateway, leaving)
            assert (await counted(gateway, "warmlane_replays_total"))['{cause="draining"}'] >= 1
            leaving.script = staying.script

            async def is_back() -> bool:
                await gateway.chat("again")
                return not await is_out(gateway, leaving)

            await eventually(is_back)


async def test_where_there_is_no_other_an_engine_that_shuts_down_is_a_503(mode: str) -> None:
    async with ScriptedReplica(shuts_down).running() as replica, running_gateway(replica, mode=mode) as gateway:
        response = await gateway.chat()
        assert (response.status_code, response.json()["error"]["code"]) == (503, "replica_draining")
        assert int(response.headers["retry-after"]) >= 1


async def test_a_request_that_creates_state_gets_the_engines_own_answer_and_takes_it_out(mode: str) -> None:
    async with ScriptedReplica(shuts_down).running() as replica, running_gateway(replica, mode=mode) as gateway:
        response = await gateway.client.post("/v1/responses", json={"model": "m", "input": "x"})
        assert (response.status_code, response.content) == (500, SHUTTING_DOWN)
        assert await is_out(gateway, replica)


async def test_streams_without_anything_pass_and_the_second_takes_its_engine_out(mode: str) -> None:
    async def says_nothing(exchange: Exchange) -> None:
        await exchange.start_stream()
        await exchange.chunk(NOTHING)
        await exchange.end_stream()

    leaving, staying = ScriptedReplica(says_nothing), ScriptedReplica()
    async with leaving.running(), staying.running():
        async with running_gateway(leaving, staying, mode=mode, routing={"policy": "round-robin"}) as gateway:
            bodies = [(await gateway.chat(f"{number}", stream=True)).content for number in range(6)]
            assert bodies.count(NOTHING) == len(leaving.exchanges) == 2
            assert await is_out(gateway, leaving)


async def test_empty_answers_to_anthropic_clients_take_nobody_out(mode: str) -> None:
    """Clients can make these at will, with a stop sequence or `max_tokens`."""
    answer = b'data: {"type":"message_start","message":{}}\n\ndata: {"type":"message_stop"}\n\ndata: [DONE]\n\n'

    async def says_nothing(exchange: Exchange) -> None:
        await exchange.start_stream()
        await exchange.chunk(answer)
        await exchange.end_stream()

    async with ScriptedReplica(says_nothing).running() as replica, running_gateway(replica, mode=mode) as gateway:
        for _ in range(6):
            response = await gateway.chat(path="/v1/messages", stream=True, max_tokens=1)
            assert (response.status_code, response.content) == (200, answer)
        assert not await is_out(gateway, replica)


async def test_error_events_for_what_clients_did_take_nobody_out(mode: str) -> None:
    answer = b'data: {"error":{"message":"bad grammar","type":"BadRequestError","code":400}}\n\ndata: [DONE]\n\n'

    async def rejects(exchange: Exchange) -> None:
        await exchange.start_stream()
        await exchange.chunk(answer)
        await exchange.end_stream()

    async with ScriptedReplica(rejects).running() as replica, running_gateway(replica, mode=mode) as gateway:
        for _ in range(6):
            response = await gateway.chat(stream=True)
            assert (response.status_code, response.content) == (200, answer)
        assert not await is_out(gateway, replica)
        results = await counted(gateway, "warmlane_upstream_attempts_total")
        assert results == {f'{{replica="{replica.url}",result="rejected"}}': 6.0}


@pytest.mark.parametrize("size", [3, 5_000, 200_000])
async def test_other_500s_pass_unchanged_in_any_pieces(mode: str, size: int) -> None:
    body = b"x" * size + b" out of memory"

    async def script(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 500 Oops\r\nx-kept: 1\r\ncontent-length: %d\r\n\r\n" % len(body))
        for start in range(0, len(body), 1_500):
            await exchange.send(body[start : start + 1_500])
            await asyncio.sleep(0)

    async with ScriptedReplica(script).running() as replica, running_gateway(replica, mode=mode) as gateway:
        response = await gateway.chat()
        assert (response.status_code, response.content, response.headers["x-kept"]) == (500, body, "1")


async def test_a_500_that_breaks_off_is_a_clear_error(mode: str) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 500 Oops\r\ncontent-length: 100\r\n\r\nhalf of")
        exchange.writer.close()

    async with ScriptedReplica(script).running() as replica, running_gateway(replica, mode=mode) as gateway:
        response = await gateway.chat()
        assert (response.status_code, response.json()["error"]["code"]) == (502, "replica_connection_lost")
        assert len(replica.exchanges) == 1


# -- every cause


async def stops(replica: ScriptedReplica, tls: ssl.SSLContext, stranger: Authority) -> None:
    await replica.stop()


async def shows_anothers_certificate(replica: ScriptedReplica, tls: ssl.SSLContext, stranger: Authority) -> None:
    pair = stranger.issue("another", "IP:127.0.0.1")
    tls.load_cert_chain(pair.certificate, pair.key)


async def drops_connections(replica: ScriptedReplica, tls: ssl.SSLContext, stranger: Authority) -> None:
    replica.script = answer_after_going


async def leaves(replica: ScriptedReplica, tls: ssl.SSLContext, stranger: Authority) -> None:
    replica.script = shuts_down


FAULTS = {
    ConnectFailed: stops,
    TlsFailed: shows_anothers_certificate,
    ConnectionLost: drops_connections,
    EngineDraining: leaves,
}


def test_every_cause_of_a_replay_has_its_fault_here() -> None:
    assert FAULTS.keys() == CAUSES.keys()


@pytest.mark.parametrize("cause", FAULTS)
async def test_whatever_befalls_one_of_two_the_other_answers_and_the_cause_is_counted(
    mode: str, cause: type[UpstreamError], tmp_path: Path
) -> None:
    """Over TLS, where each of them can happen. No probe takes the first out before a request meets it."""
    authority, stranger = Authority(tmp_path, "ours"), Authority(tmp_path, "stranger")
    pair = authority.issue("replica", "IP:127.0.0.1")
    upstream, feeds = {"ca_file": str(authority.file)}, {"probe_interval_seconds": 3_600.0}
    first, second = ScriptedReplica(), ScriptedReplica()
    context = pair.server_context()
    async with first.running(tls=context), second.running(tls=pair.server_context()):
        async with running_gateway(first, second, mode=mode, upstream=upstream, feeds=feeds) as gateway:
            await FAULTS[cause](first, context, stranger)
            for number in range(4):
                response = await gateway.chat(f"{number}" * 2_000)
                assert (response.status_code, response.content) == (200, ANSWER)
                assert response.headers["x-warmlane-replica"] == second.url
            replays = await counted(gateway, "warmlane_replays_total")
            label = f'{{cause="{CAUSES[cause]}"}}'
            assert replays[label] >= 1
            assert sum(replays.values()) == replays[label]


# -- nobody can be reached


async def test_nothing_reachable_is_a_fast_503_with_retry_after(mode: str) -> None:
    """O-04, O-07."""
    replicas = [ScriptedReplica() for _ in range(3)]
    async with replicas[0].running(), replicas[1].running(), replicas[2].running():
        async with running_gateway(*replicas, mode=mode) as gateway:
            for replica in replicas:
                await replica.stop()
            for _ in range(6):
                response = await gateway.chat()
                assert response.status_code == 503
                assert response.json()["error"]["code"] in ("replica_unreachable", "no_replica")
                assert int(response.headers["retry-after"]) >= 1
            assert (await gateway.client.get("/health")).status_code == 200


# -- deadlines


async def test_a_request_that_is_not_answered_in_its_time_is_a_504_and_its_work_is_stopped(mode: str) -> None:
    async with ScriptedReplica(silent).running() as replica:
        async with running_gateway(replica, mode=mode, upstream={"deadline_seconds": 1.0}) as gateway:
            response = await gateway.chat()
            assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
            await replica.exchanges[0].wait_closed(2)
            await eventually(lambda: nothing_in_flight(gateway))
            assert 'outcome="overdue"' in await gateway.metrics()
            assert len(replica.exchanges) == 1
            assert not await is_out(gateway, replica)


async def test_a_client_may_ask_for_less_time_and_never_for_more(mode: str) -> None:
    async with ScriptedReplica(silent).running() as replica:
        async with running_gateway(replica, mode=mode, upstream={"deadline_seconds": 2.0}) as gateway:
            for given in ("0.2", "900", "soon", "-1"):
                headers = {"x-request-timeout": given}
                response = await gateway.client.post("/v1/completions", json={"model": "m"}, headers=headers)
                assert response.json()["error"]["code"] == "deadline_exceeded"
                assert replica.exchanges[-1].header("x-request-timeout") == given
                assert (response.elapsed.total_seconds() < 1.5) == (given == "0.2")


async def test_a_deadline_in_mid_stream_is_an_explicit_end(mode: str) -> None:
    async def endless(exchange: Exchange) -> None:
        await exchange.start_stream()
        while not exchange.closed.is_set():
            await exchange.chunk(EVENT)
            await asyncio.sleep(0.02)

    async with ScriptedReplica(endless).running() as replica, running_gateway(replica, mode=mode) as gateway:
        answer = await raw_request(gateway, post(ODD_BODY, headers=b"x-request-timeout: 1\r\n", close=False))
        assert answer.count(EVENT) >= 2
        assert answer.count(b'data: {"error":') == 1
        assert b"deadline_exceeded" in answer
        assert b"[DONE]" not in answer
        assert not answer.endswith(b"0\r\n\r\n")
        await replica.exchanges[0].wait_closed(2)
        await eventually(lambda: nothing_in_flight(gateway))


async def test_a_deadline_counts_while_a_request_waits_for_its_turn(mode: str) -> None:
    async with ScriptedReplica(silent).running() as replica:
        async with running_gateway(replica, mode=mode, routing={"max_in_flight": 1}) as gateway:
            held = asyncio.create_task(gateway.chat("held"))
            await eventually(lambda: bool(replica.exchanges))
            headers = {"x-request-timeout": "0.2"}
            response = await gateway.client.post("/v1/completions", json={"model": "m"}, headers=headers)
            assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
            assert len(replica.exchanges) == 1
            held.cancel()
            await asyncio.gather(held, return_exceptions=True)


async def test_a_deadline_that_is_met_changes_nothing(mode: str) -> None:
    async with ScriptedReplica().running() as replica:
        async with running_gateway(replica, mode=mode, upstream={"deadline_seconds": 1.0}) as gateway:
            _, writer = await gateway.connect()
            assert (await gateway.chat()).content == ANSWER
            await asyncio.sleep(1.2)  # past the deadline of the first
            assert (await gateway.chat()).content == ANSWER
            assert len(replica.exchanges) == 2
            writer.close()


# -- drain


async def test_during_the_announced_delay_new_requests_are_served_and_connections_end(mode: str) -> None:
    async with ScriptedReplica().running() as replica:
        async with running_gateway(replica, mode=mode, server={"drain_delay_seconds": 1.0}) as gateway:
            assert "close" not in (await gateway.chat()).headers.get("connection", "")
            gateway.stop()

            async def unready() -> bool:
                return (await gateway.client.get("/ready")).status_code == 503

            await eventually(unready)
            async with httpx.AsyncClient(base_url=gateway.url, trust_env=False) as fresh:
                body = {"model": "m", "messages": []}
                response = await fresh.post("/v1/chat/completions", json=body)
                assert response.status_code == 200
                assert response.headers["connection"] == "close"
            assert json.loads((await gateway.client.get("/ready")).content) == {"ready": False, "draining": True}
            assert await asyncio.wait_for(gateway.task, 10) == 0


async def test_metrics_of_the_core_and_the_pool_and_hits_that_a_move_loses() -> None:
    prompt = "The same beginning, over and over. " * 200
    async with contextlib.AsyncExitStack() as standing:
        replicas = [ScriptedReplica(), ScriptedReplica()]
        lives = [contextlib.AsyncExitStack() for _ in replicas]
        for life, replica in zip(lives, replicas, strict=True):
            await standing.enter_async_context(life)
            await life.enter_async_context(replica.running())
        async with running_gateway(*replicas) as gateway:
            first = (await gateway.chat(prompt)).headers["x-warmlane-replica"]
            assert (await counted(gateway, "warmlane_decide_seconds_count"))[""] == 1.0
            assert (await counted(gateway, "warmlane_index_bytes"))[""] > 0.0
            connections = await counted(gateway, "warmlane_upstream_connections")
            assert connections[f'{{replica="{first}",state="idle"}}'] == 1.0
            ages = await counted(gateway, "warmlane_replica_probe_age_seconds")
            assert all(0.0 <= age < 60.0 for age in ages.values())
            assert len(ages) == 2
            lost = next(life for life, replica in zip(lives, replicas, strict=True) if replica.url == first)
            await lost.aclose()
            second = (await gateway.chat(prompt)).headers["x-warmlane-replica"]
            assert second != first
            lost_hits = await counted(gateway, "warmlane_lost_cached_tokens_total")
            assert lost_hits['{cause="moved"}'] > 1_000.0
            assert lost_hits['{cause="spilled"}'] == 0.0
