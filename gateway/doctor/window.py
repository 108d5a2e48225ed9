"""What was seen of servers within a few seconds: looks at their metrics in order of time, and the arithmetic on them.

Counters become increases. One that falls began anew (a restart), so it counts from zero, and a series that appears
while its page was read before counts from zero too. A figure that no look has is `None`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from gateway.core.model import LoadSnapshot, ModelCard
from gateway.doctor import page as pages
from gateway.doctor.page import Labels, Page
from gateway.operate import Fleet

Reading = Callable[[LoadSnapshot], float | None]


@dataclass(frozen=True, slots=True)
class Look:
    at: float
    """Seconds since the window began."""
    page: Page | None
    problem: str = ""
    """Why there is no page."""


@dataclass(frozen=True)
class Server:
    url: str
    looks: tuple[Look, ...]

    @property
    def seen(self) -> list[tuple[float, Page]]:
        return [(look.at, look.page) for look in self.looks if look.page is not None]

    @property
    def first(self) -> Page | None:
        return self.seen[0][1] if self.seen else None

    @property
    def last(self) -> Page | None:
        return self.seen[-1][1] if self.seen else None

    @property
    def is_gone(self) -> bool:
        """It was seen, and then not any more. One look that failed may just have been late."""
        return bool(self.seen) and len(self.looks) > 2 and not any(look.page for look in self.looks[-2:])

    @property
    def seconds(self) -> float:
        """Between the first and the last page."""
        return self.seen[-1][0] - self.seen[0][0] if self.seen else 0.0

    def gauge(self, family: str, **labels: str) -> list[float]:
        found = [page.total(family, **labels) for _, page in self.seen]
        return [value for value in found if value is not None]

    def increase(self, family: str, **labels: str) -> float | None:
        """Over the window, summed over all series with these labels. `None` with fewer than two pages, or if none of
        them has the family."""
        if len(self.seen) < 2:
            return None
        history = [page.series(family, **labels) for _, page in self.seen]
        return sum(added(history)) if any(history) else None

    def rate(self, family: str, **labels: str) -> float | None:
        """Increase a second."""
        increase = self.increase(family, **labels)
        return None if increase is None or not self.seconds else increase / self.seconds


def added(history: list[dict[Labels, float]]) -> Iterator[float]:
    """What each series gained from one look to the next."""
    for earlier, later in pairwise(history):
        for series, value in later.items():
            before = earlier.get(series, 0.0)
            yield value - before if value >= before else value


@dataclass(frozen=True)
class Replica(Server):
    engine: str | None = None
    """`None`: not recognised."""
    version: str | None = None
    models: tuple[ModelCard, ...] | None = None
    models_problem: str = ""
    kv_events: bool | None = None
    """Whether it publishes them; `None` where it does not say (before vLLM 0.32)."""
    paused: bool | None = None
    """Only developer mode tells."""
    health_problem: str = ""
    up_for: str = ""
    """A gateway that reports it up, if any."""

    @property
    def base_models(self) -> dict[str, ModelCard]:
        """Without adapters."""
        return {card.id: card for card in self.models or () if card.parent is None}

    def loads(self, reading: Reading) -> list[float]:
        """A value of the load at each look that has it."""
        found = [reading(page.load) for _, page in self.seen]
        return [value for value in found if value is not None]

    @property
    def running(self) -> list[float]:
        return self.loads(lambda load: load.running)

    @property
    def waiting(self) -> list[float]:
        return self.loads(lambda load: load.waiting)

    @property
    def kv_usage(self) -> float | None:
        """The median: an engine that preempts swings between full and half full."""
        found = self.loads(lambda load: load.kv_usage)
        return median(found) if found else None

    @property
    def asleep(self) -> bool:
        return self.last is not None and self.last.load.asleep is True

    def gained(self, reading: Reading) -> float | None:
        """As `increase`, for a counter of the load."""
        values = self.loads(reading)
        if len(values) < 2:
            return None
        return sum(b - a if b >= a else b for a, b in pairwise(values))

    @property
    def queries(self) -> float | None:
        """Prompt tokens looked up in the prefix cache within the window."""
        return self.gained(lambda load: load.prefix_queries)

    @property
    def hits(self) -> float | None:
        return self.gained(lambda load: load.prefix_hits)

    @property
    def hit_rate(self) -> float | None:
        queries, hits = self.queries, self.hits
        return hits / queries if queries and hits is not None else None

    def config(self, label: str) -> str | None:
        """Of `vllm:cache_config_info`."""
        return self.last.label(pages.CACHE_CONFIG, label) if self.last is not None else None


@dataclass(frozen=True)
class Gateway(Server):
    fleet: Fleet | None = None
    """Its view of its replicas, where it is open to us."""
    fleet_problem: str = ""
    ready_problem: str = ""
    """What `/ready` answered at the end of the window, if not 200."""

    @property
    def replicas(self) -> list[str]:
        if self.fleet is not None:
            return [one.replica for one in self.fleet.replicas]
        return self.listed

    @property
    def listed(self) -> list[str]:
        """Replicas on its last page."""
        states = self.last.of(pages.STATE) if self.last is not None else ()
        return list(dict.fromkeys(one.labels.get("replica", "") for one in states))

    @property
    def standings(self) -> dict[str, str]:
        """Of each replica on its last page: `up` if it gets new requests, else why not."""
        drained = {one for one in self.listed if self.value(pages.DRAINING, one) == 1}
        return {one: f"{self.state(one)}, drained" if one in drained else self.state(one) for one in self.listed}

    def state(self, replica: str) -> str:
        """Health of a replica as this gateway sees it; empty when it does not know it."""
        states = self.last.of(pages.STATE, replica=replica) if self.last is not None else ()
        return next((one.labels.get("state", "") for one in states if one.value == 1), "")

    def value(self, family: str, replica: str) -> float | None:
        """Of a gauge of this replica, at the end."""
        return self.last.total(family, replica=replica) if self.last is not None else None


@dataclass(frozen=True)
class Window:
    seconds: float
    replicas: tuple[Replica, ...] = ()
    gateways: tuple[Gateway, ...] = ()

    @property
    def groups(self) -> list[tuple[Replica, ...]]:
        """Replicas that share a model, and so should be alike."""
        return list(alike(self.replicas))


def alike(replicas: tuple[Replica, ...]) -> Iterator[tuple[Replica, ...]]:
    left = [one for one in replicas if one.base_models]
    while left:
        group, names = [left.pop(0)], set[str]()
        names.update(group[0].base_models)
        while joining := [one for one in left if names & one.base_models.keys()]:
            left = [one for one in left if one not in joining]
            group += joining
            names.update(name for one in joining for name in one.base_models)
        if len(group) > 1:
            yield tuple(group)


@dataclass(frozen=True, slots=True)
class Trend:
    """How a gauge moved: the mean of its first third, and of its last."""

    first: float
    last: float

    def grows(self, least: float, share: float) -> bool:
        return self.last - self.first >= max(least, share * self.first)


def trend(values: list[float]) -> Trend | None:
    if len(values) < 2:
        return None
    third = max(1, len(values) // 3)
    return Trend(fmean(values[:third]), fmean(values[-third:]))
