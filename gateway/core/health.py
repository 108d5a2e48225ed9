"""Whether a replica may get requests: four states, one table of transitions.

Evidence is counted first (three failures in a row, of probes or of flights, or too large a share of failed flights),
then becomes a signal; the table says what a signal does. What is neutral never gets here: a client that left, a
request that the replica rejected, back-pressure. Answers that are errors (500) count only where the replica stands out
by them, for the request may be to blame (`core.outliers`). One sign is enough where an engine says itself that it shuts
down.

An ejected replica waits out a back-off: 1 s, then 8 s, then a minute, spread by up to 10 % so that several gateways or
replicas do not come back in step. After that a good probe brings it back, or, where good probes are missing or prove
nothing, one trial request. Failed probes do not lengthen the wait, nor does a trial that finds nobody there, for they
cost nobody anything: a server that was away for an hour is back with its first good probe. Flights that fail there do.
The growth is forgotten after a calm minute, so a replica that fails half its requests, or flaps, soon gets next to
none.
"""

from __future__ import annotations

from enum import Enum

from xxhash import xxh3_64_intdigest

from gateway.core.model import HealthState, ReplicaId

FAILURES_TO_EJECT = 3
"""In a row. One slow probe or one reset connection is noise; three a second apart are found within 3 s."""
SHARE_STEP = 0.1
SHARE_TO_EJECT = 0.4
"""... or four of ten flights, as a moving mean over about ten: every other answer may be an error without three in a
row. Where one in ten is, the mean reaches 0.4 next to never."""
ERROR_STEP = 0.05
"""The same of answers that are errors, over about twenty: replicas are compared by it, and chance must seldom tell."""
SHARE_AT_RETURN = 0.2
"""Who comes back is half way to going again."""
ERRED_AT_RETURN = 0.3
"""For errors, more of the way, since they are counted over twice as many."""
STRANGERS = 20
"""As long as one of so many flights is a prompt whose beginning the replica knows, and completed, errors of other
prompts count for nothing: it answers well what it is known to be able to answer."""
FIRST_BACK_OFF_SECONDS = 1.0
BACK_OFF_GROWTH = 8.0
"""Steep, so that one that flaps once a second changes its state no more than six times in a minute. Each return of a
bad replica costs the clients some requests."""
LONGEST_BACK_OFF_SECONDS = 60.0
JITTER = 0.1
CALM_SECONDS = 60.0
"""Back-offs start again at 1 s after so long without an ejection."""


class Signal(Enum):
    HEARD = "heard"
    """It answered something: a scrape, a model list."""
    ALIVE = "alive"
    """A good probe or a completed flight, counted only after the back-off of an ejected replica."""
    FAILING = "failing"
    """Three failures in a row, too many of late, or word of the engine that it shuts down."""
    SLEPT = "slept"
    WOKE = "woke"


TRANSITIONS: dict[tuple[HealthState, Signal], HealthState] = {
    (HealthState.UNKNOWN, Signal.HEARD): HealthState.UP,
    (HealthState.UNKNOWN, Signal.ALIVE): HealthState.UP,
    (HealthState.UNKNOWN, Signal.FAILING): HealthState.EJECTED,
    (HealthState.UNKNOWN, Signal.SLEPT): HealthState.ASLEEP,
    (HealthState.UP, Signal.FAILING): HealthState.EJECTED,
    (HealthState.UP, Signal.SLEPT): HealthState.ASLEEP,
    (HealthState.EJECTED, Signal.ALIVE): HealthState.UP,
    (HealthState.EJECTED, Signal.FAILING): HealthState.EJECTED,
    (HealthState.EJECTED, Signal.SLEPT): HealthState.ASLEEP,
    (HealthState.ASLEEP, Signal.FAILING): HealthState.EJECTED,
    (HealthState.ASLEEP, Signal.WOKE): HealthState.UP,
}
"""A pair that is not here changes nothing: above all, a sleeping engine answers probes and is no better for it."""


