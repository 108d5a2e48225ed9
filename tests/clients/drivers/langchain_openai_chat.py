"""A tool-calling turn with LangChain's ChatOpenAI."""

from __future__ import annotations

import sys
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from transcript import CITY, QUESTION, RESULT, TIMEOUT_SECONDS, Transcript, lead

TOOL: Any = {"type": "function", "function": {"name": "weather", "strict": True, "parameters": CITY}}


def talk(scenario: dict[str, Any], transcript: Transcript) -> None:
    model = ChatOpenAI(
        base_url=f"{sys.argv[1]}/v1",
        api_key="key",  # type: ignore[arg-type]
        model=scenario["model"],
        temperature=scenario["temperature"],
        max_retries=scenario["retries"],
        timeout=TIMEOUT_SECONDS,
        stream_usage=True,
        max_tokens=60,  # type: ignore[call-arg]
    )
    messages: list[Any] = [HumanMessage(QUESTION)]
    asked = say(model.bind_tools([TOOL], tool_choice="required"), scenario, messages, transcript)
    messages += [asked, ToolMessage(RESULT, tool_call_id=asked.tool_calls[0]["id"])]
    say(model.bind_tools([TOOL], tool_choice="none"), scenario, messages, transcript)


def say(model: Any, scenario: dict[str, Any], messages: list[Any], transcript: Transcript) -> AIMessage:
    if scenario["stream"]:
        answer: Any = None
        for piece in model.stream(messages):
            transcript.add("text", piece.content)
            for part in piece.tool_call_chunks:
                transcript.add("arguments", part["args"])
            answer = piece if answer is None else answer + piece
    else:
        answer = model.invoke(messages)
        transcript.add("text", answer.content)
    for call in answer.tool_calls:
        transcript.add("call", [call["name"], call["args"]])
    transcript.add("finish", answer.response_metadata.get("finish_reason"))
    transcript.add("tokens", answer.usage_metadata and answer.usage_metadata["output_tokens"])
    return answer  # type: ignore[no-any-return]


lead(talk)
