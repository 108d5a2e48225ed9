"""The official SDKs against the gateway, and against one replica alone: a client must not be able to tell them apart.

Tests that take `base_url` run twice, straight to a real vLLM and through the gateway.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.vllm.conftest import Fleet, wait_until

pytestmark = pytest.mark.vllm

TIMEOUT_SECONDS = 120.0
MESSAGES: Any = [{"role": "user", "content": "How is the weather in Oslo?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Oslo", "Paris"]}},
    "required": ["city"],
    "additionalProperties": False,
}
# `strict` makes vLLM hold the model to the schema: noise becomes a valid call.
TOOL: Any = {"type": "function", "function": {"name": "weather", "strict": True, "parameters": SCHEMA}}
ANTHROPIC_TOOL: Any = {"name": "weather", "strict": True, "input_schema": SCHEMA}


@pytest.fixture(params=["replica", "gateway"])
def base_url(request: pytest.FixtureRequest) -> str:
    if request.param == "gateway":
        return str(request.getfixturevalue("vllm_fleet").gateway)
    return str(request.getfixturevalue("vllm_replica"))


def openai_client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=TIMEOUT_SECONDS)


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai_client(base_url) as client:
        yield client


@pytest.fixture
def gateway(vllm_fleet: Fleet) -> Iterator[openai.OpenAI]:
    with openai_client(vllm_fleet.gateway) as client:
        yield client


@pytest.fixture
def claude(base_url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=base_url, api_key="unused", max_retries=0, timeout=TIMEOUT_SECONDS) as client:
        yield client


def long_text(seed: int) -> str:
    """3,000 to 4,000 tokens that no other seed shares a block with."""
    dice = random.Random(seed)
    words = ["return", "the", "first", "value", "of", "string", "when", "no", "other", "argument", "was", "given"]
    return " ".join(f"{dice.choice(words)} {dice.randrange(100)}" for _ in range(1_200))


# ---- OpenAI SDK ----------------------------------------------------------------------------------------------------


def test_chat(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=8, temperature=0)
    assert reply.choices[0].message.content
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 8


def test_chat_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=8,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    events = list(stream)
    assert events[0].choices[0].delta.role == "assistant"
    assert "".join(event.choices[0].delta.content or "" for event in events if event.choices)
    assert events[-2].choices[0].finish_reason == "length"
    assert events[-1].usage is not None
    assert events[-1].usage.completion_tokens == 8


def test_chat_stream_has_no_usage_unless_asked(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=4, stream=True)
    assert all(event.usage is None and event.choices for event in stream)


def test_tools_round_trip(client: openai.OpenAI) -> None:
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    asked = client.chat.completions.create(
        model="tiny", messages=MESSAGES, tools=[TOOL], tool_choice=choice, max_tokens=100, temperature=0
    )
    calls: Any = asked.choices[0].message.tool_calls
    assert json.loads(calls[0].function.arguments)["city"] in ("Oslo", "Paris")
    answer: Any = {"role": "tool", "tool_call_id": calls[0].id, "content": "rain"}
    message: Any = asked.choices[0].message.model_dump(exclude_none=True)
    told = client.chat.completions.create(
        model="tiny", messages=[*MESSAGES, message, answer], tools=[TOOL], max_tokens=8, temperature=0
    )
    assert told.choices[0].finish_reason in ("length", "stop")
    assert told.usage is not None
    assert asked.usage is not None
    assert told.usage.prompt_tokens > asked.usage.prompt_tokens


def test_tool_call_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        tools=[TOOL],
        tool_choice="required",
        max_tokens=100,
        temperature=0,
        stream=True,
    )
    calls = [call for event in stream for choice in event.choices for call in choice.delta.tool_calls or []]
    first = [call.function.arguments or "" for call in calls if call.index == 0 and call.function]
    assert json.loads("".join(first))["city"] in ("Oslo", "Paris")


@pytest.mark.parametrize("prompt", ["Once upon a time", [5, 6, 7, 8, 9]], ids=["text", "token-ids"])
def test_completions(client: openai.OpenAI, prompt: Any) -> None:
    reply = client.completions.create(model="tiny", prompt=prompt, max_tokens=6, temperature=0)
    streamed = client.completions.create(model="tiny", prompt=prompt, max_tokens=6, temperature=0, stream=True)
    assert "".join(event.choices[0].text for event in streamed) == reply.choices[0].text != ""


def test_completions_of_several_prompts(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="tiny", prompt=["one", "two", "three"], max_tokens=3, temperature=0)
    assert [choice.index for choice in reply.choices] == [0, 1, 2]


def test_responses(client: openai.OpenAI) -> None:
    reply = client.responses.create(model="tiny", input="How are you?", max_output_tokens=8, temperature=0)
    assert reply.output_text
    events = list(client.responses.create(model="tiny", input="How are you?", max_output_tokens=8, stream=True))
    assert events[0].type == "response.created"
    assert events[-1].type in ("response.completed", "response.incomplete")
    assert any(event.type == "response.output_text.delta" for event in events)


def test_models(client: openai.OpenAI) -> None:
    models = client.models.list().data
    assert [model.id for model in models] == ["tiny"]
    assert models[0].model_dump()["max_model_len"] == 16_384


def test_model_of_the_gateway_can_be_retrieved(gateway: openai.OpenAI) -> None:
    assert gateway.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        gateway.models.retrieve("nope")


# ---- errors pass through as the same exception ---------------------------------------------------------------------


def test_unknown_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="The model `nope` does not exist"):
        client.chat.completions.create(model="nope", messages=MESSAGES)


def test_unknown_model_has_the_openai_code(gateway: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        gateway.chat.completions.create(model="nope", messages=MESSAGES)
    assert refused.value.code == "model_not_found"


def test_prompt_too_long(client: openai.OpenAI) -> None:
    long: Any = [{"role": "user", "content": "word " * 20_000}]
    with pytest.raises(openai.BadRequestError, match="maximum context length is 16384 tokens"):
        client.chat.completions.create(model="tiny", messages=long)


@pytest.mark.parametrize("stream", [False, True])
def test_wrong_parameter(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=-1, stream=stream)


def test_embeddings_of_a_generating_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="tiny", input="text")


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"model": "tiny"}', b"\xff"], ids=["cut", "list", "empty", "bytes"])
def test_a_body_that_makes_no_sense_is_the_clients_fault(base_url: str, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    reply = httpx.post(f"{base_url}/v1/chat/completions", content=body, headers=headers, trust_env=False)
    assert reply.status_code == 400


# ---- Anthropic SDK -------------------------------------------------------------------------------------------------


def test_messages(claude: anthropic.Anthropic) -> None:
    reply = claude.messages.create(model="tiny", max_tokens=8, messages=MESSAGES, system="Be brief.")
    assert reply.content[0].type == "text"
    assert reply.usage.output_tokens == 8


def test_messages_stream(claude: anthropic.Anthropic) -> None:
    with claude.messages.stream(model="tiny", max_tokens=8, messages=MESSAGES) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert final.usage.output_tokens == 8


def test_messages_tool_call(claude: anthropic.Anthropic) -> None:
    choice: Any = {"type": "tool", "name": "weather"}
    reply = claude.messages.create(
        model="tiny", max_tokens=100, messages=MESSAGES, tools=[ANTHROPIC_TOOL], tool_choice=choice
    )
    assert reply.content[0].type == "tool_use"
    assert reply.content[0].input["city"] in ("Oslo", "Paris")


def test_count_tokens(claude: anthropic.Anthropic) -> None:
    assert claude.messages.count_tokens(model="tiny", messages=MESSAGES).input_tokens > 5


def test_messages_unknown_model(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="The model `nope` does not exist"):
        claude.messages.create(model="nope", max_tokens=8, messages=MESSAGES)


# ---- the bytes are the replica's -----------------------------------------------------------------------------------

# What two equal requests to one replica differ in.
VARYING = re.compile(rb'"(id|created|created_at)":("[^"]*"|\d+)')

# vLLM puts tokens that are ready together into one event, so two streams of a busy machine may differ in their cuts.
ATTEMPTS = 20


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2}),
        ("/v1/completions", {"prompt": "Grüße ☃"}),
        ("/v1/completions", {"prompt": [5, 6, 7], "return_token_ids": True}),
        ("/v1/messages", {"messages": MESSAGES}),
    ],
    ids=["chat", "completions", "token-ids", "messages"],
)
def test_answer_is_byte_for_byte_the_replicas(
    vllm_fleet: Fleet, vllm_replica: str, path: str, body: dict[str, Any], stream: bool
) -> None:
    # Less than one block of prompt: cached tokens, which are another order of arithmetic, play no part.
    content = json.dumps({"model": "tiny", "max_tokens": 8, "temperature": 0, "stream": stream, **body})
    headers = {"content-type": "application/json", "x-request-id": "same"}
    with httpx.Client(trust_env=False, timeout=TIMEOUT_SECONDS, headers=headers) as http:
        for _ in range(ATTEMPTS if stream else 1):
            direct, through = (http.post(url + path, content=content) for url in (vllm_replica, vllm_fleet.gateway))
            assert direct.status_code == through.status_code == 200
            assert direct.headers["content-type"] == through.headers["content-type"]
            expected, relayed = (VARYING.sub(rb'"\1":0', reply.content) for reply in (direct, through))
            if relayed == expected:
                return
    assert relayed == expected


# ---- warm prefixes -------------------------------------------------------------------------------------------------


class Sent:
    """One chat request through the gateway: where it went, what the gateway predicted and what vLLM reported."""

    def __init__(self, gateway: openai.OpenAI, text: str, question: str) -> None:
        messages: Any = [{"role": "system", "content": text}, {"role": "user", "content": question}]
        raw = gateway.chat.completions.with_raw_response.create(model="tiny", messages=messages, max_tokens=2)
        usage = raw.parse().usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        self.replica = raw.headers["x-warmlane-replica"]
        self.predicted = int(raw.headers["x-warmlane-cached-tokens"])
        self.prompt_tokens = usage.prompt_tokens
        self.cached_tokens = usage.prompt_tokens_details.cached_tokens or 0


def test_the_same_long_prefix_returns_to_its_warm_replica(gateway: openai.OpenAI, vllm_fleet: Fleet) -> None:
    text = long_text(seed=100)
    cold = Sent(gateway, text, "What is this?")
    assert cold.prompt_tokens >= 3_000
    assert cold.replica in vllm_fleet.replicas
    for question in ("Who wrote it?", "When?"):
        warm = Sent(gateway, text, question)
        assert warm.replica == cold.replica
        assert warm.cached_tokens > 0.9 * warm.prompt_tokens
        # The gateway counts bytes and learns from `usage` how many make a token.
        assert 0.5 < warm.predicted / warm.cached_tokens < 2


def test_token_ids_are_prefixes_too(gateway: openai.OpenAI) -> None:
    dice = random.Random(200)
    prompt = [dice.randrange(5, 4_096) for _ in range(3_200)]
    first = gateway.completions.with_raw_response.create(model="tiny", prompt=prompt, max_tokens=2)
    second = gateway.completions.with_raw_response.create(model="tiny", prompt=[*prompt, 7, 8], max_tokens=2)
    assert second.headers["x-warmlane-replica"] == first.headers["x-warmlane-replica"]
    usage = second.parse().usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 3_200
    assert int(second.headers["x-warmlane-cached-tokens"]) > 2_400


def test_different_prefixes_use_both_replicas_and_stay_where_they_are(
    gateway: openai.OpenAI, vllm_fleet: Fleet
) -> None:
    texts = [long_text(seed) for seed in range(300, 308)]
    first = [Sent(gateway, text, "First?") for text in texts]
    assert {sent.replica for sent in first} == set(vllm_fleet.replicas)
    again = [Sent(gateway, text, "Again?") for text in texts]
    assert [sent.replica for sent in again] == [sent.replica for sent in first]
    assert all(sent.cached_tokens > 0.9 * sent.prompt_tokens for sent in again)


# ---- leaving early -------------------------------------------------------------------------------------------------


def running(replica: str) -> float:
    metrics = httpx.get(f"{replica}/metrics", trust_env=False).text
    values = re.findall(r"^vllm:num_requests_(?:running|waiting)\{.*\} (\S+)$", metrics, re.MULTILINE)
    assert values
    return sum(map(float, values))


def test_a_client_that_leaves_frees_the_replica(gateway: openai.OpenAI, vllm_fleet: Fleet) -> None:
    endless: Any = {"ignore_eos": True}
    stream = gateway.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=16_000, stream=True, extra_body=endless
    )
    next(iter(stream))
    wait_until(lambda: sum(map(running, vllm_fleet.replicas)) == 1, "vLLM counts the request")
    stream.close()
    wait_until(lambda: sum(map(running, vllm_fleet.replicas)) == 0, "vLLM aborted the request", seconds=5)
