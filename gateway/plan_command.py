"""`warmlane plan`: the words of the command line become a question for the planner."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Option

from workers.planner.question import GOALS, Question, goal_named, interconnect_named, variables_of

Model = Annotated[str, Option("--model", metavar="NAME", help="A bundled model, or a path with a config.json.")]
Gpu = Annotated[str, Option("--gpu", metavar="NAME", help="As in names of presets, e.g. h100-80.")]
Count = Annotated[int, Option("--count", metavar="N", min=1, max=1024, help="How many of them.")]
Context = Annotated[
    int | None, Option("--context", metavar="TOKENS", min=1, help="Longest request, prompt and answer.")
]
Concurrency = Annotated[int | None, Option("--concurrency", metavar="N", min=1, help="Requests at a time, in all.")]
Links = Annotated[
    str | None,
    Option("--interconnect", metavar="KIND", help="nvlink or pcie; as the card usually has when absent."),
]
Utilization = Annotated[
    float | None, Option("--gpu-memory-utilization", metavar="SHARE", help="As vLLM's flag; beats the profile.")
]
Profile = Annotated[
    str | None,
    Option("--profile", metavar="NAME", help="Take a profile of a preset as it is; else the layout is chosen."),
]
GoalName = Annotated[
    str | None, Option("--goal", metavar="GOAL", help=f"{', '.join(GOALS)}; follows from the profile.")
]
MeanTokens = Annotated[
    int | None, Option("--mean-tokens", metavar="N", min=1, help="Expected length of a request; half of the longest.")
]
Sessions = Annotated[
    int | None, Option("--sessions", metavar="N", min=1, help="Conversations that should find their prefix cached.")
]
Vllm = Annotated[str | None, Option("--vllm-version", metavar="X.Y.Z", help="As measured, else the newest known.")]
GpuMemory = Annotated[
    float | None, Option("--gpu-memory", metavar="GIB", min=1, help="Of one GPU, as the driver shows it.")
]
PerNode = Annotated[int, Option("--gpus-per-node", metavar="N", min=1, help="GPUs of one machine.")]
Weights = Annotated[
    float | None, Option("--weights", metavar="GIB", help="On each GPU, from `Model loading took` of a start.")
]
Overhead = Annotated[
    float | None, Option("--overhead", metavar="GIB", help="Usable memory less weights and KV cache of a start.")
]
Measured = Annotated[
    bool, Option("--measured/--no-measured", help="Whether what was measured with a preset replaces arithmetic.")
]
Beside = Annotated[
    list[str] | None, Option("--beside", metavar="PRESET", help="Another replica of the fleet; may be repeated.")
]
Environment = Annotated[
    list[str] | None, Option("--env", metavar="NAME=VALUE", help="A variable of vLLM; may be repeated.")
]
Json = Annotated[bool, Option("--json", help="Print JSON.")]
Extra = Annotated[list[str] | None, Argument(metavar="-- FLAG", help="Flags of vllm; they beat the profile.")]


def plan(
    model: Model,
    gpu: Gpu,
    count: Count,
    context: Context = None,
    concurrency: Concurrency = None,
    interconnect: Links = None,
    gpu_memory_utilization: Utilization = None,
    profile: Profile = None,
    goal: GoalName = None,
    mean_tokens: MeanTokens = None,
    sessions: Sessions = None,
    vllm_version: Vllm = None,
    gpu_memory: GpuMemory = None,
    gpus_per_node: PerNode = 8,
    weights: Weights = None,
    overhead: Overhead = None,
    measured: Measured = True,
    beside: Beside = None,
    env: Environment = None,
    as_json: Json = False,
    extra: Extra = None,
) -> int:
    """Say what a model does on GPUs that need not be there: memory, KV cache, how to split, what to watch."""
    from gateway.cli import Refused
    from workers.planner import planning, report
    from workers.planner.settings import flags_of

    try:
        found = planning.plan(
            Question(
                model=model,
                gpu=gpu,
                count=count,
                context=context,
                concurrency=concurrency,
                interconnect=interconnect_named(interconnect),
                gpu_memory_utilization=gpu_memory_utilization,
                profile=profile,
                goal=goal_named(goal),
                flags=flags_of(extra or ()),
                environment=variables_of(env or ()),
                mean_tokens=mean_tokens,
                sessions=sessions,
                vllm=vllm_version,
                gpu_memory_gib=gpu_memory,
                gpus_per_node=gpus_per_node,
                weights_gib=weights,
                overhead_gib=overhead,
                beside=tuple(beside or ()),
                use_measured=measured,
            )
        )
    except planning.PROBLEMS as error:
        raise Refused(str(error)) from error
    print(report.as_json(found) if as_json else report.as_text(found))
    return 0
