"""The paths that are served, as one table. What is not in it is answered 404 and never reaches a replica.

Keys are the exact bytes of the request target before `?`: the string that is looked up is the string that is
forwarded, so no encoding trick (`/v1%2fmodels`, `//v1/...`) can make the two differ.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gateway.prompt import Shape
from gateway.proxy.response_ids import ID


@dataclass(frozen=True, slots=True)
class Endpoint:
    path: str
    """Template, as metrics and log records show it."""
    shape: Shape
    """How the body is read for the routing key."""
    stateless: bool = True
    """Safe to send to another replica when the first was lost before it answered."""

    @property
    def works(self) -> bool:
        """The replica has something to compute; else it shows or ends what it has."""
        return self.shape is not Shape.NONE

    @property
    def anthropic(self) -> bool:
        return self.path.startswith("/v1/messages")


ENDPOINTS: dict[bytes, Endpoint] = {
    endpoint.path.encode(): endpoint
    for endpoint in (
        Endpoint("/v1/chat/completions", Shape.CHAT),
        Endpoint("/v1/completions", Shape.COMPLETION),
        Endpoint("/v1/responses", Shape.RESPONSES, stateless=False),
        Endpoint("/v1/messages", Shape.MESSAGES),
        Endpoint("/v1/messages/count_tokens", Shape.PLAIN),
        Endpoint("/v1/embeddings", Shape.PLAIN),
        Endpoint("/pooling", Shape.PLAIN),
        Endpoint("/classify", Shape.PLAIN),
        Endpoint("/v1/rerank", Shape.PLAIN),
        Endpoint("/v2/rerank", Shape.PLAIN),
        Endpoint("/rerank", Shape.PLAIN),
        Endpoint("/v1/score", Shape.PLAIN),
        Endpoint("/score", Shape.PLAIN),
        Endpoint("/v1/audio/transcriptions", Shape.FORM),
        Endpoint("/v1/audio/translations", Shape.FORM),
        Endpoint("/v1/audio/speech", Shape.PLAIN),
        Endpoint("/tokenize", Shape.PLAIN),
        Endpoint("/detokenize", Shape.PLAIN),
    )
}
"""POST endpoints by exact path."""

STORED_RESPONSE = Endpoint("/v1/responses/{id}", Shape.NONE, stateless=False)
CANCEL_RESPONSE = Endpoint("/v1/responses/{id}/cancel", Shape.NONE, stateless=False)
NOWHERE = Endpoint("other", Shape.NONE)
"""Stands for every path that is not served: paths are the clients' text, and neither logs nor labels repeat it."""

_RESPONSE = re.compile(rb"/v1/responses/(%b)(/cancel)?" % ID.encode())


def stored_response(method: bytes, path: bytes) -> tuple[Endpoint, str] | None:
    """The endpoint and response id of `GET /v1/responses/{id}` or `POST /v1/responses/{id}/cancel`."""
    match = _RESPONSE.fullmatch(path)
    if match is None:
        return None
    id_, cancel = match[1].decode(), match[2] is not None
    if method == b"GET" and not cancel:
        return STORED_RESPONSE, id_
    if method == b"POST" and cancel:
        return CANCEL_RESPONSE, id_
    return None