class Health:
    """State of one replica."""

    __slots__ = (
        "_ejections",
        "_empty_at",
        "_failed_flights",
        "_failed_probes",
        "_failed_share",
        "_heard_probe",
        "_replica",
        "_strangers",
        "_trial",
        "draining",
        "ejected_at",
        "erred_share",
        "erring",
        "flights_failed",
        "last_failure",
        "retry_at",
        "state",
        "unreachable",
    )

    def __init__(self, replica: ReplicaId) -> None:
        self._replica = replica
        self.state = HealthState.UNKNOWN
        self.last_failure = ""
        self.ejected_at = 0.0
        self.retry_at = float("-inf")
        """End of the back-off."""
        self.flights_failed = False
        """The ejection was (also) for failed flights: it does not just answer probes badly."""
        self.unreachable = False
        """The last flight could not even connect, and no good probe has come since."""
        self.draining = False
        """The engine said that it shuts down. Until it is gone it answers probes well, which proves nothing."""
        self.erred_share = 0.0
        """Of late flights: those that it answered, but with an error."""
        self.erring = False
        """It was ejected for such answers."""
        self._strangers = STRANGERS
        """Flights since a known one completed."""
        self._empty_at: float | None = None
        """When a flight first brought nothing; `None` once a later one brought something."""
        self._ejections = 0
        self._failed_probes = 0
        self._failed_flights = 0
        self._failed_share = 0.0
        self._heard_probe = False
        self._trial = False

    def __repr__(self) -> str:
        return f"<Health {self.state.value}, ejected {self._ejections} times, last failure {self.last_failure!r}>"

    # ---- evidence: each returns whether the state changed ----------------------------------------------------------

    def heard(self, now: float) -> bool:
        return self._signal(Signal.HEARD, now)

    def probe(self, ok: bool, reason: str, now: float) -> bool:
        self._heard_probe = True
        if ok:
            self._failed_probes = 0
            self.unreachable = False
            return not self.draining and self._is_past_back_off(now) and self._signal(Signal.ALIVE, now)
        self.last_failure = reason or "probe failed"
        self.draining = False  # what answers next is another process
        self._empty_at = None
        self._failed_probes += 1
        if self._failed_probes < FAILURES_TO_EJECT or self.state is HealthState.EJECTED:
            return False
        return self._signal(Signal.FAILING, now)

    def flight_started(self) -> None:
        self._trial = True

    def flight_completed(self, started_at: float, now: float, *, known: bool = False) -> bool:
        """A flight that began before the ejection proves nothing: a server that shuts down finishes old streams.
        `known`: the replica had answered what its prompt begins with."""
        if self.state is HealthState.EJECTED and started_at < self.ejected_at:
            return False
        self._trial = self.unreachable = self.draining = False
        if self._empty_at is not None and started_at > self._empty_at:  # an engine that shuts down ends old ones well
            self._empty_at = None
        self._failed_flights = self._failed_probes = 0
        self._failed_share -= SHARE_STEP * self._failed_share
        self.erred_share -= ERROR_STEP * self.erred_share
        self._strangers = 0 if known else self._strangers + 1
        return self._signal(Signal.ALIVE, now)

    def flight_failed(self, started_at: float, now: float, *, reached: bool = True) -> bool:
        self.last_failure = "request failed" if reached else "cannot connect"
        self.unreachable = not reached
        if self.state is HealthState.EJECTED and started_at < self.ejected_at:
            self.flights_failed = True  # sent before we knew: not another reason to wait longer
            return False
        self._trial = False
        if self.state is HealthState.EJECTED and not reached:
            self.flights_failed = True
            self.retry_at = max(self.retry_at, now + FIRST_BACK_OFF_SECONDS)
            return False
        self._failed_flights += 1
        self._failed_share += SHARE_STEP * (1.0 - self._failed_share)
        few = self._failed_flights < FAILURES_TO_EJECT and self._failed_share < SHARE_TO_EJECT
        if few and not self.flights_failed:
            return False
        self.flights_failed = True
        return self._signal(Signal.FAILING, now)

    def flight_erred(self, started_at: float, *, known: bool) -> bool:
        """It answered with an error: its own or the request's, which only the others can tell (`core.outliers`).
        Returns whether it counts."""
        self.unreachable = False
        if self.state is HealthState.EJECTED and started_at < self.ejected_at:
            return False
        self._trial = False
        self._strangers += 1
        if not known and self._strangers <= STRANGERS:
            return False
        self.erred_share += ERROR_STEP * (1.0 - self.erred_share)
        return True

    def blame_errors(self, now: float) -> bool:
        """Its errors are its own."""
        self.last_failure = "answered with errors"
        self.erring = self.flights_failed = True
        return self._signal(Signal.FAILING, now)

    def flight_drained(self, now: float) -> bool:
        """The engine answered that it shuts down and has done nothing."""
        self.last_failure = "shutting down"
        self._trial = False
        self.draining = self.flights_failed = True
        return self._signal(Signal.FAILING, now)

    def flight_empty(self, now: float) -> bool:
        """Nothing came. Two in a row say that the engine shuts down; one alone may be the doing of the request."""
        if self._empty_at is not None or self.draining:
            return self.flight_drained(now)
        self._empty_at = now
        self.flight_ended()
        return False

    def flight_ended(self) -> None:
        """Neither good nor bad (client left, rejected, refused): a trial is over without a verdict."""
        self._trial = False

    def sleep(self, asleep: bool, now: float) -> bool:
        return self._signal(Signal.SLEPT if asleep else Signal.WOKE, now)

    def doubted(self) -> None:
        """Another gateway has ejected it: one failure of our own suffices now, and a success clears it."""
        if self.state is HealthState.UP:
            self._failed_probes = max(self._failed_probes, FAILURES_TO_EJECT - 1)
            self._failed_flights = max(self._failed_flights, FAILURES_TO_EJECT - 1)

    # ---- answers ---------------------------------------------------------------------------------------------------

    def may_be_tried(self, now: float) -> bool:
        """Ejected, back-off over, no probe can tell, and no trial is running."""
        if self.state is not HealthState.EJECTED or now < self.retry_at or self._trial:
            return False
        return self.draining or not self._heard_probe

    def is_hopeless(self, now: float) -> bool:
        """Ejected for connections that failed, back-off not over, no good probe since: to try it only costs time."""
        return self.unreachable and self.flights_failed and now < self.retry_at

    def _is_past_back_off(self, now: float) -> bool:
        return self.state is not HealthState.EJECTED or now >= self.retry_at

    def _signal(self, signal: Signal, now: float) -> bool:
        before = self.state
        after = TRANSITIONS.get((before, signal), before)
        if after is HealthState.EJECTED and signal is Signal.FAILING:
            self._eject(before, now)
        elif after is HealthState.UP and before is not HealthState.UP:
            self._failed_probes = self._failed_flights = 0
            self._failed_share = min(self._failed_share, SHARE_AT_RETURN)
            self.erred_share = min(self.erred_share, ERRED_AT_RETURN)
            self.flights_failed = self.unreachable = self.draining = self.erring = False
        self.state = after
        return after is not before

    def _eject(self, before: HealthState, now: float) -> None:
        if before is HealthState.EJECTED and now < self.retry_at:
            return  # still waiting for the last verdict
        if now - self.retry_at > CALM_SECONDS:
            self._ejections = 0
        back_off = min(FIRST_BACK_OFF_SECONDS * BACK_OFF_GROWTH ** min(self._ejections, 16), LONGEST_BACK_OFF_SECONDS)
        draw = xxh3_64_intdigest(self._replica.encode(), self._ejections) / 2**64
        self._ejections += 1
        self._heard_probe = self._trial = False
        if before is not HealthState.EJECTED:
            self.ejected_at = now
        self.retry_at = now + back_off * (1.0 + JITTER * draw)
