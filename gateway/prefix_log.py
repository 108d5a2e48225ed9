"""Which prompts shared which prefix, for a replay of the request log that repeats them; off unless asked for.

Of each prompt the log gets four numbers and no text or hash of it: its number, how many prefix blocks it has, how many
of them an earlier request had as well, and which one. `loadtests/traces/request_log.py` builds the chains again. Only
the latest blocks are remembered here: who shares an older one counts as the first.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from hashlib import blake2b

import msgspec

from gateway.core.model import BlockHash, RouteRequest

MEMORY_BLOCKS = 262_144
"""Some 33 M tokens of text, more than the KV caches of most fleets hold; 40 MB."""
SESSION_BYTES = 6
"""Two in a million sessions with the same name would take 24 million of them."""


class PrefixRecord(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What one prompt has in common with those before it."""

    run: str
    """Names the process; numbers start again with each."""
    number: int
    """Of the request, in the order in which they came."""
    blocks: int
    """Full prefix blocks of its prompt."""
    shared: int = 0
    """Its first so many blocks were those of ..."""
    earlier: int | None = None
    """... the request with this number."""
    session: str | None = None
    """Requests with the same one named the same session; made with a secret that ends with the process."""


class PrefixLog:
    """Remembers which request had a block last."""

    def __init__(self, memory_blocks: int = MEMORY_BLOCKS) -> None:
        self._memory_blocks = memory_blocks
        self._seen: OrderedDict[BlockHash, int] = OrderedDict()
        self._run = secrets.token_hex(4)
        self._key = secrets.token_bytes(16)
        self._number = 0

    def note(self, request: RouteRequest) -> PrefixRecord:
        self._number += 1
        shared, earlier = 0, None
        for block in request.blocks:
            if (number := self._seen.get(block)) is None:
                break
            shared, earlier = shared + 1, number
        self._remember(request)
        session = None if request.session is None else self._named(request.session)
        return PrefixRecord(self._run, self._number, len(request.blocks), shared, earlier, session)

    def _remember(self, request: RouteRequest) -> None:
        seen, number = self._seen, self._number
        for block in reversed(request.blocks):  # the tail is the first to be forgotten
            seen.pop(block, None)
            seen[block] = number
        while len(seen) > self._memory_blocks:
            seen.popitem(last=False)

    def _named(self, session: str) -> str:
        return blake2b(session.encode("utf-8", "surrogatepass"), digest_size=SESSION_BYTES, key=self._key).hexdigest()
