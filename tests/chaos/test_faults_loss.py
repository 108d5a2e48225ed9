"""A replica is killed, frozen, and comes back, under load (tests 1 to 4; O-03, O-05, O-07, O-09)."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.chaos.conftest import Figures
from tests.chaos.openloop import Load, Result, ends, percentile
from tests.chaos.rig import Rig, span, standing

WARM_UP_SECONDS = 3.0
FAIR_WINDOW_SECONDS = 2.0
"""134 requests of a fair third: one standard deviation is a twelfth of that."""


def attempts(rig: Rig) -> Counter[str]:
    """How many replicas got each request, by its id."""
    return Counter(one.request_id for replica in rig.replicas for one in replica.received())


def split_at(results: Iterable[Result], moment: float) -> tuple[list[Result], list[Result]]:
    """Those whose answer had begun at that moment, and those without a byte of one or sent later.

    An answer that broke off had begun, even where its client, on a busy machine, saw the head later.
    """
    begun, rest = list[Result](), list[Result]()
    for result in results:
        broke = result.sent_at < moment and result.status == 200 and not result.ok
        saw_head = result.head_at is not None and result.head_at < moment
        (begun if broke or saw_head else rest).append(result)
    return begun, rest


async def test_01_02_kill_one_of_three(tmp_path: Path, figures: Figures) -> None:
    """O-03, O-05: nothing that could be saved is lost, nothing that broke looks whole, nothing runs thrice."""
    async with standing(tmp_path) as rig:
        victim = rig.replicas[0]
        load = Load(rig.gateway.url)
        async with load.running():
            await asyncio.sleep(WARM_UP_SECONDS)
            killed_at = time.monotonic()
            victim.kill()
            ejected = await rig.gateway.wait_state(victim, "ejected", 10.0)
            await asyncio.sleep(span(12.0, 7.0))
            ended_at = time.monotonic()
        sent = attempts(rig)
        page = await rig.gateway.metrics()
    begun, saved = split_at(load.results, killed_at)
    errors = [r for r in saved if not r.ok]
    most = max(sent.values())
    replays = page.total("warmlane_replays_total", cause="lost")
    figures.record(
        1,
        "requests without a byte of an answer",
        f"{len(errors)} errors of {len(saved)}, {replays:.0f} replayed, none more than {most - 1} times",
        "0 errors, each replayed once at most",
        not errors and most <= 2,
    )
    figures.record(1, "ejected", f"{ejected:.2f} s", "< 1 s", ejected < 1.0)
    window = [r for r in load.results if killed_at + 5.0 <= r.sent_at < ended_at]
    share = sum(r.ok for r in window) / len(window)
    figures.record(1, "throughput from 5 s on", f"{share:.1%} of what is offered", ">= 98 %", share >= 0.98)
    assert not errors, ends(errors)
    assert most <= 2
    assert ejected < 1.0
    assert share >= 0.98

    broken = [r for r in begun if r.stream and r.replica == victim.url and r.ended_at > killed_at]
    explicit = [r for r in broken if r.end in ("error event", "cut") and not r.done and not r.finished]
    slowest = max(r.ended_at - killed_at for r in broken)
    again = [r for r in broken if sent[f"load-{r.number}"] > 1]
    figures.record(
        2,
        "streams on the killed replica",
        f"{len(explicit)} of {len(broken)} end explicitly, the last after {slowest:.2f} s; "
        f"{sum(r.done or r.finished for r in broken)} look whole; {len(again)} sent again",
        "all within 1 s, 0 fake ends, 0 replays",
        len(explicit) == len(broken) and slowest <= 1.0 and not again,
    )
    assert broken
    assert len(explicit) == len(broken), ends(broken)
    assert not again
    assert slowest <= 1.0


async def test_03_freeze_one_of_three(tmp_path: Path, figures: Figures) -> None:
    """O-07: what hangs, hangs alone, and ends at its limit."""
    limit = 5.0
    config = {"upstream": {"first_byte_timeout_seconds": limit, "idle_timeout_seconds": limit}}
    async with standing(tmp_path, config=config) as rig:
        victim = rig.replicas[0]
        load = Load(rig.gateway.url)
        async with load.running():
            await asyncio.sleep(WARM_UP_SECONDS)
            frozen_at = time.monotonic()
            victim.freeze()
            ejected = await rig.gateway.wait_state(victim, "ejected", 15.0)
            await asyncio.sleep(max(1.0, frozen_at + limit + 2.0 - time.monotonic()))
        victim.thaw()
        sent = attempts(rig)
    figures.record(3, "ejected", f"{ejected:.1f} s", "<= 6 s", ejected <= 6.0)

    def heads(results: Sequence[Result]) -> list[float]:
        return [r.head_at - r.sent_at for r in results if r.ok and r.head_at is not None and r.replica != victim.url]

    before = heads([r for r in load.results if r.sent_at < frozen_at - 0.5])
    during = heads([r for r in load.results if frozen_at <= r.sent_at])
    added = (percentile(during, 0.99) - percentile(before, 0.99)) * 1e3
    figures.record(
        3,
        "others' added time to the answer's head",
        f"p50 {(percentile(during, 0.5) - percentile(before, 0.5)) * 1e3:+.1f} ms, p99 {added:+.1f} ms",
        "p99 <= 5 ms",
        added <= 5.0,
    )
    stuck = [r for r in load.results if not r.ok]
    waiting = [r for r in stuck if r.status != 200]
    replays = [r for r in stuck if sent[f"load-{r.number}"] > 1]
    longest = max((r.seconds for r in waiting), default=0.0)
    figures.record(
        3,
        "stuck requests",
        f"{ends(stuck)}; without an answer at most {longest:.2f} s; {len(replays)} replays",
        f"504 at the first-byte limit ({limit:g} s), 0 replays",
        {r.status for r in waiting} <= {504} and not replays and longest <= limit + 1.0,
    )
    assert ejected <= 6.0
    assert {r.status for r in waiting} <= {504}, ends(stuck)
    assert {r.end for r in stuck if r.status == 200} <= {"error event", "cut"}
    assert not replays
    assert longest <= limit + 1.0


async def test_04_return_of_a_replica(tmp_path: Path, figures: Figures) -> None:
    """O-09: it is back soon, known to be cold, and not flooded."""
    async with standing(tmp_path) as rig:
        victim = rig.replicas[0]
        load = Load(rig.gateway.url)
        async with load.running():
            await asyncio.sleep(WARM_UP_SECONDS)
            victim.kill()
            await rig.gateway.wait_state(victim, "ejected", 10.0)
            await asyncio.sleep(span(20.0, 4.0))
            before = len(victim.received())
            await victim.start()
            healthy_at = time.monotonic()
            await asyncio.sleep(span(17.0, 12.5))
        new = victim.received()[before:]
    first_at = new[0].at
    back = first_at - healthy_at
    figures.record(4, "traffic again", f"{back:.1f} s after healthy", "<= 5 s", back <= 5.0)
    by_id = {f"load-{r.number}": r for r in load.results}
    cached = int(by_id[new[0].request_id].headers["x-warmlane-cached-tokens"])
    figures.record(4, "believed to be cached there", f"{cached} tokens", "0", cached == 0)
    fair = load.traffic.rate / len(rig.replicas)
    shares = [
        sum(start <= one.at - first_at < start + FAIR_WINDOW_SECONDS for one in new) / FAIR_WINDOW_SECONDS / fair
        for start in range(int(10.0 - FAIR_WINDOW_SECONDS) + 1)
    ]
    whole = sum(one.at - first_at < 10.0 for one in new) / 10.0 / fair
    figures.record(
        4,
        "share in its first 10 s",
        f"{whole:.2f} of fair, at most {max(shares):.2f} over {FAIR_WINDOW_SECONDS:g} s",
        "never above 1.2 of fair",
        max(shares) <= 1.2,
    )
    assert back <= 5.0
    assert cached == 0
    assert whole <= 1.2
    assert all(r.ok for r in load.results if r.sent_at > healthy_at), ends(load.results)
