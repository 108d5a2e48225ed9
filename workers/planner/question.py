"""What can be asked of the planner. Nothing heavy is imported here: the command line is made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from workers.planner.hardware import GPUS_PER_NODE, Interconnect

if TYPE_CHECKING:
    from workers.presets import FlagValue

Goal = Literal["balanced", "latency", "throughput"]
GOALS: tuple[Goal, ...] = get_args(Goal)
INTERCONNECTS: tuple[Interconnect, ...] = get_args(Interconnect)


class PlanError(Exception):
    """The question cannot be answered as asked. The message is one clear line for the person who asked."""


@dataclass(frozen=True, slots=True)
class Question:
    model: str
    gpu: str
    count: int
    context: int | None = None
    concurrency: int | None = None
    interconnect: Interconnect | None = None
    gpu_memory_utilization: float | None = None
    profile: str | None = None
    goal: Goal | None = None
    flags: Mapping[str, FlagValue] | None = None
    """Of vLLM; they beat those of the profile."""
    environment: Mapping[str, str] | None = None
    mean_tokens: int | None = None
    sessions: int | None = None
    vllm: str | None = None
    """Version."""
    gpu_memory_gib: float | None = None
    gpus_per_node: int = GPUS_PER_NODE
    weights_gib: float | None = None
    overhead_gib: float | None = None
    beside: tuple[str, ...] = ()
    """Presets of other replicas of the fleet."""
    use_measured: bool = True


def goal_named(name: str | None) -> Goal | None:
    """Raises `PlanError`."""
    for goal in GOALS:
        if goal == name:
            return goal
    if name is None:
        return None
    raise PlanError(f"--goal {name}: expected {', '.join(GOALS)}")


def interconnect_named(name: str | None) -> Interconnect | None:
    """Raises `PlanError`."""
    for kind in INTERCONNECTS:
        if kind == name:
            return kind
    if name is None:
        return None
    raise PlanError(f"--interconnect {name}: expected {' or '.join(INTERCONNECTS)}")


def variables_of(words: Sequence[str]) -> dict[str, str]:
    """`NAME=VALUE`. Raises `PlanError`."""
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise PlanError(f"--env {word}: expected NAME=VALUE")
        found[name] = value
    return found
