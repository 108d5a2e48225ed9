"""Does the simulator know these engines? `python -m loadtests.engines.predict RESULTS.jsonl FACTS.json`

Takes the chats of each run of Warmlane's own policies in a results file, simulates them on engines as fast as those
that `loadtests.engines.measure` found, and prints measured and simulated time to first token side by side. Nothing is
fitted to the results: rates, attention, cache and floor are the measured ones. The replicas share the cores of one
machine, so a replica that is alone is as fast as `prefill_alone` says, and together they do what `sustained` says.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, linear_regression

import msgspec

from gateway.core.settings import POLICY_NAMES, RoutingSettings
from loadtests.bench.report import number, table
from loadtests.engines.fleet import BLOCK_TOKENS
from loadtests.engines.measure import Facts, Prefill, Sustained
from loadtests.engines.report import Run, read_runs
from loadtests.fleet import Fleet
from loadtests.simulator import Simulator
from loadtests.traces.generated import Chats
from workers.engine_model import EngineRequest

MAX_NUM_SEQS = 8
"""Of the preset that the replicas are started with."""
STEP_TOKENS = 2_048
"""vLLM's `max_num_batched_tokens` for a server on a CPU."""
BUSY_STREAMS = 2
"""Prompts that each replica has at a time while all are measured busy."""
SHARE_PRECISION = 1e-4
TOLERANCE = 0.25
"""A mean this near is a prediction."""


@dataclass(frozen=True, slots=True)
class Prediction:
    regime: str
    policy: str
    measured_seconds: float
    simulated_seconds: float
    measured_cached: float
    simulated_cached: float

    @property
    def ratio(self) -> float:
        return self.simulated_seconds / self.measured_seconds


def fleet_of(facts: Facts, max_num_seqs: int = MAX_NUM_SEQS, step_tokens: int = STEP_TOKENS) -> Fleet:
    """The measured replicas, as fast as one is alone until so many are busy that they share the machine."""
    first, growth = prefill_curve(facts.prefill_alone)
    one, most = facts.decode_alone[0], facts.decode_alone[-1]
    fleet = Fleet(
        replicas=facts.replicas,
        cache_tokens=facts.cache_tokens,
        block_tokens=BLOCK_TOKENS,
        prefill_rate=1 / first,
        attention_tokens=first / (2 * growth) if growth > 0 else None,
        decode_rate=one.tokens_per_second,
        decode_slowdown=max(0.0, (one.tokens_per_second / most.tokens_per_second - 1) / (most.streams - 1)),
        max_num_seqs=max_num_seqs,
        first_token_floor_seconds=facts.floor_seconds,
        shared_processor=True,
        step_tokens=step_tokens,
        preempts=True,
    )
    return replace(fleet, full_speed_replicas=facts.replicas * share_of_each(fleet, facts.sustained))


def share_of_each(fleet: Fleet, busy: Sustained) -> float:
    """Of its full speed that each replica has while all are busy: with it the engine model takes as long as was
    measured."""
    low, high = 0.0, 1.0
    while high - low > SHARE_PRECISION:
        share = (low + high) / 2
        low, high = (low, share) if busy_seconds(fleet, busy, share) < busy.seconds else (share, high)
    return high


def busy_seconds(fleet: Fleet, busy: Sustained, share: float) -> float:
    """What one replica takes for its part of that measurement. The others do the same at the same time."""
    engine = fleet.engine(0)
    engine.share_processor(share, 0.0)
    now, left = 0.0, busy.prompts
    while True:
        while left and engine.running + engine.waiting < BUSY_STREAMS:
            engine.submit(EngineRequest(busy.prompt_tokens, busy.answer_tokens), now)
            left -= 1
        at = engine.next_event()
        if at is None:
            return now
        now = at
        engine.advance(now)


def prefill_curve(prefills: Sequence[Prefill]) -> tuple[float, float]:
    """Seconds that `n` tokens take are the first figure times n and the second times n squared, for attention looks at
    all tokens before: least squares over what was measured, each prompt counting alike."""
    slopes = [(one.prompt_tokens, (one.cold_seconds - one.warm_seconds) / one.prompt_tokens) for one in prefills]
    growth, first = linear_regression(*zip(*slopes, strict=True)) if len(slopes) > 1 else (0.0, slopes[0][1])
    return (first, growth) if growth > 0 and first > 0 else (fmean(slope for _, slope in slopes), 0.0)


def chats_of(run: Run) -> Chats:
    """The same chats: the sizes have the same names in both."""
    return Chats(**msgspec.structs.asdict(run.workload), block_tokens=BLOCK_TOKENS)


def simulate(run: Run, fleet: Fleet) -> tuple[float, float]:
    """Mean time to first token, and the cached share of the prompt tokens."""
    requests = chats_of(run).trace(run.seed).requests
    trips = Simulator(requests, fleet, RoutingSettings(policy=run.router), run.seed, closed_loop=True).run()
    times = [ttft for trip in trips if (ttft := trip.ttft_seconds) is not None]
    return fmean(times), sum(trip.cached_tokens for trip in trips) / sum(trip.request.input_tokens for trip in trips)


def predictions(runs: Iterable[Run], fleet: Fleet) -> list[Prediction]:
    """One for each regime and policy, means over the repeats."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        if run.router in POLICY_NAMES and run.figures.ttft_mean is not None:
            groups.setdefault((run.regime, run.router), []).append(run)
    found = []
    for (regime, policy), of in groups.items():
        simulated = [simulate(run, fleet) for run in of]
        found.append(
            Prediction(
                regime=regime,
                policy=policy,
                measured_seconds=fmean(run.figures.ttft_mean or 0.0 for run in of),
                simulated_seconds=fmean(seconds for seconds, _ in simulated),
                measured_cached=fmean(run.figures.cached_share or 0.0 for run in of),
                simulated_cached=fmean(cached for _, cached in simulated),
            )
        )
    return found


def as_table(found: Sequence[Prediction]) -> str:
    lines = []
    for regime in dict.fromkeys(one.regime for one in found):
        of = [one for one in found if one.regime == regime]
        ranks = {one.policy: rank for rank, one in enumerate(sorted(of, key=lambda x: x.simulated_seconds), 1)}
        for rank, one in enumerate(sorted(of, key=lambda x: x.measured_seconds), 1):
            near = "yes" if abs(one.ratio - 1) <= TOLERANCE else "no"
            lines.append(
                [
                    regime,
                    one.policy,
                    number(one.measured_seconds, 3),
                    number(one.simulated_seconds, 3),
                    number(one.ratio, 2),
                    near,
                    f"{rank} / {ranks[one.policy]}",
                    f"{100 * one.measured_cached:.0f} / {100 * one.simulated_cached:.0f}",
                ]
            )
    head = ["regime", "policy", "measured s", "simulated s", "ratio", "within 25 %", "rank", "cached %"]
    return table(head, lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="predict", description="Measured and simulated time to first token.")
    parser.add_argument("results", type=Path)
    parser.add_argument("facts", type=Path)
    given = parser.parse_args()
    facts = msgspec.json.decode(given.facts.read_bytes(), type=Facts)
    print(as_table(predictions(read_runs(given.results), fleet_of(facts))))


if __name__ == "__main__":
    main()
