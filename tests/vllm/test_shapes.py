"""The embedded replica against real vLLM: every route that a gateway uses, and every error, has the same shape."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any

import httpx
import pytest

from tests.vllm import shapes

pytestmark = pytest.mark.vllm

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
TURNS = [{"role": "user", "content": "Hello there"}]
FIELDS = [f"field_{number}" for number in range(12)]
PARAMETERS = {"type": "object", "properties": {name: {"type": "string"} for name in FIELDS}, "required": FIELDS}
"""Too many for 40 tokens: with random weights the real model ends no call by itself."""
TOOL = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": PARAMETERS}}
NAMED = {"type": "function", "function": {"name": "weather"}}
FLAT_TOOL = {"type": "function", "name": "weather", "description": "d", "parameters": PARAMETERS}
MESSAGE_TOOL = {"name": "weather", "description": "d", "input_schema": PARAMETERS}
STRICT = {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"], "additionalProperties": False}
STRICT_TOOL = {"type": "function", "function": {"name": "f", "parameters": STRICT, "strict": True}}
FLAT_STRICT_TOOL = {"type": "function", "name": "f", "parameters": STRICT, "strict": True}
MESSAGE_STRICT_TOOL = {"name": "f", "input_schema": STRICT, "strict": True}
NAMED_STRICT = {"type": "function", "function": {"name": "f"}}
"""A grammar holds the real model to these, so its call ends well, nearly always."""
LONG = "hello " * 40_000
"""More tokens than any context in these tests, in whichever tokenizer."""
JSON_TYPE = {"content-type": "application/json"}

ATTEMPTS = 4
"""Random weights now and then draw a token without text, which leaves a hole in a stream."""


@dataclass(frozen=True)
class Case:
    path: str
    body: Any = None
    """A JSON value, or bytes as they are."""
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)

    def send(self, url: str) -> httpx.Response:
        content: dict[str, Any] = {}
        if isinstance(self.body, bytes):
            content = {"content": self.body, "headers": JSON_TYPE | self.headers}
        elif self.body is not None:
            content = {"json": self.body, "headers": self.headers}
        return httpx.request(self.method, url + self.path, timeout=60, trust_env=False, **content)


def chat(**more: Any) -> Case:
    return Case(CHAT, {"model": "tiny", "messages": TURNS, "max_tokens": 6, "ignore_eos": True, **more})


def completion(**more: Any) -> Case:
    return Case(COMPLETIONS, {"model": "tiny", "prompt": "Hello there", "max_tokens": 6, "ignore_eos": True, **more})


def message(**more: Any) -> Case:
    return Case(MESSAGES, {"model": "tiny", "messages": TURNS, "max_tokens": 6, **more})


def response(**more: Any) -> Case:
    return Case(RESPONSES, {"model": "tiny", "input": "Hello there", "max_output_tokens": 6, **more})


def get(path: str) -> Case:
    return Case(path, method="GET")


def without(case: Case, name: str) -> Case:
    return Case(case.path, {key: value for key, value in case.body.items() if key != name})


USAGE = {"include_usage": True}
SOON = {"min_tokens": 4, "max_tokens": 400}
"""Before the string that stops it: else whether any event comes before the last is chance."""
CASES: dict[str, Case] = {
    "health": get("/health"),
    "ping": get("/ping"),
    "ping by post": Case("/ping", b""),
    "version": get("/version"),
    "load": get("/load"),
    "models": get("/v1/models"),
    "one model": get("/v1/models/tiny"),
    "models with a slash": get("/v1/models/"),
    "event sources": get("/kv_event_sources"),
    "chat": chat(),
    "chat, two samples": chat(n=2),
    "chat without model": without(chat(), "model"),
    "chat, log probabilities": chat(logprobs=True, top_logprobs=2),
    "chat, log probabilities, no alternatives": chat(logprobs=True),
    "chat, token ids": chat(return_token_ids=True),
    "chat, parts": chat(messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}]),
    "chat, max_completion_tokens": chat(max_completion_tokens=3),
    "chat stream": chat(stream=True),
    "chat stream, usage": chat(stream=True, stream_options=USAGE),
    "chat stream, continuous usage": chat(
        stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}
    ),
    "chat stream, log probabilities": chat(stream=True, logprobs=True, top_logprobs=1),
    "chat stream, token ids": chat(stream=True, return_token_ids=True),
    "chat, stopped by a string": chat(stop=["e"], **SOON),
    "chat stream, stopped by a string": chat(stop="e", **SOON, stream=True),
    "chat, tools, none needed": chat(tools=[TOOL]),
    "chat, tool cut short": chat(tools=[TOOL], tool_choice=NAMED),
    "chat stream, tool cut short": chat(tools=[TOOL], tool_choice=NAMED, stream=True, max_tokens=40),
    "chat stream, any tool cut short": chat(tools=[TOOL], tool_choice="required", stream=True, max_tokens=40),
    "chat, tool called": chat(
        tools=[STRICT_TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=600, ignore_eos=False
    ),
    "chat, named tool called": chat(tools=[STRICT_TOOL], tool_choice=NAMED_STRICT, max_tokens=600, ignore_eos=False),
    "chat stream, tool called": chat(
        tools=[STRICT_TOOL], tool_choice=NAMED_STRICT, max_tokens=600, ignore_eos=False, stream=True
    ),
    "chat, broken JSON": Case(CHAT, b'{"model": '),
    "chat, no body": Case(CHAT, b""),
    "chat, list as body": Case(CHAT, b"[]"),
    "chat, not UTF-8": Case(CHAT, b'{"model": "\xff"}'),
    "chat as text": Case(CHAT, b'{"messages":[]}', headers={"content-type": "text/plain"}),
    "chat, unknown model": chat(model="nope"),
    "chat, unknown model, stream": chat(model="nope", stream=True),
    "chat without messages": without(chat(), "messages"),
    "chat, empty messages": chat(messages=[]),
    "chat, messages as text": chat(messages="x"),
    "chat, max_tokens -1": chat(max_tokens=-1),
    "chat, max_tokens 0": chat(max_tokens=0),
    "chat, max_tokens as word": chat(max_tokens="abc"),
    "chat, max_tokens 1.5": chat(max_tokens=1.5),
    "chat, max_tokens too large": chat(max_tokens=10_000_000),
    "chat, prompt too long": chat(messages=[{"role": "user", "content": LONG}]),
    "chat, temperature -1": chat(temperature=-1),
    "chat, temperature as word": chat(temperature="hot"),
    "chat, top_p 3": chat(top_p=3),
    "chat, no samples": chat(n=0),
    "chat, too many samples": chat(n=20_000),
    "chat, temperature 3": chat(temperature=3),
    "chat, too many log probabilities": chat(logprobs=True, top_logprobs=21),
    "chat, alternatives alone": chat(top_logprobs=2),
    "chat, min_tokens above the limit": chat(min_tokens=7),
    "chat, min_tokens -1": chat(min_tokens=-1),
    "chat, stream as word": chat(stream="maybe"),
    "chat, stream options alone": chat(stream_options=USAGE),
    "chat, empty salt": chat(cache_salt=""),
    "chat, image": chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
    "chat, choice without tools": chat(tool_choice="required"),
    "chat, choice of another tool": chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "z"}}),
    "chat by get": get(CHAT),
    "chat by delete": Case(CHAT, method="DELETE"),
    "completion": completion(),
    "completion, default length": without(completion(), "max_tokens"),
    "completion, two texts": completion(prompt=["Hello", "there"]),
    "completion, token ids in": completion(prompt=[5, 6, 7]),
    "completion, lists of token ids": completion(prompt=[[5, 6, 7], [8, 9]]),
    "completion, two samples of two": completion(prompt=["Hello", "there"], n=2),
    "completion, echo": completion(echo=True),
    "completion, log probabilities": completion(logprobs=1),
    "completion, token ids out": completion(return_token_ids=True),
    "completion, stopped by a string": completion(stop=["e"], **SOON),
    "completion stream": completion(stream=True),
    "completion stream, usage": completion(stream=True, stream_options=USAGE),
    "completion without prompt": without(completion(), "prompt"),
    "completion, empty prompt": completion(prompt=""),
    "completion, no prompts": completion(prompt=[]),
    "completion, prompt as number": completion(prompt=5),
    "completion, prompt as object": completion(prompt={"a": 1}),
    "completion, nested texts": completion(prompt=[["a"]]),
    "completion, impossible token": completion(prompt=[10**18]),
    "completion, too many token ids": completion(prompt=[5] * 40_000),
    "completion, prompt too long": completion(prompt=LONG),
    "completion, max_tokens too large": completion(max_tokens=10_000_000),
    "completion, max_tokens 0": completion(max_tokens=0),
    "completion, too many log probabilities": completion(logprobs=21),
    "completion, unknown model": completion(model="nope"),
    "tokenize": Case("/tokenize", {"model": "tiny", "prompt": "Hello there"}),
    "tokenize, strings": Case("/tokenize", {"prompt": "Hello there", "return_token_strs": True}),
    "tokenize messages": Case("/tokenize", {"model": "tiny", "messages": TURNS}),
    "tokenize nothing": Case("/tokenize", {"model": "tiny"}),
    "tokenize, unknown model": Case("/tokenize", {"model": "nope", "prompt": "x"}),
    "detokenize": Case("/detokenize", {"model": "tiny", "tokens": [5, 6, 7]}),
    "detokenize nothing": Case("/detokenize", {"model": "tiny"}),
    "message": message(),
    "message, blocks": message(
        system=[{"type": "text", "text": "be"}],
        messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    ),
    "message, stopped by a string": message(stop_sequences=["e"], max_tokens=400),
    "message stream": message(stream=True),
    "message stream, tool cut short": message(
        stream=True, tools=[MESSAGE_TOOL], tool_choice={"type": "tool", "name": "weather"}, max_tokens=40
    ),
    "message, tool cut short": message(tools=[MESSAGE_TOOL], tool_choice={"type": "any"}),
    "message, tool called": message(
        tools=[MESSAGE_STRICT_TOOL], tool_choice={"type": "tool", "name": "f"}, max_tokens=600
    ),
    "message stream, tool called": message(
        tools=[MESSAGE_STRICT_TOOL], tool_choice={"type": "tool", "name": "f"}, max_tokens=600, stream=True
    ),
    "message without max_tokens": without(message(), "max_tokens"),
    "message without messages": without(message(), "messages"),
    "message without model": without(message(), "model"),
    "message, max_tokens 0": message(max_tokens=0),
    "message, unknown role": message(messages=[{"role": "x", "content": "y"}]),
    "message, no turns": message(messages=[]),
    "message, unknown model": message(model="nope"),
    "message, unknown model, stream": message(model="nope", stream=True),
    "message, broken JSON": Case(MESSAGES, b"{"),
    "message as text": Case(MESSAGES, b"{}", headers={"content-type": "text/plain"}),
    "message, prompt too long": message(messages=[{"role": "user", "content": LONG}]),
    "message, max_tokens too large": message(max_tokens=10_000_000),
    "message by get": get(MESSAGES),
    "count": Case(COUNT, {"model": "tiny", "messages": TURNS}),
    "count with tools": Case(COUNT, {"model": "tiny", "messages": TURNS, "tools": [MESSAGE_TOOL], "system": "x"}),
    "count without messages": Case(COUNT, {"model": "tiny"}),
    "count, unknown model": Case(COUNT, {"model": "nope", "messages": TURNS}),
    "response": response(),
    "response, turns": response(instructions="be nice", input=TURNS, store=False),
    "response, tool turns": response(
        input=[
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "ok"},
        ]
    ),
    "response stream": response(stream=True),
    "response, tools, none needed": response(tools=[FLAT_TOOL]),
    "response stream, tool cut short": response(
        stream=True, tools=[FLAT_TOOL], tool_choice="required", max_output_tokens=40
    ),
    "response, tool called": response(
        tools=[FLAT_STRICT_TOOL], tool_choice={"type": "function", "name": "f"}, max_output_tokens=600
    ),
    "response stream, tool called": response(
        tools=[FLAT_STRICT_TOOL], tool_choice={"type": "function", "name": "f"}, max_output_tokens=600, stream=True
    ),
    "response of nobody": get(f"{RESPONSES}/resp_nope"),
    "cancel of nobody": Case(f"{RESPONSES}/resp_nope/cancel", b""),
    "response after nobody": response(previous_response_id="resp_nope"),
    "response without input": without(response(), "input"),
    "response, empty input": response(input=[]),
    "response, broken JSON": Case(RESPONSES, b"{"),
    "response, unknown model": response(model="nope"),
    "response, prompt too long": response(input=LONG),
    "response, max_output_tokens 0": response(max_output_tokens=0),
    "response by delete": Case(f"{RESPONSES}/resp_nope", method="DELETE"),
    "background without store": response(background=True, store=False),
    "background": response(background=True),
    "embeddings": Case("/v1/embeddings", {"model": "tiny", "input": "x"}),
    "rerank": Case("/v1/rerank", {"model": "tiny", "query": "x", "documents": ["y"]}),
    "score": Case("/v1/score", {"model": "tiny", "text_1": "x", "text_2": "y"}),
    "pooling": Case("/pooling", {"model": "tiny", "input": "x"}),
    "audio": Case("/v1/audio/transcriptions", b"x"),
    "nowhere": get("/nowhere"),
    "root": get("/"),
    "models by post": Case("/v1/models", b"{}"),
    "health by head": Case("/health", method="HEAD"),
    "invocations": Case("/invocations", {"messages": TURNS, "max_tokens": 2}),
    "sleeping, without developer mode": get("/is_sleeping"),
    "tokenizer info": get("/tokenizer_info"),
}

KNOWN_DIFFERENCES = {
    "event sources": "the real replica publishes KV events, as its preset asks; an embedded one has none to publish",
}
"""Cases that are not alike, with the reason."""


@pytest.fixture(scope="session")
def sim_replica(vllm_replica: str) -> Iterator[str]:
    """An embedded replica with the settings of the real one."""
    limit = httpx.get(f"{vllm_replica}/v1/models", trust_env=False).json()["data"][0]["max_model_len"]
    made = response(max_output_tokens=1).send(vllm_replica).json()
    stores = httpx.get(f"{vllm_replica}{RESPONSES}/{made['id']}", trust_env=False).status_code == 200
    options = ["--port", "0", "--model", "tiny", "--block-size", "32", "--max-model-len", str(limit)]
    options += [] if stores else ["--no-response-store"]
    command = [sys.executable, "-m", "workers.sim_replica", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        word, url = process.stdout.readline().split()
        assert word == "ready"
        yield url
        process.send_signal(signal.SIGTERM)


@pytest.mark.parametrize("name", CASES)
def test_answers_in_the_shape_of_vllm(name: str, vllm_replica: str, sim_replica: str) -> None:
    case, found = CASES[name], [""]
    for _ in range(ATTEMPTS):
        real = shapes.of_answer(case.send(vllm_replica))
        ours = shapes.of_answer(case.send(sim_replica))
        found = shapes.differences(real, ours)
        if not found:
            break
    if name in KNOWN_DIFFERENCES:
        assert found, "no longer different: take it out of the table"
    else:
        assert found == []


def test_keeps_responses_as_vllm_does(vllm_replica: str, sim_replica: str) -> None:
    """Retrieve, continue and cancel a made response; without a store these are errors, in both."""

    def tell(url: str) -> list[Any]:
        made = response(store=True).send(url).json()["id"]
        path = f"{RESPONSES}/{made}"
        told = [get(path), Case(f"{path}/cancel", b""), response(previous_response_id=made)]
        return [shapes.of_answer(case.send(url)) for case in told]

    assert tell(sim_replica) == tell(vllm_replica)


def test_takes_the_request_id_as_vllm_does(vllm_replica: str, sim_replica: str) -> None:
    def ids(url: str) -> list[str]:
        headers = {"x-request-id": "mine-1"}
        cases = [chat(max_tokens=1), completion(max_tokens=1), message(max_tokens=1)]
        return [str(Case(case.path, case.body, headers=headers).send(url).json()["id"]) for case in cases]

    assert ids(sim_replica) == ids(vllm_replica)


@pytest.mark.parametrize("length", [31, 32, 33, 64, 320, 330])
def test_caches_as_many_tokens_as_vllm(length: int, vllm_replica: str, sim_replica: str) -> None:
    """A prompt, the same again, and its continuation by its own answer: cached tokens agree to the token."""
    prompt, salt = [(place * 7 + length) % 200 + 50 for place in range(length)], token_hex(8)

    def cached(url: str) -> list[int]:
        counts, tokens = [], prompt
        for _ in range(3):
            case = completion(prompt=tokens, max_tokens=40, return_token_ids=True, cache_salt=salt)
            answer = case.send(url).json()
            counts.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
            if len(counts) == 2:
                tokens = prompt + answer["choices"][0]["token_ids"]
        return counts

    assert cached(sim_replica) == cached(vllm_replica)


def families(url: str) -> dict[str, tuple[str, set[str]]]:
    """Type and label names of each metric family."""
    found: dict[str, tuple[str, set[str]]] = {}
    for line in httpx.get(f"{url}/metrics", trust_env=False).text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            found[name] = (kind, set())
        elif not line.startswith("#") and (match := re.match(r"([\w:]+?)(?:_bucket|_sum|_count)?\{(.*)\} ", line)):
            name = match[1] if match[1] in found else line.split("{")[0]
            found[name][1].update(re.findall(r'(\w+)="', match[2]))
    return found


def test_metrics_are_a_part_of_those_of_vllm(vllm_replica: str, sim_replica: str) -> None:
    completion().send(vllm_replica)
    real, ours = families(vllm_replica), families(sim_replica)
    assert len([name for name in ours if name.startswith("vllm:")]) > 30
    for name, (kind, labels) in ours.items():
        real_kind, real_labels = real[name]
        assert kind == real_kind, name
        if name == "vllm:cache_config_info":
            assert labels <= real_labels
        else:
            assert labels == real_labels, name
