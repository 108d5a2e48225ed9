"""What the relay notices while bytes pass: usage, first token, outcome, ids; and what the client gets."""

from __future__ import annotations

import pytest

from gateway.core.flight import Flight
from gateway.core.model import Outcome, ReplicaAdded, ReplicaId, RouteRequest, Usage
from gateway.core.router import Router
from gateway.core.settings import RoutingSettings
from gateway.proxy.errors import ConnectionLost
from gateway.proxy.exchange import Completion
from gateway.proxy.relay import CANNOT_SCHEDULE, Relay
from gateway.proxy.upstream import Connection, Header

SSE = [(b"content-type", b"text/event-stream; charset=utf-8")]
JSON = [(b"content-type", b"application/json"), (b"content-length", b"9")]


class Request:
    """What was sent."""

    body = b"a prompt"

    def let_go(self) -> None:
        self.body = b""


class Recorder:
    """A client that keeps what it got."""

    def __init__(self) -> None:
        self.headers: list[Header] = []
        self.body = b""
        self.complete = self.cut = False

    def attach(self, connection: Connection | None) -> None: ...

    def start(self, status: int, headers: list[Header]) -> None:
        self.headers = headers

    def write(self, data: bytes, last: bool) -> None:
        self.body += data
        self.complete = last

    def abort(self) -> None:
        self.cut = True


def started_flight() -> Flight:
    router = Router(RoutingSettings())
    router.observe(ReplicaAdded(ReplicaId("http://a:1")), 0.0)
    return router.start(router.decide(RouteRequest(), 0.0), 0.0)


def relayed(
    *pieces: bytes,
    headers: list[Header] = SSE,
    status: int = 200,
    anthropic: bool = False,
    wants_id: bool = False,
    choices: bool = False,
) -> tuple[Relay, Recorder, Flight]:
    client, flight = Recorder(), started_flight()
    ticks = iter(range(1, 1000))
    relay = Relay(
        client,
        Request(),
        flight,
        Flight.first_token,
        [(b"x-request-id", b"r")],
        lambda: float(next(ticks)),
        Completion(),
        anthropic=anthropic,
        wants_id=wants_id,
        choices=choices,
    )
    relay.head(status, headers)
    for at, piece in enumerate(pieces):
        relay.piece(piece, at == len(pieces) - 1)
    return relay, client, flight


CHAT_USAGE = (
    b'"usage":{"prompt_tokens":30,"total_tokens":35,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":16}}'
)


@pytest.mark.parametrize(
    ("pieces", "usage"),
    [
        ([b'{"choices":[{"message":{"content":"\\"usage\\": {\\"prompt_tokens\\": 9}"}}],' + CHAT_USAGE + b"}"], (30, 16, 5)),  # noqa: E501
        ([b'{"choices":[],"usage": {"prompt_tokens": 3, "prompt_tokens_details": null}}'], (3, None, None)),
        ([b'{"choices":[],' + CHAT_USAGE[:40], CHAT_USAGE[40:] + b"}"], (30, 16, 5)),
        ([b"data: {}\n\n", b'data: {"choices":[],' + CHAT_USAGE + b"}\n\n", b"data: [DONE]\n\n"], (30, 16, 5)),
        ([b'data: {"choices":[{}],"usage":null}\n\n', b"data: [DONE]\n\n"], None),
        ([b"data: {}\n\ndata: [DONE]\n\n"], None),
        ([b'{"object":"list","usage":{"input_tokens":40,"input_tokens_details":{"cached_tokens":8},"output_tokens":2}}'], (40, 8, 2)),  # noqa: E501
        ([b'{"choices":[],' + CHAT_USAGE + b',"prompt_token_ids":[' + b"101," * 8_000 + b"1]}"], (30, 16, 5)),
        ([b'{"output":[],' + CHAT_USAGE + b',"user":"usage"}'], (30, 16, 5)),
        ([b'{"output":[],' + CHAT_USAGE + b',"usage":null,"user":"usage","text":"\\"usage\\":{"}'], (30, 16, 5)),
        ([b'data: {"usage":{"input_tokens":1,"output_tokens":0}}\n\n' + b"x" * 20_000], None),
    ],
)  # fmt: skip
def test_usage_of_openai_answers(pieces: list[bytes], usage: tuple[int | None, ...] | None) -> None:
    relay, _, _ = relayed(*pieces, **({} if pieces[0].startswith(b"data: ") else {"headers": JSON}))
    assert relay.usage() == (None if usage is None else Usage(*usage))


