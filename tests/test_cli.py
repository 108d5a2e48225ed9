"""The command as people run it: real processes, real sockets, what is printed taken at its word."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest

from gateway.cli import main
from gateway.core.settings import POLICY_NAMES
from tests.proxy.certificates import Authority
from workers import presets

WARMLANE = [sys.executable, "-c", "from gateway.cli import main; main()"]
START_SECONDS = 60.0
STOP_SECONDS = 15.0
BODY = {
    "model": "embedded",
    "max_tokens": 4,
    "messages": [{"role": "user", "content": "Tell me about the sea. " * 200}],
}


class Command:
    """A running `warmlane`; its output goes to files that can be read while it runs."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        directory.mkdir()
        self._out, self._err = directory / "out", directory / "err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen([*WARMLANE, *arguments], stdin=subprocess.DEVNULL, stdout=out, stderr=err)

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def wait_for(self, found: Callable[[], object]) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not found():
            assert self.process.poll() is None, f"ended with {self.process.returncode}: {self.err}"
            assert time.monotonic() < deadline, f"nothing in {START_SECONDS} s: {self.out}{self.err}"
            time.sleep(0.02)

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(STOP_SECONDS)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    started: list[Command] = []

    def start_command(*arguments: str) -> Command:
        started.append(Command(tmp_path / str(len(started)), *arguments))
        return started[-1]

    yield start_command
    for command in started:
        if command.process.poll() is None:
            command.process.terminate()
            command.process.wait(STOP_SECONDS)


def run(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*WARMLANE, *arguments], input=stdin, capture_output=True, timeout=START_SECONDS, check=False)


def checked_complaint(exit_code: int, code: object, out: str, err: str) -> str:
    assert (code, out) == (exit_code, "")
    (line,) = err.splitlines()
    assert line.startswith("warmlane: ")
    return line.removeprefix("warmlane: ")


@pytest.fixture
def here(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[object, str, str]]:
    """Runs a command in this process: exit code, stdout, stderr."""

    def run_here(*arguments: str) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        return ended.value.code, *capsys.readouterr()

    return run_here


@pytest.fixture
def complaint(here) -> Callable[..., str]:
    """The one line on stderr of a command that is refused with this exit code."""

    def complain(exit_code: int, *arguments: str) -> str:
        return checked_complaint(exit_code, *here(*arguments))

    return complain


def refuses_connections(url: str) -> bool:
    host, port = httpx.URL(url).host, httpx.URL(url).port
    with socket.socket() as one:
        return one.connect_ex((host, port)) != 0


