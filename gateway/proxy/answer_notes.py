"""What an answer told, for the record of its request."""

from __future__ import annotations

from gateway.core.model import Outcome, Usage
from gateway.proxy.call import Call
from gateway.proxy.errors import SAID_BY_REPLICA, code_of
from gateway.proxy.relay import Relay
from gateway.telemetry import RequestRecord


def note_answer(record: RequestRecord, relay: Relay, call: Call) -> None:
    """What the client has got, whether or not that was all."""
    record.status = relay.sent_status
    record.stream = relay.streaming
    record.response_bytes = relay.response_bytes
    call.made = relay.response_id() or call.made
    if relay.first_token_at is not None:
        record.ttft_seconds = relay.first_token_at - call.received_at


def note_end(record: RequestRecord, relay: Relay, outcome: Outcome, usage: Usage | None) -> None:
    """How it ended, of an answer that has ended."""
    record.outcome = outcome.value
    if outcome is not Outcome.COMPLETED:
        record.error = code_of(relay.error) if relay.error else SAID_BY_REPLICA.get(outcome, "")
    if usage is not None:
        record.prompt_tokens = usage.prompt_tokens
        record.cached_tokens = usage.cached_tokens
        record.completion_tokens = usage.completion_tokens
