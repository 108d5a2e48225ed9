"""Who holds which prefix block, as far as our own requests tell: one bounded LRU for each replica.

A replica's LRU is a row of *records*, oldest first: one record for each request sent there, with the time it was
touched and the run of blocks that nobody touched since. Because a request always touches its whole prefix, four things
hold:

1. If a replica holds block i of a chain, it holds all before it.
2. What a later request takes over from a record is a leading part of it, so what remains is one contiguous run, its
   tail.
3. Evicting from the tail of the oldest record keeps 1 true: what came after the evicted block is older or gone.
4. What a replica holds of a prompt is a row of runs, each one going on where the prompt leaves the one before: as many
   as there are records that touched a part of it last, mostly one or two.

So runs are looked up by their first block alone (4), and how far a prompt goes along with one is found by halving,
since equal hash means equal whole prefix. Nothing is kept for each block but its place in the list that the request
brought: whatever a prompt's length, to touch or to evict it is a few steps, and what has to grow at once, now and then,
are dicts of records. The tail of the LRU can be judged record by record (`eviction_loss`). Blocks that several replicas
hold are counted; most are held by one, and cost nothing extra.

A record remembers how old the oldest part of its match was, and whether the index had evicted what came next: with what
the replica then found, that tells whether the capacity is right (`core.belief`).

What may be wrong: blocks are *predicted*, entered when a request is sent. The engine may have evicted them already or
may never have stored them. Capacity comes from the engine, a failed request takes its blocks back, a restart clears the
replica.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice
from math import exp, exp2

from gateway.core.model import BlockHash, ReplicaId

BLOCK_BYTES = 120
"""Memory of one held block: its hash and its place in the record's list, 45 to 60 with an allocator's rounding; twice
that where a later record has taken over almost half of the list, and where several replicas hold it a share of its
count. Measured with tracemalloc (tests/core/test_prefix_index.py)."""
RECORD_BYTES = 600
"""Memory of one record without its blocks: its places in the LRU and in the dict of heads, 400 to 450 as those grow,
and of the note of its eviction. Measured likewise."""
TAIL_RECORDS = 6
"""Records of the LRU's tail that `eviction_loss` looks at. The rest of a longer eviction is valued like their mean."""
DEFAULT_TAU_SECONDS = 60.0
"""Time scale of reuse while no replica is full: nothing is evicted then, so it hardly matters."""
MINIMUM_TAU_SECONDS = 1.0
"""Below that the exponential would call everything worthless."""
THRIFTY_TURNS = 0.5
"""Share of requests that go on with an earlier prompt from which on room in the caches counts as dear."""
ASSUMED_TURNS = 32.0
"""Requests that went on before the first one came. Without them the first turns of forty chats looked like prompts
that never go on, their system prompts were copied everywhere, and the copies stayed: 0.70 instead of 0.65 s in
simulation."""
MAX_BRANCH_POINTS = 4_096
"""Blocks at which prompts part ways that are remembered; the ones longest without a new branch are forgotten."""
BRANCH_HALF_LIFE_SECONDS = 600.0
"""A branch point that gets no new branches for so long counts half: yesterday's hot prompt is not hot."""


class Record:
    """One request's touch: the blocks at positions `begin` to `end` of its chain were last touched by it."""

    __slots__ = ("begin", "blocks", "end", "evicted_at", "live", "matched_at", "offset", "serial", "touched_at")

    def __init__(self, serial: int, touched_at: float, blocks: Sequence[BlockHash], end: int) -> None:
        self.serial = serial
        self.touched_at = touched_at
        self.blocks = blocks
        self.offset = 0
        """Position of `blocks[0]` in the chain."""
        self.begin = 0
        self.end = end
        self.live = True
        """Its request has not ended."""
        self.matched_at: float | None = None
        """When the last block of its match had been touched before; `None` without a match."""
        self.evicted_at: int | None = None
        """Eviction (`ReplicaIndex.evicted`) that took the block after its match; `None` if none did."""

    @property
    def run(self) -> Sequence[BlockHash]:
        return self.blocks[self.begin - self.offset : self.end - self.offset]

    @property
    def head(self) -> BlockHash:
        """The first block of its run, by which it is found."""
        return self.blocks[self.begin - self.offset]

    def common_end(self, blocks: Sequence[BlockHash]) -> int:
        """Where `blocks`, which has the head of the run in its place, leaves the run, or one of them ends."""
        own, offset = self.blocks, self.offset
        high = min(self.end, len(blocks))
        if own[high - 1 - offset] == blocks[high - 1]:
            return high
        low, high = self.begin + 1, high - 1  # equal before `low`, not at `high`
        while low < high:
            middle = (low + high) >> 1
            if own[middle - offset] == blocks[middle]:
                low = middle + 1
            else:
                high = middle
        return low

    def give_up_to(self, position: int) -> None:
        """Positions before `position` belong to a later record now."""
        self.begin = position
        stale = position - self.offset
        if 2 * stale > len(self.blocks):  # keeps the memory of a record below twice its live part
            self.blocks = self.blocks[stale:]
            self.offset = position

    def __repr__(self) -> str:
        return f"<Record {self.serial} [{self.begin}:{self.end}] at {self.touched_at:.3f}>"


