"""A tool-calling turn with openai-python, over the Responses API."""

from __future__ import annotations

import sys
from typing import Any

import openai
from transcript import CITY, QUESTION, RESULT, TIMEOUT_SECONDS, Transcript, lead

TOOL: Any = {"type": "function", "name": "weather", "strict": True, "parameters": CITY}

client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="key", timeout=TIMEOUT_SECONDS)


def talk(scenario: dict[str, Any], transcript: Transcript) -> None:
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    call = say(scenario, items, "required", transcript)
    items += [
        {"type": "function_call", "call_id": call["call_id"], "name": call["name"], "arguments": call["arguments"]},
        {"type": "function_call_output", "call_id": call["call_id"], "output": RESULT},
    ]
    say(scenario, items, "none", transcript)


def say(scenario: dict[str, Any], items: list[Any], choice: Any, transcript: Transcript) -> dict[str, Any]:
    asked: dict[str, Any] = {
        "model": scenario["model"],
        "input": items,
        "tools": [TOOL],
        "tool_choice": choice,
        "temperature": scenario["temperature"],
        "max_output_tokens": 60,
        "store": False,
    }
    patient = client.with_options(max_retries=scenario["retries"])
    if not scenario["stream"]:
        return finished(patient.responses.create(**asked), transcript)
    call: dict[str, Any] = {}
    for event in patient.responses.create(**asked, stream=True):
        if transcript.steps[-1:] != [["event", [event.type]]]:  # of a run of deltas one
            transcript.add("event", [event.type])
        if event.type in ("response.completed", "response.incomplete"):
            call = finished(event.response, transcript)
    return call


def finished(response: Any, transcript: Transcript) -> dict[str, Any]:
    transcript.add("finish", response.status)
    transcript.add("text", response.output_text)
    calls = [item.model_dump() for item in response.output if item.type == "function_call"]
    for call in calls:
        transcript.add("call", [call["name"], call["arguments"]])
    return calls[0] if calls else {}


lead(talk)
