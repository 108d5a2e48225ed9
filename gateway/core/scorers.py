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
    return max(0.0, view.pending_tokens) / view.prefill_rate


def prefill_seconds(view: ReplicaView) -> float:
    """The request's own prefill."""
    return (view.prompt_tokens - view.cached_tokens) / view.prefill_rate


def kv_wait_seconds(view: ReplicaView, weight: float) -> float:
    """Wait for KV cache to become free, where the prompts in flight and this one are more than fits."""
    if not view.in_flight:
        return 0.0
    overflow = view.in_flight_tokens + view.prompt_tokens + OUTPUT_RESERVE_TOKENS - view.cache_tokens
    if overflow <= 0:
        return 0.0
    return weight * overflow * view.residence_seconds / min(view.in_flight_tokens, view.cache_tokens)


def kv_usage_seconds(usage: float, threshold: float, full_seconds: float) -> float:
    """Scraped pressure: nothing up to the threshold, then rising to `full_seconds` at a full cache (preemption)."""
    return full_seconds * max(0.0, usage - threshold) / (1.0 - threshold)


def crowd_requests(views: Sequence[ReplicaView], factor: float, slack: float) -> float:
    """Requests that a replica may have before it counts as crowded: `factor` times the mean, and `slack` more."""
    total = sum(view.in_flight + view.foreign_requests for view in views)
    return factor * total / len(views) + slack


def known_kv_usage(views: Sequence[ReplicaView]) -> list[float]:
    """KV usage of each view; where it is unknown, the mean of the others: neither idle nor full."""
    usages = [view.kv_usage for view in views]
    if None not in usages:
        return usages  # type: ignore[return-value]
    known = [usage for usage in usages if usage is not None]
    mean = sum(known) / len(known) if known else 0.0
    return [mean if usage is None else usage for usage in usages]
