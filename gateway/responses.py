"""Refusals of the control endpoints as responses: the same OpenAI error objects as on the inference paths."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from gateway.proxy import asgi_client
from gateway.proxy.asgi_client import Message, Receive, Send
from gateway.proxy.body_budget import BodyBudget
from gateway.proxy.errors import (
    AdminKeyRequired,
    Blame,
    BodiesFull,
    BodyTooLarge,
    ErrorAnswer,
    NotOpen,
    answer,
    refusal,
)
from gateway.proxy.incoming import IncomingBody


def response_of(refusal: ErrorAnswer) -> Response:
    headers = {name.decode(): value.decode() for name, value in refusal.headers if name != b"content-length"}
    return Response(refusal.body, status_code=refusal.status, headers=headers)


class RefusedUnread(Response):
    """An answer before the body that it refuses: whoever still sends has it whole before the connection ends."""

    def __init__(self, refusal: ErrorAnswer, *, unread: bool = True) -> None:
        """`unread`: nothing of the body has been read."""
        super().__init__(status_code=refusal.status)
        self._refusal = refusal
        self._unread = unread

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        await asgi_client.refuse_unread(send, self._refusal, scope, receive, unread=self._unread)


async def with_body(
    request: Request, limit: int, budget: BodyBudget, serve: Callable[[bytes], Awaitable[Response]]
) -> Response:
    """What `serve` answers to the request's whole body; or why that is not read."""
    incoming = IncomingBody(budget)
    try:
        if (asgi_client.announced_length(request.headers.raw) or 0) > limit:
            raise BodyTooLarge(limit)
        await asgi_client.read_whole(incoming, request.receive, limit)
        return await serve(incoming.joined())
    except (BodyTooLarge, BodiesFull) as error:
        return RefusedUnread(answer(error), unread=not incoming.size)
    except asgi_client.ClientLeft:
        return Response(status_code=499)  # nobody reads it
    finally:
        incoming.drop()


def refuse_as_openai_does(api: FastAPI) -> None:
    """What FastAPI itself refuses (no such path, no such method) gets the same shape as what we do."""

    @api.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> Response:
        body = {"message": str(error.detail), "type": "invalid_request_error", "param": None, "code": None}
        return JSONResponse({"error": body}, status_code=error.status_code, headers=error.headers)

    @api.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Response:  # it is raised on, and reported where requests end
        return response_of(refusal(Blame(500, "server_error", "internal_error"), "The gateway failed."))

    @api.exception_handler(NotOpen)
    @api.exception_handler(AdminKeyRequired)
    async def not_open(_: Request, error: Exception) -> Response:
        return RefusedUnread(answer(error))
