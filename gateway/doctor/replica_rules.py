"""Rules about one replica: whether it answers, whether it works, and what its engine lacks.

Each is a small pure function from a replica's looks to what it saw, if anything; `rules.RULES` says what it means.
"""

from __future__ import annotations

from typing import NamedTuple

from gateway.doctor import page as pages
from gateway.doctor.causes import remedy
from gateway.doctor.findings import Symptom
from gateway.doctor.page import Page
from gateway.doctor.window import Gateway, Replica, Server, Trend, trend
from gateway.feeds.dialects import DIALECTS
from workers.planner.models import bundled, load
from workers.presets.versions import VersionError, behaviour_of, parse_version

FULL = 0.85
"""Share of the KV cache from which memory is what is short; the gateway's own policy counts pressure from here."""
GROWTH_REQUESTS, GROWTH_SHARE = 2.0, 0.2
"""A queue grows if it gained this many requests and this share: less is the coming and going of a steady one."""
LONG_QUEUE = 4.0
"""Requests that wait all the time, more than run: a queue that need not grow to be felt."""
SLOW_TOKEN_SECONDS = 0.1
"""Ten tokens a second: slower than many read."""
LOW_TOKENS_PER_SECOND = 100.0
"""For all streams of a replica together. A GPU that does more has slow streams because it has many."""
LEAST_TOKENS = 20.0
"""Fewer tokens have no mean worth saying."""
STUCK_SECONDS = 5.0
"""No step of any engine takes as long."""
USEFUL_HIT_RATE = 0.1
"""Below, there was little to collapse."""
COLLAPSED_SHARE = 0.5
LEAST_LOOKED_UP = 5_000.0
"""Prompt tokens: less may just be a few new conversations."""


def percent(share: float) -> str:
    return f"{share:.0%}"


def seconds(number: float) -> str:
    return f"{number:.1f} s"


# -- does it answer


def unreachable(server: Server) -> Symptom | None:
    if server.seen or (isinstance(server, Replica) and (not server.health_problem or server.up_for)):
        return None
    if not server.looks:  # an engine without metrics
        problem = server.health_problem if isinstance(server, Replica) else ""
        return Symptom(server.url, f"its health: {problem}", change=remedy(server, problem)) if problem else None
    problem = server.looks[-1].problem
    evidence = f"none of {len(server.looks)} looks was answered: {problem}"
    return Symptom(server.url, evidence, change=remedy(server, problem))


def out_of_sight(replica: Replica) -> Symptom | None:
    if replica.seen or not replica.up_for or not replica.health_problem:
        return None
    return Symptom(replica.url, f"{replica.up_for} reports it up; from here: {replica.health_problem}")


def no_metrics(replica: Replica) -> Symptom | None:
    if replica.seen or replica.health_problem or not replica.looks:
        return None
    how = DIALECTS[replica.engine].without_metrics if replica.engine in DIALECTS else ""
    return Symptom(replica.url, f"it answers, its metrics do not: {replica.looks[-1].problem}", change=how)


def stale_metrics(server: Server) -> Symptom | None:
    failed = [look for look in server.looks if look.page is None]
    if not failed or not server.seen or server.is_gone:
        return None
    figures = {"failed_looks": len(failed), "looks": len(server.looks)}
    evidence = f"{len(failed)} of {len(server.looks)} looks at /metrics failed: {failed[-1].problem}"
    return Symptom(server.url, evidence, figures)


def died(server: Server) -> Symptom | None:
    """Gone within the window, or another process than at its beginning."""
    if not server.seen:
        return None
    own = "read its last log lines" if isinstance(server, Gateway) else ""
    if server.is_gone:
        at = server.seen[-1][0]
        evidence = f"answered until {seconds(at)}, then: {server.looks[-1].problem}{state_of(server, server.last)}"
        return Symptom(server.url, evidence, {"answered_until_seconds": at}, own)
    started = [page for _, page in server.seen if page.load.started_at is not None]
    starts = dict.fromkeys(page.load.started_at for page in started)
    if len(starts) < 2:
        return None
    before = [page for page in started if page.load.started_at == next(iter(starts))][-1]
    evidence = f"its process began again within {seconds(server.seconds)}{state_of(server, before)}"
    return Symptom(server.url, evidence, {"restarts": len(starts) - 1}, own)


