"""Rules about a gateway: what it holds of its replicas, what waits in it for them, and what replicas do past it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gateway.doctor import page as pages
from gateway.doctor.findings import Symptom, counted
from gateway.doctor.replica_rules import backlog, is_backlog, is_full, percent, queued, seconds
from gateway.doctor.window import Gateway, Replica, Trend, Window, trend
from gateway.proxy.endpoints import ENDPOINTS

STALE_SECONDS = 5.0
"""A failing page is asked again at least so often (`feeds.scrape`); a younger snapshot is just between two scrapes."""
OTHERS_REQUESTS, OTHERS_SHARE = 3.0, 0.1
"""Requests that two pages, read one after the other, may disagree by."""
LEAST_PREDICTED = 5_000.0
"""Tokens, in the window."""
WRONG_SHARE = 0.3
"""Of the predicted tokens. Evictions that the gateway has not noticed yet cost a few per cent."""
LEAST_ANSWERS = 5.0

UNDRAIN = "warmlane undrain, for one that is well"

INFERENCE = frozenset(endpoint.path for endpoint in ENDPOINTS.values()) - {"/tokenize", "/detokenize"}
"""What clients ask engines for. The gateway itself asks /tokenize."""


def unlisted_replicas(window: Window) -> Iterator[Symptom]:
    for gateway in window.gateways:
        if gateway.fleet is None and gateway.seen:
            yield Symptom(gateway.url, f"/warmlane/replicas: {gateway.fleet_problem}")


def no_replica(window: Window) -> Iterator[Symptom]:
    """For the whole gateway, or for some of its models."""
    for gateway in window.gateways:
        if gateway.last is None:
            continue
        standings = gateway.standings
        if "up" not in standings.values():
            said = "".join(f"; {one} is {standing}" for one, standing in standings.items())
            evidence = f"/ready: {gateway.ready_problem or 'HTTP 200'}; {counted(len(standings), 'replica')}{said}"
            figures = {"replicas": float(len(standings))}
            yield Symptom(gateway.url, evidence, figures, back_in(standings))
            continue
        for replicas, models in left_alone(window, gateway).items():
            theirs = {one: standings.get(one, "gone") for one in replicas}
            said = "; ".join(f"{one} is {standing}" for one, standing in theirs.items())
            yield Symptom(f"{', '.join(models)} at {gateway.url}", f"no replica: {said}", change=back_in(theirs))


def left_alone(window: Window, gateway: Gateway) -> dict[tuple[str, ...], list[str]]:
    """Models of which no replica gets new requests, by their replicas."""
    if gateway.fleet is not None:
        listed = {one.replica: one.models for one in gateway.fleet.replicas}
    else:
        listed = {one.url: list(one.base_models) for one in window.replicas if one.url in gateway.replicas}
    standings, found = gateway.standings, dict[tuple[str, ...], list[str]]()
    for model in dict.fromkeys(name for names in listed.values() for name in names):
        replicas = tuple(one for one, names in listed.items() if model in names)
        if not any(standings.get(one) == "up" for one in replicas):
            found.setdefault(replicas, []).append(model)
    return found


def back_in(standings: Mapping[str, str]) -> str:
    """How a fleet comes to a replica; empty where the rule's own text says it."""
    if not standings:
        return "it has no replica: name some in its configuration, with --replica, or register them"
    return UNDRAIN if any(standing.endswith("drained") for standing in standings.values()) else ""


def given_up_workers(window: Window) -> Iterator[Symptom]:
    for gateway in window.gateways:
        page = gateway.last
        gone = page.total(pages.WORKERS, state="given up") if page is not None else None
        if page is not None and gone:
            evidence = f"it gave up {gone:.0f} of the {page.total(pages.WORKERS) or gone:.0f} replicas that it runs"
            yield Symptom(gateway.url, evidence, {"given_up": gone})


def ejected(window: Window) -> Iterator[Symptom]:
    for gateway in window.gateways:
        failures = {one.replica: one.last_failure for one in gateway.fleet.replicas} if gateway.fleet else {}
        for replica in gateway.replicas:
            state = gateway.state(replica)
            if state in ("ejected", "unknown"):
                last = failures.get(replica) or "no reason known here"
                yield Symptom(replica, f"{gateway.url} has it as {state}: {last}")


def draining(window: Window) -> Iterator[Symptom]:
    for gateway in window.gateways:
        for replica in gateway.replicas:
            if gateway.value(pages.DRAINING, replica) == 1:
                yield Symptom(replica, f"{gateway.url} gives it no new requests")


def stale_load(window: Window) -> Iterator[Symptom]:
    for gateway in window.gateways:
        for replica in gateway.replicas:
            age = gateway.value(pages.LOAD_AGE, replica)
            if gateway.state(replica) == "up" and age is not None and age > STALE_SECONDS:
                evidence = f"{gateway.url} last read its load {seconds(age)} ago"
                yield Symptom(replica, evidence, {"load_age_seconds": age})


def registrations_out(window: Window) -> Iterator[Symptom]:
    for gateway in window.gateways:
        if (fleet := gateway.fleet) is None:
            continue
        for one in fleet.registrations:
            problems = [one.problem, *(f"{at.replica}: {at.problem}" for at in fleet.out(one))]
            if said := "; ".join(problem for problem in problems if problem):
                yield Symptom(one.url, f"registered at {gateway.url} and out: {said}")


def backlog_of(gateway: Gateway) -> Trend | None:
    waiting = gateway.gauge(pages.WAITING)
    queue = trend(waiting)
    return queue if queue is not None and is_backlog(queue, waiting, gateway.gauge(pages.IN_FLIGHT)) else None


