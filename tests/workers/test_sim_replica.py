"""The embedded replica as a process of its own: what clients see, what it costs in cache and time, how it ends."""

from __future__ import annotations

import asyncio
import functools
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import anthropic
import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

TURNS = [{"role": "user", "content": "Hello there"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}, "days": {"type": "integer"}},
    "required": ["city", "days"],
}
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
PATIENCE_SECONDS = 20.0


@contextmanager
def replica(*options: str) -> Iterator[str]:
    """A replica on a free port, as its URL. It must end with code 0."""
    command = [sys.executable, "-m", "workers.sim_replica", "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            word, url = process.stdout.readline().split()
            assert word == "ready"
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(PATIENCE_SECONDS)
    assert code == 0


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """One fast replica for tests that do not disturb each other."""
    with replica("--model", "m", "--decode-rate", "400", "--pooling", "--dev-mode", "--max-model-len", "8192") as url:
        yield url


def post(url: str, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    return httpx.post(url + path, json=body, headers=headers, timeout=PATIENCE_SECONDS, trust_env=False)


def chat(url: str, **more: Any) -> dict[str, Any]:
    answer = post(url, "/v1/chat/completions", {"messages": TURNS, **more})
    assert answer.status_code == 200, answer.text
    value: dict[str, Any] = answer.json()
    return value


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def metric(url: str, name: str) -> float:
    """Sum of the samples of one name."""
    text = httpx.get(f"{url}/metrics", trust_env=False).text
    found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return sum(sample.value for sample in found if sample.name == name)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.02)


# ---- answers ---------------------------------------------------------------------------------------------------------


def test_equal_requests_get_equal_answers_from_every_replica_of_one_seed() -> None:
    with replica("--decode-rate", "400") as one, replica("--decode-rate", "400") as two:
        assert text_of(chat(one)) == text_of(chat(one)) == text_of(chat(two))
        assert text_of(chat(one, seed=1)) != text_of(chat(one, seed=2))
    with replica("--decode-rate", "400", "--seed", "7") as other:
        assert text_of(chat(other)) != text_of(chat(other, seed=1))


def test_samples_differ_from_each_other(url: str) -> None:
    texts = [choice["message"]["content"] for choice in chat(url, n=3)["choices"]]
    assert len(set(texts)) == 3


def test_a_stream_says_what_a_whole_answer_says(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    stream = client.chat.completions.create(
        model="m",
        messages=[{"role": "user", "content": "Hello there"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    parts, usage, finish = [], None, None
    for part in stream:
        usage = part.usage or usage
        for choice in part.choices:
            parts.append(choice.delta.content or "")
            finish = choice.finish_reason or finish
    whole = chat(url)
    assert "".join(parts) == text_of(whole)
    assert finish == whole["choices"][0]["finish_reason"] == "stop"
    assert usage is not None
    assert usage.completion_tokens == whole["usage"]["completion_tokens"]


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_ends_at_the_token_limit(url: str, limit: str) -> None:
    answer = chat(url, **{limit: 5})
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["choices"][0]["finish_reason"] == "length"


def test_goes_on_to_the_limit_when_told_to_ignore_the_end(url: str) -> None:
    assert chat(url, max_tokens=300, ignore_eos=True)["usage"]["completion_tokens"] == 300


def test_stops_before_a_stop_string(url: str) -> None:
    text = text_of(chat(url))
    word = text.split()[5]
    answer = chat(url, stop=[word])
    assert text_of(answer) == text[: text.index(word)]
    assert answer["choices"][0]["stop_reason"] == word
    assert text_of(chat(url, stop=[word], include_stop_str_in_output=True)).endswith(word)


def test_a_forced_tool_is_called_with_arguments_of_its_schema(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    answer = client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "hi"}], tools=[TOOL], tool_choice="required"
    )
    call = answer.choices[0].message.tool_calls[0]  # type: ignore[index]
    assert answer.choices[0].finish_reason == "tool_calls"
    assert json.loads(call.function.arguments) == {"city": "Oslo", "days": 1}  # type: ignore[union-attr]


def test_json_answers_follow_their_schema(url: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS}}
    assert json.loads(text_of(chat(url, response_format=form))) == {"city": "Oslo", "days": 1}


def test_anthropic_sdk(url: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="none")
    turns: Any = [{"role": "user", "content": "Hello there"}]
    message = client.messages.create(model="m", max_tokens=200, messages=turns)
    with client.messages.stream(model="m", max_tokens=200, messages=turns) as stream:
        streamed = "".join(stream.text_stream)
    assert message.content[0].text == streamed == text_of(chat(url))  # type: ignore[union-attr]
    tool: Any = {"name": "weather", "input_schema": PARAMETERS}
    called = client.messages.create(
        model="m", max_tokens=200, messages=turns, tools=[tool], tool_choice={"type": "any"}
    )
    assert called.stop_reason == "tool_use"
    assert called.content[0].input == {"city": "Oslo", "days": 1}  # type: ignore[union-attr]
    count = client.messages.count_tokens(model="m", messages=turns)
    assert count.input_tokens == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


def test_responses_are_kept_continued_and_cancelled(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    first = client.responses.create(model="m", input="Hello there")
    assert client.responses.retrieve(first.id).output_text == first.output_text == text_of(chat(url))
    second = client.responses.create(model="m", input="And then?", previous_response_id=first.id)
    turns = [*TURNS, {"role": "assistant", "content": first.output_text}, {"role": "user", "content": "And then?"}]
    assert second.output_text == text_of(chat(url, messages=turns))
    body = {"ignore_eos": True}
    slow = client.responses.create(model="m", input="x", background=True, max_output_tokens=8_000, extra_body=body)
    assert slow.status == "queued"
    assert client.responses.cancel(slow.id).status == "cancelled"
    wait_until(lambda: metric(url, "vllm:num_requests_running") == 0, "the cancelled response has left the engine")
    quick = client.responses.create(model="m", input="y", background=True, max_output_tokens=5)
    wait_until(lambda: client.responses.retrieve(quick.id).status == "incomplete", "the background response ended")
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_unknown")


def test_a_background_response_can_be_streamed_later(url: str) -> None:
    made = post(url, "/v1/responses", {"input": "z", "background": True, "max_output_tokens": 20}).json()
    path = f"{url}/v1/responses/{made['id']}?stream=true"
    text = httpx.get(path, timeout=PATIENCE_SECONDS, trust_env=False).text
    kinds = [line.removeprefix("event: ") for line in text.splitlines() if line.startswith("event: ")]
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")


def test_pooling(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    data = client.embeddings.create(model="m", input=["one", "two", "one"]).data
    assert data[0].embedding == data[2].embedding != data[1].embedding
    assert sum(value * value for value in data[0].embedding) == pytest.approx(1.0, abs=1e-5)
    body = {"query": "red apple", "documents": ["blue sky", "a red apple", "red"], "top_n": 2}
    results = post(url, "/v1/rerank", body).json()["results"]
    assert [result["index"] for result in results] == [1, 2]
    scores = post(url, "/v1/score", {"text_1": "red", "text_2": ["red", "blue"]}).json()["data"]
    assert [entry["score"] for entry in scores] == [1.0, 0.0]


# ---- the prefix cache ------------------------------------------------------------------------------------------------


def test_a_repeated_prompt_is_cached_up_to_its_last_block(url: str) -> None:
    turns = [{"role": "user", "content": "repeat " * 200}]
    cold, warm = chat(url, messages=turns, max_tokens=1), chat(url, messages=turns, max_tokens=1)
    length = cold["usage"]["prompt_tokens"]
    assert (cached(cold), cached(warm)) == (0, (length - 1) // 16 * 16)


def test_a_salt_keeps_prompts_apart(url: str) -> None:
    turns = [{"role": "user", "content": "salted " * 200}]
    chat(url, messages=turns, max_tokens=1, cache_salt="a")
    assert cached(chat(url, messages=turns, max_tokens=1, cache_salt="b")) == 0
    assert cached(chat(url, messages=turns, max_tokens=1, cache_salt="a")) > 100


def test_the_next_turn_finds_prompt_and_answer(url: str) -> None:
    turns = [{"role": "user", "content": "A long story. " * 50}]
    first = chat(url, messages=turns, max_tokens=200, ignore_eos=True)
    turns += [{"role": "assistant", "content": text_of(first)}, {"role": "user", "content": "And then?"}]
    assert cached(chat(url, messages=turns)) > first["usage"]["total_tokens"] - 32


def test_token_ids_from_tokenize_hit_what_the_text_left(url: str) -> None:
    text = "The same words as text and as tokens. " * 30
    post(url, "/v1/completions", {"prompt": text, "max_tokens": 1})
    tokens = post(url, "/tokenize", {"prompt": text}).json()["tokens"]
    answer = post(url, "/v1/completions", {"prompt": tokens, "max_tokens": 1}).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == (len(tokens) - 1) // 16 * 16
    assert post(url, "/detokenize", {"tokens": tokens}).json() == {"prompt": text}


def test_metrics_tell_the_same_story(url: str) -> None:
    names = ("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits", "request_success")

    def totals() -> list[float]:
        return [metric(url, f"vllm:{name}_total") for name in names]

    before = totals()
    usages = [chat(url, messages=[{"role": "user", "content": "metric " * 100}])["usage"] for _ in range(2)]
    prompts = sum(usage["prompt_tokens"] for usage in usages)
    hits = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    completions = sum(usage["completion_tokens"] for usage in usages)
    grown = [after - start for after, start in zip(totals(), before, strict=True)]
    assert grown == [prompts, completions, prompts, hits, 2]
    assert hits > 0
    assert metric(url, "vllm:kv_cache_usage_perc") == 0


# ---- time and load ---------------------------------------------------------------------------------------------------


def test_many_streams_at_once_all_complete(url: str) -> None:
    async def one(client: httpx.AsyncClient, number: int) -> int:
        body = {"messages": [{"role": "user", "content": str(number)}], "max_tokens": 30, "ignore_eos": True}
        answer = await client.post(f"{url}/v1/chat/completions", json={**body, "stream": True})
        assert answer.text.endswith("data: [DONE]\n\n")
        return sum('"content":' in line for line in answer.text.splitlines())

    async def all_of_them() -> list[int]:
        limits = httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(timeout=PATIENCE_SECONDS, trust_env=False, limits=limits) as client:
            return await asyncio.gather(*(one(client, number) for number in range(100)))

    assert all(count >= 2 for count in asyncio.run(all_of_them()))
    assert metric(url, "vllm:num_requests_running") == 0


LONG: dict[str, Any] = {"messages": TURNS, "max_tokens": 8_000, "ignore_eos": True}


def test_a_client_that_leaves_a_stream_frees_the_engine(url: str) -> None:
    generated = metric(url, "vllm:generation_tokens_total")
    with (
        httpx.Client(trust_env=False, timeout=PATIENCE_SECONDS) as client,
        client.stream("POST", f"{url}/v1/chat/completions", json={**LONG, "stream": True}) as answer,
    ):
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        assert metric(url, "vllm:num_requests_running") == 1
    wait_until(lambda: metric(url, "vllm:num_requests_running") == 0, "the request has left the engine")
    assert metric(url, "vllm:generation_tokens_total") - generated < LONG["max_tokens"]


async def test_a_client_that_gives_up_waiting_frees_the_engine(url: str) -> None:
    generated = metric(url, "vllm:generation_tokens_total")
    async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE_SECONDS) as client:
        call = asyncio.create_task(client.post(f"{url}/v1/chat/completions", json=LONG))
        await asyncio.to_thread(
            wait_until, lambda: metric(url, "vllm:num_requests_running") == 1, "the request is in the engine"
        )
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    wait_until(lambda: metric(url, "vllm:num_requests_running") == 0, "the request has left the engine")
    assert metric(url, "vllm:generation_tokens_total") - generated < LONG["max_tokens"]


def test_excess_requests_wait_or_are_refused() -> None:
    with (
        replica("--max-num-seqs", "1", "--max-num-queued-reqs", "2", "--decode-rate", "1000") as url,
        ThreadPoolExecutor(3) as pool,
    ):
        body = {"messages": TURNS, "max_tokens": 1_000, "ignore_eos": True}
        futures = [pool.submit(post, url, "/v1/chat/completions", body) for _ in range(3)]
        wait_until(lambda: metric(url, "vllm:num_requests_waiting") == 2, "two requests wait")
        assert metric(url, "vllm:num_requests_running") == 1
        assert metric(url, "vllm:kv_cache_usage_perc") > 0
        refused = post(url, "/v1/chat/completions", body)
        assert refused.status_code == 503
        assert refused.json()["error"]["type"] == "Service Unavailable"
        assert httpx.get(f"{url}/health", trust_env=False).status_code == 200
        assert [future.result().status_code for future in futures] == [200] * 3


def test_a_sleeping_replica_is_healthy_and_hangs_requests(url: str) -> None:
    answers: list[int] = []
    post(url, "/sleep", {})
    caller = threading.Thread(target=lambda: answers.append(chat(url, max_tokens=1)["usage"]["completion_tokens"]))
    caller.start()
    try:
        assert httpx.get(f"{url}/health", trust_env=False).status_code == 200
        assert httpx.get(f"{url}/is_sleeping", trust_env=False).json() == {"is_sleeping": True}
        text = httpx.get(f"{url}/metrics", trust_env=False).text
        assert 'sleep_state="awake"} 0.0' in text
        assert answers == []
    finally:
        post(url, "/wake_up", {})
        caller.join(PATIENCE_SECONDS)
    assert answers == [1]


def test_a_reset_forgets_the_cache(url: str) -> None:
    turns = [{"role": "user", "content": "forget " * 100}]
    chat(url, messages=turns, max_tokens=1)
    assert cached(chat(url, messages=turns, max_tokens=1)) > 0
    assert post(url, "/reset_prefix_cache", {}).status_code == 200
    assert cached(chat(url, messages=turns, max_tokens=1)) == 0


# ---- the door --------------------------------------------------------------------------------------------------------


def test_the_key_guards_what_vllm_guards() -> None:
    with replica("--api-key", "secret") as url:
        body = {"messages": TURNS, "max_tokens": 1}
        refused = post(url, "/v1/chat/completions", body)
        assert (refused.status_code, refused.json()) == (401, {"error": "Unauthorized"})
        assert post(url, "/v1/messages", body, **{"x-api-key": "secret"}).status_code == 401
        assert post(url, "/v1/chat/completions", body, authorization="Bearer secret").status_code == 200
        assert post(url, "/tokenize", {"prompt": "x"}).status_code == 200
        assert httpx.get(f"{url}/metrics", trust_env=False).status_code == 200


def test_knows_one_model_and_no_embeddings_by_default() -> None:
    with replica("--model", "some/name", "--max-model-len", "1000") as url:
        card = httpx.get(f"{url}/v1/models", trust_env=False).json()["data"][0]
        assert (card["id"], card["max_model_len"]) == ("some/name", 1_000)
        assert post(url, "/v1/embeddings", {"input": "x"}).status_code == 404
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.completions.create(model="other", prompt="x")
        with pytest.raises(openai.BadRequestError, match="maximum context length is 1000"):
            client.completions.create(model="some/name", prompt="word " * 2_000)


@pytest.mark.parametrize(
    "body", [b"[" * 100_000, b"\xff\xfe{}", b'{"messages": NaN}', b"null", b'"x"', b'{"prompt": "\\ud800"}']
)
def test_strange_bodies_never_break_it(url: str, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/tokenize"):
        answer = httpx.post(url + path, content=body, headers=headers, trust_env=False)
        assert answer.status_code in (200, 400), (path, answer.text)
    assert httpx.get(f"{url}/health", trust_env=False).status_code == 200


TURN_PARTS = [{"type": "text", "text": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
FULL_BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "user", "content": TURN_PARTS},
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "stop": ["x"],
        "max_tokens": 3,
    },
    "/v1/completions": {"prompt": ["a", [1, 2]], "max_tokens": 3, "n": 1, "logprobs": 1},
    "/v1/messages": {
        "model": "m",
        "max_tokens": 3,
        "system": TURN_PARTS,
        "messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": TURN_PARTS}]}],
        "tools": [{"name": "f", "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": "f"},
    },
    "/v1/responses": {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
        "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
        "text": {"format": {"type": "json_schema", "schema": SCHEMA}},
        "max_output_tokens": 3,
    },
    "/v1/rerank": {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1},
}
WRONG_VALUES: list[Any] = [None, -1, 1.5, "x", [], [1], {}, {"a": 1}, [[]], [None], True, 10**30]


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to everything inside a JSON value."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield (*place, key)
        yield from places(child, (*place, key))


@pytest.mark.parametrize("path", FULL_BODIES)
def test_a_wrong_value_anywhere_is_the_fault_of_the_client(url: str, path: str) -> None:
    with httpx.Client(base_url=url, timeout=PATIENCE_SECONDS, trust_env=False) as client:
        for place in places(FULL_BODIES[path]):
            for wrong in WRONG_VALUES:
                body = json.loads(json.dumps(FULL_BODIES[path]))
                parent = functools.reduce(lambda part, key: part[key], place[:-1], body)
                parent[place[-1]] = wrong
                answer = client.post(path, json=body)
                assert answer.status_code in (200, 400, 404), (body, answer.text)


# ---- the process -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_even_with_a_stream_in_flight(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "workers.sim_replica", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        url = process.stdout.readline().split()[1]
        with (
            httpx.Client(trust_env=False, timeout=PATIENCE_SECONDS) as client,
            client.stream("POST", f"{url}/v1/chat/completions", json={**LONG, "stream": True}) as answer,
        ):
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            process.send_signal(number)
            assert process.wait(PATIENCE_SECONDS) == 0
        assert process.stderr.read() == ""


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--cache-tokens", "1000", "--max-model-len", "2000"], "does not fit into a KV cache of 992 tokens"),
        (["--max-model-len", "1"], "at least 2 tokens"),
        (["--host", "256.0.0.1"], "sim_replica:"),
    ],
)
def test_wrong_settings_are_one_clear_line(options: list[str], complaint: str) -> None:
    command = [sys.executable, "-m", "workers.sim_replica", "--port", "0", *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert ended.returncode == 2
    assert complaint in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
