"""A model as the planner sees it: layers by the kind of their attention, and the sizes of its weights.

It is read from the model's `config.json`: one of those bundled here (of the models that have presets) or that of a
directory. What the arithmetic does not cover (state-space and linear attention layers) is refused, not guessed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from math import ceil
from pathlib import Path
from typing import Any, Literal

MXFP4_BITS = 4.25
"""Four bits and a scale of eight bits for each 32 values."""
ELEMENT_BYTES = 2
"""Of a weight that is not quantised: vLLM loads float32 checkpoints in half precision, too."""
SCALED_8_BIT = ("fp8", "fbgemm_fp8", "compressed-tensors")
FOUR_BIT = ("awq", "gptq")


SIZES = {
    "hidden_size": (1, 10**6),
    "num_attention_heads": (1, 10**5),
    "num_hidden_layers": (1, 10_000),
    "vocab_size": (1, 10**8),
    "num_key_value_heads": (0, 10**5),
    "head_dim": (0, 10**5),
    "max_position_embeddings": (0, 10**10),
}
"""The least and far more than the most that a model has. 0: as if it were not there."""


class ModelError(Exception):
    """The model is not known or not covered. The message is one clear line for the person who asked."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Attention of one layer. `span` is how many tokens back it sees; `None` for all."""

    kind: Literal["full", "sliding", "local"]
    span: int | None = None


@dataclass(frozen=True, slots=True)
class Experts:
    """The routed experts of all layers together."""

    count: int
    layers: int
    hidden: int
    intermediate: int
    bits: float
    """Of one weight, scales included."""
    has_bias: bool

    @property
    def bytes(self) -> float:
        return self.padded_bytes(self.intermediate, self.hidden, self.hidden, self.intermediate)

    def padded_bytes(self, gate_rows: int, gate_columns: int, down_rows: int, down_columns: int) -> float:
        """When both gate matrices take gate_rows x gate_columns and the third down_rows x down_columns."""
        weights = 2 * gate_rows * gate_columns + down_rows * down_columns
        bias = 2 * (2 * gate_rows + down_rows) if self.has_bias else 0
        return self.count * self.layers * (weights * self.bits / 8 + bias)


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    layers: tuple[Layer, ...]
    heads: int
    kv_heads: int
    head_dim: int
    latent_dim: int | None
    """Multi-head latent attention keeps one vector of this length for each token, on every GPU; `None` elsewhere."""
    hidden: int
    vocabulary: int
    max_context: int
    embedding_bytes: float
    """One of the two matrices between tokens and vectors."""
    tied: bool
    """Both are the same matrix."""
    dense_bytes: float
    """Everything in the layers but routed experts."""
    experts: Experts | None

    @property
    def weight_bytes(self) -> float:
        """As in the checkpoint."""
        ends = self.embedding_bytes * (1 if self.tied else 2)
        return ends + self.dense_bytes + (self.experts.bytes if self.experts else 0.0)

    @property
    def is_hybrid(self) -> bool:
        """Layers with different attention share one pool of blocks."""
        return len(set(self.layers)) > 1

    @property
    def is_mxfp4(self) -> bool:
        return self.experts is not None and self.experts.bits == MXFP4_BITS

    def cache_bytes(self, element_bytes: int) -> int:
        """KV of one token in all layers that keep everything, on one GPU or divided over several."""
        return sum(layer.kind == "full" for layer in self.layers) * self.token_bytes(1, element_bytes)

    def token_bytes(self, tensor_parallel: int, element_bytes: int) -> int:
        """KV of one token in one layer on one GPU. Heads that are fewer than the GPUs are held several times."""
        if self.latent_dim is not None:
            return self.latent_dim * element_bytes
        return 2 * ceil(self.kv_heads / tensor_parallel) * self.head_dim * element_bytes


def bundled() -> list[str]:
    files = (entry.name for entry in resources.files("workers.planner").joinpath("configs").iterdir())
    return sorted(file.removesuffix(".json") for file in files if file.endswith(".json"))


def load(name: str) -> Model:
    """`name` is a path (of a directory or its config.json) or the name of a bundled model, with or without its owner.

    Raises `ModelError`.
    """
    path = Path(name)
    if name.startswith((".", "/")) or path.is_dir():
        return from_file(path / "config.json" if path.is_dir() else path)
    known = name.rsplit("/", 1)[-1].lower()
    if known not in bundled():
        raise ModelError(f"unknown model {name!r}; known: {', '.join(bundled())}, or a path with a config.json")
    text = resources.files("workers.planner").joinpath("configs", f"{known}.json").read_text(encoding="utf-8")
    return from_config(json.loads(text), name)


def from_file(path: Path) -> Model:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path}: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path}: not a model's config.json")
    return from_config(config, str(path.parent))


def from_config(whole: Mapping[str, Any], name: str) -> Model:
    """A model from its config.json. Of a model that also sees or hears, the part that reads text."""
    try:
        config = {**whole, **(whole.get("text_config") or {})}
        check_sizes(config)
        return read(config, name)
    except KeyError as error:
        raise ModelError(f"the config.json of {name} has no {error.args[0]!r}") from error
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:  # lists where numbers are expected, say
        raise ModelError(f"the config.json of {name} is not understood: {error}") from error