def memory_bound(window: Window) -> Iterator[Symptom]:
    """A full cache, and requests that wait for it: in the engine, or in a gateway that holds them back."""
    for replica in filter(is_full, window.replicas):
        found = backlog(replica)
        if found is not None:
            yield queued(replica, found)
            continue
        queues = [(one, backlog_of(one)) for one in window.gateways if replica.url in one.replicas]
        for gateway, queue in queues:
            if queue is not None and replica.kv_usage is not None:
                evidence = f"KV cache {percent(replica.kv_usage)} full (median), waiting in {gateway.url} "
                evidence += f"{queue.first:.0f} -> {queue.last:.0f} requests in {seconds(gateway.seconds)}"
                figures = {"waiting_first": queue.first, "waiting_last": queue.last, "kv_usage": replica.kv_usage}
                yield Symptom(replica.url, evidence, figures)
                break


def kv_pressure(window: Window) -> Iterator[Symptom]:
    """A full cache for which nobody waits yet."""
    waited_for = {one.subject for one in memory_bound(window)}
    for replica in filter(is_full, window.replicas):
        if replica.url not in waited_for and replica.kv_usage is not None:
            looks = len(replica.seen)
            evidence = f"KV cache {percent(replica.kv_usage)} full (median of {looks} looks), no growing queue"
            yield Symptom(replica.url, evidence, {"kv_usage": replica.kv_usage})


def gateway_queue_grows(window: Window) -> Iterator[Symptom]:
    for gateway in window.gateways:
        queue = backlog_of(gateway)
        if queue is None:
            continue
        figures = {"waiting_first": queue.first, "waiting_last": queue.last, "seconds": gateway.seconds}
        evidence = (
            f"waiting in the gateway {queue.first:.0f} -> {queue.last:.0f} requests in {seconds(gateway.seconds)}"
        )
        yield Symptom(gateway.url, evidence + behind(window, gateway), figures)


def sheds(window: Window) -> Iterator[Symptom]:
    for gateway in window.gateways:
        shed = gateway.increase(pages.SHED)
        if shed:
            evidence = f"{shed:.0f} requests refused with 429 in {seconds(gateway.seconds)}"
            yield Symptom(gateway.url, evidence + behind(window, gateway), {"shed": shed, "seconds": gateway.seconds})


def behind(window: Window, gateway: Gateway) -> str:
    """Whether memory is what its replicas lack."""
    full = [one.url for one in window.replicas if one.url in gateway.replicas and is_full(one)]
    return f"; KV cache full at {', '.join(full)}" if full else ""


def bypassed(window: Window) -> Iterator[Symptom]:
    """Requests that ended at a replica within the window, beside those that the gateways had there."""
    for replica in window.replicas:
        gateways = [one for one in window.gateways if replica.url in one.replicas]
        ended = requests_of(replica)
        counts = [one.increase(pages.ATTEMPTS, replica=replica.url) for one in gateways if len(one.seen) > 1]
        if ended is None or not gateways or len(counts) < len(gateways):
            continue
        ours = sum(count or 0.0 for count in counts)  # no series yet: it got nothing
        between = sum(max(one.gauge(pages.IN_FLIGHT, replica=replica.url), default=0.0) for one in gateways)
        others = ended - ours
        if others > OTHERS_REQUESTS + OTHERS_SHARE * ours + between:
            evidence = f"{ended:.0f} requests ended there in {seconds(replica.seconds)}, {ours:.0f} of them through "
            evidence += " and ".join(one.url for one in gateways)
            yield Symptom(replica.url, evidence, {"requests": ended, "through_gateways": ours})


def requests_of(replica: Replica) -> float | None:
    """By its HTTP server, since one request may be several for the engine; where that does not count, by the engine."""
    pages_ = [page for _, page in replica.seen]
    if not any(page.of(pages.HTTP_REQUESTS) for page in pages_):
        return replica.increase(pages.FINISHED)
    counted = [replica.increase(pages.HTTP_REQUESTS, handler=path, method="POST") for path in INFERENCE]
    return sum(count for count in counted if count is not None)


def no_cached_tokens(window: Window) -> Iterator[Symptom]:
    """Usage comes, but not one answer of this replica said how much of its prompt was cached."""
    for gateway in window.gateways:
        page = gateway.last
        if page is None or not page.total(pages.REPORTED_PROMPT_TOKENS):
            continue
        for replica in gateway.replicas:
            answers = page.total(pages.ATTEMPTS, replica=replica, result="completed") or 0.0
            if answers >= LEAST_ANSWERS and not page.of(pages.CACHED, replica=replica):
                evidence = f"{answers:.0f} answers through {gateway.url}, none with cached_tokens in its usage"
                yield Symptom(replica, evidence, {"answers": answers})


def wrong_predictions(window: Window) -> Iterator[Symptom]:
    for gateway in window.gateways:
        for replica in gateway.replicas:
            predicted = gateway.increase(pages.CACHED, replica=replica, kind="predicted")
            reported = gateway.increase(pages.CACHED, replica=replica, kind="reported")
            if predicted is None or reported is None or predicted < LEAST_PREDICTED:
                continue
            if predicted - reported > WRONG_SHARE * predicted:
                evidence = (
                    f"{gateway.url} predicted {predicted:.0f} cached tokens in {seconds(gateway.seconds)}, "
                    f"{reported:.0f} were"
                )
                yield Symptom(replica, evidence, {"predicted_tokens": predicted, "reported_tokens": reported})
