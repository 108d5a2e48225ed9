"""The HTTP session in which a collector is told spans.

An answer counts by its status alone, so little is read of its body, and not for long: what is behind a wrong address,
or a collector that has lost its mind, may answer without an end. A redirect is not followed and is no acceptance.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

import requests

MAX_ANSWER_BYTES = 4_096
"""A collector that takes spans answers with two bytes, one that does not with a line."""
ANSWER_SECONDS = 5.0
"""For a body, which as a rule comes with its head."""
PROVIDERS = (
    "OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER",
    "OTEL_PYTHON_EXPORTER_OTLP_HTTP_TRACES_CREDENTIAL_PROVIDER",
)
"""OpenTelemetry's variables that name who makes the session."""


def new_session() -> requests.Session | None:
    """`None` where OpenTelemetry is told to have another made."""
    if any(os.environ.get(name) for name in PROVIDERS):
        return None
    session = requests.Session()
    session.stream = True  # no more is read than `read_some` does
    session.hooks["response"].append(read_some)
    return session


def read_some(response: requests.Response, *_: Any, **_options: Any) -> None:
    """Raises `requests.TooManyRedirects` for the first."""
    content, is_whole = bytearray(), False
    give_up_at = time.monotonic() + ANSWER_SECONDS
    with contextlib.suppress(requests.RequestException):  # its status has come
        for some in response.iter_content(1):
            content += some
            if len(content) >= MAX_ANSWER_BYTES or time.monotonic() > give_up_at:
                break
        else:
            is_whole = True
    if not is_whole:  # else the connection can be used again
        response.close()
    response._content = bytes(content)
    if response.is_redirect:
        raise requests.TooManyRedirects(f"redirected to {response.headers.get('location')}")
