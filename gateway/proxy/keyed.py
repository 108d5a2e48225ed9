"""What a key changes about one request: its body where tenants are isolated, which models it may name, what it used."""

from __future__ import annotations

from gateway import forms
from gateway.core.model import Outcome, RouteRequest
from gateway.isolation import CannotSalt, Isolation
from gateway.keys import Key
from gateway.limits import ModelNotAllowed, Stay, used_tokens
from gateway.prompt import Shape
from gateway.request_log import RequestRecord

UNSALTED = (Shape.FORM, Shape.NONE)
"""Bodies without a place for a `cache_salt`: their endpoints share no prefixes."""


def salted(isolation: Isolation, body: bytes, shape: Shape, tenant: str, *, encoded: bool) -> bytes:
    """The body as the tenant's. Raises `CannotSalt`."""
    if shape in UNSALTED:
        return body
    if encoded:
        raise CannotSalt("Tenants are isolated here, so request bodies must not be compressed.")
    return isolation.salted(body, tenant)


def check_model(key: Key, request: RouteRequest, shape: Shape, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    """Raises `ModelNotAllowed`, also when it cannot be said for sure which model the replica will read."""
    if key.models is None or shape is Shape.NONE:
        return
    model = forms.only_model(headers, body) if shape is Shape.FORM else request.model
    if model not in key.models:
        raise ModelNotAllowed(model)


def settle(stay: Stay, record: RequestRecord, now: float) -> None:
    """The request is over: what it used comes off its key's limits."""
    served = record.attempts > 0 and (record.status < 400 or record.outcome == Outcome.OVERDUE.value)
    used = used_tokens(
        stay.reserved,
        served=served,
        prompt=record.prompt_tokens,
        completion=record.completion_tokens,
        streamed_bytes=record.response_bytes if record.stream else 0,
    )
    stay.leave(used, now)
