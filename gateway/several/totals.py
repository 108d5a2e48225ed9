"""One metrics page for several processes: what each counts is added up, what all know alike is said once.

Counters and histograms are added, those of processes that are gone as well, so that totals never fall. Of the gauges
those in `ADDED` are a part each of a whole, and those in `OF_PARENT` are the parent's; the others say what every worker
knows (replicas, the index, the build), so the answering worker's own stand for all.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any, cast

from msgspec import Struct
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.samples import Sample

ADDED = frozenset(
    (
        "warmlane_held_body_bytes",
        "warmlane_tasks",
        "warmlane_in_flight_requests",
        "warmlane_waiting_requests",
        "warmlane_tenant_waiting_requests",
        "warmlane_upstream_connections",
        "warmlane_index_bytes",
        "warmlane_replica_in_flight_requests",
        "warmlane_processes",
        "process_virtual_memory_bytes",
        "process_resident_memory_bytes",
        "process_open_fds",
    )
)

OF_PARENT = frozenset(("process_start_time_seconds",))
"""Since when totals count. Each worker has another: it would look as if the gateway began anew from page to page."""

Labels = tuple[tuple[str, str], ...]
Row = tuple[str, Labels, float]
"""Name of a sample, its labels, its value."""
Sums = dict[tuple[str, Labels], float]


class Page(Struct, array_like=True):
    """What is to be added of one process, or of several. Gauges end with their process, counts do not."""

    counts: list[Row]
    gauges: list[Row]


def page_of(families: Iterable[Metric]) -> Page:
    page = Page([], [])
    for family in families:
        rows = page.counts if is_counted(family) else page.gauges if family.name in ADDED else None
        if rows is not None:
            rows += [(sample.name, tuple(sample.labels.items()), sample.value) for sample in family.samples]
    return page


def rows_of_parent() -> list[Row]:
    """Of the process that asks."""
    families = [one for one in ProcessCollector(registry=None).collect() if one.name in OF_PARENT]
    return [(sample.name, (), sample.value) for family in families for sample in family.samples]


def is_counted(family: Metric) -> bool:
    return family.type in ("counter", "histogram")


def add(sums: Sums, rows: Iterable[Row]) -> None:
    for name, labels, value in rows:
        sums[name, labels] = sums.get((name, labels), 0.0) + value


def rows_of(sums: Sums) -> list[Row]:
    return [(name, labels, value) for (name, labels), value in sums.items()]


def with_others(families: Iterable[Metric], others: Page, replicas: Container[str]) -> bytes:
    """The page in the text format. Of replicas that are gone nothing is said, as on the page of a single process."""
    missing: dict[str, Sums] = {}
    """By name of the sample, so that a family finds its own."""
    for name, labels, value in (*others.counts, *others.gauges):
        replica = dict(labels).get("replica")
        if replica is None or replica in replicas:
            missing.setdefault(name, {})[name, labels] = value
    return generate_latest(cast(CollectorRegistry, Collected([_joined(family, missing) for family in families])))


def _joined(family: Metric, missing: dict[str, Sums]) -> Metric:
    """The family with what the others add to its samples, and with theirs that it has not."""
    if family.name in OF_PARENT:
        of_parent = missing.get(family.name, {})
        family.samples = [Sample(family.name, {}, value) for value in of_parent.values()] or family.samples
        return family
    if not is_counted(family) and family.name not in ADDED:
        return family
    known = {sample.name for sample in family.samples} | _names(family)
    sums: Sums = {(sample.name, tuple(sample.labels.items())): sample.value for sample in family.samples}
    for name in sorted(known):
        for (_, labels), value in missing.get(name, {}).items():
            sums[name, labels] = sums.get((name, labels), 0.0) + value
    family.samples = [Sample(name, dict(labels), value) for (name, labels), value in sums.items()]
    return family


def _names(family: Metric) -> set[str]:
    """Of all samples that it may have."""
    if family.type == "counter":
        return {f"{family.name}_total"}
    if family.type == "histogram":
        return {f"{family.name}_bucket", f"{family.name}_count", f"{family.name}_sum"}
    return {family.name}


class Collected:
    """As much of a registry as the text format needs."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Any:
        return self._families
