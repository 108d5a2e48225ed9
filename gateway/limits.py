"""What a key may still do: requests at a time, requests a minute, tokens a minute, and which models.

A minute's limit is a bucket that fills evenly and holds one minute's worth, so a whole minute may be used at once and
then goes on at its rate. A request enters when its head has come. Tokens are known only at the end: what the prompt is
thought to hold is reserved when its body has come, and what the replica reports in `usage` is settled when it ends; a
bucket may fall into debt that way, and opens again when it has made up for it.
"""

from __future__ import annotations

from typing import Protocol

from gateway.keys import Denied, Key

BYTES_A_TOKEN = 4
"""Of prompt text in most languages and of a token id: the estimate until `usage` tells."""
BYTES_A_STREAMED_TOKEN = 200
"""vLLM's event for one token of a chat has 180 to 260 bytes. Counts answers whose client does not ask for usage, or
leaves before it comes: neither is a way around the limit."""
TOKENS_A_SECOND = 100
"""Of one answer: counts one that was not streamed and not waited for, where the request set no bound."""
BUSY_RETRY_SECONDS = 1.0
"""When a request of the same key ends nobody knows."""


class ModelNotAllowed(Denied):
    reason = "model"

    def __init__(self, model: str | None) -> None:
        named = "names none that can be read" if model is None else f"asks for '{model}'"
        super().__init__(f"This API key may use certain models only, and the request {named}.")


class OverLimit(Denied):
    """Too much at a time. `reason` is the limit as the keys file calls it; `retry_after` in seconds."""

    def __init__(self, reason: str, limit: int, retry_after: float) -> None:
        super().__init__(f"Rate limit reached for this API key: {reason.replace('_', ' ')}, limit {limit}.")
        self.reason = reason
        self.retry_after = retry_after


class Bucket:
    """So much a minute."""

    __slots__ = ("_at", "_level", "per_minute")

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def __repr__(self) -> str:
        return f"<Bucket {self._level:.1f}/{self.per_minute}>"

    def wait_seconds(self, amount: float, now: float) -> float:
        """Until so much may be taken; 0 now. More than the bucket ever holds needs a full one, and leaves a debt."""
        self._fill(now)
        missing = min(amount, self.per_minute) - self._level
        return max(0.0, missing * 60 / self.per_minute)

    def take(self, amount: float, now: float) -> None:
        """Negative: give back."""
        self._fill(now)
        self._level = min(self._level - amount, self.per_minute)

    def _fill(self, now: float) -> None:
        self._level = min(self._level + (now - self._at) * self.per_minute / 60, self.per_minute)
        self._at = now


class Fleet(Protocol):
    """Other gateways, or other processes of this one, for which the limits are the same (`gateway.fleet_limits`)."""

    def bucket(self, key: str, is_tokens: bool, per_minute: int) -> Bucket: ...

    def note(self, key: Key) -> None:
        """It is there, or has changed."""

    def moved(self, caller: Caller) -> None:
        """How many requests it has running."""

    def running_elsewhere(self, key: str, now: float) -> int: ...

    def places(self, most: int) -> int:
        """Of so many at a time, how many are for us."""


