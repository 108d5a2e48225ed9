"""Tracebacks on standard error: where and what kind, never the message."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

from gateway.stderr_log import Discreet

SECRET = "what the client said"


def told(raise_it: Callable[[], None]) -> str:
    """The log line with its traceback."""
    record = logging.LogRecord("x", logging.ERROR, __file__, 1, "it failed", (), None)
    try:
        raise_it()
    except Exception:
        record.exc_info = sys.exc_info()
    record.exc_text = f"an earlier handler's text: {SECRET}"
    return Discreet("warmlane: %(message)s").format(record)


def plain() -> None:
    raise KeyError(SECRET)


def chained() -> None:
    try:
        plain()
    except KeyError as error:
        raise ValueError(SECRET) from error


def meanwhile() -> None:
    try:
        plain()
    except KeyError:
        int(SECRET)


def grouped() -> None:
    raise ExceptionGroup(SECRET, [ValueError(SECRET), ExceptionGroup(SECRET, [LookupError(SECRET)])])


def noted() -> None:
    error = ValueError(SECRET)
    error.add_note(SECRET)
    error.__cause__ = error
    raise error


def test_the_frames_and_the_type_are_there_and_the_message_is_not() -> None:
    text = told(plain)
    assert text.startswith("warmlane: it failed\nTraceback (most recent call last):\n")
    assert "in plain\n    raise KeyError(SECRET)\n" in text
    assert text.endswith("builtins.KeyError (its message is withheld: it may quote a request)")


def test_what_led_to_it_and_what_is_inside_it_is_shown_alike() -> None:
    for raise_it, kinds in (
        (chained, ["KeyError", "ValueError"]),
        (meanwhile, ["KeyError", "ValueError"]),
        (grouped, ["ExceptionGroup", "ValueError", "ExceptionGroup", "LookupError"]),
        (noted, ["ValueError"]),
    ):
        text = told(raise_it)
        assert SECRET not in text
        shown = [line.split()[0].removeprefix("builtins.") for line in text.splitlines() if "withheld" in line]
        assert shown == kinds
