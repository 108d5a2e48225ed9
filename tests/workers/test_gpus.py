"""Cards are recognised by what drivers say of them, and dealt out to replicas next to their memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from workers import presets
from workers.engine_version import LaunchError
from workers.gpus import (
    NVML_NOT_FOUND,
    Device,
    DriverFailed,
    Slot,
    from_amd_smi,
    from_nvidia_smi,
    from_nvml,
    numa_node,
    read_nvidia_smi,
    visible,
)
from workers.placement import Machine, Placement
from workers.planner.hardware import GPUS
from workers.planner.planning import plan
from workers.planner.question import Question
from workers.preset_choice import MODELS, choose
from workers.presets import Gpu

MIB = 2**20


class Refusal(Exception):
    def __init__(self, value: int = 0, message: str = "") -> None:
        super().__init__(message)
        self.value = value


@dataclass
class Recorded:
    """Stands for the module `pynvml`, with what it answered."""

    cards: list[dict[str, object]]
    refusal: Refusal | None = None
    """Of its beginning."""
    is_old: bool = False
    NVMLError = Refusal
    nvmlMemory_v2 = 2
    open_sessions: int = 0

    def nvmlInit(self) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.open_sessions += 1

    def nvmlShutdown(self) -> None:
        self.open_sessions -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, object]:
        return self.cards[index]

    def nvmlDeviceGetName(self, handle: dict[str, object]) -> object:
        return handle["name"]

    def nvmlDeviceGetUUID(self, handle: dict[str, object]) -> object:
        return handle["uuid"]

    def nvmlDeviceGetPciInfo(self, handle: dict[str, object]) -> SimpleNamespace:
        return SimpleNamespace(busId=handle["busId"])

    def nvmlDeviceGetMemoryInfo(self, handle: dict[str, object], version: int = 1) -> SimpleNamespace:
        if version == self.nvmlMemory_v2 and self.is_old:
            raise Refusal
        return SimpleNamespace(total=handle["total"], reserved=handle["reserved"])


H200: dict[str, object] = {
    # As recorded with driver 580.159.04; CUDA shows 139.80 GiB of it.
    "name": "NVIDIA H200",
    "total": 150_754_820_096,
    "reserved": 644_939_776,
    "busId": "00000000:00:06.0",
    "uuid": "GPU-d5c1d944-f0f5-c609-61e4-ab51c4e56d4a",
}
H200_CSV = "0, NVIDIA H200, 143771, 616, 00000000:00:06.0, GPU-d5c1d944-f0f5-c609-61e4-ab51c4e56d4a\n"
H200_DEVICE = Device("nvidia", 0, "NVIDIA H200", 139.8, "0000:00:06.0", str(H200["uuid"]))

MI300X = {
    "gpu": 0,
    "asic": {"market_name": "AMD Instinct MI300X", "vendor_id": "0x1002", "target_graphics_version": "gfx942"},
    "bus": {"bdf": "0000:0C:00.0", "max_pcie_width": 16},
    "vram": {"type": "HBM3", "vendor": "N/A", "size": {"value": 196_592, "unit": "MB"}},
}


def devices(title: str, gib: float, count: int, uuid: str = "GPU-{}") -> tuple[Device, ...]:
    return tuple(
        Device("nvidia", index, title, gib, f"0000:{index:02x}:00.0", uuid.format(index)) for index in range(count)
    )


def amd(count: int) -> tuple[Device, ...]:
    cards = [{**MI300X, "gpu": index, "bus": {"bdf": f"0000:{index:02x}:00.0"}} for index in range(count)]
    return tuple(from_amd_smi(json.dumps(cards)))


H100S = devices("NVIDIA H100 80GB HBM3", 79.2, 4)


# -- what drivers say


def test_nvml_shows_an_h200_as_programs_see_it() -> None:
    nvml = Recorded([H200])
    assert from_nvml(nvml) == [H200_DEVICE]
    assert H200_DEVICE.name == "h200-141"
    assert nvml.open_sessions == 0


def test_old_drivers_and_bindings_are_understood() -> None:
    old = {**H200, "name": b"NVIDIA H200", "uuid": b"GPU-1", "busId": b"00000000:C1:00.0"}
    (device,) = from_nvml(Recorded([old], is_old=True))
    assert (device.title, device.memory_gib, device.bus_id) == ("NVIDIA H200", 140.4, "0000:c1:00.0")
    assert device.name == "h200-141"


def test_without_a_driver_there_are_no_cards() -> None:
    assert from_nvml(Recorded([], refusal=Refusal(NVML_NOT_FOUND))) == []
    assert from_nvidia_smi("No devices were found\n") == []
    assert from_amd_smi("") == from_amd_smi("ERROR: no amdgpu") == from_amd_smi("[not JSON") == []


@pytest.fixture
def smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Path]:
    """Makes `nvidia-smi` the only tool there is; it runs the given lines of shell."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def make(script: str) -> Path:
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
        return tool

    return make


