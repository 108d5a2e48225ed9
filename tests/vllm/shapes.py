"""The shape of an HTTP answer: what remains of it when ids, texts and numbers are taken out.

Two answers have one shape when status, header names, media type, JSON keys (in order) and value types agree, and a
stream's events come in the same order. A run of equal events counts as one: how many tokens share an event is chance.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import httpx

EXACT_KEYS = {"object", "type", "role", "status", "finish_reason", "stop_reason", "code", "param", "message", "detail"}
"""Keys whose values are words of the protocol, not content."""
UNCOMPARED_HEADERS = {"date", "content-length"}
_CHANCE = re.compile(r"\b[0-9a-f]{16}\b|(?<=_)[0-9a-f]{16}\b|\d+")
"""Identifiers and numbers inside messages."""

Shape = Any


def of_value(value: Any, key: str = "") -> Shape:
    if key == "top_logprobs" and isinstance(value, dict) and "token" not in value:
        return {type(item).__name__ for item in value.values()}  # its keys are tokens
    if isinstance(value, dict):
        return {name: of_value(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [shape for shape, _ in groupby(of_value(item, key) for item in value)]
    if key in EXACT_KEYS and isinstance(value, str):
        return _CHANCE.sub("N", value)
    return type(value).__name__


def of_stream(text: str) -> list[Shape]:
    events = []
    for block in text.split("\n\n"):
        name, data = "", ""
        for line in block.splitlines():
            field, _, rest = line.partition(": ")
            if field == "event":
                name = rest
            elif field == "data":
                data = rest
        if data:
            events.append((name, data if data == "[DONE]" else of_value(json.loads(data))))
    return [event for event, _ in groupby(_without_holes(events))]


def _without_holes(events: list[Shape]) -> Iterator[Shape]:
    """Chat events without those of tokens that have no text (`delta: {}`), which random weights draw now and then."""
    delta: Shape = {}
    for event in events:
        choices = event[1].get("choices") if isinstance(event[1], dict) else None
        if choices and "delta" in choices[0]:
            choice = choices[0]
            if not choice["delta"] and choice["finish_reason"] == "NoneType":
                continue
            delta = choice["delta"] = choice["delta"] or delta
        yield event


def of_answer(answer: httpx.Response) -> dict[str, Shape]:
    media_type = answer.headers.get("content-type", "")
    if media_type.startswith("text/event-stream"):
        body: Shape = of_stream(answer.text)
    elif media_type == "application/json" and answer.content:
        body = of_value(answer.json())
    else:
        body = bool(answer.content)
    headers = {name: "" for name in answer.headers if name not in UNCOMPARED_HEADERS}
    return {"status": answer.status_code, "media_type": media_type, "headers": sorted(headers), "body": body}


def differences(real: Shape, ours: Shape, where: str = "") -> list[str]:
    """What differs, one line each, for people."""
    if isinstance(real, dict) and isinstance(ours, dict):
        lines = [f"{where}.{key}: only in vLLM" for key in real if key not in ours]
        lines += [f"{where}.{key}: only here" for key in ours if key not in real]
        if not lines and list(real) != list(ours):
            lines.append(f"{where}: order of keys {list(real)} != {list(ours)}")
        return lines + [
            line for key in real if key in ours for line in differences(real[key], ours[key], f"{where}.{key}")
        ]
    if isinstance(real, list) and isinstance(ours, list) and len(real) == len(ours):
        return [
            line
            for place, (left, right) in enumerate(zip(real, ours, strict=True))
            for line in differences(left, right, f"{where}[{place}]")
        ]
    if isinstance(real, tuple) and isinstance(ours, tuple):
        return differences(list(real), list(ours), where)
    return [] if real == ours else [f"{where}: {real!r} != {ours!r}"]
