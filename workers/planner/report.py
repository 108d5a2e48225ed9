"""A plan as JSON for programs and as text for people."""

from __future__ import annotations

import io
import shlex

import msgspec
from msgspec import Struct
from rich import box
from rich.console import Console
from rich.table import Table

from workers.command_line import DEFAULT_PORT, EVENTS_FLAG, GATEWAY_FLAGS
from workers.planner.layouts import Estimate
from workers.planner.planning import Plan, words
from workers.planner.rules import Finding
from workers.presets import DEFAULT_PROFILE, FlagValue

WIDTH = 110
SHOWN_LAYOUTS = 6


class Row(Struct, frozen=True, kw_only=True):
    """One layout, or one profile, with its figures for one replica."""

    replicas: int
    tensor_parallel: int
    pipeline_parallel: int
    data_parallel: int
    fits: bool
    kv_tokens: int
    """As vLLM reports it."""
    raw_tokens: int
    """Tokens of prompts that its prefix cache holds."""
    concurrent_requests: float
    """Of full length."""
    context: int


class Warned(Struct, frozen=True):
    code: str
    message: str


class Change(Struct, frozen=True, kw_only=True):
    change: str
    kv_tokens: int
    concurrent_requests: float


class Report(Struct, frozen=True, kw_only=True):
    """The keys of `warmlane plan --json`. Tokens and requests are those of one replica unless they say fleet."""

    model: str
    gpu: str
    count: int
    interconnect: str
    vllm: str
    preset: str | None
    profile: str | None
    goal: str
    fits: bool
    kv_tokens: int
    raw_tokens: int
    concurrent_requests: float
    fleet_tokens: int
    fleet_requests: float
    tensor_parallel: int
    pipeline_parallel: int
    data_parallel: int
    replicas: int
    distributed_executor: str | None
    context: int
    mean_tokens: int
    cached_sessions: int
    reusable_share: float | None
    memory_gib: float
    usable_gib: float
    weights_gib: float
    overhead_gib: float
    kv_cache_gib: float
    """These four: of the fullest GPU."""
    weights_source: str
    overhead_source: str
    kv_bytes_per_token: int
    """In all layers that keep everything, on all GPUs of a replica."""
    blocks: int
    blocks_per_request: int
    flags: str
    environment: dict[str, str]
    warnings: list[Warned]
    remedies: list[Change]
    alternatives: list[Row]
    profiles: dict[str, Row]


def row(one: Estimate) -> Row:
    return Row(
        replicas=one.layout.replicas,
        tensor_parallel=one.layout.tensor_parallel,
        pipeline_parallel=one.layout.pipeline_parallel,
        data_parallel=one.layout.data_parallel,
        fits=one.fits,
        kv_tokens=one.reported_tokens,
        raw_tokens=one.raw_tokens,
        concurrent_requests=round(one.concurrency, 2),
        context=one.settings.max_model_len,
    )


def report(plan: Plan) -> Report:
    case, chosen = plan.case, plan.chosen
    memory, layout = chosen.memory, chosen.layout
    return Report(
        model=case.model.name,
        gpu=case.machine.gpu.name,
        count=case.machine.count,
        interconnect=case.machine.interconnect,
        vllm=str(case.version),
        preset=plan.preset,
        profile=plan.profile,
        goal=plan.goal,
        fits=plan.fits,
        kv_tokens=chosen.reported_tokens,
        raw_tokens=chosen.raw_tokens,
        concurrent_requests=round(chosen.concurrency, 2),
        fleet_tokens=case.fleet_tokens,
        fleet_requests=round(chosen.concurrency * layout.replicas, 2),
        tensor_parallel=layout.tensor_parallel,
        pipeline_parallel=layout.pipeline_parallel,
        data_parallel=layout.data_parallel,
        replicas=layout.replicas,
        distributed_executor=plan.executor,
        context=case.settings.max_model_len,
        mean_tokens=case.mean_tokens,
        cached_sessions=plan.cached_sessions,
        reusable_share=plan.reusable_share,
        memory_gib=case.machine.memory_gib,
        usable_gib=round(memory.usable, 2),
        weights_gib=round(memory.weights, 2),
        overhead_gib=round(memory.overhead, 2),
        kv_cache_gib=round(memory.kv_cache, 2),
        weights_source="measured" if memory.weights_are_measured else "computed",
        overhead_source="measured" if memory.overhead_is_measured else "estimated",
        kv_bytes_per_token=case.model.cache_bytes(case.settings.kv_element_bytes),
        blocks=chosen.capacity.blocks,
        blocks_per_request=chosen.capacity.request_blocks,
        flags=words(plan.engine_flags),
        environment=dict(case.environment),
        warnings=[Warned(one.code, one.message) for one in plan.findings],
        remedies=[
            Change(
                change=one.change,
                kv_tokens=one.estimate.reported_tokens,
                concurrent_requests=round(one.estimate.concurrency, 2),
            )
            for one in plan.remedies
        ],
        alternatives=[row(one) for one in plan.alternatives],
        profiles={name: row(one) for name, one in plan.profiles.items()},
    )


def as_json(plan: Plan) -> str:
    return msgspec.json.format(msgspec.json.encode(report(plan)), indent=2).decode()


# -- for people


