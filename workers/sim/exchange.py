"""One HTTP request and its answer, as raw ASGI: the replica has no use for a framework, and this costs half of one."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from workers.sim.errors import Fault, InvalidBody, Unparsable, WrongMediaType

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

JSON = b"application/json"
_VARY = (b"vary", b"Origin")


class ClientLeft(Exception):
    """The client closed the connection before its request was complete."""


class Exchange:
    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self._receive = receive
        self._send = send

    # ---- the request -------------------------------------------------------------------------------------------------

    @property
    def path(self) -> str:
        path: str = self.scope["path"]
        return path

    async def read(self) -> bytes:
        parts = []
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            parts.append(message.get("body", b""))
            if not message.get("more_body"):
                return b"".join(parts)

    async def read_json(self) -> dict[str, Any]:
        """The body as an object. Raises InvalidBody in vLLM's words."""
        body = await self.read()
        media_type = self.headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if media_type != JSON:
            raise WrongMediaType
        if not body:
            raise InvalidBody(Fault("missing", "body", "Field required", None))
        value = _decode(body)
        if not isinstance(value, dict):
            message = "Input should be a valid dictionary or object to extract fields from"
            raise InvalidBody(Fault("model_attributes_type", "body", message, value))
        return value

    async def wait_disconnect(self) -> None:
        """Return when the client is gone; the body has been read before."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    # ---- the answer --------------------------------------------------------------------------------------------------

    async def answer(
        self,
        status: int,
        body: bytes = b"",
        content_type: bytes | None = JSON,
        extra: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        headers = [(b"content-length", b"%d" % len(body)), _VARY, *extra]
        if content_type is not None:
            headers.append((b"content-type", content_type))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    async def answer_json(self, value: Any, status: int = 200) -> None:
        await self.answer(status, msgspec.json.encode(value))

    async def open_stream(self) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), _VARY]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def emit(self, value: Any, event: str | None = None) -> None:
        """One server-sent event with a JSON value."""
        head = b"" if event is None else b"event: " + event.encode() + b"\n"
        body = head + b"data: " + msgspec.json.encode(value) + b"\n\n"
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def close_stream(self, last: bytes = b"") -> None:
        await self._send({"type": "http.response.body", "body": last})


def _decode(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass  # the standard library knows what vLLM would say, and takes NaN as vLLM does
    try:
        return json.loads(body)
    except json.JSONDecodeError as error:
        raise InvalidBody(
            Fault("json_invalid", f"body.{error.pos}", "JSON decode error", {}, {"error": error.msg})
        ) from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise Unparsable from error
