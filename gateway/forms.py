"""The `model` field of a multipart form, read so strictly that the replica cannot read another.

For routing a quick look suffices (`prompt.form_model`): a wrong guess costs a place. Where a key may use certain models
only, a form must not show one name here and another there, so everything that parsers are known to read differently
(escapes, other spellings of a field's name, a second `model`) makes the form unreadable.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

CONTENT_TYPE = re.compile(rb"multipart/form-data; ?boundary=([A-Za-z0-9'()+_./:=?-]{1,70})", re.IGNORECASE)
DISPOSITION = re.compile(
    rb'form-data; ?name="([A-Za-z0-9_.\[\]-]{1,64})"(?:; ?filename="([^"\\\r\n;]{0,256})")?', re.IGNORECASE
)


def only_model(headers: Iterable[tuple[bytes, bytes]], body: bytes) -> str | None:
    """The form's model; `None` when it has none, or when that cannot be said for sure."""
    types = [value for name, value in headers if name == b"content-type"]
    form = CONTENT_TYPE.fullmatch(types[0]) if len(types) == 1 else None
    if form is None:
        return None
    first, *parts = (b"\r\n" + body).split(b"\r\n--" + form[1])
    if first or not parts or parts.pop() not in (b"--", b"--\r\n"):
        return None
    models: list[bytes] = []
    for part in parts:
        head, found, value = part.partition(b"\r\n\r\n")
        name = field_name(head)
        if name is None or not found:
            return None
        if name.lower() == b"model":
            models.append(value)
    try:
        return models[0].decode() if len(models) == 1 else None
    except UnicodeDecodeError:
        return None


def field_name(head: bytes) -> bytes | None:
    """Of a part, whose head is `CRLF header CRLF header`; `None` when it is not as plain as can be."""
    empty, *lines = head.split(b"\r\n")
    found = [line.partition(b":") for line in lines]
    dispositions = [value.strip() for name, _, value in found if name.lower() == b"content-disposition"]
    if empty or len(dispositions) != 1 or any(not re.fullmatch(rb"[A-Za-z-]+", name) for name, _, _ in found):
        return None
    match = DISPOSITION.fullmatch(dispositions[0])
    return match[1] if match is not None else None