def processes_with(text: str) -> list[str]:
    """Command lines of living processes that hold `text`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
        except OSError:
            continue  # it ended meanwhile
        if text in line:
            found.append(line)
    return found


# -- usage


def bad_host(host: str) -> str:
    return f"--host {host}: not an IP address or host name"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fly"], "No such command 'fly'."),
        (["serve", "--zzz"], "No such option: --zzz"),
        (["serve"], "no replicas: give --replica URL, or [[replicas]] or [discovery] in the file"),
        (["serve", "--replica", "gpu-7"], "replica URL 'gpu-7': expected http://HOST[:PORT] or https://HOST[:PORT]"),
        (["serve", "--replica", "http://a", "--replica", "http://a/"], "replicas: http://a:80 is listed twice"),
        (
            ["serve", "--replica", "http://a", "--policy", "best"],
            f"unknown policy 'best'; policies: {', '.join(POLICY_NAMES)}",
        ),
        (["serve", "--config", "/absent.toml"], "/absent.toml: No such file or directory"),
        (["replica", "--preset", "embedded", "--host", "300.1.1.1"], bad_host("300.1.1.1")),
        (["serve", "--replica", "http://a", "--host", "::g"], bad_host("::g")),
        (["up", "--host", "a b"], bad_host("a b")),
        (["up", "--preset", "embedded", "--", "foo"], "'foo' is not a flag: behind -- come flags of the engine"),
        (["up", "--preset", "abacus"], f"unknown preset 'abacus'; presets: {', '.join(presets.names())}"),
        (
            ["replica", "--preset", "embedded", "--register", "http://:secret@r"],
            "--register: begins with redis://, rediss:// or unix://",
        ),
        (
            ["replica", "--preset", "embedded", "--register", "redis://r"],
            "--register: gateways take only what the fleet's secret made; set $WARMLANE_REDIS_SECRET",
        ),
        (["route", "--url", "http://127.0.0.1:1", "/absent.json"], "/absent.json: No such file or directory"),
    ],
)
def test_wrong_usage_is_one_clear_line_and_exit_code_2(complaint, arguments, message):
    assert complaint(2, *arguments) == message


def test_a_port_out_of_range_is_wrong_usage(complaint):
    assert "--port" in complaint(2, "serve", "--replica", "http://a", "--port", "65536")


def test_an_unknown_key_is_named_with_its_path(complaint, tmp_path):
    file = tmp_path / "warmlane.toml"
    file.write_text("[routing]\npolcy = 'random'\n")
    assert complaint(2, "serve", "--config", str(file)) == f"{file}: unknown key routing.polcy; did you mean policy?"


def test_help_names_every_command_and_imports_nothing_heavy(here):
    code, out, _ = here("--help")
    assert code == 0
    for command in ("serve", "up", "route", "presets", "replica", "version"):
        assert re.search(rf"^  {command} ", out, re.MULTILINE)
    heavy = "{'fastapi', 'httpx', 'uvicorn', 'uvloop', 'msgspec', 'prometheus_client'} & set(sys.modules)"
    probe = [sys.executable, "-c", f"import sys, gateway.cli; print({heavy})"]
    assert subprocess.run(probe, capture_output=True, check=True, text=True).stdout == "set()\n"


@pytest.mark.parametrize("argument", ["version", "--version"])
def test_version(here, argument):
    code, out, err = here(argument)
    assert (code, err) == (0, "")
    assert re.fullmatch(r"warmlane \d+\.\d+\.\d+\S*\n", out)


@pytest.mark.parametrize("arguments", [[], ["key"]])
def test_a_command_that_says_too_little_prints_its_help(here, arguments):
    code, out, err = here(*arguments)
    assert (code, out) == (2, "")
    assert err == here(*arguments, "--help")[1]
    assert "Commands:" in err


ASKING = [["route", os.devnull], ["replicas"], ["drain", "a:1"], ["undrain", "a:1"], ["restart", "a:1"]]


@pytest.mark.parametrize("arguments", ASKING, ids=lambda one: one[0])
def test_an_admin_key_that_cannot_be_one_is_named_by_its_variable(complaint, monkeypatch, arguments):
    for value, message in (
        ("", "$ADMIN is empty"),
        (" ", "$ADMIN is empty"),
        ("k\u00e9y", "$ADMIN: a key has letters"),
    ):
        monkeypatch.setenv("ADMIN", value)
        assert complaint(2, *arguments, "--url", "http://127.0.0.1:1", "--key-env", "ADMIN").startswith(message)


def test_presets_are_listed_for_people_and_for_programs(here):
    _, listed, _ = here("presets")
    parsed = json.loads(here("presets", "--json")[1])
    assert list(parsed) == presets.names()
    assert all(name in listed for name in parsed)
    assert parsed["embedded"]["program"] == "embedded"


def test_a_dry_run_of_a_replica_prints_its_command_line(here):
    preset = "gpt-oss-120b-h100-80-x1"
    code, out, _ = here("replica", "--preset", preset, "--port", "8123", "--dry-run", "--", "--seed", "7")
    assert code == 0
    words = shlex.split(out)
    at = words.index("serve")
    assert words[at + 1] == "openai/gpt-oss-120b"
    assert words[-2:] == ["--seed", "7"]
    assert words[words.index("--port") + 1] == "8123"
    assert "--enable-prefix-caching" in words


def test_a_dry_run_of_up_prints_every_replica_with_the_users_flags(here):
    arguments = [
        "--preset",
        "gpt-oss-120b-h200-141-x1",
        "--replicas",
        "2",
        "--model",
        "org/m",
        "--vllm-version",
        "0.32.0",
    ]
    code, out, err = here("up", "--dry-run", *arguments, "--", "--max-num-seqs", "8")
    assert code == 0
    first, second = map(shlex.split, out.splitlines())
    assert [line[0] for line in (first, second)] == ["CUDA_VISIBLE_DEVICES=0", "CUDA_VISIBLE_DEVICES=1"]
    ports = set()
    for words in (first, second):
        assert words[words.index("serve") + 1] == "org/m"
        assert words[-2:] == ["--max-num-seqs", "8"]
        port = words[words.index("--port") + 1]
        assert f"-kv-events-{port}" in " ".join(words)
        ports.add(port)
    assert len(ports) == 2
    assert "warmlane: for vLLM 0.32.0 (told)\n" in err


# -- up


def printed_curl(out: str) -> str:
    (line,) = re.findall(r"^curl .*$", out, re.MULTILINE)
    return line


def printed_python(out: str) -> str:
    (code,) = re.findall(r"^from openai import OpenAI\n(?:\S.*\n)+", out, re.MULTILINE)
    return code


def test_up_prints_calls_that_work_as_printed_and_ctrl_c_leaves_nothing_behind(start):
    up = start("up", "--port", "0")
    up.wait_for(lambda: "print(" in up.out)
    gateway = re.search(r"serves (\S+) in front of (\S+), (\S+)\. ", up.out)
    assert gateway is not None
    url, *replicas = gateway.groups()

    command = shlex.split(printed_curl(up.out))
    assert command[:2] == ["curl", f"{url}/v1/chat/completions"]
    header = dict([command[command.index("-H") + 1].split(": ")])
    body = command[command.index("-d") + 1]
    answers = [httpx.post(command[1], content=body, headers=header).raise_for_status().content]
    if shutil.which("curl"):  # a fresh machine may have none
        ended = subprocess.run(["bash", "-c", printed_curl(up.out)], capture_output=True, timeout=60, check=True)
        answers.append(ended.stdout)
    for answer in answers:
        assert json.loads(answer)["choices"][0]["message"]["content"]

    code = printed_python(up.out)
    assert f'base_url="{url}/v1"' in code
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=True)
    assert len(ended.stdout) > 2

    models = httpx.get(f"{url}/v1/models").json()["data"]
    assert [model["id"] for model in models] == ["embedded"]
    assert all(processes_with(f"--port {httpx.URL(replica).port}") for replica in replicas)

    assert up.stop(signal.SIGINT) == 0
    assert "Traceback" not in up.err
    for address in (url, *replicas):
        assert refuses_connections(address)
    assert not any(processes_with(f"--port {httpx.URL(replica).port}") for replica in replicas)
    records = [json.loads(line) for line in up.out.splitlines() if line.startswith('{"')]
    assert len(records) == len(answers) + 1
    assert {record["outcome"] for record in records} == {"completed"}


def test_up_starts_as_many_replicas_as_asked_and_beats_the_file(start, tmp_path):
    file = tmp_path / "warmlane.toml"
    file.write_text('[server]\nport = 1\nlog = "off"\n[routing]\npolicy = "round-robin"\n')
    up = start("up", "--replicas", "3", "--config", str(file), "--port", "0")
    up.wait_for(lambda: "print(" in up.out)
    url = re.search(r"serves (\S+) in", up.out)[1]
    ready = 'warmlane_replica_available{replica="http'
    up.wait_for(lambda: httpx.get(f"{url}/metrics").text.count(ready) == 3)
    used = {httpx.post(f"{url}/v1/chat/completions", json=BODY).headers["x-warmlane-replica"] for _ in range(6)}
    assert len(used) == 3
    assert up.stop() == 0
    assert '{"' not in up.out.partition("print(")[2], "the log is off"


def test_standard_output_of_up_can_be_replayed_as_it_is(start, tmp_path):
    file = tmp_path / "warmlane.toml"
    file.write_text("[server]\nlog_blocks = true\n")
    up = start("up", "--config", str(file), "--port", "0")
    up.wait_for(lambda: "print(" in up.out)
    url = re.search(r"serves (\S+) in", up.out)[1]
    for _ in range(3):
        assert httpx.post(f"{url}/v1/chat/completions", json=BODY).status_code == 200
    assert up.stop() == 0
    log = tmp_path / "log.jsonl"
    log.write_text(up.out)
    replayed = run("replay", "--trace", str(log), "--replicas", "2", "--load", "recorded", "--policy", "cache-cost")
    assert (replayed.returncode, replayed.stdout.split()[0]) == (0, b"3"), replayed.stderr
    assert b"lines of the log left out because they are not JSON objects: " in replayed.stderr
    assert b"no prefixes" not in replayed.stderr


def test_sigterm_while_replicas_start_ends_them_too(start):
    up = start("up", "--port", "0", "--replicas", "2")
    up.wait_for(lambda: processes_with("workers.sim_replica") and children(up.process.pid))
    ours = children(up.process.pid)
    assert up.stop() == 0
    assert not [pid for pid in ours if Path(f"/proc/{pid}").exists()]
    assert "Traceback" not in up.err


def children(pid: int) -> list[int]:
    """Processes whose parent is `pid`, by their ids."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            after_name = entry.read_text().rpartition(") ")[2].split()
        except OSError:
            continue
        if int(after_name[1]) == pid:
            found.append(int(entry.parent.name))
    return found


