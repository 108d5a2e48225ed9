"""Whose errors count: a replica that answers with errors is out only where it stands out from its like.

A 500 may be the doing of the request. One client that repeats a request which makes any engine fail meets one replica
after the other, and were each of them judged alone it would take out the fleet. So three things must come together:

- the requests that fail are of a kind that the replica can answer: prompts that begin with what it answered before, or
  any, while it completes none of those (`Health.flight_erred`);
- it fails far more of what it gets than those that serve the same model;
- no more than a third, or one, are out for that: a client can aim, for whoever knows a prefix knows where it is held.

The second alone does not do: what is new goes to whoever has least to do, and so do the requests that fail, all of
them. A connection that is lost or refused needs no comparison: that is no answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from gateway.core.flight import Flight
from gateway.core.model import HealthState, Outcome
from gateway.core.replica import Replica

ERRED_TO_EJECT = 0.4
"""Four of ten answers, where the others have no errors. With three, chance took out one of two that failed alike now
and then."""
OTHERS_WEIGHT = 1.5
"""... and so many times the share of the others more, where they have: where all fail one in five of what they get,
chance seldom shows one that fails seven in ten; where all fail half, none is out."""
OUT_OF = 3
"""One of so many may be out for errors."""


def judge(flight: Flight, outcome: Outcome, fleet: Iterable[Replica], now: float) -> bool:
    """What a flight's end says of the health of its replica. Returns whether its state changed."""
    replica, known = flight.to, flight.cached_tokens > 0
    if outcome is not Outcome.FAILED or not flight.answered:
        return replica.flight_ended(outcome, flight.started_at, now, known=known)
    if not replica.health.flight_erred(flight.started_at, known=known):
        return False
    return stands_out(replica, fleet, flight.request.model) and replica.health.blame_errors(now)


def stands_out(replica: Replica, fleet: Iterable[Replica], model: str | None) -> bool:
    """Whether the replica's errors are its own, to judge by those of the fleet that serve the model too."""
    own = replica.health.erred_share
    if own < ERRED_TO_EJECT:
        return False
    peers = [other for other in fleet if other is not replica and (model is None or other.serves(model))]
    out = sum(peer.health.erring for peer in peers)
    others = [peer.health.erred_share for peer in peers if peer.health.state is HealthState.UP or peer.health.erring]
    if not others or out >= max(1, (len(peers) + 1) // OUT_OF):
        return False
    return own >= ERRED_TO_EJECT + OTHERS_WEIGHT * median(others)
