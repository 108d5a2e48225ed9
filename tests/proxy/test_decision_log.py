"""`[server] decision_log_file`: each request that was sent, with the costs of all candidates; a trace for `replay`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.assembly import decision_log
from gateway.cli import main
from gateway.config import Config, ConfigError, Server, load
from loadtests.traces import read
from tests.proxy.conftest import eventually, running_gateway
from tests.proxy.scripted import Exchange, ScriptedReplica, answer_chat

SECRET = "the plans of the new factory "


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def answer_with_usage(exchange: Exchange) -> None:
    usage = {"prompt_tokens": len(exchange.body) // 4, "completion_tokens": 7}
    await exchange.answer(json.dumps({"choices": [], "usage": usage}).encode())


async def test_real_traffic_is_recorded_with_its_costs_and_replays(tmp_path: Path, mode: str, capsys):
    path = tmp_path / "decisions.jsonl"
    server = {"decision_log_file": str(path), "log_blocks": True}
    replicas = ScriptedReplica(answer_with_usage), ScriptedReplica(answer_with_usage)
    async with replicas[0].running() as one, replicas[1].running() as other:
        async with running_gateway(one, other, mode=mode, server=server) as gateway:
            for text in (SECRET * 300, SECRET * 300 + "and more", "x" * 20_000, SECRET * 300):
                assert (await gateway.chat(text)).status_code == 200
            assert (await gateway.chat("unknown", model="another")).status_code == 404
            assert (await gateway.client.post("/v1/chat/completions", content=b"{")).status_code == 400
            await eventually(lambda: len(records(path)) >= 4)
            assert "warmlane_decision_records_lost_total 0.0" in await gateway.metrics()
    found = records(path)
    assert len(found) == 4, "what no replica was chosen for is not there"
    for record in found:
        (decision,) = record["decisions"]
        assert (decision["policy"], decision["candidates"]) == ("cache-cost", 2)
        assert decision["replica"] == record["replica"] == decision["ranking"][0]["replica"]
        assert {row["replica"] for row in decision["ranking"]} == {one.url, other.url}
        for row in decision["ranking"]:
            assert sum(row["parts"].values()) == pytest.approx(row["total_seconds"])
            assert row["prompt_tokens"] > 1000
    costs = [row["total_seconds"] for row in found[0]["decisions"][0]["ranking"]]
    assert costs == sorted(costs)
    assert SECRET not in path.read_text()

    requests = read(path).requests
    assert len(requests) == 4
    shared = [len(set(request.blocks) & set(requests[0].blocks)) for request in requests]
    assert shared[1] > 0 == shared[2] < shared[3]
    with pytest.raises(SystemExit) as ended:
        main(["replay", "--trace", str(path), "--replicas", "2", "--load", "recorded", "--json"])
    assert not ended.value.code
    rows = {row["policy"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["cache-cost"]["hit_pct"] > 30


async def test_each_flight_of_a_request_is_a_row(tmp_path: Path):
    path = tmp_path / "decisions.jsonl"

    asked: list[Exchange] = []

    async def lose_the_first(exchange: Exchange) -> None:
        asked.append(exchange)
        if len(asked) == 1:
            exchange.reset()
        else:
            await answer_chat(exchange)

    replicas = ScriptedReplica(lose_the_first), ScriptedReplica(lose_the_first)
    async with replicas[0].running() as one, replicas[1].running() as other:
        async with running_gateway(one, other, server={"decision_log_file": str(path), "dashboard": False}) as gateway:
            assert (await gateway.chat()).status_code == 200
            await eventually(lambda: records(path))
    (record,) = records(path)
    rows = record["decisions"]
    assert len(rows) == record["attempts"] == 2
    assert rows[0]["replica"] != rows[1]["replica"]
    assert rows[1]["candidates"] == 1


async def test_standard_output_has_no_costs(tmp_path: Path, capsysbinary):
    async with ScriptedReplica(answer_chat).running() as replica:
        server = {"decision_log_file": str(tmp_path / "log"), "log": "json"}
        async with running_gateway(replica, server=server) as gateway:
            await gateway.chat()
    (record,) = [json.loads(line) for line in capsysbinary.readouterr().out.splitlines()]
    assert "decisions" not in record
    assert {**record, "decisions": records(tmp_path / "log")[0]["decisions"]} == records(tmp_path / "log")[0]


def test_the_file_lies_beside_the_configuration_and_must_be_writable(tmp_path: Path):
    config = tmp_path / "warmlane.toml"
    config.write_text('[server]\ndecision_log_file = "decisions.jsonl"\n')
    assert load(config).server.decision_log_file == str(tmp_path / "decisions.jsonl")
    assert Config().server.decision_log_file is None
    with pytest.raises(ConfigError, match=r"server\.decision_log_file: .*missing.*: No such file or directory"):
        decision_log(Server(decision_log_file=str(tmp_path / "missing" / "log")))
