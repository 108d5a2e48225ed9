"""What the headers of a request say: to the gateway, and (as lines) to the replica."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gateway.proxy.call import Call
from gateway.proxy.relay import HOP_BY_HOP, connection_tokens
from gateway.proxy.upstream import Header

NOT_FORWARDED = HOP_BY_HOP | {b"host", b"content-length", b"expect", b"x-request-id"}
NOTED = NOT_FORWARDED | {b"x-session-id", b"x-request-timeout", b"content-encoding"}
"""Request headers that are looked at; all others pass unseen."""
TIMEOUT = re.compile(rb"\d{1,5}(\.\d{1,6})?")
"""Seconds that a client gives its request; anything else in that header is ignored."""


@dataclass(slots=True)
class Forwarding:
    """What the request's headers say: to us, and (as lines) to the replica."""

    lines: bytes
    request_id: bytes | None = None
    session: str | None = None
    encoded: bool = False
    """The body is compressed."""
    timeout: float | None = None
    """Seconds that the client gives the whole request."""


def request_head(call: Call, host: bytes, lines: bytes, request_id: bytes) -> bytes:
    """The request line and headers for the replica."""
    return b"%b %b HTTP/1.1\r\nhost: %b\r\n%bx-request-id: %b\r\n%b\r\n" % (
        call.method,
        call.target,
        host,
        lines,
        request_id,
        b"content-length: %d\r\n" % len(call.body) if call.body or call.method != b"GET" else b"",
    )


def asking_plain(headers: list[Header]) -> list[Header]:
    """Of a request whose answer has to be read on its way, for it tells whose a stored response is: not compressed."""
    return [*(header for header in headers if header[0] != b"accept-encoding"), (b"accept-encoding", b"identity")]


def read_headers(headers: list[Header]) -> Forwarding:
    """One pass over the request's headers: what ends at a proxy is taken out, the rest keeps its order."""
    lines: list[bytes] = []
    found = Forwarding(b"")
    for name, value in headers:
        if name in NOTED:
            if name == b"connection":
                if (named := connection_tokens(value) - {b"close", b"keep-alive"}) & {name for name, _ in headers}:
                    return read_headers([header for header in headers if header[0] not in named | {b"connection"}])
            elif name == b"x-request-id":
                found.request_id = value
            elif name == b"x-session-id":
                found.session = value.decode("latin-1")
            elif name == b"content-encoding":
                found.encoded = value.lower() != b"identity"
            elif name == b"x-request-timeout" and TIMEOUT.fullmatch(value):
                found.timeout = float(value)
            if name in NOT_FORWARDED:
                continue
        lines += (name, b": ", value, b"\r\n")
    found.lines = b"".join(lines)
    return found
