"""A scripted replica on a real socket, and what else the tests of the feeds share."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

from gateway.core.model import Fact, ReplicaId

Answer = bytes | Callable[[asyncio.StreamWriter], Awaitable[None]]


def ok(body: bytes, status: str = "200 OK", headers: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    return head.encode() + body


async def hang(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(3600)


class ScriptedReplica:
    """Answers each path with the bytes, or by the coroutine, that `answers` holds for it; 404 for the rest."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.asked: list[str] = []
        self.bodies: list[bytes] = []
        """Of those that came with one."""
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self.port = 0

    @property
    def id(self) -> ReplicaId:
        return ReplicaId(f"http://127.0.0.1:{self.port}")

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                path = head.split(b" ", 2)[1].decode()
                if length := re.search(rb"\r\ncontent-length: (\d+)", head, re.IGNORECASE):
                    self.bodies.append(await reader.readexactly(int(length[1])))
                self.asked.append(path)
                answer = self.answers.get(path, ok(b"{}", "404 Not Found"))
                if isinstance(answer, bytes):
                    writer.write(answer)
                    await writer.drain()
                else:
                    await answer(writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._connections.discard(task)
            writer.transport.abort()


class Facts(list[Fact]):
    """Where the feeds report to."""

    def of(self, kind: type) -> list[Any]:
        return [fact for fact in self if isinstance(fact, kind)]


async def wait_until(condition: Callable[[], object], within_seconds: float = 10.0) -> None:
    deadline = time.monotonic() + within_seconds
    while not condition():
        assert time.monotonic() < deadline, "the awaited condition did not come true"
        await asyncio.sleep(0.005)