def state_of(server: Server, page: Page | None) -> str:
    """Of a replica: what may have been too much."""
    load = page.load if page is not None and isinstance(server, Replica) else None
    if load is None or load.running is None or load.kv_usage is None:
        return ""
    return f"; before: {load.running} running, {load.waiting} waiting, KV cache {percent(load.kv_usage)} full"


def hidden_models(replica: Replica) -> Symptom | None:
    if not replica.seen or replica.models is not None:
        return None
    return Symptom(replica.url, f"/v1/models is not readable: {replica.models_problem}")


def not_vllm(replica: Replica) -> Symptom | None:
    if replica.engine == "vllm" or not (replica.seen or not replica.health_problem):
        return None
    return Symptom(replica.url, f"it runs {replica.engine or 'no engine known here'}")


# -- does its engine work


def asleep(replica: Replica) -> Symptom | None:
    if not replica.asleep:
        return None
    return Symptom(replica.url, 'vllm:engine_sleep_state{sleep_state="awake"} is 0, while /health answers')


def paused(replica: Replica) -> Symptom | None:
    if replica.paused is not True or replica.asleep:
        return None
    return Symptom(replica.url, "/is_paused says true, while /health answers")


def stuck(replica: Replica) -> Symptom | None:
    running, steps = replica.running, replica.increase(pages.STEPS)
    if steps != 0 or not running or min(running) < 1 or replica.seconds < STUCK_SECONDS:
        return None
    evidence = f"{running[-1]:.0f} requests running, no engine step in {seconds(replica.seconds)}"
    return Symptom(replica.url, evidence, {"running": running[-1], "seconds": replica.seconds})


def engine_errors(replica: Replica) -> Symptom | None:
    errors = replica.increase(pages.FINISHED, finished_reason="error")
    if not errors:
        return None
    evidence = f"{errors:.0f} requests ended with an error of the engine in {seconds(replica.seconds)}"
    return Symptom(replica.url, evidence, {"errors": errors, "seconds": replica.seconds})


# -- is something short


def is_backlog(queue: Trend, waiting: list[float], running: list[float]) -> bool:
    """Requests that wait get more, or they are more than those that run, all the time and not just for a burst."""
    lasts = bool(running) and min(waiting) >= LONG_QUEUE and min(waiting) > max(running)
    return queue.grows(GROWTH_REQUESTS, GROWTH_SHARE) or (lasts and queue.last >= (1 - GROWTH_SHARE) * queue.first)


class Backlog(NamedTuple):
    waiting: Trend
    running: Trend


def backlog(replica: Replica) -> Backlog | None:
    """Requests that wait in the engine."""
    queue, running = trend(replica.waiting), trend(replica.running)
    if queue is None or running is None:
        return None
    return Backlog(queue, running) if is_backlog(queue, replica.waiting, replica.running) else None


def is_full(replica: Replica) -> bool:
    """Most of the time, not for a moment."""
    return replica.kv_usage is not None and replica.kv_usage > FULL and len(replica.seen) > 1


def queued(replica: Replica, found: Backlog) -> Symptom:
    waiting, usage = found.waiting, replica.kv_usage
    figures = {
        "waiting_first": waiting.first,
        "waiting_last": waiting.last,
        "running": found.running.last,
        "seconds": replica.seconds,
    }
    evidence = f"waiting {waiting.first:.0f} -> {waiting.last:.0f} requests in {seconds(replica.seconds)}"
    evidence += f", {found.running.last:.0f} running"
    if usage is not None:
        figures["kv_usage"] = usage
        evidence += f", KV cache {percent(usage)} full (median)"
    return Symptom(replica.url, evidence, figures)


