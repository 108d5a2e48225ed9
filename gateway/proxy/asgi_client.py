"""Client connections, the plain way: the same exchanges as an ASGI application.

Serves inference requests when `[server] http = "asgi"`, on connections that uvicorn has taken over, and the paths of
stored responses always. Slower than `http_client.py`, but it leans on nothing but the ASGI specification.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any

from gateway.keys import Denied, NoKey
from gateway.limits import Caller
from gateway.proxy.call import Call
from gateway.proxy.endpoints import ENDPOINTS, NOWHERE, Endpoint, stored_response
from gateway.proxy.errors import BodiesFull, BodyTooLarge, ErrorAnswer, NotFound, answer
from gateway.proxy.exchange import Exchange
from gateway.proxy.front_door import FrontDoor
from gateway.proxy.incoming import IncomingBody
from gateway.proxy.upstream import Connection, Header

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

HIGH_WATER_BYTES = 4096
"""Unsent bytes above which the replica is read no further, as on the fast way."""

LINGER_SECONDS = 2.0
"""How long a body that is too large is read and thrown away behind its answer."""


class ClientLeft(Exception):
    """The client went away before it had sent its whole request."""


class AsgiClient:
    """The `Client` of one exchange: the relay writes synchronously, `pump` sends."""

    def __init__(self, door: FrontDoor) -> None:
        self._door = door
        self._messages: list[Message] = []
        self._waiting_bytes = 0
        self._wake = asyncio.Event()
        self._done = False
        self._upstream: Connection | None = None

    def attach(self, connection: Connection | None) -> None:
        self._upstream = connection

    def start(self, status: int, headers: list[Header]) -> None:
        if status == 304:  # its length is that of a body that does not come, which uvicorn does not know
            headers = [header for header in headers if header[0] != b"content-length"]
        if self._door.draining:
            headers = [*headers, (b"connection", b"close")]
        self._messages.append({"type": "http.response.start", "status": status, "headers": headers})
        self._wake.set()

    def write(self, data: bytes, last: bool) -> None:
        self._messages.append({"type": "http.response.body", "body": data, "more_body": not last})
        self._waiting_bytes += len(data)
        self._done = self._done or last
        if self._waiting_bytes > HIGH_WATER_BYTES and self._upstream is not None:
            self._upstream.pause()
        self._wake.set()

    def abort(self) -> None:
        self._done = True
        self._wake.set()

    async def pump(self, send: Send) -> None:
        """Send until the last message. After `abort` that one is missing, so the server cuts the connection short."""
        while not (self._done and not self._messages):
            await self._wake.wait()
            self._wake.clear()
            messages, self._messages = self._messages, []
            messages.reverse()
            while messages:
                await send(messages.pop())  # and kept no longer: what the client has not taken is in a buffer once
            paused = self._waiting_bytes > HIGH_WATER_BYTES
            if paused and not self._done:  # nothing to send, which waits until the client has taken what was
                await send({"type": "http.response.body", "body": b"", "more_body": True})
            self._waiting_bytes = 0
            if paused and self._upstream is not None:
                self._upstream.resume()


async def serve(door: FrontDoor, scope: Message, receive: Receive, send: Send) -> None:
    """One HTTP request of an inference path. Anything not in the table is answered 404."""
    path, query, method = scope["raw_path"], scope["query_string"], scope["method"].encode()
    endpoint, response_id = served_by(method, path)
    headers: list[Header] = list(scope["headers"])
    if endpoint is NOWHERE:
        refusal = answer(NotFound(f"Not found: {scope['method']} {scope['path']}"))
        door.note_unread(NOWHERE, headers, 0, refusal)
        await send_answer(send, refusal)
        return
    caller: Caller | None = scope.get("auth")  # where `guard.py` puts it
    if caller is None and door.access is not None:
        await refuse(door, NoKey(), scope, receive, send)
        return
    stay = door.arrive(endpoint, announced_length(headers), caller, waits=waits(headers))
    if isinstance(stay, ErrorAnswer):
        door.note_unread(endpoint, headers, 0, stay, caller)
        await refuse_unread(send, stay, scope, receive, unread=True)
        return
    call = Call(
        method=method,
        target=path + b"?" + query if query else path,
        endpoint=endpoint,
        headers=headers,
        body=b"",
        received_at=0.0,
        response_id=response_id,
        caller=caller,
        stay=stay,
        budget=door.bodies,
    )
    if await read_into(call, door, scope, receive, send):
        await exchange(door, call, receive, send)


async def read_into(call: Call, door: FrontDoor, scope: Message, receive: Receive, send: Send) -> bool:
    """The call's body. `False`: it ends here, and whatever it held is given back."""
    incoming = IncomingBody(door.bodies)
    refusal: ErrorAnswer | None = None
    try:
        await read_whole(incoming, receive, door.server.max_body_mib * 2**20)
        call.held, call.body, call.received_at = incoming.size, incoming.take(), door.clock()
        return True
    except (BodyTooLarge, BodiesFull) as error:
        refusal = answer(error, anthropic=call.endpoint.anthropic)
    except ClientLeft:
        pass
    except asyncio.CancelledError:
        incoming.drop()
        call.drop(door.clock())
        raise
    door.note_unread(call.endpoint, call.headers, incoming.size, refusal, call.caller)
    incoming.drop()
    call.drop(door.clock(), refused=refusal is not None)
    if refusal is not None:
        await refuse_unread(send, refusal, scope, receive)
    return False


