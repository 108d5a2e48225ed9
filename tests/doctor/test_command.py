"""`warmlane doctor` as a program, in front of embedded replicas and a gateway, over real sockets."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.doctor.processes import PATIENCE_SECONDS, WARMLANE, codes, doctor, findings, gateway, replica
from tests.proxy.certificates import Authority

QUICK = ("--decode-rate", "1000", "--dev-mode")


@pytest.fixture(scope="module")
def replicas() -> Iterator[tuple[str, str]]:
    with replica(*QUICK) as first, replica(*QUICK) as second:
        yield first, second


@pytest.fixture(scope="module")
def front(replicas: tuple[str, str]) -> Iterator[str]:
    with gateway("--replica", replicas[0], "--replica", replicas[1]) as url:
        wait_until(lambda: httpx.get(f"{url}/metrics", trust_env=False).text.count('state="up"} 1.0') == 2)
        yield url


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def ask(url: str, text: str) -> None:
    body = {"model": "embedded", "messages": [{"role": "user", "content": text}], "max_tokens": 2}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE_SECONDS, trust_env=False)
    assert answer.status_code == 200


class Traffic:
    """Requests, one after the other, as long as the block lasts; at least one."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._send)

    def _send(self) -> None:
        number = 0
        while not (self._over.is_set() and number):
            ask(self._url, f"Question {number % 3}: " + "word " * 400)
            number += 1

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def test_replicas_are_found_through_the_gateway_and_nothing_is_wrong(front: str, replicas: tuple[str, str]) -> None:
    with Traffic(front):
        code, told = findings(front, "--seconds", "1")
    assert code == 0
    assert told["worst"] == "note"
    assert codes(told) == {("kv-events-off", one) for one in replicas}
    (seen,) = told["gateways"]
    assert (seen["url"], sorted(seen["replicas"])) == (front, sorted(replicas))
    assert {one["url"] for one in told["replicas"]} == set(replicas)
    assert all((one["version"], one["models"]) == ("0.32.0", ["embedded"]) for one in told["replicas"])
    assert any(one["prompt_tokens_per_second"] for one in told["replicas"])


def test_traffic_past_the_gateway_is_noticed(front: str, replicas: tuple[str, str]) -> None:
    with Traffic(replicas[1]):
        _, told = findings(front, "--seconds", "2")
    assert ("bypassed", replicas[1]) in codes(told)
    assert ("bypassed", replicas[0]) not in codes(told)


def test_an_error_is_exit_code_1_and_stands_in_the_table(replicas: tuple[str, str]) -> None:
    ended = doctor(replicas[0], "http://127.0.0.1:1", "--seconds", "0.5")
    assert (ended.returncode, ended.stderr) == (1, "")
    lines = ended.stdout.splitlines()
    assert any(line.split()[0] == "error" and "http://127.0.0.1:1" in line for line in lines if line.strip())
    assert any("unreachable" in line for line in lines)
    assert "docs/troubleshooting.md#unreachable" in ended.stdout
    assert lines[-1].startswith("1 error, 1 note.")


ADMIN_KEY = "a-key-for-administrators"


def test_a_gateway_without_a_replica_is_an_error_and_its_admin_listener_is_told_from_it(tmp_path: Path) -> None:
    key_file, config = tmp_path / "key", tmp_path / "warmlane.toml"
    key_file.write_text(ADMIN_KEY)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config.write_text(f'[admin]\nport = {port}\nkey_file = "{key_file}"\nallow = ["10.0.0.0/8"]\n')
    with gateway("--config", str(config)) as url:
        code, told = findings(url, "--seconds", "0.5")
        assert (code, codes(told)) == (1, {("no-replica", url)})
        assert told["findings"][0]["evidence"] == "/ready: HTTP 503; 0 replicas"
        admin = f"http://127.0.0.1:{port}"
        for environment in ({}, {"WARMLANE_ADMIN_KEY": ADMIN_KEY}):
            code, told = findings(admin, "--seconds", "0.5", **environment)
            assert (code, codes(told)) == (1, {("unreachable", admin)})
            assert "an admin listener" in told["findings"][0]["change"]


def test_what_is_neither_an_engine_nor_a_gateway_is_called_so() -> None:
    class Nothing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Nothing) as server:
        threading.Thread(target=server.serve_forever).start()
        _, told = findings(f"http://127.0.0.1:{server.server_port}", "--seconds", "0.5")
        server.shutdown()
    (finding,) = [one for one in told["findings"] if one["code"] == "unreachable"]
    assert "neither an engine nor a gateway" in finding["change"]
    assert finding["flags"] == []


