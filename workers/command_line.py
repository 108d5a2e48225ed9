"""The exact command of one replica, from a preset: flags, environment, address; and the flags the gateway relies on."""

from __future__ import annotations

import ipaddress
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from workers.placement import Placement
from workers.planner.models import ModelError, load
from workers.presets import DEFAULT_PROFILE, FlagValue, Preset
from workers.presets.versions import NEWEST, Version, behaviour_of

DEFAULT_HOST = "127.0.0.1"
"""vLLM's own key guards only some of its paths, so a replica listens to the gateway's machine unless told otherwise."""
DEFAULT_PORT = 8101
EVENTS_PORT_OFFSET = 10_000
"""KV events on the HTTP port plus this, their replay on plus twice this (minus, where that exceeds 65,535)."""
EVENTS_FLAG = "kv-events-config"

GATEWAY_FLAGS: dict[str, FlagValue] = {
    # Recipes for benchmarks switch it off; without it routing has nothing to gain.
    "enable-prefix-caching": True,
    # Reports cached_tokens in `usage`, which the gateway compares with its prediction.
    "enable-prompt-tokens-details": True,
    # One algorithm on all replicas, of the kind that any language can recompute (the default hashes Python pickles).
    "prefix-caching-hash-algo": "sha256_cbor",
    # The gateway asks these several times a second.
    "disable-access-log-for-endpoints": "/health,/metrics,/ping,/v1/models",
}
HYBRID_ONLY = ("VLLM_PREFIX_CACHE_RETENTION_INTERVAL",)
"""Variables that vLLM (seen: 0.24) refuses to start with where all layers of the model keep the whole context."""
NOTHING = Placement()


class CommandLine(NamedTuple):
    argv: tuple[str, ...]
    environment: dict[str, str]
    """To be added to the inherited one."""
    flags: tuple[str, ...] = ()
    """The engine's flags as words, those of the user last; without address and names."""
    notes: tuple[str, ...] = ()
    """For the person who asked: what is missing, and why."""

    def __str__(self) -> str:
        """As typed into a shell."""
        return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in self.environment.items()), self.shell])

    @property
    def shell(self) -> str:
        return shlex.join(self.argv)


def command_line(
    preset: Preset,
    profile: str = DEFAULT_PROFILE,
    *,
    host: str = DEFAULT_HOST,
    port: int = DEFAULT_PORT,
    vllm: str = "vllm",
    version: Version = NEWEST,
    model: str | None = None,
    placement: Placement = NOTHING,
    extra: Sequence[str] = (),
) -> CommandLine:
    """What to execute for one replica of `preset`. Raises `PresetError` when it has no such profile.

    `version` is that of the executable `vllm`; `model` replaces the preset's own; `extra` flags go last, where vLLM
    lets the last one win.
    """
    chosen = preset.profile(profile, version)
    flags, environment, notes = dict(chosen.flags), dict(chosen.environment), placement.notes
    if model is not None and not is_known_hybrid(model):
        environment = {name: value for name, value in environment.items() if name not in HYBRID_ONLY}
    address = ["--host", host, "--port", str(port)]
    if preset.program == "embedded":
        argv = [sys.executable, "-m", "workers.sim_replica", "--model", model or preset.model_name]
    else:
        argv = [*placement.prefix, vllm, "serve", model or preset.model]
        if preset.served_model_name:
            address += ["--served-model-name", preset.served_model_name]
        if profile != "spec":
            flags, more = with_gateway_flags(flags, may_be_hybrid(model or preset.model), version, host, port)
            notes += more
    words = flag_words(flags)
    return CommandLine(
        argv=(*argv, *words, *address, *extra),
        environment={**environment, **placement.environment},
        flags=(*words, *extra),
        notes=notes,
    )


def with_gateway_flags(
    flags: Mapping[str, FlagValue], is_hybrid: bool, version: Version, host: str, port: int
) -> tuple[dict[str, FlagValue], tuple[str, ...]]:
    """Flags of a profile and those that the gateway relies on; where KV events would do harm, a note in their place."""
    found = {**flags, **GATEWAY_FLAGS}
    if is_hybrid and behaviour_of(version).events_end_hybrid_cache:
        return found, (
            f"KV events stay off: in vLLM {version} they switch its hybrid KV cache off, which costs half of it; 0.20 "
            "can do both",
        )
    ranks = flags.get("data-parallel-size", 1)
    if ranks != 1 and is_loopback(host):
        return found, (
            "KV events stay off: with data parallelism vLLM publishes them on TCP only, which it cannot keep to this "
            "machine; --host with another address switches them on",
        )
    return {**found, EVENTS_FLAG: json.dumps(kv_events(host, port))}, ()


def may_be_hybrid(model: str) -> bool:
    """Whether layers of several kinds share the cache; a model whose config.json is not at hand may."""
    try:
        return load(model).is_hybrid
    except ModelError:
        return True


def is_known_hybrid(model: str) -> bool:
    try:
        return load(model).is_hybrid
    except ModelError:
        return False


def flag_words(flags: Mapping[str, FlagValue]) -> list[str]:
    words: list[str] = []
    for name, value in flags.items():
        if value is True:
            words.append(f"--{name}")
        elif value is False:
            words.append(f"--no-{name}")
        else:
            words += [f"--{name}", str(value)]
    return words


def kv_events(host: str, port: int) -> dict[str, object]:
    """vLLM's `--kv-events-config`. The events carry prompts as token ids and have no key, so they follow the HTTP host.

    vLLM binds TCP to all interfaces or not at all; on loopback a socket file that only its owner may open stands in.
    """
    if is_loopback(host):
        endpoints = [f"ipc:///tmp/warmlane-{os.getuid()}-kv-{kind}-{port}" for kind in ("events", "replay")]
    else:
        offset = EVENTS_PORT_OFFSET if port + 2 * EVENTS_PORT_OFFSET <= 65_535 else -EVENTS_PORT_OFFSET
        endpoints = [f"tcp://*:{port + steps * offset}" for steps in (1, 2)]
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": endpoints[0],
        "replay_endpoint": endpoints[1],
    }


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def base_url(host: str, port: int) -> str:
    """Where this machine reaches a replica that listens on `host`."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{reachable}:{port}"
