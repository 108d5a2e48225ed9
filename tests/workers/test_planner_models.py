"""Models are read from their config.json: kinds of layers, KV bytes, weights as they were loaded elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from workers.planner import memory, models
from workers.planner.hardware import GPUS
from workers.planner.models import Layer, ModelError, bundled, from_config, load
from workers.planner.settings import settings_of
from workers.presets import load_all
from workers.presets.versions import NEWEST

LLAMA_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
DEEPSEEK_V3: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "deepseek-v3" / "config.json").read_text())
GEMMA_27B: dict[str, Any] = {
    "text_config": {
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "vision_config": {"hidden_size": 1152},
}


def loaded_gib(name: str, gpu: str, **flags: Any) -> float:
    model = load(name)
    settings = settings_of({key.replace("_", "-"): value for key, value in flags.items()}, model, GPUS[gpu], NEWEST)
    return max(memory.weights_gib(model, GPUS[gpu].mxfp4_kernels, settings))


def test_every_model_with_a_preset_is_bundled() -> None:
    wanted = {preset.model.rsplit("/", 1)[-1].lower() for preset in load_all().values() if preset.gpu and preset.model}
    assert wanted <= set(bundled())


def test_gpt_oss_alternates_windows_and_all() -> None:
    model = load("openai/gpt-oss-120b")
    assert model.layers[:2] == (Layer("sliding", 128), Layer("full"))
    assert len(model.layers) == 36
    assert model.is_hybrid
    assert model.cache_bytes(2) == 36_864
    assert model.cache_bytes(1) == 18_432
    assert load("gpt-oss-20b").cache_bytes(2) == 24_576


def test_checkpoint_sizes_are_those_of_the_files() -> None:
    """65.3 GB and 13.76 GB on the model hub."""
    assert load("openai/gpt-oss-120b").weight_bytes == pytest.approx(65.3e9, rel=0.003)
    assert load("openai/gpt-oss-20b").weight_bytes == pytest.approx(13.76e9, rel=0.003)
    assert load("Qwen/Qwen3-8B").weight_bytes == pytest.approx(8.19e9 * 2, rel=0.003)
    assert from_config(LLAMA_8B, "llama").weight_bytes == pytest.approx(8.03e9 * 2, rel=0.003)
    assert from_config(DEEPSEEK_V3, "deepseek").weight_bytes == pytest.approx(671e9, rel=0.01)
    assert from_config(GEMMA_27B, "gemma").weight_bytes == pytest.approx(27.0e9 * 2, rel=0.01)


@pytest.mark.parametrize(
    ("name", "gpu", "gib"),
    [
        ("gpt-oss-120b", "h200-141", 64.67),  # measured here, vLLM 0.24, Triton
        ("gpt-oss-120b", "h100-80", 64.38),  # vllm#33155, 0.14.1, Triton
        ("gpt-oss-20b", "a100-80", 13.72),  # reported for 0.19, Marlin
    ],
)
def test_loaded_weights_are_those_that_starts_reported(name: str, gpu: str, gib: float) -> None:
    assert loaded_gib(name, gpu) == pytest.approx(gib, rel=0.005)


def test_marlin_pads_as_reported() -> None:
    """vllm#23278: 65.97 GiB of gpt-oss-120b with Marlin."""
    assert loaded_gib("gpt-oss-120b", "a100-80") == pytest.approx(65.97, rel=0.005)


def test_experts_cut_by_tensor_parallelism_are_padded_more_than_whole_ones() -> None:
    whole = loaded_gib("gpt-oss-120b", "a100-80")
    cut = 2 * loaded_gib("gpt-oss-120b", "a100-80", tensor_parallel_size=2)
    dealt = 2 * loaded_gib("gpt-oss-120b", "a100-80", pipeline_parallel_size=2)
    assert cut == pytest.approx(68.6, rel=0.01)
    assert dealt == pytest.approx(whole, rel=0.01)


