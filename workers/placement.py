"""Where a replica runs: its cards, and the processors and memory next to them.

The cards are those of the machine that the preset is for, as far as the environment leaves them, dealt out in order.
Where a machine's cards hang on several memory nodes, a replica whose cards share one is bound to it with `numactl`:
otherwise its processes, and the pages that weights are read through, may sit at the far end.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from workers.engine_version import LaunchError
from workers.gpus import VISIBLE, Device, Slot, numa_node, vendor_of, visible
from workers.planner.hardware import GPUS
from workers.presets import ANY_GPU, Gpu

TRIAL_SECONDS = 10.0
HIDING = (*VISIBLE.values(), "ROCR_VISIBLE_DEVICES")

Numa = Callable[[Device], int | None]


@dataclass(frozen=True, slots=True)
class Placement:
    """The default: wherever the engine likes."""

    gpus: tuple[str, ...] = ()
    """As the environment names them."""
    environment: Mapping[str, str] = field(default_factory=dict)
    prefix: tuple[str, ...] = ()
    """Before the engine's command."""
    notes: tuple[str, ...] = ()
    """For the person who asked."""
    memory_gib: float | None = None
    """Of the smallest of its cards, as the driver shows it."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What there is to place replicas on. `numactl` is its path, where it works."""

    devices: tuple[Device, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    numactl: str | None = None
    numa: Numa = numa_node
    troubles: tuple[str, ...] = ()
    """Of drivers that are there and fail."""

    @property
    def slots(self) -> tuple[Slot, ...]:
        return visible(self.devices, self.environment)

    @property
    def is_told(self) -> bool:
        """Whether it is known which cards there are."""
        return bool(self.devices) or any(name in self.environment for name in VISIBLE.values())

    @property
    def why_empty(self) -> str:
        """Why no card is visible."""
        if self.troubles:
            return "; ".join(self.troubles)
        hiding = next((name for name in HIDING if name in self.environment), None)
        if hiding is not None:
            return f"{hiding}={self.environment[hiding]!r} leaves none"
        return "no driver is installed"

    def place(self, gpu: Gpu | None, index: int = 0, of: int = 1) -> Placement:
        """The replica number `index` (from 0) of so many, each on `gpu.count` cards. Raises `LaunchError`."""
        if gpu is None or (of == 1 and not self.is_told):
            return Placement()
        if not self.is_told:
            labels = tuple(str(position) for position in range(index * gpu.count, (index + 1) * gpu.count))
            is_amd = gpu.name in GPUS and GPUS[gpu.name].is_amd
            return Placement(labels, {VISIBLE["amd" if is_amd else "nvidia"]: ",".join(labels)})
        slots, notes = self.meant(gpu)
        last = (index + 1) * gpu.count
        if len(slots) < last:
            raise LaunchError(
                f"{described(self.slots)} {'are' if len(self.slots) > 1 else 'is'} visible; "
                f"{index + 1} replica{'s' if index else ''} of {gpu.count} need{'' if index else 's'} {last}"
            )
        chosen = slots[index * gpu.count : last]
        prefix, note = self.binding(chosen)
        known = [slot.device.memory_gib for slot in chosen if slot.device is not None]
        return Placement(
            gpus=tuple(slot.label for slot in chosen),
            environment=self.variables(chosen),
            prefix=prefix,
            notes=(*notes, *note),
            memory_gib=min(known) if len(known) == len(chosen) else None,
        )

    def meant(self, gpu: Gpu) -> tuple[tuple[Slot, ...], tuple[str, ...]]:
        """The cards that the preset is for; all, with a note, where those are too few and others are there."""
        slots = self.slots
        if gpu.name == ANY_GPU:
            return slots, ()
        fitting = tuple(slot for slot in slots if slot.device is None or slot.device.name == gpu.name)
        if len(fitting) >= gpu.count:
            return fitting, ()
        return slots, (f"the preset is for {gpu.count} x {gpu.name}, this machine shows {described(slots)}",)

    def variables(self, chosen: Sequence[Slot]) -> dict[str, str]:
        """What keeps the engine to these cards; nothing where they are all there are."""
        if len(chosen) == len(self.slots):
            return {}
        vendor = vendor_of(self.devices, self.environment)
        found = {VISIBLE[vendor]: ",".join(slot.label for slot in chosen)}
        if len({device.title for device in self.devices}) > 1 and VISIBLE[vendor] not in self.environment:
            found["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # CUDA counts the fastest first, drivers by the bus
        return found

    def binding(self, chosen: Sequence[Slot]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """A prefix that keeps the replica next to its cards, and why."""
        nodes = {slot.label: self.numa(slot.device) for slot in self.slots if slot.device is not None}
        ours = {nodes.get(slot.label) for slot in chosen}
        if len(set(nodes.values()) - {None}) < 2 or len(ours) != 1 or None in ours:
            return (), ()
        (node,) = ours
        if self.numactl is None:
            return (), (f"its cards are on memory node {node}; with numactl it would be bound to it",)
        return (
            (self.numactl, f"--cpunodebind={node}", f"--membind={node}"),
            (f"bound to memory node {node}, where its cards are",),
        )


def described(slots: Sequence[Slot]) -> str:
    """`2 x NVIDIA L40S`."""
    if not slots:
        return "no GPU"
    titles = [slot.device.title if slot.device else "GPU" for slot in slots]
    return ", ".join(f"{titles.count(title)} x {title}" for title in dict.fromkeys(titles))


def working_numactl() -> str | None:
    """Its path, where it is installed and allowed to bind: containers often forbid it."""
    path = shutil.which("numactl")
    if path is None:
        return None
    try:
        trial = subprocess.run(
            [path, "--localalloc", "true"], stdin=subprocess.DEVNULL, capture_output=True, timeout=TRIAL_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return path if trial.returncode == 0 else None
