"""The request log: one JSON record for each request, with ids, numbers and reasons; never prompt text, headers or keys.

Records are encoded at once into a buffer, which `flush` hands to a thread of its own: a reader of the log that stalls
(a full pipe, a stopped terminal) must never stop the event loop. What it leaves unread beyond a limit is dropped and
counted.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, Protocol

import msgspec

from gateway.core.model import Decision
from gateway.prefix_log import PrefixRecord

MAX_TEXT = 256
"""Characters of a text that comes from a client; OpenAI's own ids and model names are far shorter."""
MAX_UNWRITTEN_BYTES = 8 * 1024 * 1024
"""About 15,000 records: seconds of a busy gateway. Beyond it the reader is gone rather than slow."""
CLOSE_SECONDS = 1.0
"""For the last records at the end; a reader that does not take them by then does not get them."""


class RequestRecord(msgspec.Struct, gc=False):
    """What is known about one request when it ends. Filled on its way by the data path; times in seconds."""

    request_id: str
    route: str
    """Path template from the table of endpoints, e.g. `/v1/responses/{id}`."""
    key: str = ""
    """Name of the key that it came with; empty while nobody is asked for one."""
    time: float = 0.0
    """Unix time of the end."""
    model: str = ""
    """As the client wrote it; empty when it named none."""
    tenant: str = ""
    """Whose request it is; empty as long as there are no keys."""
    status: int = 0
    """As sent to the client; 0 when it left before."""
    outcome: str = ""
    """Value of `Outcome`. For a request that no replica got: as if the gateway were one."""
    error: str = ""
    """Short code of a closed set, empty when nothing went wrong, the client left or the gateway was stopped."""
    shed: str = ""
    """Value of `ShedReason` when the gateway itself refused it; else empty."""
    stream: bool = False
    replica: str = ""
    """The last that was tried; empty when none was."""
    policy: str = ""
    reason: str = ""
    attempts: int = 0
    """Flights to replicas: more than one means that a replica was lost before it answered."""
    prompt_tokens_estimated: int = 0
    cached_tokens_predicted: int = 0
    prompt_tokens: int | None = None
    """As the replica reported, like the next two; `None` where it did not."""
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    waited_seconds: float = 0.0
    """At the gate, before a replica could take it."""
    overhead_seconds: float = 0.0
    """The gateway's own time from the whole request read to its dispatch, the wait not counted; 0 when never sent."""
    ttft_seconds: float | None = None
    """To the first token that was relayed."""
    duration_seconds: float = 0.0
    request_bytes: int = 0
    response_bytes: int = 0
    trace_id: str | msgspec.UnsetType = msgspec.UNSET
    """With `[tracing]`, of requests that are sampled."""
    prefix: PrefixRecord | msgspec.UnsetType = msgspec.UNSET
    """With `[server] log_blocks`, of requests that have a prompt."""
    decisions: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET
    """In the decision log only: one row for each flight, as `rankings.decision_row` makes them."""

    def started(self, decision: Decision) -> None:
        """A flight begins. A retry overwrites the decision before it."""
        self.attempts += 1
        self.replica = decision.replica
        self.policy = decision.policy
        self.reason = decision.reason.value
        self.prompt_tokens_estimated = int(decision.view.prompt_tokens)
        self.cached_tokens_predicted = decision.cached_tokens


class Lines(Protocol):
    """Where records go."""

    def write(self, lines: bytes, /) -> object: ...

    def flush(self) -> None: ...


class RequestLog:
    """Writes records to `stream`, one line each. Its thread starts with the first flush and ends with `close`."""

    def __init__(self, stream: Lines) -> None:
        self.lost = 0
        """Records that could not be written."""
        self._stream = stream
        self._encoder = msgspec.json.Encoder()
        self._buffer = bytearray()
        self._records = 0
        self._unwritten: deque[tuple[bytes, int]] = deque()
        self._unwritten_bytes = 0
        self._changed = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None

    def add(self, record: RequestRecord) -> None:
        record.request_id = clean(record.request_id)
        record.model = clean(record.model)
        self._encoder.encode_into(record, self._buffer, -1)
        self._buffer += b"\n"
        self._records += 1

    def flush(self) -> None:
        """Hand what was added to the writing thread. Never waits for the reader of the log."""
        if not self._records:
            return
        batch, records = bytes(self._buffer), self._records
        self._buffer.clear()
        self._records = 0
        with self._changed:
            if self._unwritten_bytes + len(batch) > MAX_UNWRITTEN_BYTES:
                self.lost += records
                return
            self._unwritten.append((batch, records))
            self._unwritten_bytes += len(batch)
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, name="request-log", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Flush, then wait a moment for the thread to write it all."""
        self.flush()
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._unwritten or self._closing)
                if not self._unwritten:
                    return
                batch, records = self._unwritten[0]
            try:
                self._stream.write(batch)
                self._stream.flush()
            except (OSError, ValueError):  # the reader is gone, or the stream was closed
                self.lost += records
            with self._changed:
                self._unwritten.popleft()
                self._unwritten_bytes -= len(batch)


def clean(text: str) -> str:
    """Without control characters and not endless: what a client sends must not forge or flood log lines."""
    if len(text) <= MAX_TEXT and text.isprintable():
        return text
    return "".join(character if character.isprintable() else "?" for character in text[:MAX_TEXT])
