"""Parts of a cost: each prices one thing about sending a request to one replica, in seconds of predicted wait.

A part is a plain function of a view and its constants, so that policies combine them and a test can read each alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.core.model import ReplicaView

OUTPUT_RESERVE_TOKENS = 300
"""KV cache that a request will need beyond its prompt: an ordinary answer."""


def queue_seconds(view: ReplicaView) -> float:
    """Prefill of others that is booked before this one."""
    return view.pending_tokens / view.prefill_rate


def kv_overflow_tokens(view: ReplicaView) -> float:
    """By how much the prompts in flight and this one exceed the KV cache; nothing is exceeded by one alone."""
    if not view.in_flight:
        return 0.0
    return view.in_flight_tokens + view.prompt_tokens + OUTPUT_RESERVE_TOKENS - view.cache_tokens


def kv_wait_seconds(view: ReplicaView, overflow_tokens: float) -> float:
    """Wait until that much KV cache is free again, at the pace at which requests there come to their end."""
    return overflow_tokens * view.residence_seconds / max(1.0, min(view.in_flight_tokens, view.cache_tokens))


def crowd_requests(views: Sequence[ReplicaView], factor: float, slack: float) -> float:
    """Requests that a replica may have before it counts as crowded: `factor` times the mean, and `slack` more."""
    total = 0.0
    for view in views:
        total += view.in_flight + view.foreign_requests
    return factor * total / len(views) + slack


def known_kv_usage(views: Sequence[ReplicaView]) -> list[float]:
    """KV usage of each view; where it is unknown, the mean of the others: neither idle nor full."""
    known = [view.kv_usage for view in views if view.kv_usage is not None]
    if len(known) == len(views):
        return known
    mean = sum(known) / len(known) if known else 0.0
    return [mean if view.kv_usage is None else view.kv_usage for view in views]
