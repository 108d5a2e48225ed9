"""What telemetry counts in: plain objects with the figures of one label each, and the bounds of the histograms.

Nothing here knows Prometheus: metric families are made of them when the page is read (`gateway.families`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate

from gateway.core.model import Decision

DURATION_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Seconds: from a classification to a long answer of an agent."""
TTFT_BOUNDS = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Seconds: warm and cold prefills of 2k to 30k tokens lie between 20 ms and 1.1 s on one H200; the rest is queueing."""
OVERHEAD_BOUNDS = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05)
"""Seconds: the gateway's own work is a fraction of a millisecond; above a few, its event loop was late."""
WAIT_BOUNDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Seconds: up to the longest that a request may wait."""
INTER_TOKEN_BOUNDS = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
"""Seconds: a calm H200 makes a token of gpt-oss-120b in 5 ms, a full one in 30; people read one in 100."""
DECIDE_BOUNDS = (0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.02)
"""Seconds: a short prompt among four replicas takes some 20 us, 256 KB among 64 a millisecond."""
LAG_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Seconds: timers fire in whole milliseconds; above 20 ms streams are seen to stutter, above a second probes fail."""
REGRET_BOUNDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Seconds: from a tie to the prefill of a long prompt, weighted as policies do."""
ERROR_BOUNDS = (-0.5, -0.2, -0.1, -0.05, -0.02, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Share of the prompt. Within 2 % is the grain of blocks; a tenth and more is a belief that misleads the policy."""


class Histogram:
    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts by upper bound, as the text format wants them."""
        names = [*(repr(bound) for bound in self.bounds), "+Inf"]
        return [(name, float(count)) for name, count in zip(names, accumulate(self.counts), strict=True)]


class ModelSeries:
    """The series of one model label."""

    __slots__ = ("completion_tokens", "inter_token", "label", "other_seconds", "prompt_tokens", "seconds", "ttft")

    def __init__(self, label: str) -> None:
        self.label = label
        self.seconds = Histogram(DURATION_BOUNDS)
        """Of completed requests, and `other_seconds` of all others."""
        self.other_seconds = Histogram(DURATION_BOUNDS)
        self.ttft = Histogram(TTFT_BOUNDS)
        self.inter_token = Histogram(INTER_TOKEN_BOUNDS)
        self.prompt_tokens = 0
        self.completion_tokens = 0

    @property
    def is_used(self) -> bool:
        return any(self.seconds.counts) or any(self.other_seconds.counts)


class ShadowSeries:
    """The series of one shadow policy (`gateway.shadow`)."""

    __slots__ = ("cached_live", "cached_shadow", "failures", "other", "policy", "regret", "same")

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.same = self.other = self.failures = 0
        self.cached_live = self.cached_shadow = 0
        self.regret = Histogram(REGRET_BOUNDS)

    def agreed(self, live: Decision) -> None:
        self.same += 1
        self.cached_live += live.cached_tokens
        self.cached_shadow += live.cached_tokens

    def differed(self, live: Decision, shadow: Decision, regret_seconds: float) -> None:
        self.other += 1
        self.regret.observe(regret_seconds)
        self.cached_live += live.cached_tokens
        self.cached_shadow += shadow.cached_tokens

    def failed(self) -> None:
        self.failures += 1


class CachedTokens:
    """What was predicted and what was reported, of one replica, over the same requests."""

    __slots__ = ("predicted", "reported")

    def __init__(self) -> None:
        self.predicted = self.reported = 0


class AnnouncementSeries:
    """Replicas that announce themselves (`gateway.feeds.announced`)."""

    __slots__ = ("failing", "refused")

    def __init__(self, refusals: Iterable[str]) -> None:
        self.failing = False
        self.refused: dict[tuple[str], int] = {(reason,): 0 for reason in refusals}


class PeerSeries:
    """What is shared with other gateways (`gateway.feeds.peers`)."""

    __slots__ = ("connected", "failures", "heard", "received", "refused", "sent")

    def __init__(self, refusals: Iterable[str]) -> None:
        self.connected = False
        self.sent = self.received = 0
        """Entries."""
        self.failures = 0
        """Rounds."""
        self.refused: dict[tuple[str], int] = {(reason,): 0 for reason in refusals}
        self.heard: dict[str, float] = {}
        """When each of the others reported last."""

    def forget_before(self, at: float) -> None:
        self.heard = {peer: last for peer, last in self.heard.items() if last >= at}
