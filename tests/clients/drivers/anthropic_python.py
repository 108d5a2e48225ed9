"""A tool-calling turn with anthropic's Python SDK."""

from __future__ import annotations

import sys
from typing import Any

import anthropic
from transcript import CITY, QUESTION, RESULT, TIMEOUT_SECONDS, Transcript, lead

TOOL: Any = {"name": "weather", "strict": True, "input_schema": CITY}

client = anthropic.Anthropic(base_url=sys.argv[1], api_key="key", timeout=TIMEOUT_SECONDS)


def talk(scenario: dict[str, Any], transcript: Transcript) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    answer = say(scenario, messages, {"type": "any"}, transcript)
    call = next(block for block in answer if block["type"] == "tool_use")
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": RESULT}
    messages += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    say(scenario, messages, {"type": "none"}, transcript)


def say(scenario: dict[str, Any], messages: list[Any], choice: Any, transcript: Transcript) -> list[dict[str, Any]]:
    asked: dict[str, Any] = {
        "model": scenario["model"],
        "messages": messages,
        "tools": [TOOL],
        "tool_choice": choice,
        "max_tokens": 60,
        # The SDK of today no longer names it, vLLM still takes it.
        "extra_body": {"temperature": scenario["temperature"]},
    }
    patient = client.with_options(max_retries=scenario["retries"])
    if scenario["stream"]:
        with patient.messages.stream(**asked) as stream:
            for event in stream:
                if event.type == "text":
                    transcript.add("text", event.text)
                elif event.type == "input_json":
                    transcript.add("arguments", event.partial_json)
            reply = stream.get_final_message()
    else:
        reply = patient.messages.create(**asked)
    blocks = [block.model_dump(exclude_none=True) for block in reply.content]
    for block in blocks:
        transcript.add("block", {key: block[key] for key in ("type", "text", "name", "input") if key in block})
    transcript.add("finish", reply.stop_reason)
    transcript.add("tokens", reply.usage.output_tokens)
    return [{key: block[key] for key in ("type", "id", "name", "input") if key in block} for block in blocks]


lead(talk)
