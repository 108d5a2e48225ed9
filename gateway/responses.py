"""Refusals of the control endpoints as responses: the same OpenAI error objects as on the inference paths."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from gateway.proxy.errors import AdminKeyRequired, Blame, ErrorAnswer, NotOpen, answer, refusal


def response_of(refusal: ErrorAnswer, *, close: bool = False) -> Response:
    headers = {name.decode(): value.decode() for name, value in refusal.headers if name != b"content-length"}
    if close:
        headers["connection"] = "close"
    return Response(refusal.body, status_code=refusal.status, headers=headers)


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
        return response_of(answer(error), close=True)
