"""One step of an engine, as far as it prefills: which prompts it carries, how much of each, and how far it has got.

Work is counted as *effort*: the tokens that have none before them which would take as long. A step takes its prompts in
order, as many tokens as its budget has, and all that it completes have their first token at its end, as in vLLM.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Generic, TypeVar

R = TypeVar("R")


@dataclass(slots=True, eq=False)
class Prefill(Generic[R]):
    """A prompt on its way through one or more steps."""

    request: R
    tokens: int
    """All that must be in the cache for its next token."""
    done: int
    """Found there, or computed in earlier steps."""
    since: float
    """When it left the queue."""
    part: int = 0
    """Tokens in the step under way."""


@dataclass(slots=True)
class PrefillStep(Generic[R]):
    """The step under way. Nothing is under way when it is false."""

    attention_tokens: float | None = None
    """A token with so many before it takes twice as long as the first. `None`: all take the same."""
    effort: float = 0.0
    left: float = 0.0
    prefills: list[Prefill[R]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.prefills)

    def take(self, prefill: Prefill[R], budget: int | None) -> int:
        """As much of it as the budget has, all of it without one. Returns how many tokens that were."""
        part = prefill.tokens - prefill.done
        prefill.part = part = part if budget is None or part < budget else budget
        effort = self.effort_of(prefill.done + part) - self.effort_of(prefill.done)
        self.effort += effort
        self.left += effort
        self.prefills.append(prefill)
        return part

    def finish(self) -> list[Prefill[R]]:
        """It is over. Returns whom it carried, what they have done brought up to date."""
        carried, self.prefills = self.prefills, []
        self.effort = self.left = 0.0
        for prefill in carried:
            prefill.done += prefill.part
            prefill.part = 0
        return carried

    def withdraw(self, prefill: Prefill[R]) -> int:
        """Go on without it. Returns how many of its tokens are computed."""
        if prefill not in self.prefills:
            return prefill.done
        begin, end = self.effort_of(prefill.done), self.effort_of(prefill.done + prefill.part)
        missing = self.left / self.effort if self.effort else 0.0
        self.prefills.remove(prefill)
        self.effort -= end - begin
        self.left -= (end - begin) * missing
        return self.tokens_of(end - (end - begin) * missing)

    def effort_of(self, tokens: int) -> float:
        """Of so many tokens, from the first of a prompt on."""
        attention = self.attention_tokens
        return float(tokens) if attention is None else tokens + tokens * tokens / (2.0 * attention)

    def tokens_of(self, effort: float) -> int:
        """The other way round, whole tokens; rounding in the effort does not hide one."""
        attention = self.attention_tokens
        tokens = effort if attention is None else attention * (math.sqrt(1.0 + 2.0 * effort / attention) - 1.0)
        return math.floor(tokens + 1e-6)
