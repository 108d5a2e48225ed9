"""`warmlane up` as a whole: what it keeps running and renews without a failed request; it leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway import operate
from gateway.cli import main
from gateway.dry_run import Unanswered
from tests.doctor.processes import findings
from tests.test_cli import refuses_connections
from tests.workers.test_launch import announced, is_running

ROOT = Path(__file__).parent.parent
WARMLANE = [sys.executable, "-c", "from gateway.cli import main; main()"]
SCRIPTED = str(ROOT / "tests" / "workers" / "scripted_vllm.py")
KEY = "an-admin-key-for-tests"
DEADLINE_SECONDS = 60.0
BODY = {"model": "embedded", "max_tokens": 8, "messages": [{"role": "user", "content": "Tell me about the sea. " * 50}]}


class Up:
    """A running `warmlane up` with an admin listener. `model` is the directory for the preset `cpu-tiny`; an empty one
    will do for replicas that live a script."""

    def __init__(
        self, directory: Path, *arguments: str, settings: str = "", model: Path | None = None, **environment: str
    ) -> None:
        lives = directory / "lives"
        lives.mkdir()
        (directory / ".cache").mkdir()
        (directory / ".cache" / "tiny-model").symlink_to(lives if model is None else model)
        (directory / "up.toml").write_text(
            f'[server]\nlog = "off"\n{settings}\n[admin]\nport = 0\nkey_env = "WARMLANE_ADMIN_KEY"\n'
        )
        self._files = directory / "out", directory / "err"
        with self._files[0].open("wb") as out, self._files[1].open("wb") as err:
            self.process = subprocess.Popen(
                [*WARMLANE, "up", "--port", "0", "--config", "up.toml", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=directory,
                env={
                    **os.environ,
                    "PYTHONPATH": str(ROOT),
                    "WARMLANE_ADMIN_KEY": KEY,
                    "SCRIPT_DIRECTORY": str(lives),
                    **environment,
                },
            )

    @property
    def out(self) -> str:
        return self._files[0].read_text()

    @property
    def err(self) -> str:
        return self._files[1].read_text()

    @property
    def url(self) -> str:
        return re.search(r"serves (\S+) in front of", self.out)[1]

    @property
    def admin_url(self) -> str:
        return re.search(r"admin listener on (\S+)", self.err)[1]

    def workers(self) -> dict[str, dict[str, Any]]:
        answer = self.ask("GET", "/warmlane/workers").raise_for_status()
        return {one["name"]: one for one in answer.json()["workers"]}

    def ask(self, method: str, path: str, **more: Any) -> httpx.Response:
        return httpx.request(
            method, f"{self.admin_url}{path}", headers={"authorization": f"Bearer {KEY}"}, trust_env=False, **more
        )

    def pids(self) -> list[int]:
        """Of all processes that scripted replicas have announced."""
        return [pid for line in self.err.splitlines() for pid in announced(line)]

    def wait_for(self, found: Callable[[], object], seconds: float = DEADLINE_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not found():
            assert self.process.poll() is None, f"ended with {self.process.returncode}: {self.err}"
            assert time.monotonic() < deadline, f"in vain: {self.out}{self.err}"
            time.sleep(0.02)

    def wait_greeted(self, seconds: float = DEADLINE_SECONDS) -> None:
        self.wait_for(lambda: "print(" in self.out, seconds)

    def stop(self, number: int = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.process.wait(DEADLINE_SECONDS)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Up]]:
    started: list[Up] = []

    def start_up(*arguments: str, **more: str) -> Up:
        directory = tmp_path / str(len(started))
        directory.mkdir()
        started.append(Up(directory, *arguments, **more))
        return started[-1]

    yield start_up
    for up in started:
        if up.process.poll() is None:
            up.process.terminate()
            up.process.wait(DEADLINE_SECONDS)
        assert not re.search("^Traceback", up.err, re.MULTILINE), up.err  # replicas' own have their name in front


@pytest.fixture
def scripted(start: Callable[..., Up]) -> Callable[..., Up]:
    """`warmlane up` with replicas that live a script."""

    def start_scripted(script: str, *arguments: str, **more: str) -> Up:
        return start("--preset", "cpu-tiny", "--vllm", SCRIPTED, *arguments, SCRIPT=script, **more)

    return start_scripted


def wait_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while left := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.02)


# -- kept running


def test_replicas_that_end_come_back_and_the_view_says_how_they_ended(start):
    up = start("--replicas", "2")
    up.wait_greeted()
    before = up.workers()
    assert [one["state"] for one in before.values()] == ["ready", "ready"]
    os.kill(before["replica-2"]["pid"], signal.SIGKILL)
    up.wait_for(lambda: up.workers()["replica-2"]["lives"] == 2)
    up.wait_for(lambda: up.workers()["replica-2"]["state"] == "ready")
    after = up.workers()
    assert after["replica-2"]["last_end"] == "replica-2 ended by itself: killed by SIGKILL"
    assert after["replica-2"]["replica"] == before["replica-2"]["replica"]
    assert after["replica-1"] == before["replica-1"]
    page = httpx.get(f"{up.url}/metrics").text
    assert 'warmlane_workers{state="ready"} 2.0' in page
    assert f'warmlane_worker_starts_total{{replica="{after["replica-2"]["replica"]}"}} 2.0' in page
    sources = {one["source"] for one in up.ask("GET", "/warmlane/replicas").json()["replicas"]}
    assert sources == {"worker"}
    assert up.stop() == 0


def test_when_no_replica_starts_the_gateway_gives_up_with_code_1(scripted):
    up = scripted("small-cache", settings="[workers]\nmax_failed_starts = 2\nfirst_back_off_seconds = 0.1")
    assert up.process.wait(DEADLINE_SECONDS) == 1
    said = [line for line in up.err.splitlines() if line.startswith("warmlane: ")]
    remedy = 'replica-1: the remedy is --max-model-len 3072 (instead of 16384); [workers] remedies = "apply" does it'
    assert f"warmlane: {remedy}" in said
    assert any("given up after 2 failed starts in a row" in line for line in said)
    assert said[-1] == "warmlane: every replica was given up, and there are no others: stopping"
    assert "tries again" not in up.err
    assert "does not answer" not in up.err
    assert "print(" not in up.out


def test_a_cache_too_small_to_start_is_healed_if_asked(scripted):
    up = scripted("small-cache", settings='[workers]\nremedies = "apply"\nfirst_back_off_seconds = 0.1')
    up.wait_greeted()
    assert up.workers()["replica-1"]["changes"] == ["--max-model-len 3072"]
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
    assert httpx.post(f"{up.url}/v1/chat/completions", json=chat).status_code == 200
    assert up.stop() == 0


# -- renewed


class Load:
    """Clients that ask again and again until told to stop; every answer that is not whole and good is kept."""

    def __init__(self, url: str, clients: int, model: str = "embedded") -> None:
        self._body = {**BODY, "model": model, "max_tokens": 30}
        self.failures: list[str] = []
        self.answers = 0
        self._url = url
        self._over = threading.Event()
        self._pool = ThreadPoolExecutor(clients)
        self._clients = [self._pool.submit(self._run, number) for number in range(clients)]

    def _run(self, number: int) -> None:
        with httpx.Client(timeout=DEADLINE_SECONDS, trust_env=False) as client:
            for turn in range(10**9):
                if self._over.is_set():
                    return
                content = f"Client {number} has {turn % 5} stories of the sea. " + "And so on. " * 200
                message = {"role": "user", "content": content}
                self._ask(client, {**self._body, "stream": number % 2 == 0, "messages": [message]})

    def _ask(self, client: httpx.Client, body: dict[str, Any]) -> None:
        try:
            answer = client.post(f"{self._url}/v1/chat/completions", json=body)
        except httpx.HTTPError as error:
            self.failures.append(repr(error))
            return
        is_whole = answer.text.endswith("data: [DONE]\n\n") if body["stream"] else "choices" in answer.text
        self.answers += 1
        if answer.status_code != 200 or not is_whole or '"error":' in answer.text:
            self.failures.append(f"{answer.status_code} {answer.text[-300:]}")

    def stop(self) -> None:
        self._over.set()
        for client in self._clients:
            client.result(DEADLINE_SECONDS)
        self._pool.shutdown()


def restart(up: Up, *arguments: str, seconds: float = DEADLINE_SECONDS) -> subprocess.CompletedProcess[str]:
    with restarting(up, *arguments) as command:
        return finished(command, seconds)


def restarting(up: Up, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*WARMLANE, "restart", "--url", up.admin_url, *arguments],
        env={**os.environ, "WARMLANE_ADMIN_KEY": KEY},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(command: subprocess.Popen[str], seconds: float = DEADLINE_SECONDS) -> subprocess.CompletedProcess[str]:
    try:
        out, err = command.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        command.kill()
        raise
    return subprocess.CompletedProcess(command.args, command.returncode, out, err)


def test_a_rolling_restart_under_load_fails_no_request(start):
    up = start("--replicas", "3")
    up.wait_greeted()
    before = up.workers()
    load = Load(up.url, 8)
    try:
        up.wait_for(lambda: load.answers > 50 or load.failures)
        with restarting(up, "--all") as command:
            assert command.stdout is not None
            first = command.stdout.readline().rstrip()
            assert command.poll() is None  # each line is seen when it is true, also through a pipe
            ended = finished(command)
        answered = load.answers
        up.wait_for(lambda: load.answers > answered + 20 or load.failures)
    finally:
        load.stop()
    assert (ended.returncode, ended.stderr) == (0, "")
    assert sorted([first, *ended.stdout.splitlines()]) == [f"replica-{number} is renewed" for number in (1, 2, 3)]
    after = up.workers()
    assert [one["lives"] for one in after.values()] == [2, 2, 2]
    assert not {one["pid"] for one in before.values()} & {one["pid"] for one in after.values()}
    assert load.failures == []
    assert up.stop() == 0


def test_the_least_cached_goes_first(start):
    up = start("--replicas", "2")
    up.wait_greeted()
    asked = httpx.post(f"{up.url}/v1/chat/completions", json=BODY)
    warm = asked.headers["x-warmlane-replica"]
    worth = {one["replica"]: one["cached_seconds"] for one in up.workers().values()}
    assert worth[warm] > 0
    view = up.ask("GET", "/warmlane/replicas").json()["replicas"]
    assert {one["replica"] for one in view if one["cached_seconds"] > 0} == {warm}
    names = sorted(up.workers(), key=lambda name: up.workers()[name]["cached_seconds"])
    ended = restart(up, "--all")
    assert ended.stdout.splitlines() == [f"{name} is renewed" for name in names]
    assert up.stop() == 0


def test_what_cannot_be_restarted_is_one_line_and_code_1(start):
    up = start("--replicas", "1")
    up.wait_greeted()
    for arguments, message in (
        (["--all"], "HTTP 409: Nobody stands in for replica-1: requests would fail."),
        (["replica-7"], "HTTP 404: No such replica is run here: replica-7. There are: replica-1."),
    ):
        ended = restart(up, *arguments)
        assert (ended.returncode, ended.stdout) == (1, "")
        assert ended.stderr.endswith(f"{message}\n")
    body = up.ask("POST", "/warmlane/workers/restart", content=b'{"alone": 1}')
    assert (body.status_code, body.json()["error"]["code"]) == (400, "invalid_restart")
    assert restart(up, "replica-1", "--alone").returncode == 0
    assert up.workers()["replica-1"]["lives"] == 2
    assert up.stop() == 0


@pytest.mark.parametrize("arguments", [[], ["replica-1", "--all"]])
def test_which_one_has_to_be_said(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["restart", "--url", "http://127.0.0.1:9", *arguments])
    assert (ended.value.code, capsys.readouterr().err) == (
        2,
        "warmlane: which one? Name a replica, or all of them with --all\n",
    )


def test_it_stops_at_a_replica_that_does_not_come_back(scripted):
    up = scripted("ok,crash", "--replicas", "2", settings="[workers]\nmax_failed_starts = 1")
    up.wait_greeted()
    ended = restart(up, "--all")
    assert ended.returncode == 1
    assert re.match(r"warmlane: stopped: replica-\d does not come back: .* exit code 3", ended.stderr)
    assert sorted(one["state"] for one in up.workers().values()) == ["given up", "ready"]
    assert httpx.get(f"{up.url}/ready").status_code == 200
    _, told = findings(up.url, "--seconds", "0.5")
    (given_up,) = [one for one in told["findings"] if one["code"] == "worker-given-up"]
    assert given_up["evidence"] == "it gave up 1 of the 2 replicas that it runs"
    assert up.stop() == 0


def test_a_restart_says_what_it_waits_for(scripted):
    up = scripted("slow", "--replicas", "2")
    up.wait_for(lambda: "admin listener on" in up.err and len(up.pids()) == 4)
    said: list[str] = []
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(
            operate.restart, up.admin_url, "replica-1", KEY, alone=False, say=said.append, say_seconds=0.1
        )
        up.wait_for(lambda: len(said) >= 2)
        assert set(said) == {"replica-1: waiting for it to get requests again; it is starting"}
        assert up.stop() == 0
        with pytest.raises(Unanswered):
            following.result(DEADLINE_SECONDS)


def test_a_replica_is_drained_by_the_name_that_logs_and_views_say(start, monkeypatch, capsys):
    up = start("--replicas", "2")
    up.wait_greeted()
    monkeypatch.setenv("WARMLANE_ADMIN_KEY", KEY)

    def ask(*arguments: str) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([*arguments, "--url", up.admin_url])
        return ended.value.code, *capsys.readouterr()

    urls = {name: one["replica"] for name, one in up.workers().items()}
    assert ask("drain", "replica-1")[:2] == (0, f"{urls['replica-1']}: draining, 0 requests there\n")
    view = {one["name"]: one["draining"] for one in up.ask("GET", "/warmlane/replicas").json()["replicas"]}
    assert view == {"replica-1": True, "replica-2": False}
    head, *rows = ask("replicas")[1].splitlines()
    assert head.split()[:3] == ["replica", "name", "source"]
    assert {(row.split()[0], row.split()[1]) for row in rows} == {(url, name) for name, url in urls.items()}
    assert ask("undrain", "replica-1")[0] == 0
    code, _, complaint = ask("drain", "replica-3")
    assert code == 1
    assert "No such replica: replica-3. There are: " in complaint
    assert all(f"{name} ({url})" in complaint for name, url in urls.items())
    assert up.stop() == 0


# -- the end


@pytest.mark.parametrize(
    ("script", "reached"),
    [
        ("slow", "pids "),
        ("crash", "again in 600 s"),
        ("ok", "is ready at"),
    ],
    ids=["while-starting", "while-it-waits-to-restart", "while-ready"],
)
def test_ctrl_c_ends_all_with_code_0_in_every_state(scripted, script, reached):
    up = scripted(script, settings="[workers]\nfirst_back_off_seconds = 600\nlongest_back_off_seconds = 600")
    up.wait_for(lambda: reached in up.err)
    assert up.stop() == 0
    wait_gone(up.pids())


def test_ctrl_c_in_the_middle_of_a_rolling_restart(scripted):
    up = scripted("ok,slow", "--replicas", "2")
    up.wait_greeted()
    assert up.ask("POST", "/warmlane/workers/restart").status_code == 202
    up.wait_for(lambda: "starting" in {one["state"] for one in up.workers().values()})
    again = up.ask("POST", "/warmlane/workers/restart", content=b"{}")
    assert (again.status_code, again.json()["error"]["code"]) == (409, "restart_under_way")
    assert up.stop() == 0
    wait_gone(up.pids())


def test_ctrl_c_while_a_replica_drains_for_its_restart(scripted):
    up = scripted("ok", "--replicas", "2", ANSWER_SECONDS="3", settings="drain_seconds = 0.5")
    up.wait_greeted()
    with ThreadPoolExecutor(2) as pool:
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
        asking = [pool.submit(httpx.post, f"{up.url}/v1/chat/completions", json=chat, timeout=30) for _ in range(2)]
        up.wait_for(lambda: {one["in_flight"] for one in up.ask("GET", "/warmlane/replicas").json()["replicas"]} == {1})
        assert up.ask("POST", "/warmlane/workers/restart").status_code == 202
        up.wait_for(lambda: "is drained for its restart: 1 requests there" in up.err)
        assert up.stop() == 0
        for one in asking:
            one.exception(DEADLINE_SECONDS)
    wait_gone(up.pids())


def test_a_second_ctrl_c_waits_for_nobody(scripted):
    up = scripted("stubborn", settings="[workers]\nstop_seconds = 600")
    up.wait_for(up.pids)
    admin = up.admin_url
    up.process.send_signal(signal.SIGINT)
    up.wait_for(lambda: refuses_connections(admin))  # the gateway's own part is over
    assert up.stop() == 0
    wait_gone(up.pids())


@pytest.mark.parametrize("script", ["ok", "slow", "stubborn"])
def test_sigkill_of_the_parent_leaves_nothing(scripted, script):
    up = scripted(script, "--replicas", "2")
    up.wait_for(lambda: len(up.pids()) == 4)
    assert all(map(is_running, up.pids()))
    up.process.kill()
    up.process.wait()
    wait_gone(up.pids())


def test_the_workers_need_the_admin_key(start):
    up = start("--replicas", "1")
    up.wait_greeted()
    for method, path in (("GET", "/warmlane/workers"), ("POST", "/warmlane/workers/restart")):
        assert httpx.request(method, f"{up.admin_url}{path}").status_code == 401
        assert httpx.request(method, f"{up.url}{path}").status_code == 404
    assert list(up.workers()) == ["replica-1"]
