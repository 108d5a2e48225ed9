"""How busy one replica is: the work we booked there ourselves, corrected by what it last said about itself.

Our own flights are booked the moment they are sent, so no decision waits for a poll. A flight has two loads: its
uncached prompt tokens are *pending* until its first token, and its whole prompt occupies KV cache until it ends. The
prefill at the head of the queue is taken to advance at the learned rate; it is never believed finished before its first
token is seen.

Where other gateways send to the replica too, the queue is theirs as well: each tells all that it has pending, its head,
and when it saw a first token, and nobody counts progress by himself (`core.sharing`).

A load snapshot adds only what we cannot know: *foreign* requests, those that it counts beyond our own, and its KV
usage. It ages: foreign requests fade, and after some missed scrapes nothing of it is believed. Unknown is `None`, not
zero.
"""

from __future__ import annotations

from collections import deque
from math import exp2

from gateway.core.model import LoadSnapshot
from gateway.core.sharing import FIRST_TOKEN_SECONDS, PeerLoads

FOREIGN_HALF_LIFE_SECONDS = 2.0
"""Foreign requests seen once count half after this: a request lasts seconds, and a fresh scrape comes each half
second."""
STALE_INTERVALS = 4.0
"""A snapshot older than so many scrape intervals is not believed: one late scrape is noise, four are a broken feed."""
MINIMUM_STALE_SECONDS = 3.0
"""... but never before this, whatever the interval: one scrape may take up to its time-out of 2 s."""
ASSUMED_INTERVAL_SECONDS = 1.0
"""Scrape interval until two snapshots have come."""
FIRST_REFUSAL_SECONDS = 1.0
LONGEST_REFUSAL_SECONDS = 8.0
"""After a 429 or 503 the replica counts as busy for 1 s, doubling with each further refusal in a row up to 8 s: long
enough for its queue to move, short enough that it has its share again within 10 s."""
REFUSING_AS_REQUESTS = 16.0
"""A refusing replica counts as having so many foreign requests, for policies that count requests."""
LATE_SECONDS = 0.5
"""A first token may come so much later than expected and says nothing about the next."""
RECENT_ENDS = 64
"""Ends of flights remembered to know what was booked when a snapshot was taken (milliseconds ago)."""
ASSUMED_RESIDENCE_SECONDS = 5.0
RESIDENCE_STEP = 0.1
"""Mean duration of a flight: moving mean over about ten of them, 5 s until the first ends."""


class Booking:
    """What one flight occupies at its replica."""

    __slots__ = ("prompt_tokens", "started_at", "streams", "uncached_tokens")

    def __init__(self, prompt_tokens: float, uncached_tokens: float, started_at: float, streams: bool) -> None:
        self.prompt_tokens = prompt_tokens
        self.uncached_tokens = uncached_tokens
        self.started_at = started_at
        self.streams = streams