def test_expert_parallelism_deals_out_experts_and_repeats_the_rest() -> None:
    model = load("gpt-oss-120b")
    alone = loaded_gib("gpt-oss-120b", "h100-80")
    spread = loaded_gib("gpt-oss-120b", "h100-80", data_parallel_size=4, enable_expert_parallel=True)
    rest = (2 * model.embedding_bytes + model.dense_bytes) / 2**30
    assert spread == pytest.approx((alone - rest) / 4 + rest, rel=0.001)


def test_latent_attention_keeps_one_vector_on_every_gpu() -> None:
    model = from_config(DEEPSEEK_V3, "deepseek")
    assert model.latent_dim == 576
    assert model.token_bytes(1, 2) == model.token_bytes(8, 2) == 1_152
    assert model.cache_bytes(2) == 61 * 1_152
    assert not model.is_hybrid


def test_few_kv_heads_are_held_several_times() -> None:
    model = load("qwen3-8b")
    assert model.token_bytes(1, 2) == 8 * 128 * 2 * 2
    assert model.token_bytes(8, 2) == model.token_bytes(16, 2) == 128 * 2 * 2


def test_a_pattern_of_windows_is_spelt_out() -> None:
    model = from_config(GEMMA_27B, "gemma")
    assert [index for index, layer in enumerate(model.layers) if layer.kind == "full"] == [5 + 6 * i for i in range(10)]
    assert model.tied


def test_layer_types_say_more_than_rules() -> None:
    local = {**LLAMA_8B, "num_hidden_layers": 4, "attention_chunk_size": 8192}
    local["layer_types"] = ["chunked_attention"] * 3 + ["full_attention"]
    assert from_config(local, "llama 4").layers == (*[Layer("local", 8192)] * 3, Layer("full"))
    assert from_config({**LLAMA_8B, "sliding_window": 4096}, "mistral").layers == (Layer("sliding", 4096),) * 32
    assert from_config({**LLAMA_8B, "sliding_window": 4096, "use_sliding_window": False}, "qwen").layers[0] == Layer(
        "full"
    )


def test_four_bits_count_with_their_scales() -> None:
    config = {**LLAMA_8B, "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}
    linear = from_config(LLAMA_8B, "llama").dense_bytes
    assert from_config(config, "llama").dense_bytes == pytest.approx(linear * 4.16 / 16, rel=0.001)


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({}, "has no 'hidden_size'"),
        ({**LLAMA_8B, "num_key_value_heads": [8, 4]}, "is not understood: "),
        ({**LLAMA_8B, "text_config": [1]}, "is not understood: "),
        ({**LLAMA_8B, "hidden_size": 0}, "is not understood: hidden_size is 0, expected a whole number from 1"),
        ({**LLAMA_8B, "num_hidden_layers": 0}, "is not understood: num_hidden_layers is 0"),
        ({**LLAMA_8B, "num_hidden_layers": 10**9}, "is not understood: num_hidden_layers"),
        ({**LLAMA_8B, "vocab_size": "32000"}, "is not understood: vocab_size"),
        ({**LLAMA_8B, "max_position_embeddings": float("inf")}, "is not understood: max_position_embeddings"),
        ({**LLAMA_8B, "layer_types": ["full_attention"]}, "names 1 layer_types for 32 layers"),
        ({**LLAMA_8B, "num_hidden_layers": 1, "layer_types": ["linear_attention"]}, "layers of linear_attention"),
    ],
)
def test_what_is_not_covered_is_refused(config: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint):
        from_config(config, "m")


def test_a_path_may_be_a_directory_or_its_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    assert load(str(tmp_path)) == load(str(tmp_path / "config.json"))


@pytest.mark.parametrize("text", ["[]", "{", None])
def test_an_unreadable_config_is_one_clear_line(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json: ") as refused:
        load(str(tmp_path))
    assert "\n" not in str(refused.value)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(
        ModelError, match=r"^unknown model 'gpt-5'; known: gpt-oss-120b, .*or a path with a config\.json$"
    ):
        models.load("gpt-5")
