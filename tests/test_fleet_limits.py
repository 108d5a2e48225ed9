"""Limits of keys over several gateways, without sockets: rounds and time are moved by hand."""

from __future__ import annotations

from random import Random

import pytest

from gateway.feeds.peer_entries import Receiver, Sender, Told
from gateway.feeds.sealing import Refused, RefusedFor
from gateway.fleet_limits import FULL_SECONDS, SHARE_SECONDS, FleetLimits, KeyUse
from gateway.keys import Key
from gateway.limits import Bucket, Caller, OverLimit, Stay

ROUND = 0.05
A_MINUTE = 600


def key(**limits: int) -> Key:
    return Key("alice", bytes(32), tenant="alice", **limits)  # type: ignore[arg-type]


class Gateway:
    def __init__(self, name: str, now: float, *, processes: bool = False, gateways: bool = True, **limits: int) -> None:
        self.name = name
        self.limits = FleetLimits(gateways=gateways, processes=processes)
        self.caller = Caller(key(**limits), now, self.limits)
        self.let_in = 0

    def asks(self, now: float) -> bool:
        try:
            stay = self.caller.enter(now)
        except OverLimit:
            return False
        stay.leave(0, now)
        self.let_in += 1
        return True


class Fleet:
    """Gateways with a stream between them: what is told arrives with the next round of each."""

    def __init__(self, *names: str, now: float = 1_000.0, **limits: int) -> None:
        self.now = now
        self.gateways = [Gateway(name, now, **limits) for name in names]
        self.stream: list[tuple[str, float, list[KeyUse]]] = []
        self.read = dict.fromkeys(names, 0)
        self.is_there = True
        self.reference = Gateway("one", now, **limits)
        """One gateway that gets it all."""
        self.round()

    def round(self) -> None:
        for one in self.gateways:
            if self.is_there:
                self._exchange(one)
            else:
                one.limits.be_alone(len(self.gateways) - 1, self.now)
        self.now += ROUND

    def _exchange(self, one: Gateway) -> None:
        if not one.limits.is_alone:
            uses = one.limits.outside.uses(self.now)
            if uses:
                self.stream.append((one.name, self.now, uses))
            one.limits.told_outside(self.now)
        for name, at, uses in self.stream[self.read.setdefault(one.name, 0) :]:
            if name != one.name:
                one.limits.hear(name, uses, at, self.now)
        self.read[one.name] = len(self.stream)
        one.limits.join(self.now)

    def settle(self) -> None:
        for _ in range(3):
            self.round()

    @property
    def let_in(self) -> int:
        return sum(one.let_in for one in self.gateways)

    def load(self, seconds: float, rates: dict[int, float], chance: Random) -> None:
        """Requests a second at each gateway, by its place."""
        until = self.now + seconds
        while self.now < until:
            for place, rate in rates.items():
                for _ in range(int(rate * ROUND + chance.random())):
                    self.gateways[place].asks(self.now)
                    self.reference.asks(self.now)
            self.round()

    def lefts(self) -> list[float]:
        """Seconds that each says a key has to wait for a whole minute's worth."""
        return [one.caller._requests.wait_seconds(A_MINUTE, self.now) for one in self.gateways if one.caller._requests]


UNEVEN = {0: 60.0, 1: 15.0, 2: 3.0}


@pytest.mark.parametrize("seed", range(3))
def test_all_let_in_what_one_would(seed: int) -> None:
    fleet = Fleet("a", "b", "c", requests_per_minute=A_MINUTE)
    fleet.load(90.0, UNEVEN, Random(seed))
    assert fleet.let_in == pytest.approx(fleet.reference.let_in, rel=0.01)
    assert all(gateway.let_in for gateway in fleet.gateways)
    assert max(fleet.lefts()) - min(fleet.lefts()) < 0.5, "all know the same"


