"""Ids of stored responses: which ones can be served, and which one an answer has.

vLLM calls a response what its client asks for (`request_id`), else `resp_` and 16 hex digits. An id that does not fit
into a path as it is could never be asked for. In an answer only the place counts where an id stands: clients have
their own metadata, tools and texts repeated in it, and may write `"id"` wherever they like.
"""

from __future__ import annotations

import re

MAX_ID_CHARACTERS = 256
"""Of vLLM's own ids 21 are used, OpenAI's have 55."""
ID = rf"(?!\.{{1,2}}(?![A-Za-z0-9_.~-]))[A-Za-z0-9_.~-]{{1,{MAX_ID_CHARACTERS}}}"
"""What no client, proxy or server on the way to a replica spells otherwise (RFC 3986), or takes for another folder."""

_ID = re.compile(ID)
_ID_IN_BYTES = re.compile(ID.encode())
_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"|["{}\[\],:]', re.DOTALL)
QUOTE, OPEN_BRACE, OPEN_BRACKET, CLOSE_BRACE, CLOSE_BRACKET, COLON = b'"{[}]:'


def is_servable(id: str) -> bool:
    return _ID.fullmatch(id) is not None


def answered_id(head: bytes, *, streaming: bool) -> str | None:
    """The id of the response that begins so: a member of the whole, in a stream of an event's `response`."""
    if not streaming:
        return own_id(head, 1)
    for line in head.split(b"\n"):
        if line.startswith(b"data:") and (found := own_id(line, 2)) is not None:
            return found
    return None


def own_id(source: bytes, level: int) -> str | None:
    """The member `id` of the object (level 1), or of its member `response` (2). The source may end anywhere."""
    depth = 0
    last = name = b""
    is_response = False
    for token in _TOKEN.finditer(source):
        text = token[0]
        kind = text[0]
        if kind == QUOTE:
            if len(text) == 1:  # cut off
                return None
            if name == b'"id"' and depth == level and (level == 1 or is_response):
                found = text[1:-1]
                return found.decode() if _ID_IN_BYTES.fullmatch(found) else None
            last, name = text, b""
        elif kind == COLON:
            name = last
        else:
            if kind in (OPEN_BRACE, OPEN_BRACKET):
                if depth == 1:
                    is_response = kind == OPEN_BRACE and name == b'"response"'
                depth += 1
            elif kind in (CLOSE_BRACE, CLOSE_BRACKET):
                depth -= 1
            last = name = b""
    return None
