"""Makes a tiny Llama with random weights as a GGUF file that llama.cpp serves:  make_gguf.py FILE

Nothing but the standard library: version 3 of the format is a header, keys with typed values, a list of tensors, and
their data. The tokenizer has one token for each byte, so a prompt of n ASCII characters has some n tokens.
"""

from __future__ import annotations

import struct
import sys
from array import array
from math import prod
from pathlib import Path
from random import Random
from typing import Any, BinaryIO

WIDTH, INNER, LAYERS, HEADS, KV_HEADS = 64, 128, 2, 2, 1
CONTEXT = 32_768
ALIGNMENT = 32

UINT32, FLOAT32, STRING, ARRAY, INT32 = 4, 6, 8, 9, 5
"""Types of values."""
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
"""Types of tokens."""
TEMPLATE = "{% for one in messages %}{{ one['role'] }}: {{ one['content'] }}\n{% endfor %}assistant:"

TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
TOKEN_TYPES = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, NORMAL]

KEYS: dict[str, tuple[int, Any]] = {
    "general.architecture": (STRING, "llama"),
    "general.name": (STRING, "tiny"),
    "general.file_type": (UINT32, 0),
    "llama.context_length": (UINT32, CONTEXT),
    "llama.embedding_length": (UINT32, WIDTH),
    "llama.block_count": (UINT32, LAYERS),
    "llama.feed_forward_length": (UINT32, INNER),
    "llama.attention.head_count": (UINT32, HEADS),
    "llama.attention.head_count_kv": (UINT32, KV_HEADS),
    "llama.attention.layer_norm_rms_epsilon": (FLOAT32, 1e-5),
    "llama.rope.dimension_count": (UINT32, WIDTH // HEADS),
    "llama.vocab_size": (UINT32, len(TOKENS)),
    "tokenizer.ggml.model": (STRING, "llama"),
    "tokenizer.ggml.tokens": (ARRAY, (STRING, TOKENS)),
    "tokenizer.ggml.scores": (ARRAY, (FLOAT32, [0.0] * len(TOKENS))),
    "tokenizer.ggml.token_type": (ARRAY, (INT32, TOKEN_TYPES)),
    "tokenizer.ggml.unknown_token_id": (UINT32, 0),
    "tokenizer.ggml.bos_token_id": (UINT32, 1),
    "tokenizer.ggml.eos_token_id": (UINT32, 2),
    "tokenizer.chat_template": (STRING, TEMPLATE),
}

KV_WIDTH = WIDTH // HEADS * KV_HEADS
LAYER = {
    "attn_norm": (WIDTH,),
    "attn_q": (WIDTH, WIDTH),
    "attn_k": (WIDTH, KV_WIDTH),
    "attn_v": (WIDTH, KV_WIDTH),
    "attn_output": (WIDTH, WIDTH),
    "ffn_norm": (WIDTH,),
    "ffn_gate": (WIDTH, INNER),
    "ffn_up": (WIDTH, INNER),
    "ffn_down": (INNER, WIDTH),
}
TENSORS: dict[str, tuple[int, ...]] = {
    "token_embd.weight": (WIDTH, len(TOKENS)),
    "output_norm.weight": (WIDTH,),
    "output.weight": (WIDTH, len(TOKENS)),
    **{f"blk.{layer}.{name}.weight": shape for layer in range(LAYERS) for name, shape in LAYER.items()},
}
"""Shapes as the format has them: the row's length first."""


def string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def value(kind: int, one: Any) -> bytes:
    match kind:
        case 8:
            return string(one)
        case 9:
            inner, items = one
            return struct.pack("<IQ", inner, len(items)) + b"".join(value(inner, item) for item in items)
        case _:
            return struct.pack({UINT32: "<I", INT32: "<i", FLOAT32: "<f"}[kind], one)


def write(file: BinaryIO) -> None:
    file.write(struct.pack("<4sIQQ", b"GGUF", 3, len(TENSORS), len(KEYS)))
    for key, (kind, one) in KEYS.items():
        file.write(string(key) + struct.pack("<I", kind) + value(kind, one))
    offset = 0
    for name, shape in TENSORS.items():
        file.write(string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, offset))
        offset += -(-4 * prod(shape) // ALIGNMENT) * ALIGNMENT
    random = Random(7)
    for shape in TENSORS.values():
        file.write(b"\0" * (-file.tell() % ALIGNMENT))
        norms = len(shape) == 1
        file.write(array("f", [1.0 if norms else random.gauss(0.0, 0.05) for _ in range(prod(shape))]).tobytes())


if __name__ == "__main__":
    with Path(sys.argv[1]).open("wb") as made:
        write(made)