def test_below_the_limit_nobody_is_refused() -> None:
    fleet = Fleet("a", "b", "c", requests_per_minute=A_MINUTE)
    for turn in range(400):  # half of it
        if turn % 4 == 0:
            assert fleet.gateways[turn % 3].asks(fleet.now)
        fleet.round()


@pytest.mark.parametrize("seconds", [3.0, 40.0, 200.0])
def test_without_the_others_each_lets_in_its_share(seconds: float) -> None:
    """And what they owe when they meet again comes off for all, no more and no less."""
    chance = Random(7)
    fleet = Fleet("a", "b", "c", requests_per_minute=A_MINUTE)
    fleet.load(20.0, {0: 4.0}, chance)
    fleet.is_there = False
    fleet.round()
    assert [one.limits.share for one in fleet.gateways] == pytest.approx([1 / 3] * 3)
    fleet.load(seconds, {0: 20.0, 1: 20.0, 2: 20.0}, chance)
    assert fleet.let_in == pytest.approx(fleet.reference.let_in, rel=0.02)
    fleet.is_there = True
    fleet.load(30.0, UNEVEN, chance)
    assert fleet.let_in == pytest.approx(fleet.reference.let_in, rel=0.02)
    assert max(fleet.lefts()) - min(fleet.lefts()) < 0.5


def test_what_was_made_up_for_alone_is_not_told() -> None:
    """Ten minutes at a third of its share: nothing is owed when it is back."""
    fleet = Fleet("a", "b", "c", requests_per_minute=A_MINUTE)
    fleet.is_there = False
    fleet.load(500.0, {0: 1.0}, Random(3))
    assert fleet.let_in > 300
    fleet.is_there = True
    fleet.settle()
    assert max(fleet.lefts()) < 0.5


def test_who_stays_alone_gets_the_whole_limit() -> None:
    fleet = Fleet("a", "b", requests_per_minute=A_MINUTE)
    fleet.is_there = False
    fleet.round()
    assert fleet.gateways[0].limits.share == 0.5
    fleet.now += SHARE_SECONDS + 1
    fleet.round()
    assert fleet.gateways[0].limits.share == 1.0


def test_who_was_never_with_others_is_as_one_gateway() -> None:
    alone, bucket, now = Gateway("a", 0.0, requests_per_minute=60), Bucket(60, 0.0), 0.0
    chance = Random(5)
    for _ in range(2_000):
        now += chance.random() * 1.5
        alone.limits.be_alone(0, now)
        expected = bucket.wait_seconds(1, now) == 0
        if expected:
            bucket.take(1, now)
        assert alone.asks(now) == expected


def test_who_starts_later_knows_what_was_spent() -> None:
    fleet = Fleet("a", "b", requests_per_minute=A_MINUTE)
    fleet.load(100.0, {0: 20.0, 1: 1.0}, Random(2))
    fleet.gateways.append(Gateway("late", fleet.now, requests_per_minute=A_MINUTE))
    assert fleet.gateways[-1].asks(fleet.now), "it is not held up meanwhile"
    fleet.settle()
    assert max(fleet.lefts()) - min(fleet.lefts()) < 0.5
    assert min(fleet.lefts()) > 50


def test_what_comes_much_too_late_makes_no_debt() -> None:
    one = Gateway("a", 0.0, requests_per_minute=60)
    one.limits.join(0.0)
    assert one.asks(1_000.0)
    one.limits.outside.uses(1_000.0)
    one.limits.told_outside(1_000.0)
    one.limits.hear("b", [KeyUse("alice", 500, 0)], 1_000.0 - FULL_SECONDS - 1, 1_000.0)
    assert one.asks(1_000.0), "it is made up for"
    one.limits.hear("b", [KeyUse("alice", 500, 0)], 990.0, 1_000.0)
    assert not one.asks(1_000.0)
    assert one.asks(1_002.1)


