"""Bodies as agents and odd clients send them: forwarded byte for byte, whatever the gateway makes of them.

O-15: the gateway reads what it needs to route, and judges nothing else. O-16: prompts of every shape, and none.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import httpx
import pytest

from tests.proxy.conftest import running_gateway
from tests.proxy.scripted import Exchange, ScriptedReplica

PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def called(arguments: Any) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": "run", "arguments": arguments}}


def chat(*messages: Any, **fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"model": "m", "messages": list(messages), **fields}


def responses(given: Any, **fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"model": "m", "input": given, **fields}


def messages(*turns: Any, **fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/messages", {"model": "m", "max_tokens": 9, "messages": list(turns), **fields}


USER = {"role": "user", "content": "list the files"}
AGENT_BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    # chat completions: VS Code, opencode, Continue, tool loops
    "tool without parameters": chat(USER, tools=[function("run")]),
    "parameters null": chat(USER, tools=[function("run", parameters=None)]),
    "content null with tool calls": chat(USER, {"role": "assistant", "content": None, "tool_calls": [called("{}")]}),
    "no content with tool calls": chat(USER, {"role": "assistant", "tool_calls": [called("{}")]}),
    "arguments null": chat(USER, {"role": "assistant", "content": None, "tool_calls": [called(None)]}),
    "arguments as an object": chat(USER, {"role": "assistant", "content": "", "tool_calls": [called({"a": 1})]}),
    "tool role": chat(USER, {"role": "tool", "tool_call_id": "call_1", "content": "a.txt"}),
    "tool role with parts": chat(USER, {"role": "tool", "content": [{"type": "text", "text": "a.txt"}]}),
    "tool role without content": chat(USER, {"role": "tool", "tool_call_id": "call_1", "content": None}),
    "developer role": chat({"role": "developer", "content": "Be brief."}, USER),
    "role of the future": chat({"role": "critic", "content": "Hm."}, USER),
    "custom tool": chat(USER, tools=[{"type": "custom", "custom": {"name": "patch", "format": {"type": "text"}}}]),
    "tools null": chat(USER, tools=None, tool_choice=None),
    "tools as a string": chat(USER, tools="none"),
    "reasoning effort": chat(USER, reasoning_effort="minimal", verbosity="low"),
    "reasoning effort null": chat(USER, reasoning_effort=None),
    "legacy functions": chat(USER, functions=[{"name": "run"}], function_call="auto"),
    "cache control on a part": chat(
        {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]}
    ),
    "prediction and metadata": chat(
        USER, prediction={"type": "content", "content": "x"}, metadata={"a": "b"}, store=False, service_tier="auto"
    ),
    # Responses: Codex
    "codex turn": responses(
        [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "list the files"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA", "content": None},
            {"type": "function_call", "name": "shell", "arguments": '{"command":["ls"]}', "call_id": "call_1"},
            {"type": "function_call_output", "call_id": "call_1", "output": "a.txt"},
            {"type": "custom_tool_call", "status": "completed", "call_id": "c2", "name": "patch", "input": "*** Begin"},
            {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "ok"}]},
            {"type": "local_shell_call", "call_id": "c3", "action": {"type": "exec", "command": ["ls"]}},
        ],
        instructions="You are a coding agent.",
        tools=[
            {"type": "function", "name": "shell", "strict": False, "parameters": {"type": "object"}},
            {
                "type": "custom",
                "name": "patch",
                "format": {"type": "grammar", "syntax": "lark", "definition": "start: a"},
            },
            {"type": "web_search"},
            {"type": "namespace", "name": "mcp", "tools": []},
        ],
        tool_choice="auto",
        parallel_tool_calls=False,
        reasoning={"effort": "high", "summary": "auto"},
        include=["reasoning.encrypted_content"],
        prompt_cache_key="0199",
        client_metadata={"x-codex-window-id": "w"},
        text={"verbosity": "low"},
        store=False,
    ),
    "responses with a string": responses("hello", instructions=None),
    "responses with a picture": responses(
        [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]
    ),
    "responses with nothing": responses([]),
    # Messages: Claude Code
    "claude turn": messages(
        {
            "role": "user",
            "content": [{"type": "text", "text": "list", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "", "signature": "Eq"},
                {"type": "redacted_thinking", "data": "x"},
            ],
        },
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t1", "name": "Bash", "input": {"command": "ls"}}],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "a"}]}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t2", "is_error": True}]},
        system=[{"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral"}}],
        tools=[{"name": "Bash", "input_schema": {"type": "object"}}, {"type": "bash_20250124", "name": "bash"}],
        thinking={"type": "adaptive"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "high"},
        metadata={"user_id": "user_1"},
        stream=True,
    ),
    "claude system as a string": messages(USER, system="Be brief."),
    "claude system null": messages(USER, system=None, tools=None, thinking=None),
    "claude tool result as a string": messages(
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "a.txt"}]}
    ),
    "claude document": messages(
        {"role": "user", "content": [{"type": "document", "source": {"type": "base64", "data": "JVBERi0="}}]}
    ),
}

PROMPTS: dict[str, Any] = {
    "empty": "",
    "token ids": [1, 2, 3],
    "batch of token ids": [[1], [2, 3]],
    "batch of texts": ["a", "b"],
    "null": None,
    "empty list": [],
    "list of an empty list": [[]],
    "empty texts": ["", ""],
    "text and token ids": ["a", [1]],
    "token ids and text": [[1], "a"],
    "token ids with a text among them": [1, "a"],
    "texts in lists": [["a"]],
    "fractions": [1.5, 2.0],
    "booleans": [True],
    "nulls": [None],
    "an id below zero": [-1],
    "an id beyond every vocabulary": [2**70],
    "deep": [[[1]]],
    "number": 7,
    "object": {"prompt_token_ids": [1, 2]},
    "batch of objects": [{"prompt": "a"}],
}
NO_TEXT: dict[str, list[Any]] = {
    "no messages": [],
    "empty text": [{"role": "user", "content": ""}],
    "content null": [{"role": "user", "content": None}],
    "no parts": [{"role": "user", "content": []}],
    "picture": [{"role": "user", "content": [PICTURE]}],
    "two pictures": [{"role": "user", "content": [PICTURE, PICTURE]}],
    "parts of text and picture": [{"role": "user", "content": [{"type": "text", "text": "what?"}, PICTURE]}],
    "sound": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "UklG", "format": "wav"}}]}],
    "part of the future": [{"role": "user", "content": [{"type": "smell", "smell": {"intensity": 3}}]}],
    "part without a type": [{"role": "user", "content": [{}]}],
    "parts as strings": [{"role": "user", "content": ["a", "b"]}],
    "content as an object": [{"role": "user", "content": {"text": "a"}}],
    "content as a number": [{"role": "user", "content": 7}],
    "message as a string": ["hello"],
    "message null": [None],
}

# Fields that no SDK knows, as every release of vLLM adds some, and numbers that a re-encoding would change.
ODD_ANSWER = (
    b'{"id": "x","object":"chat.completion" ,"created":1.0,"model":"m","choices":[{"index":0,"message":{"role":'
    b'"assistant","content":null,"invented":[1e3, 0.10],"tool_calls":[{"type":"telepathy"}]},"finish_reason":'
    b'"mood_changed","token_ids":[1,2]}],"usage":{"prompt_tokens":7,"completion_tokens":2,"total_tokens":9,'
    b'"prompt_tokens_details":{"cached_tokens":4,"smelled_tokens":1}},"kv_transfer_params":{"a":12345678901234567890123}'
    b',"prompt_routed_experts":null}\n'
)


async def answer_oddly(exchange: Exchange) -> None:
    await exchange.answer(ODD_ANSWER)


async def test_what_agents_send_and_get_passes_unchanged(mode: str) -> None:
    """O-15."""
    await pass_unchanged(mode, AGENT_BODIES)


async def test_prompts_of_every_shape_pass_unchanged(mode: str) -> None:
    """O-16: the replica says which of them it takes."""
    prompts = {name: ("/v1/completions", {"model": "m", "prompt": prompt}) for name, prompt in PROMPTS.items()}
    await pass_unchanged(mode, {**prompts, "absent": ("/v1/completions", {"model": "m"})})


async def test_messages_without_text_pass_unchanged(mode: str) -> None:
    """O-16."""
    await pass_unchanged(mode, {name: chat(*turns) for name, turns in NO_TEXT.items()})


async def pass_unchanged(mode: str, bodies: dict[str, tuple[str, dict[str, Any]]]) -> None:
    async with ScriptedReplica(answer_oddly).running() as replica, running_gateway(replica, mode=mode) as gateway:
        for name, (path, body) in bodies.items():
            # Spaces as no encoder of ours writes them: a body that was read and written again shows.
            content = json.dumps(body, separators=(" , ", " :  "), ensure_ascii=False).encode()
            response = await gateway.client.post(path, content=content)
            assert (response.status_code, response.content) == (200, ODD_ANSWER), name
            assert replica.exchanges[-1].body == content, name
        assert len(replica.exchanges) == len(bodies)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/chat/completions", {"messages": NO_TEXT["content null"]}),
        ("/v1/chat/completions", {"messages": NO_TEXT["picture"]}),
        ("/v1/chat/completions", {"messages": NO_TEXT["message as a string"]}),
        ("/v1/completions", {"prompt": ""}),
        ("/v1/completions", {"prompt": []}),
        ("/v1/completions", {}),
    ],
    ids=["no messages", "content null", "picture", "odd message", "empty prompt", "no token ids", "no prompt"],
)
async def test_requests_without_text_have_no_home(path: str, body: dict[str, Any]) -> None:
    """O-16: 200 of them are spread within 20 %."""
    replicas = [ScriptedReplica() for _ in range(4)]
    async with replicas[0].running(), replicas[1].running(), replicas[2].running(), replicas[3].running():
        async with running_gateway(*replicas) as gateway:
            sent: Counter[str] = Counter()
            for _ in range(200):
                response = await gateway.client.post(path, json={"model": "m", **body})
                sent[served_by(response)] += 1
    assert len(sent) == 4
    assert max(sent.values()) <= 1.2 * 200 / 4


def served_by(response: httpx.Response) -> str:
    assert response.status_code == 200
    return response.headers["x-warmlane-replica"]
