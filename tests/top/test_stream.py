"""What comes from whatever answers at an address."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from gateway.dry_run import Unanswered
from gateway.top import stream
from gateway.top.frames import Frame
from gateway.top.stream import Lost, frames
from tests.top.made import encoded

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"


class Answers:
    """A server that says one thing to each connection, the last to all further ones, and closes."""

    def __init__(self, *answers: bytes) -> None:
        self._answers = list(answers)
        self.asked: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            self.asked.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(self._answers[min(len(self.asked), len(self._answers)) - 1])
            await writer.drain()
        writer.close()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        async with server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\n\r\n<html>", "not a Warmlane gateway"),
        (b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\nno", "HTTP 404: no .*switched off"),
        (b'HTTP/1.1 503 No\r\n\r\n{"error": {"message": "Too many look."}}', "HTTP 503: Too many look."),
        (b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\n\r\n", "HTTP 302"),
        (HEAD + b'data: {"run": 1}\n\n', "of this version"),
        (HEAD + b"data: " + encoded(in_flight=10**400) + b"\n\n", "of this version"),
        (HEAD + b"data: " + b"[" * 100_000 + b"\n\n", "of this version"),
        (HEAD + b"x" * (stream.MAX_FRAME_BYTES + 70_000), "no end"),
        (HEAD[:20], "disconnected"),
        (HEAD, "closed it at once"),
        (b"SSH-2.0-OpenSSH_9.2\r\n" * 9, "illegal|disconnected"),
        (b"", "disconnected"),
    ],
)
async def test_what_is_no_gateway_is_an_error_at_once(answer: bytes, why: str) -> None:
    async with Answers(answer).running() as url:
        with pytest.raises(Unanswered, match=f"(?s){why}"):
            await asyncio.wait_for(anext(frames(url, None)), 10.0)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "127.0.0.1:8000", "http://[", "ftp://127.0.0.1"])
async def test_nobody_there(url: str) -> None:
    with pytest.raises(Unanswered, match=r".+: .+"):
        await anext(frames(url, None))


async def test_the_cause_is_what_the_system_said() -> None:
    with pytest.raises(Unanswered, match=r"\[Errno \d+\]"):
        await anext(frames("http://127.0.0.1:1", None))


async def test_it_comes_back_and_says_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "FIRST_WAIT_SECONDS", 0.001)
    answers = Answers(
        HEAD + encoded(at=1.0) + encoded(at=2.0),
        b"HTTP/1.1 401 No\r\n\r\n",
        HEAD + encoded(at=3.0)[:40],
        HEAD + encoded(at=4.0),
    )
    seen: list[str | float] = []
    async with answers.running() as url, asyncio.timeout(10.0):
        async with contextlib.aclosing(frames(url, "a-key")) as coming:
            async for told in coming:
                seen.append(told.at if isinstance(told, Frame) else "lost")
                if isinstance(told, Lost) and "401" in told.why:
                    seen[-1] = "refused"
                if seen[-1] == 4.0:
                    break
    assert seen == [1.0, 2.0, "lost", "refused", "lost", 4.0]
    assert all(
        b"authorization: Bearer a-key\r\n" in asked.replace(b"Authorization", b"authorization")
        for asked in answers.asked
    )
