"""What is learned from flights: prefill rates of the replicas, key bytes per token of a model.

All are positive ratios, learned in the logarithm: an observation moves the estimate by a share of the (bounded) error,
a large share at first, a small one later. So one absurd answer cannot poison them, and twice too fast weighs as much as
twice too slow. Seeds are guesses on the safe side.
"""

from __future__ import annotations

from collections import OrderedDict
from math import copysign, exp, log, sqrt

from gateway.core.model import Space

MINIMUM_PROMPT_TOKENS = 64
"""Shorter prompts say little about bytes per token: the chat template's own tokens dominate."""
MINIMUM_PREFILL_TOKENS = 512
"""Less work than this is lost in network and scheduling time (some 15 ms)."""
TTFT_FLOOR_SECONDS = 0.015
"""Part of each time to first token that is not prefill: warm prompts took 18 to 50 ms on an H200."""
MAX_AHEAD_RATIO = 4.0
"""Work ahead of a flight is itself an estimate: where it is more than four times the flight's own, nothing is
learned."""
LIKENESS = 0.15
"""Replicas of one fleet that differ by up to 15 % are taken as equal. Larger deviations count, in full where much
larger."""
DOUBT = 4.0
"""A replica's own deviation counts half after four flights."""
BYTES_PER_TOKEN = 4.0
"""English text with a large vocabulary; exact for token ids, whose key has four bytes each."""
MAX_MODELS = 256
"""Learned models remembered; the least recently used is forgotten. Names come from clients."""


LARGEST_ERROR = log(2.0)
"""An error beyond a factor of two counts as a factor of two."""


def bounded(error: float) -> float:
    if error > LARGEST_ERROR:
        return LARGEST_ERROR
    return error if error > -LARGEST_ERROR else -LARGEST_ERROR


class LearnedRatio:
    """A positive number learned from noisy observations, robustly."""

    __slots__ = ("_high", "_low", "_seed_weight", "count", "value")

    SLOWEST_STEP = 0.1
    """Share of an error that is believed once there is experience: about ten observations of memory."""

    def __init__(self, seed: float, low: float, high: float, seed_weight: float = 1.0) -> None:
        """The seed counts as `seed_weight` observations; with 0 it ends with the first, however far off that is."""
        self._low, self._high = low, high
        self._seed_weight = seed_weight
        self.value = min(max(seed, low), high)
        self.count = 0

    def __repr__(self) -> str:
        return f"<LearnedRatio {self.value:.4g} from {self.count}>"

    def learn(self, observed: float) -> None:
        """Move towards `observed` (positive)."""
        step = 1.0 / (self.count + 1 + self._seed_weight)
        if step < self.SLOWEST_STEP:
            step = self.SLOWEST_STEP
        error = log(observed / self.value)
        value = self.value * exp(step * (bounded(error) if step < 1.0 else error))
        self.value = min(max(value, self._low), self._high)
        self.count += 1


class PrefillRate:
    """Uncached prompt tokens per second of one replica. Made by `PrefillRates.add`."""

    __slots__ = ("_fleet", "_seed", "speed", "value")

    def __init__(self, seed: float, fleet: PrefillRates) -> None:
        self._seed = seed
        self._fleet = fleet
        self.speed: LearnedRatio | None = None
        """How many times faster than its seed it was seen to be; `None` before its first lesson."""
        self.value = seed
        self.follow(fleet.speed)

    def __repr__(self) -> str:
        return f"<PrefillRate {self.value:.0f}/s from {self.speed.count if self.speed else 0} flights>"

    @property
    def lessons(self) -> int:
        """How often it was seen at work."""
        return 0 if self.speed is None else self.speed.count

    def learn_flight(self, own_tokens: float, ahead_tokens: float, ttft_seconds: float) -> None:
        """Own uncached tokens and those booked ahead of them were all done when the first token came."""
        if own_tokens + ahead_tokens < MINIMUM_PREFILL_TOKENS or ahead_tokens > MAX_AHEAD_RATIO * own_tokens:
            return
        if ttft_seconds > 0:
            self.learn((own_tokens + ahead_tokens) / max(ttft_seconds - TTFT_FLOOR_SECONDS, ttft_seconds / 2))

    def learn(self, observed: float) -> None:
        """It did `observed` tokens per second once."""
        if self.speed is None:
            self.speed = LearnedRatio(self._fleet.speed, 0.001, 1_000.0)
        self.speed.learn(observed / self._seed)
        self._fleet.learned()

    def follow(self, fleet_speed: float) -> None:
        """The fleet's speed, and as much of its own as is more than noise and well enough known."""
        self.value = self._seed * fleet_speed
        if self.speed is not None:
            own = log(self.speed.value / fleet_speed)
            if abs(own) > LIKENESS:
                trust = self.speed.count / (self.speed.count + DOUBT)
                self.value *= exp(trust * copysign(sqrt(own**2 - LIKENESS**2), own))


