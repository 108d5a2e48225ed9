"""`[server] log_blocks`: what prompts share can be read back from the log, and what they say cannot."""

from __future__ import annotations

import io
import json
from pathlib import Path
from random import Random

import pytest

from gateway import prompt
from gateway.core.model import BlockHash, RouteRequest
from gateway.prefix_log import PrefixLog
from gateway.prompt import Shape
from gateway.telemetry import RequestRecord, Telemetry
from loadtests.traces import read
from loadtests.traces.request_log import Prefix, chains_of
from tests.test_telemetry import Router

BLOCK_BYTES = 1024
SECRET = "the plans of the new factory "


def chain(random: Random, before: list[RouteRequest]) -> RouteRequest:
    """A prompt that goes on where an earlier one was, or begins anew."""
    shared = random.choice(before).blocks if before and random.random() < 0.8 else ()
    kept = shared[: random.randint(0, len(shared))]
    blocks = [*kept, *(BlockHash(random.getrandbits(64)) for _ in range(random.randint(0, 4)))]
    return RouteRequest(blocks=blocks, length=1)


def common(one: tuple[object, ...], other: tuple[object, ...]) -> int:
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(map(len, (one, other)))
    )


def test_chains_are_read_back_as_they_were():
    random, log = Random(5), PrefixLog()
    requests: list[RouteRequest] = []
    for _ in range(300):
        requests.append(chain(random, requests))
    notes = [Prefix(n.run, n.number, n.blocks, n.shared, n.earlier) for n in map(log.note, requests)]
    random.shuffle(notes)  # they are written as requests end
    found = chains_of(notes)
    chains = [found[notes[0].run, number] for number in range(1, 301)]
    assert [len(one) for one in chains] == [len(one.blocks) for one in requests]
    pairs = [(random.randrange(300), random.randrange(300)) for _ in range(5000)]
    expected = [common(tuple(requests[a].blocks), tuple(requests[b].blocks)) for a, b in pairs]
    assert [common(chains[a], chains[b]) for a, b in pairs] == expected
    assert sum(1 for length in expected if length > 0) > 100


def test_requests_whose_common_ancestor_was_cut_off_still_share():
    notes = [Prefix("a", 7, 3, 2, 4), Prefix("a", 8, 4, 2, 4), Prefix("b", 7, 3, 2, 4)]
    chains = chains_of(notes)
    assert chains["a", 7][:2] == chains["a", 8][:2]
    assert chains["a", 7][2] != chains["a", 8][2]
    assert not set(chains["b", 7]) & set(chains["a", 7])


def test_the_oldest_blocks_are_forgotten_tail_first():
    log = PrefixLog(memory_blocks=3)
    first = RouteRequest(blocks=[BlockHash(block) for block in (1, 2, 3)], length=1)
    log.note(first)
    log.note(RouteRequest(blocks=[BlockHash(9)], length=1))
    again = log.note(first)
    assert (again.number, again.blocks, again.shared, again.earlier) == (3, 3, 2, 1)


def test_sessions_are_told_apart_and_not_named():
    log, other = PrefixLog(), PrefixLog()
    names = [log.note(RouteRequest(session=session)).session for session in ("alice", "bob", "alice", None)]
    assert names[0] == names[2] != names[1]
    assert names[3] is None
    assert other.note(RouteRequest(session="alice")).session != names[0]


def body(*texts: str) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": text} for text in texts]}).encode()


@pytest.fixture
def logged(tmp_path: Path) -> Path:
    """The log of three requests, two seconds apart and one second long: a chat of two turns, and a stranger."""
    stream = io.BytesIO()
    now = 1_796_000_000.0
    telemetry = Telemetry(router=Router(), log=stream, log_blocks=True, wall_clock=lambda: now)
    context = SECRET * 200  # 5,800 bytes
    for session, texts in [("alice", [context]), ("alice", [context, SECRET * 100]), (None, ["x" * 3000])]:
        request = prompt.parse(body(*texts), Shape.CHAT, block_bytes=BLOCK_BYTES, session=session)
        record = RequestRecord("id", "/v1/chat/completions", replica="http://a", duration_seconds=1.0)
        record.prompt_tokens, record.completion_tokens = request.length // 2, 5
        telemetry.request_read(record, request)
        telemetry.request_ended(record)
        now += 2.0
    telemetry.close()
    path = tmp_path / "requests.log"
    path.write_bytes(stream.getvalue())
    return path


def test_a_log_replays_as_it_came(logged: Path):
    first, second, third = read(logged).requests
    assert [first.arrival, second.arrival, third.arrival] == [0, 2, 4]
    assert (first.think_seconds, second.think_seconds, third.think_seconds) == (None, 1.0, None)
    assert first.session == second.session != third.session
    assert first.output_tokens == 5
    # At two bytes a token 512 tokens are one block of the log, give or take what the mean makes of partial blocks.
    assert len(first.blocks) in (4, 5)
    assert second.blocks[: len(first.blocks)] == first.blocks
    assert len(second.blocks) > len(first.blocks)
    assert not set(third.blocks) & set(second.blocks)


def test_no_text_no_hash_and_no_name_is_in_it(logged: Path):
    lines = logged.read_text()
    assert SECRET.split()[1] not in lines
    assert "alice" not in lines
    assert max(len(str(value)) for line in lines.splitlines() for value in json.loads(line)["prefix"].values()) <= 12


def test_without_the_key_records_have_no_prefix():
    stream = io.BytesIO()
    telemetry = Telemetry(router=Router(), log=stream)
    record = RequestRecord("id", "/v1/chat/completions")
    telemetry.request_read(record, RouteRequest(length=10))
    telemetry.request_ended(record)
    telemetry.close()
    assert "prefix" not in json.loads(stream.getvalue())
