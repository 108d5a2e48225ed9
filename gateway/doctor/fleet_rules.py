"""Rules about replicas of one model beside each other: they should be alike, and have alike to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import fmean

from gateway.doctor import page as pages
from gateway.doctor.findings import Symptom
from gateway.doctor.replica_rules import seconds
from gateway.doctor.window import Replica, Window

UNEQUAL = 0.1
"""Caches that differ by more should not get equal shares; the planner says the same."""
IMBALANCE = 1.5
"""Busiest by mean. Less evens out by itself."""
LEAST_WAITING = 0.5
"""Requests, on average. Where nobody waits, uneven work costs nothing."""
LEAST_WORK_TOKENS = 5_000.0
"""Uncached prompt tokens of the group within the window: of a few prompts one replica always has the most."""

Group = tuple[Replica, ...]
Reading = Callable[[Replica, Group], str | None]


def name_of(group: Group) -> str:
    names = [set(one.base_models) for one in group]
    return f"{len(group)} replicas of {', '.join(sorted(set.intersection(*names) or set.union(*names)))}"


def differing(what: str, reading: Reading) -> Callable[[Window], Iterator[Symptom]]:
    """The rule that a value is the same on all replicas of a model that say it."""

    def symptoms(window: Window) -> Iterator[Symptom]:
        for group in window.groups:
            places: dict[str, list[str]] = {}
            for replica in group:
                value = reading(replica, group)
                if value is not None:
                    places.setdefault(value, []).append(replica.url)
            if len(places) > 1:
                said = "; ".join(f"{value} at {', '.join(urls)}" for value, urls in places.items())
                yield Symptom(name_of(group), f"{what}: {said}")

    return symptoms


def block_size(replica: Replica, _: Group) -> str | None:
    return replica.config("hash_block_size") or replica.config("block_size")


def hash_algorithm(replica: Replica, _: Group) -> str | None:
    return replica.config("prefix_caching_hash_algo")


def version(replica: Replica, _: Group) -> str | None:
    return replica.version


def models(replica: Replica, _: Group) -> str | None:
    return ", ".join(sorted(card.id for card in replica.models or ())) or None


def shared(group: Group) -> list[str]:
    """Models that all of them serve."""
    return sorted(set.intersection(*(set(one.base_models) for one in group)))


def context(replica: Replica, group: Group) -> str | None:
    lengths = [replica.base_models[name].max_model_len for name in shared(group)]
    return ", ".join(str(length) for length in lengths if length is not None) or None


def weights(replica: Replica, group: Group) -> str | None:
    """Where they were loaded from."""
    roots = [replica.base_models[name].root for name in shared(group)]
    return ", ".join(root for root in roots if root is not None) or None


def unequal_caches(window: Window) -> Iterator[Symptom]:
    for group in window.groups:
        sizes = {one.url: one.last.load.cache_tokens for one in group if one.last is not None}
        known = {url: size for url, size in sizes.items() if size is not None}
        if known and max(known.values()) - min(known.values()) > UNEQUAL * max(known.values()):
            said = "; ".join(f"{size} tokens at {url}" for url, size in known.items())
            figures = {"smallest_tokens": min(known.values()), "largest_tokens": max(known.values())}
            yield Symptom(name_of(group), f"KV cache: {said}", figures)


def somebody_waits(window: Window, group: Group) -> bool:
    """In an engine of the group, or in a gateway in front of it."""
    urls = {one.url for one in group}
    queues = [one.waiting for one in group]
    queues += [one.gauge(pages.WAITING) for one in window.gateways if not urls.isdisjoint(one.replicas)]
    return any(fmean(queue) >= LEAST_WAITING for queue in queues if queue)


def work_imbalance(window: Window) -> Iterator[Symptom]:
    """By uncached prompt tokens: what each had to compute."""
    for group in (one for one in window.groups if somebody_waits(window, one)):
        work = {one.url: one.queries - one.hits for one in group if one.queries is not None and one.hits is not None}
        if len(work) < len(group) or sum(work.values()) < LEAST_WORK_TOKENS:
            continue
        ratio = max(work.values()) / fmean(work.values())
        if ratio > IMBALANCE:
            busiest = max(work, key=work.__getitem__)
            evidence = (
                f"{busiest} computed {work[busiest]:.0f} of {sum(work.values()):.0f} uncached prompt tokens in "
                f"{seconds(window.seconds)}, {ratio:.1f} times the mean"
            )
            yield Symptom(name_of(group), evidence, {"busiest_by_mean": ratio, "uncached_tokens": sum(work.values())})
