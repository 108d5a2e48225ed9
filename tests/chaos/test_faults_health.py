"""All replicas down, half-broken, busy, flapping (tests 5 to 8; O-04, O-07, O-13)."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path

from tests.chaos.conftest import Figures
from tests.chaos.openloop import Load, Traffic, ask, ends, percentile
from tests.chaos.rig import ScriptedReplica, eventually, span, standing

WARM_UP_SECONDS = 3.0


def share(load: Load, replica: ScriptedReplica, since: float, until: float) -> float:
    """Of the requests sent in this time, the part that the replica answered."""
    sent = [r for r in load.results if since <= r.sent_at < until]
    return sum(r.replica == replica.url for r in sent) / len(sent)


async def test_05_all_down(tmp_path: Path, figures: Figures) -> None:
    """O-07: a fast, clear answer, and service soon after there is any."""
    async with standing(tmp_path) as rig:
        gateway = rig.gateway
        for replica in rig.replicas:
            replica.kill()
        await eventually(lambda: is_unready(gateway), "the gateway is not ready")
        traffic = Traffic(stream_share=0.0)
        answers = [await ask(gateway.url, number, traffic) for number in range(50)]
        slowest = percentile([answer.seconds for answer in answers], 0.99) * 1e3
        clear = all(a.status == 503 and b'"error"' in a.body and int(a.headers["retry-after"]) >= 1 for a in answers)
        live, ready = (await gateway.get("/health")).status_code, (await gateway.get("/ready")).status_code
        figures.record(
            5,
            "all down",
            f"{ends(answers)} with Retry-After, p99 {slowest:.0f} ms; liveness {live}, readiness {ready}",
            "503 error object + Retry-After in <= 100 ms; 200, 503",
            clear and slowest <= 100.0 and (live, ready) == (200, 503),
        )
        assert clear, ends(answers)
        assert slowest <= 100.0
        assert (live, ready) == (200, 503)
        await asyncio.gather(*(replica.start() for replica in rig.replicas))

        async def serves() -> bool:
            return (await gateway.chat()).status_code == 200 and (await gateway.get("/ready")).status_code == 200

        recovery = await eventually(serves, "it serves again")
        figures.record(5, "recovery", f"{recovery:.1f} s", "<= 5 s", recovery <= 5.0)
        assert recovery <= 5.0


async def is_unready(gateway) -> bool:  # type: ignore[no-untyped-def]
    await gateway.chat()
    return (await gateway.get("/ready")).status_code == 503


async def test_05_all_fail_their_probes_but_serve(tmp_path: Path, figures: Figures) -> None:
    """O-07 (c): health opinion alone never empties the pool."""
    async with standing(tmp_path) as rig:
        for replica in rig.replicas:
            await replica.behave(health_status=503)
        await asyncio.sleep(5.0)  # three probes of each have failed
        load = Load(rig.gateway.url)
        await load.run(span(10.0, 5.0))
    good = sum(r.ok for r in load.results) / len(load.results)
    figures.record(5, "all fail their probes but serve", f"{good:.2%} of {len(load.results)}", ">= 99 %", good >= 0.99)
    assert good >= 0.99, ends(load.results)


async def test_06_brown_out(tmp_path: Path, figures: Figures) -> None:
    """Half of one replica's answers are errors, and quick ones at that."""
    async with standing(tmp_path) as rig:
        bad = rig.replicas[0]
        load = Load(rig.gateway.url)
        async with load.running():
            await asyncio.sleep(WARM_UP_SECONDS)
            began = time.monotonic()
            await bad.behave(status=500, fail_share=0.5)
            await asyncio.sleep(span(30.0, 14.0))
            ended = time.monotonic()
    part = share(load, bad, began + 10.0, ended)
    results = [r for r in load.results if r.sent_at >= began]
    errors = sum(not r.ok for r in results) / len(results)
    first = [r for r in results if r.sent_at < began + 10.0]
    figures.record(6, "half of its answers are 500: share from 10 s on", f"{part:.1%}", "<= 10 %", part <= 0.1)
    figures.record(
        6,
        "half of its answers are 500: errors that clients see",
        f"{errors:.2%} ({sum(not r.ok for r in first) / len(first):.2%} in the first 10 s)",
        "<= 2 %",
        errors <= 0.02,
    )
    assert part <= 0.1
    assert errors <= 0.02, ends(results)


