"""The list of models as `/v1/models` shows it to whoever asks."""

from __future__ import annotations

from typing import Any

from fastapi import Request

from gateway.core.model import ModelCard
from gateway.core.router import Router
from gateway.limits import Caller


def caller_of(request: Request) -> Caller | None:
    """Whose key it came with (`proxy/guard.py`)."""
    found: Caller | None = request.scope.get("auth")
    return found


def models_for(router: Router, request: Request) -> list[ModelCard]:
    caller = caller_of(request)
    allowed = caller.key.models if caller is not None else None
    return [card for card in router.models() if allowed is None or card.id in allowed]


def model_object(card: ModelCard) -> dict[str, Any]:
    return {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": card.owned_by,
        "root": card.root,
        "parent": card.parent,
        "max_model_len": card.max_model_len,
    }
