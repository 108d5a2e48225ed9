"""`deploy/verify.sh` against a real gateway and its replicas, and against servers that answer wrongly.

It needs curl, which not every machine has (make test-deploy)."""

from __future__ import annotations

import http.server
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from tests.deploy.host import DEPLOY, run

pytestmark = pytest.mark.deploy

SECONDS = 60.0
CHECKS = ["it lives", "it lists models", "it answers", "it streams"]
MODELS = '{"object":"list","data":[{"id":"m","object":"model","permission":[{"id":"modelperm-1"}]}]}'
WHOLE = (
    '{"object":"chat.completion","choices":[{"message":{"role":"assistant","content":"Hi"}}],'
    '"usage":{"prompt_tokens":1,"completion_tokens":1}}'
)
STREAM = 'data: {"object":"chat.completion.chunk","choices":[]}\n\ndata: [DONE]\n\n'


def verify(*arguments: str, key: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["sh", str(DEPLOY / "verify.sh"), *arguments]
    return run(command, {"WARMLANE_KEY": key, "no_proxy": "127.0.0.1", **environment})


def passed(output: str) -> list[str]:
    return re.findall(r"^ok +([a-z ]+)", output, re.MULTILINE)


@pytest.fixture(scope="module")
def fleet() -> Iterator[tuple[str, str]]:
    """URLs of a gateway, whose clients need the key `a-key-that-is-long-enough`, and of one of its replicas."""
    up = subprocess.Popen(
        [sys.executable, "-c", "from gateway.cli import main; main()", "up", "--port", "0"],
        env=os.environ | {"WARMLANE_API_KEYS": "alice=a-key-that-is-long-enough"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert up.stdout is not None
    with up.stdout:
        greeting = next(line for line in up.stdout if "serves" in line)
        gateway, replica = re.findall(r"http://[0-9.:]+\d", greeting)[:2]
        yield gateway, replica
        up.terminate()
        assert up.wait(SECONDS) == 0


def test_a_gateway_passes(fleet):
    ended = verify(fleet[0], key="a-key-that-is-long-enough")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert passed(ended.stdout) == CHECKS
    assert "asked is embedded" in ended.stdout


def test_a_replica_passes_alone(fleet):
    """Its list of models has more ids than the model's."""
    ended = verify(f"{fleet[1]}/v1/", "embedded")
    assert (ended.returncode, passed(ended.stdout)) == (0, CHECKS)
    assert "asked is embedded" in verify(fleet[1]).stdout


def test_a_missing_key_is_said(fleet):
    ended = verify(fleet[0])
    assert (ended.returncode, passed(ended.stdout)) == (1, ["it lives"])
    assert "answered 401" in ended.stderr


def test_an_unknown_model_is_said(fleet):
    ended = verify(fleet[1], "nobody")
    assert ended.returncode == 1
    assert "answered 404" in ended.stderr
    assert "nobody" in ended.stderr


@pytest.fixture
def server() -> Iterator[tuple[str, dict[str, str]]]:
    """A server whose answers can be changed: `whole`, `stream` and what it lists."""
    answers = {"/health": "", "/v1/models": MODELS, "whole": WHOLE, "stream": STREAM}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(answers[self.path])

        def do_POST(self) -> None:
            asked = self.rfile.read(int(self.headers["Content-Length"]))
            self.answer(answers["stream" if b'"stream": true' in asked else "whole"])

        def answer(self, text: str) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as serving:
        thread = threading.Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{serving.server_port}", answers
        serving.shutdown()
        thread.join()


def test_the_right_answers_pass(server):
    assert verify(server[0]).returncode == 0


@pytest.mark.parametrize(
    ("which", "answer", "fails_at"),
    [
        ("/v1/models", '{"object":"list","data":[]}', "it lists models"),
        ("whole", "<html>welcome</html>", "it answers"),
        ("whole", WHOLE.replace('"Hi"', '""'), "it answers"),
        ("whole", WHOLE.replace('"Hi"', "null"), "it answers"),
        ("whole", WHOLE.replace('"completion_tokens":1', '"completion_tokens":0'), "it answers"),
        ("stream", WHOLE, "it streams"),
        ("stream", STREAM.replace("data: [DONE]", ""), "it streams"),
    ],
)
def test_a_200_with_the_wrong_content_does_not_pass(server, which, answer, fails_at):
    url, answers = server
    answers[which] = answer
    ended = verify(url)
    assert ended.returncode == 1
    assert f"failed  {fails_at}" in ended.stdout
    assert passed(ended.stdout) == CHECKS[: CHECKS.index(fails_at)]


def test_nobody_there_is_said():
    ended = verify("http://127.0.0.1:1")
    assert ended.returncode == 1
    assert "127.0.0.1" in ended.stderr
    assert passed(ended.stdout) == []


@pytest.mark.parametrize("arguments", [(), ("127.0.0.1:8000",), ("http://a", "b", "c")])
def test_wrong_usage_is_said(arguments):
    ended = verify(*arguments)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("usage: ")


def test_the_key_is_no_argument_of_a_process(tmp_path):
    """Everybody on the machine can read those."""
    curl = tmp_path / "curl"
    curl.write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/arguments\ncat >{tmp_path}/input\nexit 7\n')
    curl.chmod(0o755)
    verify("http://127.0.0.1:1", key="a-secret", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert "a-secret" in (tmp_path / "input").read_text()
    assert "a-secret" not in (tmp_path / "arguments").read_text()
