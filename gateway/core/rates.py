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

    __slots__ = ("_high", "_low", "count", "value")

    SLOWEST_STEP = 0.1
    """Share of an error that is believed once there is experience: about ten observations of memory."""

    def __init__(self, seed: float, low: float, high: float) -> None:
        self._low, self._high = low, high
        self.value = min(max(seed, low), high)
        self.count = 0

    def __repr__(self) -> str:
        return f"<LearnedRatio {self.value:.4g} from {self.count}>"

    def learn(self, observed: float) -> None:
        """Move towards `observed` (positive)."""
        step = 1.0 / (self.count + 2)
        if step < self.SLOWEST_STEP:
            step = self.SLOWEST_STEP
        value = self.value * exp(step * bounded(log(observed / self.value)))
        self.value = min(max(value, self._low), self._high)
        self.count += 1


class PrefillRate:
    """Uncached prompt tokens per second of one replica: its seed, times what the fleet taught, times its own part.

    The split matters: were each replica learned alone, the first one to be tried would look faster than its untried
    equals and get everything. And equal replicas never measure quite equally, so a small own part counts as none
    (`LIKENESS`).
    """

    __slots__ = ("_deviation", "_factor", "_fleet", "_seed", "count")

    LIKENESS = 0.15
    """Own deviations of up to 15 % are noise. Larger ones count, in full where they are much larger."""
    SLOWEST_STEP = 0.05
    """Half of the fleet's: what all replicas show is the fleet's."""
    FADE = 0.02
    """A deviation fades by 2 % with each observation unless it is confirmed."""

    def __init__(self, seed: float, fleet: LearnedRatio) -> None:
        self._seed = seed
        self._fleet = fleet
        self._deviation = 0.0  # natural logarithm
        self._factor = seed
        self.count = 0

    def __repr__(self) -> str:
        return f"<PrefillRate {self.value:.0f}/s from {self.count}>"

    @property
    def value(self) -> float:
        return self._factor * self._fleet.value

    def learn_flight(self, own_tokens: float, ahead_tokens: float, ttft_seconds: float) -> None:
        """Own uncached tokens and those booked ahead of them were all done when the first token came."""
        if own_tokens + ahead_tokens < MINIMUM_PREFILL_TOKENS or ahead_tokens > MAX_AHEAD_RATIO * own_tokens:
            return
        if ttft_seconds > 0:
            self.learn((own_tokens + ahead_tokens) / max(ttft_seconds - TTFT_FLOOR_SECONDS, ttft_seconds / 2))

    def learn(self, observed: float) -> None:
        """It did `observed` tokens per second once."""
        self._fleet.learn(observed / self._seed / exp(self._deviation))
        error = bounded(log(observed / self._seed / self._fleet.value) - self._deviation)
        self._deviation += error * max(self.SLOWEST_STEP, 1.0 / (self.count + 4)) - self.FADE * self._deviation
        self.count += 1
        own = sqrt(max(0.0, self._deviation**2 - self.LIKENESS**2))
        self._factor = self._seed * exp(copysign(own, self._deviation))


def fleet_speed() -> LearnedRatio:
    """How much faster than their seeds the replicas of a fleet are, in common."""
    return LearnedRatio(1.0, 0.001, 1_000.0)


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
            learned = self._by_model[model] = LearnedRatio(BYTES_PER_TOKEN, 0.5, 16.0)
            if len(self._by_model) > MAX_MODELS:
                self._by_model.popitem(last=False)
        else:
            self._by_model.move_to_end(model)
        learned.learn(length / prompt_tokens)
        return learned.value

    def statistics(self) -> dict[str, float]:
        return {model or "": learned.value for model, learned in self._by_model.items()}