async def test_06_one_client_whose_requests_fail_everywhere(tmp_path: Path, figures: Figures) -> None:
    """A quarter of all requests make whoever gets them answer 500: that is no brown-out of anybody."""
    async with standing(tmp_path) as rig:
        for replica in rig.replicas:
            await replica.behave(status=500, fail_word="poison")
        load, states, poisoned = Load(rig.gateway.url), set[str](), Counter[int]()

        async def poison(client: int) -> None:
            while True:
                poisoned[(await rig.gateway.chat(f"poison {client} {poisoned.total()}")).status_code] += 1

        async def watch() -> None:
            while True:
                states.update([await rig.gateway.state(replica) for replica in rig.replicas])
                states.add("ready" if (await rig.gateway.get("/ready")).status_code == 200 else "not ready")
                await asyncio.sleep(0.2)

        async with load.running():
            await asyncio.sleep(WARM_UP_SECONDS)
            tasks = [asyncio.create_task(poison(client)) for client in range(4)]
            tasks.append(asyncio.create_task(watch()))
            await asyncio.sleep(span(30.0, 10.0))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    bad = [r for r in load.results if not r.ok]
    figures.record(
        6,
        "one client's requests fail everywhere",
        f"{poisoned.total()} x 500 to it beside {len(load.results)} requests of others; states "
        f"{', '.join(sorted(states))}; {len(bad)} errors of others",
        "no replica ejected, always ready, 0 errors of others",
        states == {"up", "ready"} and not bad,
    )
    assert poisoned.keys() == {500}
    assert states == {"up", "ready"}
    assert not bad, ends(bad)


async def test_06_one_replica_is_always_busy(tmp_path: Path, figures: Figures) -> None:
    """O-13: 503 is back-pressure: less traffic, no ejection."""
    async with standing(tmp_path) as rig:
        busy, states = rig.replicas[0], set[str]()
        load = Load(rig.gateway.url)

        async def watch() -> None:
            while True:
                states.add(await rig.gateway.state(busy))
                await asyncio.sleep(0.2)

        watching = asyncio.create_task(watch())
        async with load.running():
            await asyncio.sleep(WARM_UP_SECONDS)
            began = time.monotonic()
            await busy.behave(status=503, retry_after=1)
            await asyncio.sleep(span(15.0, 5.0))
            free = time.monotonic()
            await busy.behave(status=200)
            await asyncio.sleep(span(15.0, 13.0))
            ended = time.monotonic()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        while_busy, after = share(load, busy, began + 2.0, free), share(load, busy, free + 10.0, ended)
    figures.record(
        6,
        "always 503: share, states",
        f"{while_busy:.1%} while busy, {after:.1%} from 10 s after; states {', '.join(sorted(states))}",
        "shrinks, never ejected, regains within 10 s",
        while_busy <= 0.2 and after >= 0.25 and states == {"up"},
    )
    assert states == {"up"}
    assert while_busy <= 0.2
    assert after >= 0.15


async def test_07_retry_storm(tmp_path: Path, figures: Figures) -> None:
    """O-04, O-13: everybody is busy; the gateway does not make it worse, and clients hear when to come back."""
    async with standing(tmp_path) as rig:
        for replica in rig.replicas:
            await replica.behave(status=503, retry_after=7)
        load = Load(rig.gateway.url)
        await load.run(span(30.0, 6.0))
        received = sum(len(replica.received()) for replica in rig.replicas)
    ratio = received / len(load.results)
    passed = sum(r.status == 503 and r.headers.get("retry-after") == "7" for r in load.results)
    shed = sum(r.status == 429 and int(r.headers.get("retry-after", "0")) >= 1 for r in load.results)
    everybody = passed + shed == len(load.results)
    figures.record(
        7,
        "all replicas answer 503",
        f"{ratio:.3f} attempts for each request; of {len(load.results)} clients {passed} get the 503 with its "
        f"Retry-After, {shed} the gateway's 429 with one (its waiting room is full)",
        "<= 1.2; statuses and Retry-After reach clients",
        ratio <= 1.2 and everybody,
    )
    assert ratio <= 1.2
    assert everybody, ends(load.results)
    assert passed > 0


async def test_08_flapping(tmp_path: Path, figures: Figures) -> None:
    """Half a second good, half a second with failing probes and lost requests, and so on."""
    async with standing(tmp_path) as rig:
        flapping = rig.replicas[0]
        states: list[str] = []

        async def watch() -> None:
            while True:
                state = await rig.gateway.state(flapping)
                if states[-1:] != [state]:
                    states.append(state)
                await asyncio.sleep(0.05)

        load = Load(rig.gateway.url)
        watching = asyncio.create_task(watch())
        async with load.running():
            await asyncio.sleep(WARM_UP_SECONDS)
            until = time.monotonic() + span(60.0, 14.0)
            bad = False
            while time.monotonic() < until:
                bad = not bad
                await flapping.behave(health_status=503 if bad else 200, drop_before_head=bad)
                await asyncio.sleep(0.5)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        over_budget = (await rig.gateway.metrics()).total("warmlane_replays_refused_total")
    changes = len(states) - 1
    errors = [r for r in load.results if not r.ok]
    figures.record(
        8,
        f"1 Hz for {span(60.0, 14.0):g} s",
        f"{changes} changes of state, {len(errors)} errors of {len(load.results)}",
        "<= 6, 0",
        changes <= 6 and not errors,
    )
    assert changes <= 6, states
    assert len(errors) <= over_budget, ends(errors)