def check_sizes(config: Mapping[str, Any]) -> None:
    """Raises `ValueError` for what would be counted with and is no number, or none of a model. Missing is another
    matter."""
    for key, (least, most) in SIZES.items():
        size = config.get(key)
        if size is not None and not (type(size) is int and least <= size <= most):
            raise ValueError(f"{key} is {str(size)[:40]}, expected a whole number from {least} to {most}")


def read(config: Mapping[str, Any], name: str) -> Model:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    bits = linear_bits(config)
    head_dim = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads") or heads
    rank = config.get("kv_lora_rank")
    layers = layers_of(config, name)
    experts = experts_of(config, len(layers), bits)
    attention = (
        latent_attention(config, hidden, heads)
        if rank
        else grouped_attention(config, hidden, heads, kv_heads, head_dim)
    )
    return Model(
        name=name,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        latent_dim=rank + config["qk_rope_head_dim"] if rank else None,
        hidden=hidden,
        vocabulary=config["vocab_size"],
        max_context=config.get("max_position_embeddings") or 0,
        embedding_bytes=config["vocab_size"] * hidden * ELEMENT_BYTES,
        tied=bool(config.get("tie_word_embeddings", False)),
        dense_bytes=dense_bytes(config, len(layers), attention, experts, bits),
        experts=experts,
    )


def linear_bits(config: Mapping[str, Any]) -> float:
    """Of one weight of the linear layers, scales included. MXFP4 concerns experts only."""
    quantization = config.get("quantization_config") or {}
    method = quantization.get("quant_method")
    if method in FOUR_BIT:
        bits, group = quantization.get("bits", 4), quantization.get("group_size", 128)
        return float(bits + (16 + bits) / group if group > 0 else bits)
    return 8.0 if method in SCALED_8_BIT else 8.0 * ELEMENT_BYTES


def layers_of(config: Mapping[str, Any], name: str) -> tuple[Layer, ...]:
    count = config["num_hidden_layers"]
    kinds: list[str] = config.get("layer_types") or kinds_of(config, count)
    if len(kinds) != count:
        raise ModelError(f"the config.json of {name} names {len(kinds)} layer_types for {count} layers")
    return tuple(layer_of(kind, config, name) for kind in kinds)


def kinds_of(config: Mapping[str, Any], count: int) -> list[str]:
    """Where a config does not list them: what the model's code makes of it."""
    if config.get("model_type") == "gpt_oss":
        return ["full_attention" if index % 2 else "sliding_attention" for index in range(count)]
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return ["full_attention"] * count
    period = config.get("sliding_window_pattern")
    if period:  # every `period`-th layer sees everything
        return ["sliding_attention" if (index + 1) % period else "full_attention" for index in range(count)]
    return ["sliding_attention"] * count


def layer_of(kind: str, config: Mapping[str, Any], name: str) -> Layer:
    match kind:
        case "full_attention":
            return Layer("full")
        case "sliding_attention":
            return Layer("sliding", config["sliding_window"])
        case "chunked_attention":
            return Layer("local", config["attention_chunk_size"])
    raise ModelError(f"{name} has layers of {kind}, which the planner does not cover")


def experts_of(config: Mapping[str, Any], layers: int, linear: float) -> Experts | None:
    count = config.get("num_local_experts") or config.get("n_routed_experts") or config.get("num_experts")
    if not count:
        return None
    quantization = config.get("quantization_config") or {}
    is_mxfp4 = quantization.get("quant_method") == "mxfp4"
    return Experts(
        count=count,
        layers=layers - config.get("first_k_dense_replace", 0),
        hidden=config["hidden_size"],
        intermediate=config.get("moe_intermediate_size") or config["intermediate_size"],
        bits=MXFP4_BITS if is_mxfp4 else linear,
        has_bias=is_mxfp4,
    )


def grouped_attention(config: Mapping[str, Any], hidden: int, heads: int, kv_heads: int, head_dim: int) -> int:
    """Weights of one layer's attention."""
    width = (heads + 2 * kv_heads) * head_dim
    bias = width + hidden if config.get("attention_bias") else 0
    return hidden * width + heads * head_dim * hidden + bias


def latent_attention(config: Mapping[str, Any], hidden: int, heads: int) -> int:
    """Weights of one layer's multi-head latent attention."""
    rank, rope, nope = config["kv_lora_rank"], config["qk_rope_head_dim"], config["qk_nope_head_dim"]
    value = config["v_head_dim"]
    query_rank = config.get("q_lora_rank")
    query = heads * (nope + rope)
    queries = query_rank * (hidden + query) if query_rank else hidden * query
    return int(queries + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden)


def dense_bytes(config: Mapping[str, Any], layers: int, attention: int, experts: Experts | None, bits: float) -> float:
    """All layers without their routed experts. MXFP4 models keep these unquantised."""
    hidden = config["hidden_size"]
    without_experts = layers - (experts.layers if experts else 0)
    linear = layers * attention + without_experts * 3 * hidden * config["intermediate_size"]
    routers = 0
    if experts:
        shared = config.get("n_shared_experts") or 0
        linear += experts.layers * shared * 3 * hidden * experts.intermediate
        routers = experts.layers * experts.count * hidden
    norms = layers * 2 * hidden
    return float(linear * bits / 8 + (routers + norms) * ELEMENT_BYTES)