def queue_grows(replica: Replica) -> Symptom | None:
    found = backlog(replica)
    return queued(replica, found) if found is not None and not is_full(replica) else None


def preemptions(replica: Replica) -> Symptom | None:
    count, rate = replica.increase(pages.PREEMPTIONS), replica.rate(pages.PREEMPTIONS)
    if not count or rate is None:
        return None
    evidence = f"{count:.0f} preemptions in {seconds(replica.seconds)}, {rate:.1f} a second"
    return Symptom(replica.url, evidence, {"preemptions": count, "preemptions_per_second": rate})


def rejections(replica: Replica) -> Symptom | None:
    count = replica.increase(pages.REJECTIONS)
    if not count:
        return None
    evidence = f"{count:.0f} requests refused for a limit of its queue in {seconds(replica.seconds)}"
    return Symptom(replica.url, evidence, {"rejections": count, "seconds": replica.seconds})


def slow_tokens(replica: Replica) -> Symptom | None:
    gaps, spent = replica.increase(pages.TOKEN_GAPS), replica.increase(pages.TOKEN_GAP_SECONDS)
    rate = replica.rate(pages.GENERATION_TOKENS)
    if not gaps or spent is None or rate is None or gaps < LEAST_TOKENS or is_full(replica):
        return None
    gap = spent / gaps
    if gap <= SLOW_TOKEN_SECONDS or rate >= LOW_TOKENS_PER_SECOND:
        return None
    evidence = f"{1000 * gap:.0f} ms between tokens (mean of {gaps:.0f}), {rate:.0f} tokens/s in all"
    return Symptom(replica.url, evidence, {"token_gap_seconds": gap, "tokens_per_second": rate})


# -- does its cache do what routing needs


def prefix_cache_off(replica: Replica) -> Symptom | None:
    if replica.config("enable_prefix_caching") != "False":
        return None
    return Symptom(replica.url, 'vllm:cache_config_info says enable_prefix_caching="False"')


def kv_events_off(replica: Replica) -> Symptom | None:
    if replica.kv_events is not False:
        return None
    return Symptom(replica.url, "/kv_event_sources names none that is enabled")


def hit_rate_collapsed(replica: Replica) -> Symptom | None:
    now, looked_up, first = replica.hit_rate, replica.queries, replica.first
    if now is None or looked_up is None or first is None or looked_up < LEAST_LOOKED_UP:
        return None
    queries, hits = first.load.prefix_queries, first.load.prefix_hits
    if queries is None or hits is None or queries < LEAST_LOOKED_UP:
        return None
    before = hits / queries
    if before < USEFUL_HIT_RATE or now >= COLLAPSED_SHARE * before:
        return None
    evidence = (
        f"{percent(now)} of {looked_up:.0f} prompt tokens found in the prefix cache in {seconds(replica.seconds)}, "
        f"{percent(before)} of {queries} before"
    )
    return Symptom(replica.url, evidence, {"hit_rate": now, "hit_rate_before": before, "prompt_tokens": looked_up})


def weak_hybrid_cache(replica: Replica) -> Symptom | None:
    hybrid = [card.root or name for name, card in replica.base_models.items() if is_hybrid(card.root, name)]
    try:
        version = parse_version(replica.version or "")
    except VersionError:
        return None
    behaviour = behaviour_of(version)
    if not hybrid or behaviour.drops_windows:
        return None
    evidence = f"vLLM {version} with {hybrid[0]}, a model with layers of different attention"
    how = ""
    if behaviour.reads_retention_variable:
        how = (
            "start it with VLLM_PREFIX_CACHE_RETENTION_INTERVAL=0 (whether it was does not show), or take 0.29 or newer"
        )
    return Symptom(replica.url, evidence, change=how)


def is_hybrid(*names: str | None) -> bool:
    """By the last part of a name or path: what a replica says is never opened as a file."""
    known = bundled()
    last = {name.rsplit("/", 1)[-1].lower() for name in names if name is not None}
    return any(load(name).is_hybrid for name in known if name in last)
