"""A tool-calling turn with openai-python, over chat completions."""

from __future__ import annotations

import sys
from typing import Any

import openai
from transcript import CITY, QUESTION, RESULT, TIMEOUT_SECONDS, Transcript, lead

# `strict` makes vLLM hold even a random model to the schema.
TOOL: Any = {"type": "function", "function": {"name": "weather", "strict": True, "parameters": CITY}}

client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="key", timeout=TIMEOUT_SECONDS)


def talk(scenario: dict[str, Any], transcript: Transcript) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    call = say(scenario, messages, "required", transcript)
    messages += [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": RESULT},
    ]
    say(scenario, messages, "none", transcript)


def say(scenario: dict[str, Any], messages: list[Any], choice: Any, transcript: Transcript) -> dict[str, Any]:
    """One request. The tool call of its answer, if any."""
    asked: dict[str, Any] = {
        "model": scenario["model"],
        "messages": messages,
        "tools": [TOOL],
        "tool_choice": choice,
        "temperature": scenario["temperature"],
        "max_tokens": 60,
    }
    patient = client.with_options(max_retries=scenario["retries"])
    if scenario["stream"]:
        options: Any = {"stream": True, "stream_options": {"include_usage": True}}
        return read(patient.chat.completions.create(**asked, **options), transcript)
    reply = patient.chat.completions.create(**asked)
    message = reply.choices[0].message
    transcript.add("text", message.content)
    transcript.add("finish", reply.choices[0].finish_reason)
    transcript.add("tokens", reply.usage and reply.usage.completion_tokens)
    calls = [call.model_dump() for call in message.tool_calls or []]
    for call in calls:
        transcript.add("call", call["function"])
    return calls[0] if calls else {}


def read(stream: openai.Stream[Any], transcript: Transcript) -> dict[str, Any]:
    call: dict[str, Any] = {}
    for event in stream:
        if event.usage:
            transcript.add("tokens", event.usage.completion_tokens)
        for choice in event.choices:
            transcript.add("text", choice.delta.content)
            for part in choice.delta.tool_calls or []:
                if part.id:
                    call = {
                        "id": part.id,
                        "type": "function",
                        "function": {"name": part.function.name, "arguments": ""},
                    }
                call["function"]["arguments"] += part.function.arguments or ""
                transcript.add("arguments", part.function.arguments)
            transcript.add("finish", choice.finish_reason)
    transcript.add("call", call.get("function"))
    return call


lead(talk)
