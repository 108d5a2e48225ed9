"""What a key changes about one request: its body where tenants are isolated, which models it may name, what it used."""

from __future__ import annotations

from typing import Protocol

from gateway import forms
from gateway.core.model import Outcome, ReplicaId, RouteRequest
from gateway.core.router import Router
from gateway.isolation import CannotSalt, Isolation
from gateway.keys import Key
from gateway.limits import BYTES_A_TOKEN, ModelNotAllowed, Stay, guessed_tokens, used_tokens
from gateway.prompt import NotJson, Shape
from gateway.proxy.call import Call
from gateway.proxy.errors import SAID_BY_REPLICA, BadBody, EncodedBody, IdTaken, NotFound
from gateway.proxy.response_ids import MAX_ID_CHARACTERS, is_servable
from gateway.request_log import RequestRecord

UNSALTED = (Shape.FORM, Shape.NONE)
"""Bodies without a place for a `cache_salt`: their endpoints share no prefixes."""
GENERATING = (Shape.CHAT, Shape.COMPLETION, Shape.RESPONSES, Shape.MESSAGES)
"""Their answers are generated token by token; those of others have their size from what was sent."""
REFUSED = (429, 503)
"""Statuses of what had no room or no replica, where the gateway itself says so."""


def salted(isolation: Isolation, body: bytes, shape: Shape, tenant: str, *, encoded: bool) -> bytes:
    """The body as the tenant's. Raises `CannotSalt` and `BadBody`."""
    if shape in UNSALTED:
        return body
    if encoded:
        raise CannotSalt("Tenants are isolated here, so request bodies must not be compressed.")
    try:
        return isolation.salted(body, tenant)
    except NotJson as error:
        raise BadBody(str(error)) from error


def check_model(key: Key, request: RouteRequest, shape: Shape, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    """Raises `ModelNotAllowed`, also when it cannot be said for sure which model the replica will read."""
    if key.models is None or shape is Shape.NONE:
        return
    model = forms.only_model(headers, body) if shape is Shape.FORM else request.model
    if model not in key.models:
        raise ModelNotAllowed(model)


def check_readable(shape: Shape, *, encoded: bool) -> None:
    """Raises `EncodedBody` where a body may name a stored response of another tenant and nobody could tell."""
    if encoded and shape is Shape.RESPONSES:
        raise EncodedBody("With API keys, bodies of this endpoint must not be compressed.")


def check_ids(router: Router, key: Key, asked: str | None, wanted: str | None) -> None:
    """Ids of stored responses: the one that is asked for or continued, and the one that the new one is to have. Raises
    `NotFound` for another tenant's. One that could not be asked for would be nobody's, and what it stands for could be
    followed to no end: nobody may have it."""
    if wanted is not None and not is_servable(wanted):
        raise BadBody(
            f"`request_id` must have 1 to {MAX_ID_CHARACTERS} characters, each a letter, a digit or one of `_.~-`."
        )
    for named in (asked, wanted):
        if named is not None and (not is_servable(named) or router.is_foreign(named, key.tenant)):
            raise NotFound("There is no stored response with this id.")


def reserve(stay: Stay, request: RouteRequest, now: float) -> None:
    """The request has been read. Raises `OverLimit`."""
    stay.reserve(request.length // BYTES_A_TOKEN, now)
    if request.max_output_tokens is not None:
        stay.most_tokens = request.max_output_tokens * request.samples


class Background(Protocol):
    """Keeps the stay of what goes on behind its answer, until its owner says that it is over."""

    def claim(self, id: str) -> bool:
        """A request that asks for this id begins. Whether nobody else has it: what the replica says of an id is about
        one response only."""

    def release(self, id: str) -> None:
        """The request that claimed it has ended."""

    def follow(self, stay: Stay, tenant: str, replica: ReplicaId, id: str | None) -> None:
        """`id`: `None` when it could not be seen."""

    def look(self, id: str) -> None:
        """The client has just asked for it, or cancelled it: perhaps it is over."""


def claim(background: Background | None, call: Call) -> None:
    """The id that the call asks for is its own until it has ended, and as long as it is followed. Raises `IdTaken`."""
    if call.made is not None and background is not None:
        if not background.claim(call.made):
            raise IdTaken("A response with this `request_id` is being made.")
        call.claimed = call.made


def end(background: Background | None, call: Call, record: RequestRecord, now: float) -> None:
    """The request is over: its key's limits hear what it used, or who will say so."""
    if (stay := call.stay) is not None:
        if background is not None and stay.is_limited and goes_on(call, record):
            background.follow(stay, record.tenant, ReplicaId(record.replica), call.made)
        else:
            settle(stay, record, call, now - call.received_at, now)
    if background is not None and call.claimed is not None:
        background.release(call.claimed)
    if background is not None and call.response_id is not None:
        background.look(call.response_id)


def goes_on(call: Call, record: RequestRecord) -> bool:
    """Whether the replica may still work on it although its answer has ended: with `background` it does, unless its
    stream was relayed to the end. It does not notice a client that leaves, either."""
    whole = record.stream and record.outcome == Outcome.COMPLETED.value
    was_sent = bool(record.overhead_seconds)
    return call.background and was_sent and record.status < 400 and not whole


def settle(stay: Stay, record: RequestRecord, call: Call, seconds: float, now: float) -> None:
    """The request is over, `seconds` after it came: what it used comes off its key's limits. To look at a stored
    response costs nothing, whatever usage that shows: it was charged when it was made."""
    shape = call.endpoint.shape
    served = record.attempts > 0 and (record.status < 400 or record.outcome == Outcome.OVERDUE.value)
    guessed = 0
    if record.stream or (shape in GENERATING and record.overhead_seconds):  # and it was sent
        guessed = guessed_tokens(
            stay.most_tokens,
            streamed=record.stream,
            answer_bytes=0 if call.background and not record.stream else record.response_bytes,
            seconds=seconds - record.waited_seconds,
        )
    used = used_tokens(
        stay.reserved,
        served=served and shape is not Shape.NONE,
        prompt=record.prompt_tokens,
        completion=record.completion_tokens,
        guessed=guessed,
    )
    ours = bool(record.error) and record.error != SAID_BY_REPLICA[Outcome.REFUSED]
    stay.leave(used, now, refused=ours and (record.status in REFUSED or not record.attempts))
