"""Rankings as others see them: the candidates of a decision with their costs, bounded, as plain rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gateway.core.model import Cost, Decision, ReplicaView

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
