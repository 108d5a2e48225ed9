"""What `warmlane replay` can be told: each field is an option, with its default and its help.

The command line is made of this class (`as_command`), so that an option is written down once. Only typer is imported
here: the command loads the simulator when it runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, get_type_hints

from typer import Option

from gateway.core.settings import POLICY_NAMES

Trace = Annotated[
    Path | None,
    Option("--trace", metavar="FILE", help="Mooncake, Claude Code chats, Azure CSV, a request log; plain or gzip."),
]
Synthetic = Annotated[
    str | None,
    Option(
        "--synthetic",
        metavar="NAME[,KEY=VALUE]...",
        help="Traffic made up instead: hot-prompt, samples, bursty, rag, chats.",
    ),
]
Chats = Annotated[int | None, Option("--chats", metavar="N", min=1, help="A sample of the chats in the file; all.")]
Limit = Annotated[int | None, Option("--limit", metavar="N", min=1, help="Only the first N requests.")]
Policies = Annotated[
    list[str] | None,
    Option("--policy", metavar="NAME", help=f"May be repeated; all when absent: {', '.join(POLICY_NAMES)}."),
]
Loads = Annotated[
    list[str] | None,
    Option(
        "--load",
        metavar="X[,X]...",
        help="Offered input tokens by what all replicas could prefill uncached, or `recorded`. Several give a report "
        "for each. When absent 1.0, in a closed loop `recorded`.",
    ),
]
Speed = Annotated[float, Option("--speed", metavar="X", help="Times the recorded rate; with --load recorded.")]
Seeds = Annotated[int, Option("--seeds", metavar="N", min=1, help="Runs of each policy; figures are averaged.")]
Replicas = Annotated[int, Option("--replicas", metavar="N", min=1, max=1_000, help="How many.")]
CacheTokens = Annotated[
    int, Option("--cache-tokens", metavar="TOKENS", min=512, help="KV cache of each replica, in tokens.")
]
PrefillRate = Annotated[
    float, Option("--prefill-rate", metavar="X", help="Uncached prompt tokens a second of each replica.")
]
AttentionTokens = Annotated[
    float | None,
    Option(
        "--attention-tokens",
        metavar="N",
        min=1,
        help="A token with so many before it takes twice as long to prefill as the first; when absent, no longer.",
    ),
]
DecodeRate = Annotated[float, Option("--decode-rate", metavar="X", help="Tokens a second of each request.")]
MaxNumSeqs = Annotated[int, Option("--max-num-seqs", metavar="N", min=1, help="Requests that a replica runs at once.")]
Speeds = Annotated[
    str | None,
    Option("--speeds", metavar="X[,X]...", help="Times faster, replica by replica, e.g. 1,1,0.33; 1 when absent."),
]
NetworkDelay = Annotated[
    float, Option("--network-delay-ms", metavar="MS", help="Between gateway and replica, each way, in milliseconds.")
]
Restart = Annotated[
    str | None,
    Option(
        "--restart",
        metavar="REPLICA@SECONDS[+DOWN]",
        help="A replica (the first is 0) dies then, and is back, cold, DOWN seconds later (30).",
    ),
]
Scrape = Annotated[
    str,
    Option("--scrape-interval", metavar="SECONDS", help="How often the gateway reads their metrics, or `never`."),
]
Gateways = Annotated[
    int, Option("--gateways", metavar="N", min=1, max=1_000, help="Requests are dealt to them in turn.")
]
SharedState = Annotated[bool, Option("--shared-state", help="Several gateways know the same, at once.")]
SharedView = Annotated[
    bool, Option("--shared-view", help="Several gateways tell each other what they do, as through Redis.")
]
ViewDelay = Annotated[
    float, Option("--view-delay", metavar="SECONDS", help="How much later they hear it; with --shared-view.")
]
ViewLoss = Annotated[
    float, Option("--view-loss", metavar="SHARE", help="Share of it that is lost, 0 to 1; with --shared-view.")
]
GatewayRestarts = Annotated[
    str | None,
    Option(
        "--gateway-restart",
        metavar="GATEWAY@SECONDS[+DOWN][,...]",
        help="A gateway (the first is 0) ends then, and another that knows nothing comes DOWN seconds later (2).",
    ),
]
ClosedLoop = Annotated[
    bool,
    Option("--closed-loop", help="The next request of a session waits for the answer, and for its user to think."),
]
DecodeSlowdown = Annotated[
    float, Option("--decode-slowdown", metavar="X", help="Share that each further answer adds to a replica's step.")
]
StepTokens = Annotated[
    int | None,
    Option(
        "--step-tokens",
        metavar="N",
        min=1,
        help="Tokens of a step that prefill and answers share; when absent they do not slow each other.",
    ),
]
Preempts = Annotated[
    bool, Option("--preempts", help="Answers take KV cache as they grow, and may lose it; else it is reserved.")
]
CacheAnswers = Annotated[
    bool, Option("--cache-answers", help="Answers stay in the cache for the session's next prompt, as in vLLM.")
]
SharedProcessor = Annotated[
    bool, Option("--shared-processor", help="All replicas share the speed of one machine, as several on one GPU.")
]
NeverShed = Annotated[bool, Option("--never-shed", help="Let everybody wait as long as it takes.")]
Hold = Annotated[
    bool | None,
    Option("--hold/--no-hold", help="Whether requests wait in the gateway until a replica can begin with them."),
]
Plot = Annotated[Path | None, Option("--plot", metavar="FILE", help="Draw TTFT against load as well; .png or .svg.")]
Json = Annotated[bool, Option("--json", help="Print JSON.")]


@dataclass(frozen=True, slots=True)
class Options:
    """The words of the command line, not judged yet."""

    trace: Trace = None
    synthetic: Synthetic = None
    chats: Chats = None
    limit: Limit = None
    policy: Policies = None
    load: Loads = None
    speed: Speed = 1.0
    seeds: Seeds = 1
    replicas: Replicas = 8
    cache_tokens: CacheTokens = 1_500_000
    prefill_rate: PrefillRate = 20_000.0
    attention_tokens: AttentionTokens = None
    decode_rate: DecodeRate = 60.0
    max_num_seqs: MaxNumSeqs = 64
    speeds: Speeds = None
    network_delay_ms: NetworkDelay = 0.0
    restart: Restart = None
    scrape_interval: Scrape = "0.5"
    gateways: Gateways = 1
    shared_state: SharedState = False
    shared_view: SharedView = False
    view_delay: ViewDelay = 0.0
    view_loss: ViewLoss = 0.0
    gateway_restart: GatewayRestarts = None
    decode_slowdown: DecodeSlowdown = 0.0
    step_tokens: StepTokens = None
    preempts: Preempts = False
    cache_answers: CacheAnswers = False
    shared_processor: SharedProcessor = False
    closed_loop: ClosedLoop = False
    never_shed: NeverShed = False
    hold: Hold = None
    plot: Plot = None
    as_json: Json = False


def as_command(run: Callable[[Options], int]) -> Callable[..., int]:
    """A function with the options as its parameters, for typer."""

    def command(**words: object) -> int:
        return run(Options(**words))  # type: ignore[arg-type]

    hints = get_type_hints(Options, include_extras=True)
    parameters = [
        inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=hints[one.name])
        for one in fields(Options)
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = hints
    command.__doc__ = run.__doc__
    return command
