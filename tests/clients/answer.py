"""What a replica says in one turn, and what each API must be able to do with it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

CREATED = 1_700_000_000
PROMPT_TOKENS, ANSWER_TOKENS = 11, 5


@dataclass(frozen=True)
class Text:
    text: str

    @property
    def pieces(self) -> list[str]:
        return cut(self.text)


@dataclass(frozen=True)
class Call:
    name: str
    arguments: str
    """JSON."""

    @property
    def pieces(self) -> list[str]:
        return cut(self.arguments)


class Api(Protocol):
    """One of the modules `chat_api`, `messages_api`, `responses_api`."""

    def whole(self, body: dict[str, Any], answer: Text | Call) -> bytes: ...
    def events(self, body: dict[str, Any], answer: Text | Call) -> list[bytes]: ...
    def error(self, message: str, status: int) -> bytes: ...
    def error_event(self, message: str, status: int) -> bytes: ...
    def tools(self, body: dict[str, Any]) -> Iterable[str]:
        """Names of the tools that the request offers."""

    def turns(self, body: dict[str, Any]) -> Iterable[str]: ...
    def results(self, body: dict[str, Any]) -> list[str]:
        """What tools gave back so far."""


def cut(text: str) -> list[str]:
    """In three, as tokens cut it: also inside a word."""
    third = max(1, len(text) // 3)
    return [text[:third], text[third : 2 * third], text[2 * third :]]


def compact(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def plain(content: Any) -> str:
    """The text of a content field: a string, or a list of parts."""
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return str(content)