@pytest.mark.parametrize(
    ("script", "trouble"),
    [
        ("echo 'NVIDIA-SMI has failed.'; exit 9", "{} ends with exit code 9: NVIDIA-SMI has failed"),
        ("echo '<html>'", "nvidia-smi names no card: <html>"),
        ("exit 0", "nvidia-smi names no card: it prints nothing"),
    ],
)
def test_a_driver_that_fails_is_named(smi: Callable[[str], Path], script: str, trouble: str) -> None:
    tool = smi(script)
    with pytest.raises(DriverFailed) as failed:
        read_nvidia_smi()
    assert str(failed.value) == trouble.format(tool)


def test_a_tool_that_works_has_no_troubles(smi: Callable[[str], Path]) -> None:
    smi(f"echo '{H200_CSV.strip()}'")
    assert read_nvidia_smi() == [H200_DEVICE]


def test_a_driver_that_nvml_cannot_use_is_named() -> None:
    with pytest.raises(DriverFailed, match=r"^NVML says: Driver Not Loaded$"):
        from_nvml(Recorded([], refusal=Refusal(9, "Driver Not Loaded")))


def test_nvidia_smi_says_the_same_as_nvml() -> None:
    assert from_nvidia_smi(H200_CSV) == [H200_DEVICE]
    (silent,) = from_nvidia_smi("1, NVIDIA L40S, [N/A], [N/A], 00000000:91:00.0, GPU-1")
    assert (silent.memory_gib, silent.name) == (0.0, None)


@pytest.mark.parametrize(
    "text",
    [
        json.dumps([MI300X]),
        json.dumps({"gpu_data": [MI300X]}, indent=4),  # since ROCm 7
        "amdsmi_interface.py:3569: SyntaxWarning: 'return' in a 'finally' block\n  return\n" + json.dumps([MI300X]),
    ],
)
def test_amd_smi_in_its_forms(text: str) -> None:
    (device,) = from_amd_smi(text)
    assert device == Device("amd", 0, "AMD Instinct MI300X", 191.98, "0000:0c:00.0")
    assert device.name == "mi300x-192"


def test_amd_smi_that_hides_something() -> None:
    (device,) = from_amd_smi(json.dumps([{"asic": "N/A", "vram": {"size": "N/A"}}]))
    assert (device.index, device.name, device.bus_id) == (0, None, "")


@pytest.mark.parametrize(
    ("title", "mib", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", 40_960, "a100-40"),
        ("NVIDIA A100-PCIE-40GB", 40_960, "a100-40"),
        ("NVIDIA A100-SXM4-80GB", 81_920, "a100-80"),
        ("NVIDIA A100 80GB PCIe", 81_920, "a100-80"),
        ("NVIDIA H100 80GB HBM3", 81_559, "h100-80"),
        ("NVIDIA H100 PCIe", 81_559, "h100-80"),
        ("NVIDIA H100 NVL", 95_830, None),
        ("NVIDIA H200", 143_771, "h200-141"),
        ("NVIDIA GH200 480GB", 97_871, None),
        ("NVIDIA B200", 183_359, "b200-180"),
        ("NVIDIA GB200", 189_471, None),
        ("NVIDIA L40S", 46_068, "l40s-48"),
        ("NVIDIA L40", 46_068, None),
        ("NVIDIA RTX 6000 Ada Generation", 49_140, "rtx6000ada-48"),
        ("NVIDIA RTX A6000", 49_140, None),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97_887, "rtxpro6000-96"),
        ("NVIDIA GeForce RTX 4090", 24_564, "rtx4090-24"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16_376, None),
        ("NVIDIA GeForce RTX 4080 SUPER", 16_376, "rtx4080-16"),
        ("NVIDIA GeForce RTX 3060", 12_288, None),
        ("Tesla T4", 15_360, "t4-16"),
        ("Tesla V100-SXM2-32GB", 32_768, "v100-32"),
        ("Tesla V100-SXM2-16GB", 16_384, None),
        ("AMD Instinct MI308X", 196_592, None),
    ],
)
def test_products_have_the_names_of_presets(title: str, mib: int, name: str | None) -> None:
    assert Device("nvidia", 0, title, round(mib / 1024, 2), "").name == name


# -- what the environment leaves