def test_usage_of_anthropic_answers_is_given_in_parts() -> None:
    whole = (
        b'{"usage":{"input_tokens":10,"output_tokens":5,"cache_creation_input_tokens":32,"cache_read_input_tokens":64}}'
    )
    relay, _, _ = relayed(whole, headers=JSON, anthropic=True)
    assert relay.usage() == Usage(106, 64, 5)
    start = b'data: {"type":"message_start","message":{"usage":{"input_tokens":70,"cache_read_input_tokens":30}}}\n\n'
    text = b'data: {"type":"content_block_delta","delta":{"type":"text_delta","text":"hi"}}\n\n'
    end = b'data: {"type":"message_delta","usage":{"output_tokens":3}}\n\n'
    relay, _, _ = relayed(start, text, text, text, end, b'data: {"type":"message_stop"}\n\n', anthropic=True)
    assert relay.usage() == Usage(100, 30, 3)


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n',
        b'data: {"choices":[{"delta":{"reasoning":"hm"}}]}\n\n',
        b'data: {"choices":[{"delta":{"tool_calls":[{"function":{"arguments":"{"}}]}}]}\n\n',
        b'data: {"choices":[{"text": "a"}]}\n\n',
        b'event: response.output_text.delta\ndata: {"delta":"a"}\n\n',
        b'data: {"type":"content_block_delta","delta":{"type":"text_delta","text":"a"}}\n\n',
    ],
)
def test_first_token_is_the_first_text(event: bytes) -> None:
    role = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
    _, client, flight = relayed(role, role, event, event)
    assert flight.first_token_at == 1.0
    assert client.body == role + role + event + event


def test_first_token_of_an_answer_in_one_piece_is_not_known() -> None:
    _, _, flight = relayed(b'{"choices":[{"message":{"content":"a"}}]}', headers=JSON)
    assert flight.first_token_at is None


@pytest.mark.parametrize(
    ("status", "pieces", "outcome"),
    [
        (200, [b'data: {"choices":[{"delta":{}}]}\n\n', b"data: [DONE]\n\n"], Outcome.COMPLETED),
        (200, [b'data: {"choices":[],"usage":{"completion_tokens":0}}\n\n', b"data: [DONE]\n\n"], Outcome.EMPTY),
        (500, [CANNOT_SCHEDULE], Outcome.DRAINING),
        (200, [b"data: {}\n\n", b'data: {"error":{"message":"died"}}\n\n', b"data: [DONE]\n\n"], Outcome.FAILED),
        (200, [b'event: error\ndata: {"type":"error","error":{}}\n\n'], Outcome.FAILED),
        (200, [b'data: {"choices":[{"delta":{"content":"data: {\\"error\\""}}]}\n\n'], Outcome.COMPLETED),
        (400, [b"{}"], Outcome.REJECTED),
        (429, [b"{}"], Outcome.REFUSED),
        (503, [b"{}"], Outcome.REFUSED),
        (500, [b"{}"], Outcome.FAILED),
    ],
)
def test_outcomes(status: int, pieces: list[bytes], outcome: Outcome) -> None:
    assert relayed(*pieces, status=status, choices=True)[0].outcome is outcome


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (b'{"error":{"message":"bad grammar","type":"BadRequestError","param":null,"code":400}}', Outcome.REJECTED),
        (b'{"error": {"message": "too long", "code": "422"}}', Outcome.REJECTED),
        (b'{"type":"error","error":{"type":"invalid_request_error","message":"x"}}', Outcome.REJECTED),
        (b'{"error":{"message":"died","type":"InternalServerError","code":500}}', Outcome.FAILED),
        (b'{"error":{"message":"no \\"code\\": 400, \\"type\\":\\"BadRequestError\\"","code":500}}', Outcome.FAILED),
        (b'{"error":{"message":"no \\"code\\": 400, \\"type\\":\\"BadRequestError\\""}}', Outcome.FAILED),
        (b'{"type":"error","error":{"type":"api_error","message":"x"}}', Outcome.FAILED),
    ],
)
def test_an_error_event_says_whose_fault_it_is(error: bytes, outcome: Outcome) -> None:
    text = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'
    for before in (b"", text):
        assert relayed(before, b"data: " + error + b"\n\ndata: [DONE]\n\n", choices=True)[0].outcome is outcome


