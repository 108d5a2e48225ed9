"""Imports point one way, and the core stays pure: read from the source, module by module."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in ("gateway", "workers", "loadtests")
    for path in sorted((ROOT / package).rglob("*.py"))
}
CORE = sorted(name for name in MODULES if name.startswith("gateway.core"))
IMPURE = {"asyncio", "httpx", "logging", "multiprocessing", "os", "prometheus_client", "random", "redis", "secrets"} | {
    "selectors",
    "socket",
    "subprocess",
    "threading",
    "time",
    "urllib",
}
"""Clock, chance, I/O, logs: the core gets what they would give as arguments."""


def imports(name: str) -> Iterator[str]:
    """Full names of what a module imports: `from a import b` gives a.b where that is a module, else a."""
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import"
            assert node.module is not None
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else node.module


def below(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def importers(package: str, of: str) -> set[str]:
    """Modules of `package` that import anything of `of`."""
    return {name for name in MODULES if below(name, package) and any(below(one, of) for one in imports(name))}


def test_there_is_something_to_check() -> None:
    assert {"gateway.core.router", "gateway.core.policy", "gateway.core.model"} <= set(CORE)


@pytest.mark.parametrize("name", CORE)
def test_core_imports_only_the_standard_library_xxhash_and_itself(name: str) -> None:
    for imported in imports(name):
        top = imported.split(".")[0]
        assert below(imported, "gateway.core") or top == "xxhash" or top in sys.stdlib_module_names, imported
        assert top not in IMPURE, imported


@pytest.mark.parametrize("name", CORE)
def test_core_neither_awaits_nor_has_globals(name: str) -> None:
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    forbidden = (ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith, ast.Await, ast.Global, ast.Nonlocal)
    found = [f"{type(node).__name__} in line {node.lineno}" for node in ast.walk(tree) if isinstance(node, forbidden)]
    assert not found
    called = [node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    assert not {"open", "print", "input"} & set(called)


@pytest.mark.parametrize(
    ("package", "of"),
    [
        ("gateway.proxy", "gateway.feeds"),
        ("gateway.feeds", "gateway.proxy"),
        ("gateway.core", "gateway.proxy"),
        ("gateway.core", "gateway.feeds"),
        ("gateway.core", "gateway.telemetry"),
        ("gateway.core", "gateway.config"),
        ("gateway.core", "gateway.prompt"),
    ],
)
def test_imports_point_one_way(package: str, of: str) -> None:
    assert importers(package, of) == set()


def test_nobody_imports_the_app_but_the_command_line() -> None:
    """Load tests may: they stand outside and drive the whole."""
    wiring = {"gateway.app", "gateway.assembly", "gateway.control", "gateway.server"}
    everybody = {name for of in wiring for package in ("gateway", "workers") for name in importers(package, of)}
    commands = {"gateway.cli", "gateway.up"}
    assert everybody - wiring <= {*commands, "gateway.several.worker"}  # which is a process as `serve` is
