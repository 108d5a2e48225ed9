"""Rankings as others see them: the candidates of a decision with their costs, bounded, as plain rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gateway.core.model import Cost, Decision, Reason, ReplicaView
from gateway.figures import percent, short_name, tokens

CANDIDATES = 8
"""The best of each decision: beyond them nobody reads, and 64 for each would make the ring of decisions 16 MB large."""

Ranking = tuple[tuple[ReplicaView, Cost], ...]


def shortened(ranking: Ranking) -> Ranking:
    """The best, and whoever holds most of the prompt: who reads why it was not taken must see it."""
    if len(ranking) <= CANDIDATES:
        return ranking
    best = ranking[: CANDIDATES - 1]
    return *best, max(ranking[CANDIDATES - 1 :], key=lambda one: one[0].cached_tokens)


def ranked_rows(ranking: Iterable[tuple[ReplicaView, Cost]]) -> list[dict[str, Any]]:
    return [
        {
            "replica": view.replica,
            "total_seconds": cost.total,
            "parts": dict(cost.parts),
            "prompt_tokens": round(view.prompt_tokens),
            "cached_tokens": round(view.cached_tokens),
            "pending_tokens": round(view.pending_tokens),
            "in_flight": view.in_flight,
            "kv_usage": view.kv_usage,
        }
        for view, cost in ranking
    ]


def decision_row(decision: Decision) -> dict[str, Any]:
    """One decision of a request, as the decision log has it."""
    return {
        "policy": decision.policy,
        "reason": decision.reason.value,
        "replica": decision.replica,
        "candidates": len(decision.ranking),
        "ranking": ranked_rows(shortened(decision.ranking)),
    }


def why(reason: str, ranking: Ranking) -> str:
    """The reason as a sentence. `ranking` has at least the first and whoever holds most of the prompt."""
    first = ranking[0][0]
    name = short_name(first.replica)
    share = percent(round(first.cached_tokens) / max(1, round(first.prompt_tokens)))  # as their figures say
    held = f"{tokens(first.cached_tokens)} of {tokens(first.prompt_tokens)} prompt tokens ({share})"
    if reason == Reason.PINNED.value:
        return f"{name} keeps the stored response that this is about: no other can serve it."
    if reason == Reason.ONLY.value:
        return f"{name} is the only candidate; it is believed to hold {held}."
    if reason == Reason.COLD.value:
        return f"Nobody is believed to hold anything of this prompt, so load decides: {name} is cheapest."
    if reason == Reason.WARM.value:
        return f"{name} is believed to hold {held}: nobody holds more."
    longest = max((view for view, _ in ranking), key=lambda view: view.cached_tokens)
    more = f"{short_name(longest.replica)} holds more of it ({tokens(longest.cached_tokens)} tokens)"
    return f"{more}, but to wait there costs more than it saves: {name} is cheaper, and holds {held}."
