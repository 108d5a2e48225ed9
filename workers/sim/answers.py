"""What the model says: deterministic in seed and prompt, so equal requests get equal answers on every replica.

Prose is drawn from a word list in which every word is one token; JSON follows the schema it was asked for.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from random import Random
from typing import Any

import msgspec

from workers.sim import templates, tokenizer
from workers.sim.errors import ApiError

VOCABULARY = """
a the one each some many first next last long short old new warm cold quick slow good clear plain small large
cache block token model queue state route shard batch graph layer depth width scale value count index table field
river stone light water house green blue north south early late night day year week hour story music paper
is was can will may makes takes finds keeps holds gives shows reads moves turns waits and but or so then when while
from with into over under after of to in on at by for it they we you this that these those what which who how why
"""
WORDS = tuple(word for word in VOCABULARY.split() if len(word) <= 5)
"""Every word is one token with its leading space."""
SENTENCE_WORDS = 11
MAX_ITEMS = 100
"""More than this many items of an array are not made, whatever a schema asks for."""
FEWEST_SENTENCES, MOST_SENTENCES = 2, 13
"""Answers to open questions end by themselves: a chat turn of 24 to 156 tokens, short enough to keep tests quick."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion, known in full before its first token is due."""

    tokens: array[int]
    """What the engine generates."""
    ends: Sequence[int]
    """Characters of `text` that are out after each token."""
    text: str
    finish_reason: str
    """`stop` or `length`, as the engine sees it."""
    stop_reason: str | None = None
    """The stop string that ended it."""
    call: str | None = None
    """Name of the tool that it calls; `text` is then the call's arguments."""

    def piece(self, start: int, end: int) -> str:
        """Text of the tokens from `start` to before `end`."""
        first = self.ends[start - 1] if start else 0
        return self.text[first : self.ends[end - 1]] if end else ""


@dataclass(frozen=True, slots=True)
class Wish:
    """What a request asks of its answer."""

    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    keep_stop: bool = False
    call: str | None = None
    """Tool that must be called."""
    schema: dict[str, Any] | None = field(default=None, hash=False)
    """Schema of the tool's arguments, or of a JSON answer; `None`: prose."""


def compose(wish: Wish, seed: int) -> Answer:
    """The answer to a wish; `seed` mixes everything that may change it."""
    if wish.schema is not None:
        opening = tokenizer.split(templates.call_opening(wish.call)) if wish.call else []
        return _cut(wish, tokenizer.split(_example_text(wish.schema)), opening)
    random = Random(seed)
    natural = random.randint(FEWEST_SENTENCES, MOST_SENTENCES) * (SENTENCE_WORDS + 1)
    length = wish.max_tokens if wish.ignore_eos else min(wish.max_tokens, max(natural, wish.min_tokens))
    pieces = _prose(random, length)
    return _cut(wish, pieces, [], ended=not wish.ignore_eos and length >= natural)


def _prose(random: Random, length: int) -> list[bytes]:
    period = SENTENCE_WORDS + 1
    pieces = [b" " + word.encode() for word in random.choices(WORDS, k=length)]
    for start in range(0, length, period):
        pieces[start] = pieces[start].title()
    pieces[SENTENCE_WORDS::period] = [b"."] * len(pieces[SENTENCE_WORDS::period])
    pieces[0] = pieces[0].lstrip()
    return pieces


def _cut(wish: Wish, pieces: list[bytes], opening: list[bytes], ended: bool = True) -> Answer:
    """Apply the token limit and the stop strings."""
    limited = len(opening) + len(pieces) > wish.max_tokens
    every = (opening + pieces)[: wish.max_tokens]
    tokens = tokenizer.token_ids(every)
    visible = [""] * min(len(opening), len(every)) + [
        piece.decode("utf-8", "replace") for piece in every[len(opening) :]
    ]
    text = "".join(visible)
    ends = list(accumulate(map(len, visible)))
    reason = "length" if limited or not ended else "stop"
    # Up to here vLLM looks for no stop string, though the first part of one may lie here.
    least = ends[min(wish.min_tokens, len(ends)) - 1] if wish.min_tokens else 0
    """Characters among which vLLM looks for no stop string; the last one's first part may lie there."""
    found = [(text.find(stop, max(0, least + 1 - len(stop))), stop) for stop in wish.stop if stop]
    stops = [(at + len(stop), at, stop) for at, stop in found if at >= 0]
    if not stops or wish.call:
        return Answer(tokens, ends, text, reason, call=wish.call)
    end, at, stop = min(stops)
    count = bisect_left(ends, end) + 1
    text = text[:end] if wish.keep_stop else text[:at]
    ends = [min(end, len(text)) for end in ends[:count]]
    return Answer(tokens[:count], ends, text, "stop", stop)


def _example_text(schema: dict[str, Any]) -> str:
    try:
        return msgspec.json.encode(example(schema)).decode()
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        # Where a schema may be wrong is only known by following it.
        raise ApiError(400, "The JSON schema of the tool or answer is not valid") from error


def example(schema: dict[str, Any], depth: int = 0) -> Any:
    """The plainest value that fits a JSON schema."""
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return schema["enum"][0]
    for choice in ("anyOf", "oneOf", "allOf"):
        if schema.get(choice):
            return example(schema[choice][0], depth + 1)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    if isinstance(kind, list):
        kind = kind[0]
    if kind == "object":
        properties = schema.get("properties") or {}
        wanted = schema.get("required", properties)
        # A schema may contain itself through optional fields; only the required ones are followed far down.
        return {name: example(properties.get(name) or {}, depth + 1) for name in wanted} if depth < 8 else {}
    if kind == "array":
        items = max(1, min(MAX_ITEMS, int(schema.get("minItems") or 0)))
        return [example(schema.get("items") or {}, depth + 1)] * items
    lowest = schema.get("minimum")
    plain: dict[str, Any] = {"integer": lowest or 1, "number": lowest or 1.5, "boolean": True, "null": None}
    return plain.get(kind, "example")
