"""What to change after a replica ran out of memory: the documented order of remedies, one step at a time.

Each kind of failure has its row. A failure gets the remedy of its row that was used least often so far, the first of
these; so the first failure gets the first, the second the second, and then around again. A step that would undo an
earlier one is left out: an engine with too little room on both sides would swing for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from workers.causes import Cause, Kind

SEQUENCES, LENGTH, UTILISATION = "max-num-seqs", "max-model-len", "gpu-memory-utilization"

DEFAULTS: Mapping[str, float] = {SEQUENCES: 256, UTILISATION: 0.9}
"""vLLM's own where the command says nothing. Some versions and cards take more, so the first step down is sure."""
LEAST_SEQUENCES = 1
LEAST_LENGTH = 2_048
"""Shorter ones are no service for chats, and free no memory worth it."""
FIRST_LENGTH = 32_768
"""Where the command does not say the length it is the model's own, unknown here and often 128k or more."""
LENGTH_UNIT = 256
"""The engine's estimate is rounded down to a multiple: it says what would fit to the last token."""
UTILISATION_STEP = 0.05
"""4 GiB of an 80 GB card."""
RAISE_STEP = 0.03
LEAST_UTILISATION, GREATEST_UTILISATION = 0.5, 0.95
"""Below half something else is wrong. Above 0.95 nothing is left for what an engine allocates besides."""
MARGIN = 0.01
"""Left free of what was free when the engine started."""


@dataclass(frozen=True, slots=True)
class Change:
    """One flag of the command. `before` is empty where the command does not say it."""

    flag: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"--{self.flag} {self.after} ({f'instead of {self.before}' if self.before else 'not given so far'})"

    @property
    def words(self) -> tuple[str, str]:
        """For the end of a command: vLLM lets the last one win."""
        return f"--{self.flag}", self.after


Remedy = Callable[[Sequence[str], Cause], Change | None]
"""A step for this command after this cause, or `None` when there is none left."""


def value(command: Sequence[str], flag: str) -> str:
    """Of the last such flag of the command; empty without one. vLLM takes underscores for hyphens as well."""
    found = ""
    for position, word in enumerate(command):
        name, equals, inside = word.partition("=")
        if name.startswith("--") and name[2:].replace("_", "-") == flag:
            found = inside if equals else next(iter(command[position + 1 : position + 2]), "")
    return found


def number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None  # `auto`, `32k`


def fewer_sequences(command: Sequence[str], cause: Cause) -> Change | None:
    before = value(command, SEQUENCES)
    now = number(before) or DEFAULTS[SEQUENCES]
    if now // 2 < LEAST_SEQUENCES:
        return None
    return Change(SEQUENCES, before, str(int(now // 2)))


def shorter(command: Sequence[str], cause: Cause) -> Change | None:
    """To what the engine says would fit, else by half."""
    before = value(command, LENGTH)
    now = number(before)
    if cause.longest_tokens is not None:
        after = cause.longest_tokens
        if after > LENGTH_UNIT:
            after -= after % LENGTH_UNIT
    else:
        after = int(now // 2) if now else FIRST_LENGTH
    if after < min(LEAST_LENGTH, cause.longest_tokens or LEAST_LENGTH) or (now is not None and 0 < now <= after):
        return None
    return Change(LENGTH, before, str(after))


def lower_utilisation(command: Sequence[str], cause: Cause) -> Change | None:
    """To what was free, where the engine says it, else by a step."""
    before = value(command, UTILISATION)
    now = number(before) or DEFAULTS[UTILISATION]
    after = now - UTILISATION_STEP if cause.free_share is None else min(cause.free_share - MARGIN, now - MARGIN)
    after = int(after * 100 + 1e-6) / 100
    return Change(UTILISATION, before, f"{after:g}") if after >= LEAST_UTILISATION else None


def raise_utilisation(command: Sequence[str], cause: Cause) -> Change | None:
    before = value(command, UTILISATION)
    now = number(before) or DEFAULTS[UTILISATION]
    after = min(now + RAISE_STEP, GREATEST_UTILISATION)
    return Change(UTILISATION, before, f"{after:.2f}") if after > now + 1e-6 else None


AT_START: Mapping[Kind, tuple[Remedy, ...]] = {
    Kind.OUT_OF_MEMORY: (lower_utilisation, fewer_sequences, shorter),
    Kind.NO_CACHE: (raise_utilisation, fewer_sequences),
    Kind.CACHE_TOO_SMALL: (shorter, raise_utilisation),
    Kind.MEMORY_TAKEN: (lower_utilisation,),
}
UNDER_LOAD: Mapping[Kind, tuple[Remedy, ...]] = {
    Kind.OUT_OF_MEMORY: (fewer_sequences, shorter),
}
"""What the others say, an engine says only at its start."""


def next_change(cause: Cause, command: Sequence[str], *, at_start: bool, made: Sequence[Change] = ()) -> Change | None:
    """The step to take now, after those already `made` (which are in `command`). `None`: no remedy is left."""
    remedies = (AT_START if at_start else UNDER_LOAD).get(cause.kind, ())
    steps = [
        step for remedy in remedies if (step := remedy(command, cause)) and not any(undoes(step, one) for one in made)
    ]
    return min(steps, key=lambda step: sum(one.flag == step.flag for one in made), default=None)


def undoes(step: Change, earlier: Change) -> bool:
    return step.flag == earlier.flag and is_raised(step) != is_raised(earlier)


def is_raised(change: Change) -> bool:
    before = number(change.before) or DEFAULTS.get(change.flag)
    after = number(change.after)
    return before is not None and after is not None and after > before
