"""Error bodies exactly in vLLM's forms.

Three of them: the OpenAI error object; the same with a list of validation errors inside its message; and Anthropic's,
which `/v1/messages` uses for everything but validation errors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

TYPE_NAMES = {400: "BadRequestError", 404: "NotFoundError", 503: "Service Unavailable"}


class ApiError(Exception):
    """An answer that is an error, raised where it is found."""

    def __init__(self, status: int, message: str, param: str | None = None, type_name: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.type_name = type_name or TYPE_NAMES[status]

    def openai_body(self) -> bytes:
        error = {"message": self.message, "type": self.type_name, "param": self.param, "code": self.status}
        return msgspec.json.encode({"error": error})

    def anthropic_body(self) -> bytes:
        error = {"type": self.type_name, "message": self.message}
        return msgspec.json.encode({"type": "error", "error": error})


class Fault(NamedTuple):
    """One thing that is wrong with a body."""

    kind: str
    loc: str
    message: str
    value: Any
    """The offending value, or what surrounds the missing one."""
    context: dict[str, Any] | None = None

    def __str__(self) -> str:
        shown: dict[str, Any] = {"type": self.kind, "loc": self.loc, "msg": self.message, "input": sketch(self.value)}
        if self.context is not None:
            shown["ctx"] = self.context
        return f"  {shown}"


class InvalidBody(ApiError):
    """A body of the wrong shape. Has the OpenAI form on every route."""

    def __init__(self, *faults: Fault) -> None:
        head = f"{len(faults)} validation error{'s' if len(faults) > 1 else ''}:\n"
        super().__init__(400, head + "\n".join(map(str, faults)), faults[0].loc, "Bad Request")

    def anthropic_body(self) -> bytes:
        return self.openai_body()


class WrongMediaType(ApiError):
    def __init__(self) -> None:
        message = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
        super().__init__(400, message, None, "Bad Request")

    def anthropic_body(self) -> bytes:
        return self.openai_body()


class Unparsable(ApiError):
    """Bytes that are no text in any way: refused before vLLM's own handlers, hence another form."""

    def __init__(self) -> None:
        super().__init__(400, "There was an error parsing the body")

    def openai_body(self) -> bytes:
        return msgspec.json.encode({"detail": self.message})

    def anthropic_body(self) -> bytes:
        return self.openai_body()


def parameter_error(message: str, param: str, value: Any = None) -> ApiError:
    suffix = f"(parameter={param})" if value is None else f"(parameter={param}, value={value})"
    return ApiError(400, f"{message} {suffix}", param)


def unknown_model(name: str, served: str) -> ApiError:
    return ApiError(404, f"The model `{name}` does not exist. Valid aliases: {served}.", "model")


def prompt_too_long(limit: int, length: int, exact: bool) -> ApiError:
    """`exact`: vLLM counts token ids exactly, and stops to count a text one past the limit."""
    tokens = length if exact else limit + 1
    return parameter_error(
        f"This model's maximum context length is {limit} tokens. However, your prompt contains "
        f"{'' if exact else 'at least '}{tokens} input tokens, "
        "which exceeds this limit even without any output tokens. Please reduce the length of the input prompt.",
        "input_tokens",
        tokens,
    )


def queue_full() -> ApiError:
    return ApiError(
        503,
        "The engine is currently busy and cannot accept new requests. "
        "Please try again later or on a different instance.",
    )


def sketch(value: Any) -> str:
    """A short stand-in for a value, whatever its size."""
    if isinstance(value, dict | list):
        return f"<{type(value).__name__} of {len(value)} items>"
    text = str(value)
    return text if len(text) <= 100 else text[:100] + "..."
