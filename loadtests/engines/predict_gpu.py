"""Does the simulator know four replicas on one GPU? `python -m loadtests.engines.predict_gpu RESULTS.jsonl FACTS.json`

The lines are of users in a closed loop for so many `seconds`; what they had asked by then was answered. Simulated are
those of Warmlane and of no router at all (round-robin), with the rates in the facts and nothing fitted to the lines.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import msgspec

from gateway.core.settings import RoutingSettings
from loadtests.bench.report import number, table
from loadtests.engines.fleet import BLOCK_TOKENS
from loadtests.engines.measure import Facts
from loadtests.engines.predict import fleet_of
from loadtests.fleet import Fleet
from loadtests.simulator import Simulator
from loadtests.traces.generated import Chats
from loadtests.virtual_gateway import Trip

POLICIES = {"warmlane": "cache-cost", "round-robin": "round-robin"}
MAX_NUM_SEQS, STEP_TOKENS = 256, 8_192
"""vLLM's own for a server on such a GPU, as its log says."""
BYTES_PER_TOKEN = 1.7
"""Of the text, random letters; as the request logs show it."""
SIZES = {24: (3_290, 4_900), 36: (3_290, 4_900), 48: (4_900, 8_190)}
"""By users: tokens of the system prompts and of the first questions, as the request logs show them."""
TURN_TOKENS = 780
"""Of a further question: prompts grew by 876 tokens a turn, 96 of which are the answer."""


class Line(msgspec.Struct, frozen=True):
    router: str
    users: int
    seed: int
    seconds: float
    ttft_mean: float
    cached_share: float
    req_per_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    ttft_mean: float
    cached_share: float
    req_per_s: float


class Window(Simulator):
    """Nobody asks anything new after so many seconds."""

    ends_at = float("inf")

    def _over(self, trip: Trip, now: float) -> None:
        if now < self.ends_at:
            super()._over(trip, now)

    @property
    def _is_over(self) -> bool:
        ended = all(trip.ended_at is not None or trip.shed or trip.failed for trip in self.trips)
        return super()._is_over or (self.seconds > self.ends_at and ended)


def simulate(line: Line, fleet: Fleet) -> Outcome:
    system, context = SIZES[line.users]
    chats = Chats(
        users=line.users,
        system_tokens=system,
        context_tokens=context,
        turn_tokens=TURN_TOKENS,
        block_tokens=BLOCK_TOKENS,
    )
    requests = chats.trace(line.seed).requests
    window = Window(requests, fleet, RoutingSettings(policy=POLICIES[line.router]), line.seed, closed_loop=True)
    window.ends_at = line.seconds
    trips = window.run()
    times = [ttft for trip in trips if (ttft := trip.ttft_seconds) is not None]
    return Outcome(
        fmean(times),
        sum(trip.cached_tokens for trip in trips) / sum(trip.request.input_tokens for trip in trips),
        len(times) / max(trip.ended_at or 0.0 for trip in trips),
    )


def as_table(lines: Sequence[Line], fleet: Fleet) -> str:
    groups: dict[tuple[int, str], list[Line]] = {}
    for line in sorted(lines, key=lambda line: (line.users, line.ttft_mean)):
        if line.router in POLICIES:
            groups.setdefault((line.users, line.router), []).append(line)
    rows = []
    for (users, router), of in groups.items():
        found = [simulate(line, fleet) for line in of]
        cached = fmean(line.cached_share for line in of), fmean(one.cached_share for one in found)
        measured, simulated = fmean(line.ttft_mean for line in of), fmean(one.ttft_mean for one in found)
        rows.append(
            [
                str(users),
                POLICIES[router],
                str(len(of)),
                number(measured, 3),
                number(simulated, 3),
                number(simulated / measured, 2),
                f"{100 * cached[0]:.0f} / {100 * cached[1]:.0f}",
                f"{fmean(line.req_per_s for line in of):.2f} / {fmean(x.req_per_s for x in found):.2f}",
            ]
        )
    return table(["users", "policy", "runs", "measured s", "simulated s", "ratio", "cached %", "requests/s"], rows)


def fleet_on_gpu(facts: Facts) -> Fleet:
    return replace(fleet_of(facts, MAX_NUM_SEQS, STEP_TOKENS), text_bytes_per_token=BYTES_PER_TOKEN)


def main() -> None:
    parser = argparse.ArgumentParser(prog="predict_gpu", description="Measured and simulated time to first token.")
    parser.add_argument("results", type=Path)
    parser.add_argument("facts", type=Path)
    given = parser.parse_args()
    lines = [msgspec.json.decode(line, type=Line) for line in given.results.read_bytes().splitlines()]
    print(as_table(lines, fleet_on_gpu(msgspec.json.decode(given.facts.read_bytes(), type=Facts))))


if __name__ == "__main__":
    main()
