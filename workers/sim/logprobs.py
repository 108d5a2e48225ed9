"""Log probabilities: made up from the tokens, in the shapes of chat and of completions."""

from __future__ import annotations

from typing import Any

from workers.sim import tokenizer
from workers.sim.answers import WORDS, Answer


def _value(token: int, rank: int) -> float:
    return -(0.05 + (token % 97) / 100 + rank)


def _texts(answer: Answer, start: int, end: int) -> list[tuple[int, str]]:
    return [(token, tokenizer.decode([token])) for token in answer.tokens[start:end]]


def chat(answer: Answer, start: int, end: int, alternatives: int) -> dict[str, Any]:
    content = []
    for token, text in _texts(answer, start, end):
        entry = {"token": text, "logprob": _value(token, 0), "bytes": list(text.encode())}
        others = [dict(entry, logprob=_value(token, rank)) for rank in range(alternatives)]
        content.append({**entry, "top_logprobs": others})
    return {"content": content}


def _alternatives(token: int, text: str, count: int) -> dict[str, float]:
    others = {f" {name}": _value(token, rank) for rank, name in enumerate(WORDS[:count], start=1)}
    return {text: _value(token, 0), **others}


def completion(answer: Answer, start: int, end: int, alternatives: int) -> dict[str, Any]:
    texts = _texts(answer, start, end)
    offset = answer.ends[start - 1] if start else 0
    return {
        "text_offset": [offset, *answer.ends[start : end - 1]],
        "token_logprobs": [_value(token, 0) for token, _ in texts],
        "tokens": [text for _, text in texts],
        "top_logprobs": [_alternatives(token, text, alternatives) for token, text in texts],
    }