def as_text(plan: Plan) -> str:
    found = report(plan)
    out = io.StringIO()
    console = Console(file=out, width=WIDTH, highlight=False, emoji=False, markup=False)
    console.print(
        f"{found.model} on {found.count} x {plan.case.machine.gpu.title}, {found.interconnect}, vLLM {found.vllm}"
    )
    console.print(verdict(plan, found))
    console.print(figures(plan, found))
    if len(plan.alternatives) > 1:
        console.print(f"Ways to use these GPUs, best for {found.goal} first:")
        console.print(layouts_table(plan.alternatives[:SHOWN_LAYOUTS]))
    for name, one in plan.profiles.items():
        if not one.fits:
            console.print(f"The flags of profile {name!r} do not fit on {found.count} x {plan.case.machine.gpu.title}.")
    for remedy in plan.remedies:
        then = remedy.estimate
        holds = f"{then.concurrency:.1f} requests of {then.capacity.context:,} tokens"
        console.print(f"To make it fit: {remedy.change} ({holds})")
    console.print(findings_table(plan.findings))
    if plan.fits:
        console.print(f"Run it: {command(plan, found)}", soft_wrap=True)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def command(plan: Plan, found: Report) -> str:
    machine, layout = plan.case.machine, plan.chosen.layout
    if plan.is_preset and layout.gpus <= machine.per_node:
        profile = "" if plan.profile == DEFAULT_PROFILE else f" --profile {plan.profile}"
        one = f"--preset {plan.preset}{profile}"
        if found.replicas * layout.gpus <= machine.per_node:
            return f"warmlane up {one} --replicas {found.replicas}"
        return spread(f"warmlane replica {one} --host ADDRESS", found.replicas, machine.per_node // layout.gpus)
    if layout.gpus > machine.per_node:
        return f"vllm serve {found.model} {found.flags} --port {DEFAULT_PORT}"
    variables = "".join(f"{name}={shlex.quote(value)} " for name, value in found.environment.items())
    own = words({name: value for name, value in plan.engine_flags.items() if not is_added(name, value)})
    given = f"--preset any --model {shlex.quote(found.model)}"
    behind = f" -- {own}" if own else ""
    if found.replicas * layout.gpus <= machine.per_node:
        return f"{variables}warmlane up {given} --replicas {found.replicas}{behind}"
    one = f"{variables}warmlane replica {given} --host ADDRESS{behind}"
    return spread(one, found.replicas, machine.per_node // layout.gpus)


def is_added(name: str, value: FlagValue) -> bool:
    """The launcher gives it to every replica."""
    return name == EVENTS_FLAG or GATEWAY_FLAGS.get(name) == value


def spread(command: str, replicas: int, at_most: int) -> str:
    """More replicas than a machine has room for."""
    machines = -(-replicas // at_most)
    each = f"{at_most} times, each on GPUs and a port of its own" if at_most > 1 else "once"
    return (
        f"on each of {machines} machines, {each}: {command}\n"
        "In front of them: warmlane serve --replica http://ADDRESS:PORT ..., once for each replica"
    )


def verdict(plan: Plan, found: Report) -> str:
    if not plan.chosen.fits:
        return f"DOES NOT FIT as {plan.chosen.layout}."
    if not plan.fits:
        return f"Has the memory as {plan.chosen.layout}, but will not start: see the errors below."
    requests = f"{found.concurrent_requests} requests of {found.context:,} tokens at a time"
    return f"Fits as {plan.chosen.layout}: {requests}{' each' if found.replicas > 1 else ''}."


def figures(plan: Plan, found: Report) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    lines = {
        "memory of a GPU": f"{found.memory_gib} GiB, {found.usable_gib} usable",
        "weights": f"{found.weights_gib} GiB ({found.weights_source})",
        "overhead": f"{found.overhead_gib} GiB ({found.overhead_source})",
        "KV cache": f"{found.kv_cache_gib} GiB on each GPU, {found.kv_bytes_per_token:,} bytes a token in all",
        "KV tokens": f"{found.kv_tokens:,} as vLLM reports it, {found.raw_tokens:,} tokens of prompts",
        "all replicas": f"{found.fleet_requests} requests at a time, {found.fleet_tokens:,} tokens of prompts",
        "prefixes": prefixes(found),
    }
    if found.distributed_executor:
        lines["across nodes"] = f"--distributed-executor-backend {found.distributed_executor}"
    for name, text in lines.items():
        table.add_row(name, text)
    return table


def prefixes(found: Report) -> str:
    text = f"{found.cached_sessions:,} sessions of {found.mean_tokens:,} tokens stay cached"
    if found.reusable_share is not None:
        text += f"; at most {100 * found.reusable_share:.0f} % of what comes again is still there"
    return text


def layouts_table(alternatives: tuple[Estimate, ...]) -> Table:
    table = Table(box=box.SIMPLE)
    for name in ("layout", "fits", "context", "requests at a time", "KV tokens each", "prompt tokens in all"):
        table.add_column(name, justify="left" if name in ("layout", "fits") else "right")
    for one in alternatives:
        table.add_row(
            str(one.layout),
            "yes" if one.fits else "no",
            f"{one.settings.max_model_len:,}",
            f"{one.concurrency * one.layout.replicas:.1f}",
            f"{one.reported_tokens:,}",
            f"{one.raw_tokens * one.layout.replicas:,}",
        )
    return table


def findings_table(found: tuple[Finding, ...]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for one in found:
        table.add_row(one.code, one.message)
    return table