def test_a_killed_replica_is_reported_and_the_gateway_goes_on(start):
    up = start("up", "--port", "0")
    up.wait_for(lambda: "print(" in up.out)
    url, first = re.search(r"serves (\S+) in front of (\S+),", up.out).groups()
    port = httpx.URL(first).port
    (victim,) = [pid for pid in children(up.process.pid) if f"--port\0{port}" in cmdline(pid)]
    os.kill(victim, signal.SIGKILL)
    up.wait_for(lambda: "warmlane: replica-1 ended by itself: killed by SIGKILL; again in 1 s" in up.err)
    up.wait_for(lambda: httpx.post(f"{url}/v1/chat/completions", json=BODY).status_code == 200)
    assert httpx.get(f"{url}/ready").status_code == 200
    up.wait_for(lambda: up.err.count("replica-1 is ready at ") == 2)
    up.wait_for(lambda: httpx.get(first + "/health").status_code == 200)
    assert up.stop() == 0


def test_the_first_ctrl_c_lets_a_request_finish_and_the_second_does_not(start):
    up = start("up", "--port", "0", "--replicas", "1")
    up.wait_for(lambda: "print(" in up.out)
    url, replica = re.search(r"serves (\S+) in front of (\S+)\. ", up.out).groups()
    endless = {**BODY, "max_tokens": 100_000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=endless, timeout=STOP_SECONDS) as answer:
        events = answer.iter_lines()
        next(events)
        up.process.send_signal(signal.SIGINT)
        up.wait_for(lambda: refuses_connections(url))
        assert "warmlane: draining: 1 request running, up to 31 s; again to stop now" in up.err.splitlines()
        for _ in range(50):  # still running, past what may have been under way
            next(events)
        assert up.stop(signal.SIGINT) == 0
    assert refuses_connections(replica)


