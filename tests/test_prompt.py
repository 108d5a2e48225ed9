"""From bodies to routing keys: what shares a prefix, what must not, and what never fails."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.core.model import RouteRequest, Space
from gateway.prompt import MEDIA_KEY_BYTES, NotJson, Shape, parse
from gateway.skeleton import skeleton

BLOCK = 64
LONG = "All work and no play makes a long system prompt. " * 20


def read(body: Any, shape: Shape = Shape.CHAT, **options: Any) -> RouteRequest:
    raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return parse(raw, shape, block_bytes=BLOCK, **options)


def chat(*contents: Any, **fields: Any) -> dict[str, Any]:
    roles = ["system", "user", "assistant"]
    messages = [{"role": roles[min(i, 1 + i % 2)], "content": content} for i, content in enumerate(contents)]
    return {"model": "m", "messages": messages, **fields}


def shared(one: RouteRequest, other: RouteRequest) -> int:
    """Leading blocks in common."""
    count = 0
    for a, b in zip(one.blocks, other.blocks, strict=False):
        if a != b:
            break
        count += 1
    return count


def test_the_next_turn_shares_all_full_blocks_of_the_last() -> None:
    first = read(chat(LONG, "question one"))
    second = read(chat(LONG, "question one", "an answer", "question two"))
    assert len(first.blocks) > 10
    assert shared(first, second) == len(first.blocks)


def test_settings_that_the_model_does_not_see_do_not_count() -> None:
    plain = read(chat(LONG, "x"))
    tuned = read(chat(LONG, "x", temperature=0.3, stream=True, max_tokens=5, seed=7, logprobs=True))
    assert plain.blocks == tuned.blocks


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "other"},
        {"cache_salt": "s"},
        {"reasoning_effort": "high"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_changes_the_beginning_of_the_prompt_shares_nothing(fields: dict[str, Any]) -> None:
    assert shared(read(chat(LONG)), read({**chat(LONG), **fields})) == 0


def test_tools_come_before_turns_wherever_they_stand_in_the_body() -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": LONG}}]
    before = read({"model": "m", "tools": tools, "messages": [{"role": "user", "content": "a"}]})
    after = read({"model": "m", "messages": [{"role": "user", "content": "b" * 200}], "tools": tools})
    assert shared(before, after) >= len(before.blocks) - 1 > 10


def test_one_text_part_is_the_same_as_the_plain_string() -> None:
    assert read(chat(LONG)).blocks == read(chat([{"type": "text", "text": LONG}])).blocks


def test_moving_cache_marks_of_anthropic_clients_do_not_break_the_prefix() -> None:
    marked = [{"type": "text", "text": LONG, "cache_control": {"type": "ephemeral"}}]
    plain = [{"type": "text", "text": LONG}]
    assert read(chat(marked), Shape.MESSAGES).blocks == read(chat(plain), Shape.MESSAGES).blocks


def test_the_system_prompt_of_messages_and_the_instructions_of_responses_come_first() -> None:
    system = {"model": "m", "system": LONG, "messages": [{"role": "user", "content": "a"}]}
    other = {"model": "m", "messages": [{"role": "user", "content": "b" * 300}], "system": LONG}
    assert shared(read(system, Shape.MESSAGES), read(other, Shape.MESSAGES)) > 10
    one = {"model": "m", "instructions": LONG, "input": "a"}
    two = {"model": "m", "input": [{"role": "user", "content": "b" * 300}], "instructions": LONG}
    assert shared(read(one, Shape.RESPONSES), read(two, Shape.RESPONSES)) > 10


def test_pictures_count_by_digest_and_as_work() -> None:
    def picture(data: str) -> RouteRequest:
        part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
        return read(chat([{"type": "text", "text": "look"}, part, {"type": "text", "text": LONG}]))

    one, same, other = picture("A" * 100_000), picture("A" * 100_000), picture("B" * 100_000)
    assert one.blocks == same.blocks
    assert shared(one, other) == 0
    assert MEDIA_KEY_BYTES < one.length < MEDIA_KEY_BYTES + 3_000


def test_token_ids_and_text_never_meet() -> None:
    ids = list(range(1, 200))
    tokens = read({"model": "m", "prompt": ids}, Shape.COMPLETION)
    assert tokens.space is Space.TOKENS
    assert tokens.length == 4 * len(ids)
    text = read({"model": "m", "prompt": b"".join(i.to_bytes(4, "little") for i in ids).decode("latin-1")})
    assert not set(tokens.blocks) & set(text.blocks)
    longer = read({"model": "m", "prompt": [*ids, 7, 8, 9]}, Shape.COMPLETION)
    assert shared(tokens, longer) == len(tokens.blocks)


@pytest.mark.parametrize(
    ("prompt", "space", "length"),
    [
        ("", Space.TEXT, 2),
        ([], Space.TEXT, 0),
        ([1, 2, 3], Space.TOKENS, 12),
        ([[1], [2, 3]], Space.TOKENS, 12),
        (["a", "b"], Space.TEXT, 6),
        ([-1, 2**40], Space.TOKENS, 8),
    ],
)
def test_every_shape_of_a_completion_prompt_is_read(prompt: Any, space: Space, length: int) -> None:
    request = read({"model": "m", "prompt": prompt}, Shape.COMPLETION)
    assert (request.space, request.length) == (space, length)


@pytest.mark.parametrize("body", [chat(), {"model": "m"}, chat(None), chat([]), chat(""), chat([{"type": "x"}])])
def test_nothing_to_route_by_means_no_blocks(body: Any) -> None:
    assert list(read(body).blocks) == []


def test_session_keys_in_the_order_of_the_contract() -> None:
    both = chat("x", prompt_cache_key="k", user="u")
    assert read(both, session="header").session == "header"
    assert read(both).session == "k"
    assert read(chat("x", user="u")).session == "u"
    assert read(chat("x")).session is None


def test_sizes_that_policies_read() -> None:
    request = read(chat("x", max_completion_tokens=9, max_tokens=4, n=3))
    assert (request.max_output_tokens, request.samples) == (9, 3)
    odd = read(chat("x", max_tokens="many", n=True))
    assert (odd.max_output_tokens, odd.samples) == (None, 1)


def test_the_model_of_a_form() -> None:
    form = (
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\nRIFF\x00\xff\r\n'
        b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper-1\r\n--b--\r\n'
    )
    assert read(form, Shape.FORM).model == "whisper-1"
    assert read(b"no form at all", Shape.FORM).model is None


@given(st.binary(max_size=200), st.sampled_from(list(Shape)))
@settings(max_examples=300)
def test_any_bytes_are_read_or_refused(body: bytes, shape: Shape) -> None:
    try:
        read(body, shape)
    except NotJson:
        with pytest.raises((msgspec.DecodeError, UnicodeDecodeError)):
            msgspec.json.decode(body)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FIELDS = ["model", "messages", "prompt", "input", "tools", "system", "instructions", "user", "n", "max_tokens"]


@given(st.dictionaries(st.sampled_from(FIELDS), JSON), st.sampled_from(list(Shape)))
@settings(max_examples=500, suppress_health_check=[HealthCheck.too_slow], deadline=None)  # a busy machine is no fault
def test_json_of_any_shape_is_read(body: dict[str, Any], shape: Shape) -> None:
    assert read(body, shape).length >= 0


MANY = 70_000
"""Elements, more than are looked into."""


@pytest.mark.parametrize(
    ("shape", "body"),
    [
        (Shape.CHAT, b'{"model":"m","messages":[%b{}]}' % (b"{}," * MANY)),
        (Shape.CHAT, b'{"model":"m","messages":[{"role":"user","content":[%b{}]}]}' % (b"{}," * MANY)),
        (Shape.MESSAGES, b'{"model":"m","messages":[%b{}]}' % (b"{ } ," * MANY)),
        (Shape.RESPONSES, b'{"model":"m","input":[%b{}]}' % (b"{}," * MANY)),
        (Shape.COMPLETION, b'{"model":"m","prompt":[%b[1]]}' % (b"[1]," * MANY)),
        (Shape.COMPLETION, b'{"model":"m","prompt":[ %b""]}' % (b'"" , ' * MANY)),
        (Shape.COMPLETION, b'{"model":"m","prompt":[%b""]}' % (b'"\\\\",' * MANY)),
        (Shape.COMPLETION, b'{"model":"m","prompt":["", %b1]}' % (b"1," * 2 * MANY)),
        (Shape.COMPLETION, b'{"model":"m","prompt":[%b1]}' % (b"1," * 16 * MANY)),
        (Shape.COMPLETION, b'{"model":"m","prompt":[[1],%b1]}' % (b"1," * 16 * MANY)),
        (Shape.CHAT, b'{"model":"m","messages":[],"x":[%b""],"text":"%b"}' % (b'"",' * 8 * MANY, b"{" * MANY)),
        (Shape.COMPLETION, b'{"model":"m","prompt":[%b null]}' % (b"null," * MANY)),
    ],
)
def test_too_many_elements_are_not_looked_into(monkeypatch: pytest.MonkeyPatch, shape: Shape, body: bytes) -> None:
    decoders = ["chat", "messages", "responses", "parts", "items", "any", "ids", "id_lists"]
    for name in (f"decode_{one}" for one in decoders):
        monkeypatch.setattr(f"gateway.prompt.{name}", refuse_to_decode)
    request = read(body, shape)
    assert (request.model, request.length) == ("m", len(body))
    assert request.blocks == ()


def refuse_to_decode(source: Any) -> None:
    raise AssertionError("one object for each element")


@pytest.mark.parametrize("ends", ["", "\\", '"', '\\"', "{", "\n"])
def test_what_texts_hold_is_no_element(ends: str) -> None:
    """Agents send files and answers of tools: a megabyte of JSON in a text has more brackets than any conversation."""
    rows = '{"a":[1]},' * MANY + ends
    whole, before = read(chat(LONG, rows, LONG, rows)), read(chat(LONG, rows))
    assert shared(whole, before) == len(before.blocks) > 5_000
    batch = read({"model": "m", "prompt": [rows, rows, ends]}, Shape.COMPLETION)
    assert len(batch.blocks) > 5_000
    ids = read({"model": "m", "prompt": [[1, 2]] + [[3]] * 100}, Shape.COMPLETION)
    assert (ids.space, ids.length) == (Space.TOKENS, 4 * 102)


@given(JSON)
@settings(max_examples=500, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_a_skeleton_has_the_structure_and_nothing_of_the_texts(value: Any) -> None:
    source = msgspec.json.encode(value)

    def counted(one: Any) -> Counter[str]:
        match one:
            case str():
                return Counter('"')
            case list():
                return sum(map(counted, one), Counter({"[": 1, ",": max(0, len(one) - 1)}))
            case dict():
                own = Counter({"{": 1, ",": max(0, len(one) - 1), ":": len(one), '"': len(one)})
                return sum(map(counted, one.values()), own)
            case _:
                return Counter()

    expected = counted(value)
    found = skeleton(source, expected['"'])
    assert found is not None
    assert Counter(found.decode()) == +expected
    assert not expected['"'] or skeleton(source, expected['"'] - 1) is None


@pytest.mark.parametrize("field", ["model", "stream", "user", "n", "max_tokens", "cache_salt", "prompt_cache_key"])
def test_fields_of_a_wrong_type_spoil_nothing(field: str) -> None:
    body = chat(LONG, **{field: [{}, {}]})
    assert len(read(body).blocks) > 10
    assert read(body, Shape.PLAIN).model == (None if field == "model" else "m")


def test_long_conversations_and_long_prompts_are_looked_into() -> None:
    turns = [f'turn {at}: {{"tool": {{"output": [{{}}]}}}} ' * 5 for at in range(2_000)]
    whole, before = read(chat(LONG, *turns)), read(chat(LONG, *turns[:-1]))
    assert shared(whole, before) == len(before.blocks) > 5_000
    ids = read({"model": "m", "prompt": list(range(1_000, 131_000))}, Shape.COMPLETION)
    assert (ids.space, ids.length) == (Space.TOKENS, 4 * 130_000)
    batch = read({"model": "m", "prompt": ['say "x" ' * 5_000] * 10}, Shape.COMPLETION)
    assert len(batch.blocks) > 100


def test_content_in_content_is_followed_to_a_depth() -> None:
    def nested(depth: int) -> list[Any]:
        return [{"type": "tool_result", "content": nested(depth - 1) if depth else LONG}]

    assert read(chat(nested(1))).blocks == read(chat(nested(2))).blocks
    assert read(chat(nested(300))).length > len(LONG)
