"""The GPUs of this machine, as their drivers tell, by the names that presets use.

NVIDIA's cards come from NVML, through `nvidia-ml-py` where it is installed (the extra `gpu`), else through the
`nvidia-smi` that comes with the driver; AMD's from `amd-smi`. Nothing of a driver is touched before it is asked for.
"""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple

from workers.planner.hardware import GPUS

Vendor = Literal["nvidia", "amd"]

PRODUCTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"\bT4\b", ("t4-16",)),
    (r"\bV100\b", ("v100-32",)),
    (r"\bRTX 4080\b", ("rtx4080-16",)),
    (r"\bRTX 4090\b", ("rtx4090-24",)),
    (r"\bA100\b", ("a100-40", "a100-80")),
    (r"\bL40S\b", ("l40s-48",)),
    (r"\bRTX 6000 Ada\b", ("rtx6000ada-48",)),
    (r"\bH100\b", ("h100-80",)),
    (r"\bRTX PRO 6000 Blackwell\b", ("rtxpro6000-96",)),
    (r"\bH200\b", ("h200-141",)),
    (r"\bB200\b", ("b200-180",)),
    (r"\bMI300X\b", ("mi300x-192",)),
)
"""Product names as drivers write them, and the GPUs of the planner that may be meant; memory decides."""
SAME_MEMORY = 0.05
"""Cards of one kind differ a little, and old drivers count what they keep. An H100 NVL has 18 % more than an H100, a
laptop's RTX 4090 a third less."""

MIB_PER_GIB = 1024.0
TOOL_SECONDS = 30.0
"""A driver that nobody uses is loaded first: 10 s with eight cards."""
SHOWN_CHARACTERS = 200
"""Of what a failing tool says: a line on a screen or two."""
NVIDIA_SMI = ("--query-gpu=index,name,memory.total,memory.reserved,pci.bus_id,uuid", "--format=csv,noheader,nounits")
AMD_SMI = ("static", "--asic", "--vram", "--bus", "--json")

VISIBLE: Mapping[Vendor, str] = {"nvidia": "CUDA_VISIBLE_DEVICES", "amd": "HIP_VISIBLE_DEVICES"}
"""What tells an engine which cards it may use."""
LAST_LABELS = ("-1", "NoDevFiles")
"""CUDA uses no card from such a word on; Slurm writes the second one where it grants none."""
PCI_DEVICES = Path("/sys/bus/pci/devices")


@dataclass(frozen=True, slots=True)
class Device:
    vendor: Vendor
    index: int
    """In the order of the bus, as the drivers' tools count."""
    title: str
    """Product name, as the driver writes it."""
    memory_gib: float
    """As the driver shows it, without what it keeps for itself: what programs see."""
    bus_id: str
    """PCI address as in sysfs, `0000:01:00.0`; empty when unknown."""
    uuid: str = ""

    @property
    def name(self) -> str | None:
        """As in names of presets; `None` when no preset is for such a card."""
        for pattern, candidates in PRODUCTS:
            if re.search(pattern, self.title):
                return next((name for name in candidates if self.has_memory_of(name)), None)
        return None

    def has_memory_of(self, name: str) -> bool:
        expected = GPUS[name].memory_gib
        return abs(self.memory_gib - expected) <= SAME_MEMORY * expected


@dataclass(frozen=True, slots=True)
class Slot:
    """One card that programs started from here may use."""

    label: str
    """As the environment names it: an index, or what the user wrote."""
    device: Device | None
    """`None`: nothing is known of it."""


class DriverFailed(Exception):
    """A driver, or its tool, is there and does not tell its cards. The message names it."""


class Found(NamedTuple):
    devices: tuple[Device, ...] = ()
    troubles: tuple[str, ...] = ()
    """Of drivers that are there and fail; empty where cards were found."""


def detect() -> Found:
    """All cards of this machine; none without a driver."""
    troubles = []
    for read in (read_nvml, read_nvidia_smi, read_amd_smi):
        try:
            devices = read()
        except DriverFailed as error:
            troubles.append(str(error))
            continue
        if devices:
            return Found(tuple(devices))
    return Found(troubles=tuple(troubles))


def visible(devices: Sequence[Device], environment: Mapping[str, str]) -> tuple[Slot, ...]:
    """Those that the environment leaves, in its order; all when it says nothing."""
    vendor = vendor_of(devices, environment)
    if vendor == "amd" and (inner := environment.get("ROCR_VISIBLE_DEVICES")) is not None:
        left = [slot.device for slot in named(inner, devices)]
        devices = [device for device in left if device is not None]  # HIP counts those that are left, from 0
    named_by = next((name for name in variables_of(vendor) if name in environment), None)
    if named_by is not None:
        return named(environment[named_by], devices)
    return tuple(Slot(str(position), device) for position, device in enumerate(devices))


def vendor_of(devices: Sequence[Device], environment: Mapping[str, str]) -> Vendor:
    if devices:
        return devices[0].vendor
    return "amd" if VISIBLE["amd"] in environment else "nvidia"


def variables_of(vendor: Vendor) -> tuple[str, ...]:
    """ROCm heeds CUDA's variable, too."""
    return ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES") if vendor == "amd" else ("CUDA_VISIBLE_DEVICES",)


def named(labels: str, devices: Sequence[Device]) -> tuple[Slot, ...]:
    words = [label.strip() for label in labels.split(",") if label.strip()]
    words = list(takewhile(lambda label: label not in LAST_LABELS, words))
    return tuple(Slot(label, device_of(label, devices)) for label in words)