def cmdline(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode()


@pytest.mark.parametrize("command", [["serve", "--replica", "http://127.0.0.1:9"], ["up"]])
def test_a_port_that_is_taken_is_one_line_and_exit_code_1(command):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = run(*command, "--port", str(port))
    line = checked_complaint(1, ended.returncode, ended.stdout.decode(), ended.stderr.decode())
    hint = "see --host and --port, or [server] host and port"
    assert line == f"cannot listen on 127.0.0.1:{port}: Address already in use; {hint}"


def test_an_admin_port_that_is_taken_says_whose_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("ADMIN", "k" * 40)
    file = tmp_path / "warmlane.toml"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        file.write_text(f'[admin]\nport = {port}\nkey_env = "ADMIN"\n')
        ended = run("serve", "--replica", "http://127.0.0.1:9", "--port", "0", "--config", str(file))
    line = checked_complaint(1, ended.returncode, ended.stdout.decode(), ended.stderr.decode())
    assert line == f"cannot listen on 127.0.0.1:{port}: Address already in use; see [admin] host and port"


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("command", [["serve", "--replica", "http://127.0.0.1:9"], ["up"]])
def test_two_listeners_on_one_port_are_a_wrong_configuration(complaint, command, host, tmp_path):
    file = tmp_path / "warmlane.toml"
    file.write_text('[admin]\nport = 8123\nkey_env = "ADMIN"\n')
    line = complaint(2, *command, "--config", str(file), "--host", host, "--port", "8123")
    assert line == "admin.port: 8123 is the port of the gateway itself (server.port, --port) already"


# -- TLS


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("private"), "private")