@pytest.mark.parametrize(
    ("environment", "labels", "indices"),
    [
        ({}, ["0", "1", "2", "3"], [0, 1, 2, 3]),
        ({"CUDA_VISIBLE_DEVICES": "2, 3"}, ["2", "3"], [2, 3]),
        ({"CUDA_VISIBLE_DEVICES": ""}, [], []),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, [], []),
        ({"CUDA_VISIBLE_DEVICES": "1,-1,2"}, ["1"], [1]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1,7,MIG-x"}, ["GPU-1", "7", "MIG-x"], [1, None, None]),
        ({"HIP_VISIBLE_DEVICES": "0"}, ["0", "1", "2", "3"], [0, 1, 2, 3]),
    ],
)
def test_cards_that_the_environment_leaves(
    environment: Mapping[str, str], labels: list[str], indices: list[int | None]
) -> None:
    slots = visible(H100S, environment)
    assert [slot.label for slot in slots] == labels
    assert [slot.device and slot.device.index for slot in slots] == indices


def test_rocm_counts_what_its_runtime_leaves() -> None:
    cards = amd(4)
    assert visible(cards, {"ROCR_VISIBLE_DEVICES": "2,3"}) == (Slot("0", cards[2]), Slot("1", cards[3]))
    assert visible(cards, {"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1"}) == (Slot("1", cards[3]),)
    assert visible(cards, {"CUDA_VISIBLE_DEVICES": "3"}) == (Slot("3", cards[3]),)


# -- placement

TWO = Gpu("h100-80", 2)


