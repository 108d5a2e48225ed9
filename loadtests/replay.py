"""`warmlane replay`: from the words of the command line to a report on stdout, with progress on stderr."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import isfinite
from typing import NoReturn

from gateway.core.settings import POLICY_NAMES
from loadtests import plot, report, traces
from loadtests.options import Options
from loadtests.simulator import Fleet, GatewayRestart, Restart, Sharing

RECORDED, NEVER = "recorded", "never"
BLIND_POLICY = "least-work"
"""Always in the report: what knowledge of caches is worth shows beside it."""
RESTART = re.compile(r"(?P<place>\d+)@(?P<at>[\d.]+)(\+(?P<down>[\d.]+))?")


class Refused(Exception):
    """The request makes no sense; one line says why."""


def say(message: str) -> None:
    print(f"warmlane: {message}", file=sys.stderr, flush=True)


def refuse(option: str, reason: str) -> NoReturn:
    raise Refused(f"--{option}: {reason}")


# ---- words -> values -----------------------------------------------------------------------------------------------


def plans_of(options: Options) -> list[report.Plan]:
    """One for each load. Raises `Refused`."""
    loads = loads_of(options.load or [RECORDED if options.closed_loop else "1.0"])
    positive("speed", options.speed)
    if options.speed != 1.0 and any(load is not None for load in loads):
        raise Refused(f"--speed multiplies the trace's own rate: add --load {RECORDED}")
    fleet, policies = fleet_of(options), policies_of(options.policy or POLICY_NAMES)
    return [
        report.Plan(
            fleet=fleet,
            load=load,
            speed=options.speed,
            policies=policies,
            seeds=options.seeds,
            sheds=not options.never_shed,
            hold=options.hold,
            limit=options.limit,
            closed_loop=options.closed_loop,
        )
        for load in loads
    ]


def policies_of(names: Sequence[str]) -> tuple[str, ...]:
    for name in names:
        if name not in POLICY_NAMES:
            refuse("policy", f"unknown policy {name!r}; one of {', '.join(POLICY_NAMES)}")
    return tuple(dict.fromkeys([*names, BLIND_POLICY]))


def loads_of(texts: Sequence[str]) -> list[float | None]:
    loads: list[float | None] = []
    for text in ",".join(texts).split(","):
        load = None if text == RECORDED else number(text)
        if load is not None and not (load > 0 and isfinite(load)):
            refuse("load", f"a number above 0 or `{RECORDED}`, not {text!r}")
        loads.append(load)
    return list(dict.fromkeys(loads))


def fleet_of(options: Options) -> Fleet:
    if options.shared_state and options.gateways == 1:
        refuse("shared-state", "is for several --gateways")
    sharing, gateway_restarts = sharing_of(options), gateway_restarts_of(options)
    return Fleet(
        replicas=options.replicas,
        cache_tokens=options.cache_tokens,
        prefill_rate=positive("prefill-rate", options.prefill_rate),
        attention_tokens=options.attention_tokens,
        decode_rate=positive("decode-rate", options.decode_rate),
        max_num_seqs=options.max_num_seqs,
        speeds=speeds_of(options.speeds, options.replicas),
        network_delay_seconds=not_negative("network-delay-ms", options.network_delay_ms) / 1000,
        scrape_seconds=scrape_of(options.scrape_interval),
        restart=None if options.restart is None else restart_of(options.restart, options.replicas),
        gateways=options.gateways,
        shared_state=options.shared_state,
        sharing=sharing,
        gateway_restarts=gateway_restarts,
        decode_slowdown=not_negative("decode-slowdown", options.decode_slowdown),
        step_tokens=options.step_tokens,
        preempts=options.preempts,
        cache_answers=options.cache_answers,
        shared_processor=options.shared_processor,
    )


def speeds_of(text: str | None, replicas: int) -> tuple[float, ...]:
    if text is None:
        return ()
    speeds = tuple(positive("speeds", number(one)) for one in text.split(","))
    if len(speeds) > replicas:
        refuse("speeds", f"{len(speeds)} speeds for {replicas} replicas")
    return speeds


def sharing_of(options: Options) -> Sharing | None:
    if not options.shared_view:
        for option, value in (("view-delay", options.view_delay), ("view-loss", options.view_loss)):
            if value:
                refuse(option, "is for --shared-view")
        return None
    if options.gateways == 1:
        refuse("shared-view", "is for several --gateways")
    if options.shared_state:
        refuse("shared-view", "with --shared-state they know everything already")
    if not 0 <= options.view_loss <= 1:
        refuse("view-loss", "a share from 0 to 1")
    return Sharing(not_negative("view-delay", options.view_delay), options.view_loss)


def gateway_restarts_of(options: Options) -> tuple[GatewayRestart, ...]:
    if options.gateway_restart is None:
        return ()
    if options.shared_state:
        refuse("gateway-restart", "with --shared-state nothing is forgotten")
    texts, count = options.gateway_restart.split(","), options.gateways
    return tuple(GatewayRestart(*times_of("gateway-restart", "gateway", text, count, 2.0)) for text in texts)


def restart_of(text: str, replicas: int) -> Restart:
    return Restart(*times_of("restart", "replica", text, replicas, 30.0))


def times_of(option: str, who: str, text: str, count: int, down_seconds: float) -> tuple[int, float, float]:
    """Who of so many ends when, and for how long."""
    found = RESTART.fullmatch(text)
    at, down = (number(found["at"]), number(found["down"] or str(down_seconds))) if found else (-1.0, -1.0)
    if found is None or not (isfinite(at) and isfinite(down)):
        refuse(option, f"{who.upper()}@SECONDS or {who.upper()}@SECONDS+DOWN, as 2@300+30, not {text!r}")
    place = int(found["place"])
    if place >= count:
        refuse(option, f"there is no {who} {place}: they are 0 to {count - 1}")
    return place, at, down


def scrape_of(text: str) -> float | None:
    return None if text == NEVER else positive("scrape-interval", number(text), f" or `{NEVER}`")


def number(text: str) -> float:
    """NaN for what is none: no comparison holds for it."""
    try:
        return float(text)
    except ValueError:
        return float("nan")


def positive(option: str, value: float, alternative: str = "") -> float:
    if not (value > 0 and isfinite(value)):
        refuse(option, f"must be above 0{alternative}")
    return value


def not_negative(option: str, value: float) -> float:
    if not (value >= 0 and isfinite(value)):
        refuse(option, "must be 0 or more")
    return value


def source_of(options: Options) -> traces.Source:
    """Raises `Refused`."""
    if options.synthetic is not None:
        if options.trace is not None:
            raise Refused("--synthetic and --trace: one of them")
        if options.chats is not None:
            refuse("chats", f"is for a file of chats; with --synthetic write {options.synthetic},chats=...")
        try:
            return traces.generator_named(options.synthetic).trace
        except ValueError as error:
            refuse("synthetic", str(error))
    if options.trace is None:
        raise Refused("--trace FILE or --synthetic NAME says what to replay")
    try:
        return traces.open_trace(options.trace, options.chats, say)
    except traces.TraceError as error:
        refuse("trace", str(error))


def subject_of(options: Options) -> str:
    """What was replayed, and on what: the title of a plot."""
    traffic = options.synthetic if options.trace is None else options.trace.name
    loop = ", closed loop" if options.closed_loop else ""
    return f"{traffic}, {options.replicas} replica{'s' if options.replicas > 1 else ''}{loop}"


# ---- the run -------------------------------------------------------------------------------------------------------


def run(options: Options) -> str:
    """What to print. Raises `Refused`."""
    plans = plans_of(options)
    if options.plot is not None and (problem := plot.problem(options.plot)) is not None:
        refuse("plot", problem)
    source = source_of(options)
    with progress(sys.stderr.isatty(), sum(len(plan.policies) + 1 for plan in plans) * plans[0].seeds) as tell:
        found = report.compare(source, plans, tell)
    if options.plot is not None:
        try:
            plot.draw(found, options.plot, subject_of(options))
        except OSError as error:
            refuse("plot", f"{options.plot}: {error.strerror or error}")
    return report.as_json(found) if options.as_json else report.as_tables(found)


def progress(is_terminal: bool, runs: int) -> AbstractContextManager[report.Progress]:
    """On a terminal a bar with the time left, gone in the end; elsewhere a line for each finished run."""
    return Bar(runs) if is_terminal else nullcontext(Ticker())


class Ticker:
    def __init__(self) -> None:
        self._since = time.monotonic()

    def __call__(self, name: str, of: int, done: int) -> None:
        now = time.monotonic()
        if done == 0:
            self._since = now
        elif done == of and name != report.BOUND:
            rate = done / max(now - self._since, 1e-9)
            say(f"{name}: {rate:,.0f} requests a second")


class Bar(AbstractContextManager[report.Progress]):
    """All runs together, in requests."""

    def __init__(self, runs: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._runs = runs
        self._finished = 0
        self._progress = Progress(
            TextColumn("{task.description:<28}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("requests,"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._progress.add_task("reading the trace", total=None)

    def __enter__(self) -> Callable[[str, int, int], None]:
        self._progress.start()
        return self._tell

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def _tell(self, name: str, of: int, done: int) -> None:
        self._progress.update(self._task, description=name, total=self._runs * of, completed=self._finished * of + done)
        self._finished += done == of
