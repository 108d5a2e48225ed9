"""What goes to standard error says what happened and where, never with what data.

The message of an exception that nobody foresaw may quote whatever the code was handling: a `KeyError` is the key, a
decoder's complaint the text around it. So a traceback here has its frames, which show source and no values, and the
type in place of the message. asyncio's own reports are cut down alike, for they show tasks and handles with what is in
them.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Any

log = logging.getLogger(__name__)

MAX_CHAIN = 8
"""Exceptions that led to one another; a loop of them would not end."""


class Discreet(logging.Formatter):
    """Tracebacks without the exceptions' messages."""

    def formatException(
        self,
        ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None],
    ) -> str:
        return "".join(lines(ei[1])).rstrip() if ei[1] is not None else ""

    def format(self, record: logging.LogRecord) -> str:
        record.exc_text = None  # another handler may have kept the whole text there
        return super().format(record)


def lines(error: BaseException) -> Iterator[str]:
    """The exceptions that led to this one, oldest first, and those inside it."""
    chain = [error]
    while len(chain) < MAX_CHAIN:
        last = chain[-1]
        before = last.__cause__ or (None if last.__suppress_context__ else last.__context__)
        if before is None or before in chain:
            break
        chain.append(before)
    for one in reversed(chain):
        yield "Traceback (most recent call last):\n"
        yield from traceback.format_tb(one.__traceback__)
        yield f"{type(one).__module__}.{type(one).__qualname__} (its message is withheld: it may quote a request)\n"
        if isinstance(one, BaseExceptionGroup):
            for inner in one.exceptions[:MAX_CHAIN]:
                yield from lines(inner)


def log_to_stderr() -> None:
    """What the gateway has to say about its replicas and itself; stdout belongs to the request log."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Discreet("warmlane: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for every probe


def report_unforeseen(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """The event loop's handler for what ended in nobody's hands."""
    log.error("%s", context.get("message", "something failed"), exc_info=context.get("exception"))


def report_failure(task: asyncio.Task[None]) -> None:
    """What runs beside the requests never ends by itself: if it does, that is a bug to be seen at once."""
    if not task.cancelled() and (error := task.exception()) is not None:
        context = {"message": "a job beside the requests failed", "exception": error, "task": task}
        task.get_loop().call_exception_handler(context)
