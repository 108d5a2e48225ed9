"""The prefix cache of one engine: which blocks running requests hold, and which are kept until room is needed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class PrefixCache:
    """Blocks of one engine: *held* by running requests (counted references), or *idle*, least recently used first.

    A request holds its chain from the root and gives it back tail first, so a block is never evicted before the blocks
    that follow it: the cached part of any chain is a leading run. `private` blocks belong to one request and have no id
    (its partial last block, the room for its answer).
    """

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self.private = 0
        self.evicted = 0
        self._held: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def shared(self) -> int:
        """Blocks with an id that running requests hold."""
        return len(self._held)

    @property
    def held(self) -> int:
        return len(self._held) + self.private

    @property
    def cached(self) -> int:
        return len(self._held) + len(self._idle)

    def match(self, blocks: Sequence[int]) -> int:
        """Length of the leading run of `blocks` that is cached."""
        held, idle = self._held, self._idle
        for place, block in enumerate(blocks):
            if block not in held and block not in idle:
                return place
        return len(blocks)

    def acquire(self, blocks: Sequence[int], private: int) -> bool:
        """Hold `blocks` and `private` more, evicting what must go; or change nothing and say no."""
        held, idle = self._held, self._idle
        known = sum(map(held.__contains__, blocks))
        if self.held + len(blocks) - known + private > self.capacity_blocks:
            return False
        for block in blocks:
            if block in held:
                held[block] += 1
            else:
                idle.pop(block, None)
                held[block] = 1
        self.private += private
        for _ in range(self.held + len(idle) - self.capacity_blocks):
            idle.popitem(last=False)
            self.evicted += 1
        return True

    def release(self, blocks: Sequence[int], private: int, valid: int, generated: Sequence[int] = ()) -> None:
        """Give back, tail first. The first `valid` of `blocks` hold computed tokens and stay cached; so does
        `generated`, the ids of private blocks that generated tokens filled."""
        held, idle = self._held, self._idle
        self.private -= private
        for block in reversed(generated):
            if block not in held:
                idle[block] = None
                idle.move_to_end(block)
        for position in range(len(blocks) - 1, -1, -1):
            block = blocks[position]
            references = held[block] - 1
            if references:
                held[block] = references
                continue
            del held[block]
            if position < valid:
                idle[block] = None

    def clear(self) -> None:
        """Forget what no running request holds."""
        self._idle.clear()
