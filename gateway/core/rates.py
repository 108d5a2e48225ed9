"""What is learned from flights: prefill rate of a replica, key bytes per token of a model.

Both are positive ratios, learned in the logarithm: an observation moves the estimate by a share of the (bounded) error,
a large share at first, a small one later. So one absurd answer cannot poison them, and twice too fast weighs as much as
twice too slow. Seeds are guesses on the safe side.
"""

from __future__ import annotations

from collections import OrderedDict
from math import exp, log

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


class LearnedRatio:
    """A positive number learned from noisy observations, robustly."""

    __slots__ = ("_high", "_log", "_low", "count", "value")

    SLOWEST_STEP = 0.1
    """Share of an error that is believed once there is experience: about ten observations of memory."""
    LARGEST_ERROR = log(2.0)
    """An error beyond a factor of two counts as a factor of two."""

    def __init__(self, seed: float, low: float, high: float) -> None:
        self._low, self._high = log(low), log(high)
        self._log = min(max(log(seed), self._low), self._high)
        self.value = exp(self._log)
        self.count = 0

    def __repr__(self) -> str:
        return f"<LearnedRatio {self.value:.4g} from {self.count}>"

    def learn(self, observed: float) -> None:
        """Move towards `observed` (positive)."""
        error = min(max(log(observed) - self._log, -self.LARGEST_ERROR), self.LARGEST_ERROR)
        self._log += error * max(self.SLOWEST_STEP, 1.0 / (self.count + 2))
        self._log = min(max(self._log, self._low), self._high)
        self.value = exp(self._log)
        self.count += 1


class PrefillRate(LearnedRatio):
    """Uncached prompt tokens per second of one replica."""

    __slots__ = ()

    def __init__(self, seed: float) -> None:
        super().__init__(seed, 10.0, 10_000_000.0)

    def learn_flight(self, own_tokens: float, ahead_tokens: float, ttft_seconds: float) -> None:
        """Own uncached tokens and those booked ahead of them were all done when the first token came."""
        if own_tokens + ahead_tokens < MINIMUM_PREFILL_TOKENS or ahead_tokens > MAX_AHEAD_RATIO * own_tokens:
            return
        if ttft_seconds > 0:
            self.learn((own_tokens + ahead_tokens) / max(ttft_seconds - TTFT_FLOOR_SECONDS, ttft_seconds / 2))


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

    def learn(self, model: str | None, space: Space, length: int, prompt_tokens: int) -> None:
        """A replica counted `prompt_tokens` in a prompt of `length` key bytes."""
        if space is Space.TOKENS or prompt_tokens < MINIMUM_PROMPT_TOKENS or length <= 0:
            return
        learned = self._by_model.get(model)
        if learned is None:
            learned = self._by_model[model] = LearnedRatio(BYTES_PER_TOKEN, 0.5, 16.0)
            if len(self._by_model) > MAX_MODELS:
                self._by_model.popitem(last=False)
        else:
            self._by_model.move_to_end(model)
        learned.learn(length / prompt_tokens)

    def statistics(self) -> dict[str, float]:
        return {model or "": learned.value for model, learned in self._by_model.items()}
