"""The dry run from outside: ask a gateway where it would send a request body, and show each replica's cost by parts."""

from __future__ import annotations

import ssl

import httpx
import msgspec
from msgspec import Struct

from gateway.figures import Whole

TIMEOUT_SECONDS = 10.0
PATHS = {b"messages": "/v1/chat/completions", b"input": "/v1/responses", b"prompt": "/v1/completions"}
"""The key that tells which endpoint a body is meant for."""


class Unanswered(Exception):
    """The gateway gave no decision. One line says why. `status`: of its answer, if there was one."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class Candidate(Struct):
    replica: str
    total_seconds: float
    parts: dict[str, float]
    cached_tokens: Whole
    prompt_tokens: Whole
    in_flight: Whole
    pending_tokens: Whole


class Answer(Struct):
    policy: str
    reason: str
    replica: str
    ranking: list[Candidate]
    why: str = ""


def ask(url: str, body: bytes, session: str | None = None, key: str | None = None) -> bytes:
    """The gateway's answer as JSON. `session` is what the request's `x-session-id` would say, `key` the admin key, that
    a gateway wants that others can reach. Raises `Unanswered`."""
    headers = {b"content-type": b"application/json"}
    if key is not None:
        headers[b"authorization"] = b"Bearer " + key.encode("utf-8", "surrogateescape")
    if session is not None:
        headers[b"x-session-id"] = session.encode("utf-8", "surrogateescape")  # the bytes that were typed
    try:
        with new_client() as client:
            answer = client.post(
                f"{url.rstrip('/')}/warmlane/route",
                content=body,
                params={"path": path_of(body)},
                headers=headers,
            )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Unanswered(f"{url}: {error}") from error
    if answer.status_code != 200:
        raise Unanswered(f"{url}: HTTP {answer.status_code}: {message_of(answer.content)}", answer.status_code)
    return answer.content


def new_client() -> httpx.Client:
    """No proxy from the environment; `https://` gateways are verified as OpenSSL is told to (`SSL_CERT_FILE`)."""
    return httpx.Client(trust_env=False, timeout=TIMEOUT_SECONDS, verify=ssl.create_default_context())


def path_of(body: bytes) -> str:
    try:
        keys = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        keys = {}
    return next((path for key, path in PATHS.items() if key.decode() in keys), "/v1/chat/completions")


def message_of(body: bytes) -> str:
    """The message of an OpenAI error object, or the beginning of whatever else came."""
    try:
        found = msgspec.json.decode(body)["error"]["message"]
    except (msgspec.DecodeError, RecursionError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")
    return str(found)


def table(answer: bytes) -> str:
    """The decision for people: best replica first. Costs are seconds with `cache-cost`, else what the policy counts."""
    try:
        decision = msgspec.json.decode(answer, type=Answer)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Unanswered(f"not an answer of a Warmlane gateway: {error}") from error
    parts = list(dict.fromkeys(part for candidate in decision.ranking for part in candidate.parts))
    rows = [["replica", "cost", *parts, "cached", "prompt", "in flight", "pending"]]
    for candidate in decision.ranking:
        costs = [f"{candidate.parts[part]:.4f}" if part in candidate.parts else "-" for part in parts]
        counts = [candidate.cached_tokens, candidate.prompt_tokens, candidate.in_flight, candidate.pending_tokens]
        rows.append([candidate.replica, f"{candidate.total_seconds:.4f}", *costs, *map(str, counts)])
    title = f"policy {decision.policy}: {decision.reason} -> {decision.replica}"
    return "\n".join([title, *filter(None, [decision.why]), "", *aligned(rows)])


def aligned(rows: list[list[str]]) -> list[str]:
    """Lines of a table: the first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
