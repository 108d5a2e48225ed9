"""Presets: model x hardware settings of a replica, as data. One TOML file is one preset; its name is the file's name.

A preset has one or more profiles. `spec` holds exactly the flags of the specification and nothing else, for comparison;
`recommended` is what to run: it may correct them, and its `why` says what and for which reason. `latency` is for few
users who wait, `throughput` for many who do not. Unknown keys are refused. The flags that the gateway relies on are not
repeated here: `workers.command_line` adds them to every profile but `spec`. What only some versions of vLLM want is an
adaptation (`versions` knows what each of them understands).
"""

from __future__ import annotations

import tomllib
from importlib import resources
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct, structs

from workers.presets.versions import Version, VersionError, parse_version

ProfileName = Literal["spec", "recommended", "latency", "throughput"]
DEFAULT_PROFILE: ProfileName = "recommended"
ANY_GPU = "any"
"""Name of the GPU in the preset for whatever there is."""

FlagValue = bool | int | float | str
"""`true` is a bare flag; anything else follows its flag as one word."""


class PresetError(Exception):
    """No such preset or profile, or its file cannot be used. The message is one clear line for the person who asked."""


class Profile(Struct, frozen=True, forbid_unknown_fields=True):
    """`[profiles.NAME]`: one way to run the preset. Flags keep the order of the file."""

    why: str
    """Where these flags come from, and the reason for each one that differs from the specification."""
    flags: dict[str, FlagValue] = {}
    """Flag without its dashes -> value."""
    environment: dict[str, str] = {}


class Adaptation(Struct, frozen=True, forbid_unknown_fields=True):
    """`[[adaptations]]`: what vLLM from `since` until before `below` wants beside, in every profile but `spec`."""

    since: str
    below: str
    why: str
    environment: dict[str, str] = {}
    without: list[str] = []
    """Flags of newer versions that `environment` stands for; they are left out."""

    def concerns(self, version: Version) -> bool:
        return parse_version(self.since) <= version < parse_version(self.below)


class Gpu(Struct, frozen=True, forbid_unknown_fields=True):
    """`[gpu]`: what one replica occupies."""

    name: str
    """As in preset names and `warmlane plan`, e.g. `h100-80`."""
    count: Annotated[int, Meta(ge=1)]


class Measurement(Struct, frozen=True, forbid_unknown_fields=True):
    """`[[measured]]`: one start of this preset on real hardware; what was not measured is absent."""

    hardware: str
    vllm: str
    """Version."""
    flags: str
    """Flags of that run where they differ from the profile."""
    max_num_batched_tokens: int | None = None
    """Of that run: the overhead depends on it."""
    start_seconds: float | None = None
    weights_gib: float | None = None
    """Of one GPU, as "Model loading took" says."""
    overhead_gib: float | None = None
    """Of one GPU: what was used beside weights and KV cache."""
    kv_cache_gib: float | None = None
    kv_cache_tokens: int | None = None
    """As vLLM reports it at start: its concurrency times `max-model-len`, not the raw capacity."""
    prefill_tokens_per_second: float | None = None
    decode_tokens_per_second: float | None = None
    """One stream."""


class Preset(Struct, frozen=True, forbid_unknown_fields=True):
    title: str
    program: Literal["vllm", "embedded"]
    """`embedded` is the replica without GPU that comes with Warmlane (`workers.sim_replica`)."""
    model: str
    """What is loaded: a name on the model hub, or a directory when it starts with a dot or a slash. Empty: `--model`
    names one."""
    profiles: dict[ProfileName, Profile]
    served_model_name: str | None = None
    """Name in the API; the model's own when absent."""
    model_source: str | None = None
    """Where a model directory comes from, for the message when it is not there."""
    gpu: Gpu | None = None
    """`None`: runs on the CPU."""
    adaptations: list[Adaptation] = []
    measured: list[Measurement] = []

    @property
    def model_name(self) -> str:
        """What clients write in `model`."""
        return self.served_model_name or self.model

    @property
    def has_local_model(self) -> bool:
        return self.model.startswith((".", "/"))

    def profile(self, name: str = DEFAULT_PROFILE, version: Version | None = None) -> Profile:
        """With what this version of vLLM wants; with what any version may want when it is not known."""
        for known, profile in self.profiles.items():
            if known == name:
                return profile if known == "spec" else self.adapted(profile, version)
        raise PresetError(f"this preset has no profile {name!r}; it has: {', '.join(self.profiles)}")

    def adapted(self, profile: Profile, version: Version | None) -> Profile:
        flags, environment = dict(profile.flags), dict(profile.environment)
        for one in self.adaptations:
            if one.concerns(version) if version else not one.without:
                environment |= one.environment
                flags = {name: value for name, value in flags.items() if name not in one.without}
        return structs.replace(profile, flags=flags, environment=environment)


def names() -> list[str]:
    """Names of all presets, sorted."""
    files = (entry.name for entry in resources.files(__name__).iterdir())
    return sorted(file.removesuffix(".toml") for file in files if file.endswith(".toml"))


def load(name: str) -> Preset:
    """The preset with this name, in capitals or not. Raises `PresetError`."""
    file = name.lower()
    if file not in names():
        raise PresetError(f"unknown preset {name!r}; presets: {', '.join(names())}")
    return parse(resources.files(__name__).joinpath(f"{file}.toml").read_text(encoding="utf-8"), file)


def load_all() -> dict[str, Preset]:
    return {name: load(name) for name in names()}


def parse(text: str, source: str) -> Preset:
    """Read a preset from TOML. Raises `PresetError` with the source and the path of the offending key."""
    try:
        preset = msgspec.convert(tomllib.loads(text), Preset)
        for adaptation in preset.adaptations:
            for text_of_version in (adaptation.since, adaptation.below):
                parse_version(text_of_version)
        return preset
    except (msgspec.ValidationError, VersionError) as error:
        raise PresetError(f"preset {source}: {error}") from error
    except ValueError as error:  # also a number of some thousand digits
        raise PresetError(f"preset {source}: not TOML: {error}") from error
