"""Limits of keys over all gateways: what a key has spent here the others hear, and what it spent there counts here.

A limit's bucket is in two parts. The common one is what all know: it is debited when a gateway has told of a spend, by
that gateway and by those that hear of it, so all have the same within a round. Beside it stands what was spent here and
is not told yet. What is left is the common bucket less that; nothing is asked of anybody while a request waits.

**Alone**, without the way to the others, a gateway lets in its share: the common bucket fills as if nobody spent
anything, and the gateway takes its part of it, less what it could not tell. So all together let in what the limit says,
and when the way is there again, what each still owes is told and comes off for all. The share is by the number of
gateways that were heard last. After `SHARE_SECONDS` it is the whole: who is still alone then is likely to be the only
one left, and clients would wait for nothing.

Worker processes of one gateway have a second way, to each other (`Way`), which is always there. Alone they are alone
together: they share one share.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gateway.core.sharing import IDLE_REPORT_SECONDS, REPORT_SECONDS
from gateway.keys import Key
from gateway.limits import Bucket, Caller

SHARE_SECONDS = 600.0
"""Most outages are over by then."""
LATE_SECONDS = 1.0
"""What is heard comes in order, give or take a round or two."""
FULL_SECONDS = 60.0
"""A bucket fills in so long: what is older is made up for."""
MAX_TOLD = 4_096
"""Keys told of at once; the others follow in the next round ..."""
MOST_TOLD = 10**9
"""... and so does what was spent of one limit beyond that, requests or tokens."""


@dataclass(frozen=True, slots=True)
class KeyUse:
    """What others have to know of a key: spent since the last time, and how many requests it has running now."""

    key: str
    """Its name."""
    requests: int
    tokens: int
    """Negative: given back."""
    running: int | None = None


class FleetBucket(Bucket):
    """One limit of one key. What it inherits is the common part."""

    __slots__ = ("_fleet", "_nearby", "_paid_at", "is_tokens", "key")

    def __init__(self, fleet: FleetLimits, key: str, is_tokens: bool, per_minute: int) -> None:
        super().__init__(per_minute, float("-inf"))  # full since ever: the past may still be heard of
        self.key = key
        self.is_tokens = is_tokens
        self._fleet = fleet
        self._nearby = 0.0
        """What other processes of this gateway spent while the way to the other gateways was not there."""
        self._paid_at = float("-inf")

    def wait_seconds(self, amount: float, now: float) -> float:
        if self._fleet.is_alone:
            self._pay_off(now)
        share = self._fleet.share
        most = self.per_minute * share
        missing = min(amount, most) - (
            self._common(now) * share - self._fleet.outside.untold.get(self, 0.0) - self._nearby
        )
        return max(0.0, missing * 60 / most)

    def take(self, amount: float, now: float) -> None:
        if self._fleet.is_alone:
            self._pay_off(now)
        for way in self._fleet.ways:
            way.untold[self] = way.untold.get(self, 0.0) + amount

    def told(self, amount: float, now: float) -> None:
        """All others will hear of so much."""
        super().take(amount, max(now, self._at))

    def hear(self, amount: float, at: float, now: float) -> None:
        """Somebody else has spent it at a time. What is heard much too late cannot be put where it belongs: it counts
        as far as it can still matter."""
        if self._fleet.is_alone:
            self._pay_off(now)
        if at < self._at - LATE_SECONDS:
            if now - at > FULL_SECONDS:
                return
            amount = min(amount, max(0.0, self._common(now)))
        self.told(amount, at)

    def hear_nearby(self, amount: float, at: float, now: float) -> None:
        """Another process of this gateway has, and tells the other gateways itself as soon as it can. Who has just
        started hears so what was told long ago."""
        if self._fleet.has_lost:
            self._pay_off(now)
            self._nearby += amount
            self._fleet.nearby.add(self)
        else:
            self.hear(amount, at, now)

    def join(self, now: float) -> None:
        """The way to the other gateways is there again."""
        self._pay_off(now)
        self.told(self._nearby, now)
        self._nearby = 0.0

    def _common(self, now: float) -> float:
        return min(self._level + max(0.0, now - self._at) * self.per_minute / 60, self.per_minute)

    def _pay_off(self, now: float) -> None:
        """While the common part is full, our share of what would flow into it pays for what could not be told."""
        untold = self._fleet.outside.untold
        own = untold.get(self, 0.0)
        owed = own + self._nearby
        full_at = self._at + (self.per_minute - self._level) * 60 / self.per_minute
        seconds = now - max(self._paid_at, full_at, self._fleet.alone_since)
        if owed > 0 and seconds > 0:
            left = max(0.0, 1 - seconds * self.per_minute / 60 * self._fleet.share / owed)
            untold[self] = own * left
            self._nearby *= left
        self._paid_at = now


class Way:
    """One way to others: what they have not been told there yet."""

    def __init__(self) -> None:
        self.untold: dict[FleetBucket, float] = {}
        self.moved: dict[str, int] = {}
        """Keys whose number of running requests has changed, and what it is."""
        self._running: dict[str, int] = {}
        """What the others know of, but zeros."""
        self._running_due = float("-inf")
        """All of it is told again then: a report counts for a while only."""
        self._tells_all = False
        self._spent: list[tuple[FleetBucket, int]] = []
        self._places: dict[str, int] = {}

    def uses(self, now: float) -> list[KeyUse]:
        """What is to be told. Until `told` it stays here."""
        spent_now = list(self.untold.items())[:MAX_TOLD]
        self._spent = [(one, round(max(-MOST_TOLD, min(amount, MOST_TOLD)))) for one, amount in spent_now]
        self._places = dict(self.moved)
        self._tells_all = now >= self._running_due
        if self._tells_all:
            self._places = {**self._running, **self._places}
        spent: dict[str, list[int]] = {key: [0, 0] for key in self._places}
        for one, amount in self._spent:
            if amount:
                spent.setdefault(one.key, [0, 0])[one.is_tokens] += amount
        return [KeyUse(key, requests, tokens, self._places.get(key)) for key, (requests, tokens) in spent.items()]

    def told(self, now: float) -> Iterator[tuple[FleetBucket, int]]:
        """The last `uses` have arrived: what was spent with them."""
        if self._tells_all:
            self._running_due = now + IDLE_REPORT_SECONDS
        for key, running in self._places.items():
            if self.moved.get(key) == running:
                del self.moved[key]
            self._running[key] = running
            if not running:
                del self._running[key]
        for one, amount in self._spent:
            left = self.untold.get(one, 0.0) - amount
            if abs(left) < 1:
                self.untold.pop(one, None)
            else:
                self.untold[one] = left
            yield one, amount
        self._spent, self._places = [], {}


class FleetLimits:
    """All limits of all keys as this process knows them. Implements `limits.Fleet`.

    `gateways`: there are others, which are heard of where there is a way to them; until then it is alone. `processes`:
    this one is one of several of its gateway."""

    def __init__(self, *, gateways: bool, processes: bool) -> None:
        self.outside = Way()
        """What the common part lacks."""
        self.inside = Way() if gateways and processes else self.outside
        self.ways = (self.outside,) if self.inside is self.outside else (self.outside, self.inside)
        self.is_alone = gateways
        self.has_lost = False
        """The others, who were there before."""
        self.alone_since = float("-inf")
        self.share = 1.0
        self.nearby: set[FleetBucket] = set()
        self.has_others = gateways or processes
        self._buckets: dict[tuple[str, bool], FleetBucket] = {}
        self._places: dict[str, dict[str, tuple[int, float]]] = {}
        """Of keys with a limit: what others have running, by who says so, and since when."""
        self._siblings: dict[str, float] = {}
        """Other processes of this gateway, and when they were heard last."""

    # ---- for `limits.Caller` -----------------------------------------------------------------------------------------

    def bucket(self, key: str, is_tokens: bool, per_minute: int) -> Bucket:
        made = self._buckets[key, is_tokens] = FleetBucket(self, key, is_tokens, per_minute)
        return made

    def note(self, key: Key) -> None:
        if key.concurrent_requests is not None:
            self._places.setdefault(key.name, {})

    def moved(self, caller: Caller) -> None:
        if caller.key.concurrent_requests is not None:
            for way in self.ways:
                way.moved[caller.key.name] = caller.running

    def running_elsewhere(self, key: str, now: float) -> int:
        return sum(
            running
            for peer, (running, at) in self._places.get(key, {}).items()
            if now - at <= REPORT_SECONDS and (not self.is_alone or peer in self._siblings)
        )

    def places(self, most: int) -> int:
        """Of so many, how many are for this gateway."""
        return max(1, int(most * self.share))

    # ---- for those who carry it to others ----------------------------------------------------------------------------

    def told_outside(self, now: float) -> None:
        for one, amount in self.outside.told(now):
            one.told(amount, now)

    def told_inside(self, now: float) -> None:
        if self.inside is self.outside:
            self.told_outside(now)
        else:
            for _ in self.inside.told(now):
                pass

    def hear(self, peer: str, uses: Iterable[KeyUse], at: float, now: float) -> None:
        """Another gateway said so at a time."""
        for use in uses:
            for one, amount in self._of(use):
                one.hear(amount, at, now)
            self._hear_running(peer, use, at, now)

    def hear_nearby(self, peer: str, uses: Iterable[KeyUse], at: float, now: float) -> None:
        """Another process of this gateway did; it also lives."""
        if peer not in self._siblings:
            self._siblings = {one: last for one, last in self._siblings.items() if now - last <= REPORT_SECONDS}
        self._siblings[peer] = max(at, self._siblings.get(peer, at))
        for use in uses:
            for one, amount in self._of(use):
                one.hear_nearby(amount, at, now)
            self._hear_running(peer, use, at, now)

    def be_alone(self, others: int, now: float) -> None:
        """The way to the other gateways is not there (still): so many there were. No word is heard until `join`."""
        if not self.is_alone:
            self.is_alone = self.has_lost = True
            self.alone_since = now
            self._siblings = {peer: at for peer, at in self._siblings.items() if now - at <= REPORT_SECONDS}
            here = 1 + len(self._siblings)
            self.share = here / (here + others)
        elif now - self.alone_since > SHARE_SECONDS:
            self.share = 1.0

    def join(self, now: float) -> None:
        """The way is there, and all is heard that was said meanwhile."""
        if self.is_alone:
            for one in self.nearby.union(self.outside.untold):
                one.join(now)
            self.nearby.clear()
            self.is_alone = self.has_lost = False
            self.share = 1.0

    def _of(self, use: KeyUse) -> Iterator[tuple[FleetBucket, int]]:
        for is_tokens, amount in ((False, use.requests), (True, use.tokens)):
            if amount and (one := self._buckets.get((use.key, is_tokens))) is not None:
                yield one, amount

    def _hear_running(self, peer: str, use: KeyUse, at: float, now: float) -> None:
        places = self._places.get(use.key)
        if use.running is None or places is None or now - at > REPORT_SECONDS:
            return
        if peer not in places:  # somebody new: a good time to forget who is gone
            for gone in [one for one, (_, last) in places.items() if now - last > REPORT_SECONDS]:
                del places[gone]
        places[peer] = use.running, at
