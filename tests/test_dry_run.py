"""The dry run's client: what it sends, and what it makes of the answer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from gateway.core.model import Cost, Reason, ReplicaId, ReplicaView
from gateway.dry_run import Unanswered, ask, table
from gateway.rankings import why

ANSWER = (
    b'{"policy":"p","reason":"warm","replica":"http://a","ranking":[{"replica":"http://a","total_seconds":0.5,"parts":'
    b'{"queue":0.2,"prefill":0.3},"cached_tokens":5,"prompt_tokens":9,"in_flight":1,"pending_tokens":4}],"why":"So."}'
)


class Gateway(HTTPServer):
    """Answers every dry run alike, and keeps the sessions that it was told."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.sessions: list[str | None] = []


class Handler(BaseHTTPRequestHandler):
    server: Gateway

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.server.sessions.append(self.headers["x-session-id"])
        self.send_response(200)
        self.send_header("content-length", str(len(ANSWER)))
        self.end_headers()
        self.wfile.write(ANSWER)

    def log_message(self, *arguments: object) -> None:
        """Not on the test's stderr."""


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with Gateway() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_the_session_is_sent_as_its_header_byte_for_byte(gateway):
    url = f"http://127.0.0.1:{gateway.server_port}"
    assert ask(url, b"{}") == ANSWER
    ask(url, b"{}", "chat 7")
    ask(url, b"{}", "café")
    assert gateway.sessions == [None, "chat 7", "café".encode().decode("latin-1")]


def test_a_session_that_is_no_header_is_refused(gateway):
    with pytest.raises(Unanswered):
        ask(f"http://127.0.0.1:{gateway.server_port}", b"{}", "a\r\nx-other: b")
    assert gateway.sessions == []


def test_the_table_has_every_part():
    title, why, empty, head, row = table(ANSWER).splitlines()
    assert (title, why, empty) == ("policy p: warm -> http://a", "So.", "")
    assert head.split()[:4] == ["replica", "cost", "queue", "prefill"]
    assert row.split() == ["http://a", "0.5000", "0.2000", "0.3000", "5", "9", "1", "4"]


FIRST = ReplicaView(ReplicaId("http://a:1"), 20_000, 1_000, 0, 0, 0, 0, None, 100_000, 5_000, 0, 0, 0)
LONGEST = FIRST._replace(replica=ReplicaId("http://b:2"), cached_tokens=18_000)
FREE = Cost(0.0, ())


@pytest.mark.parametrize(
    ("reason", "sentence"),
    [
        (Reason.WARM, "a:1 is believed to hold 1,000 of 20.0k prompt tokens (5 %): nobody holds more."),
        (Reason.COLD, "Nobody is believed to hold anything of this prompt, so load decides: a:1 is cheapest."),
        (Reason.ONLY, "a:1 is the only candidate; it is believed to hold 1,000 of 20.0k prompt tokens (5 %)."),
        (Reason.PINNED, "a:1 keeps the stored response that this is about: no other can serve it."),
        (
            Reason.SPILLED,
            "b:2 holds more of it (18.0k tokens), but to wait there costs more than it saves: "
            "a:1 is cheaper, and holds 1,000 of 20.0k prompt tokens (5 %).",
        ),
    ],
)
def test_the_reason_is_a_sentence(reason, sentence):
    assert why(reason.value, ((FIRST, FREE), (LONGEST, FREE))) == sentence