class PrefillRates:
    """Prefill rates of a fleet, learned together.

    Were each replica learned alone, the first one to be tried would look faster than its untried equals and get
    everything. So an untried replica is taken to be as much faster than its seed as the median of the others. And equal
    replicas never measure quite equally, so a small deviation from the median counts as none.
    """

    __slots__ = ("_rates", "speed")

    def __init__(self) -> None:
        self._rates: list[PrefillRate] = []
        self.speed = 1.0
        """How many times faster than their seeds the replicas are: the median of those that were tried."""

    def __repr__(self) -> str:
        return f"<PrefillRates of {len(self._rates)} replicas, {self.speed:.2f} times their seeds>"

    def add(self, seed: float) -> PrefillRate:
        rate = PrefillRate(seed, self)
        self._rates.append(rate)
        return rate

    def remove(self, rate: PrefillRate) -> None:
        self._rates.remove(rate)

    def learned(self) -> None:
        """One of them learned: all follow."""
        speeds = sorted([rate.speed.value for rate in self._rates if rate.speed is not None])
        if speeds:
            self.speed = (speeds[len(speeds) // 2] + speeds[(len(speeds) - 1) // 2]) / 2
        for rate in self._rates:
            rate.follow(self.speed)

    def typical(self) -> float | None:
        """Mean over the replicas, `None` without any."""
        return sum(rate.value for rate in self._rates) / len(self._rates) if self._rates else None


class BytesPerToken:
    """Key bytes per token, by model; text only. Token ids take four bytes by construction."""

    __slots__ = ("_by_model",)

    def __init__(self) -> None:
        self._by_model: OrderedDict[str | None, LearnedRatio] = OrderedDict()

    def __repr__(self) -> str:
        return f"<BytesPerToken of {len(self._by_model)} models>"

    def of(self, model: str | None, space: Space) -> float:
        if space is Space.TOKENS:
            return BYTES_PER_TOKEN
        learned = self._by_model.get(model)
        return BYTES_PER_TOKEN if learned is None else learned.value

    def learn(self, model: str | None, space: Space, length: int, prompt_tokens: int) -> float:
        """A replica counted `prompt_tokens` in a prompt of `length` key bytes. Returns the estimate after that."""
        if space is Space.TOKENS:
            return BYTES_PER_TOKEN
        learned = self._by_model.get(model)
        if prompt_tokens < MINIMUM_PROMPT_TOKENS or length <= 0:
            return BYTES_PER_TOKEN if learned is None else learned.value
        if learned is None:
            learned = self._by_model[model] = LearnedRatio(BYTES_PER_TOKEN, 0.5, 16.0, seed_weight=0.0)
            if len(self._by_model) > MAX_MODELS:
                self._by_model.popitem(last=False)
        else:
            self._by_model.move_to_end(model)
        learned.learn(length / prompt_tokens)
        return learned.value

    def statistics(self) -> dict[str, float]:
        return {model or "": learned.value for model, learned in self._by_model.items()}