class Load:
    """Load of one replica."""

    __slots__ = (
        "_ends",
        "_first_token_at",
        "_foreign",
        "_head_since",
        "_interval",
        "_pending",
        "_pending_tokens",
        "_refusals",
        "_refusing_until",
        "_stale_seconds",
        "in_flight",
        "in_flight_tokens",
        "peers",
        "residence_seconds",
        "snapshot",
    )

    def __init__(self) -> None:
        self.in_flight = 0
        self.in_flight_tokens = 0.0
        self.residence_seconds = ASSUMED_RESIDENCE_SECONDS
        self.snapshot: LoadSnapshot | None = None
        self.peers: PeerLoads | None = None
        """What other gateways have booked there; `None` as long as none has said anything."""
        self._pending: dict[Booking, None] = {}  # in order of sending
        self._pending_tokens = 0.0
        self._head_since = 0.0
        self._first_token_at = float("-inf")
        self._foreign: float | None = None
        self._interval = ASSUMED_INTERVAL_SECONDS
        self._ends: deque[float] = deque(maxlen=RECENT_ENDS)
        self._stale_seconds = STALE_INTERVALS * ASSUMED_INTERVAL_SECONDS
        self._refusals = 0
        self._refusing_until = float("-inf")

    def __repr__(self) -> str:
        return f"<Load {self.in_flight} in flight, {self._pending_tokens:.0f} tokens pending, foreign {self._foreign}>"

    # ---- our own flights -------------------------------------------------------------------------------------------

    def book(self, prompt_tokens: float, uncached_tokens: float, now: float, streams: bool = True) -> Booking:
        booking = Booking(prompt_tokens, uncached_tokens, now, streams)
        if not self._pending:
            self._head_since = now
        self._pending[booking] = None
        self._pending_tokens += uncached_tokens
        self.in_flight += 1
        self.in_flight_tokens += prompt_tokens
        return booking

    def prefilled(self, booking: Booking, now: float) -> None:
        """The first token came: its uncached tokens are no longer pending. Harmless when repeated."""
        pending = self._pending
        if booking in pending:
            del pending[booking]
            self._pending_tokens = self._pending_tokens - booking.uncached_tokens if pending else 0.0
            self._head_since = self._first_token_at = now

    def release(self, booking: Booking, now: float, ran: bool) -> None:
        """The flight ended; `ran`: to its natural end, so that its duration says something."""
        self.prefilled(booking, now)
        self.in_flight -= 1
        self.in_flight_tokens = self.in_flight_tokens - booking.prompt_tokens if self.in_flight else 0.0
        self._ends.append(now)
        if ran:
            self.residence_seconds += RESIDENCE_STEP * (now - booking.started_at - self.residence_seconds)

    def queued_tokens(self, now: float, prefill_rate: float) -> float:
        """Uncached tokens of all gateways' flights that are not prefilled yet."""
        if self.peers is None:
            return self._own_queued_tokens(now, prefill_rate)
        return self._shared_queue(self.peers, now, prefill_rate)[0]

    def _own_queued_tokens(self, now: float, prefill_rate: float) -> float:
        """Uncached tokens of our flights that are not prefilled yet, if it works at that rate; and if the one at the
        head is late, as much more as it would have done since: what is late is likely to be late as long again."""
        pending = self._pending
        while pending:
            head = next(iter(pending))
            tokens, done = head.uncached_tokens, (now - self._head_since) * prefill_rate
            if done < tokens:
                return max(0.0, self._pending_tokens - max(0.0, done))
            if head.streams:
                late = done - tokens - LATE_SECONDS * prefill_rate
                return max(0.0, self._pending_tokens - tokens) + max(0.0, late)
            # Nobody will tell when its prefill ends: time does.
            since = self._head_since + tokens / prefill_rate
            self.prefilled(head, since)
        return 0.0

    def _shared_queue(self, peers: PeerLoads, now: float, prefill_rate: float) -> tuple[float, float]:
        """The same where other gateways send there too, and how much of it is behind the head: the replica has one
        queue, and is at work on what any of them sent first, since any of them saw its last first token."""
        others, fading, first = peers.pending(now, prefill_rate)
        pending = self._pending
        while pending or first is not None:
            own = next(iter(pending)) if pending else None
            if own is not None and (first is None or own.started_at <= first.head_at):
                sent_at, tokens = own.started_at, own.uncached_tokens
            else:
                assert first is not None
                own, sent_at, tokens = None, first.head_at, first.fact.head_tokens
            since = max(sent_at, self._first_token_at, peers.first_token_at)
            done = (now - since) * prefill_rate
            behind = fading + max(0.0, self._pending_tokens + others - tokens)
            if done < tokens:
                return behind + tokens - max(0.0, done), behind
            if own is None or own.streams:
                return behind + max(0.0, done - tokens - LATE_SECONDS * prefill_rate), behind
            self.prefilled(own, since + tokens / prefill_rate)
        return fading, fading

    def pending(self, now: float, prefill_rate: float) -> tuple[float, float, float, float | None]:
        """Of our flights alone, for others: tokens that are pending, those of the first flight among them and for how
        many seconds, and how many ago a first token was seen last, if that is news."""
        self.queued_tokens(now, prefill_rate)  # those that nobody tells of are over when it is time
        head = next(iter(self._pending)) if self._pending else None
        seen = now - self._first_token_at
        news = seen if seen < FIRST_TOKEN_SECONDS else None
        if head is None:
            return 0.0, 0.0, 0.0, news
        return self._pending_tokens, head.uncached_tokens, now - head.started_at, news

    def seconds_until(self, tokens: float, now: float, prefill_rate: float) -> float | None:
        """How long until no more than so many tokens are queued by the passing of time alone; `None`: it will not be,
        a first token must be seen before."""
        if self.peers is not None:
            queued, behind = self._shared_queue(self.peers, now, prefill_rate)
        else:
            queued = self._own_queued_tokens(now, prefill_rate)
            behind = self._pending_tokens - next(iter(self._pending)).uncached_tokens if self._pending else 0.0
        if queued <= tokens:
            return 0.0
        return (queued - tokens) / prefill_rate if behind <= tokens else None

    def pending_tokens(self, now: float, prefill_rate: float) -> float:
        """The same, and while it refuses requests the work that would keep it busy until it is asked again."""
        queued = self.queued_tokens(now, prefill_rate) if self._pending or self.peers is not None else 0.0
        if self._refusing_until > now:
            queued += (self._refusing_until - now) * prefill_rate
        return queued

    # ---- what it says ----------------------------------------------------------------------------------------------

    def refused(self, now: float) -> None:
        """It answered 429 or 503."""
        if now >= self._refusing_until:  # refusals of one burst count once
            self._refusing_until = now + min(FIRST_REFUSAL_SECONDS * 2**self._refusals, LONGEST_REFUSAL_SECONDS)
            self._refusals = min(self._refusals + 1, 8)

    def accepted(self) -> None:
        self._refusals = 0

    def report(self, snapshot: LoadSnapshot) -> None:
        """Take a new snapshot. Ignored when older than the last."""
        last = self.snapshot
        if last is not None:
            gap = snapshot.taken_at - last.taken_at
            if gap < 0:
                return
            self._interval += 0.3 * (min(gap, 60.0) - self._interval)
            self._stale_seconds = max(MINIMUM_STALE_SECONDS, STALE_INTERVALS * self._interval)
        self.snapshot = snapshot
        if snapshot.running is None:
            self._foreign = None
            return
        booked = self.in_flight + sum(1 for end in self._ends if end > snapshot.taken_at)
        if self.peers is not None:
            booked += self.peers.in_flight(snapshot.taken_at)
        self._foreign = max(0.0, snapshot.running + (snapshot.waiting or 0) - booked)

    def scraped(self, now: float) -> tuple[float | None, float | None]:
        """Requests of others there, faded, and KV usage; `None` where no fresh snapshot tells."""
        snapshot = self.snapshot
        refusing = REFUSING_AS_REQUESTS if self._refusing_until > now else 0.0
        if snapshot is None or now - snapshot.taken_at > self._stale_seconds:
            return refusing or None, None
        foreign = self._foreign
        if foreign is None:
            return refusing or None, snapshot.kv_usage
        if foreign:
            foreign *= exp2((snapshot.taken_at - now) / FOREIGN_HALF_LIFE_SECONDS)
        return foreign + refusing, snapshot.kv_usage