def test_only_streams_of_choices_are_missed_when_they_hold_none() -> None:
    """vLLM ends streams of `/v1/messages` with `[DONE]` too; one with an empty answer is nothing odd."""
    start = b'event: message_start\ndata: {"type":"message_start","message":{"content":[]}}\n\n'
    stop = b'event: message_stop\ndata: {"type":"message_stop"}\n\ndata: [DONE]\n\n'
    assert relayed(start, stop, anthropic=True)[0].outcome is Outcome.COMPLETED
    assert relayed(b'data: {"type":"response.completed"}\n\ndata: [DONE]\n\n')[0].outcome is Outcome.COMPLETED


def test_an_event_cut_in_half_gets_no_event_of_ours() -> None:
    relay, client, _ = relayed()
    relay.piece(b'data: {"choices":[{"del', False)
    relay.failed(ConnectionLost("gone", answered=True))
    assert client.body == b'data: {"choices":[{"del'
    assert client.cut
    assert not client.complete


def test_the_id_of_a_stored_response_in_pieces() -> None:
    relay, _, _ = relayed(b'{"object":"response","id":"re', b'sp_ab-12","x":1}', headers=JSON, wants_id=True)
    assert relay.response_id() == "resp_ab-12"
    relay, _, _ = relayed(b'{"output":[{"id":"msg_1"}]}', headers=JSON, wants_id=True)
    assert relay.response_id() is None


@pytest.mark.parametrize(
    ("answer", "id"),
    [
        (b'{"metadata":{"id":"resp_no"},"id":"resp_1"}', "resp_1"),
        (b'{"metadata":{"response":{"id":"resp_no"}},"tools":[{"id":"resp_no"}],"id" : "of-my-own"}', "of-my-own"),
        (b'{"instructions":"\\"id\\":\\"resp_no\\"","user":"}\\\\","id":"resp_1"}', "resp_1"),
        (b'{"user":"id","x":["id","resp_no",{"id":"resp_no"}],"y":"id","id":"resp_1"}', "resp_1"),
        (b'{"metadata":{"id":"resp_no"}}', None),
        (b'{"response":{"id":"resp_no"}}', None),
        (b'{"id":7,"x":"resp_no"}', None),
        (b'{"id":"a/b","metadata":{"id":"resp_no"}}', None),
        (b'{"id":"resp_no', None),
        (b'["id","resp_no"]', None),
        (b'{"user":"' + b'\\"' * 9_000, None),
        (b"[" * 9_000 + b"]}" * 9_000 + b'"id":"resp_no"', None),
    ],
)
def test_the_id_is_the_responses_own(answer: bytes, id: str | None) -> None:
    """Clients choose metadata and tools, and have them repeated."""
    relay, _, _ = relayed(answer, headers=JSON, wants_id=True)
    assert relay.response_id() == id


@pytest.mark.parametrize(
    ("event", "id"),
    [
        (b'{"type":"response.created","response":{"metadata":{"id":"resp_no"},"id":"resp_1"}}', "resp_1"),
        (b'{"response":{"id":"resp_1","tools":[]},"sequence_number":0}', "resp_1"),
        (b'{"item":{"id":"resp_no"},"response":[{"id":"resp_no"}],"id":"resp_no"}', None),
        (b'{"x":{"response":{"id":"resp_no"}}}', None),
    ],
)
def test_the_id_in_a_stream_is_the_responses_own(event: bytes, id: str | None) -> None:
    relay, _, _ = relayed(b"event: response.created\ndata: " + event + b"\n\n", wants_id=True)
    assert relay.response_id() == id


@pytest.mark.parametrize("size", [1, 7, 64])
def test_what_an_answer_tells_is_found_however_finely_it_is_cut(size: int) -> None:
    """O-17: a proxy before the replica, or the network, may cut it anywhere."""

    def cut(answer: bytes) -> list[bytes]:
        return [answer[at : at + size] for at in range(0, len(answer), size)]

    text = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'
    usage = b'data: {"choices":[],' + CHAT_USAGE + b"}\n\ndata: [DONE]\n\n"
    relay, client, flight = relayed(*cut(text * 15 + usage))
    assert relay.usage() == Usage(30, 16, 5)
    assert relay.outcome is Outcome.COMPLETED
    assert flight.first_token_at is not None
    assert client.body == text * 15 + usage
    relay, _, _ = relayed(*cut(text * 3 + b'data: {"error":{"message":"the engine died"}}\n\ndata: [DONE]\n\n'))
    assert relay.outcome is Outcome.FAILED


def test_a_long_answer_in_bytes_is_not_kept() -> None:
    relay, _, _ = relayed(*([b"x"] * 900 + [b"y" * 3_000] * 90))
    assert len(relay._previous + relay._last) <= 6_000
