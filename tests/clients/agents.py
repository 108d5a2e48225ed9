"""Coding agents, driven without a terminal: how each is pointed at an address, and how its report is read.

Every agent gets a home of its own and an empty directory to work in. It must offer its shell as a tool, run what the
replica calls for, hand the output back and repeat the text that follows. Only aider has no tools: it reads edits from
the text.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.clients.matrix import AIDER, installed, packaged

PROMPT = "Say two words with the shell."
EDIT_PROMPT = "Write a greeting into greeting.txt."


@dataclass(frozen=True)
class Visit:
    """One run of an agent."""

    url: str
    model: str
    home: Path
    work: Path


@dataclass(frozen=True)
class Command:
    argv: list[str]
    environment: dict[str, str]


@dataclass(frozen=True)
class Agent:
    name: str
    command: Callable[[Visit], Command]
    told: Callable[[str, Visit], list[Any]]
    """Its report, less times and ids."""
    model: str = "m"


def lines_of(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


# -- Codex CLI


def codex(visit: Visit) -> Command:
    home = visit.home / ".codex"
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(
        f"""\
model = "{visit.model}"
model_provider = "warmlane"
approval_policy = "never"
sandbox_mode = "danger-full-access"

[model_providers.warmlane]
name = "Warmlane"
base_url = "{visit.url}/v1"
wire_api = "responses"
env_key = "WARMLANE_KEY"
request_max_retries = 0
stream_max_retries = 0

[analytics]
enabled = false
"""
    )
    argv = [packaged("@openai/codex-linux-*/vendor/*/bin/codex"), "exec", "--json", "--skip-git-repo-check", PROMPT]
    return Command(argv, {"CODEX_HOME": str(home), "WARMLANE_KEY": "key"})


def codex_told(output: str, visit: Visit) -> list[Any]:
    told: list[Any] = []
    for line in lines_of(output):
        if line["type"] == "item.completed":
            item = line["item"]
            told.append([item.get(key) for key in ("type", "aggregated_output", "exit_code", "text", "message")])
        elif line["type"] in ("error", "turn.failed"):
            told.append([line["type"], line.get("message") or line["error"]["message"]])
    return told


# -- Claude Code


def claude_code(visit: Visit) -> Command:
    argv = [packaged("@anthropic-ai/claude-code-linux-*/claude"), "-p", PROMPT, "--model", visit.model]
    argv += ["--output-format", "stream-json", "--verbose", "--allowedTools", "Bash"]
    environment = {
        "ANTHROPIC_BASE_URL": visit.url,
        "ANTHROPIC_AUTH_TOKEN": "key",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": visit.model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_RETRIES": "0",
        "CLAUDE_CONFIG_DIR": str(visit.home / ".claude"),
        "DISABLE_AUTOUPDATER": "1",
    }
    return Command(argv, environment)


def claude_code_told(output: str, visit: Visit) -> list[Any]:
    told: list[Any] = []
    for line in lines_of(output):
        if line["type"] in ("assistant", "user"):
            blocks = line["message"]["content"]
            told += [[block.get(key) for key in ("type", "text", "name", "input", "content")] for block in blocks]
        elif line["type"] == "result":
            told.append(["result", line["subtype"], line["is_error"], line.get("result")])
    return told


# -- opencode


def opencode(visit: Visit) -> Command:
    model = {"name": visit.model, "tool_call": True, "limit": {"context": 32_768, "output": 1_024}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Warmlane",
        "options": {"baseURL": f"{visit.url}/v1", "apiKey": "key"},
        "models": {visit.model: model},
    }
    config = {
        "provider": {"warmlane": provider},
        "model": f"warmlane/{visit.model}",
        "small_model": f"warmlane/{visit.model}",
        "autoupdate": False,
        "share": "disabled",
        "permission": "allow",
    }
    argv = [packaged("opencode-linux-*/bin/opencode"), "run", "--format", "json", PROMPT]
    environment = {
        "OPENCODE_CONFIG_CONTENT": json.dumps(config),
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
    }
    return Command(argv, environment)


def opencode_told(output: str, visit: Visit) -> list[Any]:
    told: list[Any] = []
    for line in lines_of(output):
        part = line.get("part") or {}
        if line["type"] == "text":
            told.append(["text", part["text"]])
        elif line["type"] == "tool_use":
            told.append(["tool", part["tool"], part["state"]["input"], part["state"].get("output")])
        elif line["type"] == "error":
            told.append(["error", line["error"]["name"], line["error"]["data"].get("message")])
    return told


# -- aider


def aider(visit: Visit) -> Command:
    # A list of prices that is there is not fetched.
    prices = visit.home / ".aider" / "caches" / "model_prices_and_context_window.json"
    prices.parent.mkdir(parents=True, exist_ok=True)
    prices.write_text("{}")
    argv = [installed(AIDER), "--model", f"openai/{visit.model}"]
    argv += ["--edit-format", "whole", "--no-git", "--yes-always", "--no-pretty", "--no-show-model-warnings"]
    argv += ["--no-check-update", "--analytics-disable", "--no-gitignore", "--map-tokens", "0", "--no-detect-urls"]
    argv += ["--message", EDIT_PROMPT, "greeting.txt"]
    environment = {
        "OPENAI_API_BASE": f"{visit.url}/v1",
        "OPENAI_API_KEY": "key",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    return Command(argv, environment)


def aider_told(output: str, visit: Visit) -> list[Any]:
    written = visit.work / "greeting.txt"
    errors = [line for line in output.splitlines() if line.startswith("litellm.")]
    return [written.read_text() if written.exists() else None, *errors]


AGENTS = (
    Agent("Codex CLI", codex, codex_told),
    Agent("Claude Code", claude_code, claude_code_told),
    Agent("opencode", opencode, opencode_told),
    Agent("aider", aider, aider_told, model="edits"),
)