def test_replicas_that_differ_are_compared() -> None:
    with replica("--block-size", "32", "--max-model-len", "4096") as other, replica() as one:
        _, told = findings(one, other, "--seconds", "0.5")
    assert {"different-block-size", "different-context"} <= {code for code, _ in codes(told)}


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ((), "Missing argument"),
        (("ftp://here",), "expected http://HOST[:PORT]"),
        (("http://name:secret@here",), "without path, query or user"),
        (("http://here", "--seconds", "0"), "--seconds"),
        (("http://here", "--key-env", "NOT_THERE"), "$NOT_THERE is not set"),
        (("http://here", "--key-env", "SPLIT"), "$SPLIT: a key has letters"),
        (("http://here", "--admin-key-env", "NOT_THERE"), "--admin-key-env: $NOT_THERE is not set, or empty"),
    ],
)
def test_wrong_usage_is_exit_code_2_and_one_line(words: tuple[str, ...], complaint: str) -> None:
    ended = doctor(*words, SPLIT="s3cret\r\nx")
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
    assert complaint in ended.stderr
    assert "s3cret" not in ended.stderr


def test_watching_prints_what_comes_and_what_goes_until_it_is_interrupted() -> None:
    with replica(*QUICK) as url, Watching(url, "--seconds", "0.5") as watching:
        watching.read_until("No prompts came")
        httpx.post(f"{url}/sleep", trust_env=False)
        watching.read_until(f" + error asleep: {url}: ")
        httpx.post(f"{url}/wake_up", trust_env=False)
        watching.read_until(f" - error asleep: {url}")
        assert watching.interrupt() == 0


def test_watching_as_json_prints_a_line_for_each_change_and_ends_with_the_last_ones_code() -> None:
    with replica(*QUICK) as url, Watching(url, "--seconds", "0.5", "--json") as watching:
        first = json.loads(watching.read_until("{"))
        httpx.post(f"{url}/sleep", trust_env=False)
        second = json.loads(watching.read_until("{"))
        assert codes(second) - codes(first) == {("asleep", url)}
        assert watching.interrupt() == 1


class Watching:
    """`warmlane doctor --watch`, read line by line."""

    def __init__(self, *words: str) -> None:
        command = [*WARMLANE, "doctor", *words, "--watch"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._output = self._process.stdout

    def read_until(self, text: str) -> str:
        return next(line for line in self._output if text in line)

    def interrupt(self) -> int:
        self._process.send_signal(signal.SIGINT)
        _, complaints = self._process.communicate(timeout=PATIENCE_SECONDS)
        assert complaints == ""
        return self._process.returncode

    def __enter__(self) -> Watching:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()


def test_a_gateway_with_tls_and_keys_is_asked_with_the_key_of_a_client(
    tmp_path: Path, replicas: tuple[str, str]
) -> None:
    authority = Authority(tmp_path, "authority")
    pair = authority.issue("gateway", "IP:127.0.0.1")
    config = tmp_path / "warmlane.toml"
    config.write_text(f"""
[server]
tls_certificate = "{pair.certificate}"
tls_key = "{pair.key}"
[auth]
keys_file = "keys.toml"
[[replicas]]
url = "{replicas[0]}"
""")
    made = subprocess.run([*WARMLANE, "key", "new", "ops", "--json"], capture_output=True, check=True)
    key: dict[str, Any] = json.loads(made.stdout)
    (tmp_path / "keys.toml").write_text(key["entry"])
    trust = {"SSL_CERT_FILE": str(authority.file)}
    with gateway("--config", str(config)) as url:
        code, told = findings(url, "--seconds", "0.5", **trust)
        assert (code, codes(told)) == (1, {("unreachable", url)})
        assert "--gateway-key-env" in told["findings"][0]["change"]
        code, told = findings(url, "--seconds", "0.5", "--gateway-key-env", "OURS", OURS=key["key"], **trust)
        assert code == 0
        assert [one["url"] for one in told["replicas"]] == [replicas[0]]
        _, told = findings(url, "--seconds", "0.5", SSL_CERT_FILE="/dev/null")
        assert "certificate" in told["findings"][0]["evidence"]
        assert "SSL_CERT_FILE" in told["findings"][0]["change"]
