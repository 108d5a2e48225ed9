"""`warmlane serve --workers N` with real processes: one view, one set of totals, and nobody who stays behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from prometheus_client import ProcessCollector

from tests.chaos.rig import EmbeddedReplica, Metrics
from tests.several.conftest import ADMIN, Several, client_ports, is_alive, until

WORKERS = 3
REQUESTS = 1_000
LONG = 1_200
"""Tokens of a stream: 6 s, so that all still run on a busy machine when the last has begun and a worker is chosen."""
WARMLANE = [sys.executable, "-c", "from gateway.cli import main; main()"]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory, replicas: list[EmbeddedReplica]) -> Iterator[list[Several]]:
    stage: list[Several] = []
    yield stage
    for one in stage:
        one.stop()


@pytest.fixture
def several(tmp_path_factory: pytest.TempPathFactory, replicas: list[EmbeddedReplica], stage: list[Several]) -> Several:
    """The one of the test before, or another where that has stopped; all its workers serve."""
    if not stage or not stage[-1].process.running:
        admin = {"port": 0, "key_env": "WARMLANE_ADMIN_KEY"}
        folder = tmp_path_factory.mktemp("several")
        stage.append(Several(folder, replicas, server={"workers": WORKERS}, admin=admin))
    until(stage[-1].serves_whole, "all workers serve")
    return stage[-1]


def test_connections_are_spread_evenly(several: Several) -> None:
    several.client.close()
    until(lambda: not any(client_ports(pid, several.process.port) for pid in several.workers), "nobody is connected")
    with contextlib.ExitStack() as stack:
        for _ in range(4 * WORKERS):
            assert stack.enter_context(several.new_client()).get("/health").text == "ok"
        spread = [len(client_ports(pid, several.process.port)) for pid in several.workers]
    assert spread == [4] * WORKERS


def test_totals_are_exact_and_records_whole(several: Several) -> None:
    before = total(several)
    records = len(several.process.log_records())

    def send(count: int) -> None:
        with several.new_client() as client:
            for number in range(count):
                assert several.chat(f"question {number}", client, max_tokens=1).status_code == 200

    with ThreadPoolExecutor(10) as pool:
        list(pool.map(send, [REQUESTS // 10] * 10))
    until(lambda: len(several.process.log_records()) >= records + REQUESTS, "all records are written")
    lines = several.process.out.splitlines()
    ids = [json.loads(line)["request_id"] for line in lines]
    assert len(set(ids)) == len(ids)
    for _ in range(WORKERS):  # whoever answers
        with several.new_client() as client:
            page = client.get("/metrics").text
        found = [
            float(one) for one in re.findall(r'^warmlane_requests_total\{.*route="/v1/chat/c.* (\S+)$', page, re.M)
        ]
        assert sum(found) == before + REQUESTS
        (seconds,) = re.findall(r'^warmlane_request_seconds_count\{model="m",outcome="completed"\} (\S+)$', page, re.M)
        (every,) = re.findall(
            r'^warmlane_request_seconds_bucket\{le="\+Inf",model="m",outcome="completed"\} (\S+)$', page, re.M
        )
        assert float(seconds) == float(every) == before + REQUESTS
        assert re.findall(r"^warmlane_processes (\S+)$", page, re.M) == [f"{WORKERS}.0"]
        (started,) = re.findall(r"^process_start_time_seconds (\S+)$", page, re.M)
        assert float(started) == pytest.approx(start_of(several.process.pid), abs=0.02)
        assert page.count('warmlane_replica_state{replica="http') == 4 * len(several.replicas)
        assert re.findall(r"^warmlane_replica_cache_tokens\{.*\} (\S+)$", page, re.M) != []


def test_what_one_worker_sent_the_others_know(several: Several) -> None:
    """Turns of one conversation, each over a new connection and so through another worker."""
    history = "Some long beginning that is worth a cache. " * 200
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(several.new_client()) for _ in range(2 * WORKERS)]
        placed = []
        for turn, client in enumerate(clients):
            assert several.chat(history, client).status_code == 200
            decision = several.chat(history + f" And {turn}?", client)
            placed.append(decision.headers["x-warmlane-replica"])
            history += f" And {turn}? Because."
            time.sleep(0.15)  # until the others know
        assert len(set(placed)) == 1


def test_the_live_page_says_whose_decisions_it_shows(several: Several) -> None:
    with several.new_client() as client, client.stream("GET", "/warmlane/live") as answer:
        frame = json.loads(next(line for line in answer.iter_lines() if line).removeprefix("data: "))
    assert re.fullmatch(rf"worker [1-{WORKERS}] of {WORKERS}", frame["process"])


def test_a_drain_is_seen_by_all(several: Several) -> None:
    first, second = (one.url for one in several.replicas)
    admin_url = re.findall(r"admin listener on (\S+)", several.process.err)[0]
    with httpx.Client(base_url=admin_url, headers=ADMIN, trust_env=False, timeout=10.0) as admin:
        name = first.removeprefix("http://")
        assert admin.post(f"/warmlane/replicas/{name}/drain").json()["draining"] is True
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(several.new_client()) for _ in range(2 * WORKERS)]
            served = {several.chat(f"{n}", client).headers["x-warmlane-replica"] for n, client in enumerate(clients)}
        assert served == {second}
        starts = several.starts()
        shown = kill_who_showed(several)
        until(lambda: several.serves_whole(starts + 1), "another has started")
        assert total(several) >= shown
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(several.new_client()) for _ in range(4 * WORKERS)]
            served = {several.chat(f"{n}", client).headers["x-warmlane-replica"] for n, client in enumerate(clients)}
        assert served == {second}


def test_a_drain_that_ends_while_a_worker_starts_has_ended_for_it_too(several: Several) -> None:
    path = f"/warmlane/replicas/{several.replicas[0].url.removeprefix('http://')}"
    admin_url = re.findall(r"admin listener on (\S+)", several.process.err)[0]
    with httpx.Client(base_url=admin_url, headers=ADMIN, trust_env=False, timeout=10.0) as admin:
        assert admin.post(f"{path}/drain").json()["draining"] is True
    before, starts = several.workers, several.starts()
    os.kill(before[0], signal.SIGKILL)
    until(lambda: set(several.workers) - set(before), "another starts")
    with httpx.Client(base_url=admin_url, headers=ADMIN, trust_env=False, timeout=10.0) as admin:
        assert admin.post(f"{path}/undrain").json()["draining"] is False
    until(lambda: several.serves_whole(starts + 1), "it serves")
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(several.new_client()) for _ in range(4 * WORKERS)]
        until(lambda: not any(drained(one) for one in clients), "nobody keeps it drained", 10.0)


def drained(client: httpx.Client) -> list[str]:
    """As the worker knows it that has this connection."""
    return [one["replica"] for one in client.get("/warmlane/replicas").json()["replicas"] if one["draining"]]


def start_of(pid: int) -> float:
    families = ProcessCollector(pid=lambda: pid, registry=None).collect()
    return next(one.samples[0].value for one in families if one.name == "process_start_time_seconds")


def kill_who_showed(several: Several) -> float:
    """Kills a worker right after it has shown its totals; returns the chats that it showed."""
    with several.new_client() as client:
        several.chat("what is counted last", client)
        answer = client.get("/metrics")
        port = answer.extensions["network_stream"].get_extra_info("client_addr")[1]
        (victim,) = [pid for pid in several.workers if port in client_ports(pid, several.process.port)]
        os.kill(victim, signal.SIGKILL)
    return Metrics.read(answer.text).total("warmlane_requests_total", route="/v1/chat/completions")


def test_who_is_killed_loses_its_own_requests_alone(several: Several) -> None:
    counted, starts = total(several), several.starts()
    results: dict[int, str] = {}
    """By the port of the client."""
    began = threading.Barrier(2 * WORKERS + 1)

    def stream(number: int) -> None:
        question = {"role": "user", "content": f"{number}"}
        body = {"model": "m", "max_tokens": LONG, "stream": True, "messages": [question]}
        with several.new_client() as client, client.stream("POST", "/v1/chat/completions", json=body) as answer:
            port = answer.extensions["network_stream"].get_extra_info("client_addr")[1]
            pieces = answer.iter_text()
            text = next(pieces)
            began.wait(20)
            try:
                text += "".join(pieces)
                results[port] = "whole" if "[DONE]" in text else "cut"
            except httpx.HTTPError as error:
                results[port] = type(error).__name__

    threads = [threading.Thread(target=stream, args=[number]) for number in range(2 * WORKERS)]
    for thread in threads:
        thread.start()
    began.wait(20)
    victim = several.workers[-1]
    its_own = client_ports(victim, several.process.port)
    assert not results, "all of them still run"
    os.kill(victim, signal.SIGKILL)
    for thread in threads:
        thread.join(30)
    lost = {port for port, result in results.items() if result != "whole"}
    assert 0 < len(lost) < len(results) == 2 * WORKERS
    assert lost <= its_own, results
    until(lambda: several.serves_whole(starts + 1), "another has started")
    assert total(several) == counted + 2 * WORKERS - len(lost)
    assert re.search(r"worker \d ended \(SIGKILL\), another starts in", several.process.err)


def total(several: Several) -> float:
    """Chats that were counted, whoever is asked."""
    with several.new_client() as client:
        return Metrics.read(client.get("/metrics").text).total("warmlane_requests_total", route="/v1/chat/completions")


def test_running_requests_finish_and_then_all_are_gone(several: Several) -> None:
    pids = several.workers
    body = {"model": "m", "max_tokens": 100, "stream": True, "messages": [{"role": "user", "content": "long"}]}
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(several.new_client()) for _ in range(WORKERS)]
        answers = [stack.enter_context(one.stream("POST", "/v1/chat/completions", json=body)) for one in clients]
        several.process.send(signal.SIGTERM)
        for answer in answers:
            assert "[DONE]" in "".join(answer.iter_text())
    until(lambda: not several.process.running, "the gateway has ended")
    assert several.process.exit_code == 0
    assert [pid for pid in pids if is_alive(pid)] == []
    assert f"draining: {WORKERS} requests running" in several.process.err
    said = several.process.err.splitlines()
    assert len([line for line in said if "listening on" in line]) == 1
    assert not [line for line in said if "Traceback" in line or "Error" in line]


def test_no_worker_stays_when_the_parent_is_killed(tmp_path: Path, replicas: list[EmbeddedReplica]) -> None:
    one = Several(tmp_path, replicas)
    pids = one.workers
    assert len(pids) == 2
    os.kill(pids[0], signal.SIGSTOP)  # even one that hangs
    one.process.kill()
    until(lambda: not [pid for pid in pids if is_alive(pid)], "all have ended")
    one.client.close()


def test_a_second_signal_ends_all_at_once(tmp_path: Path, replicas: list[EmbeddedReplica]) -> None:
    one = Several(tmp_path, replicas, server={"drain_seconds": 60.0, "drain_delay_seconds": 0.0})
    body = {"model": "m", "max_tokens": 5_000, "stream": True, "messages": [{"role": "user", "content": "long"}]}
    with one.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        pieces = answer.iter_text()
        next(pieces)
        one.process.send(signal.SIGTERM)
        until(lambda: "draining: 1 request running" in one.process.err, "it drains")
        one.process.send(signal.SIGTERM)
        text = ""
        with contextlib.suppress(httpx.HTTPError):
            text = "".join(pieces)
        assert "[DONE]" not in text
    until(lambda: not one.process.running, "it has ended", 10.0)
    assert one.process.exit_code == 0
    one.client.close()


def refused(*arguments: str) -> tuple[int, list[str]]:
    ended = subprocess.run([*WARMLANE, "serve", *arguments], capture_output=True, text=True, timeout=30, check=False)
    return ended.returncode, ended.stderr.splitlines()


def test_a_configuration_that_cannot_be_used_is_said_once(tmp_path: Path) -> None:
    file = tmp_path / "warmlane.toml"
    file.write_text('[upstream]\nca_file = "absent.pem"\n')
    code, lines = refused("--config", str(file), "--replica", "http://127.0.0.1:9", "--workers", "2")
    assert code == 2
    (line,) = lines
    assert "absent.pem" in line


def test_a_port_that_is_taken_is_said_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, lines = refused("--port", str(port), "--replica", "http://127.0.0.1:9", "--workers", "2")
    assert code == 1
    (line,) = lines
    assert f"cannot listen on 127.0.0.1:{port}" in line
