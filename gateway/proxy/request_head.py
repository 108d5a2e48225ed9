"""What a request's head must be, so that nobody behind us can read its framing differently: one pass over its fields.

The parser under us (llhttp, strict) refuses what is not HTTP: bare CR or LF, NUL, folded fields, space before a colon,
length and chunks together. What is HTTP by its letters and still ambiguous, or would not be true any more behind a
proxy, is refused here: a coding other than `chunked` (we would forward a body whose coding nobody names), chunks from
HTTP/1.0, no or several `Host`, another version, a fragment or a byte outside ASCII in the target. Both ways of serving
clients ask here, so they cannot differ.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.proxy.errors import BadHead, BadVersion, ErrorAnswer, HeadTooLarge, answer

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers together; more is answered 431. Agents send some KB of headers at most."""
MAX_HEADERS = 256
"""A field weighs some 150 bytes beside its text: 64 KiB of the shortest would hold 2 MiB for each half head."""
MAX_BARREN_BYTES = 64 * 1024
"""Bytes of a body's framing (extensions of chunks, trailers) without one of the body between them."""

LOOKED_AT = frozenset((b"host", b"content-length", b"transfer-encoding", b"expect"))


@dataclass(slots=True)
class Framing:
    """What a head says of the body behind it."""

    length: int = 0
    """As announced; 0 when it comes in chunks, or there is none."""
    chunked: bool = False
    wants_continue: bool = False
    refusal: ErrorAnswer | None = None
    """Set: this is no request to serve."""


def read_framing(http_version: str, target: bytes, headers: list[tuple[bytes, bytes]]) -> Framing:
    """`headers` with names in lower case."""
    found = Framing()
    hosts = lengths = codings = 0
    problem = ""
    for name, value in headers:
        if name not in LOOKED_AT:
            continue
        if name == b"host":
            hosts += 1
        elif name == b"content-length":
            lengths += 1
            value = value.strip()  # the parser leaves blanks behind it
            if value.isdigit() and len(value) < 20:
                found.length = int(value)
            else:
                problem = "Content-Length is not a number."
        elif name == b"transfer-encoding":
            codings += 1
            if value.strip().lower() != b"chunked":
                problem = "The only transfer coding that is understood is chunked."
        elif value.lower() == b"100-continue":
            found.wants_continue = True
    found.chunked = codings > 0
    if codings and (lengths or codings > 1 or http_version == "1.0"):
        problem = "The length of the body is ambiguous."
    elif lengths > 1:
        problem = "The length of the body is announced twice."
    elif hosts != 1 and (hosts or http_version != "1.0"):
        problem = "A request has exactly one Host header."
    elif b"#" in target or not target.isascii():
        problem = "The request target has characters that do not belong there."
    if problem:
        found.refusal = answer(BadHead(problem))
    elif http_version != "1.1" and http_version != "1.0":
        found.refusal = answer(BadVersion())
    elif len(headers) > MAX_HEADERS:
        found.refusal = answer(HeadTooLarge())
    return found
