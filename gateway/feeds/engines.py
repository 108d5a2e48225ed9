"""Engines: which dialect each replica speaks. Said in the configuration, else recognised: by the names on its metrics
page, which are an engine's own; else by who owns the models that it lists; else by how it greets. What nobody
recognises is a plain OpenAI-compatible replica, and the operator is told so once.

Nothing here is for ever: another engine may answer at the same URL tomorrow. A sign replaces what weaker and equal ones
said, and a replica that failed has to show anew who it is: until then it is taken for what it was.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum

from gateway.config import EngineName
from gateway.core.model import ReplicaId
from gateway.feeds.dialects import DIALECTS, PLAIN, Dialect, dialect_of_greeting, dialect_of_owners, dialect_of_page

log = logging.getLogger(__name__)

MAX_SHOWN = 80
"""Of what a replica says about its owners, in a line of the log."""


class Sign(IntEnum):
    """How an engine was recognised, weakest first."""

    NONE = 0
    GREETING = 1
    OWNER = 2
    PAGE = 3


@dataclass(frozen=True, slots=True)
class Said:
    """What the configuration says of a replica's engine."""

    engine: EngineName | None = None
    cache_tokens: int | None = None


NOTHING = Said()


class Engines:
    """Written by probes and scrapes, read by all feeds and the views."""

    def __init__(self, said: Mapping[ReplicaId, Said] | None = None, *, isolated: bool = False) -> None:
        """`isolated`: tenants are kept apart by `cache_salt`, so whoever does not know that is to be told of."""
        self._said = dict(said or {})
        self._listed: dict[ReplicaId, Said] = {}
        self._isolated = isolated
        self._found: dict[ReplicaId, tuple[Sign, Dialect]] = {}
        self._check_said(self._said)

    def __repr__(self) -> str:
        return f"Engines({', '.join(f'{replica}: {one.engine}' for replica, (_, one) in self._found.items())})"

    def say(self, listed: Mapping[ReplicaId, Said]) -> None:
        """What a list says that may change; it replaces what was said here before. The configuration knows better."""
        self._check_said({replica: one for replica, one in listed.items() if self._listed.get(replica) != one})
        self._listed = dict(listed)

    def dialect(self, replica: ReplicaId) -> Dialect:
        if (engine := self._known(replica).engine) is not None:
            return DIALECTS[engine]
        return self._found.get(replica, (Sign.NONE, PLAIN))[1]

    def name(self, replica: ReplicaId) -> EngineName | None:
        """`None` where it was not recognised."""
        if (engine := self._known(replica).engine) is not None:
            return engine
        sign, dialect = self._found.get(replica, (Sign.NONE, PLAIN))
        return None if sign is Sign.NONE else dialect.engine

    def cache_tokens(self, replica: ReplicaId) -> int | None:
        """Size of its cache as the configuration says."""
        return self._known(replica).cache_tokens

    def is_met(self, replica: ReplicaId) -> bool:
        """It was recognised, or was asked and is none of those that are known."""
        return self._known(replica).engine is not None or replica in self._found

    def doubt(self, replica: ReplicaId) -> None:
        """It failed: what comes back may be something else, and any sign will do."""
        if replica in self._found:
            self._found[replica] = (min(self._found[replica][0], Sign.GREETING), self._found[replica][1])

    def forget(self, replica: ReplicaId) -> None:
        """It is gone, or certainly not what it was."""
        self._found.pop(replica, None)

    # ---- signs -----------------------------------------------------------------------------------------------------

    def hear_page(self, replica: ReplicaId, page: bytes) -> None:
        self._hear(replica, Sign.PAGE, dialect_of_page(page))

    def hear_owners(self, replica: ReplicaId, owners: Iterable[str]) -> None:
        self._hear(replica, Sign.OWNER, dialect_of_owners(owners))

    def hear_greeting(self, replica: ReplicaId, greeting: bytes) -> None:
        self._hear(replica, Sign.GREETING, dialect_of_greeting(greeting))

    def give_up(self, replica: ReplicaId, owners: Iterable[str]) -> None:
        """All that can be asked was asked."""
        if not self.is_met(replica):
            self._found[replica] = (Sign.NONE, PLAIN)
            shown = ", ".join(sorted(map(repr, set(owners))))[:MAX_SHOWN] or "nobody"
            log.info("%s runs no engine known here (its models belong to %s): plain OpenAI API", replica, shown)
            self._check_isolation(replica, PLAIN)

    def _known(self, replica: ReplicaId) -> Said:
        return self._said.get(replica) or self._listed.get(replica, NOTHING)

    def _hear(self, replica: ReplicaId, sign: Sign, dialect: Dialect | None) -> None:
        if dialect is None or self._known(replica).engine is not None:
            return
        found = self._found.get(replica)
        before, was = found or (Sign.NONE, PLAIN)
        if sign < before:
            return
        self._found[replica] = (sign, dialect)
        if dialect is was:
            return
        if found is not None or dialect.engine != "vllm":  # vLLM is what one expects
            log.info("%s runs %s", replica, dialect.engine)
        self._check_isolation(replica, dialect)

    def _check_said(self, said: Mapping[ReplicaId, Said]) -> None:
        for replica, one in said.items():
            if one.engine is not None:
                self._check_isolation(replica, DIALECTS[one.engine])

    def _check_isolation(self, replica: ReplicaId, dialect: Dialect) -> None:
        if self._isolated and not dialect.salts:
            log.warning("auth.isolate_tenants does not hold at %s: %s may share caches", replica, dialect.engine)