class Caller:
    """One key with what it has running. It outlives a change of the keys file."""

    __slots__ = ("_fleet", "_requests", "_tokens", "key", "running")

    def __init__(self, key: Key, now: float, fleet: Fleet | None = None) -> None:
        self.key = key
        self.running = 0
        self._fleet = fleet
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self.renew(key, now)

    def __repr__(self) -> str:
        return f"<Caller {self.key.name} of {self.key.tenant} running={self.running}>"

    def renew(self, key: Key, now: float) -> None:
        """The keys file says something else of it now. A limit that stayed goes on where it was."""
        self.key = key
        self._requests = self._bucket(self._requests, False, key.requests_per_minute, now)
        self._tokens = self._bucket(self._tokens, True, key.tokens_per_minute, now)
        if self._fleet is not None:
            self._fleet.note(key)

    def move(self, places: int) -> None:
        """So many more run; negative: fewer."""
        self.running += places
        if self._fleet is not None and places:
            self._fleet.moved(self)

    def enter(self, now: float, *, works: bool = True) -> Stay:
        """One more request. One that only looks at work done before (not `works`) counts as a request and no more: it
        must get through to what runs and was charged. Raises `OverLimit`, and then has taken nothing."""
        most, requests, tokens = self.key.concurrent_requests, self._requests, self._tokens if works else None
        if most is not None and works and not self._has_place(most, now):
            raise OverLimit("concurrent_requests", most, BUSY_RETRY_SECONDS)
        if requests is not None and (wait := requests.wait_seconds(1, now)) > 0:
            raise OverLimit("requests_per_minute", requests.per_minute, wait)
        if tokens is not None and (wait := tokens.wait_seconds(1, now)) > 0:
            raise OverLimit("tokens_per_minute", tokens.per_minute, wait)
        if requests is not None:
            requests.take(1, now)
        places = 1 if works else 0
        self.move(places)
        return Stay(self, places, requests, tokens)

    def _has_place(self, most: int, now: float) -> bool:
        if self._fleet is None:
            return self.running < most
        return self.running + self._fleet.running_elsewhere(self.key.name, now) < self._fleet.places(most)

    def _bucket(self, before: Bucket | None, is_tokens: bool, per_minute: int | None, now: float) -> Bucket | None:
        if per_minute is None or (before is not None and before.per_minute == per_minute):
            return before if per_minute is not None else None
        if self._fleet is None:
            return Bucket(per_minute, now)
        return self._fleet.bucket(self.key.name, is_tokens, per_minute)


class Stay:
    """One request that was let in, until `leave`. Leaving twice is harmless."""

    __slots__ = ("_caller", "_places", "_requests", "_tokens", "most_tokens", "reserved")

    def __init__(self, caller: Caller, places: int, requests: Bucket | None, tokens: Bucket | None) -> None:
        self._caller: Caller | None = caller
        self._places = places
        self._requests = requests
        self._tokens = tokens
        self.reserved = 0
        """Tokens that its prompt is thought to have."""
        self.most_tokens: int | None = None
        """That its answer may have, where the request says so."""

    @property
    def is_limited(self) -> bool:
        """How long it stays, or what it uses, counts for something."""
        return self._tokens is not None or (
            self._caller is not None and self._caller.key.concurrent_requests is not None
        )

    def reserve(self, prompt_tokens: int, now: float) -> None:
        """Raises `OverLimit`, and then has taken nothing; whoever is refused for it still has to leave."""
        if self._tokens is not None:
            if (wait := self._tokens.wait_seconds(max(1, prompt_tokens), now)) > 0:
                raise OverLimit("tokens_per_minute", self._tokens.per_minute, wait)
            self._tokens.take(prompt_tokens, now)
        self.reserved = prompt_tokens

    def leave(self, used_tokens: int, now: float, *, refused: bool = False) -> None:
        """`refused`: the gateway did not want it, or had no room or no replica, so it does not count as a request
        either."""
        caller, self._caller = self._caller, None
        if caller is None:
            return
        caller.move(-self._places)
        if self._tokens is not None:
            self._tokens.take(used_tokens - self.reserved, now)
        if refused and self._requests is not None:
            self._requests.take(-1, now)


def used_tokens(reserved: int, *, served: bool, prompt: int | None, completion: int | None, guessed: int) -> int:
    """What a request that has ended used: as the replica reported it, else the prompt as it was `reserved`, and an
    answer as `guessed`. `served`: a replica worked on it, and did not fail."""
    if not served:
        return 0
    return (reserved if prompt is None else prompt) + (guessed if completion is None else completion)


def guessed_tokens(most: int | None, *, streamed: bool, answer_bytes: int, seconds: float) -> int:
    """Tokens of an answer that did not report them. `most`: what the request allowed; `seconds`: since it was let in.
    One in one piece that nobody waited for was made all the same, for as long as the replica did not notice."""
    if streamed:
        return answer_bytes // BYTES_A_STREAMED_TOKEN
    guess = answer_bytes // BYTES_A_TOKEN
    if not answer_bytes:
        return int(seconds * TOKENS_A_SECOND) if most is None else most
    return guess if most is None else min(guess, most)
