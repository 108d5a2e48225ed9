"""What gateways in front of the same replicas tell each other, as facts that each of them observes.

A gateway writes down in a `Journal` what it has sent where and which responses it has seen stored; whoever carries the
journal to the others (a feed, a simulator) asks its `Outbox` and hands them the same facts. What it has booked at each
replica goes with them, as a report that replaces the one before: so a report that is lost is made good by the next.

What may be wrong: all of it is late, by a fraction of a second as a rule, and some is lost. A block that is not known
to be held costs a prefill; a load that is not known costs a detour; a report that is old is not believed. What another
gateway thinks of a replica's health is a hint and no verdict: it leaves one failure of our own to go.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from gateway.core.model import PeerFact, PeerReported, PeerSent, PeerStored

MAX_JOURNAL_BLOCKS = 262_144
"""Prefix blocks in what is not fetched yet: some 30 M tokens, what a busy gateway sends in ten seconds. The blocks lie
in the index as well, so they take no memory of their own."""
MAX_JOURNAL_STORED = 10_000
ROUND_SECONDS = 0.025
"""Between two rounds of telling and hearing: what one gateway does, the others know within 50 ms. Simulated with four
gateways, 0.05 waited 1.13 times as long as one gateway in the 90th percentile, 0.025 1.08: until they hear of it they
send to the same idle replica."""
BUNDLE_BLOCKS = 8_192
"""Prefix blocks that are told together, 64 KiB, and those of one prompt more."""
ROUND_BUNDLES = 8
"""Of one round: ten times what a thousand requests a second with 8,000 tokens need."""
REPORT_SECONDS = 3.0
"""A report is believed for so long. Reports come with each round from a gateway that works, once a second from one that
idles."""
IDLE_REPORT_SECONDS = 1.0
"""A report that says the same as the one before is sent so often."""
FIRST_TOKEN_SECONDS = 0.25
"""A first token is reported for ten rounds, of which one may well arrive; then an idle gateway repeats itself."""
SILENT_SECONDS = 0.5
"""A gateway with prefill pending reports in each round. One that is silent for so long is gone, or cut off: what it had
pending holds nobody else up any more, and is taken to be done at the pace of the replica."""


class Journal:
    """What this gateway has done that the others should know, oldest first; the oldest goes when nobody fetches it.

    `beside`: another journal, where somebody else carries the same elsewhere: each is fetched at its own time."""

    def __init__(self, beside: Journal | None = None) -> None:
        self._beside = beside
        self._sent: deque[PeerSent] = deque()
        self._stored: deque[PeerStored] = deque(maxlen=MAX_JOURNAL_STORED)
        self._blocks = 0

    def __repr__(self) -> str:
        return f"<Journal of {len(self._sent)} prompts, {self._blocks} blocks, {len(self._stored)} stored responses>"

    def note_sent(self, fact: PeerSent) -> None:
        self._sent.append(fact)
        self._blocks += len(fact.blocks)
        while self._blocks > MAX_JOURNAL_BLOCKS:
            self._blocks -= len(self._sent.popleft().blocks)
        if self._beside is not None:
            self._beside.note_sent(fact)

    def note_stored(self, fact: PeerStored) -> None:
        self._stored.append(fact)
        if self._beside is not None:
            self._beside.note_stored(fact)

    def fetch(self, blocks: int) -> list[PeerSent | PeerStored]:
        """Takes out the oldest, up to so many blocks but one prompt at least, and all stored responses."""
        facts: list[PeerSent | PeerStored] = list(self._stored)
        self._stored.clear()
        while self._sent and (blocks > 0 or not facts):
            fact = self._sent.popleft()
            self._blocks -= len(fact.blocks)
            blocks -= len(fact.blocks)
            facts.append(fact)
        return facts

    def put_back(self, facts: Iterable[PeerFact]) -> None:
        """What was fetched and has not arrived, for the next time; of too much the oldest goes. What is booked is told
        anew in any case."""
        sent = [fact for fact in facts if isinstance(fact, PeerSent)]
        stored = [fact for fact in facts if isinstance(fact, PeerStored)]
        for fact in reversed(sent):
            if self._blocks + len(fact.blocks) > MAX_JOURNAL_BLOCKS:
                break
            self._sent.appendleft(fact)
            self._blocks += len(fact.blocks)
        self._stored = deque([*stored, *self._stored], maxlen=MAX_JOURNAL_STORED)

    @property
    def is_empty(self) -> bool:
        return not self._sent and not self._stored


class Outbox:
    """What one gateway has to tell, round by round, in bundles that arrive or are lost as a whole."""

    def __init__(self, journal: Journal, report: Callable[[float], list[PeerReported]]) -> None:
        """`report` says what is booked at a time (`Router.report_to_peers`)."""
        self._journal = journal
        self._report = report
        self._reported: list[PeerReported] = []
        self._report_due = float("-inf")

    def bundles(self, now: float) -> list[list[PeerFact]]:
        """Of one round; none where there is nothing new."""
        facts: list[PeerFact] = list(self._reports(now))
        bundles: list[list[PeerFact]] = []
        while (facts or not self._journal.is_empty) and len(bundles) < ROUND_BUNDLES:
            bundles.append([*facts, *self._journal.fetch(BUNDLE_BLOCKS)])
            facts = []
        return bundles

    def put_back(self, bundles: Iterable[list[PeerFact]]) -> None:
        """They have not arrived, as far as is known. What is told twice does no harm."""
        self._journal.put_back([fact for bundle in bundles for fact in bundle])
        self._report_due = float("-inf")

    def _reports(self, now: float) -> list[PeerReported]:
        """What is booked, if that has changed or was not said for a while."""
        reports = self._report(now)
        if reports == self._reported and now < self._report_due:
            return []
        self._reported, self._report_due = reports, now + IDLE_REPORT_SECONDS
        return reports


def credible(facts: Iterable[PeerFact], age_seconds: float) -> list[PeerFact]:
    """Those that are still worth hearing when they are so old."""
    return [fact for fact in facts if age_seconds <= REPORT_SECONDS or not isinstance(fact, PeerReported)]


class Report:
    """The last word of one other gateway about one replica, and when it came."""

    __slots__ = ("at", "fact", "head_at")

    def __init__(self, fact: PeerReported, at: float) -> None:
        self.fact = fact
        self.at = at
        self.head_at = at - fact.head_seconds


class PeerLoads:
    """What other gateways have booked at one replica."""

    __slots__ = ("_reports", "first_token_at")

    def __init__(self) -> None:
        self._reports: dict[str, Report] = {}
        self.first_token_at = float("-inf")
        """The last one that any of them saw."""

    def __repr__(self) -> str:
        return f"<PeerLoads of {len(self._reports)} gateways>"

    def report(self, fact: PeerReported, now: float) -> bool:
        """Replaces the gateway's last one. Returns whether that gateway has just ejected the replica."""
        before = self._reports.get(fact.peer)
        self._reports[fact.peer] = Report(fact, now)
        if fact.first_token_seconds is not None:
            self.first_token_at = max(self.first_token_at, now - fact.first_token_seconds)
        if before is None:  # somebody new: a good time to forget who is gone
            self._reports = {peer: one for peer, one in self._reports.items() if now - one.at <= REPORT_SECONDS}
        return fact.ejected and not (before is not None and before.fact.ejected)

    def in_flight(self, now: float) -> int:
        return sum([one.fact.in_flight for one in self._reports.values() if now - one.at <= REPORT_SECONDS])

    def running_tokens(self, now: float) -> float:
        return sum([one.fact.running_tokens for one in self._reports.values() if now - one.at <= REPORT_SECONDS])

    def pending(self, now: float, prefill_rate: float) -> tuple[float, float, Report | None]:
        """Uncached tokens of all that have no first token yet, what is left of those of silent gateways, were the
        replica at work on nothing else, and the report with the one among the former that was sent first."""
        tokens = fading = 0.0
        first = None
        for one in self._reports.values():
            pending = one.fact.pending_tokens
            if not pending:
                continue
            age = now - one.at
            if age <= SILENT_SECONDS:
                tokens += pending
                if first is None or one.head_at < first.head_at:
                    first = one
            elif age <= REPORT_SECONDS:
                fading += max(0.0, pending - age * prefill_rate)
        return tokens, fading, first
