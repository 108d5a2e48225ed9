"""What the doctor found, as JSON for programs and as text for people.

Names and texts of servers are shown as they came, but for control characters: a terminal must not obey them.
"""

from __future__ import annotations

import io

import msgspec
from msgspec import Struct
from rich import box
from rich.console import Console
from rich.table import Table

from gateway.doctor import page as pages
from gateway.doctor.findings import Finding, Severity, counted
from gateway.doctor.window import Replica, Window

SCHEMA = 1
"""Grows when a key changes its meaning or goes; new keys may come without."""
WIDTH = 120


class ReplicaFigures(Struct, frozen=True, kw_only=True):
    """Of the window, or at its end. `null`: it did not say."""

    url: str
    engine: str | None
    version: str | None
    models: list[str] | None
    running: float | None
    waiting: float | None
    kv_usage: float | None
    hit_rate: float | None
    prompt_tokens_per_second: float | None
    generation_tokens_per_second: float | None


class GatewayFigures(Struct, frozen=True, kw_only=True):
    url: str
    replicas: list[str]
    waiting: float | None


class Found(Struct, frozen=True, kw_only=True):
    code: str
    severity: str
    subject: str
    evidence: str
    figures: dict[str, float]
    change: str
    flags: list[str]
    docs: str


class Report(Struct, frozen=True, kw_only=True):
    """The keys of `warmlane doctor --json`."""

    schema: int
    seconds: float
    worst: str | None
    """Severity of the first finding; `null` without any."""
    gateways: list[GatewayFigures]
    replicas: list[ReplicaFigures]
    findings: list[Found]


def report(window: Window, findings: list[Finding]) -> Report:
    return Report(
        schema=SCHEMA,
        seconds=window.seconds,
        worst=findings[0].severity.value if findings else None,
        gateways=[
            GatewayFigures(url=one.url, replicas=one.replicas, waiting=last(one.gauge(pages.WAITING)))
            for one in window.gateways
        ],
        replicas=[figures(one) for one in window.replicas],
        findings=[found(one) for one in findings],
    )


def figures(one: Replica) -> ReplicaFigures:
    return ReplicaFigures(
        url=one.url,
        engine=one.engine,
        version=one.version,
        models=None if one.models is None else [card.id for card in one.models],
        running=last(one.running),
        waiting=last(one.waiting),
        kv_usage=rounded(one.kv_usage),
        hit_rate=rounded(one.hit_rate),
        prompt_tokens_per_second=rounded(one.rate(pages.PROMPT_TOKENS)),
        generation_tokens_per_second=rounded(one.rate(pages.GENERATION_TOKENS)),
    )


def last(values: list[float]) -> float | None:
    return values[-1] if values else None


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def found(one: Finding) -> Found:
    return Found(
        code=one.code,
        severity=one.severity.value,
        subject=one.subject,
        evidence=one.evidence,
        figures={name: round(value, 4) for name, value in one.figures.items()},
        change=one.change,
        flags=list(one.flags),
        docs=one.docs,
    )


def as_json(told: Report, *, one_line: bool = False) -> str:
    encoded = msgspec.json.encode(told)
    return (encoded if one_line else msgspec.json.format(encoded, indent=2)).decode()


# -- for people


def as_text(told: Report) -> str:
    out = io.StringIO()
    console = Console(file=out, width=WIDTH, highlight=False, emoji=False, markup=False)
    gateways = "".join(f"gateway {one.url} with {counted(len(one.replicas), 'replica')}. " for one in told.gateways)
    console.print(plain(f"{gateways}Looked for {told.seconds:g} s."))
    if told.replicas:
        console.print(replicas_table(told.replicas))
    if told.findings:
        console.print(findings_table(told.findings))
    console.print(verdict(told))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def verdict(told: Report) -> str:
    counts = [sum(one.severity == level.value for one in told.findings) for level in Severity]
    named = [counted(count, level.value) for level, count in zip(Severity, counts, strict=True) if count]
    quiet = told.replicas and not any(one.prompt_tokens_per_second for one in told.replicas)
    idle = " No prompts came in that time: speed, hits and balance could not be judged." if quiet else ""
    return f"{', '.join(named) or 'Nothing found'}.{idle}"


def replicas_table(replicas: list[ReplicaFigures]) -> Table:
    table = Table(box=box.SIMPLE)
    for name in ("replica", "engine", "running", "waiting", "KV", "hits", "prompt tokens/s", "new tokens/s"):
        table.add_column(name, justify="left" if name in ("replica", "engine") else "right")
    for one in replicas:
        table.add_row(
            plain(one.url),
            plain(" ".join(filter(None, (one.engine, one.version))) or "-"),
            shown(one.running, "{:.0f}"),
            shown(one.waiting, "{:.0f}"),
            shown(one.kv_usage, "{:.0%}"),
            shown(one.hit_rate, "{:.0%}"),
            shown(one.prompt_tokens_per_second, "{:,.0f}"),
            shown(one.generation_tokens_per_second, "{:,.0f}"),
        )
    return table


def findings_table(findings: list[Found]) -> Table:
    """What was seen alike at several servers is one row, and says how many findings it is."""
    table = Table(box=box.SIMPLE_HEAD, show_lines=True)
    table.add_column("finding", width=20)
    table.add_column("where and by what", ratio=1)
    table.add_column("what to change", ratio=1)
    rows: dict[tuple[str, str, str, str, str], list[str]] = {}
    for one in findings:
        rows.setdefault((one.severity, one.code, one.evidence, one.change, one.docs), []).append(one.subject)
    for (severity, code, evidence, change, docs), subjects in rows.items():
        where = ", ".join(subjects)
        level = severity if len(subjects) == 1 else counted(len(subjects), severity)
        table.add_row(f"{level}\n{code}", plain(f"{where}: {evidence}"), f"{plain(change)}\n{docs}")
    return table


def shown(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def plain(text: str) -> str:
    return "".join(letter if letter.isprintable() else "�" for letter in text)


# -- what changed from one window to the next


def changes(earlier: Report, later: Report) -> list[str]:
    """A line for each finding that came or went."""
    before, now = by_place(earlier), by_place(later)
    came = [
        f"+ {one.severity} {one.code}: {one.subject}: {one.evidence}" for at, one in now.items() if at not in before
    ]
    went = [f"- {one.severity} {one.code}: {one.subject}" for at, one in before.items() if at not in now]
    return [plain(line) for line in came + went]


def by_place(told: Report) -> dict[tuple[str, str], Found]:
    return {(one.code, one.subject): one for one in told.findings}
