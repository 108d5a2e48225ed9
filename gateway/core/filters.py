"""Who may get a request at all. A filter takes candidates and gives those that remain; the first that leaves none
explains.

Filters look at what a replica *is* (model, health, draining), never at how well it suits: that is for the policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from gateway.core.health import Health
from gateway.core.model import HealthState, ModelCard, UnknownModel

PANIC_SHARE = 0.5
"""With less than half of the replicas available, the few left would drown, and health itself is in doubt."""


class Candidate(Protocol):
    """What filters read of a replica."""

    health: Health
    draining: bool
    models: tuple[ModelCard, ...] | None
    """`None` until it has listed them."""

    def serves(self, model: str) -> bool: ...


C = TypeVar("C", bound=Candidate)


def serving(replicas: Sequence[C], model: str | None) -> list[C]:
    """Those that list the model. Those that have not listed anything yet stand in while nobody lists it, for they may.

    Raises `UnknownModel` when the lists that are known leave nobody to ask.
    """
    if model is None:
        return list(replicas)
    listed = [replica for replica in replicas if replica.serves(model)]
    if listed:
        return listed
    unlisted = [replica for replica in replicas if replica.models is None]
    if len(unlisted) < len(replicas):
        unlisted = [replica for replica in unlisted if replica.health.state is HealthState.UP]
        if not unlisted:
            raise UnknownModel(model)
    return unlisted


def accepting(replicas: Iterable[C]) -> list[C]:
    """Those that no operator drains and that do not sleep (a sleeping engine hangs requests)."""
    return [r for r in replicas if not r.draining and r.health.state is not HealthState.ASLEEP]


def available(replicas: Sequence[C], now: float) -> list[C]:
    """The best tier by health that is not empty, wider when too few are left.

    Up (or due for a trial); if fewer than half are, those ejected only because probes failed as well, for they may well
    serve; else those never heard of; else anything that may answer: where nobody can be connected to, nobody is left,
    and the client is told at once.
    """
    up = [r for r in replicas if r.health.state is HealthState.UP or r.health.may_be_tried(now)]
    if len(up) == len(replicas):
        return up
    ejected = [r for r in replicas if r.health.state is HealthState.EJECTED and r not in up]
    if len(up) < PANIC_SHARE * len(replicas):
        up += [r for r in ejected if not r.health.flights_failed]
    unknown = [r for r in replicas if r.health.state is HealthState.UNKNOWN]
    return up or unknown or [r for r in ejected if not r.health.is_hopeless(now)]
