"""Tokens and answers of the embedded replica: reversible, prefix-stable, and what a schema asks for."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.sim import answers, tokenizer
from workers.sim.answers import Wish


@settings(deadline=None)
@given(st.text())
def test_tokens_turn_back_into_their_text(text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(deadline=None)
@given(st.lists(st.integers(0, tokenizer.VOCABULARY_SIZE - 1)))
def test_every_list_of_ids_has_a_text(ids: list[int]) -> None:
    assert isinstance(tokenizer.decode(ids), str)
    assert [tokenizer.token_ids([tokenizer.token_bytes(token)])[0] for token in ids] == ids


@settings(deadline=None)
@given(st.text(), st.text())
def test_what_follows_changes_at_most_the_last_tokens(start: str, more: str) -> None:
    """A character never spans two tokens, and a token has six bytes at most: only the last one may grow."""
    before, after = tokenizer.encode(start), tokenizer.encode(start + more)
    assert after[: max(0, len(before) - 1)] == before[:-1]


def test_english_has_about_four_bytes_a_token() -> None:
    text = "A gateway in front of several replicas sends a request to the one that already knows its beginning. " * 20
    assert 3.5 < len(text) / len(tokenizer.encode(text)) < 5


def test_blocks_are_chained() -> None:
    one, two = tokenizer.encode("x " + "same words " * 40), tokenizer.encode("y " + "same words " * 40)
    blocks, others = tokenizer.chain(one, 16, 0), tokenizer.chain(two, 16, 0)
    assert len(blocks) == len(one) // 16
    assert not set(blocks) & set(others)
    assert tokenizer.chain(one[:40], 16, 0) == blocks[:2]
    assert tokenizer.chain(one[32:], 16, blocks[1]) == blocks[2:]
    assert not set(tokenizer.chain(one, 16, 1)) & set(blocks)


@settings(deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(1, 300), st.booleans())
def test_an_answer_is_the_text_of_its_tokens(seed: int, limit: int, ignore_eos: bool) -> None:
    answer = answers.compose(Wish(max_tokens=limit, ignore_eos=ignore_eos), seed)
    assert 1 <= len(answer.tokens) <= limit
    assert tokenizer.decode(answer.tokens) == answer.text
    assert "".join(answer.piece(place, place + 1) for place in range(len(answer.tokens))) == answer.text
    assert tokenizer.encode(answer.text) == answer.tokens
    if answer.finish_reason == "length":
        assert len(answer.tokens) == limit
    else:
        assert answer.text.endswith(".")
        assert not ignore_eos


@settings(deadline=None)
@given(st.integers(0, 2**64 - 1), st.text("abcdefg .", min_size=1, max_size=4))
def test_a_stop_string_cuts_the_answer_where_it_first_occurs(seed: int, stop: str) -> None:
    free = answers.compose(Wish(max_tokens=300), seed)
    cut = answers.compose(Wish(max_tokens=300, stop=(stop,)), seed)
    if stop in free.text:
        assert cut.text == free.text[: free.text.index(stop)]
        assert cut.stop_reason == stop
        assert cut.piece(0, len(cut.tokens)) == cut.text
    else:
        assert cut == free


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "object", "properties": {"a": {"type": "string"}, "b": {}}, "required": ["a"]}, {"a": "example"}),
        ({"type": "object", "properties": {"a": {"type": "boolean"}}}, {"a": True}),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 2}, [1, 1]),
        ({"type": ["number", "null"], "minimum": 3}, 3),
        ({"anyOf": [{"const": "x"}, {"type": "string"}]}, "x"),
        ({"enum": ["é", "b"]}, "é"),
        ({"type": "null"}, None),
        ({}, "example"),
        ({"type": "object"}, {}),
    ],
)
def test_json_follows_its_schema(schema: dict[str, Any], value: Any) -> None:
    answer = answers.compose(Wish(max_tokens=300, schema=schema), 0)
    assert json.loads(answer.text) == value
    assert answer.piece(0, len(answer.tokens)) == answer.text


def test_a_schema_that_contains_itself_ends() -> None:
    node: dict[str, Any] = {"type": "object", "properties": {}, "required": ["next"]}
    node["properties"]["next"] = node
    assert "next" in answers.example(node)