def test_a_round_that_failed_is_told_with_the_next() -> None:
    fleet = Fleet("a", "b", requests_per_minute=A_MINUTE)
    a, b = fleet.gateways
    for _ in range(100):
        a.asks(fleet.now)
    a.limits.outside.uses(fleet.now)  # and it did not arrive
    a.limits.be_alone(1, fleet.now)
    fleet.settle()
    assert b.caller._requests is not None
    assert b.caller._requests.wait_seconds(A_MINUTE, fleet.now) == pytest.approx(10.0, abs=0.5)
    fleet.settle()
    assert max(fleet.lefts()) - min(fleet.lefts()) < 0.1


def test_tokens_are_told_when_they_are_reserved_and_put_right_at_the_end() -> None:
    fleet = Fleet("a", "b", tokens_per_minute=60_000)
    a, b = fleet.gateways
    stay = a.caller.enter(fleet.now)
    stay.reserve(50_000, fleet.now)
    fleet.settle()
    other = b.caller.enter(fleet.now)
    with pytest.raises(OverLimit):
        other.reserve(20_000, fleet.now)
    stay.leave(1_000, fleet.now)
    fleet.settle()
    other.reserve(20_000, fleet.now)
    other.leave(100_000, fleet.now)
    fleet.settle()
    with pytest.raises(OverLimit) as refused:
        a.caller.enter(fleet.now)
    assert refused.value.retry_after == pytest.approx(40.0, abs=2.0), "a debt is everybody's"


def test_a_request_that_was_refused_counts_nowhere() -> None:
    fleet = Fleet("a", "b", requests_per_minute=2)
    a, b = fleet.gateways
    stays = [a.caller.enter(fleet.now) for _ in range(2)]
    fleet.settle()
    assert not b.asks(fleet.now)
    for stay in stays:
        stay.leave(0, fleet.now, refused=True)
    fleet.settle()
    assert b.asks(fleet.now)


def test_places_are_counted_everywhere_and_come_back() -> None:
    fleet = Fleet("a", "b", concurrent_requests=3)
    a, b = fleet.gateways
    stays = [a.caller.enter(fleet.now) for _ in range(3)]
    fleet.settle()
    for _ in range(200):  # longer than a report is believed: it is repeated
        assert not b.asks(fleet.now)
        fleet.round()
    stays.pop().leave(0, fleet.now)
    fleet.settle()
    assert b.asks(fleet.now)
    for stay in stays:
        stay.leave(0, fleet.now)
    fleet.settle()
    assert not a.limits.outside.uses(fleet.now + 10), "what has ended is told once"


def test_places_of_a_gateway_that_is_gone_come_back() -> None:
    fleet = Fleet("a", "b", concurrent_requests=1)
    a, b = fleet.gateways
    a.caller.enter(fleet.now)
    fleet.settle()
    assert not b.asks(fleet.now)
    fleet.gateways = [b]
    for _ in range(70):
        fleet.round()
    assert b.asks(fleet.now)


def test_alone_each_has_its_share_of_the_places() -> None:
    fleet = Fleet("a", "b", concurrent_requests=5)
    a, b = fleet.gateways
    held: list[Stay] = [a.caller.enter(fleet.now) for _ in range(2)]
    fleet.settle()
    fleet.is_there = False
    fleet.round()
    assert len(held) == 2
    assert not a.asks(fleet.now)
    assert b.asks(fleet.now), "what others had is not known any more"


# -- worker processes


def pass_on(workers: list[Gateway], now: float) -> None:
    for one in workers:
        uses = one.limits.inside.uses(now)
        one.limits.told_inside(now)
        for other in workers:
            if other is not one:
                other.limits.hear_nearby(one.name, uses, now, now)


def test_processes_of_one_gateway_share_their_limits() -> None:
    now = 50.0
    workers = [Gateway(name, now, gateways=False, processes=True, requests_per_minute=60) for name in "ab"]
    assert not workers[0].limits.is_alone
    for _ in range(300):
        for one in workers:
            one.asks(now)
        pass_on(workers, now)
        now += 0.1
    assert sum(one.let_in for one in workers) == pytest.approx(60 + 30, abs=2)


