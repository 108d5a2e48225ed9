"""Order of the candidates once they have costs: cheapest first, ties broken without a preference for anybody, or as
other gateways would.

Ties go to the fewest in flight, then to a draw. The draw is a pure function of the number of requests started so far:
each run of n draws among n candidates is one permutation of them, so even a tie between the same replicas for ever
spreads evenly, and no rhythm in the traffic can line up with it.
"""

from __future__ import annotations

from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from gateway.core.model import Cost, Reason, ReplicaView, RouteRequest

AGREED_SHARE = 0.1
"""Gateways that hear of each other agree where costs differ by no more than this share of the prompt's uncached
prefill. Simulated with four gateways that hear of each other after 75 ms, the conversation trace at load 0.8 waited
0.588 s in the mean instead of 0.614, since they no longer send different prompts to the same idle replica at once; 0.25
did no better, 1.0 waited 0.635. Agents did not notice."""
CUT_OFF_SHARE = 1.0
"""The same where they cannot hear of each other: then to agree is all that finds the cache. Simulated agents on four
gateways found 58.7 % cached instead of 50.7, and waited 2.30 s instead of 2.50; the conversation, where less goes on,
14.5 % instead of 12.9, and 0.98 s instead of 0.86."""

Ranking = tuple[tuple[ReplicaView, Cost], ...]
Row = tuple[ReplicaView, Cost]


def ranked(views: Sequence[ReplicaView], costs: Sequence[Cost], draw: int) -> Ranking:
    """Candidates in order of cost."""
    rows = sorted(zip(views, costs, strict=True), key=total_of)
    if len(rows) > 1:
        least = rows[0][1].total
        if rows[1][1].total == least:
            count = next((i for i, row in enumerate(rows) if row[1].total != least), len(rows))
            rows[:count] = settled(rows[:count], draw)
    return tuple(rows)


def agreed(ranking: Ranking, key: int, slack_seconds: float) -> Ranking:
    """Rendezvous hashing: of those that hold as much of the prompt as the cheapest and cost hardly more, the one that
    any gateway with the same `key` would take comes first."""
    cheapest, cost = ranking[0]
    limit, cached = cost.total + slack_seconds, cheapest.cached_tokens
    near = [row for row in ranking if row[1].total <= limit and row[0].cached_tokens >= cached]
    chosen = max(near, key=lambda row: xxh3_64_intdigest(row[0].replica.encode(), key))
    view = chosen[0]  # compared instead of its row: compiled, a tuple does not stay the same object
    if view is cheapest:
        return ranking
    return (chosen, *[row for row in ranking if row[0] is not view])


def total_of(row: Row) -> float:
    return row[1].total


def settled(tied: list[Row], draw: int) -> list[Row]:
    """Tied rows by requests in flight, those with the fewest in drawn order."""
    fewest = min([view.in_flight for view, _ in tied])
    drawn = shuffled([row for row in tied if row[0].in_flight == fewest], draw)
    if len(drawn) == len(tied):
        return drawn
    return drawn + sorted([row for row in tied if row[0].in_flight > fewest], key=lambda row: row[0].in_flight)


def shuffled(rows: list[Row], draw: int) -> list[Row]:
    """Rows in a drawn order: draws n*k to n*k + n - 1 put each of n rows first once, in a new order for each k."""
    if len(rows) == 1:
        return rows
    turn, offset = divmod(draw, len(rows))
    order = sorted(rows, key=lambda row: xxh3_64_intdigest(row[0].replica.encode(), turn))
    return order[offset:] + order[:offset]


def reason_of(request: RouteRequest, ranking: Ranking) -> Reason:
    """Why the first of the ranking is first, as seen from the cache."""
    if request.pinned is not None:
        return Reason.PINNED
    if len(ranking) == 1:
        return Reason.ONLY
    longest = max(view.cached_tokens for view, _ in ranking)
    if longest <= 0:
        return Reason.COLD
    return Reason.WARM if ranking[0][0].cached_tokens >= longest else Reason.SPILLED