@pytest.mark.parametrize("command", [["serve", "--replica", "http://127.0.0.1:9"], ["up"]])
def test_tls_files_that_cannot_be_used_are_a_wrong_configuration(command, authority, tmp_path):
    pair, other = authority.issue("one", "IP:127.0.0.1"), authority.issue("other", "IP:127.0.0.1")
    cases = (
        ('[server]\ntls_certificate = "/absent.pem"\n', "server.tls_certificate /absent.pem: No such file"),
        (f'[server]\ntls_certificate = "{pair.certificate}"\ntls_key = "{other.key}"\n', "key does not match"),
        ('[upstream]\nca_file = "/absent.pem"\n', "upstream.ca_file /absent.pem: No such file or directory"),
    )
    for text, message in cases:
        file = tmp_path / "warmlane.toml"
        file.write_text(text)
        ended = run(*command, "--port", "0", "--config", str(file))
        assert message in checked_complaint(2, ended.returncode, ended.stdout.decode(), ended.stderr.decode())


def test_up_greets_also_with_a_private_certificate(start, authority, tmp_path):
    pair = authority.issue("up", "DNS:elsewhere.test")
    file = tmp_path / "warmlane.toml"
    file.write_text(f'[server]\ntls_certificate = "{pair.certificate}"\ntls_key = "{pair.key}"\n')
    up = start("up", "--port", "0", "--replicas", "1", "--config", str(file))
    up.wait_for(lambda: "print(" in up.out)
    assert "curl https://127.0.0.1:" in up.out
    assert "--cacert" in up.out
    assert up.stop() == 0


# -- who can reach it


@pytest.mark.parametrize(("host", "warned"), [("0.0.0.0", True), ("127.0.0.1", False)])
def test_a_gateway_open_to_all_says_so(start, host, warned):
    gateway = start("serve", "--replica", "http://127.0.0.1:9", "--host", host, "--port", "0")
    gateway.wait_for(lambda: "listening on http" in gateway.err)
    url = re.search(r"listening on (http\S+), policy", gateway.err)[1]
    assert httpx.URL(url).host == host
    assert httpx.get(f"{url}/health").text == "ok"
    line = f"warmlane: listening on {host} without keys: whoever reaches it may use the replicas"
    assert gateway.err.splitlines().count(line) == warned
    assert gateway.stop() == 0


# -- serve and route


@pytest.fixture
def replica(start) -> str:
    """URL of an embedded replica that runs by itself."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = start("replica", "--preset", "embedded", "--port", str(port))
    command.wait_for(lambda: "is ready" in command.err)
    return f"http://127.0.0.1:{port}"


def test_serve_stands_in_front_of_a_replica_and_route_explains(start, replica, tmp_path, here, complaint):
    gateway = start("serve", "--replica", replica, "--port", "0", "--policy", "least-work")
    gateway.wait_for(lambda: "listening on" in gateway.err)
    url = re.search(r"listening on (\S+), policy least-work", gateway.err)[1]
    gateway.wait_for(lambda: httpx.get(f"{url}/ready").status_code == 200)
    answer = httpx.post(f"{url}/v1/chat/completions", json=BODY)
    assert answer.headers["x-warmlane-replica"] == replica

    body = json.dumps(BODY).encode()
    raw = run("route", "--url", url, "--json", stdin=body)
    decision = json.loads(raw.stdout)
    assert (raw.returncode, decision["policy"], decision["replica"]) == (0, "least-work", replica)
    assert decision["ranking"][0]["prompt_tokens"] > 100

    file = tmp_path / "body.json"
    file.write_bytes(body)
    code, table, _ = here("route", "--url", url, str(file))
    assert code == 0
    title, why, _, head, row = table.splitlines()
    assert why == decision["why"]
    assert title == f"policy least-work: {decision['reason']} -> {replica}"
    assert head.split()[:2] == ["replica", "cost"]
    assert set(decision["ranking"][0]["parts"]) <= set(head.split())
    assert row.startswith(replica)

    assert complaint(1, "route", "--url", url, os.devnull).startswith(f"{url}: HTTP 400: ")
    assert gateway.stop() == 0
    (record,) = [json.loads(line) for line in gateway.out.splitlines()]
    assert record["replica"] == replica
    assert "sea" not in gateway.out


def test_route_says_when_nobody_answers(complaint):
    assert complaint(1, "route", "--url", "http://127.0.0.1:1", os.devnull).startswith("http://127.0.0.1:1: ")


@pytest.mark.parametrize("answer", [b"[1, 2]", b"null", b"SSH", b"[" * 300_000], ids=["list", "null", "text", "deep"])
def test_route_and_replicas_say_where_no_gateway_answers(answer, complaint):
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.send_response(200)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_POST = do_GET

        def log_message(self, *arguments: object) -> None:
            """Not on the test's stderr."""

    with HTTPServer(("127.0.0.1", 0), Other) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        try:
            assert "not an answer of a Warmlane gateway" in complaint(1, "route", "--url", url, os.devnull)
            assert "not an answer of a Warmlane gateway" in complaint(1, "replicas", "--url", url)
        finally:
            server.shutdown()
            thread.join()


