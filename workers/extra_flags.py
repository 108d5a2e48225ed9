"""The user's own flags, behind `--`: what would fight with Warmlane's is refused, what costs routing is warned of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from workers.engine_version import LaunchError
from workers.planner.settings import is_flag

REFUSED = {
    "host": "the gateway would look elsewhere; `warmlane replica --host ADDRESS` has it before --",
    "port": "the gateway would look elsewhere; `warmlane replica --port PORT` has it before --",
}
WARNED = {
    "served-model-name": "it beats the preset's: clients must write that name",
    "no-enable-prefix-caching": "without a prefix cache all replicas are equal, and routing gains nothing",
}


def heed(words: Sequence[str]) -> list[str]:
    """Warnings. Raises `LaunchError` for what cannot be meant."""
    if words and not is_flag(words[0]):
        raise LaunchError(f"{words[0]!r} is not a flag: behind -- come flags of the engine")
    warnings = []
    for word, name, _ in named(words):
        if name in REFUSED:
            raise LaunchError(f"{word} behind --: {REFUSED[name]}")
        if name in WARNED:
            warnings.append(f"{word}: {WARNED[name]}")
    return warnings


def served_name(words: Sequence[str]) -> str | None:
    """What the user's flags call the model; the last one counts, as for vLLM."""
    found = None
    for _, name, value in named(words):
        if name == "served-model-name":
            found = value
    return found


def named(words: Sequence[str]) -> Iterator[tuple[str, str, str | None]]:
    """Each flag as written, its name, and its (first) value."""
    for word, follower in zip(words, [*words, "--"][1:], strict=True):
        if is_flag(word):
            written, equals, value = word.partition("=")
            beside = None if is_flag(follower) else follower
            yield written, written.lstrip("-").replace("_", "-"), value if equals else beside