class BranchPoint:
    """A block after which different prompts part ways: at which depth (in blocks), how many did, when the last did."""

    __slots__ = ("at", "count", "depth")

    def __init__(self, depth: int, at: float) -> None:
        self.depth = depth
        self.count = 2.0  # the prompt that was there, and the one that left it
        self.at = at

    def count_at(self, now: float) -> float:
        return self.count * exp2((self.at - now) / BRANCH_HALF_LIFE_SECONDS)

    def grow(self, now: float) -> None:
        self.count = self.count_at(now) + 1.0
        self.at = now


class ReplicaIndex:
    """Blocks of one replica. Made by `PrefixIndex.add`."""

    __slots__ = (
        "_evictions",
        "_heads",
        "_index",
        "capacity",
        "evicted",
        "held",
        "live",
        "max_bytes",
        "records",
        "tail_at",
    )

    def __init__(self, index: PrefixIndex, capacity: int) -> None:
        self._index = index
        self.capacity = capacity
        """Blocks that fit the replica's KV cache."""
        self.max_bytes = 0
        """Share of the index's memory."""
        self.held = 0
        """Blocks of all records."""
        self.records: OrderedDict[int, Record] = OrderedDict()
        self._heads: dict[BlockHash, Record] = {}
        self.evicted = 0
        """Blocks that had to go for newer ones so far."""
        self._evictions: OrderedDict[BlockHash, int] = OrderedDict()
        """`evicted` before each eviction, by its first block: where a prompt that comes again stops to match."""
        self.live = 0
        """Blocks of requests that have not ended, shared ones once: they cannot be evicted. What several share counts
        as the last one's, so for a moment it may count as free while another still has it."""
        self.tail_at: float | None = None
        """When the oldest block was touched last; `None` while there is room."""

    def __len__(self) -> int:
        return self.held

    def __repr__(self) -> str:
        return f"<ReplicaIndex {self.held}/{self.capacity} blocks in {len(self.records)} records>"

    def match(self, blocks: Sequence[BlockHash]) -> int:
        """Blocks of the prompt's leading run held here."""
        return self.find(blocks)[0]

    def find(self, blocks: Sequence[BlockHash]) -> tuple[int, Record | None]:
        """Blocks of the prompt's leading run held here, and the record that the last of them belongs to."""
        heads, end = self._heads, len(blocks)
        position = 0
        last: Record | None = None
        while position < end:
            record = heads.get(blocks[position])
            if record is None or record.begin != position:
                break
            position = record.common_end(blocks)
            last = record
        return position, last

    @property
    def memory_bytes(self) -> int:
        return self.held * BLOCK_BYTES + len(self.records) * RECORD_BYTES

    def touch(self, blocks: Sequence[BlockHash], now: float) -> tuple[int, Record | None]:
        """A request with these blocks is sent here. Returns how many it held already, and the new record."""
        if len(blocks) > self.capacity:
            blocks = blocks[: self.capacity]
        if not blocks:
            return 0, None
        matched, last = self.find(blocks)
        record = self._index.new_record(blocks, now)
        known = matched
        if matched < len(blocks):
            known = self._index.copied(self, blocks, matched)
            record.evicted_at = self._evictions.pop(blocks[matched], None)
        parts = self._index.parts(blocks, known) if last is None or known > matched else last.end > known
        if parts:
            self._index.branched(blocks, known, now)
        elif known < len(blocks):
            self._index.went_on(now)
        if last is not None:
            record.matched_at = last.touched_at
            self._take_over(blocks, matched, last)
        self._heads[blocks[0]] = record
        self.records[record.serial] = record
        self.held += len(blocks)
        self.live += len(blocks)
        self._shrink()
        return matched, record

    def _take_over(self, blocks: Sequence[BlockHash], matched: int, last: Record) -> None:
        """Leading runs of older records, `last` the last of them, go to a new one; a record with nothing left goes."""
        position = 0
        while position < matched:
            record = self._heads[blocks[position]]
            if record.begin != position:  # two blocks of one hash, which somebody may contrive: it keeps what it has
                return
            del self._heads[blocks[position]]
            position = matched if record is last else record.common_end(blocks)
            self.held -= position - record.begin
            if record.live:
                self.live -= position - record.begin
            if record.end == position:
                del self.records[record.serial]
                record.begin = position
            else:
                record.give_up_to(position)
                self._heads[record.head] = record

    def take_back(self, record: Record, matched: int) -> None:
        """The request that made `record` never ran: forget the blocks that only it brought, after `matched`."""
        if self.records.get(record.serial) is record:
            self._drop_tail(record, record.end - max(record.begin, matched))
            self._note_tail()

    def depth(self, touched_at: float) -> int:
        """Blocks that were touched after that time."""
        older = 0
        for record in self.records.values():
            if record.touched_at > touched_at:
                break
            older += record.end - record.begin
        return self.held - older

    def ended(self, record: Record) -> None:
        """The request that made `record` is over: its blocks stay, but may be evicted."""
        if record.live:
            record.live = False
            if self.records.get(record.serial) is record:
                self.live -= record.end - record.begin

    def fit(self, capacity: int) -> None:
        """The replica's KV cache turned out to hold `capacity` blocks."""
        self.capacity = capacity
        self._index.share_memory()

    def limit_memory(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._shrink()

    def clear(self) -> None:
        for record in self.records.values():
            self._index.forget(record.run)
        self.records.clear()
        self._heads.clear()
        self.held = self.live = 0
        self._evictions.clear()
        self._note_tail()

    def sole_blocks(self, now: float, scale: float) -> float:
        """Blocks that no other replica holds, each for exp(-age / scale)."""
        extra, total = self._index.extra_copies, 0.0
        for record in self.records.values():
            blocks = record.run
            sole = len(blocks) - sum(map(extra.__contains__, blocks))
            total += sole * exp((record.touched_at - now) / scale)
        return total

    def eviction_loss(self, blocks: int, now: float, tau: float) -> float:
        """Expected blocks of later prefill if `blocks` new ones come in: what they push out, valued by its age.

        A block that was last used `age` ago is used again with about exp(-age / tau), and if another replica has it
        too, that one may serve it.
        """
        excess = self.held + blocks - self.capacity
        if excess <= 0:
            return 0.0
        extra = self._index.extra_copies
        seen, loss = 0, 0.0  # in blocks
        for record in islice(self.records.values(), TAIL_RECORDS):
            count = record.end - record.begin
            if seen + count > excess:
                count = excess - seen
            last = record.blocks[record.end - 1 - record.offset]
            loss += count * exp((record.touched_at - now) / tau) / (1 + extra.get(last, 0))
            seen += count
            if seen >= excess:
                return loss
        return loss * excess / seen if seen else 0.0

    def _shrink(self) -> None:
        """Evict, oldest first and tail first, until capacity and memory share hold."""
        records = self.records
        excess = self.held - self.capacity
        while excess > 0:
            oldest = next(iter(records.values()))
            count = min(excess, oldest.end - oldest.begin)
            self._note_eviction(oldest, count)
            self._drop_tail(oldest, count)
            excess -= count
        while records and self.memory_bytes > self.max_bytes:
            oldest = next(iter(records.values()))
            self._drop_tail(oldest, oldest.end - oldest.begin)
        self._note_tail()

    def _note_eviction(self, record: Record, count: int) -> None:
        """The last `count` blocks of the record go. One note for each record is enough: that of its last eviction."""
        end = record.end - record.offset
        if end < len(record.blocks):
            self._evictions.pop(record.blocks[end], None)
        self._evictions[record.blocks[end - count]] = self.evicted
        while len(self._evictions) > len(self.records):  # about one cache's worth is remembered
            self._evictions.popitem(last=False)
        self.evicted += count

    def _drop_tail(self, record: Record, count: int) -> None:
        if count <= 0:
            return
        end = record.end - record.offset
        self._index.forget(record.blocks[end - count : end])
        self.held -= count
        if record.live:
            self.live -= count
        if record.end - count == record.begin:
            del self.records[record.serial]
            if self._heads.get(record.head) is record:
                del self._heads[record.head]
        record.end -= count

    def _note_tail(self) -> None:
        full = self.records and self.held >= 0.95 * self.capacity
        tail_at = next(iter(self.records.values())).touched_at if full else None
        if tail_at != self.tail_at:
            self._index.tail_moved(self.tail_at, tail_at)
            self.tail_at = tail_at


class PrefixIndex:
    """The replicas' indexes, the number of copies of each block, one cap on memory, and the branch points."""

    def __init__(self, memory_bytes: int) -> None:
        self.memory_bytes_limit = memory_bytes
        self.extra_copies: Counter[BlockHash] = Counter()
        """Copies beyond the first, of blocks that have any. Small, so that it never costs a pause to grow it."""
        self._replicas: dict[ReplicaId, ReplicaIndex] = {}
        self._branches: OrderedDict[BlockHash, BranchPoint] = OrderedDict()
        self._prompts = BranchPoint(0, 0.0)
        """How many different prompts there were, all that did not just go on where another ended ..."""
        self._turns = BranchPoint(0, 0.0)
        """... and how many went on. At first some are assumed to have, for a fleet begins with first turns only."""
        self._turns.count = ASSUMED_TURNS
        self._serial = 0
        self._tails = 0
        self._tail_sum = 0.0

    def __len__(self) -> int:
        return sum(len(replica) for replica in self._replicas.values())

    def __repr__(self) -> str:
        return (
            f"<PrefixIndex {len(self)} blocks on {len(self._replicas)} replicas, {len(self._branches)} branch points>"
        )

    @property
    def memory_bytes(self) -> int:
        """Estimate of the memory in use, as the cap sees it."""
        return sum(replica.memory_bytes for replica in self._replicas.values())

    @property
    def capacity(self) -> int:
        """Blocks of all replicas together."""
        return sum(replica.capacity for replica in self._replicas.values())

    def add(self, replica: ReplicaId, capacity: int) -> ReplicaIndex:
        index = self._replicas[replica] = ReplicaIndex(self, capacity)
        self.share_memory()
        return index

    def remove(self, replica: ReplicaId) -> None:
        self._replicas.pop(replica).clear()
        self.share_memory()

    def share_memory(self) -> None:
        """Equal shares; what a small replica cannot use goes to the larger ones."""
        left = self.memory_bytes_limit
        by_size = sorted(self._replicas.values(), key=lambda replica: replica.capacity)
        for position, replica in enumerate(by_size):
            share = min(left // (len(by_size) - position), replica.capacity * (BLOCK_BYTES + RECORD_BYTES))
            left -= share
            replica.limit_memory(share)

    def match_anywhere(self, blocks: Sequence[BlockHash]) -> int:
        """Blocks of the prompt's leading run held by the replica that holds most."""
        return max([replica.match(blocks) for replica in self._replicas.values()], default=0)

    def tau(self, now: float) -> float:
        """Residence time of a block in the fleet: mean age of the tails of full replicas."""
        if not self._tails:
            return DEFAULT_TAU_SECONDS
        return max(MINIMUM_TAU_SECONDS, now - self._tail_sum / self._tails)

    def sole_blocks(self, now: float) -> dict[ReplicaId, float]:
        """Blocks of each replica that no other holds, by how likely they are to be asked for: what was touched as long
        ago as the oldest in the fleet counts for 1/e. For operators: it walks through everything."""
        oldest = [next(iter(one.records.values())).touched_at for one in self._replicas.values() if one.records]
        scale = max(MINIMUM_TAU_SECONDS, now - min(oldest, default=now))
        return {id: one.sole_blocks(now, scale) for id, one in self._replicas.items()}

    def thrift(self, now: float) -> float:
        """How dear room in the caches is, 0..1, by the share of requests that go on with an earlier one."""
        turns = self._turns.count_at(now)
        return min(1.0, turns / (self._prompts.count_at(now) + turns) / THRIFTY_TURNS)

    def deserving_depth(self, blocks: Sequence[BlockHash], now: float) -> int:
        """Leading blocks of the prompt that deserve more copies than there are. All of `blocks` is searched: give what
        somebody holds.

        Where prompts go on (chats, agents), copies take their room from histories that only one replica holds. There a
        prefix deserves as large a share of the replicas as it has of the prompts: what all open with is worth a copy
        everywhere, what one of four groups has in common is worth one on four replicas. Where no prompt goes on,
        nothing better could be held, and what many share is worth a copy everywhere.
        """
        points, replicas = self._branches, len(self._replicas)
        depth, prompts, thrift = 0, self._prompts.count_at(now), self.thrift(now)
        for block in filter(points.__contains__, blocks):
            count = points[block].count_at(now)
            copies = 1 + self.extra_copies.get(block, 0)
            if count >= replicas and copies < round(replicas * min(1.0, count / prompts) ** thrift):
                depth = points[block].depth
        return depth

    def discriminating(self, blocks: Sequence[BlockHash], now: float) -> BlockHash | None:
        """The first block that tells the prompt from many that open alike: after the deepest branch point where at
        least as many part ways as there are replicas. `None` where it ends there. The same for all turns of a chat, and
        in every gateway that has seen some prompts of each kind."""
        points, replicas, depth = self._branches, len(self._replicas), 0
        for block in filter(points.__contains__, blocks):
            if points[block].count_at(now) >= replicas:
                depth = points[block].depth
        return blocks[depth] if depth < len(blocks) else None

    def went_on(self, now: float) -> None:
        """A prompt went on where another had ended."""
        self._turns.grow(now)

    def branched(self, blocks: Sequence[BlockHash], depth: int, now: float) -> None:
        """A prompt left the known ones after `depth` blocks (0: it is like none); it counts there and at all branch
        points before."""
        self._prompts.grow(now)
        if not depth:
            return
        points = self._branches
        for block in filter(points.__contains__, islice(blocks, depth - 1)):
            points[block].grow(now)
        block = blocks[depth - 1]
        point = points.get(block)
        if point is not None:
            point.grow(now)
            points.move_to_end(block)
            return
        points[block] = BranchPoint(depth, now)
        if len(points) > MAX_BRANCH_POINTS:
            points.popitem(last=False)

    # ---- called by ReplicaIndex ------------------------------------------------------------------------------------

    def new_record(self, blocks: Sequence[BlockHash], now: float) -> Record:
        self._serial += 1
        return Record(self._serial, now, blocks, len(blocks))

    def parts(self, blocks: Sequence[BlockHash], known: int) -> bool:
        """Whether a prompt of which those who know most know so many blocks leaves the others there, rather than goes
        on where one ended or asks the same again."""
        for replica in self._replicas.values():
            matched, last = replica.find(blocks)
            if last is not None and matched == known and last.end == known:
                return False
        return True

    def copied(self, replica: ReplicaIndex, blocks: Sequence[BlockHash], matched: int) -> int:
        """`replica` gets the blocks from `matched` on. Count a copy for those that another one holds already, and
        return how many of the blocks are known to somebody."""
        reach = matched
        for other in self._replicas.values():
            if other is not replica:
                reach = max(reach, other.match(blocks))
        if reach > matched:
            self.extra_copies.update(blocks[matched:reach])
        return reach

    def forget(self, blocks: Iterable[BlockHash]) -> None:
        """One copy less of each; what nobody holds any more is no branch point either."""
        extra, points = self.extra_copies, self._branches
        if not extra and not points:
            return
        for block in blocks:
            if block in extra:
                if extra[block] > 1:
                    extra[block] -= 1
                else:
                    del extra[block]
            elif block in points:
                del points[block]

    def tail_moved(self, before: float | None, after: float | None) -> None:
        if before is not None:
            self._tails -= 1
            self._tail_sum -= before
        if after is not None:
            self._tails += 1
            self._tail_sum += after
        if not self._tails:
            self._tail_sum = 0.0