# -- keys


def test_a_new_key_opens_the_gateway_that_has_its_entry(start, replica, tmp_path, here, monkeypatch):
    code, out, _ = here("key", "new", "alice", "--tenant", "acme")
    assert code == 0
    secret, entry = out.split()[0], out[out.index("[[keys]]") :]
    keys = tmp_path / "keys.toml"
    keys.write_text(entry)
    file = tmp_path / "warmlane.toml"
    file.write_text(f'[server]\nport = 0\n[auth]\nrequired = true\nkeys_file = "{keys}"\n')
    gateway = start("serve", "--replica", replica, "--config", str(file))
    gateway.wait_for(lambda: "listening on" in gateway.err)
    url = re.search(r"listening on (\S+),", gateway.err)[1]
    gateway.wait_for(lambda: httpx.get(f"{url}/ready").status_code == 200)
    assert httpx.post(f"{url}/v1/chat/completions", json=BODY).status_code == 401
    bearer = {"Authorization": f"Bearer {secret}"}
    assert httpx.post(f"{url}/v1/chat/completions", json=BODY, headers=bearer).status_code == 200

    body = tmp_path / "body.json"
    body.write_text(json.dumps(BODY))
    assert here("route", "--url", url, str(body))[0] == 1
    monkeypatch.setenv("WARMLANE_API_KEY", secret)
    assert here("route", "--url", url, "--key-env", "WARMLANE_API_KEY", str(body))[0] == 0

    keys.write_text("[[keys]")
    gateway.wait_for(lambda: f"{keys}: not TOML" in gateway.err)
    assert httpx.get(f"{url}/v1/models", headers=bearer).status_code == 200
    keys.write_text(entry.replace('"alice"', '"alice-2"'))
    gateway.wait_for(lambda: f"{keys} has changed: 1 keys now" in gateway.err)
    assert gateway.stop() == 0
    records = [json.loads(line) for line in gateway.out.splitlines()]
    assert ("alice", "acme") in {(record["key"], record["tenant"]) for record in records}
    assert secret not in gateway.out + gateway.err


def test_a_new_key_as_json(here):
    made = json.loads(here("key", "new", "bob", "--json")[1])
    assert made["key"].startswith("wl-")
    assert made["entry"].startswith('[[keys]]\nname = "bob"\n')


def test_a_key_needs_a_name_that_can_stand_in_logs(complaint):
    assert (
        complaint(2, "key", "new", "two words")
        == "key: name: expected 1 to 64 letters, digits and _ . : @ / -, no spaces"
    )


@pytest.mark.parametrize("command", ["serve", "up"])
def test_required_keys_that_are_not_there_are_one_line_and_exit_code_2(complaint, tmp_path, command):
    file = tmp_path / "warmlane.toml"
    file.write_text('[server]\nport = 0\n[auth]\nrequired = true\n[[replicas]]\nurl = "http://a"\n')
    message = "auth.required is true, but there are no keys: set auth.keys_file or WARMLANE_API_KEYS"
    assert complaint(2, command, "--config", str(file)) == message


def test_up_says_how_to_call_it_with_a_key(start, monkeypatch):
    monkeypatch.setenv("WARMLANE_API_KEYS", "alice=sk-alice")
    up = start("up", "--port", "0")
    up.wait_for(lambda: "print(" in up.out)
    assert '-H "Authorization: Bearer $KEY"' in printed_curl(up.out)
    assert 'api_key="KEY"' in printed_python(up.out)
    url = re.search(r"serves (\S+) in", up.out)[1]
    for secret, status in (("sk-alice", 200), ("KEY", 401)):
        answer = httpx.post(f"{url}/v1/chat/completions", json=BODY, headers={"x-api-key": secret})
        assert answer.status_code == status
    assert up.stop() == 0
    assert "sk-alice" not in up.out + up.err
