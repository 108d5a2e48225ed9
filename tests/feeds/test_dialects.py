"""Pages and lists as other engines than vLLM write them. Where each came from is said in the file, or beside it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from gateway.config import EngineName, load
from gateway.core.model import LoadSnapshot, ModelCard
from gateway.feeds.dialects import (
    DIALECTS,
    LLAMA_CPP,
    OLLAMA,
    PLAIN,
    SGLANG,
    TENSORRT_LLM,
    VLLM,
    dialect_of_greeting,
    dialect_of_owners,
    dialect_of_page,
    read_size,
)
from gateway.feeds.metrics_text import read_load
from gateway.feeds.probes import read_models, with_short_names

PAGES = Path(__file__).parent / "pages"
DOCUMENT = (Path(__file__).parents[2] / "docs" / "engines.md").read_text(encoding="utf-8")


def page_of(name: str) -> bytes:
    return (PAGES / f"{name}.txt").read_bytes()


def test_every_engine_that_can_be_configured_has_a_row() -> None:
    assert set(DIALECTS) == set(get_args(EngineName))


def cells(row: str) -> list[str]:
    line = next(line for line in DOCUMENT.splitlines() if line.startswith(f"| {row} |"))
    return [cell.strip() for cell in line.split("|")[2:-1]]


def documented(row: str) -> list[list[str]]:
    """What stands in code in each cell of a row of the table."""
    return [re.findall(r"`([^`]+)`", cell) for cell in cells(row)]


def test_the_document_has_the_same_names_and_paths() -> None:
    engines = [cell[0] for cell in documented("`engine`")]
    assert engines == list(DIALECTS)
    dialects = [DIALECTS[engine] for engine in engines]
    assert documented("health") == [list(one.health) for one in dialects]
    assert documented("metrics") == [[one.metrics] if one.metrics and one is not PLAIN else [] for one in dialects]
    assert [bool(one.families.kv_usage) for one in dialects] == ["yes" in cell for cell in cells("KV usage")]
    assert [one.salts for one in dialects] == [cell == "yes" for cell in cells("tenants isolated by `cache_salt`")]
    assert [one.counts_tokens for one in dialects] == [cell != "no" for cell in cells("prompts counted by `/tokenize`")]
    for one, cell in zip(dialects, documented("size of the cache"), strict=True):
        assert one.size is None or cell == [one.size]


def test_the_example_of_the_document_is_a_configuration(tmp_path) -> None:
    file = tmp_path / "warmlane.toml"
    file.write_text(re.search(r"```toml\n(.*?)```", DOCUMENT, re.DOTALL)[1], encoding="utf-8")
    assert [one.engine for one in load(file).replicas] == [None, None, "llama.cpp"]


# ---- what the pages say ----------------------------------------------------------------------------------------------


def test_sglang_in_several_engines_is_summed_and_its_ranks_and_priorities_are_not() -> None:
    assert read_load(page_of("sglang"), 7.0, SGLANG.families) == LoadSnapshot(
        taken_at=7.0,
        running=8,
        waiting=2,
        kv_usage=(0.5 * 100_000 + 0.25 * 300_000) / 400_000,
        prefix_queries=16_384,
        prefix_hits=8_160,
        cache_tokens=400_000,
    )


def test_llama_cpp_counts_apart_what_it_found() -> None:
    assert read_load(page_of("llama_cpp"), 7.0, LLAMA_CPP.families) == LoadSnapshot(
        taken_at=7.0, running=2, waiting=3, prefix_queries=2_450 + 1_026, prefix_hits=1_026
    )


def test_llama_cpp_before_it_counted_hits() -> None:
    page = b"llamacpp:prompt_tokens_total 36\nllamacpp:requests_processing 1\n"
    load = read_load(page, 0.0, LLAMA_CPP.families)
    assert (load.running, load.prefix_queries, load.prefix_hits) == (1, 36, None)


def test_of_tensorrt_llm_only_that_is_believed_which_does_not_grow_stale() -> None:
    """Its load is set when requests complete, and stays so on an idle replica."""
    assert read_load(page_of("tensorrt_llm"), 7.0, TENSORRT_LLM.families) == LoadSnapshot(
        taken_at=7.0, prefix_queries=16_384, prefix_hits=8_160, cache_tokens=32_000
    )


def test_blocks_without_their_size_are_no_capacity() -> None:
    assert read_load(b"trtllm_kv_cache_max_blocks 1000\n", 0.0, TENSORRT_LLM.families).cache_tokens is None
    assert read_load(b"trtllm_kv_cache_tokens_per_block 32\n", 0.0, TENSORRT_LLM.families).cache_tokens is None


@pytest.mark.parametrize("value", [b"NaN", b"-1", b"0", b"1e300"])
def test_a_size_that_is_none_is_missing(value: bytes) -> None:
    assert read_load(b"sglang:max_total_num_tokens " + value + b"\n", 0.0, SGLANG.families).cache_tokens is None
    page = b"trtllm_kv_cache_max_blocks 1e14\ntrtllm_kv_cache_tokens_per_block " + value + b"\n"
    assert read_load(page, 0.0, TENSORRT_LLM.families).cache_tokens is None


def test_one_unusable_engine_makes_the_sum_unknown() -> None:
    page = page_of("sglang").replace(b'tp_rank="4"} 3.0', b'tp_rank="4"} NaN')
    load = read_load(page, 0.0, SGLANG.families)
    assert (load.running, load.waiting) == (None, 2)


def test_a_page_in_another_dialect_says_nothing() -> None:
    assert read_load(page_of("sglang"), 7.0, VLLM.families) == LoadSnapshot(taken_at=7.0)
    assert read_load(page_of("sglang"), 7.0, PLAIN.families) == LoadSnapshot(taken_at=7.0)


# ---- sizes that stand elsewhere --------------------------------------------------------------------------------------


def test_llama_cpp_tells_its_slots_and_the_context_of_one() -> None:
    """From b11549, shortened."""
    props = b'{"default_generation_settings":{"params":{},"n_ctx":4096},"total_slots":2,"model_alias":"tiny"}'
    assert read_size(LLAMA_CPP, props) == 8_192


def test_ollama_tells_the_contexts_of_what_is_loaded() -> None:
    """Fields of `api/types.go`, ProcessModelResponse; not seen on a real server."""
    running = {
        "models": [{"name": "a:latest", "size": 5, "context_length": 4096}, {"name": "b", "context_length": 8192}]
    }
    assert read_size(OLLAMA, msgspec.json.encode(running)) == 12_288
    assert read_size(OLLAMA, b'{"models":[]}') is None
    assert read_size(OLLAMA, b'{"models":[{"name":"before-context-lengths"}]}') is None


@pytest.mark.parametrize("dialect", [LLAMA_CPP, OLLAMA])
@pytest.mark.parametrize(
    "page",
    [
        b'{"default_generation_settings":{"n_ctx":4096},"total_slots":9999999999999}',
        b'{"default_generation_settings":{"n_ctx":-4096},"total_slots":2}',
        b'{"models":[{"context_length":1e300}]}',
        b"",
        b"[]",
        b"{}",
        b'{"total_slots":"2"}',
        b'{"models":[1]}',
        b'{"models":7}',
        b"[" * 100_000,
        b"\xff",
    ],
)
def test_a_page_that_tells_no_size_tells_none(dialect, page) -> None:
    assert read_size(dialect, page) is None


# ---- who it is -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page", "dialect"), [("sglang", SGLANG), ("llama_cpp", LLAMA_CPP), ("tensorrt_llm", TENSORRT_LLM)]
)
def test_an_engine_is_recognised_by_the_names_on_its_page(page, dialect) -> None:
    assert dialect_of_page(page_of(page)) is dialect


def test_a_page_that_only_speaks_of_an_engine_is_not_its_own() -> None:
    page = b'# TYPE vllm:num_requests_running gauge\nmy_router_seen{name="sglang:num_running_reqs"} 1\n'
    assert dialect_of_page(page) is None
    assert dialect_of_page(page + b"vllm:num_requests_running 1\n") is VLLM


@pytest.mark.parametrize(
    ("owners", "dialect"),
    [
        (["vllm", "vllm"], VLLM),
        (["sglang"], SGLANG),
        (["tensorrt_llm"], TENSORRT_LLM),
        (["llamacpp"], LLAMA_CPP),
        (["library"], OLLAMA),
        (["vllm", "acme"], None),
        (["acme"], None),
        ([""], None),
        ([], None),
    ],
)
def test_an_engine_is_recognised_by_who_owns_all_its_models(owners, dialect) -> None:
    assert dialect_of_owners(owners) is dialect


def test_ollama_greets() -> None:
    assert dialect_of_greeting(b"Ollama is running") is OLLAMA
    assert dialect_of_greeting(b"") is None
    assert dialect_of_greeting(b"<html>Ollama is running</html>") is None


# ---- lists of models -------------------------------------------------------------------------------------------------


def test_the_list_of_llama_cpp() -> None:
    """From b11549, shortened: other names stand beside the first, and the context of a slot in `meta`."""
    body = (
        b'{"models":[{"name":"tiny"}],"object":"list","data":[{"id":"tiny","aliases":["tiny","small"],"tags":[],'
        b'"object":"model","created":1796070604,"owned_by":"llamacpp","meta":{"n_vocab":260,"n_ctx":4096}}]}'
    )
    card = ModelCard("tiny", created=1796070604, owned_by="llamacpp", max_model_len=4096)
    other = ModelCard("small", created=1796070604, owned_by="llamacpp", root="tiny", max_model_len=4096)
    assert read_models(body) == (card, other)


def test_other_names_that_are_none_are_left_out_and_there_are_not_thousands() -> None:
    odd = read_models(b'{"data":[{"id":"a","aliases":[1,"a","b","b",null]},{"id":"c","aliases":"d"}]}')
    assert [card.id for card in odd] == ["a", "b", "c"]
    many = msgspec.json.encode({"data": [{"id": "a", "aliases": [str(number) for number in range(100_000)]}]})
    assert len(read_models(many)) == 17


def test_models_of_ollama_are_asked_for_without_their_tag_too() -> None:
    cards = (ModelCard("llama3:latest"), ModelCard("qwen3:8b"), ModelCard("phi4:latest"), ModelCard("phi4"))
    assert with_short_names(cards, ":latest") == (*cards, ModelCard("llama3", root="llama3:latest"))


def test_an_entry_without_owner_has_none() -> None:
    assert read_models(b'{"data":[{"id":"a"}]}')[0].owned_by == ""