def test_replicas_of_one_machine_get_different_cards() -> None:
    machine = Machine(H100S)
    first, second = (machine.place(TWO, index, 2) for index in (0, 1))
    assert (first.environment, second.environment) == ({"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "2,3"})
    assert first.memory_gib == 79.2
    with pytest.raises(LaunchError, match=r"^4 x NVIDIA H100 80GB HBM3 are visible; 3 replicas of 2 need 6$"):
        machine.place(TWO, 2, 3)
    kept = Machine(H100S, {"CUDA_VISIBLE_DEVICES": "1,3,GPU-0"})
    assert kept.place(TWO).environment == {"CUDA_VISIBLE_DEVICES": "1,3"}
    with pytest.raises(LaunchError, match="2 replicas of 2 need 4"):
        kept.place(TWO, 1, 2)


def test_nothing_is_said_where_nothing_is_to_choose() -> None:
    assert Machine(H100S).place(None) == Placement()
    assert Machine(H100S[:2]).place(TWO).environment == {}
    assert Machine().place(TWO) == Placement()


def test_without_a_driver_cards_are_counted_from_0() -> None:
    assert Machine().place(TWO, 1, 2).environment == {"CUDA_VISIBLE_DEVICES": "2,3"}
    assert Machine().place(Gpu("mi300x-192", 1), 1, 2).environment == {"HIP_VISIBLE_DEVICES": "1"}
    told = Machine(environment={"CUDA_VISIBLE_DEVICES": "4,5,6,GPU-7"})
    assert told.place(TWO, 1, 2).environment == {"CUDA_VISIBLE_DEVICES": "6,GPU-7"}
    with pytest.raises(LaunchError, match=r"^no GPU is visible; 1 replica of 2 needs 2$"):
        Machine(environment={"CUDA_VISIBLE_DEVICES": ""}).place(TWO)


def test_rocm_has_its_own_variable() -> None:
    assert Machine(amd(2)).place(Gpu("mi300x-192", 1), 1, 2).environment == {"HIP_VISIBLE_DEVICES": "1"}


def test_of_mixed_cards_those_of_the_preset_are_taken() -> None:
    mixed = (Device("nvidia", 0, "Tesla T4", 14.6, ""), *H100S[1:])
    placement = Machine(mixed).place(TWO)
    assert placement.environment == {"CUDA_VISIBLE_DEVICES": "1,2", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert placement.notes == ()


def test_other_cards_than_those_of_the_preset_are_taken_with_a_word() -> None:
    placement = Machine(devices("NVIDIA H100 NVL", 93.6, 4)).place(TWO)
    assert placement.environment == {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert placement.notes == ("the preset is for 2 x h100-80, this machine shows 4 x NVIDIA H100 NVL",)


def nodes(*numbers: int) -> Mapping[str, int]:
    return {device.bus_id: number for device, number in zip(H100S, numbers, strict=True)}


def bound(numbers: Mapping[str, int], index: int, numactl: str | None = "/usr/bin/numactl") -> Placement:
    return Machine(H100S, numactl=numactl, numa=lambda device: numbers.get(device.bus_id)).place(TWO, index, 2)


def test_a_replica_is_bound_to_the_memory_next_to_its_cards() -> None:
    halves = nodes(0, 0, 1, 1)
    assert bound(halves, 1).prefix == ("/usr/bin/numactl", "--cpunodebind=1", "--membind=1")
    assert bound(halves, 1).notes == ("bound to memory node 1, where its cards are",)
    assert bound(halves, 0).prefix[1] == "--cpunodebind=0"


def test_nothing_is_bound_where_it_would_not_help() -> None:
    for numbers in (nodes(0, 0, 0, 0), nodes(0, 1, 0, 1), {}):
        assert bound(numbers, 0) == Placement(("0", "1"), {"CUDA_VISIBLE_DEVICES": "0,1"}, memory_gib=79.2)
    without = bound(nodes(0, 0, 1, 1), 0, numactl=None)
    assert without.prefix == ()
    assert without.notes == ("its cards are on memory node 0; with numactl it would be bound to it",)


def test_the_node_of_a_card_is_read_from_sysfs(tmp_path: Path) -> None:
    for address, text in (("0000:00:06.0", "1\n"), ("0000:01:00.0", "-1\n")):  # -1: the machine hides it
        (tmp_path / address).mkdir()
        (tmp_path / address / "numa_node").write_text(text)
    assert numa_node(H200_DEVICE, tmp_path) == 1
    assert numa_node(H100S[1], tmp_path) is None
    assert numa_node(H100S[2], tmp_path) is None
    assert numa_node(Device("amd", 0, "", 0, ""), tmp_path) is None


# -- which preset


@pytest.mark.parametrize(
    ("cards", "preset", "replicas"),
    [
        (H100S[:1], "gpt-oss-120b-h100-80-x1", 1),
        (H100S[:2], "gpt-oss-120b-h100-80-x2", 1),
        (H100S[:3], "gpt-oss-120b-h100-80-x2", 1),
        (H100S, "gpt-oss-120b-h100-80-x2", 2),
        (devices("NVIDIA H100 80GB HBM3", 79.2, 8), "gpt-oss-120b-h100-80-x2", 4),
        (devices("NVIDIA H200", 139.8, 8), "gpt-oss-120b-h200-141-x1", 8),
        (devices("NVIDIA A100-SXM4-40GB", 39.4, 8), "gpt-oss-120b-a100-40-x4", 2),
        (devices("NVIDIA L40S", 44.4, 1), "gpt-oss-20b-l40s-48-x1", 1),
        (devices("NVIDIA L40S", 44.4, 2), "gpt-oss-120b-l40s-48-x2", 1),
        (devices("NVIDIA GeForce RTX 4090", 23.6, 2), "gpt-oss-20b-rtx4090-24-x1", 2),
        ((*devices("NVIDIA GeForce RTX 4090", 23.6, 1), *H100S[1:2]), "gpt-oss-120b-h100-80-x1", 1),
        (amd(8), "gpt-oss-120b-mi300x-192-x1", 8),
    ],
)
def test_the_preset_for_the_cards_there_are(cards: tuple[Device, ...], preset: str, replicas: int) -> None:
    choice = choose(visible(cards, {}))
    assert choice is not None
    assert (choice.preset, choice.replicas) == (preset, replicas)
    assert choice.preset in choice.why


def test_a_choice_says_why() -> None:
    def why(cards: tuple[Device, ...]) -> str:
        choice = choose(visible(cards, {}))
        assert choice is not None
        return choice.why

    assert why(H100S) == (
        "4 x NVIDIA H100 80GB HBM3: gpt-oss-120b-h100-80-x2, 2 replicas of 2; the most replicas whose caches are roomy"
    )
    assert why(H100S[:2]) == "2 x NVIDIA H100 80GB HBM3: gpt-oss-120b-h100-80-x2, for exactly these"
    assert why(H100S[:3]) == "3 x NVIDIA H100 80GB HBM3: gpt-oss-120b-h100-80-x2, for 2, 1 left over"
    assert why(devices("NVIDIA H200", 139.8, 2)) == "2 x NVIDIA H200: gpt-oss-120b-h200-141-x1, 2 replicas of 1"


@pytest.mark.parametrize("gpu", ["h100-80", "h200-141", "b200-180"])
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_the_planner_says_the_same(gpu: str, count: int) -> None:
    """On cards with a preset for what it recommends."""
    titles = {"h100-80": "NVIDIA H100", "h200-141": "NVIDIA H200", "b200-180": "NVIDIA B200"}
    choice = choose(visible(devices(titles[gpu], GPUS[gpu].memory_gib, count), {}))
    planned = plan(Question("openai/gpt-oss-120b", gpu, count))
    assert choice is not None
    assert planned.is_preset
    assert (choice.preset, choice.replicas) == (planned.preset, planned.chosen.layout.replicas)


def test_cards_without_a_preset_choose_none() -> None:
    assert choose(()) is None
    assert choose(visible(devices("NVIDIA GeForce RTX 3060", 12.0, 2), {})) is None
    assert choose(visible(devices("Tesla T4", 14.6, 2), {})) is None
    assert choose((Slot("MIG-1", None),)) is None


def test_every_model_that_may_be_chosen_has_a_preset() -> None:
    assert set(MODELS) == {preset.model for preset in presets.load_all().values() if preset.gpu and preset.model}