async def exchange(door: FrontDoor, call: Call, receive: Receive, send: Send) -> None:
    """Run the call, the sending and the watch for a client that leaves side by side; whichever ends first ends all."""
    client = AsgiClient(door)
    serving = call.exchange = Exchange(door.serve(call, client))
    serving.start()
    leaving = asyncio.create_task(wait_disconnect(receive))
    pumping = asyncio.create_task(client.pump(send))
    try:
        await asyncio.wait((leaving, pumping), return_when=asyncio.FIRST_COMPLETED)
        if pumping.done():
            pumping.result()
    finally:
        if not serving.ended.done:
            serving.cancel()
        for task in (leaving, pumping):
            task.cancel()
        await asyncio.gather(leaving, pumping, return_exceptions=True)


async def read_whole(incoming: IncomingBody, receive: Receive, limit: int) -> None:
    """The whole body. Raises `BodyTooLarge`, `BodiesFull` and `ClientLeft`; what came is then still in `incoming`."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        if part := message.get("body", b""):
            incoming.keep(part)
        if incoming.size > limit:
            raise BodyTooLarge(limit)
        if not incoming.fits():
            raise BodiesFull
        if not message.get("more_body", False):
            return


def announced_length(headers: list[Header]) -> int | None:
    """Of the body; `None` when it comes in chunks."""
    length: int | None = 0
    for name, value in headers:
        if name == b"content-length":
            return int(value)
        if name == b"transfer-encoding":
            length = None
    return length


def waits(headers: list[Header]) -> bool:
    """The client sends the body only when it is told to."""
    return any(name == b"expect" for name, _ in headers)


async def refuse_unread(
    send: Send, refusal: ErrorAnswer, scope: Message, receive: Receive, *, unread: bool = False
) -> None:
    """The answer first, then an end to a body that is not wanted. `unread`: nothing of it has been."""
    await send_answer(send, refusal, before_end=discard_body(scope, receive, unread=unread))


async def discard_body(scope: Message, receive: Receive, *, unread: bool) -> None:
    """Let a client that is still sending come to its end, for a while: one that is cut off may lose the answer.
    One that waits to be told to begin is not sending."""
    if unread and waits(scope["headers"]):
        return
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            while (await receive()).get("more_body", False):
                pass


async def refuse(door: FrontDoor, error: Denied, scope: Message, receive: Receive, send: Send) -> None:
    """Answer, count and log a request that has no good key. If it has a body, that is not wanted, and the connection
    closes."""
    headers: list[Header] = list(scope["headers"])
    endpoint, _ = served_by(scope["method"].encode(), scope["raw_path"])
    refusal = answer(error, anthropic=endpoint.anthropic)
    door.telemetry.key_refused("", error.reason)
    door.note_unread(endpoint, headers, 0, refusal)
    if announced_length(headers) == 0:
        await send_answer(send, refusal)
    else:
        await refuse_unread(send, refusal, scope, receive, unread=True)


def served_by(method: bytes, path: bytes) -> tuple[Endpoint, str | None]:
    """The endpoint of an inference path, and the id of a stored response that it names; `NOWHERE` for other paths."""
    endpoint = ENDPOINTS.get(path) if method == b"POST" else None
    return (endpoint, None) if endpoint is not None else stored_response(method, path) or (NOWHERE, None)


async def wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_answer(
    send: Send,
    refusal: ErrorAnswer,
    *,
    close: bool = False,
    before_end: Coroutine[Any, Any, None] | None = None,
) -> None:
    """`before_end` is awaited between an answer that the client has whole by then, and the end of the connection."""
    ends = close or before_end is not None
    headers = [*refusal.headers, (b"connection", b"close")] if ends else refusal.headers
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": refusal.body, "more_body": before_end is not None})
    if before_end is not None:
        await before_end
        await send({"type": "http.response.body", "body": b""})
