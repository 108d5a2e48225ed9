"""Which preset suits this machine, when none is named.

The models are tried in order, the one that the project is for first. The machine is divided as the planner divides it,
so that `warmlane plan` says the same: into as many replicas as have roomy caches each, else into those that hold the
most prefixes together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from workers import presets
from workers.gpus import Slot
from workers.placement import described
from workers.planner.layouts import ROOM_REQUESTS, ROOM_TOKENS
from workers.planner.planning import plan
from workers.planner.question import Question
from workers.presets import DEFAULT_PROFILE, Preset

MODELS = ("openai/gpt-oss-120b", "openai/gpt-oss-20b", "Qwen/Qwen3-8B")
EMBEDDED = "embedded"


@dataclass(frozen=True, slots=True)
class Choice:
    preset: str
    replicas: int
    """As many as the cards allow."""
    why: str


def choose(slots: Sequence[Slot]) -> Choice | None:
    """`None` when no preset is for any of these cards."""
    every = presets.load_all()
    for name in kinds(slots):
        cards = [slot for slot in slots if slot.device is not None and slot.device.name == name]
        for model in MODELS:
            fitting = {
                preset.gpu.count: preset_name
                for preset_name, preset in every.items()
                if preset.gpu is not None
                and preset.model == model
                and preset.gpu.name == name
                and preset.gpu.count <= len(cards)
            }
            if fitting:
                return chosen(fitting, every, cards, len(slots))
    return None


def kinds(slots: Sequence[Slot]) -> list[str]:
    """Those that have a name, the one with the most memory in all first."""
    memory: dict[str, float] = {}
    for slot in slots:
        if slot.device is not None and slot.device.name is not None:
            memory[slot.device.name] = memory.get(slot.device.name, 0.0) + slot.device.memory_gib
    return sorted(memory, key=lambda name: -memory[name])


def chosen(fitting: Mapping[int, str], every: Mapping[str, Preset], cards: Sequence[Slot], total: int) -> Choice:
    count = len(cards)
    orders = {gpus: order(every[name], count) for gpus, name in fitting.items()}
    best = min(orders, key=lambda gpus: orders[gpus])
    replicas = count // best
    idle = total - replicas * best
    parts = f"{replicas} replicas of {best}" if replicas > 1 else "for exactly these" if not idle else f"for {best}"
    left = f", {idle} left over" if idle else ""
    why = ""
    if len(fitting) > 1 and replicas > 1:
        is_tight = orders[best][0]
        why = "; so they hold the most prefixes" if is_tight else "; the most replicas whose caches are roomy"
    return Choice(fitting[best], replicas, f"{described(cards)}: {fitting[best]}, {parts}{left}{why}")


def order(preset: Preset, count: int) -> tuple[bool, int]:
    """Smallest first: roomy caches and many of them, else the most prefixes together."""
    assert preset.gpu is not None
    replicas = count // preset.gpu.count
    found = plan(Question(preset.model, preset.gpu.name, preset.gpu.count, profile=DEFAULT_PROFILE)).chosen
    is_roomy = found.raw_tokens >= min(ROOM_TOKENS, ROOM_REQUESTS * found.settings.max_model_len)
    return not is_roomy, -replicas if is_roomy else -replicas * found.raw_tokens