def test_processes_without_the_other_gateways_share_one_share() -> None:
    """Two processes here, two elsewhere: half of the limit, whoever of the two gets the requests; and what they spent
    is told once."""
    now = 50.0
    workers = [Gateway(name, now, processes=True, requests_per_minute=A_MINUTE) for name in "ab"]
    for one in workers:
        one.limits.join(now)
    pass_on(workers, now)
    for one in workers:
        one.limits.hear_nearby("b" if one.name == "a" else "a", [], now, now)
        one.limits.be_alone(2, now)
        assert one.limits.share == 0.5
    for _ in range(1_000):
        for one, times in zip(workers, (5, 1), strict=True):
            for _ in range(times):
                one.asks(now)
        pass_on(workers, now)
        now += 0.02
    spent = sum(one.let_in for one in workers)
    assert spent == pytest.approx(A_MINUTE / 2 + 20 * 5, abs=5)
    told = 0
    for one in workers:
        one.limits.join(now)
        told += sum(use.requests for use in one.limits.outside.uses(now))
    assert told == pytest.approx(A_MINUTE / 2, abs=5), "less what the common bucket could not hold"


def test_a_process_that_starts_hears_what_the_others_told_long_ago() -> None:
    """Ten minutes at the limit's rate, and a burst just now."""
    late = Gateway("late", 600.0, processes=True, requests_per_minute=60)
    for second in range(600):
        late.limits.hear_nearby("a", [KeyUse("alice", 1, 0)], float(second), 600.0)
    late.limits.join(600.0)
    assert late.asks(600.0)
    late.limits.hear_nearby("a", [KeyUse("alice", 59, 0)], 600.0, 600.0)
    assert not late.asks(600.0)
    assert late.asks(602.0)


# -- entries


def test_uses_travel_in_entries() -> None:
    sender = Sender(b"secret", "fleet")
    receiver = Receiver(b"secret", "fleet", b"another")
    uses = [KeyUse("alice", 3, -200, 1), KeyUse("bob", 0, 0, 0), KeyUse("carol", 1, 7)]
    told = receiver.read(sender.entry([], uses))
    assert told == Told(sender.name.hex(), [], uses)


@pytest.mark.parametrize(
    "use",
    [
        KeyUse("", 1, 1),
        KeyUse("x" * 65, 1, 1),
        KeyUse("a", 2 * 10**9 + 1, 0),
        KeyUse("a", 0, -2 * 10**9 - 1),
        KeyUse("a", 0, 0, -1),
        KeyUse("a", 1.5, 0),  # type: ignore[arg-type]
    ],
)
def test_what_no_gateway_would_say_is_refused(use: KeyUse) -> None:
    entry = Sender(b"secret", "fleet").entry([], [use])
    with pytest.raises(Refused) as refused:
        Receiver(b"secret", "fleet", b"another").read(entry)
    assert refused.value.reason is RefusedFor.MALFORMED


def test_more_than_an_entry_may_say_is_told_in_parts() -> None:
    fleet = Fleet("a", "b", tokens_per_minute=10**12)
    a, b = fleet.gateways
    a.caller.enter(fleet.now).leave(3 * 10**9, fleet.now)
    uses = [a.limits.outside.uses(fleet.now)[0].tokens]
    assert uses == [10**9]
    for _ in range(4):
        fleet.round()
    assert sum(use.tokens for _, _, told in fleet.stream for use in told) == 3 * 10**9
    assert b.asks(fleet.now)


def test_spends_of_keys_that_are_not_known_are_nothing() -> None:
    one = Gateway("a", 0.0, requests_per_minute=1)
    one.limits.hear("b", [KeyUse("mallory", 5, 5, 5)], 1.0, 1.0)
    assert one.asks(1.0)