def device_of(label: str, devices: Sequence[Device]) -> Device | None:
    if label.isdigit():
        return devices[int(label)] if int(label) < len(devices) else None
    return next((device for device in devices if device.uuid and device.uuid.startswith(label)), None)


def numa_node(device: Device, root: Path = PCI_DEVICES) -> int | None:
    """The memory node next to the card; `None` where the machine has no such thing or hides it."""
    if not device.bus_id:
        return None
    try:
        node = int((root / device.bus_id / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


# -- NVIDIA

NVML_NOT_FOUND = 12
"""There is no driver."""


def read_nvml() -> list[Device]:
    try:
        import pynvml
    except ImportError:
        return []
    return from_nvml(pynvml)


def from_nvml(nvml: Any) -> list[Device]:
    """`nvml` is the module `pynvml`, or what stands for it. Raises `DriverFailed`."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        if getattr(error, "value", None) == NVML_NOT_FOUND:
            return []
        raise DriverFailed(f"NVML says: {error}") from error
    try:
        return [nvml_device(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError as error:
        raise DriverFailed(f"NVML says: {error}") from error
    finally:
        nvml.nvmlShutdown()


def nvml_device(nvml: Any, index: int) -> Device:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    return Device(
        vendor="nvidia",
        index=index,
        title=text_of(nvml.nvmlDeviceGetName(handle)),
        memory_gib=round(usable_bytes(nvml, handle) / 2**30, 2),
        bus_id=sysfs_address(text_of(nvml.nvmlDeviceGetPciInfo(handle).busId)),
        uuid=text_of(nvml.nvmlDeviceGetUUID(handle)),
    )


def usable_bytes(nvml: Any, handle: Any) -> int:
    """Without what the driver keeps for itself: on an H200 exactly what CUDA shows, 0.6 GiB less than the total."""
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2)
        return int(memory.total - memory.reserved)
    except (nvml.NVMLError, AttributeError):  # drivers and bindings before 510
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).total)


def text_of(value: str | bytes) -> str:
    """Bindings before 12 give bytes."""
    return value.decode() if isinstance(value, bytes) else value


def sysfs_address(bus_id: str) -> str:
    """NVML writes the domain with eight digits, sysfs with four."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain[-4:]}:{rest}" if rest else ""


def read_nvidia_smi() -> list[Device]:
    return cards_in(run("nvidia-smi", NVIDIA_SMI), "nvidia-smi", from_nvidia_smi)


def from_nvidia_smi(text: str) -> list[Device]:
    devices = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) != 6 or not row[0].isdigit():
            continue  # "No devices were found"
        index, title, total, reserved, bus_id, uuid = (cell.strip() for cell in row)
        size = (mebibytes(total) - mebibytes(reserved)) / MIB_PER_GIB
        devices.append(Device("nvidia", int(index), title, round(size, 2), sysfs_address(bus_id), uuid))
    return devices


# -- AMD


def read_amd_smi() -> list[Device]:
    return cards_in(run("amd-smi", AMD_SMI), "amd-smi", from_amd_smi)


def from_amd_smi(text: str) -> list[Device]:
    """Of a list of cards, or since ROCm 7 of an object with that list; warnings may stand before it."""
    start = re.search(r"^[\[{]", text, re.MULTILINE)
    try:
        read = json.loads(text[start.start() :]) if start else []
    except ValueError:
        return []
    cards = read.get("gpu_data", []) if isinstance(read, dict) else read
    return [amd_device(position, card) for position, card in enumerate(cards) if isinstance(card, dict)]


def amd_device(position: int, card: Mapping[str, Any]) -> Device:
    index = card.get("gpu", position)
    return Device(
        vendor="amd",
        index=index if isinstance(index, int) else position,
        title=str(section(card, "asic").get("market_name", "")),
        memory_gib=round(mebibytes(section(card, "vram").get("size")) / MIB_PER_GIB, 2),
        bus_id=str(section(card, "bus").get("bdf", "")).lower(),
    )


def section(card: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = card.get(name)
    return found if isinstance(found, dict) else {}


def mebibytes(size: object) -> float:
    """AMD writes `{"value": 196592, "unit": "MB"}` and means MiB. 0 for "N/A" and their like."""
    number = size.get("value") if isinstance(size, dict) else str(size).split(" ")[0]
    try:
        return float(str(number))
    except ValueError:
        return 0.0


def cards_in(text: str | None, tool: str, read: Callable[[str], list[Device]]) -> list[Device]:
    """Raises `DriverFailed` where the tool is there and names no card."""
    if text is None:
        return []
    devices = read(text)
    if not devices:
        raise DriverFailed(f"{tool} names no card: {first_line(text)}")
    return devices


def first_line(text: str) -> str:
    return next(
        (line.strip().rstrip(".")[:SHOWN_CHARACTERS] for line in text.splitlines() if line.strip()), "it prints nothing"
    )


def run(tool: str, arguments: Sequence[str]) -> str | None:
    """What a driver's tool prints; `None` when there is none. Raises `DriverFailed`."""
    path = shutil.which(tool)
    if path is None:
        return None
    try:
        done = subprocess.run(
            [path, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TOOL_SECONDS,
        )
    except OSError as error:
        raise DriverFailed(f"{path} cannot be run: {error.strerror or error}") from error
    except subprocess.TimeoutExpired as error:
        raise DriverFailed(f"{path} does not answer within {TOOL_SECONDS:g} s") from error
    if done.returncode != 0:
        raise DriverFailed(f"{path} ends with exit code {done.returncode}: {first_line(done.stdout + done.stderr)}")
    return done.stdout
