"""One `/metrics` page as the doctor keeps it: load as the gateway's own scrape reads it, and the samples of the other
families that rules look at. Missing is not zero: what a page lacks is `None`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gateway.core.model import LoadSnapshot
from gateway.feeds.dialects import PLAIN, dialect_of_page
from gateway.feeds.metrics_text import MOST_LINE_BYTES, MOST_LINES, Absurd, Sample, read_load, read_sample

CACHE_CONFIG = "vllm:cache_config_info"
PREEMPTIONS = "vllm:num_preemptions_total"
REJECTIONS = "vllm:admission_rejections_total"
FINISHED = "vllm:request_success_total"
GENERATION_TOKENS = "vllm:generation_tokens_total"
PROMPT_TOKENS = "vllm:prompt_tokens_total"
STEPS = "vllm:iteration_tokens_total_count"
TOKEN_GAPS = "vllm:inter_token_latency_seconds_count"
TOKEN_GAP_SECONDS = "vllm:inter_token_latency_seconds_sum"
HTTP_REQUESTS = "http_requests_total"

BUILD = "warmlane_build_info"
ATTEMPTS = "warmlane_upstream_attempts_total"
SHED = "warmlane_shed_total"
WAITING = "warmlane_waiting_requests"
REPORTED_PROMPT_TOKENS = "warmlane_prompt_tokens_total"
CACHED = "warmlane_replica_cached_tokens_total"
STATE = "warmlane_replica_state"
DRAINING = "warmlane_replica_draining"
LOAD_AGE = "warmlane_replica_load_age_seconds"
IN_FLIGHT = "warmlane_replica_in_flight_requests"
WORKERS = "warmlane_workers"

OF_VLLM = (CACHE_CONFIG, PREEMPTIONS, REJECTIONS, FINISHED, GENERATION_TOKENS, PROMPT_TOKENS, STEPS)
OF_GATEWAY = (
    BUILD,
    ATTEMPTS,
    SHED,
    WAITING,
    REPORTED_PROMPT_TOKENS,
    CACHED,
    STATE,
    DRAINING,
    LOAD_AGE,
    IN_FLIGHT,
    WORKERS,
)
FAMILIES = frozenset((*OF_VLLM, TOKEN_GAPS, TOKEN_GAP_SECONDS, HTTP_REQUESTS, *OF_GATEWAY))
"""HTTP requests are counted by the server under vLLM."""
PREFIXES = (b"vllm:", b"http_requests_total", b"warmlane_")

Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Page:
    load: LoadSnapshot
    samples: Mapping[str, tuple[Sample, ...]]
    """By family; of `FAMILIES` only."""

    @property
    def is_gateway(self) -> bool:
        return BUILD in self.samples

    def of(self, family: str, **labels: str) -> tuple[Sample, ...]:
        """Samples with these labels, whatever others they have."""
        wanted = labels.items()
        return tuple(one for one in self.samples.get(family, ()) if wanted <= one.labels.items())

    def total(self, family: str, **labels: str) -> float | None:
        """All engines together; `None` when there is no such sample, or one that is no number."""
        values = [one.value for one in self.of(family, **labels)]
        known = [value for value in values if value is not None]
        return sum(known) if known and len(known) == len(values) else None

    def series(self, family: str, **labels: str) -> dict[Labels, float]:
        found = self.of(family, **labels)
        return {frozenset(one.labels.items()): one.value for one in found if one.value is not None}

    def label(self, family: str, label: str) -> str | None:
        """What an info family says; of engines that differ, all they say. `None` also where vLLM writes that."""
        values = {one.labels[label] for one in self.of(family) if label in one.labels} - {"None"}
        return ", ".join(sorted(values)) or None


def read_page(body: bytes, taken_at: float) -> Page:
    samples: dict[str, list[Sample]] = {}
    dialect = dialect_of_page(body) or PLAIN
    try:
        load = read_load(body, taken_at, dialect.families)
        lines = [line for line in body.split(b"\n") if line.startswith(PREFIXES) and name_of(line) in FAMILIES]
    except Absurd:
        load, lines = LoadSnapshot(taken_at), []
    for line in lines[:MOST_LINES]:
        if len(line) <= MOST_LINE_BYTES:
            name = name_of(line)
            samples.setdefault(name, []).append(read_sample(line[len(name) :]))
    return Page(load, {name: tuple(found) for name, found in samples.items()})


def name_of(line: bytes) -> str:
    return line.partition(b"{")[0].partition(b" ")[0].decode("utf-8", "replace")
